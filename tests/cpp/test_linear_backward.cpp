// Tests linear's gradients bit for bit against a second implementation, written from the contract.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "linear_backend.h"
#include "linear_reference.h"
#include "rlk/ops/linear.h"

namespace linear_test {
namespace {

using rlk::LinearBiasGradParams;
using rlk::LinearInputGradParams;
using rlk::LinearWeightGradParams;

LinearInputGradParams input_grad_of(Matrix& dy, Matrix& weight, const Matrix& dx, std::int64_t rows,
                                    std::int64_t in_features, std::int64_t out_features, Arithmetic arithmetic) {
  LinearInputGradParams p;
  p.dy = dy.data();
  p.weight = weight.data();
  p.dy_rows = dy.rows();
  p.dx_rows = dx.rows();
  p.weight_stride = weight.stride();
  p.num_rows = rows;
  p.in_features = in_features;
  p.out_features = out_features;
  p.dtype = dy.dtype();
  p.dx_dtype = dx.dtype();
  p.arithmetic = arithmetic;
  return p;
}

LinearWeightGradParams weight_grad_of(Matrix& dy, Matrix& x, const Matrix& dweight, std::int64_t rows,
                                      std::int64_t in_features, std::int64_t out_features, Arithmetic arithmetic) {
  LinearWeightGradParams p;
  p.dy = dy.data();
  p.x = x.data();
  p.dy_rows = dy.rows();
  p.x_rows = x.rows();
  p.dweight_stride = dweight.stride();
  p.num_rows = rows;
  p.in_features = in_features;
  p.out_features = out_features;
  p.dtype = dy.dtype();
  p.dweight_dtype = dweight.dtype();
  p.arithmetic = arithmetic;
  return p;
}

LinearBiasGradParams bias_grad_of(Matrix& dy, DType dbias_dtype, std::int64_t rows, std::int64_t out_features) {
  LinearBiasGradParams p;
  p.dy = dy.data();
  p.dy_rows = dy.rows();
  p.num_rows = rows;
  p.out_features = out_features;
  p.dtype = dy.dtype();
  p.dbias_dtype = dbias_dtype;
  return p;
}

// Sizes: 0; 1; around a step of 16 and a vector of 16 lanes; primes; around two AVX-512 tiles of 32 columns.
constexpr std::int64_t kSizes[] = {0, 1, 2, 7, 15, 16, 17, 31, 37, 63, 64, 65};

TEST_F(Linear, EveryShapeOfAnInputGradient) {
  std::mt19937 random(1);
  const auto size = [&] { return kSizes[random() % std::size(kSizes)]; };
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      for (const Data data : {Data::kNormal, Data::kNormal, Data::kNormal, Data::kWide, Data::kSpecial}) {
        for (unsigned i = 0; i < 4; ++i) {
          const std::int64_t rows = size(), in_features = size(), out_features = size();
          Matrix dy(rows, out_features, dtype), weight(out_features, in_features, dtype);
          dy.fill(2 * i, data);
          weight.fill(2 * i + 1, Data::kNormal);
          const Matrix dx(rows, in_features, dtype);
          ASSERT_NO_FATAL_FAILURE(check(input_grad_of(dy, weight, dx, rows, in_features, out_features, arithmetic), dx,
                                        std::string(name(arithmetic)) + ' ' + name(data)));
        }
      }
    }
  }
}

TEST_F(Linear, AnInputGradientOverManyOutputsAndStridedRows) {
  constexpr std::int64_t kRows = 10, kIn = 34;
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const std::int64_t out_features : {256, 601}) {  // one panel; a prime of three panels
      Matrix dy(kRows, out_features, DType::kBFloat16, RowLayout{3, 4000, 700}),
          weight(out_features, kIn, DType::kBFloat16, -39);
      dy.fill(3, Data::kNormal);
      weight.fill(4, Data::kNormal);
      const Matrix dx(kRows, kIn, DType::kBFloat16, RowLayout{5, -300, 40});
      ASSERT_NO_FATAL_FAILURE(
          check(input_grad_of(dy, weight, dx, kRows, kIn, out_features, arithmetic), dx, name(arithmetic)));
    }
  }
}

