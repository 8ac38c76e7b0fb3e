// The forward of attention for mixed batches (kernels.h) by wgmma for SM90. CMake compiles this file once for
// `WgmmaForm::kPadded` and once for `WgmmaForm::kWide`.
#include "mixed.cuh"

namespace rlk::cuda::sm90 {

template <WgmmaForm kForm>
void attention_mixed_wgmma(const AttentionParams& p, cudaStream_t stream) {
  const bool vectors = attention_at_16_bytes(p);
  const std::int64_t columns = TileColumns::of(p.head_dim, p.value_dim).keys;
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked && kForm == WgmmaForm::kWide) {
      columns == 192 ? run_mixed_by_wgmma<T, 256, WgmmaTile<192, 128>>(p, vectors, stream)
                     : run_mixed_by_wgmma<T, 256, WgmmaTile<256>>(p, vectors, stream);
    } else if constexpr (T::kPacked) {
      columns == 64   ? run_mixed_by_wgmma<T, 64, WgmmaTile<64, 64, true>>(p, vectors, stream)
      : columns == 80 ? run_mixed_by_wgmma<T, 128, WgmmaTile<80, 80, true>>(p, vectors, stream)
      : columns == 96 ? run_mixed_by_wgmma<T, 128, WgmmaTile<96, 96, true>>(p, vectors, stream)
                      : run_mixed_by_wgmma<T, 128, WgmmaTile<128, 128, true>>(p, vectors, stream);
    }
  });
  check(cudaGetLastError(), "launch of attention");
}
template void attention_mixed_wgmma<WgmmaForm::RLK_PART>(const AttentionParams&, cudaStream_t);

}  // namespace rlk::cuda::sm90
