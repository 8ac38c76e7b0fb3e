// Tests rms_norm, forward and gradients, bit for bit against a second implementation, written from the contract. The
// backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/build.h"
#include "rlk/ops/rms_norm.h"
#include "rms_norm_reference.h"

namespace rms_norm_test {
namespace {

using linear_test::Data;
using linear_test::for_each_backend;
using linear_test::kWholeElements;
using linear_test::Matrix;
using linear_test::name;
using rlk::RmsNormBackwardParams;
using rlk::RmsNormParams;
using rlk::RowLayout;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

#if RLK_TEST_HIP
void run(const RmsNormParams& p) { rlk::hip::rms_norm(p, 0, 0); }
void run(RmsNormBackwardParams p) {
  std::vector<float> workspace(static_cast<std::size_t>(rlk::hip::rms_norm_backward_workspace_bytes(p, 0)) / 4 + 4);
  p.workspace = workspace.data() + (16 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 16) % 16 / 4;
  rlk::hip::rms_norm_backward(p, 0, 0);
}
#else
void run(const RmsNormParams& p) { rlk::cpu::rms_norm(p); }
void run(const RmsNormBackwardParams& p) { rlk::cpu::rms_norm_backward(p); }
#endif

// Arguments and layouts of a call. Rows have `pad` more elements between them than needed, and lie `shift` bytes off
// alignment.
struct Case {
  std::int64_t rows, columns;
  DType dtype = DType::kBFloat16, weight_dtype = DType::kBFloat16;
  bool residual = false, weight = true, round_before_weight = false;
  float weight_offset = 0.0f, eps = 1e-6f;
  Data data = Data::kNormal;
  std::int64_t pad = 0;
  std::size_t shift = 0;
  bool main_grad = false;
  DType dweight_dtype = DType::kFloat32;
  unsigned seed = 1;
  int wanted = 3;  // for many rows it selects outputs, since all combinations would take long

