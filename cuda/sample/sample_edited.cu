// Instantiates `finish_edited_rows`, for rows whose finishing blocks also compute the edits. CMake compiles this file
// once per architecture and exponential.
#include "edited_rows.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
template void finish_edited_rows<RLK_PART>(const SampleParams&, const SampleChunk&, cudaStream_t);
}  // namespace rlk::cuda::RLK_CUDA_ARCH
