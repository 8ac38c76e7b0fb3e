// Writes the kept sets of shards: one block computes the offsets of all rows, then one block per row writes the row's
// ids. CMake compiles this file once per architecture.
#include "../common/dependent_launch.cuh"
#include "kept_ids.cuh"
#include "kernels/sample/kept.h"
#include "launches.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

__global__ void __launch_bounds__(kRowThreads)
    sample_offsets_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  wait_for_previous_kernel();
  allow_next_kernel();
  offsets_of_counts(BlockTeam<kRowThreads>(), p, chunk.first, chunk.rows, chunk.closed,
                    reinterpret_cast<SampleShared*>(memory));
}

__global__ void __launch_bounds__(kKeptThreads)
    sample_kept_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  __shared__ int cuts[kNumParts + 1];
  __shared__ std::uint32_t counts[kKeptThreads / kWarp], ahead[kMaskAhead * kKeptThreads];
  __shared__ uint4 of_lanes[kKeptThreads];
  const std::int64_t row = chunk.first + blockIdx.x, words = sample_mask_words(p.vocab_size);
  const SlotMap map = SlotMap::make(p, cuts);
  wait_for_previous_kernel();
  const std::int64_t begin = p.kept_offsets[row];
  if (begin == p.kept_offsets[row + 1]) return;
  write_ids_of_mask<kKeptThreads>(map, chunk.masks + blockIdx.x * words, static_cast<int>(words), p.kept_ids + begin,
                                  counts, ahead, of_lanes);
}

}  // namespace

namespace RLK_CUDA_ARCH {

void sample_kept(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  if (p.kept_offsets == nullptr) return;
  launch_dependent<kOverlap>(sample_offsets_kernel, 1, kRowThreads, sizeof(SampleShared), stream, p, chunk);
  launch_dependent<kOverlap>(sample_kept_kernel, static_cast<int>(chunk.rows), kKeptThreads, 0, stream, p, chunk);
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
