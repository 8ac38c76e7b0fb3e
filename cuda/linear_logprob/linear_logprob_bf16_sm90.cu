// The fused head of bfloat16 for SM90.
#include "run_sm90.cuh"

namespace rlk::cuda {
void linear_logprob_bf16_sm90(const LinearLogprobParams& p, const void* u, cudaStream_t stream) {
  run_heads<Bf16>(p, u, stream);
}
}  // namespace rlk::cuda
