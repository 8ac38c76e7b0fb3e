// The forward of logprob for many rows. Each persistent warp has its own buffer in shared memory, so that some warps
// load while others compute, without barriers between warps. The warps take groups of columns in the order of memory.
// For each group a warp writes a node (partial statistics) to global memory. A kernel before this kernel prepares each
// row, and a kernel after it combines the nodes of each row. All architectures share this source; each has its own
// machine code.
#pragma once

#include <algorithm>
#include <bit>

#include "../common/dependent_launch.cuh"
#include "../common/fetch_increment.cuh"
#include "../common/kernel_memory.h"
#include "leaf_group.cuh"
#include "plan.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Template arguments of the kernels: a call's dtype, its exponential, and whether the call needs moments (for entropy,
// sum_p_sq or statistics).
template <class T, Exp kExp, bool kMoments>
struct Variant {};
template <class Run>
void with_variant(const LogprobParams& p, Run run) {
  const auto with_type = [&]<class T>(T) {
    const bool moments = p.stats || p.entropy || p.sum_p_sq;
    if (p.exp == Exp::kHardware) {
      moments ? run(Variant<T, Exp::kHardware, true>{}) : run(Variant<T, Exp::kHardware, false>{});
    } else {
      moments ? run(Variant<T, Exp::kPortable, true>{}) : run(Variant<T, Exp::kPortable, false>{});
    }
  };
  switch (p.dtype) {
    case DType::kFloat32:
      return with_type(Fp32{});
    case DType::kBFloat16:
      return with_type(Bf16{});
    default:
      return with_type(Fp16{});
  }
}

// divide(n) returns n / divisor for n < 2^31, by a multiplication.
struct Divisor {
  int divisor, shift;
  unsigned multiplier;
  explicit Divisor(int d) : divisor(d), shift(std::bit_width(static_cast<unsigned>(d - 1))) {
    multiplier = static_cast<unsigned>((((std::uint64_t{1} << shift) - d) << 32) / d + 1);
  }
  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>((__umulhi(n, multiplier) + static_cast<unsigned>(n)) >> shift);
  }
};

// What each group of a row needs to know about the row.
struct alignas(16) StreamRow {
  const void* logits;   // where the row's column 0 is, or would be if this shard held it
  float c;              // log2e / temperature
  std::int32_t status;  // status bits that are known before any logit is read, or kIgnoredRow
};
constexpr std::int32_t kIgnoredRow = -1;
template <class T>
__device__ __forceinline__ StreamRow stream_row(const LogprobInput& p, std::int64_t row) {
  const float temperature = temperature_of(p, row);
  const std::int32_t status = is_temperature(temperature) ? kOk : kBadTemperature;
  return {row_of<T>(p, row) - p.vocab_start, log2_scale(temperature),
          target_of(p, row) == p.ignore_index ? kIgnoredRow : status};
}

// The rows of a call that one launch computes. Groups are numbered in the order of memory, which is the fastest order
// for DRAM.
struct StreamWork {
  std::int64_t first_row;
  int rows;
  Divisor groups;  // groups per row
  Divisor steps;   // groups per part of the vocabulary; 1 if a group holds several parts
  unsigned* claims;
  int counters;  // number of counters in `claims`
  StreamRow* of_row;
  float* target_z;  // per row
  float4* nodes;    // grid.nodes per row
};

// The first group of a warp is fixed. The warp takes the numbers of later groups from one of several counters, since a
// single counter serves at most 430 increments per microsecond. The number of counters is prime, so that the short
// groups at the ends of parts are spread over all counters. The number of counters is at most the number of warps,
// because each counter needs a warp that increments it.
constexpr int kMaxClaimCounters = 61, kClaimPitch = 32;  // words from one counter to the next: each has its own line

template <class T>
__global__ void __launch_bounds__(256)
    logprob_rows_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ StreamWork work) {
  allow_next_kernel();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < work.counters) work.claims[i * kClaimPitch] = 0;
  if (i >= work.rows) return;
  const std::int64_t row = work.first_row + i;
  const StreamRow info = stream_row<T>(p, row);
  work.of_row[i] = info;
  work.target_z[i] = info.status == kIgnoredRow ? 0.0f : target_z<T>(p, row, target_of(p, row));
}

template <class T, Exp kExp, bool kMoments, int kMaxWarps>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 1)
    logprob_stream_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid,
                          const __grid_constant__ StreamWork work) {
  extern __shared__ __align__(128) unsigned char shared[];  // [image of each warp][bitmap of each warp]
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps_of_block = blockDim.x / kWarp;
  const std::uint32_t image = shared_address(shared) + warp * kGroupBytes<T>;
  auto* bitmap = reinterpret_cast<std::uint32_t*>(shared + warps_of_block * kGroupBytes<T>) + warp * kKeptWords;
  const int total = work.rows * work.groups.divisor;
  const auto row_of_task = [&](int task) {
    StreamRow row{nullptr, 0.0f, kIgnoredRow};
    if (task < total) row = work.of_row[work.groups.divide(task)];
    return row;
  };
  const auto group_of_task = [&](int task) {
    const int index = task - work.groups.divide(task) * work.groups.divisor, part = work.steps.divide(index);
    return Group{grid.groups_per_part > 0 ? part : index * grid.parts_per_group, index - part * work.steps.divisor};
  };
  const auto copy_of_task = [&](int task, const StreamRow& row) {
    return GroupCopy<T>(static_cast<const typename T::Storage*>(row.logits), grid, group_of_task(task), image, lane);
  };

  const int warps = warps_of_block * static_cast<int>(gridDim.x);
  const int first = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x), counter = first % work.counters;
  int now = first;
  allow_next_kernel();
  StreamRow row{nullptr, 0.0f, kIgnoredRow};  // work.of_row is not ready yet, so the warp prepares its first row
  if (now < total) row = stream_row<T>(p, work.first_row + work.groups.divide(now));
  GroupCopy<T> copy = copy_of_task(now, row);
  if (row.status != kIgnoredRow) copy.start(image, lane);
  wait_for_previous_kernel();
