// cp.async in groups: a ring of stages waits for its oldest group while the others are under way.
#pragma once

#include <cstdint>

namespace rlk::cuda {

// The first `bytes` of 16 from global memory, which must begin at a multiple of 16 bytes there; the others become 0.
// Nothing is read where `bytes` is 0.
__device__ __forceinline__ void copy_async_16_or_less(std::uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
// This thread's copies since the last group become a group, an empty one where there are none.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Waits until at most `pending` of this thread's groups, the latest ones, are under way: 1 ... kMost. The instruction takes a
// constant.
template <int kMost>
__device__ __forceinline__ void copy_async_wait_at_most(int pending) {
  if constexpr (kMost > 1) {
    if (pending < kMost) return copy_async_wait_at_most<kMost - 1>(pending);
  }
  copy_async_wait<kMost>();
}

}  // namespace rlk::cuda
