// Runs of a backend of linear for the tests: matrices with canaries around them, every way to run the backend, and a
// byte-for-byte comparison of a call with linear_reference.h. The backend is the CPU with every instruction set and
// number of threads. With RLK_TEST_HIP it is HIP's on the stand-in runtime, with every order of lanes and waves.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#if !RLK_TEST_HIP
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#endif
#include "linear_reference.h"
#include "rlk/backends.h"
#include "rlk/ops/linear.h"

namespace linear_test {

inline const char* name(DType t) {
  return t == DType::kFloat32 ? "float32" : t == DType::kBFloat16 ? "bfloat16" : "float16";
}
inline const char* name(Arithmetic a) {
  constexpr const char* kNames[] = {"ieee", "sm_80", "sm_90", "gfx90a", "gfx942"};
  return kNames[static_cast<int>(a)];
}

#if RLK_TEST_HIP

inline constexpr Arithmetic kArithmetics[] = {Arithmetic::kGfx90a, Arithmetic::kGfx942};
inline constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16};
constexpr bool kWholeElements = true;  // addresses are multiples of the element size
constexpr bool kCanonicalNan = false;  // false: all NaNs count as equal

// The stand-in's device has the architecture that the arithmetic names, if it names an architecture.
inline void set_device(Arithmetic arithmetic) {
  setenv("RLK_STANDIN_ARCH", arithmetic == Arithmetic::kGfx90a ? "gfx90a" : "gfx942", 1);
}

inline void run(const rlk::LinearParams& p) {
  set_device(p.arithmetic);
  rlk::hip::linear(p, 0, 0);
}
inline void run(const rlk::LinearInputGradParams& p) {
  set_device(p.arithmetic);
  rlk::hip::linear_input_grad(p, 0, 0);
}
inline void run(const rlk::LinearWeightGradParams& p) {
  set_device(p.arithmetic);
  rlk::hip::linear_weight_grad(p, 0, 0);
}
inline void run(const rlk::LinearBiasGradParams& p) { rlk::hip::linear_bias_grad(p, 0, 0); }
inline void run(const rlk::TreeSumParams& p) { rlk::hip::tree_sum(p, 0, 0); }

constexpr int kWays = 3;
inline std::string set_way(int way) {
  constexpr const char* kOrders[] = {"forward", "backward", "shuffled"};
  setenv("RLK_STANDIN_ORDER", kOrders[way], 1);
  setenv("RLK_STANDIN_THREADS", way == 1 ? "1" : "2", 1);
  return std::string("order ") + kOrders[way];
}
#if defined(__SANITIZE_ADDRESS__)
inline int ways() { return 1; }  // sanitizers make fibers slow and do not test the order
#else
inline int ways() { return kWays; }
#endif

#else

inline constexpr Arithmetic kArithmetics[] = {Arithmetic::kIeee, Arithmetic::kSm80, Arithmetic::kSm90,
                                              Arithmetic::kGfx90a, Arithmetic::kGfx942};
inline constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr bool kWholeElements = false;
constexpr bool kCanonicalNan = true;

inline void run(const rlk::LinearParams& p) { rlk::cpu::linear(p); }
inline void run(const rlk::LinearInputGradParams& p) { rlk::cpu::linear_input_grad(p); }
inline void run(const rlk::LinearWeightGradParams& p) { rlk::cpu::linear_weight_grad(p); }
inline void run(const rlk::LinearBiasGradParams& p) { rlk::cpu::linear_bias_grad(p); }
inline void run(const rlk::TreeSumParams& p) { rlk::cpu::tree_sum(p); }

inline std::vector<rlk::cpu::Isa> isas() {
  std::vector<rlk::cpu::Isa> found;
  for (const auto isa : rlk::cpu::kIsas) {
    if (rlk::cpu::isa_supported(isa)) found.push_back(isa);
  }
  return found;
}

