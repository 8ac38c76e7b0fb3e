// rope, queries and keys in one launch. Bound by HBM: heads are read once and written once. All heads of a token share
// its angles, so every read of the angles except the first hits a cache.
//
// rope_vec8s_kernel: a thread has columns [c, c + 8) and [c + rotary_dim / 2, ... + 8) of kHeads heads of a token. They
//   are the halves of eight pairs or, interleaved, four pairs and four more. Neighbouring threads read neighbouring
//   vectors in both forms. The thread loads all of these first, then the position and the angles, by which it rotates
//   every head. Threads of their own copy columns that are not rotated.
// rope_elements_kernel: one thread rotates one pair of one head. Any width, any alignment.
// One body serves every architecture, and each has its own machine code.
#include <algorithm>

#include "../common/dependent_launch.cuh"
#include "../common/element_dtype.cuh"
#include "../common/vec8.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Queries come first, then keys.
template <class T>
__device__ __forceinline__ const typename T::Storage* head_in(const RopeParams& p, const RopePlace& at, int head) {
  const int queries = static_cast<int>(p.q.num_heads);
  const RopeHeads& heads = head < queries ? p.q : p.k;
  const int i = head < queries ? head : head - queries;
  return static_cast<const typename T::Storage*>(heads.x) + at.offset(heads.x_tokens) + i * heads.x_head_stride;
}
template <class T>
__device__ __forceinline__ typename T::Storage* head_out(const RopeParams& p, const RopePlace& at, int head) {
  const int queries = static_cast<int>(p.q.num_heads);
  const RopeHeads& heads = head < queries ? p.q : p.k;
  const int i = head < queries ? head : head - queries;
  return static_cast<typename T::Storage*>(heads.y) + at.offset(heads.y_tokens) + i * heads.y_head_stride;
}

__device__ __forceinline__ RopeRows rows_of_pair(const RopeParams& p, const RopePlace& at, int pair) {
  const int section = rope_section(p, pair);
  std::int64_t id = 0;
  if (p.position_ids != nullptr) {
    const std::int64_t i = at.id_offset(p, section);
    id = p.id_dtype == DType::kInt64 ? static_cast<const std::int64_t*>(p.position_ids)[i]
                                     : static_cast<const std::int32_t*>(p.position_ids)[i];
  }
  return {p, at, section, id};
}

// kCount values of T or float32, up to 16 bytes, aligned to their total size.
template <class T, int kCount>
__device__ __forceinline__ void load_angles(const void* from, DType dtype, std::int64_t at, float* to) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + at + i);
      to[i] = v.x;
      to[i + 1] = v.y;
      to[i + 2] = v.z;
      to[i + 3] = v.w;
    }
  } else if constexpr (T::kPacked) {
    const typename T::Storage* p = static_cast<const typename T::Storage*>(from) + at;
    if constexpr (kCount == kVec8) {
      Vector<T>{*reinterpret_cast<const uint4*>(p)}.to_float(to);
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      to[0] = T::low(v.x);
      to[1] = T::high(v.x);
      to[2] = T::low(v.y);
      to[3] = T::high(v.y);
    }
  }
}

// The angles of the pairs in a thread's two vec8s. kPerPair: one angle a pair; else one a column, in the order of columns.
// In the interleaved layout the first half of the angles belongs to the first vec8.
template <class T, bool kPerPair>
struct Vec8Angles {
  static constexpr int kCount = kPerPair ? kVec8 : 2 * kVec8;
  float cos[kCount], sin[kCount];

  __device__ __forceinline__ void load(const RopeParams& p, const RopePlace& at, int column_a, int column_b) {
    if (p.interleaved) {
      constexpr int kHalf = kCount / 2;
      load_rows<kHalf>(p, at, column_a / 2, kPerPair ? column_a / 2 : column_a, cos, sin);
      load_rows<kHalf>(p, at, column_b / 2, kPerPair ? column_b / 2 : column_b, cos + kHalf, sin + kHalf);
    } else {
      load_rows<kVec8>(p, at, column_a, column_a, cos, sin);
      if constexpr (!kPerPair) load_rows<kVec8>(p, at, column_a, column_b, cos + kVec8, sin + kVec8);
    }
    if (p.transposed) transpose(p.interleaved);
  }

