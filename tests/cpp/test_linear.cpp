// Tests linear's forward and the sum over ranks bit for bit against a second implementation, written from the contract.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "linear_backend.h"
#include "linear_reference.h"
#include "rlk/build.h"
#include "rlk/ops/linear.h"

namespace linear_test {
namespace {

using rlk::LinearParams;

LinearParams params_of(Matrix& x, Matrix& weight, const Matrix& y, std::int64_t rows, std::int64_t in_features,
                       std::int64_t out_features, Arithmetic arithmetic) {
  LinearParams p;
  p.x = x.data();
  p.weight = weight.data();
  p.x_rows = x.rows();
  p.y_rows = y.rows();
  p.weight_stride = weight.stride();
  p.num_rows = rows;
  p.in_features = in_features;
  p.out_features = out_features;
  p.dtype = x.dtype();
  p.out_dtype = y.dtype();
  p.arithmetic = arithmetic;
  return p;
}

void check_shape(std::int64_t rows, std::int64_t in_features, std::int64_t out_features, DType dtype, DType out_dtype,
                 Arithmetic arithmetic, Data data, unsigned seed) {
  Matrix x(rows, in_features, dtype), weight(out_features, in_features, dtype);
  x.fill(seed, data);
  weight.fill(seed + 1, data);
  const Matrix y(rows, out_features, out_dtype);
  const std::string what = std::string(name(arithmetic)) + ' ' + name(dtype) + ' ' + name(data) + ' ' +
                           std::to_string(rows) + " x " + std::to_string(in_features) + " -> " +
                           std::to_string(out_features);
  check(params_of(x, weight, y, rows, in_features, out_features, arithmetic), y, what);
}

// Sizes: 0; 1; around a step of 16 and a vector of 16 lanes; primes; around two AVX-512 tiles of 32 columns.
constexpr std::int64_t kSizes[] = {0, 1, 2, 7, 15, 16, 17, 31, 37, 63, 64, 65};

TEST_F(Linear, EveryShapeHasTheBitsOfTheContract) {
  std::mt19937 random(1);
  const auto size = [&] { return kSizes[random() % std::size(kSizes)]; };
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      for (unsigned i = 0; i < 24; ++i) {
        ASSERT_NO_FATAL_FAILURE(
            check_shape(size(), size(), size(), dtype, DType::kFloat32, arithmetic, Data::kNormal, 2 * i));
      }
    }
  }
}

TEST_F(Linear, SumsGoOnFromOnePanelOfTheContractionToTheNext) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      // The CPU packs 256 indices at a time: one less, exact, one more, and a prime above two panels.
      for (const std::int64_t in_features : {255, 256, 257, 523}) {
        ASSERT_NO_FATAL_FAILURE(check_shape(14, in_features, 35, dtype, dtype, arithmetic, Data::kNormal, 3));
      }
    }
  }
}

TEST_F(Linear, RowsThatAreManyTakeTheContractionInTurns) {
  // The CPU packs rows times panels up to 384: with 150 rows, two panels of 256 contraction indices at a time.
  for (const Arithmetic arithmetic : kArithmetics) {
    ASSERT_NO_FATAL_FAILURE(
        check_shape(150, 1031, 19, DType::kBFloat16, DType::kFloat32, arithmetic, Data::kNormal, 4));
  }
}

TEST_F(Linear, BlocksOfOutputsMeet) {
  // One block of the CPU has 384 rows and 512 columns.
  for (const Arithmetic arithmetic : {kArithmetics[0], kArithmetics[1]}) {
    ASSERT_NO_FATAL_FAILURE(
        check_shape(389, 17, 515, DType::kBFloat16, DType::kBFloat16, arithmetic, Data::kNormal, 4));
  }
}

