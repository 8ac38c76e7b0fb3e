// Groups of cp.async copies. A thread can wait for its oldest groups while later groups are in flight.
#pragma once

#include <cstdint>

namespace rlk::cuda {

// Writes 16 bytes to shared memory: the first `bytes` come from global memory, and the others are 0. The source is
// aligned to 16 bytes. If `bytes` is 0, nothing is read.
__device__ __forceinline__ void copy_async_16_or_less(std::uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
// Makes one group of all copies that this thread has issued since its last group. Without such copies, the group is
// empty.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Waits until at most the latest `pending` of this thread's groups are in flight, where `pending` is 1 ... kMost. The
// instruction needs a constant operand, so there is a branch for each value of `pending`.
template <int kMost>
__device__ __forceinline__ void copy_async_wait_at_most(int pending) {
  if constexpr (kMost > 1) {
    if (pending < kMost) return copy_async_wait_at_most<kMost - 1>(pending);
  }
  copy_async_wait<kMost>();
}

}  // namespace rlk::cuda
