// Rows of sample on SM90: a cluster of eight blocks has a row, and each block has one part of the vocabulary in shared
// memory. One launch reads the logits once, whatever cuts the row. Bound by HBM and, for large kept sets, by the
// searches in shared memory. Numbers: README.md.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/cluster_sm90.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "cluster_row.h"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

struct ClusterTeam : BlockTeam<kRowThreads> {
  using BlockTeam<kRowThreads>::shuffle_xor;
  __device__ __forceinline__ int rank() const { return static_cast<int>(cluster_rank()); }
  __device__ __forceinline__ void cluster_barrier() const {
    cluster_arrive();
    cluster_wait();
  }
  template <class X>
  __device__ __forceinline__ X* peer(X* pointer, int rank) const {
    X* of_rank;
    asm("mapa.u64 %0, %1, %2;" : "=l"(of_rank) : "l"(pointer), "r"(rank));
    return of_rank;
  }
  __device__ __forceinline__ std::uint32_t shuffle_xor(std::uint32_t x, int distance) const {
    return __shfl_xor_sync(0xffffffffu, x, distance);
  }
  __device__ __forceinline__ std::uint32_t sum(std::uint32_t x, std::uint32_t* scratch) const {
    x = __reduce_add_sync(0xffffffffu, x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    std::uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kRowThreads / 32; ++i) all += scratch[i];
    __syncthreads();
    return all;
  }
};

// Shared memory of a block: [ClusterShared][SampleParams][nodes][the part's logits].
struct ClusterLayout {
  std::int64_t params, nodes, logits, bytes;
};
template <class T>
__host__ __device__ constexpr ClusterLayout cluster_layout(std::int64_t vocab_size) {
  const auto up = [](std::int64_t x) { return (x + 15) / 16 * 16; };
  const std::int64_t params = up(sizeof(ClusterShared)), nodes = params + up(sizeof(SampleParams));
  const std::int64_t logits = nodes + up(sample_node_floats(vocab_size) / kNumParts * 4);
  const std::int64_t columns = vocab_size - part_cut(vocab_size, kNumParts - 1);  // the last part may be the longest
  const std::int64_t others = part_cut(vocab_size, 1);
  const std::int64_t most = columns > others ? columns : others;
  return {params, nodes, logits, logits + up(most * static_cast<std::int64_t>(sizeof(typename T::Storage)))};
}

template <class T, Exp kExp>
__global__ void __launch_bounds__(kRowThreads, 2)
    sample_cluster_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk,
                          bool takes_raw) {
  using Storage = typename T::Storage;
  extern __shared__ __align__(16) unsigned char memory[];
  const ClusterTeam team;
  const int rank = team.rank();
  const std::int64_t i = blockIdx.x / kNumParts, row = chunk.first + i;
  const ClusterLayout at = cluster_layout<T>(p.vocab_size);
  const std::int64_t first = part_cut(p.vocab_size, rank), next = part_cut(p.vocab_size, rank + 1);
  const int columns = static_cast<int>(max(std::int64_t{0}, min(next, p.valid_vocab) - first));
  const auto* from = static_cast<const Storage*>(p.logits) + row * p.logits_stride + first;
  auto* logits = reinterpret_cast<Storage*>(memory + at.logits);
  constexpr int kVector = 16 / static_cast<int>(sizeof(Storage));
  const int vectors = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 ? columns / kVector : 0;
  for (int k = threadIdx.x; k < vectors; k += kRowThreads) {
    copy_async_16(shared_address(logits + k * kVector), from + k * kVector);
  }
  for (int k = vectors * kVector + threadIdx.x; k < columns; k += kRowThreads) logits[k] = from[k];
  auto* params = reinterpret_cast<SampleParams*>(memory + at.params);
  static_assert(sizeof(SampleParams) % 4 == 0 && sizeof(SampleParams) / 4 <= kRowThreads);
  if (threadIdx.x < sizeof(SampleParams) / 4) {
    reinterpret_cast<std::uint32_t*>(params)[threadIdx.x] = reinterpret_cast<const std::uint32_t*>(&p)[threadIdx.x];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    params->logits = logits;
    params->logits_stride = 0;
  }
  __syncthreads();
  ClusterRow<ClusterTeam, T, kExp>(team, *params, row, reinterpret_cast<ClusterShared*>(memory), from - first,
                                   chunk.masks + i * sample_mask_words(p.vocab_size),
                                   reinterpret_cast<float*>(memory + at.nodes))
      .run(takes_raw, [&] {
        copy_async_wait_all();
        team.cluster_barrier();
      });
}

// Whether clusters serve a call: a part fits into shared memory, and there are few rows. With 256 rows the launches of
// rows.cuh took half the time.
inline bool takes_clusters(const SampleParams& p) {
  constexpr std::int64_t kMost = 227 * 1024, kMostRows = 64;
  const std::int64_t bytes =
      p.dtype == DType::kFloat32 ? cluster_layout<Fp32>(p.vocab_size).bytes : cluster_layout<Bf16>(p.vocab_size).bytes;
  return p.num_rows <= kMostRows && bytes <= kMost;
}
template <class T, Exp kExp>
void run_clusters(const SampleParams& p, const SampleChunk& chunk, bool takes_raw, cudaStream_t stream) {
  constexpr auto kKernel = sample_cluster_kernel<T, kExp>;
  allow_shared_memory<kKernel>();
  launch_dependent_clusters<false>(kKernel, kNumParts, static_cast<int>(chunk.rows) * kNumParts, kRowThreads,
                                   static_cast<int>(cluster_layout<T>(p.vocab_size).bytes), stream, p, chunk,
                                   takes_raw);
}

}  // namespace
}  // namespace rlk::cuda
