// Kernels of rewards, advantages and masks in the stand-in for libamdhip64.
#include "hip/covariance_mask/covariance_mask_kernels.hip"
#include "hip/gae/gae_kernels.hip"
#include "hip/group_advantage/group_advantage_kernels.hip"
#include "hip/masked_whiten/masked_whiten_kernels.hip"
#include "hip/optimal_token_baseline/optimal_token_baseline_kernels.hip"
#include "hip/scatter_rewards/scatter_rewards_kernels.hip"
#include "hip/shift_labels_packed/shift_labels_packed_kernels.hip"
#include "tests/hip/hip_standin_kernels.h"

namespace rlk::hip::standin {
namespace {

const Table kCovarianceMask = {
    RLK_OF(rlk_covariance_mask_clear),      RLK_OF(rlk_covariance_mask_means),   RLK_OF(rlk_covariance_mask_sums),
    RLK_OF(rlk_covariance_mask_few),        RLK_OF(rlk_covariance_mask_results), RLK_OF(rlk_covariance_mask_tokens),
    RLK_OF(rlk_covariance_mask_priorities), RLK_OF(rlk_covariance_mask_digits),  RLK_OF(rlk_covariance_mask_write),
};
const Table kGae = {RLK_OF(rlk_gae_scan), RLK_OF(rlk_gae_discounted_returns), RLK_OF(rlk_gae_vtrace)};
const Table kGroupAdvantage = {
    RLK_OF(rlk_group_advantage_order_ids), RLK_OF(rlk_group_advantage_merge_ids), RLK_OF(rlk_group_advantage_batch),
    RLK_OF(rlk_group_advantage_ranges),    RLK_OF(rlk_group_advantage_ids),
};
const Table kMaskedWhiten = {
    RLK_OF(rlk_masked_whiten_sums),     RLK_OF(rlk_masked_whiten_mean),   RLK_OF(rlk_masked_whiten_squares),
    RLK_OF(rlk_masked_whiten_variance), RLK_OF(rlk_masked_whiten_tokens),
};
const Table kOptimalTokenBaseline = {RLK_OF(rlk_optimal_token_baseline_scan),
                                     RLK_OF(rlk_optimal_token_baseline_groups)};
const Table kScatterRewards = {RLK_OF(rlk_scatter_rewards_tokens),        RLK_OF(rlk_scatter_rewards_blanks),
                               RLK_OF(rlk_scatter_rewards_sequences),     RLK_OF(rlk_scatter_rewards_spread),
                               RLK_OF(rlk_scatter_rewards_spread_blocks), RLK_OF(rlk_scatter_rewards_rest)};
const Table kShiftLabelsPacked = {RLK_OF(rlk_shift_labels_packed_labels), RLK_OF(rlk_shift_labels_packed_spans),
                                  RLK_OF(rlk_shift_labels_packed_rest), RLK_OF(rlk_shift_labels_packed_turns)};

}  // namespace
}  // namespace rlk::hip::standin
