// Launches the kernels of the operator `sample`, which sample_rows.cu instantiates. CMake compiles this file once per
// architecture.
#include "launches.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {

void sample(const SampleParams& p, cudaStream_t stream) {
  const SampleParams of_raw = raw_pass(p);
  for (std::int64_t first = 0; first < p.num_rows; first += kSampleChunk) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    by_type_and_mode(p, [&]<class T, Exp kExp>() { sample_rows<T, kExp>(p, chunk, stream); });
    sample_best(p, chunk, false, stream);
    if (p.raw_logprob == nullptr) continue;
    by_type_and_mode(of_raw, [&]<class T, Exp kExp>() { sample_raw<T, kExp>(of_raw, chunk, stream); });
    sample_best(of_raw, chunk, true, stream);
  }
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
