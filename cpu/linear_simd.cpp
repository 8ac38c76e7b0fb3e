// The inner loops of the operator `linear`: packing, tiles of outputs, and operations on sums. CMake compiles this file
// once per instruction set. IEEE tiles keep tile_rows x 2 vectors of outputs in registers, each an ascending chain of
// fma. The throughput of fma limits these tiles. Tiles that model matrix units take about ten vector instructions per
// product.
#include "linear_simd.h"

#include <type_traits>
#include <utility>

#include "linear_simd_mma.h"
#include "linear_simd_pack.h"
#include "simd.h"
#include "simd_fold.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

// Rows of a tile: as many as fit in registers, next to two vectors of columns and one broadcast value. AVX-512 has 32
// registers, the other instruction sets 16.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif

void pack_rows(const LinearRows& source, float* panel, std::int64_t stride) {
  with_type(source.dtype, [&](auto t) { pack_rows_of<decltype(t)>(source, panel, stride); });
}
void pack_columns(const LinearRows& source, float* panel, std::int64_t stride) {
  with_type(source.dtype, [&](auto t) { pack_columns_of<decltype(t)>(source, panel, stride); });
}

Floats flushed_operand(Floats x, DType dtype) {
  const Floats least = broadcast<Floats>(dtype == DType::kBFloat16 ? 0x1p-126f : 0x1p-14f);
  return select(abs_of(x) < least, broadcast<Floats>(0.0f), x);
}

void prepare_a(const LinearUnit& unit, float* a, std::int32_t* exponents, std::int64_t rows, int k) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int i = 0; i < k; i += kLanes) {
      float* p = a + row * kPanelStride + i;
      const Floats x = load_bytes<Floats>(p);
      if (unit.arithmetic == Arithmetic::kGfx90a) {
        store_bytes(p, flushed_operand(x, unit.dtype));
      } else {  // each exponent is stored twice, once for each column of a pair
        const Ints e = operand_exponent(x, unit.dtype);
        store_bytes(exponents + row * kPanelStride + i, (e & 0xffff) | (e << 16));
      }
    }
  }
}

void prepare_b(const LinearUnit& unit, float* b, std::int32_t* exponents, int k) {
  for (int i = 0; i < k; ++i) {
    float* p = b + i * kTileColumns;
    const Floats x = load_bytes<Floats>(p), y = load_bytes<Floats>(p + kLanes);
    if (unit.arithmetic == Arithmetic::kGfx90a) {
      store_bytes(p, flushed_operand(x, unit.dtype));
      store_bytes(p + kLanes, flushed_operand(y, unit.dtype));
    } else {
      const Ints low = operand_exponent(x, unit.dtype), high = operand_exponent(y, unit.dtype);
      store_bytes(exponents + i * kLanes, (low & 0xffff) | (high << 16));
    }
  }
}

template <int kRows>
void multiply_ieee_rows(const LinearTile& t, std::int64_t row) {
  const float *a = t.a + row * kPanelStride, *b = t.b;
  float* out = t.sums + row * t.sums_stride;
  Floats sums[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] = load_bytes<Floats>(out + r * t.sums_stride);
    sums[r][1] = load_bytes<Floats>(out + r * t.sums_stride + kLanes);
  }
  for (int k = 0; k < t.k; ++k) {
    const Floats y0 = load_bytes<Floats>(b), y1 = load_bytes<Floats>(b + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Floats x = broadcast<Floats>(a[r * kPanelStride]);
      sums[r][0] = fma_rn(x, y0, sums[r][0]);
      sums[r][1] = fma_rn(x, y1, sums[r][1]);
    }
    ++a;
    b += kTileColumns;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    store_bytes(out + r * t.sums_stride, sums[r][0]);
    store_bytes(out + r * t.sums_stride + kLanes, sums[r][1]);
  }
}

void multiply_ieee(const LinearTile& t) {
  std::int64_t row = 0;
  for (; row + kTileRows <= t.rows; row += kTileRows) multiply_ieee_rows<kTileRows>(t, row);
  if constexpr (kTileRows > 8) {
    for (; row + 8 <= t.rows; row += 8) multiply_ieee_rows<8>(t, row);
  }
  for (; row + 4 <= t.rows; row += 4) multiply_ieee_rows<4>(t, row);
  for (; row + 2 <= t.rows; row += 2) multiply_ieee_rows<2>(t, row);
  for (; row < t.rows; ++row) multiply_ieee_rows<1>(t, row);
}

