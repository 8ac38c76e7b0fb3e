// The kernels of attention in the stand-in for libamdhip64.
#include "hip/attention/attention_kernels.hip"
#include "tests/hip/hip_standin_kernels.h"

namespace rlk::hip::standin {
namespace {

const Table kAttention = {
    RLK_OF_FLOATS(rlk_attention_forward_narrow),
    RLK_OF_FLOATS(rlk_attention_forward_wide),
    RLK_OF_FLOATS(rlk_attention_delta),
    RLK_OF_FLOATS(rlk_attention_dq_narrow),
    RLK_OF_FLOATS(rlk_attention_dq_wide),
    RLK_OF_FLOATS(rlk_attention_dkv_narrow),
    RLK_OF_FLOATS(rlk_attention_dkv_wide),
    RLK_OF(rlk_attention_sinks),
    RLK_OF_FLOATS(rlk_attention_partials_narrow),
    RLK_OF_FLOATS(rlk_attention_partials_wide),
    RLK_OF_FLOATS(rlk_attention_merge),
    RLK_OF(rlk_attention_blank),
    RLK_OF(rlk_attention_paths),
    RLK_OF_FLOATS(rlk_attention_tree_forward_narrow),
    RLK_OF_FLOATS(rlk_attention_tree_forward_wide),
    RLK_OF_FLOATS(rlk_attention_tree_dq_narrow),
    RLK_OF_FLOATS(rlk_attention_tree_dq_wide),
    RLK_OF_FLOATS(rlk_attention_tree_dkv_narrow),
    RLK_OF_FLOATS(rlk_attention_tree_dkv_wide),
};

}  // namespace
}  // namespace rlk::hip::standin
