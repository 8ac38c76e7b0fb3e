// rope, with queries and keys in one launch. HBM bandwidth bounds the kernels, which read each attention head once and
// write it once. All heads of a token share its angles, so most reads of angles hit in a cache.
//
// Kernels with vec8s: a thread rotates two ranges of eight columns of some heads of a token. The ranges begin at
// columns c and c + rotary_dim / 2, and are the first and the second columns of eight pairs. If pairs are interleaved,
// each range holds four whole pairs. Separate threads copy columns that are not rotated.
// Kernels with elements: a thread rotates one pair of one head, with any width and alignment.
#pragma once

#include "hip/common/vec8.h"
#include "hip/rope/launches.h"
#include "kernels/rows/rope_rotate.h"

namespace rlk::hip {

// Rounds a value to type T. The later store makes a NaN canonical.
template <class T>
RLK_DEVICE float as_element(float x) {
  if constexpr (sizeof(typename T::Storage) == sizeof(float)) return x;
  return rounded<T>(x);
}

// The address of a head. Heads of queries come first, then heads of keys.
template <class T>
RLK_DEVICE const typename T::Storage* head_in(const RopeParams& p, const RopePlace& at, std::int64_t head) {
  const bool key = head >= p.q.num_heads;
  const auto* x = global_pointer(static_cast<const typename T::Storage*>(key ? p.k.x : p.q.x));
  return key ? x + at.offset(p.k.x_tokens) + (head - p.q.num_heads) * p.k.x_head_stride
             : x + at.offset(p.q.x_tokens) + head * p.q.x_head_stride;
}
template <class T>
RLK_DEVICE typename T::Storage* head_out(const RopeParams& p, const RopePlace& at, std::int64_t head) {
  const bool key = head >= p.q.num_heads;
  auto* y = global_pointer(static_cast<typename T::Storage*>(key ? p.k.y : p.q.y));
  return key ? y + at.offset(p.k.y_tokens) + (head - p.q.num_heads) * p.k.y_head_stride
             : y + at.offset(p.q.y_tokens) + head * p.q.y_head_stride;
}

RLK_DEVICE RopeRows rows_of_pair(const RopeParams& p, const RopePlace& at, int pair) {
  const int section = rope_section(p, pair);
  std::int64_t id = 0;
  if (p.position_ids != nullptr) {
    const std::int64_t i = at.id_offset(p, section);
    id = p.id_dtype == DType::kInt64 ? global_pointer(static_cast<const std::int64_t*>(p.position_ids))[i]
                                     : global_pointer(static_cast<const std::int32_t*>(p.position_ids))[i];
  }
  return {p, at, section, id};
}

// An angle, rounded to T if the call rounds products.
template <class T>
RLK_DEVICE float angle_at(const RopeParams& p, const void* from, std::int64_t i) {
  const float value = p.angle_dtype == DType::kFloat32
                          ? global_pointer(static_cast<const float*>(from))[i]
                          : T::load(global_pointer(static_cast<const typename T::Storage*>(from))[i]);
  return p.round_products ? as_element<T>(value) : value;
}
template <class T>
RLK_DEVICE RopeAngle<float> angle_of_pair(const RopeParams& p, const RopeRows& rows, int pair, int column_a,
                                          int column_b) {
  const float nan = canonical_nan();
  if (!rows.exist) return {nan, nan, nan, nan};
  const bool per_pair = p.width < p.rotary_dim;
  const int a = per_pair ? pair : column_a, b = per_pair ? pair : column_b;
  const float sin_a = angle_at<T>(p, p.sin.data, rows.sin + a), sin_b = angle_at<T>(p, p.sin.data, rows.sin + b);
  return {angle_at<T>(p, p.cos.data, rows.cos + a), p.transposed ? -sin_b : sin_a,
          angle_at<T>(p, p.cos.data, rows.cos + b), p.transposed ? -sin_a : sin_b};
}

// Loads kCount angles of type T or float32, and rounds them to T if the call rounds products. The angles have at most
// 16 bytes and are aligned to their total size.
template <class T, int kCount>
RLK_DEVICE void load_angles(const RopeParams& p, const void* from, std::int64_t at, float* to) {
  const auto load = [&](auto t) {
    using U = decltype(t);
    struct Memory {
      typename U::Storage v[kCount];
    } memory;
    constexpr int kAlignment = sizeof memory < 16 ? sizeof memory : 16;
    const auto* begin = global_pointer(static_cast<const typename U::Storage*>(from)) + at;
    __builtin_memcpy(&memory, __builtin_assume_aligned(begin, kAlignment), sizeof memory);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = U::load(memory.v[i]);
  };
  p.angle_dtype == DType::kFloat32 ? load(Fp32{}) : load(T{});
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = p.round_products ? as_element<T>(to[i]) : to[i];
}

// Loads the angles of eight pairs. Pair j has the columns column_a + j and column_b + j.
template <class T>
RLK_DEVICE void load_halves(const RopeParams& p, const RopeRows& rows, int column_a, int column_b,
                            RopeAngle<float>* angles) {
  float cos[2 * kRopeVec8], sin[2 * kRopeVec8];
#pragma unroll
  for (float& x : cos) x = canonical_nan();
#pragma unroll
  for (float& x : sin) x = canonical_nan();
  const int second = p.width < p.rotary_dim ? column_a : column_b;
  if (rows.exist) {
    load_angles<T, kRopeVec8>(p, p.cos.data, rows.cos + column_a, cos);
    load_angles<T, kRopeVec8>(p, p.sin.data, rows.sin + column_a, sin);
    load_angles<T, kRopeVec8>(p, p.cos.data, rows.cos + second, cos + kRopeVec8);
    load_angles<T, kRopeVec8>(p, p.sin.data, rows.sin + second, sin + kRopeVec8);
  }
#pragma unroll
  for (int j = 0; j < kRopeVec8; ++j) {
    const float sin_a = sin[j], sin_b = sin[kRopeVec8 + j];
    angles[j] = {cos[j], p.transposed ? -sin_b : sin_a, cos[kRopeVec8 + j], p.transposed ? -sin_a : sin_b};
  }
}

// Loads the angles of four pairs of neighbouring columns.
template <class T>
RLK_DEVICE void load_neighbours(const RopeParams& p, const RopeRows& rows, int column, RopeAngle<float>* angles) {
  float cos[kRopeVec8], sin[kRopeVec8];
#pragma unroll
  for (float& x : cos) x = canonical_nan();
#pragma unroll
  for (float& x : sin) x = canonical_nan();
  const bool per_pair = p.width < p.rotary_dim;
  if (rows.exist && per_pair) {
    float of_pairs[kRopeVec8];
    load_angles<T, kRopeVec8 / 2>(p, p.cos.data, rows.cos + column / 2, of_pairs);
    load_angles<T, kRopeVec8 / 2>(p, p.sin.data, rows.sin + column / 2, of_pairs + kRopeVec8 / 2);
#pragma unroll
    for (int i = 0; i < kRopeVec8; ++i) {
      cos[i] = of_pairs[i / 2];
      sin[i] = of_pairs[kRopeVec8 / 2 + i / 2];
    }
  } else if (rows.exist) {
    load_angles<T, kRopeVec8>(p, p.cos.data, rows.cos + column, cos);
    load_angles<T, kRopeVec8>(p, p.sin.data, rows.sin + column, sin);
  }
#pragma unroll
  for (int j = 0; j < kRopeVec8 / 2; ++j) {
    const float sin_a = sin[2 * j], sin_b = sin[2 * j + 1];
    angles[j] = {cos[2 * j], p.transposed ? -sin_b : sin_a, cos[2 * j + 1], p.transposed ? -sin_a : sin_b};
  }
}

template <class T>
RLK_DEVICE void rotate_pair(const RopeParams& p, const RopeAngle<float>& angle, float* a, float* b) {
  if (p.round_products) {
    rope_rotate_rounded(
        angle, [](float x) { return as_element<T>(x); }, a, b);
  } else {
    rope_rotate(angle, a, b);
  }
}

template <class T, bool kInterleaved>
RLK_DEVICE void rope_vec8s_kernel(const RopeParams& p, const RopeGrid& g, std::int64_t first_block) {
  const RopePlace at(p, g, static_cast<std::uint32_t>(first_block + block_id_x()),
                     static_cast<std::uint32_t>(thread_id()));
  if (!at.exists) return;
  const int heads = static_cast<int>(p.q.num_heads + p.k.num_heads);
  const int rotary_dim = static_cast<int>(p.rotary_dim), head_dim = static_cast<int>(p.head_dim);
#pragma unroll 1
  for (int unit = at.first_unit; unit < g.units; unit += static_cast<int>(g.threads.value)) {
    const bool rotates = unit < g.rotated;
    const int column_a = rotates ? unit * kRopeVec8 : rotary_dim + (unit - g.rotated) * kRopeVec8;
    const int column_b = column_a + (rotates ? rotary_dim / 2 : (g.units - g.rotated) * kRopeVec8);
    if (!rotates) {
      struct Memory {
        typename T::Storage v[kRopeVec8];
      } memory;
#pragma unroll 1
      for (int head = at.lane; head < heads; head += static_cast<int>(g.lanes.value)) {
        for (const int column : {column_a, column_b}) {
          if (column >= head_dim) continue;  // the last unit of copied columns may consist of a single vec8
          __builtin_memcpy(&memory, __builtin_assume_aligned(head_in<T>(p, at, head) + column, 16), sizeof memory);
          __builtin_memcpy(__builtin_assume_aligned(head_out<T>(p, at, head) + column, 16), &memory, sizeof memory);
        }
      }
      continue;
    }
    // Pair j of the thread. If the two columns of a pair lie in different halves, they are a + j and b + j. If they are
    // neighbours, they are columns 2j and 2j + 1 of the two vec8s.
    constexpr int kHalf = kRopeVec8 / 2;
    RopeAngle<float> angles[kRopeVec8];
    if constexpr (kInterleaved) {
      load_neighbours<T>(p, rows_of_pair(p, at, column_a / 2), column_a, angles);
      load_neighbours<T>(p, rows_of_pair(p, at, column_b / 2), column_b, angles + kHalf);
    } else {
      load_halves<T>(p, rows_of_pair(p, at, column_a), column_a, column_b, angles);
    }
#pragma unroll 1
    for (int head = at.lane; head < heads; head += static_cast<int>(g.lanes.value)) {
      const auto* x = head_in<T>(p, at, head);
      auto* y = head_out<T>(p, at, head);
      Columns a = load_columns<T, true>(x + column_a, kRopeVec8), b = load_columns<T, true>(x + column_b, kRopeVec8);
#pragma unroll
      for (int j = 0; j < kRopeVec8; ++j) {
        Columns& of = j < kHalf ? a : b;
        float *first = kInterleaved ? &of.v[2 * (j % kHalf)] : &a.v[j],
              *second = kInterleaved ? &of.v[2 * (j % kHalf) + 1] : &b.v[j];
        rotate_pair<T>(p, angles[j], first, second);
      }
      store_columns<T, true>(y + column_a, kRopeVec8, a);
      store_columns<T, true>(y + column_b, kRopeVec8, b);
    }
  }
}

template <class T>
RLK_DEVICE void rope_elements_kernel(const RopeParams& p, const RopeGrid& g, std::int64_t first_block) {
  const RopePlace at(p, g, static_cast<std::uint32_t>(first_block + block_id_x()),
                     static_cast<std::uint32_t>(thread_id()));
  if (!at.exists) return;
  const auto* x = head_in<T>(p, at, at.lane);
  auto* y = head_out<T>(p, at, at.lane);
#pragma unroll 1
  for (int unit = at.first_unit; unit < g.units; unit += static_cast<int>(g.threads.value)) {
    if (unit >= g.rotated) {
      // each of the first g.rotated units covers two columns, and each later unit one
      const int column = unit + g.rotated;
      y[column] = x[column];
      continue;
    }
    const int column_a = p.interleaved ? 2 * unit : unit;
    const int column_b = p.interleaved ? 2 * unit + 1 : unit + static_cast<int>(p.rotary_dim) / 2;
    const RopeAngle<float> angle = angle_of_pair<T>(p, rows_of_pair(p, at, unit), unit, column_a, column_b);
    float a = T::load(x[column_a]), b = T::load(x[column_b]);
    rotate_pair<T>(p, angle, &a, &b);
    y[column_a] = T::store(a);
    y[column_b] = T::store(b);
  }
}

}  // namespace rlk::hip
