// cp.async: global to shared memory, 16 bytes a thread, past the registers and L1.
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
__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace rlk::cuda
