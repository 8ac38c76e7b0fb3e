// Tests the thread pool of the CPU backend: ranges, nesting, exceptions, a forked child, and an operator called from
// many threads at once.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/thread_pool.h"
#include "logprob_backend.h"
#include "logprob_reference.h"
#include "rlk/backends.h"
#include "rlk/base.h"
#include "rlk/ops/logprob.h"

namespace logprob_test {
namespace {

TEST_F(Logprob, CallsFromManyThreadsAtOnce) {
  rlk::cpu::set_num_threads(3);
  Problem p(5, 20011, DType::kBFloat16, 26);
  std::vector<RowOutputs> want;
  for (std::int64_t i = 0; i < p.rows; ++i) want.push_back(reference(p, i));
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 6; ++t) {
    callers.emplace_back([&, t] {
      for (int k = 0; k < 20; ++k) {
        if (t == 5) rlk::cpu::set_num_threads(1 + k % 4);
        auto params = p.params<rlk::LogprobParams>();
        Result got(p.rows);
        got.point(&params);
        rlk::cpu::logprob(params);
        for (std::int64_t i = 0; i < p.rows; ++i) {
          if (bits(got.logprob[i]) != bits(want[i].logprob) || bits(got.entropy[i]) != bits(want[i].entropy)) ++wrong;
        }
      }
    });
  }
  for (auto& c : callers) c.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    rlk::cpu::set_num_threads(threads);
    for (const std::int64_t n : {0, 1, 2, 100, 1001}) {
      for (const std::int64_t grain : {0, 1, 7, 5000}) {
        std::vector<std::atomic<int>> seen(static_cast<std::size_t>(n));
        rlk::cpu::parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) ++seen[i];
        });
        for (const auto& s : seen) ASSERT_EQ(s, 1);
      }
    }
  }
}

TEST(ThreadPool, UsesItsThreads) {
  rlk::cpu::set_num_threads(2);
  std::atomic<int> inside{0};
  // Neither range can end before both have begun.
  rlk::cpu::parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
    ++inside;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (inside < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    EXPECT_EQ(inside, 2);
  });
}

TEST(ThreadPool, NestedCallsRunInline) {
  rlk::cpu::set_num_threads(3);
  std::atomic<int> sum{0};
  rlk::cpu::parallel_for(8, 1, [&](std::int64_t, std::int64_t) {
    const auto self = std::this_thread::get_id();
    rlk::cpu::parallel_for(10, 1, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_EQ(self, std::this_thread::get_id());
      sum += static_cast<int>(end - begin);
    });
  });
  EXPECT_EQ(sum, 80);
}

TEST(ThreadPool, RethrowsAndStaysUsable) {
  rlk::cpu::set_num_threads(3);
  for (int k = 0; k < 50; ++k) {
    EXPECT_THROW(rlk::cpu::parallel_for(100, 1,
                                        [&](std::int64_t begin, std::int64_t) {
                                          if (begin == k) throw std::runtime_error("this one");
                                        }),
                 std::runtime_error);
  }
  std::atomic<int> sum{0};
  rlk::cpu::parallel_for(100, 1, [&](std::int64_t, std::int64_t) { ++sum; });
  EXPECT_EQ(sum, 100);
  EXPECT_THROW(rlk::cpu::set_num_threads(0), rlk::InvalidArgument);
}

TEST(ThreadPool, AForkedChildHasThreadsOfItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts threads";
#endif
  rlk::cpu::set_num_threads(3);
  rlk::cpu::parallel_for(100, 1, [](std::int64_t, std::int64_t) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(10);
    std::atomic<int> sum{0};
    rlk::cpu::parallel_for(1000, 1, [&](std::int64_t, std::int64_t) { ++sum; });
    _exit(sum == 1000 && rlk::cpu::num_threads() == 3 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  std::atomic<int> sum{0};
  rlk::cpu::parallel_for(100, 1, [&](std::int64_t, std::int64_t) { ++sum; });
  EXPECT_EQ(sum, 100);
}

}  // namespace
}  // namespace logprob_test
