// pack on CUDA, compiled once per architecture.
#include "copy.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void pack_layout(const PackLayoutParams& p, cudaStream_t stream) { run_pack_layout(p, stream); }
void pack(const PackParams& p, const PackGrid& g, cudaStream_t stream) { run_pack<kOverlap>(p, g, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
