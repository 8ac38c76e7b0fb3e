// logprob for SM90: a cluster is a row and a block one part of it; each warp reduces groups of 32 leaves and sends its
// node to block 0 with an asynchronous store, where one warp takes the root. One launch, no workspace.
// Bound by HBM: each logit is read once (vocab_size * sizeof(T) bytes a row). Numbers: README.md.
#include "../common/cluster_sm90.cuh"
#include "../common/mbarrier_sm90.cuh"
#include "kernels.h"
#include "leaf_group.cuh"

namespace rlk::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kMinBlocks = 3;  // of kMaxWarps warps a multiprocessor: bounds the registers at 80

template <class T, Exp kExp, bool kMoments>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kMinBlocks)
    logprob_forward_sm90_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rank = static_cast<int>(cluster_rank());
  const std::int64_t row = blockIdx.x / grid.num_parts;
  const std::int64_t target = target_of(p, row);
  if (target == p.ignore_index) {  // the whole cluster leaves together
    if (rank == 0 && threadIdx.x == 0) write_outputs(p, row, identity_stats(), infinity());
    return;
  }
  // [nodes of the row][barrier, padded][group of each warp][bitmap of each warp]; the first two are used in block 0.
  auto* nodes = reinterpret_cast<float4*>(shared);
  const int num_nodes = grid.num_parts * grid.nodes;
  const std::uint32_t nodes_address = shared_address(shared);
  const std::uint32_t barrier = nodes_address + num_nodes * 16;
  unsigned char* groups = shared + num_nodes * 16 + 128;
  auto* group_memory = reinterpret_cast<uint4*>(groups + warp * kGroupBytes<T>);
  auto* bitmap = reinterpret_cast<std::uint32_t*>(groups + warps * kGroupBytes<T>) + warp * kKeptWords;

  if (rank == 0) {
    for (int i = threadIdx.x; i < num_nodes; i += blockDim.x) nodes[i] = make_float4(-infinity(), 0.0f, 0.0f, 0.0f);
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, 1);
      mbarrier_arrive_expect(barrier, grid.num_parts * grid.groups * 16);
      mbarrier_init_fence();
    }
  }
  cluster_arrive();
  bool waited = false;
  for (int group = warp; group < grid.groups; group += warps) {
    const SoftmaxStats node =
        group_stats<T, kExp, kMoments>(p, row, target, grid.first_part + rank, group, group_memory, bitmap, lane);
    if (!waited) cluster_wait();
    waited = true;
    if (lane == 0) {
      const std::uint32_t slot = nodes_address + (rank * grid.nodes + group) * 16;
      store_async_16(map_to_rank(slot, 0), node.m, node.S, node.E, node.Q, map_to_rank(barrier, 0));
    }
    __syncwarp();  // the next group reuses this one's memory
  }
  if (rank == 0 && warp == 0) {
    const float z = target_z<T>(p, row, target);
    mbarrier_wait(barrier, 0);
    const SoftmaxStats root = tree_over_nodes<kMoments>(num_nodes, lane, [&](int i) {
      const float4 n = nodes[i];
      return SoftmaxStats{n.x, n.y, n.z, n.w};
    });
    if (lane == 0) write_outputs(p, row, root, z);
  }
}

template <class T, Exp kExp, bool kMoments>
void run(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  const int warps = grid.groups < kMaxWarps ? grid.groups : kMaxWarps;
  const int bytes = grid.num_parts * grid.nodes * 16 + 128 + warps * (kGroupBytes<T> + (p.kept_offsets ? kKeptWords * 4 : 0));
  auto* kernel = logprob_forward_sm90_kernel<T, kExp, kMoments>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory of logprob");
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(grid.num_parts), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(p.num_rows * grid.num_parts);
  config.blockDim = warps * kWarp;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, p, grid), "launch of logprob_sm90");
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

}  // namespace

void logprob_forward_sm90(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run<Fp32>(p, grid, stream);
    case DType::kBFloat16:
      return run<Bf16>(p, grid, stream);
    default:
      return run<Fp16>(p, grid, stream);
  }
}

}  // namespace rlk::cuda
