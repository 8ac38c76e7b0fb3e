// Tests HIP kernels of linear at sizes that the tests of every backend do not reach, since those fit the CPU's tiles.
// Covers both tiles of each product, several stages and blocks, vector loads and single elements, bit for bit on the
// stand-in.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hip/linear/launches.h"
#include "linear_backend.h"
#include "linear_reference.h"
#include "rlk/ops/linear.h"

namespace linear_test {
namespace {

// Rows of a matrix with `columns` columns. The rows are whole vectors, or have a stride and a first element without
// vectors.
Matrix matrix(std::int64_t rows, std::int64_t columns, DType t, bool vectors, unsigned seed,
              Data data = Data::kNormal) {
  const std::int64_t stride = vectors ? (columns + 7) / 8 * 8 : columns + 1 + columns % 2;
  Matrix m(rows, columns, t, stride, vectors ? 0 : 2);
  m.fill(seed, data);
  return m;
}
// Whether the memory of a std::vector, and so a matrix's first row, is 16-byte aligned.
bool is_aligned(Matrix& m) { return reinterpret_cast<std::uintptr_t>(m.data()) % 16 == 0; }

void check_forward(std::int64_t rows, std::int64_t in_features, std::int64_t out_features, int segments, DType dtype,
                   bool vectors, Arithmetic arithmetic, Data data = Data::kNormal) {
  Matrix x = matrix(rows, in_features, dtype, vectors, 1, data);
  Matrix weight = matrix(out_features, in_features, dtype, vectors, 2, data), bias(1, out_features, dtype);
  bias.fill(3, Data::kNormal);
  ASSERT_TRUE(is_aligned(x) == vectors && is_aligned(weight) == vectors);
  const Matrix y(rows, out_features, data == Data::kNormal ? dtype : DType::kFloat32);
  rlk::LinearParams p;
  p.x = x.data();
  p.weight = weight.data();
  p.bias = data == Data::kNormal ? bias.data() : nullptr;
  p.bias_dtype = dtype;
  p.x_rows = x.rows();
  p.y_rows = y.rows();
  p.weight_stride = weight.stride();
  p.num_rows = rows;
  p.in_features = in_features;
  p.out_features = out_features;
  p.dtype = dtype;
  p.out_dtype = y.dtype();
  p.k_segments = segments;
  p.arithmetic = arithmetic;
  check(p, y,
        std::string(name(arithmetic)) + ' ' + name(dtype) + ' ' + name(data) +
            (vectors ? ", vectors, " : ", elements, ") + std::to_string(rows) + " rows, segments " +
            std::to_string(segments));
}

// Numbers of rows: some that small tiles serve; the most that they serve; one more, which takes large tiles; several
// tiles with a remainder.
constexpr std::int64_t kRows[] = {20, rlk::hip::kMostSmallRows, rlk::hip::kMostSmallRows + 1, 141};

TEST_F(Linear, ForwardTilesStagesAndLoads) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const bool vectors : {true, false}) {
      for (const std::int64_t rows : kRows) {
        // Stages have 32 or 64 indices, with a short last step: 3 whole stages and a remainder.
        ASSERT_NO_FATAL_FAILURE(check_forward(rows, 203, 133, 1, DType::kBFloat16, vectors, arithmetic));
      }
      ASSERT_NO_FATAL_FAILURE(check_forward(141, 96, 64, 1, DType::kFloat16, vectors, arithmetic));
    }
  }
}