void multiply(const LinearTile& t) {
  switch (t.unit.arithmetic) {
    case Arithmetic::kIeee:
      return multiply_ieee(t);
    case Arithmetic::kSm80:
      return multiply_aligned<Sm80Mma>(t);
    case Arithmetic::kSm90:
      return multiply_aligned<Sm90Mma>(t);
    case Arithmetic::kGfx90a:
      return multiply_gfx90a(t);
    case Arithmetic::kGfx942:
      return multiply_aligned<Gfx942Mma>(t);
  }
}

template <class T>
constexpr int kBytes = sizeof(typename T::Storage);

// The first `count` of kLanes elements; the other elements are +0.
template <class T>
RLK_HD Floats load_some(const unsigned char* p, int count) {
  alignas(64) unsigned char padded[kLanes * kBytes<T>] = {};
  std::memcpy(padded, p, static_cast<std::size_t>(count) * kBytes<T>);
  return T::load(padded);
}
template <class T>
RLK_HD void store_some(unsigned char* p, Floats x, int count) {
  alignas(64) unsigned char padded[kLanes * kBytes<T>];
  T::store(padded, x);
  std::memcpy(p, padded, static_cast<std::size_t>(count) * kBytes<T>);
}

// out[j] = value(j, columns) for each vector of columns; the last vector may be short.
template <class T, class F>
RLK_HD void store_all(std::int64_t count, unsigned char* out, const F& value) {
  std::int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) T::store(out + j * kBytes<T>, value(j, kLanes));
  const int rest = static_cast<int>(count - j);
  if (rest != 0) store_some<T>(out + j * kBytes<T>, value(j, rest), rest);
}

template <class T>
RLK_HD Floats load_at(const void* p, std::int64_t j, int columns) {
  const unsigned char* from = static_cast<const unsigned char*>(p) + j * kBytes<T>;
  return columns == kLanes ? T::load(from) : load_some<T>(from, columns);
}

void store(const float* sums, std::int64_t count, const void* bias, DType bias_dtype, void* out, DType out_dtype) {
  unsigned char* to = static_cast<unsigned char*>(out);
  with_type(out_dtype, [&](auto t) {
    using T = decltype(t);
    if (bias == nullptr) {
      return store_all<T>(count, to, [&](std::int64_t j, int columns) { return load_at<Fp32>(sums, j, columns); });
    }
    with_type(bias_dtype, [&](auto u) {
      using U = decltype(u);
      store_all<T>(count, to, [&](std::int64_t j, int columns) {
        return add_rn(load_at<Fp32>(sums, j, columns), load_at<U>(bias, j, columns));
      });
    });
  });
}

void add_rows(const LinearRows& s, float* sums) {
  with_type(s.dtype, [&](auto t) {
    using T = decltype(t);
    store_all<Fp32>(s.count, reinterpret_cast<unsigned char*>(sums), [&](std::int64_t j, int columns) {
      Floats sum = broadcast<Floats>(0.0f);
      for (std::int64_t r = 0; r < s.num_rows; ++r) sum = add_rn(sum, load_at<T>(s.rows[r], j, columns));
      return sum;
    });
  });
}

void add_parts(const float* const* parts, int num_parts, float scale, std::int64_t count, void* out, DType out_dtype) {
  const Floats factor = broadcast<Floats>(scale);
  with_type(out_dtype, [&](auto t) {
    store_all<decltype(t)>(count, static_cast<unsigned char*>(out), [&](std::int64_t j, int columns) {
      Floats v[kMaxSegments];
      for (int i = 0; i < num_parts; ++i) v[i] = load_at<Fp32>(parts[i], j, columns);
      for (int n = num_parts; n > 1; n /= 2) {
        for (int i = 0; i < n / 2; ++i) v[i] = add_rn(v[2 * i], v[2 * i + 1]);
      }
      return scale == 1.0f ? v[0] : mul_rn(v[0], factor);
    });
  });
}

}  // namespace

const LinearLanes linear_simd = {kTileRows, kTileColumns, pack_rows, pack_columns, prepare_a,
                                 prepare_b, multiply,     store,     add_rows,     add_parts};

}  // namespace rlk::cpu::RLK_CPU_ISA
