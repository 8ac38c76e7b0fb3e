// Kernels over rows in the stand-in for libamdhip64: norms, rotations, tables, copies, elementwise operators.
#include "hip/elementwise/elementwise_kernels.hip"
#include "hip/embedding/embedding_kernels.hip"
#include "hip/kv_cache_append/kv_cache_append_kernels.hip"
#include "hip/pack/pack_kernels.hip"
#include "hip/rms_norm/rms_norm_kernels.hip"
#include "hip/rope/rope_kernels.hip"
#include "tests/hip/hip_standin_kernels.h"

namespace rlk::hip::standin {
namespace {

#define RLK_OF_ELEMENTWISE(name, ...) RLK_OF(name),
#define RLK_ELEMENTWISE(operator, function, Params, forms) \
  RLK_ELEMENTWISE_KERNELS(RLK_OF_ELEMENTWISE, function, forms, Params)
const Table kElementwise = {
#include "rlk/elementwise.inc"
};
const Table kEmbedding = {
    RLK_OF_COPIES(rlk_embedding_forward),
    RLK_OF_COPIES(rlk_embedding_clear),
    RLK_OF(rlk_embedding_count_ids),
    RLK_OF(rlk_embedding_count_keys),
    RLK_OF(rlk_embedding_begin),
    RLK_OF(rlk_embedding_scatter_ids),
    RLK_OF(rlk_embedding_scatter_keys),
    RLK_OF_FLOATS(rlk_embedding_rows_vectors),
    RLK_OF_FLOATS(rlk_embedding_rows_elements),
};
const Table kKvCacheAppend = {RLK_OF(rlk_kv_cache_append_vectors), RLK_OF(rlk_kv_cache_append_words),
                              RLK_OF(rlk_kv_cache_append_halves)};
const Table kPack = {RLK_OF(rlk_pack_copy), RLK_OF(rlk_pack_positions), RLK_OF(rlk_pack_scan)};
const Table kRmsNorm = {
    RLK_OF_FLOATS(rlk_rms_norm_forward_wave),
    RLK_OF_FLOATS(rlk_rms_norm_forward_block),
    RLK_OF_FLOATS(rlk_rms_norm_forward_wave_elements),
    RLK_OF_FLOATS(rlk_rms_norm_forward_block_elements),
    RLK_OF_FLOATS(rlk_rms_norm_dx_wave),
    RLK_OF_FLOATS(rlk_rms_norm_dx_block),
    RLK_OF_FLOATS(rlk_rms_norm_dx_wave_elements),
    RLK_OF_FLOATS(rlk_rms_norm_dx_block_elements),
    RLK_OF_FLOATS(rlk_rms_norm_chains_vectors),
    RLK_OF_FLOATS(rlk_rms_norm_chains_elements),
    RLK_OF_FLOATS(rlk_rms_norm_fold),
};
const Table kRope = {RLK_OF_FLOATS(rlk_rope_halves), RLK_OF_FLOATS(rlk_rope_neighbours),
                     RLK_OF_FLOATS(rlk_rope_elements)};

}  // namespace
}  // namespace rlk::hip::standin
