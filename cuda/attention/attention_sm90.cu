// attention for SM90.
#include "forward.cuh"
#include "forward_sm90.cuh"

namespace rlk::cuda {
void attention_sm90(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream) {
  if (plan.kernel != AttentionKernel::kWgmma) return run_attention<true>(p, plan, stream);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) run_attention_wgmma<T>(p, stream);
  });
  check(cudaGetLastError(), "launch of attention");
}
}  // namespace rlk::cuda
