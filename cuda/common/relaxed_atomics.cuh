// Words that warps of one launch pass each other through global memory, without fences: each word by itself.
#pragma once

namespace rlk::cuda {

// Adds one to a counter that begins at 0 or at ~0, which comes before 0; what was there before. An increment with a
// bound, since the compiler makes an addition by one lane an aggregated one, which waits for its result at once.
__device__ __forceinline__ unsigned fetch_increment(unsigned* counter) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(0x7fffffffu)
               : "memory");
  return before;
}
__device__ __forceinline__ void store_relaxed(float4* to, float x, float y, float z, float w) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}
__device__ __forceinline__ float4 load_relaxed(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

}  // namespace rlk::cuda
