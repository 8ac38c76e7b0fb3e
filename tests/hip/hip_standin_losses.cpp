// Kernels of losses and of their metrics in the stand-in for libamdhip64.
#include "hip/importance_weights/importance_weights_kernels.hip"
#include "hip/kl/kl_kernels.hip"
#include "hip/mismatch_metrics/mismatch_metrics_kernels.hip"
#include "hip/policy_loss/policy_loss_kernels.hip"
#include "hip/preference_loss/preference_loss_kernels.hip"
#include "hip/value_loss/value_loss_kernels.hip"
#include "tests/hip/hip_standin_kernels.h"

namespace rlk::hip::standin {
namespace {

const Table kImportanceWeights = {
    RLK_OF(rlk_importance_weights_statistics),
    RLK_OF(rlk_importance_weights_sequences),
    RLK_OF(rlk_importance_weights_tokens),
    RLK_OF(rlk_importance_weights_tokens_normalized),
    RLK_OF(rlk_importance_weights_tokens_measured),
    RLK_OF(rlk_importance_weights_sums),
    RLK_OF(rlk_importance_weights_few),
    RLK_OF(rlk_importance_weights_results),
    RLK_OF(rlk_importance_weights_divide),
    RLK_OF_MOMENTS(rlk_importance_weights),
};
const Table kKl = {RLK_OF(rlk_kl_tokens)};
const Table kMismatchMetrics = {
    RLK_OF(rlk_mismatch_metrics_tokens),  RLK_OF(rlk_mismatch_metrics_sums),    RLK_OF(rlk_mismatch_metrics_few),
    RLK_OF(rlk_mismatch_metrics_results), RLK_OF_MOMENTS(rlk_mismatch_metrics),
};
const Table kPolicyLoss = {
    RLK_OF(rlk_policy_loss_statistics),
    RLK_OF(rlk_policy_loss_sequences),
    RLK_OF(rlk_policy_loss_tokens_clipped),
    RLK_OF(rlk_policy_loss_tokens_any),
    RLK_OF(rlk_policy_loss_tokens_sequences),
    RLK_OF(rlk_policy_loss_sums),
    RLK_OF(rlk_policy_loss_few),
    RLK_OF(rlk_policy_loss_results),
    RLK_OF(rlk_policy_loss_scale),
};
const Table kPreferenceLoss = {RLK_OF(rlk_preference_loss_order),   RLK_OF(rlk_preference_loss_merge),
                               RLK_OF(rlk_preference_loss_pairs),   RLK_OF(rlk_preference_loss_unpaired),
                               RLK_OF(rlk_preference_loss_metrics), RLK_OF(rlk_preference_loss_backward)};
const Table kValueLoss = {
    RLK_OF(rlk_value_loss_statistics), RLK_OF(rlk_value_loss_sequences), RLK_OF(rlk_value_loss_tokens),
    RLK_OF(rlk_value_loss_sums),       RLK_OF(rlk_value_loss_few),       RLK_OF(rlk_value_loss_results),
    RLK_OF_MOMENTS(rlk_value_loss),
};

}  // namespace
}  // namespace rlk::hip::standin
