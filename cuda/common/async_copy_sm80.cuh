// cp.async: global to shared memory, 16 or 4 bytes a thread, past the registers.
#pragma once

#include <cstdint>

namespace rlk::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Copies `bytes` (0..16) and fills the rest of the 16 with zeros.
__device__ __forceinline__ void copy_async_16(std::uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_4(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t shared, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

}  // namespace rlk::cuda
