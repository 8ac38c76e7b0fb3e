// attention by wgmma on heads of at most 128 columns that do not fill a tile, for SM90.
#include "forward_mma.cuh"
#include "forward_sm90.cuh"

namespace rlk::cuda::sm90 {

void attention_padded(const AttentionParams& p, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) run_attention_padded<T>(p, stream);
  });
  check(cudaGetLastError(), "launch of attention");
}

}  // namespace rlk::cuda::sm90