 private:
  template <int kSome>
  static __device__ __forceinline__ void load_rows(const RopeParams& p, const RopePlace& at, int pair, int column,
                                                   float* cos, float* sin) {
    const RopeRows rows = rows_of_pair(p, at, pair);
    if (rows.exist) {
      load_angles<T, kSome>(p.cos.data, p.angle_dtype, rows.cos + column, cos);
      load_angles<T, kSome>(p.sin.data, p.angle_dtype, rows.sin + column, sin);
    } else {
#pragma unroll
      for (int i = 0; i < kSome; ++i) cos[i] = sin[i] = canonical_nan();
    }
    if (T::kPacked && p.round_products) {
#pragma unroll
      for (int i = 0; i < kSome; ++i) {
        cos[i] = T::load(T::store(cos[i]));
        sin[i] = T::load(T::store(sin[i]));
      }
    }
  }
  // -sin_b for sin_a and -sin_a for sin_b.
  __device__ __forceinline__ void transpose(bool interleaved) {
    if constexpr (kPerPair) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sin[i] = -sin[i];
    } else {
      float other[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) other[i] = -(interleaved ? sin[i ^ 1] : sin[i ^ kVec8]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sin[i] = other[i];
    }
  }
};

// A vec8 of first elements (kSign -1) or of second ones (+1) of pairs, or of pairs side by side (0): x cos -+ other sin.
template <class T, int kSign, class Cos, class Sin>
__device__ __forceinline__ void rotate_vec8(const float (&x)[kVec8], const float (&other)[kVec8], const Cos& cos,
                                            const Sin& sin, bool round_products, float (&y)[kVec8]) {
  float product[kVec8];
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    product[j] = __fmul_rn(other[j], sin(j));
    // Rounding is symmetric, so the negation is exact.
    if (kSign < 0 || (kSign == 0 && j % 2 == 0)) product[j] = -product[j];
  }
  if (round_products) {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) y[j] = __fmul_rn(x[j], cos(j));
    round_vec8<T>(y);
    round_vec8<T>(product);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) y[j] = __fadd_rn(y[j], product[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) y[j] = __fmaf_rn(x[j], cos(j), product[j]);
  }
}

template <class T, bool kPerPair>
__device__ __forceinline__ void rotate_vec8s(const RopeParams& p, const Vec8Angles<T, kPerPair>& angles, Vec8<T>* a,
                                             Vec8<T>* b) {
  float x[kVec8], y[kVec8], first[kVec8], second[kVec8];
  a->to_float(x);
  b->to_float(y);
  if (p.interleaved) {
    float x_other[kVec8], y_other[kVec8];
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      x_other[j] = x[j ^ 1];
      y_other[j] = y[j ^ 1];
    }
    constexpr int kHalf = Vec8Angles<T, kPerPair>::kCount / 2;
    const auto of = [](const float* values) { return [values](int j) { return values[kPerPair ? j / 2 : j]; }; };
    rotate_vec8<T, 0>(x, x_other, of(angles.cos), of(angles.sin), p.round_products, first);
    rotate_vec8<T, 0>(y, y_other, of(angles.cos + kHalf), of(angles.sin + kHalf), p.round_products, second);
  } else {
    constexpr int kSecond = kPerPair ? 0 : kVec8;
    const auto of = [](const float* values) { return [values](int j) { return values[j]; }; };
    rotate_vec8<T, -1>(x, y, of(angles.cos), of(angles.sin), p.round_products, first);
    rotate_vec8<T, 1>(y, x, of(angles.cos + kSecond), of(angles.sin + kSecond), p.round_products, second);
  }
  *a = vec8_of<T>(first);
  *b = vec8_of<T>(second);
}

// The number of blocks on a multiprocessor, as limited by the registers that hold loads in flight.
template <class T, int kHeads, bool kPerPair>
constexpr int kRopeBlocks = kHeads* Vec8<T>::kVectors >= 4   ? 4
                            : kHeads* Vec8<T>::kVectors == 2 ? (kPerPair ? 6 : 5)
                                                             : (kPerPair ? 8 : 6);

