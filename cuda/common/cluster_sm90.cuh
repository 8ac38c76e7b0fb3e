// Thread block clusters: rank, barrier, and stores into another block's shared memory.
#pragma once

#include <cstdint>

namespace rlk::cuda {

__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives at the cluster's barrier. A thread that waits at the barrier need not see this thread's earlier writes.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Converts address `shared` of this block's shared memory. Returns the same place in the shared memory of block `rank`
// of the cluster.
__device__ __forceinline__ std::uint32_t map_to_rank(std::uint32_t shared, std::uint32_t rank) {
  std::uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}
__device__ __forceinline__ void store_remote(std::uint32_t remote, std::uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
}
__device__ __forceinline__ void store_remote_8(std::uint32_t remote, float2 x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void store_remote_16(std::uint32_t remote, uint4 x) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
// Stores 16 bytes at address `remote`. The mbarrier at `remote_barrier` counts these bytes. `remote` and
// `remote_barrier` lie in the shared memory of the same block.
__device__ __forceinline__ void store_async_16(std::uint32_t remote, float x, float y, float z, float w,
                                               std::uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(remote_barrier)
      : "memory");
}

}  // namespace rlk::cuda
