// The inner loops of the operator `rope`. CMake compiles this file once per instruction set. Each lane of a vector
// computes one pair.
#include "rope_simd.h"

#include "kernels/rows/rope_rotate.h"
#include "simd_fold.h"
#include "simd_memory.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

RLK_HD Floats load_floats(const float* p, int count) {
  return load_at<Fp32>(reinterpret_cast<const unsigned char*>(p), 0, count);
}

// split_pairs() turns two consecutive vectors of pairs (2i, 2i + 1) into a vector of first elements and a vector of
// second elements. join_pairs() does the reverse.
RLK_HD void split_pairs(Floats* a, Floats* b) {
  const auto low = a->v, high = b->v;
#if defined(__AVX512F__)
  a->v = shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(low, high);
  b->v = shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(low, high);
#else
  a->v = shuffle<0, 2, 4, 6, 8, 10, 12, 14>(low, high);
  b->v = shuffle<1, 3, 5, 7, 9, 11, 13, 15>(low, high);
#endif
}
RLK_HD void join_pairs(Floats* a, Floats* b) {
  const auto first = a->v, second = b->v;
#if defined(__AVX512F__)
  a->v = shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(first, second);
  b->v = shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(first, second);
#else
  a->v = shuffle<0, 8, 1, 9, 2, 10, 3, 11>(first, second);
  b->v = shuffle<4, 12, 5, 13, 6, 14, 7, 15>(first, second);
#endif
}

void load_angles(const unsigned char* from, DType dtype, DType rounded_to, std::int64_t count, float* to) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    with_type(rounded_to, [&](auto u) {
      for (std::int64_t k = 0; k < count; k += kLanes) {
        const int some = count - k < kLanes ? static_cast<int>(count - k) : kLanes;
        const Floats x = rounded<decltype(u)>(load_at<T>(from, k, some));
        std::memcpy(to + k, &x, static_cast<std::size_t>(some) * sizeof(float));
      }
    });
  });
}

template <class T, bool kInterleaved, bool kRoundProducts>
RLK_HD void rotate_row(const RopeRow& row) {
  const std::int64_t to_b = row.pairs * kBytes<T>;  // distance to b where pairs lie in halves
  for (std::int64_t i = 0; i < row.pairs; i += kLanes) {
    const int count = row.pairs - i < kLanes ? static_cast<int>(row.pairs - i) : kLanes;
    const RopeAngle<Floats> angle = {load_floats(row.cos_a + i, count), load_floats(row.sin_a + i, count),
                                     load_floats(row.cos_b + i, count), load_floats(row.sin_b + i, count)};
    // The first vector has the first interleaved pairs; with few pairs it has all pairs.
    const int first = kInterleaved ? (2 * count < kLanes ? 2 * count : kLanes) : count;
    const int second = kInterleaved ? 2 * count - first : count;
    const std::int64_t at_a = (kInterleaved ? 2 * i : i) * kBytes<T>;
    const std::int64_t at_b = kInterleaved ? at_a + kLanes * kBytes<T> : at_a + to_b;
    Floats a = load_at<T>(row.x + at_a, 0, first);
    Floats b = second > 0 ? load_at<T>(row.x + at_b, 0, second) : broadcast<Floats>(0.0f);
    if constexpr (kInterleaved) split_pairs(&a, &b);
    if constexpr (kRoundProducts) {
      rope_rotate_rounded(
          angle, [](Floats x) { return rounded<T>(x); }, &a, &b);
    } else {
      rope_rotate(angle, &a, &b);
    }
    if constexpr (kInterleaved) join_pairs(&a, &b);
    store_at<T>(row.y + at_a, 0, first, a);
    if (second > 0) store_at<T>(row.y + at_b, 0, second, b);
  }
}

void rotate(const RopeRow& row) {
  with_type(row.dtype, [&](auto t) {
    using T = decltype(t);
    if (row.interleaved) {
      row.round_products ? rotate_row<T, true, true>(row) : rotate_row<T, true, false>(row);
    } else {
      row.round_products ? rotate_row<T, false, true>(row) : rotate_row<T, false, false>(row);
    }
  });
}

}  // namespace

const RopeLanes rope_simd = {load_angles, rotate};

}  // namespace rlk::cpu::RLK_CPU_ISA