TEST_F(Linear, ForwardSegmentsOfBothTiles) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const std::int64_t rows : {20, 35}) {
      for (const int segments : {2, 4, 8}) {
        // A segment of 16 indices is half a large tile's stage; one of 80 is more than a stage of each tile.
        for (const std::int64_t segment : {16, 80}) {
          const DType dtype = segments == 4 ? DType::kFloat16 : DType::kBFloat16;
          ASSERT_NO_FATAL_FAILURE(
              check_forward(rows, segments * segment, 70, segments, dtype, segment == 80, arithmetic));
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(check_forward(135, 96, 70, 2, DType::kBFloat16, true, arithmetic));
  }
}

TEST_F(Linear, UnderflowAndInfinityInBothTiles) {
  // A -0 from underflow would depend on the instruction's shape.
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const Data data : {Data::kTiny, Data::kWide, Data::kSparse, Data::kSpecial}) {
      for (const DType dtype : kDtypes) {
        for (const std::int64_t rows : {7, 37}) {
          for (const std::int64_t in_features : {8, 43}) {
            ASSERT_NO_FATAL_FAILURE(check_forward(rows, in_features, 40, 1, dtype, true, arithmetic, data));
          }
        }
      }
    }
  }
}

TEST_F(Linear, InputGradientTilesStagesAndLoads) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const bool vectors : {true, false}) {
      for (const std::int64_t rows : kRows) {
        // in_features: a size of whole vectors, and a size without any useful divisor.
        for (const std::int64_t in_features : {132, 67}) {
          constexpr std::int64_t kOut = 139;
          const DType dtype = rows == 20 ? DType::kFloat16 : DType::kBFloat16;
          Matrix dy = matrix(rows, kOut, dtype, vectors, 4), weight = matrix(kOut, in_features, dtype, vectors, 5);
          const Matrix dx(rows, in_features, dtype);
          rlk::LinearInputGradParams p;
          p.dy = dy.data();
          p.weight = weight.data();
          p.dy_rows = dy.rows();
          p.dx_rows = dx.rows();
          p.weight_stride = weight.stride();
          p.num_rows = rows;
          p.in_features = in_features;
          p.out_features = kOut;
          p.dtype = p.dx_dtype = dtype;
          p.arithmetic = arithmetic;
          ASSERT_NO_FATAL_FAILURE(
              check(p, dx, "rows " + std::to_string(rows) + (vectors ? ", vectors" : ", elements")));
        }
      }
    }
  }
}

void check_weight_grad(std::int64_t rows, std::int64_t in_features, std::int64_t out_features, DType dtype,
                       DType dweight_dtype, bool vectors, Arithmetic arithmetic) {
  Matrix dy = matrix(rows, out_features, dtype, vectors, 6), x = matrix(rows, in_features, dtype, vectors, 7);
  Matrix main_grad(out_features, in_features, DType::kFloat32, in_features + 3);
  main_grad.fill(8, Data::kNormal);
  const Matrix dweight(out_features, in_features, dweight_dtype);
  rlk::LinearWeightGradParams p;
  p.dy = dy.data();
  p.x = x.data();
  p.main_grad = static_cast<const float*>(main_grad.data());
  p.main_grad_stride = main_grad.stride();
  p.dy_rows = dy.rows();
  p.x_rows = x.rows();
  p.dweight_stride = dweight.stride();
  p.num_rows = rows;
  p.in_features = in_features;
  p.out_features = out_features;
  p.dtype = dtype;
  p.dweight_dtype = dweight_dtype;
  p.arithmetic = arithmetic;
  check(p, dweight, "rows " + std::to_string(rows) + (vectors ? ", vectors" : ", elements"));
}

TEST_F(Linear, WeightGradientTilesStagesAndLoads) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const bool vectors : {true, false}) {
      for (const std::int64_t out_features : {28, 140}) {
        ASSERT_NO_FATAL_FAILURE(
            check_weight_grad(64, 132, out_features, DType::kFloat16, DType::kFloat32, vectors, arithmetic));
        ASSERT_NO_FATAL_FAILURE(
            check_weight_grad(143, 132, out_features, DType::kBFloat16, DType::kBFloat16, vectors, arithmetic));
      }
    }
    // More than one block of tokens, in a large tile.
    ASSERT_NO_FATAL_FAILURE(check_weight_grad(8200, 4, 36, DType::kBFloat16, DType::kFloat32, true, arithmetic));
  }
}

