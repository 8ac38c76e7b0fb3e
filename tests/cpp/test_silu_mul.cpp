// Compares silu_mul, gelu_mul and their gradients bit for bit with a second implementation written from the contract.
// The backend is the CPU's or, with RLK_TEST_HIP, HIP's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/silu_mul.h"
#include "silu_mul_reference.h"

namespace silu_mul_test {
namespace {

using linear_test::Data;
using linear_test::for_each_backend;
using linear_test::kWholeElements;
using linear_test::Matrix;
using linear_test::name;
using rlk::GatedMulBackwardParams;
using rlk::GatedMulParams;
using rlk::RowLayout;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh};

const char* name(Activation a) {
  constexpr const char* kNames[] = {"silu", "gelu", "gelu_tanh"};
  return kNames[static_cast<int>(a)];
}

#if RLK_TEST_HIP
void run(const GatedMulParams& p) { rlk::hip::gated_mul(p, 0, 0); }
void run(const GatedMulBackwardParams& p) { rlk::hip::gated_mul_backward(p, 0, 0); }
#else
void run(const GatedMulParams& p) { rlk::cpu::gated_mul(p); }
void run(const GatedMulBackwardParams& p) { rlk::cpu::gated_mul_backward(p); }
#endif

// Arguments and layouts of a call. Rows have `pad` elements between them; the first one begins `shift` bytes off.
struct Case {
  std::int64_t rows, columns;
  DType dtype = DType::kBFloat16;
  Activation activation = Activation::kSilu;
  bool packed = false, round_before_mul = false;
  Data data = Data::kNormal;
  std::int64_t pad = 0;
  std::size_t shift = 0;
  unsigned seed = 1;

  std::string text() const {
    return std::string(name(activation)) + " " + name(dtype) + " [" + std::to_string(rows) + ", " +
           std::to_string(columns) + "]" + (packed ? " packed" : "") + (round_before_mul ? " round_before_mul" : "") +
           " " + name(data) + " pad " + std::to_string(pad);
  }
  Matrix matrix(unsigned number, int halves = 1) const {
    Matrix m(rows, halves * columns, dtype, halves * columns + pad, shift);
    return m.fill(100 * seed + number, data);
  }
  template <class Params>
  Params params() const {
    Params p;
    p.num_rows = rows;
    p.columns = columns;
    p.dtype = dtype;
    p.activation = activation;
    p.round_before_mul = round_before_mul;
    return p;
  }
};

unsigned char* half_way(void* packed, const Case& c) {
  return static_cast<unsigned char*>(packed) + c.columns * rlk::size_of(c.dtype);
}

void check_with(const Case& c, Matrix* gate, Matrix* up, Matrix* dy) {
  GatedMulParams p = c.params<GatedMulParams>();
  GatedMulBackwardParams q = c.params<GatedMulBackwardParams>();
  p.gate = q.gate = gate->data();
  p.up = q.up = c.packed ? half_way(gate->data(), c) : up->data();
  q.dy = dy->data();
  p.gate_rows = q.gate_rows = gate->rows();
  p.up_rows = q.up_rows = c.packed ? gate->rows() : up->rows();
  q.dy_rows = dy->rows();
  const Matrix y(c.rows, c.columns, c.dtype, c.columns + 3);
  const Matrix both(c.rows, 2 * c.columns, c.dtype, 2 * c.columns + 1), one = y;
  p.y_rows = y.rows();
  q.d_gate_rows = q.d_up_rows = c.packed ? both.rows() : one.rows();
  const Patterns want = reference(p);
  const Backward gradients = reference(q);
  Patterns packed;
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (const Patterns* half : {&gradients.d_gate, &gradients.d_up}) {
      packed.insert(packed.end(), half->begin() + i * c.columns, half->begin() + (i + 1) * c.columns);
    }
  }
  for_each_backend([&](const std::string& backend) {
    Matrix got = y;
    p.y = got.data();
    run(p);
    ASSERT_NO_FATAL_FAILURE(got.expect(want, c.text() + ", y, " + backend));
    if (c.packed) {
      Matrix d = both;
      q.d_gate = d.data();
      q.d_up = half_way(d.data(), c);
      run(q);
      return d.expect(packed, c.text() + ", d_gate_up, " + backend);
    }
    for (const int wanted : {3, 1, 2}) {  // both, or one of them
      Matrix d_gate = one, d_up = one;
      q.d_gate = wanted & 1 ? d_gate.data() : nullptr;
      q.d_up = wanted & 2 ? d_up.data() : nullptr;
      run(q);
      if (wanted & 1) {
        ASSERT_NO_FATAL_FAILURE(d_gate.expect(gradients.d_gate, c.text() + ", d_gate, " + backend));
      }
      if (wanted & 2) {
        ASSERT_NO_FATAL_FAILURE(d_up.expect(gradients.d_up, c.text() + ", d_up, " + backend));
      }
    }
  });
}

