// group_advantage: each warp computes one group. One block computes the statistics of the batch if the call needs them.
// If ids name the groups, the sequences are sorted by id first (kernels/advantages/merge_order.h). Launches and latency
// limit the speed, because a batch has only some thousand rewards. All architectures share this source; each has its
// own machine code.
#include "../common/kernels.h"
#include "../common/team.cuh"
#include "kernels/advantages/group_advantage_team.h"
#include "rlk/ops/group_advantage.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kGroupThreads = 128;
constexpr int kBatchThreads = 1024;
constexpr std::int64_t kSmallBatch = 16384;  // up to this many sequences, half of kBatchThreads suffice

struct GroupBlock : WarpBlock {
  MemberCounts* shared_counts;
  __device__ __forceinline__ MemberCounts* counts() const { return shared_counts; }
};

// Index of this warp's group or sequence.
__device__ __forceinline__ std::int64_t warp_of_grid() {
  return std::int64_t{blockIdx.x} * (kGroupThreads / 32) + threadIdx.x / 32;
}

__global__ void __launch_bounds__(kOrderThreads)
    order_ids_kernel(const __grid_constant__ GroupAdvantageParams p, bool first) {
  __shared__ OrderShared shared;
  order_run<PlainMemory>([&](std::int64_t i) { return group_id(p, i); }, static_cast<std::int32_t>(p.num_sequences),
                         static_cast<std::int32_t>(blockIdx.x), static_cast<int>(threadIdx.x), shared,
                         order_memory(p, first), [] { __syncthreads(); }, [] { __syncwarp(); });
}
__global__ void __launch_bounds__(kGroupThreads)
    merge_ids_kernel(const __grid_constant__ GroupAdvantageParams p, std::int32_t run, bool from_first) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kGroupThreads + threadIdx.x;
  if (at < p.num_sequences) merge_ids(p, run, from_first, static_cast<std::int32_t>(at));
}
__global__ void __launch_bounds__(kBatchThreads, 1) batch_kernel(const __grid_constant__ GroupAdvantageParams p) {
  __shared__ float sums[kBatchThreads / 32];
  __shared__ __align__(8) unsigned char counts[sizeof(MemberCounts) * kBatchThreads / 32];
  const GroupBlock block = {{Warp(), sums}, reinterpret_cast<MemberCounts*>(counts)};
  statistics_of_batch(block, p, static_cast<BatchStatistics*>(p.workspace));
}
template <bool kByIds>
__global__ void __launch_bounds__(kGroupThreads, 8)  // without this minimum of blocks ptxas spills
    groups_kernel(const __grid_constant__ GroupAdvantageParams p, std::int64_t groups) {
  if (warp_of_grid() >= groups) return;
  kByIds ? run_ids(Warp(), p, warp_of_grid()) : run_range(Warp(), p, warp_of_grid());
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void group_advantage(const GroupAdvantageParams& p, cudaStream_t stream) {
  const auto blocks = [](std::int64_t warps) {
    return static_cast<unsigned>((warps + kGroupThreads / 32 - 1) / (kGroupThreads / 32));
  };
  if (p.group_ids != nullptr) {
    const auto runs = static_cast<unsigned>(order_runs(p.num_sequences));
    order_ids_kernel<<<runs, kOrderThreads, 0, stream>>>(p, order_begins_first(p.num_sequences));
    for_each_merge(p.num_sequences, [&](std::int32_t run, bool from_first) {
      merge_ids_kernel<<<blocks((p.num_sequences + 31) / 32), kGroupThreads, 0, stream>>>(p, run, from_first);
    });
  }
  if (reads_batch(p)) {
    const int threads = p.num_sequences > kSmallBatch ? kBatchThreads : kBatchThreads / 2;
    batch_kernel<<<1, threads, 0, stream>>>(p);
  }
  const std::int64_t groups = num_groups_of_teams(p);
  auto* kernel = p.group_ids != nullptr ? groups_kernel<true> : groups_kernel<false>;
  if (groups > 0) kernel<<<blocks(groups), kGroupThreads, 0, stream>>>(p, groups);
  check(cudaGetLastError(), "launch of group_advantage");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
