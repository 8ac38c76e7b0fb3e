// cp.async.bulk: a contiguous stretch of global memory to shared memory, completion counted on an mbarrier.
#pragma once

#include <cstdint>

namespace rlk::cuda {

// `shared`, `global` and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
// Orders this thread's plain stores to shared memory before later asynchronous copies into it.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace rlk::cuda
