// Functions for kernels whose threads process eight neighbouring columns at a time: loads and stores, the choice of the
// element type, and the check of a launch's number of blocks.
#pragma once

#include <string>

#include "element.cuh"
#include "rlk/base.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Loads data that is read only once. The load bypasses L1, so that L1 keeps the data that threads read again.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Loads 16 bytes. The compiler keeps the order of such loads, so all loads of a thread are in flight at once.
__device__ __forceinline__ uint4 load_in_order(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// Returns an L2 cache policy. Evict-first is for data that is not read again: it leaves room in L2 for other data. The
// normal policy is faster if L2 cannot hold a call's data.
__device__ __forceinline__ std::uint64_t l2_policy(bool evict_first) {
  std::uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return evict_first ? first : normal;
}
__device__ __forceinline__ uint4 load_in_order(const void* from, std::uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}

// The distance between prefetches and loads, in bytes that all blocks of threads together read. With a larger distance,
// data leaves L2 before its use. With a smaller distance, data arrives too late.
constexpr std::int64_t kPrefetchBytes = std::int64_t{4} << 20;

// Prefetches bytes into L2 for a block that will load them. `bytes` and the address are multiples of 16. A prefetch
// occupies no registers, so more bytes can be in flight than registers hold. A prefetch returns no value, so it may run
// before wait_for_previous_kernel(): later writes of the previous kernel reach the same L2. Without hardware for bulk
// prefetches (before compute capability 9.0) the function does nothing.
__device__ __forceinline__ void prefetch_to_l2([[maybe_unused]] const void* from,
                                               [[maybe_unused]] std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

template <class T>
__device__ __forceinline__ Vec8<T> load_vec8_once(const typename T::Storage* from) {
  Vec8<T> x;
#pragma unroll
  for (int i = 0; i < Vec8<T>::kVectors; ++i) x.v[i].v = load_once(from + i * Vector<T>::kColumns);
  return x;
}
// `policy` is empty or an L2 policy that l2_policy() has returned.
template <class T, class... Policy>
__device__ __forceinline__ Vec8<T> load_vec8_in_order(const typename T::Storage* from, Policy... policy) {
  Vec8<T> x;
#pragma unroll
  for (int i = 0; i < Vec8<T>::kVectors; ++i) x.v[i].v = load_in_order(from + i * Vector<T>::kColumns, policy...);
  return x;
}
template <class T>
__device__ __forceinline__ Vec8<T> load_vec8(const typename T::Storage* from) {
  Vec8<T> x;
#pragma unroll
  for (int i = 0; i < Vec8<T>::kVectors; ++i) x.v[i].v = reinterpret_cast<const uint4*>(from)[i];
  return x;
}
// Stores eight columns to shared memory.
template <class T>
__device__ __forceinline__ void put_vec8(typename T::Storage* to, const Vec8<T>& x) {
#pragma unroll
  for (int i = 0; i < Vec8<T>::kVectors; ++i) reinterpret_cast<uint4*>(to)[i] = x.v[i].v;
}
// Stores eight columns to global memory. The stores are evict-first: kernels that read their data once take 5 % less
// time with evict-first stores.
template <class T>
__device__ __forceinline__ void store_vec8(typename T::Storage* to, const Vec8<T>& x) {
#pragma unroll
  for (int i = 0; i < Vec8<T>::kVectors; ++i) __stcs(reinterpret_cast<uint4*>(to) + i, x.v[i].v);
}
template <class T>
__device__ __forceinline__ void store_vec8(typename T::Storage* to, const Vec8<T>& x, std::uint64_t policy) {
#pragma unroll
  for (int i = 0; i < Vec8<T>::kVectors; ++i) {
    const uint4& v = x.v[i].v;
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to + i * Vector<T>::kColumns),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
  }
}
// Rounds eight values to nearest even. A NaN becomes the type's canonical NaN.
template <class T>
__device__ __forceinline__ Vec8<T> vec8_of(const float (&z)[kVec8]) {
  Vec8<T> x;
#pragma unroll
  for (int i = 0; i < Vec8<T>::kVectors; ++i) x.v[i].from_float(z + i * Vector<T>::kColumns);
  return x;
}
// Rounds the values to the element type T. The results are fp32 again.
template <class T>
__device__ __forceinline__ void round_vec8(float (&z)[kVec8]) {
  if constexpr (T::kPacked) vec8_of<T>(z).to_float(z);
}
// Returns round(fl(round(z) * x)) for each column, where round() rounds to type T. For 16-bit types an instruction
// computes two products.
template <class T>
__device__ __forceinline__ Vec8<T> rounded_product(const float (&z)[kVec8], const Vec8<T>& x) {
  if constexpr (T::kPacked) {
    Vec8<T> y = vec8_of<T>(z);
    uint4& v = y.v[0].v;
    const uint4& w = x.v[0].v;
    v = make_uint4(T::mul2(v.x, w.x), T::mul2(v.y, w.y), T::mul2(v.z, w.z), T::mul2(v.w, w.w));
    return y;
  } else {
    float y[kVec8];
    x.to_float(y);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) y[j] = __fmul_rn(z[j], y[j]);
    return vec8_of<T>(y);
  }
}

// Loads or stores the first `count` of eight columns. A load sets the other columns to +0. kVector: all eight columns
// exist, and their address is a multiple of 16 bytes.
template <class T, bool kVector>
__device__ __forceinline__ void load_columns(const typename T::Storage* from, int count, float (&z)[kVec8]) {
  if constexpr (kVector) {
    load_vec8<T>(from).to_float(z);
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) z[j] = j < count ? T::load(from[j]) : 0.0f;
  }
}
template <class T, bool kVector>
__device__ __forceinline__ void store_columns(typename T::Storage* to, int count, const float (&z)[kVec8]) {
  if constexpr (kVector) {
    store_vec8(to, vec8_of<T>(z));
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      if (j < count) to[j] = T::store(z[j]);
    }
  }
}

// Calls f(T{}) for the element type that `dtype` names.
template <class F>
void with_element_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(Fp32{});
    case DType::kBFloat16:
      return f(Bf16{});
    default:
      return f(Fp16{});
  }
}

inline unsigned checked_blocks(std::int64_t blocks, const char* op) {
  RLK_CHECK(blocks < std::int64_t{1} << 31, std::string(op) + ": too many rows for one launch");
  return static_cast<unsigned>(blocks);
}

}  // namespace
}  // namespace rlk::cuda
