// Lists the groups of 16 rows that have a scored row, and clears the rows of all other groups. No call waits for the
// list: kernels read it from device memory.
#include "../common/launch.h"
#include "kernels.h"
#include "rlk/load_index.h"

namespace rlk::cuda {
namespace {

constexpr int kWarps = kMostScoredGroups / 32, kZeroThreads = 256;

__global__ void __launch_bounds__(kMostScoredGroups)
    scored_groups_kernel(const void* target, DType dtype, std::int64_t stride, std::int64_t ignore_index, int rows,
                         ScoredGroups* groups) {
  __shared__ bool has_scored[kMostScoredGroups];
  __shared__ int of_warp[kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
#pragma unroll
  for (int i = 0; i < kScoredGroupRows; ++i) {
    const int row = i * kMostScoredGroups + thread;
    const bool scored = row < rows && load_index(target, dtype, row * stride) != ignore_index;
    const unsigned of_group = __ballot_sync(0xffffffff, scored) >> (lane & 16) & 0xffff;
    if (lane % kScoredGroupRows == 0) has_scored[row / kScoredGroupRows] = of_group != 0;
  }
  __syncthreads();
  const bool kept = has_scored[thread];
  const unsigned in_warp = __ballot_sync(0xffffffff, kept);
  if (lane == 0) of_warp[thread / 32] = __popc(in_warp);
  __syncthreads();
  int place = __popc(in_warp & ((1u << lane) - 1)), count = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < thread / 32) place += of_warp[i];
    count += of_warp[i];
  }
  groups->place[thread] = kept ? place : -1;
  if (kept) groups->group[place] = thread;
  if (thread >= count) groups->group[thread] = -1;
  if (thread > 0) return;
  constexpr int kTileGroups = kScoredTileRows / kScoredGroupRows;
  groups->count = count;
  groups->limit = max(1, (count + kTileGroups - 1) / kTileGroups) * kScoredTileRows;
}

__global__ void __launch_bounds__(kZeroThreads)
    zero_rows_kernel(const ScoredGroups* groups, uint4* rows, std::int64_t units, std::int64_t all_units) {
  const std::int64_t step = std::int64_t{gridDim.x} * kZeroThreads;
  for (std::int64_t i = groups->limit * units + std::int64_t{blockIdx.x} * kZeroThreads + threadIdx.x; i < all_units;
       i += step) {
    rows[i] = uint4{};
  }
}

}  // namespace

namespace RLK_CUDA_ARCH {

void find_scored_groups(const LogprobInput& p, ScoredGroups* groups, cudaStream_t stream) {
  scored_groups_kernel<<<1, kMostScoredGroups, 0, stream>>>(p.target, p.target_dtype, p.target_rows.inner_stride,
                                                            p.ignore_index, static_cast<int>(p.num_rows), groups);
  check(cudaGetLastError(), "launch of scored_groups");
}

void zero_rows_past(const ScoredGroups* groups, void* rows, std::int64_t num_rows, std::int64_t row_bytes,
                    cudaStream_t stream) {
  constexpr int kBlocks = 8;  // blocks per multiprocessor
  const std::int64_t units = row_bytes / static_cast<int>(sizeof(uint4));
  zero_rows_kernel<<<kBlocks * multiprocessors(current_device()), kZeroThreads, 0, stream>>>(
      groups, static_cast<uint4*>(rows), units, units * num_rows);
  check(cudaGetLastError(), "launch of zero_rows");
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