#if defined(__SANITIZE_ADDRESS__)
constexpr int kThreadCounts = 1;  // each instruction set with another number of threads
#else
constexpr int kThreadCounts = 3;
#endif
inline int ways() { return static_cast<int>(isas().size()) * kThreadCounts; }
inline std::string set_way(int way) {
  const auto isa = isas()[static_cast<std::size_t>(way / kThreadCounts)];
  const int threads = 1 + way % 3;
  rlk::cpu::set_isa(isa);
  rlk::cpu::set_num_threads(threads);
  return std::string(rlk::cpu::isa_name(isa)) + ", threads " + std::to_string(threads);
}

#endif

// Kinds of values in a matrix.
enum class Data {
  kNormal,
  kWide,     // every exponent of the format, subnormals and both zeros
  kTiny,     // exponents near the least
  kSparse,   // mostly +0 and -0, also in whole groups
  kEqual,    // the largest significand and the same exponent everywhere: the largest sums that an alignment can make
  kSpecial,  // normal, with some Inf and NaN
};
inline const char* name(Data d) {
  constexpr const char* kNames[] = {"normal", "wide", "tiny", "sparse", "equal", "special"};
  return kNames[static_cast<int>(d)];
}

inline std::uint32_t random_pattern(std::mt19937& random, DType t, Data data) {
  const int exponent_bits = t == DType::kFloat16 ? 5 : 8;
  const int fraction_bits = 8 * rlk::size_of(t) - 1 - exponent_bits;
  const std::uint32_t top = (1u << exponent_bits) - 1;
  const auto make = [&](std::uint32_t sign, std::uint32_t field, std::uint32_t fraction) {
    return sign << (exponent_bits + fraction_bits) | field << fraction_bits | (fraction & ((1u << fraction_bits) - 1));
  };
  const std::uint32_t sign = random() & 1, fraction = random();
  switch (data) {
    case Data::kWide:
      return random() % 16 == 0 ? make(sign, 0, 0) : make(sign, random() % top, fraction);
    case Data::kTiny:
      return make(sign, random() % (t == DType::kFloat16 ? 3 : 60), fraction);
    case Data::kSparse:
      if (random() % 24 != 0) return make(sign, 0, 0);
      break;
    case Data::kEqual:
      return make(0, top / 2, ~0u);
    case Data::kSpecial:
      if (random() % 61 == 0) return make(sign, top, random() % 3 == 0 ? 1u << (fraction_bits - 1) : 0);
      break;
    case Data::kNormal:
      break;
  }
  return rounded(std::normal_distribution<float>(0.0f, 1.0f)(random), t);
}

