// linear_sample of float16 for SM90.
#include "head_run_sm90.cuh"

namespace rlk::cuda {
void linear_sample_f16_sm90(const LinearParams& product, const SampleParams& draw, cudaStream_t stream) {
  run_fused_rows<Fp16>(product, draw, stream);
}
}  // namespace rlk::cuda
