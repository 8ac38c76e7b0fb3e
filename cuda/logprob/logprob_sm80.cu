// logprob for SM80 and later. Few rows: one warp per group of 32 leaves, nodes through global memory, then one warp per
// row. Many rows: stream.cuh.
// Bound by HBM: each logit is read once (vocab_size * sizeof(T) bytes a row). Numbers: README.md.
#include "../common/kernel_memory.h"
#include "kernels.h"
#include "stream.cuh"

namespace rlk::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;
// What shared memory of compute capability 8.x (100 KB a block on 8.6 and 8.9) holds of 2-byte and 4-byte groups.
template <class T>
constexpr int kStreamWarps = T::kPacked ? 10 : 5;

template <class T, Exp kExp, bool kMoments>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    logprob_groups_sm80_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid,
                               int tasks) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const int task = blockIdx.x * warps + warp;
  if (task >= tasks) return;
  const int group = task % grid.groups, row = task / grid.groups;
  const std::int64_t target = target_of(p, row);
  if (target == p.ignore_index) return;
  const RowHead head = row_head(row, target, temperature_of(p, row));
  const auto* logits = row_of<T>(p, row) - p.vocab_start;
  auto* tiles = reinterpret_cast<uint4*>(shared + warp * kGroupBytes<T>);
  auto* bitmap = reinterpret_cast<std::uint32_t*>(shared + warps * kGroupBytes<T>) + warp * kKeptWords;
  const LeafSpan span = leaf_span(grid, group, lane);
  start_group<T>(logits, grid, span, tiles, lane);
  copy_async_wait_all();
  __syncwarp();
  std::int32_t failed;
  const SoftmaxStats leaf =
      leaf_of_group<T, kExp, kMoments>(p, grid, head, span, tiles, shift_of<T>(logits), bitmap, &failed, lane);
  const SoftmaxStats node = group_node<kMoments>(leaf, failed);
  if (lane == 0) {
    static_cast<float4*>(p.workspace)[row * grid.nodes + node_of_group(grid, group)] =
        make_float4(node.m, node.S, node.E, node.Q);
  }
}

template <class T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    logprob_root_sm80_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid,
                             int rows) {
  const int lane = threadIdx.x % kWarp;
  const int row = blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarp;
  if (row >= rows) return;
  const std::int64_t target = target_of(p, row);
  if (target == p.ignore_index) {
    if (lane == 0) write_ignored(p, row);
    return;
  }
  const auto* nodes = static_cast<const float4*>(p.workspace) + row * grid.nodes;
  const SoftmaxStats root = tree_over_nodes<true>(grid.nodes, lane, [&](int i) {
    if (!is_group_node(grid, i)) return identity_stats();
    const float4 n = nodes[i];
    return SoftmaxStats{n.x, n.y, n.z, n.w};
  });
  if (lane == 0) write_outputs(p, row, root, target_z<T>(p, row, target));
}

template <class T, Exp kExp, bool kMoments>
void run(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  if (!has_few_rows_sm80(p, grid)) {
    return run_stream<T, kExp, kMoments, kStreamWarps<T>>(p, grid, multiprocessors(current_device()), stream);
  }
  // One warp a block while a single row can then spread over more multiprocessors.
  const int rows = static_cast<int>(p.num_rows), tasks = rows * grid.groups;
  const int warps = tasks <= 1024 ? 1 : kWarpsPerBlock;
  const int bytes = warps * (kGroupBytes<T> + (p.kept_offsets ? kKeptWords * 4 : 0));
  auto* groups = logprob_groups_sm80_kernel<T, kExp, kMoments>;
  allow_shared_memory<logprob_groups_sm80_kernel<T, kExp, kMoments>>();
  groups<<<(tasks + warps - 1) / warps, warps * kWarp, bytes, stream>>>(p, grid, tasks);
  logprob_root_sm80_kernel<T>
      <<<(rows + kWarpsPerBlock - 1) / kWarpsPerBlock, kWarpsPerBlock * kWarp, 0, stream>>>(p, grid, rows);
  check(cudaGetLastError(), "launch of logprob_sm80");
}

template <class T>
void run(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  const bool moments = p.stats || p.entropy || p.sum_p_sq;
  if (p.exp == Exp::kHardware) {
    moments ? run<T, Exp::kHardware, true>(p, grid, stream) : run<T, Exp::kHardware, false>(p, grid, stream);
  } else {
    moments ? run<T, Exp::kPortable, true>(p, grid, stream) : run<T, Exp::kPortable, false>(p, grid, stream);
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

void logprob_forward_sm80(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run<Fp32>(p, grid, stream);
    case DType::kBFloat16:
      return run<Bf16>(p, grid, stream);
    default:
      return run<Fp16>(p, grid, stream);
  }
}

void logprob_merge_sm80(const LogprobMergeParams& p, cudaStream_t stream) {
  constexpr int kThreads = 128;
  logprob_merge_sm80_kernel<<<static_cast<unsigned>((p.num_rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of logprob_merge");
}

}  // namespace rlk::cuda