TEST_F(Linear, AnInputGradientContinuesWhereAnotherEnded) {
  constexpr std::int64_t kIn = 67, kPieces[] = {32, 0, 288, 19}, kOut = 339;
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      for (const std::int64_t rows : {7, 40}) {  // a tile for few rows, and a tile for many
        for (const DType dx_dtype : {dtype, DType::kFloat32}) {
          Matrix dy(rows, kOut, dtype, kOut + 5), weight(kOut, kIn, dtype), sums(rows, kIn, DType::kFloat32, kIn + 1);
          dy.fill(5, Data::kNormal);
          weight.fill(6, Data::kWide);
          Matrix dx(rows, kIn, dx_dtype);
          const Patterns want = reference(input_grad_of(dy, weight, dx, rows, kIn, kOut, arithmetic));
          for_each_backend([&](const std::string& backend) {
            Matrix earlier = sums, last = dx;
            std::int64_t first = 0;
            for (const std::int64_t piece : kPieces) {
              const bool ends = first + piece == kOut;
              auto p = input_grad_of(dy, weight, ends ? last : earlier, rows, kIn, piece, arithmetic);
              p.dy = static_cast<const unsigned char*>(p.dy) + first * size_of(dtype);
              p.weight = static_cast<const unsigned char*>(p.weight) + first * kIn * size_of(dtype);
              p.dx = ends ? last.data() : earlier.data();
              if (first > 0) p.start = reinterpret_cast<const float*>(earlier.data());
              p.start_stride = earlier.stride();
              run(p);
              first += piece;
            }
            ASSERT_NO_FATAL_FAILURE(last.expect(want, std::string(name(arithmetic)) + ", " + backend));
          });
        }
      }
    }
  }
}

TEST_F(Linear, BlocksOfAnInputGradientMeet) {
  constexpr std::int64_t kRows = 389, kIn = 515, kOut = 18;  // a block of the CPU backend has 384 rows and 512 columns
  for (const Arithmetic arithmetic : {kArithmetics[0], kArithmetics[1]}) {
    Matrix dy(kRows, kOut, DType::kFloat16), weight(kOut, kIn, DType::kFloat16);
    dy.fill(14, Data::kNormal);
    weight.fill(15, Data::kNormal);
    const Matrix dx(kRows, kIn, DType::kFloat16);
    ASSERT_NO_FATAL_FAILURE(check(input_grad_of(dy, weight, dx, kRows, kIn, kOut, arithmetic), dx, name(arithmetic)));
  }
}

TEST_F(Linear, EveryShapeOfAWeightGradient) {
  std::mt19937 random(5);
  const auto size = [&] { return kSizes[random() % std::size(kSizes)]; };
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      for (const Data data : {Data::kNormal, Data::kNormal, Data::kNormal, Data::kWide, Data::kSpecial}) {
        for (unsigned i = 0; i < 4; ++i) {
          const std::int64_t rows = size(), in_features = size(), out_features = size();
          Matrix dy(rows, out_features, dtype), x(rows, in_features, dtype),
              main_grad(out_features, in_features, DType::kFloat32);
          dy.fill(2 * i, data);
          x.fill(2 * i + 1, Data::kNormal);
          main_grad.fill(2 * i + 2, Data::kNormal);
          const Matrix dweight(out_features, in_features, i % 2 == 0 ? DType::kFloat32 : dtype);
          auto p = weight_grad_of(dy, x, dweight, rows, in_features, out_features, arithmetic);
          const std::string what = std::string(name(arithmetic)) + ' ' + name(data);
          ASSERT_NO_FATAL_FAILURE(check(p, dweight, what));
          p.main_grad = static_cast<const float*>(main_grad.data());
          p.main_grad_stride = main_grad.stride();
          ASSERT_NO_FATAL_FAILURE(check(p, dweight, what + ", main_grad"));
        }
      }
    }
  }
}

TEST_F(Linear, TokensAreSummedInBlocks) {
  constexpr std::int64_t kIn = 5, kOut = 3;
  // Around a block of 8192 rows; two blocks and a remainder.
  for (const std::int64_t rows : {8191, 8192, 8193, 16500}) {
    for (const Arithmetic arithmetic : kArithmetics) {
      Matrix dy(rows, kOut, DType::kBFloat16), x(rows, kIn, DType::kBFloat16), main_grad(kOut, kIn, DType::kFloat32, 9);
      dy.fill(6, Data::kNormal);
      x.fill(7, Data::kNormal);
      main_grad.fill(8, Data::kNormal);
      const Matrix dweight(kOut, kIn, DType::kFloat32, 7);
      auto p = weight_grad_of(dy, x, dweight, rows, kIn, kOut, arithmetic);
      const std::string what = std::string(name(arithmetic)) + ", rows " + std::to_string(rows);
      ASSERT_NO_FATAL_FAILURE(check(p, dweight, what));
      p.main_grad = static_cast<const float*>(main_grad.data());
      p.main_grad_stride = main_grad.stride();
      ASSERT_NO_FATAL_FAILURE(check(p, dweight, what + ", main_grad"));
    }
  }
}

