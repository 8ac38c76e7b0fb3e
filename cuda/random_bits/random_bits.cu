// Random words on CUDA, compiled once per architecture.
#include "words.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void random_bits(const RandomBitsParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