#pragma unroll 1
  while (now < total) {
    const bool ignored = row.status == kIgnoredRow;
    if (!ignored) {
      copy_async_wait_all();
      __syncwarp();
    }
    // The warp takes its next group only now, so that the order of the copies is nearly the order of memory.
    unsigned claimed = 0;
    if (lane == 0) claimed = fetch_increment(work.claims + counter * kClaimPitch);
    SoftmaxStats stats = identity_stats();
    if (!ignored) {
      std::int32_t failed = row.status;
      if (p.kept_offsets || copy.shift() != 0) {
        failed |= prepare_leaf<T>(p, grid, work.first_row + work.groups.divide(now), group_of_task(now), copy.leaf,
                                  copy.leaf_columns, copy.shift(), bitmap, lane);
      }
      stats = failed ? failed_stats(failed)
                     : leaf_stats<T, kExp, kMoments>(copy.leaf, copy.leaf_columns, row.c, p.logit_scale, p.softcap);
      __syncwarp();
    }
    const int next = warps + counter + work.counters * static_cast<int>(__shfl_sync(kAllLanes, claimed, 0));
    row = row_of_task(next);
    copy = copy_of_task(next, row);
    if (row.status != kIgnoredRow) copy.start(image, lane);
    if (!ignored) {
      const SoftmaxStats node = tree_over_lanes<kMoments>(stats);
      if (lane == 0) {
        work.nodes[work.groups.divide(now) * grid.nodes + node_of_group(grid, group_of_task(now))] =
            make_float4(node.m, node.S, node.E, node.Q);
      }
    }
    now = next;
  }
}

constexpr int kRootWarps = 4;
template <class T, bool kMoments>
__global__ void __launch_bounds__(kRootWarps* kWarp)
    logprob_root_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid,
                        const __grid_constant__ StreamWork work) {
  const int lane = threadIdx.x % kWarp, row_of_launch = blockIdx.x * kRootWarps + threadIdx.x / kWarp;
  if (row_of_launch >= work.rows) return;
  const std::int64_t row = work.first_row + row_of_launch;
  wait_for_previous_kernel();
  const float z = work.target_z[row_of_launch];
  if (work.of_row[row_of_launch].status == kIgnoredRow) {
    if (lane == 0) write_ignored(p, row);
    return;
  }
  const float4* nodes = work.nodes + std::int64_t{row_of_launch} * grid.nodes;
  const SoftmaxStats root = tree_over_nodes<kMoments>(grid.nodes, lane, [&](int i) {
    if (!is_group_node(grid, i)) return identity_stats();
    const float4 n = nodes[i];
    return SoftmaxStats{n.x, n.y, n.z, n.w};
  });
  if (lane == 0) write_outputs(p, row, root, z);
}

// kOverlap: built for an architecture on which a kernel may begin while the previous kernel still runs.
template <class T, Exp kExp, bool kMoments, int kMaxWarps, bool kOverlap>
void run_stream(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  const int bytes = kGroupBytes<T> + (p.kept_offsets ? kKeptWords * 4 : 0);
  auto* kernel = logprob_stream_kernel<T, kExp, kMoments, kMaxWarps>;
  const int warps =
      std::min(kMaxWarps, allow_shared_memory<logprob_stream_kernel<T, kExp, kMoments, kMaxWarps>>() / bytes);
  const int blocks = multiprocessors(current_device());
  for (std::int64_t first = 0; first < p.num_rows; first += stream_rows(grid)) {
    const std::int64_t rows = std::min(p.num_rows - first, stream_rows(grid));
    const StreamWorkspace at = stream_workspace(grid, rows);
    auto* base = static_cast<unsigned char*>(p.workspace);
    const StreamWork work{first,
                          static_cast<int>(rows),
                          Divisor(grid.groups),
                          Divisor(std::max(grid.groups_per_part, 1)),
                          reinterpret_cast<unsigned*>(base),
                          std::min(kMaxClaimCounters, blocks * warps),
                          reinterpret_cast<StreamRow*>(base + at.rows),
                          reinterpret_cast<float*>(base + at.target_z),
                          reinterpret_cast<float4*>(base + at.nodes)};
    logprob_rows_kernel<T><<<(work.rows + 255) / 256, 256, 0, stream>>>(p, work);
    launch_dependent<kOverlap>(kernel, blocks, warps * kWarp, warps * bytes, stream, p, grid, work);
    launch_dependent<kOverlap>(logprob_root_kernel<T, kMoments>, (work.rows + kRootWarps - 1) / kRootWarps,
                               kRootWarps * kWarp, 0, stream, p, grid, work);
  }
  check(cudaGetLastError(), "launch of logprob_stream");
}

}  // namespace
}  // namespace rlk::cuda
