// attention, forward, of mixed batches by wgmma on heads of at most 128 columns that do not fill a tile, for SM90.
#include "mixed.cuh"

namespace rlk::cuda::sm90 {

void attention_padded_mixed(const AttentionParams& p, cudaStream_t stream) {
  const bool vectors = attention_at_16_bytes(p);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
      const std::int64_t columns = TileColumns::of(p.head_dim, p.value_dim).keys;
      columns == 64   ? run_mixed_by_wgmma<T, 64, WgmmaTile<64, 64, true>>(p, vectors, stream)
      : columns == 80 ? run_mixed_by_wgmma<T, 128, WgmmaTile<80, 80, true>>(p, vectors, stream)
      : columns == 96 ? run_mixed_by_wgmma<T, 128, WgmmaTile<96, 96, true>>(p, vectors, stream)
                      : run_mixed_by_wgmma<T, 128, WgmmaTile<128, 128, true>>(p, vectors, stream);
    }
  });
  check(cudaGetLastError(), "launch of attention");
}

}  // namespace rlk::cuda::sm90
