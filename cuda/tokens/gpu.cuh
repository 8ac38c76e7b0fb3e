// The primitives of passes over tokens (kernels/tokens/lane_passes.h) on CUDA.
#pragma once

#include "../common/launch.h"
#include "kernels/tokens/lane_passes.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

struct TokenGpu {
  static constexpr int kLanes = 32;
  static constexpr bool kReadsAgain = false;
  static constexpr bool kFewAtOnce = true;
  using Tokens = Vec4;  // a uniform branch serves four tokens; their instructions overlap
  template <class Params>
  static __device__ __forceinline__ const Params& first_argument(const Params& p) {
    return p;
  }
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ float shuffle_xor(float x, int distance) {
    return __shfl_xor_sync(0xffffffff, x, distance);
  }
  static __device__ __forceinline__ void barrier() { __syncthreads(); }
  static __device__ __forceinline__ void wave_barrier() { __syncwarp(); }
  static __device__ __forceinline__ std::uint32_t sum_over_wave(std::uint32_t x) {
    return __reduce_add_sync(0xffffffff, x);
  }
  static __device__ __forceinline__ std::uint32_t max_over_wave(std::uint32_t x) {
    return __reduce_max_sync(0xffffffff, x);
  }
  // Loads bypass L1: most passes read each value once. Stores are evict-first in L2.
  static __device__ __forceinline__ Vec4 load_vec4(const float* from) {
    Vec4 x;
    asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "l"(from));
    return x;
  }
  static __device__ __forceinline__ void store_vec4(float* to, const Vec4& x) {
    __stcs(reinterpret_cast<float4*>(to), make_float4(x.v[0], x.v[1], x.v[2], x.v[3]));
  }
  static __device__ __forceinline__ std::uintptr_t of_lane(std::uintptr_t address) { return address; }
  static __device__ __forceinline__ Vec4 load(const float* from) { return load_vec4(from); }
  static __device__ __forceinline__ void store(float* to, const Vec4& x) { store_vec4(to, x); }
  static __device__ __forceinline__ void count_on(std::int64_t* to, std::int64_t count) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(count));
  }
  static __device__ __forceinline__ void count_on(std::uint32_t* to, std::uint32_t count) { atomicAdd(to, count); }
};

// For a pass whose float32 arrays a later pass reads again: the loads of these arrays do not bypass L1.
struct FirstPassGpu : TokenGpu {
  static __device__ __forceinline__ Vec4 load(const float* from) {
    Vec4 x;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "l"(from));
    return x;
  }
};

}  // namespace
}  // namespace rlk::cuda
