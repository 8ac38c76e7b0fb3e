#include "rows.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {

template void sample_rows<Bf16, Exp::kPortable>(const SampleParams&, const SampleChunk&, cudaStream_t);
template void sample_raw<Bf16, Exp::kPortable>(const SampleParams&, const SampleChunk&, cudaStream_t);

}  // namespace rlk::cuda::RLK_CUDA_ARCH
