// logprob for SM80 and later: one warp per group of 32 leaves, nodes through global memory, then one warp per row.
// Bound by HBM: each logit is read once (vocab_size * sizeof(T) bytes a row). Numbers: README.md.
#include "kernels.h"
#include "leaf_group.cuh"

namespace rlk::cuda {
namespace {

constexpr int kMinBlocks = 6;      // a multiprocessor: bounds the registers at 80
constexpr int kWarpsPerBlock = 4;  // groups are independent; four share a block only for launch overhead

template <class T, Exp kExp, bool kMoments>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp, kMinBlocks)
    logprob_groups_sm80_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid,
                               std::int64_t first_row, std::int64_t tasks) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::int64_t task = std::int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp;
  if (task >= tasks) return;
  const int group = static_cast<int>(task % grid.groups);
  const int part = static_cast<int>(task / grid.groups % grid.num_parts);
  const std::int64_t slot = task / grid.groups / grid.num_parts;
  const std::int64_t row = first_row + slot;
  const std::int64_t target = target_of(p, row);
  if (target == p.ignore_index) return;
  uint4* group_memory = reinterpret_cast<uint4*>(shared + warp * kGroupBytes<T>);
  auto* bitmap = reinterpret_cast<std::uint32_t*>(shared + blockDim.x / kWarp * kGroupBytes<T>) + warp * kKeptWords;
  const SoftmaxStats node =
      group_stats<T, kExp, kMoments>(p, row, target, grid.first_part + part, group, group_memory, bitmap, lane);
  if (lane == 0) {
    auto* nodes = static_cast<float4*>(p.workspace);
    nodes[(slot * grid.num_parts + part) * grid.nodes + group] = make_float4(node.m, node.S, node.E, node.Q);
  }
}

template <class T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    logprob_root_sm80_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid,
                             std::int64_t first_row, std::int64_t rows) {
  const int lane = threadIdx.x % kWarp;
  const std::int64_t slot = std::int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
  if (slot >= rows) return;
  const std::int64_t row = first_row + slot;
  const std::int64_t target = target_of(p, row);
  if (target == p.ignore_index) {
    if (lane == 0) write_outputs(p, row, identity_stats(), infinity());
    return;
  }
  const auto* nodes = static_cast<const float4*>(p.workspace) + slot * grid.num_parts * grid.nodes;
  const SoftmaxStats root = tree_over_nodes<true>(grid.num_parts * grid.nodes, lane, [&](int i) {
    if (i % grid.nodes >= grid.groups) return identity_stats();
    const float4 n = nodes[i];
    return SoftmaxStats{n.x, n.y, n.z, n.w};
  });
  if (lane == 0) write_outputs(p, row, root, target_z<T>(p, row, target));
}

template <class T, Exp kExp, bool kMoments>
void run(const LogprobParams& p, const GroupGrid& grid, std::int64_t workspace_bytes, cudaStream_t stream) {
  const std::int64_t nodes_per_row = std::int64_t{grid.num_parts} * grid.nodes;
  const std::int64_t rows_per_launch = workspace_bytes / (nodes_per_row * kNodeBytes);
  // Few rows: one warp a block, so that a single row spreads over as many multiprocessors as it has groups.
  const int warps = p.num_rows * nodes_per_row <= 1024 ? 1 : kWarpsPerBlock;
  const int bytes = warps * (kGroupBytes<T> + (p.kept_offsets ? kKeptWords * 4 : 0));
  auto* groups = logprob_groups_sm80_kernel<T, kExp, kMoments>;
  check(cudaFuncSetAttribute(groups, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory of logprob");
  for (std::int64_t first = 0; first < p.num_rows; first += rows_per_launch) {
    const std::int64_t rows = p.num_rows - first < rows_per_launch ? p.num_rows - first : rows_per_launch;
    const std::int64_t tasks = rows * grid.num_parts * grid.groups;
    groups<<<static_cast<unsigned>((tasks + warps - 1) / warps), warps * kWarp, bytes, stream>>>(p, grid, first, tasks);
    logprob_root_sm80_kernel<T><<<static_cast<unsigned>((rows + kWarpsPerBlock - 1) / kWarpsPerBlock),
                                  kWarpsPerBlock * kWarp, 0, stream>>>(p, grid, first, rows);
    check(cudaGetLastError(), "launch of logprob_sm80");
  }
}

template <class T>
void run(const LogprobParams& p, const GroupGrid& grid, std::int64_t workspace_bytes, cudaStream_t stream) {
  const bool moments = p.stats || p.entropy || p.sum_p_sq;
  if (p.exp == Exp::kHardware) {
    moments ? run<T, Exp::kHardware, true>(p, grid, workspace_bytes, stream) : run<T, Exp::kHardware, false>(p, grid, workspace_bytes, stream);
  } else {
    moments ? run<T, Exp::kPortable, true>(p, grid, workspace_bytes, stream) : run<T, Exp::kPortable, false>(p, grid, workspace_bytes, stream);
  }
}

__global__ void logprob_merge_sm80_kernel(const __grid_constant__ LogprobMergeParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= p.num_rows) return;
  SoftmaxStats node[kNumParts];
  float target_z = canonical_nan();
#pragma unroll
  for (int i = 0; i < kNumParts; ++i) {
    node[i] = identity_stats();
    if (i < p.num_shards) {
      const float* s = p.stats + (i * p.num_rows + row) * kStatsFields;
      node[i] = {s[0], s[1], s[2], s[3]};
      if (!is_nan(s[4])) target_z = s[4];
    }
  }
#pragma unroll
  for (int distance = 1; distance < kNumParts; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kNumParts; i += 2 * distance) node[i] = combine(node[i], node[i + distance]);
  }
  const float temperature = p.temperature ? p.temperature[row] : p.temperature_value;
  const LogprobOutputs o = logprob_outputs(node[0], target_z, temperature);
  if (p.logprob) p.logprob[row] = o.logprob;
  if (p.lse) p.lse[row] = o.lse;
  if (p.entropy) p.entropy[row] = o.entropy;
  if (p.sum_p_sq) p.sum_p_sq[row] = o.sum_p_sq;
  if (p.status) p.status[row] = o.status;
}

}  // namespace

void logprob_forward_sm80(const LogprobParams& p, const GroupGrid& grid, std::int64_t workspace_bytes,
                          cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run<Fp32>(p, grid, workspace_bytes, stream);
    case DType::kBFloat16:
      return run<Bf16>(p, grid, workspace_bytes, stream);
    default:
      return run<Fp16>(p, grid, workspace_bytes, stream);
  }
}

void logprob_merge_sm80(const LogprobMergeParams& p, cudaStream_t stream) {
  constexpr int kThreads = 128;
  logprob_merge_sm80_kernel<<<static_cast<unsigned>((p.num_rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of logprob_merge");
}

}  // namespace rlk::cuda
