// The backward of attention by wgmma for SM90. CMake compiles this file once for `WgmmaForm::kPadded` and once for
// `WgmmaForm::kWide`.
#include "gradients/wgmma_sm90.cuh"

namespace rlk::cuda::sm90 {

template <WgmmaForm kForm>
void attention_backward_wgmma(const AttentionBackwardParams& p, GradientKernel kernel, cudaStream_t stream) {
  run_attention_gradients<kForm>(p, kernel, stream);
}
template void attention_backward_wgmma<WgmmaForm::RLK_PART>(const AttentionBackwardParams&, GradientKernel,
                                                            cudaStream_t);

}  // namespace rlk::cuda::sm90