TEST_F(Linear, EveryExponentAndEveryKindOfZero) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      for (const Data data : {Data::kWide, Data::kTiny, Data::kSparse}) {
        for (const std::int64_t in_features : {1, 3, 16, 40, 131}) {
          for (unsigned seed = 0; seed < 4; ++seed) {
            ASSERT_NO_FATAL_FAILURE(
                check_shape(9, in_features, 37, dtype, DType::kFloat32, arithmetic, data, 5 + 2 * seed));
          }
        }
      }
    }
  }
}

TEST_F(Linear, ExponentsThatDifferBetweenTheOperands) {
  // Small gradients times ordinary weights, and one operand near overflow times the other near underflow.
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const Data data : {Data::kWide, Data::kTiny}) {
        Matrix x(11, 83, dtype), weight(34, 83, dtype);
        x.fill(6, data);
        weight.fill(7, Data::kNormal);
        const Matrix y(11, 34, DType::kFloat32);
        ASSERT_NO_FATAL_FAILURE(check(params_of(x, weight, y, 11, 83, 34, arithmetic), y,
                                      std::string(name(arithmetic)) + ' ' + name(data)));
      }
    }
  }
}

TEST_F(Linear, TheLargestSumsOfAStep) {
  // Sixteen products just below 4, in units of 2^-25, and an accumulator just below 2 exceed 32 bits.
  constexpr std::int64_t kIn = 48;
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const std::uint32_t sign : {0u, 0x8000u}) {
        Matrix x(2, kIn, dtype), weight(33, kIn, dtype);
        x.fill(8, Data::kEqual);
        weight.fill(9, Data::kEqual);
        for (std::int64_t k = 0; k < 16; ++k) x.set(0, k, k == 0 ? rounded(1.0f, dtype) : 0);
        x.set(1, 5, x.at(1, 5) | 0x8000u);
        for (std::int64_t k = 0; k < kIn; ++k) x.set(0, k, x.at(0, k) | sign);
        const Matrix y(2, 33, DType::kFloat32);
        ASSERT_NO_FATAL_FAILURE(check(params_of(x, weight, y, 2, kIn, 33, arithmetic), y, name(arithmetic)));
      }
    }
  }
}

TEST_F(Linear, InfAndNanAreTheUnits) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      for (const std::int64_t in_features : {1, 16, 19, 67}) {
        for (const DType out : {dtype, DType::kFloat32}) {
          ASSERT_NO_FATAL_FAILURE(check_shape(13, in_features, 41, dtype, out, arithmetic, Data::kSpecial, 10));
        }
      }
    }
  }
}

TEST_F(Linear, InfTimesZeroIsNan) {
  for (const Arithmetic arithmetic : kArithmetics) {
    Matrix x(2, 32, DType::kBFloat16), weight(18, 32, DType::kBFloat16);
    x.set_all(Patterns(2 * 32, 0));
    weight.set_all(Patterns(18 * 32, 0));
    x.set(0, 20, 0x7f80);
    weight.set(3, 0, 0xff80);
    const Matrix y(2, 18, DType::kFloat32);
    ASSERT_NO_FATAL_FAILURE(check(params_of(x, weight, y, 2, 32, 18, arithmetic), y, name(arithmetic)));
  }
}

TEST_F(Linear, BiasAndRounding) {
  for (const DType dtype : kDtypes) {
    for (const DType bias_dtype : kDtypes) {
      for (const DType out_dtype : kDtypes) {
        if (dtype == DType::kFloat32 && out_dtype != dtype) continue;
        for (const Data data : {Data::kNormal, Data::kWide, Data::kSpecial}) {
          // 37 columns are whole vectors and a short vector; the bias must not be read past its end.
          Matrix x(5, 24, dtype), weight(37, 24, dtype), bias(1, 37, bias_dtype);
          x.fill(11, Data::kNormal);
          weight.fill(12, Data::kNormal);
          bias.fill(13, data);
          const Matrix y(5, 37, out_dtype);
          for (const Arithmetic arithmetic : kArithmetics) {
            if (!allowed(arithmetic, dtype)) continue;
            LinearParams p = params_of(x, weight, y, 5, 24, 37, arithmetic);
            p.bias = bias.data();
            p.bias_dtype = bias_dtype;
            ASSERT_NO_FATAL_FAILURE(check(p, y, std::string("bias ") + name(bias_dtype) + " to " + name(out_dtype)));
          }
        }
      }
    }
  }
}

