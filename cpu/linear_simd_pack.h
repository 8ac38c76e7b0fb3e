// Packs linear's operands: rows of any element type become fp32 panels, transposed or not.
#pragma once

#include "linear_simd.h"
#include "simd.h"
#include "simd_fold.h"

namespace rlk::cpu::RLK_CPU_ISA {

template <class T>
RLK_HD float load_one(const unsigned char* p) {
  typename T::Storage s;
  std::memcpy(&s, p, sizeof s);
  if constexpr (sizeof(s) == 4) {
    return s;
  } else {
    return std::is_same_v<T, Bf16> ? float_of_bf16(static_cast<std::uint16_t>(s))
                                   : float_of_f16(static_cast<std::uint16_t>(s));
  }
}

// Calls f(T{}) for the element type that `dtype` names.
template <class F>
RLK_HD void with_type(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) {
    f(Fp32{});
  } else if (dtype == DType::kBFloat16) {
    f(Bf16{});
  } else {
    f(Fp16{});
  }
}

// One level of a transposition: exchanges lane l + d of a with lane l of b, for every l with (l & d) == 0.
template <int d, int... l>
RLK_HD void exchange(Floats* a, Floats* b, std::integer_sequence<int, l...>) {
  const auto x = a->v, y = b->v;
  a->v = shuffle<((l & d) == 0 ? l : kLanes + l - d)...>(x, y);
  b->v = shuffle<((l & d) == 0 ? l + d : kLanes + l)...>(x, y);
}

template <int d>
RLK_HD void exchange_all(Floats v[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & d) == 0) exchange<d>(&v[i], &v[i + d], std::make_integer_sequence<int, kLanes>());
  }
}

RLK_HD void transpose(Floats v[kLanes]) {
  exchange_all<1>(v);
  exchange_all<2>(v);
  exchange_all<4>(v);
  if constexpr (kLanes == 16) exchange_all<kLanes / 2>(v);
}

template <class T>
RLK_HD void pack_rows_of(const LinearRows& s, float* panel, std::int64_t stride) {
  for (std::int64_t r = 0; r < s.num_rows; ++r) {
    const unsigned char* row = s.rows[r];
    float* out = panel + r * stride;
    std::int64_t i = 0;
    for (; i + kLanes <= s.count; i += kLanes) store_bytes(out + i, T::load(row + i * sizeof(typename T::Storage)));
    for (; i < s.count; ++i) out[i] = load_one<T>(row + i * sizeof(typename T::Storage));
  }
}

// 16-bit elements, each in the lower half of a lane.
template <class T>
RLK_HD Floats widen_lower(Ints a) {
  if constexpr (std::is_same_v<T, Bf16>) return float_of(a << 16);
  return T::widen(__builtin_convertvector((Vector<std::uint32_t>)a.v, Vector<std::uint16_t, 2 * kLanes>));
}

template <class T>
RLK_HD void pack_columns_of(const LinearRows& s, float* panel, std::int64_t stride) {
  constexpr int kBytes = sizeof(typename T::Storage);
  constexpr int kPer = 4 / kBytes;         // elements per lane; a pair of 16-bit elements is transposed as one lane
  constexpr int kColumns = kPer * kLanes;  // a cache line, with sixteen lanes
  constexpr std::int64_t kAhead = 512;     // prefetches this many bytes ahead, which is one panel: the CPU's prefetcher
                                           // cannot follow as many streams as there are rows
  std::int64_t r = 0;
  for (; r + kLanes <= s.num_rows; r += kLanes) {
    std::int64_t i = 0;
    for (; i + kColumns <= s.count; i += kColumns) {
      Floats v[kLanes];
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; ++l) {
        const unsigned char* from = s.rows[r + l] + i * kBytes;
        __builtin_prefetch(from + kAhead);
        v[l] = load_bytes<Floats>(from);
      }
      float* to = panel + i * stride + r;
      transpose(v);
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; ++l) {
        if constexpr (kPer == 1) {
          store_bytes(to + l * stride, v[l]);
        } else {
          const Ints pair = bits_of(v[l]), upper = ints_of(unsigned_of(pair) >> 16);
          store_bytes(to + 2 * l * stride, widen_lower<T>(pair));
          store_bytes(to + (2 * l + 1) * stride, widen_lower<T>(upper));
        }
      }
    }
    for (; i < s.count; ++i) {
      for (int l = 0; l < kLanes; ++l) panel[i * stride + r + l] = load_one<T>(s.rows[r + l] + i * kBytes);
    }
  }
  for (; r < s.num_rows; ++r) {
    for (std::int64_t i = 0; i < s.count; ++i) panel[i * stride + r] = load_one<T>(s.rows[r] + i * kBytes);
  }
}

}  // namespace rlk::cpu::RLK_CPU_ISA