// Rows of `columns` elements anywhere in memory that is otherwise filled with a canary.
class Matrix {
 public:
  // Rows lie `stride` elements apart, backward in memory if negative, `shift` bytes off any alignment.
  Matrix(std::int64_t num_rows, std::int64_t columns, DType t, std::int64_t stride, std::size_t shift = 0)
      : Matrix(num_rows, columns, t, RowLayout{num_rows > 0 ? num_rows : 1, 0, stride}, shift) {}
  Matrix(std::int64_t num_rows, std::int64_t columns, DType t) : Matrix(num_rows, columns, t, columns) {}
  Matrix(std::int64_t num_rows, std::int64_t columns, DType t, const RowLayout& rows, std::size_t shift = 0)
      : num_rows_(num_rows), columns_(columns), dtype_(t), rows_(rows) {
    std::int64_t least = 0, most = 0;
    for (std::int64_t i = 0; i < num_rows; ++i) {
      least = rows.offset(i) < least ? rows.offset(i) : least;
      most = rows.offset(i) > most ? rows.offset(i) : most;
    }
    begin_ = kGuard + shift + static_cast<std::size_t>(-least * rlk::size_of(t));
    memory_.assign(begin_ + static_cast<std::size_t>((most + columns) * rlk::size_of(t)) + kGuard, kCanary);
  }
  // The same rows, filled with values.
  Matrix& fill(unsigned seed, Data data) {
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < num_rows_; ++i) {
      for (std::int64_t j = 0; j < columns_; ++j) set(i, j, random_pattern(random, dtype_, data));
    }
    return *this;
  }
  void set(std::int64_t row, std::int64_t column, std::uint32_t pattern) {
    const auto at = static_cast<std::int64_t>(begin_) + (rows_.offset(row) + column) * rlk::size_of(dtype_);
    std::memcpy(memory_.data() + at, &pattern, static_cast<std::size_t>(rlk::size_of(dtype_)));
  }
  std::uint32_t at(std::int64_t row, std::int64_t column) const {
    return load_pattern(memory_.data() + begin_, dtype_, rows_.offset(row) + column);
  }
  void set_all(const Patterns& patterns) {
    for (std::int64_t i = 0; i < num_rows_; ++i) {
      for (std::int64_t j = 0; j < columns_; ++j) set(i, j, patterns[static_cast<std::size_t>(i * columns_ + j)]);
    }
  }
  void* data() { return memory_.data() + begin_; }
  const RowLayout& rows() const { return rows_; }
  std::int64_t stride() const { return rows_.inner_stride; }
  DType dtype() const { return dtype_; }
  const std::vector<unsigned char>& memory() const { return memory_; }

  // Expects the patterns in the elements, and the canary in all other bytes.
  void expect(const Patterns& want, const std::string& where) const {
    Matrix image = *this;
    std::fill(image.memory_.begin(), image.memory_.end(), kCanary);
    for (std::int64_t i = 0; i < num_rows_; ++i) {
      for (std::int64_t j = 0; j < columns_; ++j) {
        const std::uint32_t a = want[static_cast<std::size_t>(i * columns_ + j)], b = at(i, j);
        const bool nans = !kCanonicalNan && std::isnan(value_of(a, dtype_)) && std::isnan(value_of(b, dtype_));
        ASSERT_TRUE(a == b || nans) << where << ", row " << i << ", column " << j << std::hex << ": wanted " << a
                                    << ", got " << b;
        image.set(i, j, b);
      }
    }
    ASSERT_EQ(image.memory_, memory_) << where << ": written outside of the output";
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kCanary = 0x5a;
  std::int64_t num_rows_, columns_;
  DType dtype_;
  RowLayout rows_;
  std::size_t begin_ = 0;
  std::vector<unsigned char> memory_;
};

// Every way to run the backend.
inline void for_each_backend(const std::function<void(const std::string&)>& test) {
  for (int way = 0; way < ways(); ++way) {
    test(set_way(way));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Runs `params` on every variant of the backend. Each run writes to a fresh copy of `output`, to which `point(params,
// copy)` sets the pointers.
template <class Params, class Point>
void check_call(Params params, const Matrix& output, const Point& point, const std::string& what) {
  const Patterns want = reference(params);
  for_each_backend([&](const std::string& backend) {
    Matrix got = output;
    point(params, got);
    run(params);
    ASSERT_NO_FATAL_FAILURE(got.expect(want, what + ", " + backend));
  });
}

inline void check(const rlk::LinearParams& p, const Matrix& y, const std::string& what) {
  check_call(
      p, y, [](auto& q, Matrix& m) { q.y = m.data(); }, what);
}
inline void check(const rlk::LinearInputGradParams& p, const Matrix& dx, const std::string& what) {
  check_call(
      p, dx, [](auto& q, Matrix& m) { q.dx = m.data(); }, what);
}
inline void check(const rlk::LinearWeightGradParams& p, const Matrix& dweight, const std::string& what) {
  check_call(
      p, dweight, [](auto& q, Matrix& m) { q.dweight = m.data(); }, what);
}
inline void check(const rlk::LinearBiasGradParams& p, const Matrix& dbias, const std::string& what) {
  check_call(
      p, dbias, [](auto& q, Matrix& m) { q.dbias = m.data(); }, what);
}

inline bool allowed(Arithmetic a, DType t) { return t != DType::kFloat32 || a == Arithmetic::kIeee; }

class Linear : public testing::Test {
 protected:
  void TearDown() override { set_way(ways() > 1 ? ways() - 2 : 0); }
};

}  // namespace linear_test