TEST_F(Linear, VectorsAreLoadedOnlyWhereEveryRowHasThem) {
  // Each outer step has rows of whole vectors, but their distance is odd. The emulation's vector loads require
  // alignment.
  constexpr std::int64_t kIn = 96, kOut = 40, kNumRows = 9;
  const RowLayout layout{3, 3 * kIn + 1, kIn};
  Matrix x(kNumRows, kIn, DType::kBFloat16, layout), weight(kOut, kIn, DType::kBFloat16);
  x.fill(11, Data::kNormal);
  weight.fill(12, Data::kNormal);
  ASSERT_TRUE(is_aligned(x) && is_aligned(weight));
  const Matrix y(kNumRows, kOut, DType::kFloat32), dweight(kOut, kIn, DType::kFloat32);
  rlk::LinearParams p;
  p.x = x.data();
  p.weight = weight.data();
  p.x_rows = x.rows();
  p.y_rows = y.rows();
  p.weight_stride = kIn;
  p.num_rows = kNumRows;
  p.in_features = kIn;
  p.out_features = kOut;
  p.out_dtype = DType::kFloat32;
  p.arithmetic = Arithmetic::kGfx942;
  check(p, y, "an odd outer stride");
  rlk::LinearWeightGradParams q;
  q.dy = weight.data();  // the weight's first columns
  q.dy_rows = weight.rows();
  q.x = x.data();
  q.x_rows = x.rows();
  q.dweight_stride = kIn;
  q.num_rows = kNumRows;
  q.in_features = kIn;
  q.out_features = kOut;
  q.arithmetic = Arithmetic::kGfx942;
  check(q, dweight, "an odd outer stride of x");
}

TEST_F(Linear, FarRowsHave64BitOffsets) {
  // Rows lie at least 2^32 bytes apart; only the touched pages are allocated.
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 512, kIn = 40, kOut = 3;
  constexpr std::size_t kBytes = 2 * (2 * kStride + 4096);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 8 GiB of addresses";
  std::mt19937 random(9);
  for (const std::int64_t row : {0, 1, 2}) {
    for (std::int64_t k = 0; k < kIn; ++k) {
      static_cast<std::uint16_t*>(memory)[row * kStride + k] =
          static_cast<std::uint16_t>(random_pattern(random, DType::kBFloat16, Data::kNormal));
    }
  }
  Matrix other(3, kIn, DType::kBFloat16);
  other.fill(10, Data::kNormal);
  const Matrix y(3, kOut, DType::kFloat32), dx(3, kIn, DType::kBFloat16), dweight(kIn, kIn, DType::kFloat32);
  rlk::LinearParams p;
  p.x = memory;
  p.x_rows = {3, 0, kStride};
  p.weight = other.data();
  p.weight_stride = kIn;
  p.y_rows = y.rows();
  p.num_rows = 3;
  p.in_features = kIn;
  p.out_features = kOut;
  p.out_dtype = DType::kFloat32;
  p.arithmetic = Arithmetic::kGfx942;
  check(p, y, "far rows of x");
  rlk::LinearInputGradParams q;
  q.dy = other.data();
  q.dy_rows = {3, 0, kIn};
  q.weight = memory;
  q.weight_stride = kStride;
  q.dx_rows = dx.rows();
  q.num_rows = 3;
  q.in_features = kIn;
  q.out_features = kOut;
  q.arithmetic = Arithmetic::kGfx942;
  check(q, dx, "far rows of the weight");
  munmap(memory, kBytes);
}

TEST(LinearLaunches, CoverEveryBlockWithinTheRuntimesLimits) {
  for (const std::int64_t blocks :
       {std::int64_t{0}, std::int64_t{1}, rlk::hip::kMostBlocks, rlk::hip::kMostBlocks * 5 / 2}) {
    std::int64_t next = 0;
    rlk::hip::for_each_launch(blocks, [&](std::int64_t first, std::int64_t count) {
      EXPECT_EQ(first, next);
      EXPECT_GT(count, 0);
      EXPECT_LT(count * rlk::hip::kGemmThreads, std::int64_t{1} << 32);
      next = first + count;
    });
    EXPECT_EQ(next, blocks);
  }
}

}  // namespace
}  // namespace linear_test
