// Tokens on CUDA, compiled once per architecture.
#include "process.cuh"
#include "rows.cuh"
#include "shards.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void sample(const SampleParams& p, cudaStream_t stream) { run(p, stream); }
void sample_partial(const SamplePartialParams& p, cudaStream_t stream) { run(p, stream); }
void sample_merge(const SampleMergeParams& p, cudaStream_t stream) { run(p, stream); }
void process_logits(const ProcessLogitsParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
