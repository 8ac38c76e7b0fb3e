// Instantiates the launches that compute the rows of `sample`. CMake compiles this file once per architecture, type of
// logits and exponential.
#include "rows.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
template void sample_rows<RLK_PART>(const SampleParams&, const SampleChunk&, cudaStream_t);
template void sample_raw<RLK_PART>(const SampleParams&, const SampleChunk&, cudaStream_t);
}  // namespace rlk::cuda::RLK_CUDA_ARCH
