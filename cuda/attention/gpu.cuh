// The primitives that kernels/attention/multiply.h needs for tiles of attention, on CUDA.
#pragma once

#include "../common/kernel_memory.h"
#include "../common/vec8.cuh"
#include "kernels.h"
#include "kernels/attention/multiply.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

struct AttentionGpu {
  static constexpr bool kHasHardwareExp = true;

  // Returns the thread's index. The index is read again at each use, so that the compiler keeps no value derived from
  // the index, and sums can use the registers.
  static __device__ __forceinline__ int thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }
  static __device__ __forceinline__ int threads() { return static_cast<int>(blockDim.x); }
  static __device__ __forceinline__ void barrier() { __syncthreads(); }
  // Returns whether `value` is true in any thread of the block. The call is also a barrier of the block.
  static __device__ __forceinline__ bool any(bool value, std::uint32_t*) { return __syncthreads_or(value); }
  static __device__ __forceinline__ float shuffle_xor(float x, int distance) {
    return __shfl_xor_sync(0xffffffffu, x, distance);
  }
  static __device__ __forceinline__ float max_nan(float a, float b) { return cuda::max_nan(a, b); }
  static __device__ __forceinline__ float ex2(float x) { return ex2_approx(x); }

  // Loads kCount neighbouring values from shared memory. kCount is a power of two, and the address is a multiple of
  // their size.
  template <int kCount>
  static __device__ __forceinline__ void load_group(const float* from, float (&to)[kCount]) {
    if constexpr (kCount == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      to[0] = v.x;
      to[1] = v.y;
      to[2] = v.z;
      to[3] = v.w;
    } else if constexpr (kCount == 2) {
      const float2 v = *reinterpret_cast<const float2*>(from);
      to[0] = v.x;
      to[1] = v.y;
    } else {
      to[0] = *from;
    }
  }
  static __device__ __forceinline__ void store_four(float* to, float a, float b, float c, float d) {
    *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
  }

  template <class T>
  using Vec8 = cuda::Vec8<T>;
  template <class T>
  static __device__ __forceinline__ Vec8<T> fill_vec8(bool nan) {
    const std::uint32_t fill = nan ? 0xffffffffu : 0u;  // NaN in every format
    Vec8<T> x;
#pragma unroll
    for (auto& v : x.v) v.v = make_uint4(fill, fill, fill, fill);
    return x;
  }
  template <class T>
  static __device__ __forceinline__ Vec8<T> load_vec8(const typename T::Storage* from, bool vectors) {
    if (vectors) return cuda::load_vec8<T>(from);
    Vec8<T> x;
    if constexpr (T::kPacked) {
      std::uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = from[2 * i] | std::uint32_t{from[2 * i + 1]} << 16;
      x.v[0].v = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x.v[i].v = make_uint4(__float_as_uint(from[4 * i]), __float_as_uint(from[4 * i + 1]),
                              __float_as_uint(from[4 * i + 2]), __float_as_uint(from[4 * i + 3]));
      }
    }
    return x;
  }
};

}  // namespace
}  // namespace rlk::cuda
