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
// Arrives without ordering earlier writes before the barrier.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Returns the address in the shared memory of block `rank` of the cluster that corresponds to address `shared` of this
// block.
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
// Stores 16 bytes at `remote` and counts them at `remote_barrier`. `remote` and `remote_barrier` lie in the shared
// memory of the same block.
__device__ __forceinline__ void store_async_16(std::uint32_t remote, float x, float y, float z, float w,
                                               std::uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(remote_barrier)
      : "memory");
}

}  // namespace rlk::cuda
