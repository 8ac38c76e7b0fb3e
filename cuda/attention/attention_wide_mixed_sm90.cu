// attention, forward, of mixed batches by wgmma on heads of more than 128 columns, for SM90.
#include "mixed.cuh"

namespace rlk::cuda::sm90 {

void attention_wide_mixed(const AttentionParams& p, cudaStream_t stream) {
  const bool vectors = attention_at_16_bytes(p);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
      TileColumns::of(p.head_dim, p.value_dim).keys == 192
          ? run_mixed_by_wgmma<T, 256, WgmmaTile<192, 128>>(p, vectors, stream)
          : run_mixed_by_wgmma<T, 256, WgmmaTile<256>>(p, vectors, stream);
    }
  });
  check(cudaGetLastError(), "launch of attention");
}

}  // namespace rlk::cuda::sm90