TEST_F(Linear, MainGradMayBeDweight) {
  // The output is larger than one block of the CPU, so several threads work.
  constexpr std::int64_t kRows = 24, kIn = 531, kOut = 390;
  Matrix dy(kRows, kOut, DType::kBFloat16, -400), x(kRows, kIn, DType::kBFloat16, RowLayout{7, 9000, 600}),
      before(kOut, kIn, DType::kFloat32);
  dy.fill(9, Data::kNormal);
  x.fill(10, Data::kNormal);
  before.fill(11, Data::kNormal);
  auto p = weight_grad_of(dy, x, before, kRows, kIn, kOut, kArithmetics[0]);
  p.main_grad = static_cast<const float*>(before.data());
  p.main_grad_stride = before.stride();
  const Patterns want = reference(p);
  for_each_backend([&](const std::string& backend) {
    Matrix both = before;
    p.dweight = both.data();
    p.main_grad = static_cast<const float*>(both.data());
    run(p);
    ASSERT_NO_FATAL_FAILURE(both.expect(want, backend));
  });
}

TEST_F(Linear, NoTokensLeaveMainGrad) {
  Matrix main_grad(3, 4, DType::kFloat32);
  main_grad.fill(12, Data::kWide);
  Matrix nothing(0, 0, DType::kBFloat16);
  for (const DType out : {DType::kFloat32, DType::kBFloat16}) {
    const Matrix dweight(3, 4, out);
    auto p = weight_grad_of(nothing, nothing, dweight, 0, 4, 3, kArithmetics[0]);
    ASSERT_NO_FATAL_FAILURE(check(p, dweight, "zeros"));
    p.main_grad = static_cast<const float*>(main_grad.data());
    p.main_grad_stride = main_grad.stride();
    ASSERT_NO_FATAL_FAILURE(check(p, dweight, "main_grad"));
  }
}

TEST_F(Linear, BiasGradientsAddGroupsOfRowsAsATree) {
  for (const DType dtype : kDtypes) {
    for (const DType out : {dtype, DType::kFloat32}) {
      // Rows: 0; 1; around a group of 64; a prime; around a block; two blocks and a remainder.
      for (const std::int64_t rows : {0, 1, 63, 64, 65, 709, 8191, 8192, 8193, 16500}) {
        for (const std::int64_t out_features : {1, 37}) {
          Matrix dy(rows, out_features, dtype, out_features + 3);
          dy.fill(static_cast<unsigned>(rows), Data::kNormal);
          ASSERT_NO_FATAL_FAILURE(check(bias_grad_of(dy, out, rows, out_features), Matrix(1, out_features, out),
                                        "rows " + std::to_string(rows)));
        }
      }
    }
  }
}

TEST_F(Linear, BiasGradientsOfManyColumnsAndOfAnyValue) {
  for (const DType dtype : kDtypes) {
    for (const Data data : {Data::kWide, Data::kSparse, Data::kSpecial}) {
      // dy has more columns than one task of the CPU sums.
      Matrix dy(130, 389, dtype, RowLayout{50, -50000, 397}, kWholeElements ? 4 : 3);
      dy.fill(13, data);
      ASSERT_NO_FATAL_FAILURE(check(bias_grad_of(dy, dtype, 130, 389), Matrix(1, 389, dtype), name(data)));
    }
  }
}

TEST_F(Linear, WhatWouldCorruptMemoryIsRefusedBackward) {
  Matrix dy(2, 3, DType::kBFloat16), other(32, 32, DType::kBFloat16), out(32, 32, DType::kFloat32);
  auto dx = input_grad_of(dy, other, other, 2, 32, 3, kArithmetics[1]);
  EXPECT_THROW(run(dx), rlk::InvalidArgument);  // there is no dx
  dx.dx = other.data();
  dx.weight = nullptr;
  EXPECT_THROW(run(dx), rlk::InvalidArgument);
  auto dw = weight_grad_of(dy, other, out, 2, 32, 3, kArithmetics[1]);
  EXPECT_THROW(run(dw), rlk::InvalidArgument);
  dw.dweight = out.data();
  dw.dweight_dtype = DType::kFloat16;
  EXPECT_THROW(run(dw), rlk::InvalidArgument);
  auto db = bias_grad_of(dy, DType::kFloat32, 2, 3);
  EXPECT_THROW(run(db), rlk::InvalidArgument);
  db.dbias = out.data();
  db.dy_rows.inner = 0;
  EXPECT_THROW(run(db), rlk::InvalidArgument);
}

}  // namespace
}  // namespace linear_test
