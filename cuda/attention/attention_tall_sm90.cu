// attention by wgmma with tiles of 192 queries, for SM90.
#include "forward_mma.cuh"
#include "forward_sm90.cuh"

namespace rlk::cuda::sm90 {

void attention_tall(const AttentionParams& p, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
      p.head_dim == 64 ? launch_attention_wgmma<T, WgmmaTile<64, 64, false, 3>, Exp::kHardware>(p, stream)
                       : launch_attention_wgmma<T, WgmmaTile<192, 128, true, 3>, Exp::kHardware>(p, stream);
    }
  });
  check(cudaGetLastError(), "launch of attention");
}

}  // namespace rlk::cuda::sm90
