// The inner loops of the operator `rms_norm`. CMake compiles this file once per instruction set. Each lane of the
// contract's sums is one vector lane. Sixteen (or eight) lanes with eight columns each are neighbours in memory, and
// are transposed in registers.
#include "rms_norm_simd.h"

#include "kernels/rows/rms_norm_row.h"
#include "simd.h"
#include "simd_fold.h"
#include "simd_memory.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

constexpr int kVec8 = kRmsNormLaneColumns;
constexpr int kBlockColumns = kVec8 * kLanes;  // columns of one vector of lanes
constexpr int kChunkColumns = kVec8 * kRmsNormLanes;
static_assert(kRmsNormPadding % kBlockColumns == 0);

RLK_HD Floats load_floats(const float* p, std::int64_t k, int columns) {
  return load_at<Fp32>(reinterpret_cast<const unsigned char*>(p), k, columns);
}
RLK_HD void store_floats(float* p, std::int64_t k, int columns, Floats x) {
  if (columns == kLanes) return store_bytes(p + k, x);
  std::memcpy(p + k, &x, static_cast<std::size_t>(columns) * sizeof(float));
}

RLK_HD void clear_padding(float* scratch, std::int64_t columns) {
  for (std::int64_t k = columns; k < padded_columns(columns); ++k) scratch[k] = 0.0f;
}

template <class V>
RLK_HD V low_pairs(V a, V b) {  // pairs of 32 bits each, within 128 bits
#if defined(__AVX512F__)
  return shuffle<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(a, b);
#else
  return shuffle<0, 8, 1, 9, 4, 12, 5, 13>(a, b);
#endif
}
template <class V>
RLK_HD V high_pairs(V a, V b) {
#if defined(__AVX512F__)
  return shuffle<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(a, b);
#else
  return shuffle<2, 10, 3, 11, 6, 14, 7, 15>(a, b);
#endif
}
template <class V>
RLK_HD V low_halves(V a, V b) {  // halves of 64 bits each, within 128 bits
#if defined(__AVX512F__)
  return shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b);
#else
  return shuffle<0, 1, 8, 9, 4, 5, 12, 13>(a, b);
#endif
}
template <class V>
RLK_HD V high_halves(V a, V b) {
#if defined(__AVX512F__)
  return shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b);
#else
  return shuffle<2, 3, 10, 11, 6, 7, 14, 15>(a, b);
#endif
}

// A vec8 is the eight consecutive columns of one lane of the contract. columns[j] gets column j of each of the kLanes
// vec8s from p on, in the order of lane_in_block().
RLK_HD void load_vec8s(const float* p, Floats columns[kVec8]) {
  Vector<float> v[kVec8], w[kVec8];
#pragma GCC unroll 8
  for (int i = 0; i < kVec8; ++i) v[i] = load_bytes<Floats>(p + i * kLanes).v;
#pragma GCC unroll 2
  for (int i = 0; i < kVec8; i += 4) {  // transposes 4 x 4 within 128 bits; a vector then has columns j and 4 + j
    const auto a = low_pairs(v[i], v[i + 1]), b = low_pairs(v[i + 2], v[i + 3]);
    const auto c = high_pairs(v[i], v[i + 1]), d = high_pairs(v[i + 2], v[i + 3]);
    w[i] = low_halves(a, b);
    w[i + 1] = high_halves(a, b);
    w[i + 2] = low_halves(c, d);
    w[i + 3] = high_halves(c, d);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    columns[j].v = even_quarters(w[j], w[j + 4]);
    columns[j + 4].v = odd_quarters(w[j], w[j + 4]);
  }
}
// The contract's lane, within a block, that lane l of a vector holds.
constexpr int lane_in_block(int l) { return kLanes == 8 ? l : l < 8 ? 2 * l : 2 * (l - 8) + 1; }

// Sum of a[i] * b[i] in the contract's order: each lane is a chain of fma(a[i], b[i], s).
RLK_HD float lane_sum(const float* a, const float* b, std::int64_t columns) {
  alignas(64) float lanes[kRmsNormLanes];
  const std::int64_t padded = padded_columns(columns);
  int num = 0;
  for (; num < kRmsNormLanes && num * kVec8 < columns; num += kLanes) {
    Floats s = broadcast<Floats>(0.0f);
    for (std::int64_t k = num * kVec8; k < padded; k += kChunkColumns) {
      Floats x[kVec8], y[kVec8];
      load_vec8s(a + k, x);
      if (a == b) {
        for (int j = 0; j < kVec8; ++j) s = fma_rn(x[j], x[j], s);
      } else {
        load_vec8s(b + k, y);
        for (int j = 0; j < kVec8; ++j) s = fma_rn(x[j], y[j], s);
      }
    }
    alignas(64) float of_block[kLanes];
    store_bytes(of_block, s);
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) lanes[num + lane_in_block(l)] = of_block[l];
  }
  int width = kLanes;
  for (; width < num; width *= 2) {
  }
  for (; num < width; ++num) lanes[num] = 0.0f;
  for (; width > 1; width /= 2) {
    for (int i = 0; i < width / 2; ++i) lanes[i] = rlk::add_rn(lanes[2 * i], lanes[2 * i + 1]);
  }
  return columns == 0 ? 0.0f : rlk::add_rn(lanes[0], 0.0f);
}

