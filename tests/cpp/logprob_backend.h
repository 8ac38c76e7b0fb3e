// Runs of a backend of logprob for the tests: outputs between canaries, every way to run the backend, and a bit-for-bit
// comparison of a forward with logprob_reference.h. The backend is the CPU with every instruction set and number of
// threads. With RLK_TEST_HIP it is HIP's on the stand-in runtime, with every order of lanes and waves.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#if !RLK_TEST_HIP
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#endif
#include "logprob_reference.h"
#include "rlk/backends.h"
#include "rlk/ops/logprob.h"

namespace logprob_test {

// ---------------------------------------------------------------------------------------------------------------------
// The backend, with a canary on both sides of every output.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::int64_t n) : n_(n), v_(static_cast<std::size_t>(n) + 2 * kGuard, canary()) {}
  T* data() { return v_.data() + kGuard; }
  T operator[](std::int64_t i) const { return v_[static_cast<std::size_t>(i) + kGuard]; }
  bool intact() const {
    for (int i = 0; i < kGuard; ++i) {
      if (v_[i] != canary() || v_[static_cast<std::size_t>(n_) + kGuard + i] != canary()) return false;
    }
    return true;
  }

 private:
  static constexpr int kGuard = 16;
  static T canary() { return static_cast<T>(7777); }
  std::int64_t n_;
  std::vector<T> v_;
};

struct Result {
  Guarded<float> logprob, lse, entropy, sum_p_sq;
  Guarded<std::int32_t> status;
  explicit Result(std::int64_t n) : logprob(n), lse(n), entropy(n), sum_p_sq(n), status(n) {}
  template <class Params>
  void point(Params* p) {
    p->logprob = logprob.data();
    p->lse = lse.data();
    p->entropy = entropy.data();
    p->sum_p_sq = sum_p_sq.data();
    p->status = status.data();
  }
  bool intact() const {
    return logprob.intact() && lse.intact() && entropy.intact() && sum_p_sq.intact() && status.intact();
  }
};

#if RLK_TEST_HIP

inline void run(rlk::LogprobParams p) {
  std::vector<unsigned char> workspace(static_cast<std::size_t>(rlk::hip::logprob_workspace_bytes(p, 0)) + 16);
  p.workspace = workspace.data();
  rlk::hip::logprob(p, 0, 0);
}
inline void run_merge(const rlk::LogprobMergeParams& p) { rlk::hip::logprob_merge(p, 0, 0); }
inline void run_backward(const rlk::LogprobBackwardParams& p) { rlk::hip::logprob_backward(p, 0, 0); }

constexpr bool kWholeElements = true;  // addresses are multiples of an element
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

inline void run(const rlk::LogprobParams& p) { rlk::cpu::logprob(p); }
inline void run_merge(const rlk::LogprobMergeParams& p) { rlk::cpu::logprob_merge(p); }
inline void run_backward(const rlk::LogprobBackwardParams& p) { rlk::cpu::logprob_backward(p); }

inline std::vector<rlk::cpu::Isa> isas() {
  std::vector<rlk::cpu::Isa> found;
  for (const auto isa : rlk::cpu::kIsas) {
    if (rlk::cpu::isa_supported(isa)) found.push_back(isa);
  }
  return found;
}

constexpr bool kWholeElements = false;
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

// Every way to run the backend.
inline void for_each_backend(const std::function<void(const std::string&)>& test) {
  for (int way = 0; way < ways(); ++way) {
    test(set_way(way));
    if (testing::Test::HasFatalFailure()) return;
  }
}

inline void expect_row(const RowOutputs& want, const Result& got, std::int64_t i, const std::string& where) {
  const auto same = [&](float a, float b, const char* output) {
    EXPECT_EQ(bits(a), bits(b)) << where << ", row " << i << ", " << output << ": " << a << ' ' << b;
    return bits(a) == bits(b);
  };
  ASSERT_EQ(want.status, got.status[i]) << where << ", row " << i;
  ASSERT_TRUE(same(want.logprob, got.logprob[i], "logprob"));
  ASSERT_TRUE(same(want.lse, got.lse[i], "lse"));
  ASSERT_TRUE(same(want.entropy, got.entropy[i], "entropy"));
  ASSERT_TRUE(same(want.sum_p_sq, got.sum_p_sq[i], "sum_p_sq"));
}

inline void check(const Problem& p, const std::string& what) {
  std::vector<RowOutputs> want;
  std::vector<float> want_stats;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    want.push_back(reference(p, i));
    const auto fields = stats_reference(p, i);
    want_stats.insert(want_stats.end(), fields.begin(), fields.end());
  }
  for_each_backend([&](const std::string& backend) {
    const std::string where = what + ", V " + std::to_string(p.columns) + ", " + name(p.dtype) +
                              (p.exp == Exp::kPortable ? ", portable, " : ", hardware, ") + backend;
    auto params = p.params<rlk::LogprobParams>();
    Result all(p.rows);
    all.point(&params);
    if (p.label_smoothing == 0.0f) {
      run(params);
      ASSERT_TRUE(all.intact()) << where;
      for (std::int64_t i = 0; i < p.rows; ++i) ASSERT_NO_FATAL_FAILURE(expect_row(want[i], all, i, where));
    } else {
      EXPECT_THROW(run(params), rlk::InvalidArgument);
    }

    // Without the moments another kernel runs.
    Result some(p.rows);
    some.point(&params);
    params.entropy = params.sum_p_sq = nullptr;
    run(params);
    ASSERT_TRUE(some.intact()) << where;
    for (std::int64_t i = 0; i < p.rows; ++i) {
      ASSERT_EQ(bits(want[i].logprob), bits(some.logprob[i])) << where << ", row " << i;
      ASSERT_EQ(bits(want[i].lse), bits(some.lse[i])) << where << ", row " << i;
      ASSERT_EQ(want[i].status, some.status[i]) << where << ", row " << i;
    }

    Guarded<float> stats(5 * p.rows);
    params.stats = stats.data();
    run(params);
    ASSERT_TRUE(stats.intact()) << where;
    for (std::int64_t k = 0; k < 5 * p.rows; ++k) {
      ASSERT_EQ(bits(want_stats[k]), bits(stats[k])) << where << ", row " << k / 5 << ", field " << k % 5;
    }
  });
}

class Logprob : public testing::Test {
 protected:
  void TearDown() override { set_way(ways() > 1 ? ways() - 2 : 0); }
};

}  // namespace logprob_test