template <class T, int kHeads, bool kPerPair>
__global__ void __launch_bounds__(kRopeThreads, (kRopeBlocks<T, kHeads, kPerPair>))
    rope_vec8s_kernel(const __grid_constant__ RopeParams p, const __grid_constant__ RopeGrid g) {
  allow_next_kernel();
  const RopePlace at(p, g, blockIdx.x, threadIdx.x);
  const int heads = static_cast<int>(p.q.num_heads + p.k.num_heads), lanes = static_cast<int>(g.lanes.value);
  if constexpr (kHeads == 1) {  // few tokens; with many tokens, prefetches make the launch 2 % slower
    if (at.exists && at.first_unit == 0 && at.lane < heads) {
      prefetch_to_l2(head_in<T>(p, at, at.lane), static_cast<std::uint32_t>(p.head_dim * sizeof(typename T::Storage)));
    }
  }
  wait_for_previous_kernel();
  if (!at.exists) return;
#pragma unroll 1
  for (int unit = at.first_unit; unit < g.units; unit += static_cast<int>(g.threads.value)) {
    const bool rotates = unit < g.rotated;
    const int rotary_dim = static_cast<int>(p.rotary_dim), head_dim = static_cast<int>(p.head_dim);
    const int column_a = rotates ? unit * kVec8 : rotary_dim + (unit - g.rotated) * kVec8;
    const int column_b = column_a + (rotates ? rotary_dim / 2 : (g.units - g.rotated) * kVec8);
    const bool has_b = column_b < head_dim;  // the last copied vec8 may be alone
    Vec8<T> a[kHeads], b[kHeads];
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int head = at.lane + j * lanes;
      if (head >= heads) continue;
      const typename T::Storage* x = head_in<T>(p, at, head);
      a[j] = load_vec8_once<T>(x + column_a);
      if (has_b) b[j] = load_vec8_once<T>(x + column_b);
    }
    Vec8Angles<T, kPerPair> angles;
    if (rotates) angles.load(p, at, column_a, column_b);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int head = at.lane + j * lanes;
      if (head >= heads) continue;
      if (rotates) rotate_vec8s<T, kPerPair>(p, angles, &a[j], &b[j]);
      typename T::Storage* y = head_out<T>(p, at, head);
      store_vec8<T>(y + column_a, a[j]);
      if (has_b) store_vec8<T>(y + column_b, b[j]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads)
    rope_elements_kernel(const __grid_constant__ RopeParams p, const __grid_constant__ RopeGrid g) {
  const RopePlace at(p, g, blockIdx.x, threadIdx.x);
  allow_next_kernel();
  wait_for_previous_kernel();
  if (!at.exists) return;
  const typename T::Storage* x = head_in<T>(p, at, at.lane);
  typename T::Storage* y = head_out<T>(p, at, at.lane);
#pragma unroll 1
  for (int unit = at.first_unit; unit < g.units; unit += static_cast<int>(g.threads.value)) {
    if (unit >= g.rotated) {
      const int column = unit + g.rotated;  // each unit before it has two columns
      y[column] = x[column];
      continue;
    }
    const int column_a = p.interleaved ? 2 * unit : unit;
    const int column_b = p.interleaved ? 2 * unit + 1 : unit + static_cast<int>(p.rotary_dim) / 2;
    const bool per_pair = p.width < p.rotary_dim;
    const RopeRows rows = rows_of_pair(p, at, unit);
    const auto angle = [&](const void* from, std::int64_t row, int column) {
      if (!rows.exist) return canonical_nan();
      const float value = load_element(from, p.angle_dtype, row + (per_pair ? unit : column));
      return p.round_products ? T::load(T::store(value)) : value;
    };
    RopeAngle<float> by = {angle(p.cos.data, rows.cos, column_a), angle(p.sin.data, rows.sin, column_a),
                           angle(p.cos.data, rows.cos, column_b), angle(p.sin.data, rows.sin, column_b)};
    if (p.transposed) by = {by.cos_a, -by.sin_b, by.cos_b, -by.sin_a};
    float a = T::load(x[column_a]), b = T::load(x[column_b]);
    if (p.round_products) {
      rope_rotate_rounded(
          by, [](float value) { return T::load(T::store(value)); }, &a, &b);
    } else {
      rope_rotate(by, &a, &b);
    }
    y[column_a] = T::store(a);
    y[column_b] = T::store(b);
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void rope(const RopeParams& p, const RopePlan& plan, cudaStream_t stream) {
  for (std::int64_t first = 0; first < p.num_tokens;) {
    RopeGrid g;
    first += rope_grid(p, plan.heads > 0, std::max(plan.heads, 1), kRopeThreads, first, &g);
    const int blocks = static_cast<int>(rope_blocks(g));
    with_element_type(p.dtype, [&](auto t) {
      using T = decltype(t);
      const auto launch = [&](auto* kernel) {
        launch_dependent<kOverlap>(kernel, blocks, kRopeThreads, 0, stream, p, g);
      };
      const bool per_pair = p.width < p.rotary_dim;
      if (plan.heads == 0) {
        launch(rope_elements_kernel<T>);
      } else if (plan.heads == 1) {
        per_pair ? launch(rope_vec8s_kernel<T, 1, true>) : launch(rope_vec8s_kernel<T, 1, false>);
      } else if (plan.heads == 2) {
        per_pair ? launch(rope_vec8s_kernel<T, 2, true>) : launch(rope_vec8s_kernel<T, 2, false>);
      } else if constexpr (T::kPacked) {  // four heads of fp32 would not fit the registers
        per_pair ? launch(rope_vec8s_kernel<T, 4, true>) : launch(rope_vec8s_kernel<T, 4, false>);
      }
    });
  }
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