void load_weight(const unsigned char* weight, DType dtype, float offset, std::int64_t columns, float* to) {
  with_type(dtype, [&](auto t) {
    for_each_vector(columns, [&](std::int64_t k, int count) {
      store_floats(to, k, count, rms_norm_weight(load_at<decltype(t)>(weight, k, count), offset));
    });
  });
}

float load_row(const RmsNormRow& row) {
  with_type(row.dtype, [&](auto t) {
    using T = decltype(t);
    for_each_vector(row.columns, [&](std::int64_t k, int count) {
      Floats h = load_at<T>(row.x, k, count);
      if (row.residual != nullptr) {
        h = rounded<T>(add_rn(h, load_at<T>(row.residual, k, count)));
        store_at<T>(row.new_residual, k, count, h);
      }
      store_floats(row.h, k, count, h);
    });
  });
  clear_padding(row.h, row.columns);
  return lane_sum(row.h, row.h, row.columns);
}

void store_row(const RmsNormRow& row, float rstd) {
  const Floats r = broadcast<Floats>(rstd);
  with_type(row.dtype, [&](auto t) {
    using T = decltype(t);
    for_each_vector(row.columns, [&](std::int64_t k, int count) {
      Floats y = mul_rn(load_floats(row.h, k, count), r);
      if (row.weight != nullptr) {
        if (row.round_before_weight) y = rounded<T>(y);
        y = mul_rn(y, load_floats(row.weight, k, count));
      }
      store_at<T>(row.y, k, count, y);
    });
  });
}

template <class T>
RLK_HD void add_product(const RmsNormBackwardRow& row, Floats dy, Floats xhat, float* sums, std::int64_t k, int count) {
  const Floats z = row.round_before_weight ? rounded<T>(xhat) : xhat;
  store_floats(sums, k, count, fma_rn(dy, z, load_floats(sums, k, count)));
}

void backward_row(const RmsNormBackwardRow& row) {
  const Floats r = broadcast<Floats>(row.rstd);
  with_type(row.dtype, [&](auto t) {
    using T = decltype(t);
    for_each_vector(row.columns, [&](std::int64_t k, int count) {
      const Floats dy = load_at<T>(row.dy, k, count), xhat = mul_rn(load_at<T>(row.h, k, count), r);
      const Floats g = row.weight == nullptr ? dy : mul_rn(dy, load_floats(row.weight, k, count));
      store_floats(row.g, k, count, g);
      store_floats(row.xhat, k, count, xhat);
      if (row.sums != nullptr) add_product<T>(row, dy, xhat, row.sums, k, count);
    });
    clear_padding(row.g, row.columns);
    clear_padding(row.xhat, row.columns);
    const float mean = rlk::div_rn(lane_sum(row.g, row.xhat, row.columns), static_cast<float>(row.columns));
    const Floats c = broadcast<Floats>(mean);
    for_each_vector(row.columns, [&](std::int64_t k, int count) {
      const Floats e =
          row.d_new_residual == nullptr ? broadcast<Floats>(0.0f) : load_at<T>(row.d_new_residual, k, count);
      const Floats g = load_floats(row.g, k, count), xhat = load_floats(row.xhat, k, count);
      store_at<T>(row.dx, k, count, rms_norm_dx(g, xhat, c, r, e));
    });
  });
}

void add_to_sums(const RmsNormBackwardRow& row, std::int64_t first, std::int64_t count) {
  const Floats r = broadcast<Floats>(row.rstd);
  with_type(row.dtype, [&](auto t) {
    using T = decltype(t);
    const unsigned char *dy = row.dy + first * kBytes<T>, *h = row.h + first * kBytes<T>;
    for_each_vector(count, [&](std::int64_t k, int columns) {
      add_product<T>(row, load_at<T>(dy, k, columns), mul_rn(load_at<T>(h, k, columns), r), row.sums, k, columns);
    });
  });
}

void store(const float* sums, std::int64_t count, unsigned char* to, DType dtype) {
  with_type(dtype, [&](auto t) {
    for_each_vector(count, [&](std::int64_t k, int columns) {
      store_at<decltype(t)>(to, k, columns, load_floats(sums, k, columns));
    });
  });
}

}  // namespace

const RmsNormLanes rms_norm_simd = {load_weight, load_row, store_row, backward_row, add_to_sums, store};

}  // namespace rlk::cpu::RLK_CPU_ISA
