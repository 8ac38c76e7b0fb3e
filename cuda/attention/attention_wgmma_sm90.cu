// The forward of attention by wgmma for SM90. CMake compiles this file once for each `WgmmaForm`; attention.cu compiles
// the form kWhole.
#include "forward_mma.cuh"
#include "forward_sm90.cuh"

namespace rlk::cuda::sm90 {

template <WgmmaForm kForm>
void attention_wgmma(const AttentionParams& p, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) run_attention_wgmma<T, kForm>(p, stream);
  });
  check(cudaGetLastError(), "launch of attention");
}
template void attention_wgmma<WgmmaForm::RLK_PART>(const AttentionParams&, cudaStream_t);

}  // namespace rlk::cuda::sm90