TEST_F(Linear, SegmentsAddUpAsATree) {
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      for (const int segments : {1, 2, 4, 8}) {
        // Steps per segment: one; three; more than a panel of 256 indices.
        for (const std::int64_t steps : {1, 3, 17}) {
          const std::int64_t in_features = 16 * segments * steps;
          Matrix x(6, in_features, dtype), weight(33, in_features, dtype);
          x.fill(14, Data::kNormal);
          weight.fill(15, Data::kNormal);
          const Matrix y(6, 33, DType::kFloat32);
          LinearParams p = params_of(x, weight, y, 6, in_features, 33, arithmetic);
          p.k_segments = segments;
          ASSERT_NO_FATAL_FAILURE(check(p, y, "segments " + std::to_string(segments)));
        }
      }
    }
  }
}

TEST_F(Linear, ShardsOfTheContractionGiveTheBitsOfTheWhole) {
  constexpr std::int64_t kIn = 16 * 8 * 3, kOut = 21, kRows = 4;
  for (const Arithmetic arithmetic : kArithmetics) {
    Matrix x(kRows, kIn, DType::kBFloat16), weight(kOut, kIn, DType::kBFloat16);
    x.fill(16, Data::kNormal);
    weight.fill(17, Data::kNormal);
    const Matrix fp32(kRows, kOut, DType::kFloat32), whole(kRows, kOut, DType::kBFloat16);
    LinearParams p = params_of(x, weight, whole, kRows, kIn, kOut, arithmetic);
    p.k_segments = 8;
    const Patterns want = reference(p);
    for (const int ranks : {1, 2, 4, 8}) {
      std::vector<Matrix> parts(static_cast<std::size_t>(ranks), fp32);
      rlk::TreeSumParams sum;
      for (int r = 0; r < ranks; ++r) {
        LinearParams shard = p;
        shard.x = static_cast<const std::uint16_t*>(p.x) + r * kIn / ranks;
        shard.weight = static_cast<const std::uint16_t*>(p.weight) + r * kIn / ranks;
        shard.in_features = kIn / ranks;
        shard.k_segments = 8 / ranks;
        shard.out_dtype = DType::kFloat32;
        shard.y = parts[static_cast<std::size_t>(r)].data();
        run(shard);
        sum.parts[r] = static_cast<const float*>(parts[static_cast<std::size_t>(r)].data());
      }
      Matrix y = whole;
      sum.sum = y.data();
      sum.size = kRows * kOut;
      sum.count = ranks;
      sum.out_dtype = DType::kBFloat16;
      run(sum);
      ASSERT_NO_FATAL_FAILURE(y.expect(want, std::string(name(arithmetic)) + ", ranks " + std::to_string(ranks)));
    }
  }
}