void check(const Case& c) {
  Matrix gate = c.matrix(1, c.packed ? 2 : 1), up = c.matrix(2), dy = c.matrix(3);
  check_with(c, &gate, &up, &dy);
}

class SiluMul : public linear_test::Linear {};

// Column counts: 0, 1, primes, an intermediate size and more than a thread's task. A vec8, the vectors of lanes of
// either width and the share of a GPU's block come with one column less and one more.
constexpr std::int64_t kColumns[] = {0,   1,   7,    8,    9,    15,   16,   17,    31,   64,
                                     131, 521, 1000, 1023, 1024, 1025, 2048, 11008, 17000};

TEST_F(SiluMul, EveryWidthHasTheBitsOfTheContract) {
  unsigned seed = 0;
  for (const DType dtype : kDtypes) {
    for (const std::int64_t columns : kColumns) {
      for (const bool packed : {false, true}) {
        Case c{columns > 4000 ? 1 : 3, columns, dtype};
        c.activation = kActivations[++seed % 3];
        c.packed = packed;
        c.round_before_mul = seed % 5 < 2;
        c.pad = seed % 7;
        c.shift = kWholeElements ? 0 : seed % 3;
        c.seed = seed;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(SiluMul, EveryOptionTogetherWithEveryOther) {
  unsigned seed = 60;
  for (const DType dtype : kDtypes) {
    for (const Activation activation : kActivations) {
      for (const bool packed : {false, true}) {
        for (const bool round_before_mul : {false, true}) {
          Case c{5, 200, dtype, activation, packed, round_before_mul};
          c.seed = ++seed;
          ASSERT_NO_FATAL_FAILURE(check(c));
        }
      }
    }
  }
}

TEST_F(SiluMul, EveryExponentEveryKindOfZeroInfinitiesAndNans) {
  for (const DType dtype : kDtypes) {
    for (const Activation activation : kActivations) {
      for (const Data data : {Data::kWide, Data::kTiny, Data::kSparse, Data::kSpecial}) {
        Case c{9, 136, dtype, activation, data == Data::kTiny, data == Data::kWide};
        c.data = data;
        c.seed = static_cast<unsigned>(data) + 200;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

// Covers all values of the 16-bit types, and for float32 the ends of every branch and their neighbours.
TEST_F(SiluMul, EveryValueOfAGate) {
  for (const DType dtype : kDtypes) {
    for (const Activation activation : kActivations) {
      Case c{dtype == DType::kFloat32 ? 1 : 16, 4096, dtype, activation};
      Matrix gate = c.matrix(5), up = c.matrix(6), dy = c.matrix(7);
      if (dtype == DType::kFloat32) {
        std::int64_t k = 0;
        for (const float x :
             {0.0f, 0x1p-149f,   0x1p-126f, 0x1p-24f, 0x1p-23f, 0.5f,           0.7f,  0.8774f, 1.0f,  1.41421354f,
              4.0f, 5.65685463f, 10.0f,     17.0f,    87.0f,    0x1.5d589ep+6f, 88.0f, 1e19f,   1e20f, 3e38f}) {
          for (int ulp = -3; ulp <= 3; ++ulp) {
            const auto pattern = static_cast<std::uint32_t>(std::abs(rlk::bits_of(x) + ulp));
            gate.set(0, k++, pattern);
            gate.set(0, k++, pattern | 0x80000000u);
          }
        }
      } else {
        for (std::uint32_t i = 0; i < 1u << 16; ++i) gate.set(i / 4096, i % 4096, i);
      }
      ASSERT_NO_FATAL_FAILURE(check_with(c, &gate, &up, &dy));
    }
  }
}

TEST_F(SiluMul, AnInfiniteGateHasTheLimits) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Activation activation : kActivations) {
    Case c{1, 3, DType::kFloat32, activation};
    Matrix gate = c.matrix(1), ones = c.matrix(2);
    const float gates[] = {-kInf, kInf, std::nanf("")};
    for (int k = 0; k < 3; ++k) {
      gate.set(0, k, static_cast<std::uint32_t>(rlk::bits_of(gates[k])));
      ones.set(0, k, static_cast<std::uint32_t>(rlk::bits_of(1.0f)));
    }
    Matrix y = ones, d_gate = ones, d_up = ones;
    GatedMulParams p = c.params<GatedMulParams>();
    GatedMulBackwardParams q = c.params<GatedMulBackwardParams>();
    p.gate = q.gate = gate.data();
    p.up = q.up = q.dy = ones.data();
    p.y = y.data();
    q.d_gate = d_gate.data();
    q.d_up = d_up.data();
    p.gate_rows = p.up_rows = p.y_rows = q.gate_rows = q.up_rows = q.dy_rows = q.d_gate_rows = q.d_up_rows = y.rows();
    run(p);
    run(q);
    const auto at = [](const Matrix& m, int k) { return value_of(m.at(0, k), DType::kFloat32); };
    for (const Matrix* m : {&y, &d_up}) {
      EXPECT_EQ(m->at(0, 0), 0x80000000u) << name(activation) << ": -0";
      EXPECT_EQ(at(*m, 1), kInf) << name(activation);
    }
    EXPECT_EQ(at(d_gate, 0), 0.0f) << name(activation);
    EXPECT_EQ(at(d_gate, 1), 1.0f) << name(activation);
    for (const Matrix* m : {&y, &d_gate, &d_up}) EXPECT_EQ(m->at(0, 2), 0x7fc00000u) << name(activation);
  }
}

TEST_F(SiluMul, RowsOfTwoStridesAndBackwardInMemory) {
  for (const RowLayout& rows : {RowLayout{4, 900, 70}, RowLayout{3, 64, 640}, RowLayout{100, 0, -72}}) {
    Matrix gate(12, 64, DType::kBFloat16, rows), up(12, 64, DType::kBFloat16, RowLayout{6, 500, 64});
    gate.fill(31, Data::kNormal);
    up.fill(32, Data::kNormal);
    const Matrix y(12, 64, DType::kBFloat16, RowLayout{6, -600, 66});
    GatedMulParams p;
    p.gate = gate.data();
    p.up = up.data();
    p.gate_rows = gate.rows();
    p.up_rows = up.rows();
    p.y_rows = y.rows();
    p.num_rows = 12;
    p.columns = 64;
    const Patterns want = reference(p);
    for_each_backend([&](const std::string& backend) {
      Matrix got = y;
      p.y = got.data();
      run(p);
      ASSERT_NO_FATAL_FAILURE(got.expect(want, backend));
    });
  }
}

TEST_F(SiluMul, InPlace) {
  for (const std::int64_t columns : {40, 2048, 2051}) {  // 2051: not whole vec8s
    const Case c{3, columns, DType::kBFloat16, Activation::kSilu, false, true};
    Matrix gate = c.matrix(1), up = c.matrix(2), dy = c.matrix(3);
    GatedMulParams p = c.params<GatedMulParams>();
    GatedMulBackwardParams q = c.params<GatedMulBackwardParams>();
    p.gate = q.gate = gate.data();
    p.up = q.up = up.data();
    q.dy = dy.data();
    p.gate_rows = p.up_rows = p.y_rows = gate.rows();
    q.gate_rows = q.up_rows = q.dy_rows = q.d_gate_rows = q.d_up_rows = gate.rows();
    const Patterns want = reference(p);
    const Backward gradients = reference(q);
    for_each_backend([&](const std::string& backend) {
      Matrix a = gate, b = up, d = dy;
      p.gate = p.y = a.data();
      run(p);
      ASSERT_NO_FATAL_FAILURE(a.expect(want, "y over gate, " + backend));
      a = gate;
      p.gate = a.data();
      p.up = p.y = b.data();
      run(p);
      ASSERT_NO_FATAL_FAILURE(b.expect(want, "y over up, " + backend));
      b = up;
      p.up = up.data();
      q.dy = dy.data();
      q.gate = q.d_gate = a.data();
      q.up = q.d_up = b.data();
      run(q);
      ASSERT_NO_FATAL_FAILURE(a.expect(gradients.d_gate, "d_gate over gate, " + backend));
      ASSERT_NO_FATAL_FAILURE(b.expect(gradients.d_up, "d_up over up, " + backend));
      a = gate;
      b = up;
      q.dy = q.d_gate = d.data();
      run(q);
      ASSERT_NO_FATAL_FAILURE(d.expect(gradients.d_gate, "d_gate over dy, " + backend));
    });
  }
}

TEST_F(SiluMul, ManyShortRows) {
  for (const std::int64_t columns : {1, 8, 24, 128}) {
    for (const DType dtype : kDtypes) {
      Case c{700, columns, dtype};
      c.packed = columns % 16 == 8;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

TEST_F(SiluMul, WhatWouldCorruptMemoryIsRefused) {
  Matrix x(2, 3, DType::kBFloat16), y(2, 3, DType::kBFloat16);
  GatedMulParams p;
  p.gate = x.data();
  p.y = y.data();
  p.num_rows = 2;
  p.columns = 3;
  EXPECT_THROW(run(p), rlk::InvalidArgument);  // no up
  p.up = x.data();
  p.gate_rows.inner = 0;
  EXPECT_THROW(run(p), rlk::InvalidArgument);
  p.gate_rows.inner = 1;
  p.dtype = DType::kInt32;
  EXPECT_THROW(run(p), rlk::InvalidArgument);
  p.dtype = DType::kBFloat16;
  p.columns = -1;
  EXPECT_THROW(run(p), rlk::InvalidArgument);
  p.columns = 3;
  p.activation = static_cast<Activation>(3);
  EXPECT_THROW(run(p), rlk::InvalidArgument);
  GatedMulBackwardParams q;
  q.gate = q.up = x.data();
  q.d_gate = y.data();
  q.num_rows = 2;
  q.columns = 3;
  EXPECT_THROW(run(q), rlk::InvalidArgument);  // no dy
}

}  // namespace
}  // namespace silu_mul_test
