// What forward and backward of rms_norm share: eight columns to and from memory, and the contract's sum over a row.
#pragma once

#include <algorithm>

#include "../common/element_dtype.cuh"
#include "rlk/kernels/rms_norm_row.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Past the L1 cache, which is the weight's: what is read here is read once.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

template <class T>
__device__ __forceinline__ Octet<T> load_octet_once(const typename T::Storage* from) {
  Octet<T> x;
#pragma unroll
  for (int i = 0; i < Octet<T>::kVectors; ++i) x.v[i].v = load_once(from + i * Vector<T>::kColumns);
  return x;
}
template <class T>
__device__ __forceinline__ Octet<T> load_octet(const typename T::Storage* from) {
  Octet<T> x;
#pragma unroll
  for (int i = 0; i < Octet<T>::kVectors; ++i) x.v[i].v = reinterpret_cast<const uint4*>(from)[i];
  return x;
}
// First to leave L2: beside what is read once, what is written once gains 5 % of the time.
template <class T>
__device__ __forceinline__ void store_octet(typename T::Storage* to, const Octet<T>& x) {
#pragma unroll
  for (int i = 0; i < Octet<T>::kVectors; ++i) __stcs(reinterpret_cast<uint4*>(to) + i, x.v[i].v);
}
// Rounded to nearest even; a NaN becomes the type's canonical one.
template <class T>
__device__ __forceinline__ Octet<T> octet_of(const float (&z)[kOctet]) {
  Octet<T> x;
#pragma unroll
  for (int i = 0; i < Octet<T>::kVectors; ++i) x.v[i].from_float(z + i * Vector<T>::kColumns);
  return x;
}
// The values as elements of type T hold them.
template <class T>
__device__ __forceinline__ void round_octet(float (&z)[kOctet]) {
  if constexpr (T::kPacked) octet_of<T>(z).to_float(z);
}

// The first `count` of eight columns, the others +0; and back. kVector: all eight, at multiples of 16 bytes.
template <class T, bool kVector>
__device__ __forceinline__ void load_columns(const typename T::Storage* from, int count, float (&z)[kOctet]) {
  if constexpr (kVector) {
    load_octet<T>(from).to_float(z);
  } else {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) z[j] = j < count ? T::load(from[j]) : 0.0f;
  }
}
template <class T, bool kVector>
__device__ __forceinline__ void store_columns(typename T::Storage* to, int count, const float (&z)[kOctet]) {
  if constexpr (kVector) {
    store_octet(to, octet_of<T>(z));
  } else {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      if (j < count) to[j] = T::store(z[j]);
    }
  }
}

// Weights of eight columns with the offset: of the rows' type or float32, 1 where there are none.
template <class T, bool kVector, class Params>
__device__ __forceinline__ void load_weights(const Params& p, int column, int count, float (&w)[kOctet]) {
#pragma unroll
  for (int j = 0; j < kOctet; ++j) w[j] = 1.0f;
  if (p.weight == nullptr) return;
  if (p.weight_dtype == DType::kFloat32) {
    load_columns<Fp32, kVector>(static_cast<const float*>(p.weight) + column, count, w);
  } else {
    load_columns<T, kVector>(static_cast<const typename T::Storage*>(p.weight) + column, count, w);
  }
#pragma unroll
  for (int j = 0; j < kOctet; ++j) w[j] = rms_norm_weight(w[j], p.weight_offset);
}

// The sum over a row that kThreads neighbouring threads hold: lanes[j] is lane (thread of the row) + j * kThreads of the
// contract's tree. Every thread gets it. Rows of more than a warp meet at a barrier of the block; of_warps is the row's own
// shared memory, which must not be written again before the next such barrier but one.
template <int kThreads, int kCount>
__device__ __forceinline__ float row_sum(float (&lanes)[kCount], float* of_warps) {
  constexpr int kInWarp = kThreads < 32 ? kThreads : 32, kWarps = kThreads / kInWarp, kNodes = kCount * kWarps;
#pragma unroll
  for (int distance = 1; distance < kInWarp; distance *= 2) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      lanes[j] = __fadd_rn(lanes[j], __shfl_xor_sync(0xffffffff, lanes[j], distance));
    }
  }
  float node[kNodes];
  if constexpr (kWarps == 1) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) node[j] = lanes[j];
  } else {
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    if (thread % 32 == 0) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) of_warps[j * kWarps + thread / 32] = lanes[j];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNodes; ++i) node[i] = of_warps[i];
  }
#pragma unroll
  for (int distance = 1; distance < kNodes; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kNodes; i += 2 * distance) node[i] = __fadd_rn(node[i], node[i + distance]);
  }
  return __fadd_rn(node[0], 0.0f);  // a zero sum is +0, as where lanes are missing
}
template <int kThreads, int kCount>
constexpr int kSumNodes = kCount*(kThreads < 32 ? 1 : kThreads / 32);

// f(T{}) for the element type that `dtype` names.
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

inline unsigned checked_blocks(std::int64_t blocks) {
  RLK_CHECK(blocks < std::int64_t{1} << 31, "rms_norm: too many rows for one launch");
  return static_cast<unsigned>(blocks);
}

}  // namespace
}  // namespace rlk::cuda
