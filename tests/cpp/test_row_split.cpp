// Tests the split of rows over the threads of a GPU, and its division by multiplication.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/rows/row_split.h"

namespace rlk {
namespace {

TEST(Divisor, HasTheQuotientOfTheHardware) {
  constexpr std::uint32_t kMost = (std::uint32_t{1} << 31) - 1;
  std::vector<std::uint32_t> divisors;
  for (std::uint32_t d = 1; d <= 4096; ++d) divisors.push_back(d);
  for (int i = 12; i <= 31; ++i) {
    const std::uint32_t power = std::uint32_t{1} << i;
    for (const std::uint32_t d : {power - 1, power, power + 1}) {
      if (d <= kMost + 1) divisors.push_back(d);
    }
  }
  for (const std::uint32_t d : divisors) {
    const Divisor by(d);
    const auto check = [&](std::uint64_t n) {
      if (n <= kMost) ASSERT_EQ(by.quotient(static_cast<std::uint32_t>(n)), n / d) << n << " / " << d;
    };
    // Tries numerators at which the quotient steps, where a rounded multiplier would fail first.
    for (std::uint64_t q = 0; q * d <= kMost; q += q < 64 ? 1 : q / 3) {
      for (const std::uint64_t n : {q * d, q * d + d - 1}) check(n);
    }
    for (std::uint64_t n = kMost - 2; n <= kMost; ++n) check(n);
    for (std::uint64_t last = kMost / d * d, i = 0; i < 3; ++i) check(last - i % (last + 1));
  }
}

TEST(RowSplit, EveryItemOfEveryRowIsOneThreads) {
  for (const std::int64_t items : {1, 3, 8, 100, 128, 129, 1000, 4096, 5000}) {
    for (const int count : {1, 2, 8}) {
      for (const int log2_block : {7, 8}) {
        const RowSplit split = split_rows(items, count, log2_block);
        constexpr std::int64_t kRows = 5;
        std::vector<int> taken(static_cast<std::size_t>(kRows * items));
        for (std::int64_t block = 0; block < blocks_of(split, kRows); ++block) {
          for (int thread = 0; thread < 1 << log2_block; ++thread) {
            const RowPlace at = place_in_rows(split, count, static_cast<std::uint32_t>(block), thread);
            for (int i = 0; i < count; ++i) {
              const int item = at.first + i * at.step;
              if (at.row < kRows && item < items) ++taken[static_cast<std::size_t>(at.row * items + item)];
            }
          }
        }
        for (const int n : taken) ASSERT_EQ(n, 1) << items << " items, " << count << " a thread";
      }
    }
  }
}

}  // namespace
}  // namespace rlk