  std::string text() const {
    return std::string(name(dtype)) + " [" + std::to_string(rows) + ", " + std::to_string(columns) + "] weight " +
           (weight ? name(weight_dtype) : "none") + (residual ? " residual" : "") +
           (round_before_weight ? " round_before_weight" : "") + " " + name(data) + " pad " + std::to_string(pad);
  }
  Matrix matrix(unsigned number) const {
    Matrix m(rows, columns, dtype, columns + pad, shift);
    return m.fill(100 * seed + number, data);
  }
};

void check_forward(const Case& c) {
  Matrix x = c.matrix(1), residual = c.matrix(2), weight(1, c.columns, c.weight_dtype);
  weight.fill(c.seed + 3, c.data == Data::kSpecial ? Data::kNormal : c.data);
  const Matrix y(c.rows, c.columns, c.dtype, c.columns + 3), rstd(1, c.rows, DType::kFloat32);
  RmsNormParams p;
  p.x = x.data();
  p.weight = c.weight ? weight.data() : nullptr;
  p.x_rows = x.rows();
  p.residual_rows = residual.rows();
  p.y_rows = p.new_residual_rows = y.rows();
  p.num_rows = c.rows;
  p.columns = c.columns;
  p.dtype = c.dtype;
  p.weight_dtype = c.weight_dtype;
  p.eps = c.eps;
  p.weight_offset = c.weight ? c.weight_offset : 0.0f;
  p.round_before_weight = c.round_before_weight;
  if (c.residual) p.residual = residual.data();
  const Forward want = reference(p);
  for_each_backend([&](const std::string& backend) {
    Matrix got = y, sums = y, of_rows = rstd;
    p.y = got.data();
    p.new_residual = c.residual ? sums.data() : nullptr;
    p.rstd = static_cast<float*>(of_rows.data());
    run(p);
    ASSERT_NO_FATAL_FAILURE(got.expect(want.y, c.text() + ", y, " + backend));
    if (c.residual) {
      ASSERT_NO_FATAL_FAILURE(sums.expect(want.new_residual, c.text() + ", new_residual, " + backend));
    }
    ASSERT_NO_FATAL_FAILURE(of_rows.expect(want.rstd, c.text() + ", rstd, " + backend));
  });
}

void check_backward(const Case& c) {
  Matrix dy = c.matrix(4), h = c.matrix(5), d_new_residual = c.matrix(6), weight(1, c.columns, c.weight_dtype);
  weight.fill(c.seed + 7, c.data == Data::kSpecial ? Data::kNormal : c.data);
  Matrix main_grad(1, c.columns, DType::kFloat32), rstd(1, c.rows, DType::kFloat32);
  main_grad.fill(c.seed + 8, Data::kNormal);
  rstd.fill(c.seed + 9, Data::kNormal);  // any numbers will do
  const Matrix dx(c.rows, c.columns, c.dtype, c.columns + 5), dweight(1, c.columns, c.dweight_dtype);
  RmsNormBackwardParams p;
  p.dy = dy.data();
  p.h = h.data();
  p.rstd = static_cast<const float*>(rstd.data());
  p.weight = c.weight ? weight.data() : nullptr;
  p.d_new_residual = c.residual ? d_new_residual.data() : nullptr;
  p.main_grad = c.main_grad ? static_cast<const float*>(main_grad.data()) : nullptr;
  p.dy_rows = dy.rows();
  p.h_rows = h.rows();
  p.d_new_residual_rows = d_new_residual.rows();
  p.dx_rows = dx.rows();
  p.num_rows = c.rows;
  p.columns = c.columns;
  p.dtype = c.dtype;
  p.weight_dtype = c.weight_dtype;
  p.dweight_dtype = c.dweight_dtype;
  p.weight_offset = c.weight ? c.weight_offset : 0.0f;
  p.round_before_weight = c.round_before_weight;
  const Backward want = reference(p);
  for_each_backend([&](const std::string& backend) {
    for (const int wanted : {3, 1, 2}) {  // dx and dweight, or only one gradient
      if (c.rows > 1000 && wanted != c.wanted) continue;
      Matrix got_dx = dx, got_dweight = dweight;
      p.dx = wanted & 1 ? got_dx.data() : nullptr;
      p.dweight = wanted & 2 ? got_dweight.data() : nullptr;
      run(p);
      if (wanted & 1) {
        ASSERT_NO_FATAL_FAILURE(got_dx.expect(want.dx, c.text() + ", dx, " + backend));
      }
      if (wanted & 2) {
        ASSERT_NO_FATAL_FAILURE(got_dweight.expect(want.dweight, c.text() + ", dweight, " + backend));
      }
    }
  });
}

void check(const Case& c) {
  ASSERT_NO_FATAL_FAILURE(check_forward(c));
  ASSERT_NO_FATAL_FAILURE(check_backward(c));
}

class RmsNorm : public linear_test::Linear {};

// Columns: 0; 1; around a vec8; around a vector of lanes of either width; heads of 128 and 256. Further: primes; around
// a chunk of all lanes; two chunks and a remainder; hidden sizes of models.
constexpr std::int64_t kColumns[] = {0,   1,   7,   8,   9,    63,   64,   65,   127,  128,
                                     129, 131, 256, 521, 2047, 2048, 2049, 4096, 4100, 5120};

TEST_F(RmsNorm, EveryWidthHasTheBitsOfTheContract) {
  unsigned seed = 0;
  for (const DType dtype : kDtypes) {
    for (const std::int64_t columns : kColumns) {
      Case c{columns > 4000 ? 2 : 5, columns};
      c.dtype = dtype;
      c.weight_dtype = ++seed % 2 == 0 ? DType::kFloat32 : dtype;
      c.residual = seed % 3 == 0;
      c.round_before_weight = seed % 5 < 2;
      c.weight_offset = seed % 4 == 0 ? 1.0f : 0.0f;
      c.pad = seed % 7;
      c.shift = kWholeElements ? 0 : seed % 3;
      c.seed = seed;
      c.main_grad = seed % 2 == 0;
      c.dweight_dtype = seed % 3 == 0 ? dtype : DType::kFloat32;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

TEST_F(RmsNorm, EveryOptionTogetherWithEveryOther) {
  for (const DType dtype : kDtypes) {
    for (int options = 0; options < 32; ++options) {
      Case c{3, 200};
      c.dtype = dtype;
      c.residual = options & 1;
      c.weight = !(options & 2);
      c.round_before_weight = options & 4;
      c.weight_offset = options & 8 ? 1.0f : 0.0f;
      c.weight_dtype = options & 16 ? DType::kFloat32 : dtype;
      c.seed = static_cast<unsigned>(options) + 50;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

TEST_F(RmsNorm, EveryExponentEveryKindOfZeroInfinitiesAndNans) {
  for (const DType dtype : kDtypes) {
    for (const Data data : {Data::kWide, Data::kTiny, Data::kSparse, Data::kEqual, Data::kSpecial}) {
      for (const std::int64_t columns : {1, 3, 8, 130, 2090}) {
        for (const bool residual : {false, true}) {
          Case c{9, columns};
          c.dtype = c.weight_dtype = dtype;
          c.data = data;
          c.residual = residual;
          c.round_before_weight = columns == 3;
          c.eps = columns == 8 ? 1e-30f : 1e-5f;
          c.seed = static_cast<unsigned>(columns) + 200;
          ASSERT_NO_FATAL_FAILURE(check(c));
        }
      }
    }
  }
}

TEST_F(RmsNorm, RowsOfTwoStridesAndBackwardInMemory) {
  for (const RowLayout& rows : {RowLayout{4, 900, 70}, RowLayout{3, 64, 640}, RowLayout{100, 0, -72}}) {
    Matrix x(12, 64, DType::kBFloat16, rows);
    x.fill(31, Data::kNormal);
    Matrix weight(1, 64, DType::kBFloat16);
    weight.fill(32, Data::kNormal);
    const Matrix y(12, 64, DType::kBFloat16, RowLayout{6, -600, 66});
    RmsNormParams p;
    p.x = x.data();
    p.weight = weight.data();
    p.x_rows = x.rows();
    p.y_rows = y.rows();
    p.num_rows = 12;
    p.columns = 64;
    p.eps = 1e-6f;
    const Forward want = reference(p);
    for_each_backend([&](const std::string& backend) {
      Matrix got = y;
      p.y = got.data();
      run(p);
      ASSERT_NO_FATAL_FAILURE(got.expect(want.y, backend));
    });
  }
}

TEST_F(RmsNorm, InPlace) {
  for (const std::int64_t columns : {40, 4096, 4101}) {  // 4101 has no whole vectors, so a GPU reads the row twice
    Matrix x(3, columns, DType::kBFloat16), residual(3, columns, DType::kBFloat16),
        weight(1, columns, DType::kBFloat16);
    x.fill(41, Data::kNormal);
    residual.fill(42, Data::kNormal);
    weight.fill(43, Data::kNormal);
    RmsNormParams p;
    p.x = x.data();
    p.residual = residual.data();
    p.weight = weight.data();
    p.x_rows = p.y_rows = x.rows();
    p.residual_rows = p.new_residual_rows = residual.rows();
    p.num_rows = 3;
    p.columns = columns;
    p.eps = 1e-6f;
    const Forward want = reference(p);
    for_each_backend([&](const std::string& backend) {
      Matrix a = x, b = residual;
      p.x = p.y = a.data();
      p.residual = p.new_residual = b.data();
      run(p);
      ASSERT_NO_FATAL_FAILURE(a.expect(want.y, backend));
      ASSERT_NO_FATAL_FAILURE(b.expect(want.new_residual, backend));
    });
  }
}

TEST_F(RmsNorm, TokensAreSummedInGroupsTreesAndBlocks) {
  // Around a group of 64 rows and a block of 8192; two blocks and a remainder.
  for (const std::int64_t rows : {0, 1, 63, 64, 65, 709, 8191, 8192, 8193, 16500}) {
    for (const bool main_grad : {false, true}) {
      if (rows > 1000 && main_grad != (rows % 2 == 0)) continue;
      Case c{rows, rows == 65 ? 301 : 11};  // 301: more than one slice of columns
      c.weight_dtype = DType::kFloat32;
      c.main_grad = main_grad;
      c.round_before_weight = main_grad;
      c.dweight_dtype = rows % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
      c.seed = static_cast<unsigned>(rows) + 300;
      c.wanted = 2;
      ASSERT_NO_FATAL_FAILURE(check_backward(c));
    }
  }
}

TEST_F(RmsNorm, ManyRowsOfAHead) {
  for (const DType dtype : kDtypes) {
    Case c{1300, 128};
    c.dtype = c.weight_dtype = dtype;
    c.residual = dtype == DType::kFloat16;
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

TEST_F(RmsNorm, MainGradMayBeDweight) {
  Case c{70, 24};
  Matrix dy = c.matrix(1), h = c.matrix(2), rstd(1, c.rows, DType::kFloat32), before(1, c.columns, DType::kFloat32);
  rstd.fill(3, Data::kNormal);
  before.fill(4, Data::kNormal);
  RmsNormBackwardParams p;
  p.dy = dy.data();
  p.h = h.data();
  p.rstd = static_cast<const float*>(rstd.data());
  p.main_grad = static_cast<const float*>(before.data());
  p.dy_rows = p.h_rows = dy.rows();
  p.num_rows = c.rows;
  p.columns = c.columns;
  p.dweight_dtype = DType::kFloat32;
  const Backward want = reference(p);
  for_each_backend([&](const std::string& backend) {
    Matrix both = before;
    p.main_grad = static_cast<const float*>(both.data());
    p.dweight = both.data();
    run(p);
    ASSERT_NO_FATAL_FAILURE(both.expect(want.dweight, backend));
  });
}

TEST_F(RmsNorm, WhatWouldCorruptMemoryIsRefused) {
  Matrix x(2, 3, DType::kBFloat16), y(2, 3, DType::kBFloat16);
  RmsNormParams p;
  p.x = x.data();
  p.y = y.data();
  p.num_rows = 2;
  p.columns = 3;
  for (const float eps : {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    p.eps = eps;
    EXPECT_THROW(run(p), rlk::InvalidArgument);
  }
  p.eps = 1e-6f;
  p.residual = x.data();  // and there is no array for the sum
  EXPECT_THROW(run(p), rlk::InvalidArgument);
  p.residual = nullptr;
  p.weight = x.data();
  p.weight_dtype = DType::kFloat16;
  EXPECT_THROW(run(p), rlk::InvalidArgument);
  p.weight = nullptr;
  p.x_rows.inner = 0;
  EXPECT_THROW(run(p), rlk::InvalidArgument);
  RmsNormBackwardParams q;
  q.dy = q.h = x.data();
  q.dx = y.data();
  q.num_rows = 2;
  q.columns = 3;
  EXPECT_THROW(run(q), rlk::InvalidArgument);  // rstd is missing
}

}  // namespace
}  // namespace rms_norm_test
