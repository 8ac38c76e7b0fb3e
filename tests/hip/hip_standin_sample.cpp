// Kernels that draw, in the stand-in for libamdhip64.
#include "hip/random_bits/random_bits_kernels.hip"
#include "hip/sample/sample_kernels.hip"
#include "tests/hip/hip_standin_kernels.h"

namespace rlk::hip::standin {
namespace {

const Table kRandomBits = {RLK_OF(rlk_random_bits_words)};
const Table kSample = {
    RLK_OF_FLOATS(rlk_sample_first),      RLK_OF_FLOATS(rlk_sample_truncate),  RLK_OF_FLOATS(rlk_sample_tree),
    RLK_OF_FLOATS(rlk_sample_draw),       RLK_OF_FLOATS(rlk_sample_raw),       RLK_OF_FLOATS(rlk_sample_top),
    RLK_OF_FLOATS(rlk_sample_raw_top),    RLK_OF(rlk_sample_offsets),          RLK_OF(rlk_sample_kept),
    RLK_OF_FLOATS(rlk_sample_process),    RLK_OF_FLOATS(rlk_sample_shard),     RLK_OF_FLOATS(rlk_sample_shard_tree),
    RLK_OF_FLOATS(rlk_sample_shard_draw), RLK_OF_FLOATS(rlk_sample_shard_raw), RLK_OF(rlk_sample_merge),
    RLK_OF(rlk_sample_merge_tree),        RLK_OF_FLOATS(rlk_sample_round),     RLK_OF(rlk_sample_cut)};

}  // namespace
}  // namespace rlk::hip::standin
