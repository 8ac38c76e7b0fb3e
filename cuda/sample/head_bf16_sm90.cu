// linear_sample of bfloat16 for SM90.
#include "head_run_sm90.cuh"

namespace rlk::cuda {
void linear_sample_bf16_sm90(const LinearParams& product, const SampleParams& draw, cudaStream_t stream) {
  run_fused_rows<Bf16>(product, draw, stream);
}
}  // namespace rlk::cuda