TEST_F(Linear, AProductContinuesWhereAnotherEnded) {
  constexpr std::int64_t kPieces[] = {32, 0, 288, 19}, kIn = 339, kOut = 67;
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const DType dtype : kDtypes) {
      if (!allowed(arithmetic, dtype)) continue;
      for (const std::int64_t rows : {7, 40}) {  // a tile for few rows, and a tile for many
        for (const DType y_dtype : {dtype, DType::kFloat32}) {
          Matrix x(rows, kIn, dtype, kIn + 5), weight(kOut, kIn, dtype), bias(1, kOut, dtype),
              sums(rows, kOut, DType::kFloat32, kOut + 1);
          x.fill(5, Data::kNormal);
          weight.fill(6, Data::kWide);
          bias.fill(7, Data::kNormal);
          const Matrix y(rows, kOut, y_dtype, kOut + 1);
          auto whole = params_of(x, weight, y, rows, kIn, kOut, arithmetic);
          whole.bias = bias.data();
          whole.bias_dtype = dtype;
          const Patterns want = reference(whole);
          for_each_backend([&](const std::string& backend) {
            Matrix earlier = sums, last = y;
            std::int64_t first = 0;
            for (const std::int64_t piece : kPieces) {
              const bool ends = first + piece == kIn;
              auto p = whole;
              p.x = static_cast<const unsigned char*>(p.x) + first * size_of(dtype);
              p.weight = static_cast<const unsigned char*>(p.weight) + first * size_of(dtype);
              p.in_features = piece;
              p.y = ends ? last.data() : earlier.data();
              if (!ends) {
                p.bias = nullptr;
                p.out_dtype = DType::kFloat32;
              }
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

TEST_F(Linear, StartIsAnyNumberAndMayBeY) {
  constexpr std::int64_t kRows = 9, kOut = 35;
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const std::int64_t in_features : {0, 1, 24}) {
      Matrix x(kRows, in_features, DType::kBFloat16), weight(kOut, in_features, DType::kBFloat16),
          start(kRows, kOut, DType::kFloat32, kOut + 3);
      x.fill(8, Data::kNormal);
      weight.fill(9, Data::kNormal);
      start.fill(10, Data::kWide);
      auto p = params_of(x, weight, start, kRows, in_features, kOut, arithmetic);
      p.start = static_cast<const float*>(start.data());
      p.start_stride = start.stride();
      check_call(
          p, start,
          [](auto& q, Matrix& m) {
            q.start = static_cast<const float*>(m.data());
            q.y = m.data();
          },
          name(arithmetic));
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

TEST_F(Linear, RowsMayLieAnywhere) {
  constexpr std::int64_t kRows = 12, kIn = 37, kOut = 35;
  const RowLayout kLayouts[] = {{kRows, 0, 41}, {kRows, 0, -41}, {5, 400, 43},
                                {5, -400, -43}, {1, 47, 999},    {4, 0, 50}};
  for (const DType dtype : kDtypes) {
    for (const std::size_t shift : {0, 1, 2, 6, 31}) {
      if (kWholeElements && shift % static_cast<std::size_t>(rlk::size_of(dtype)) != 0) continue;
      for (const RowLayout& layout : kLayouts) {
        Matrix x(kRows, kIn, dtype, layout, shift), weight(kOut, kIn, dtype, shift % 2 == 0 ? 39 : -39, shift);
        x.fill(18, Data::kNormal);
        weight.fill(19, Data::kNormal);
        // Rows of an output must not overlap.
        const Matrix y(kRows, kOut, dtype, layout.outer_stride == 0 && layout.inner == 4 ? kLayouts[0] : layout, shift);
        const Arithmetic arithmetic = dtype == DType::kFloat32 ? Arithmetic::kIeee : kArithmetics[1];
        ASSERT_NO_FATAL_FAILURE(
            check(params_of(x, weight, y, kRows, kIn, kOut, arithmetic), y, "shift " + std::to_string(shift)));
      }
    }
  }
}

TEST_F(Linear, ARowHasTheSameBitsInAnyBatch) {
  constexpr std::int64_t kRows = 97, kIn = 300, kOut = 66;
  for (const Arithmetic arithmetic : kArithmetics) {
    Matrix x(kRows, kIn, DType::kBFloat16), weight(kOut, kIn, DType::kBFloat16);
    x.fill(20, Data::kNormal);
    weight.fill(21, Data::kNormal);
    Matrix all(kRows, kOut, DType::kFloat32);
    LinearParams p = params_of(x, weight, all, kRows, kIn, kOut, arithmetic);
    p.y = all.data();
    run(p);
    for_each_backend([&](const std::string& backend) {
      for (const std::int64_t rows : {1, 2, 13, 50}) {
        Matrix some(rows, kOut, DType::kFloat32);
        LinearParams q = p;
        q.x = static_cast<const std::uint16_t*>(p.x) + (kRows - rows) * kIn;
        q.y = some.data();
        q.y_rows = some.rows();
        q.num_rows = rows;
        run(q);
        Patterns want;
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < kOut; ++j) want.push_back(all.at(kRows - rows + i, j));
        }
        ASSERT_NO_FATAL_FAILURE(some.expect(want, backend + ", rows " + std::to_string(rows)));
      }
    });
  }
}

TEST_F(Linear, AnEmptySumIsPlusZeroAndTakesTheBias) {
  Matrix bias(1, 5, DType::kFloat32);
  bias.fill(22, Data::kNormal);
  bias.set(0, 1, 0x80000000u);
  LinearParams p;
  const Matrix y(3, 5, DType::kFloat32);
  p.y_rows = y.rows();
  p.num_rows = 3;
  p.out_features = 5;
  p.out_dtype = DType::kFloat32;
  p.bias_dtype = DType::kFloat32;
  for (const int segments : {1, 8}) {
    p.k_segments = segments;
    p.bias = nullptr;
    ASSERT_NO_FATAL_FAILURE(check(p, y, "no bias"));
    p.bias = bias.data();
    ASSERT_NO_FATAL_FAILURE(check(p, y, "bias"));
  }
}

TEST_F(Linear, NoOutputsNeedNoMemory) {
  for_each_backend([](const std::string&) {
    LinearParams p;
    p.in_features = 16;
    run(p);
    p.num_rows = 4;
    run(p);
    p.num_rows = 0;
    p.out_features = 4;
    run(p);
    run(rlk::TreeSumParams{});
  });
}

TEST_F(Linear, TreeSumTakesABiasOfTheColumns) {
  for (const DType bias_dtype : kDtypes) {
    for (const DType out : kDtypes) {
      constexpr std::int64_t kRows = 5, kColumns = 1031;  // more columns than the CPU adds at once
      std::vector<Matrix> parts;
      for (unsigned i = 0; i < 4; ++i) parts.emplace_back(kRows, kColumns, DType::kFloat32).fill(40 + i, Data::kWide);
      Matrix bias(1, kColumns, bias_dtype);
      bias.fill(44, Data::kNormal);
      rlk::TreeSumParams p;
      for (std::size_t i = 0; i < 4; ++i) p.parts[i] = static_cast<const float*>(parts[i].data());
      p.bias = bias.data();
      p.bias_dtype = bias_dtype;
      p.size = kRows * kColumns;
      p.columns = kColumns;
      p.count = 4;
      p.out_dtype = out;
      ASSERT_NO_FATAL_FAILURE(check_call(
          p, Matrix(kRows, kColumns, out), [](auto& q, Matrix& m) { q.sum = m.data(); }, "bias"));
    }
  }
}

TEST_F(Linear, TreeSumAddsPairs) {
  for (const int count : {1, 2, 4, 8}) {
    for (const DType out : kDtypes) {
      for (const Data data : {Data::kNormal, Data::kWide, Data::kSpecial}) {
        // Sizes: less than a vector; two vectors and a remainder; more than one task.
        for (const std::int64_t size : {1, 15, 37, 40001}) {
          std::vector<Matrix> parts;
          rlk::TreeSumParams p;
          for (int i = 0; i < count; ++i) {
            parts.emplace_back(1, size, DType::kFloat32).fill(static_cast<unsigned>(23 + i), data);
          }
          for (int i = 0; i < count; ++i)
            p.parts[i] = static_cast<const float*>(parts[static_cast<std::size_t>(i)].data());
          p.size = size;
          p.count = count;
          p.out_dtype = out;
          ASSERT_NO_FATAL_FAILURE(check_call(
              p, Matrix(1, size, out), [](auto& q, Matrix& m) { q.sum = m.data(); }, "parts " + std::to_string(count)));
        }
      }
    }
  }
}

TEST_F(Linear, TreeSumScalesBeforeItAddsTheBias) {
  constexpr std::int64_t kRows = 3, kColumns = 1031;
  for (const int count : {1, 4}) {
    for (const DType out : kDtypes) {
      for (const float scale : {0.0f, 0.3f, -2.0f, 0x1p-120f}) {  // zero; rounded; exact; to subnormal numbers
        for (const bool biased : {false, true}) {
          Matrix bias(1, kColumns, DType::kBFloat16);
          bias.fill(51, Data::kNormal);
          std::vector<Matrix> parts;
          for (int i = 0; i < count; ++i) {
            parts.emplace_back(kRows, kColumns, DType::kFloat32).fill(static_cast<unsigned>(52 + i), Data::kNormal);
          }
          rlk::TreeSumParams p;
          for (std::size_t i = 0; i < parts.size(); ++i) p.parts[i] = static_cast<const float*>(parts[i].data());
          if (biased) p.bias = bias.data();
          p.size = kRows * kColumns;
          p.columns = kColumns;
          p.count = count;
          p.scale = scale;
          p.out_dtype = out;
          ASSERT_NO_FATAL_FAILURE(check_call(
              p, Matrix(kRows, kColumns, out), [](auto& q, Matrix& m) { q.sum = m.data(); },
              "scale " + std::to_string(scale)));
        }
      }
    }
  }
}

TEST_F(Linear, TreeSumAddsTheBiasAfterTheTree) {
  struct Shape {
    std::int64_t rows, columns;
  };
  for (const int count : {1, 4}) {
    for (const DType out : kDtypes) {
      for (const DType bias_dtype : kDtypes) {
        // Shapes: one number; rows shorter than a vector; more columns than a run, with rows across task boundaries.
        for (const Shape shape : {Shape{1, 1}, Shape{3, 5}, Shape{29, 3077}}) {
          const std::int64_t size = shape.rows * shape.columns;
          Matrix bias(1, shape.columns, bias_dtype);
          bias.fill(41, Data::kWide);
          std::vector<Matrix> parts;
          rlk::TreeSumParams p;
          for (int i = 0; i < count; ++i) {
            parts.emplace_back(1, size, DType::kFloat32).fill(static_cast<unsigned>(31 + i), Data::kWide);
          }
          for (int i = 0; i < count; ++i)
            p.parts[i] = static_cast<const float*>(parts[static_cast<std::size_t>(i)].data());
          p.bias = bias.data();
          p.bias_dtype = bias_dtype;
          p.columns = shape.columns;
          p.size = size;
          p.count = count;
          p.out_dtype = out;
          ASSERT_NO_FATAL_FAILURE(check_call(
              p, Matrix(1, size, out), [](auto& q, Matrix& m) { q.sum = m.data(); }, "parts " + std::to_string(count)));
        }
      }
    }
  }
}

#if !RLK_TEST_HIP

TEST_F(Linear, TheDeviceChoosesTheBackend) {
  Matrix x(2, 32, DType::kBFloat16), weight(3, 32, DType::kBFloat16);
  x.fill(28, Data::kNormal);
  weight.fill(29, Data::kNormal);
  Matrix y(2, 3, DType::kBFloat16);
  LinearParams p = params_of(x, weight, y, 2, 32, 3, Arithmetic::kSm90);
  p.y = y.data();
  EXPECT_TRUE(rlk::linear_vendor_products(rlk::Device{}).empty());
  rlk::linear(p, rlk::Device{}, 0);
  y.expect(reference(p), "dispatched");
  if (!RLK_WITH_HIP) {
    EXPECT_THROW(rlk::linear(p, {rlk::DeviceType::kRocm, 0}, 0), rlk::Unsupported);
  }
  if (!RLK_WITH_CUDA) {
    EXPECT_THROW(rlk::linear(p, {rlk::DeviceType::kCuda, 0}, 0), rlk::Unsupported);
  }
}

TEST_F(Linear, OffsetsHave64Bits) {
  // Rows lie at least 2^32 bytes apart; only the touched pages are allocated.
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 512, kIn = 20, kOut = 3;
  constexpr std::size_t kBytes = 2 * (2 * kStride + 4096);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 8 GiB of addresses";
  auto* x = static_cast<std::uint16_t*>(memory);
  Matrix weight(kOut, kIn, DType::kBFloat16);
  weight.fill(24, Data::kNormal);
  std::mt19937 random(25);
  for (const std::int64_t row : {0, 1, 2}) {
    for (std::int64_t k = 0; k < kIn; ++k) {
      x[row * kStride + k] = static_cast<std::uint16_t>(random_pattern(random, DType::kBFloat16, Data::kNormal));
    }
  }
  const Matrix y(3, kOut, DType::kFloat32);
  LinearParams p = params_of(weight, weight, y, 3, kIn, kOut, Arithmetic::kSm90);
  p.x = x;
  p.x_rows = {3, 0, kStride};
  check(p, y, "far rows");
  munmap(memory, kBytes);
}

#if defined(__x86_64__)
TEST_F(Linear, TheCallersFlushToZeroModeChangesNothing) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush to zero, and treat subnormals as zero
  for (const Arithmetic arithmetic : kArithmetics) {
    Matrix x(3, 32, DType::kBFloat16), weight(33, 32, DType::kBFloat16), y(3, 33, DType::kFloat32);
    x.fill(26, Data::kTiny);
    weight.fill(27, Data::kNormal);
    LinearParams p = params_of(x, weight, y, 3, 32, 33, arithmetic);
    p.y = y.data();
    for_each_backend([&](const std::string& backend) {
      run(p);
      const unsigned during = _mm_getcsr();
      _mm_setcsr(before);
      const Patterns want = reference(p);
      y.expect(want, backend);
      _mm_setcsr(during);
      ASSERT_EQ(during & 0x8040, 0x8040u);
    });
  }
  _mm_setcsr(before);
}
#endif

#endif

TEST_F(Linear, WhatWouldCorruptMemoryIsRefused) {
  Matrix x(2, 32, DType::kBFloat16), weight(3, 32, DType::kBFloat16), y(2, 3, DType::kBFloat16);
  LinearParams good = params_of(x, weight, y, 2, 32, 3, kArithmetics[1]);
  good.y = y.data();
  const auto refused = [&](const auto& change) {
    LinearParams p = good;
    change(p);
    EXPECT_THROW(run(p), rlk::InvalidArgument);
  };
  refused([](LinearParams& p) { p.num_rows = -1; });
  refused([](LinearParams& p) { p.num_rows = std::int64_t{1} << 32; });
  refused([](LinearParams& p) { p.in_features = -1; });
  refused([](LinearParams& p) { p.out_features = -1; });
  refused([](LinearParams& p) { p.x = nullptr; });
  refused([](LinearParams& p) { p.weight = nullptr; });
  refused([](LinearParams& p) { p.y = nullptr; });
  refused([](LinearParams& p) { p.x_rows.inner = 0; });
  refused([](LinearParams& p) { p.y_rows.inner = 0; });
  refused([](LinearParams& p) { p.dtype = DType::kInt32; });
  refused([](LinearParams& p) { p.dtype = DType::kFloat32; });
  refused([](LinearParams& p) { p.out_dtype = DType::kInt64; });
  refused([](LinearParams& p) { p.k_segments = 0; });
  refused([](LinearParams& p) { p.k_segments = 3; });
  refused([](LinearParams& p) { p.k_segments = 16; });
  refused([](LinearParams& p) { p.k_segments = 4; });  // 32 % 64 != 0
  const float start[6] = {};
  refused([&](LinearParams& p) {
    p.start = start;
    p.start_stride = 2;
  });
  refused([&](LinearParams& p) {
    p.start = start;
    p.start_stride = 3;
    p.k_segments = 2;
  });
  rlk::TreeSumParams sum;
  sum.size = 1;
  EXPECT_THROW(run(sum), rlk::InvalidArgument);
  sum.count = 3;
  EXPECT_THROW(run(sum), rlk::InvalidArgument);
}

}  // namespace
}  // namespace linear_test
