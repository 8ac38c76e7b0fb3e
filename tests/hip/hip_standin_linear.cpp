// Kernels of matrix products and of rows of logits in the stand-in for libamdhip64.
#include "hip/linear/linear_kernels.hip"
#include "hip/linear_logprob/linear_logprob_kernels.hip"
#include "hip/logprob/logprob_kernels.hip"
#include "hip/sequence_logprob/sequence_logprob_kernels.hip"
#include "tests/hip/hip_standin_kernels.h"

namespace rlk::hip::standin {
namespace {

const Table kLinear = {
    RLK_OF_HALVES(rlk_linear_forward_small),
    RLK_OF_HALVES(rlk_linear_forward_large),
    RLK_OF_HALVES(rlk_linear_forward_segments_small),
    RLK_OF_HALVES(rlk_linear_forward_segments_large),
    RLK_OF_HALVES(rlk_linear_input_grad_small),
    RLK_OF_HALVES(rlk_linear_input_grad_large),
    RLK_OF_HALVES(rlk_linear_weight_grad_small),
    RLK_OF_HALVES(rlk_linear_weight_grad_large),
    RLK_OF_FLOATS(rlk_linear_bias_grad),
    RLK_OF_FLOATS(rlk_linear_tree_sum),
};
const Table kLinearLogprob = {RLK_OF(rlk_linear_logprob_rows_vectors), RLK_OF(rlk_linear_logprob_rows_halves)};
const Table kLogprob = {
    RLK_OF_FLOATS(rlk_logprob_groups),    RLK_OF_FLOATS(rlk_logprob_groups_moments), RLK_OF_FLOATS(rlk_logprob_roots),
    RLK_OF_FLOATS(rlk_logprob_smoothing), RLK_OF_FLOATS(rlk_logprob_backward),       RLK_OF(rlk_logprob_merge),
};
const Table kSequenceLogprob = {RLK_OF_FLOATS(rlk_sequence_logprob_sum), RLK_OF_FLOATS(rlk_sequence_logprob_backward)};

}  // namespace
}  // namespace rlk::hip::standin
