// Tests random_bits against the paper's vectors and a second implementation. The backend is the CPU or, with
// RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <vector>

#if !RLK_TEST_HIP
#include "cpu/thread_pool.h"
#endif
#include "rlk/backends.h"
#include "rlk/ops/random_bits.h"

namespace {

using Words = std::array<std::uint32_t, 4>;

// A second implementation of the paper's rounds, with 64-bit products.
Words philox(Words c, std::uint32_t left, std::uint32_t right) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xd2511f53u} * c[0], second = std::uint64_t{0xcd9e8d57u} * c[2];
    c = {static_cast<std::uint32_t>(second >> 32) ^ c[1] ^ left, static_cast<std::uint32_t>(second),
         static_cast<std::uint32_t>(first >> 32) ^ c[3] ^ right, static_cast<std::uint32_t>(first)};
    left += 0x9e3779b9u;
    right += 0xbb67ae85u;
  }
  return c;
}

std::vector<std::int64_t> run(rlk::RandomBitsParams p) {
  constexpr std::int64_t kCanary = -12345;
  constexpr std::size_t kGuard = 8;
  const auto count = static_cast<std::size_t>(p.num_rows * p.num_words);
  std::vector<std::int64_t> bits(count + kGuard, kCanary);
  p.bits = bits.data();
#if RLK_TEST_HIP
  rlk::hip::random_bits(p, 0, 0);
#else
  rlk::cpu::random_bits(p);
#endif
  for (std::size_t i = count; i < bits.size(); ++i) EXPECT_EQ(bits[i], kCanary) << "guard";
  bits.resize(count);
  return bits;
}

TEST(RandomBits, AreTheKnownAnswersOfThePaper) {
  rlk::RandomBitsParams p;  // a counter and a key of zeros
  p.num_rows = 1;
  p.num_words = 4;
  EXPECT_EQ(run(p), (std::vector<std::int64_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  // The paper's vector with digits of pi: the counter's last word is 256 * stream + block.
  p.sample_id.value = static_cast<std::int64_t>(0x85a308d3243f6a88u);
  p.position.value = 0x13198a2e;
  p.seed.value = static_cast<std::int64_t>(0x299f31d0a4093822u);
  p.random_stream = 0x03707344 / 256;
  p.num_words = 4 * (0x03707344 % 256 + 1);
  const std::vector<std::int64_t> words = run(p);
  EXPECT_EQ(std::vector<std::int64_t>(words.end() - 4, words.end()),
            (std::vector<std::int64_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomBits, AreThoseOfASecondImplementation) {
  std::vector<std::int64_t> seed, position;
  std::vector<std::int32_t> sample;
  for (int i = 0; i < 333; ++i) {
    seed.push_back(static_cast<std::int64_t>(std::uint64_t{0x123456789abcdef1} * static_cast<unsigned>(i)));
    position.push_back(std::int64_t{13'000'000} * i - 1000);  // the first and the last few do not fit 32 bits
    sample.push_back(i % 2 == 0 ? i : -i);
    sample.push_back(77);  // between rows
  }
#if RLK_TEST_HIP
  const char* const orders[] = {"forward", "backward", "shuffled"};
#else
  const int orders[] = {1, 2, 3};
#endif
  for (const auto order : orders) {
#if RLK_TEST_HIP
    setenv("RLK_STANDIN_ORDER", order, 1);
#else
    rlk::cpu::set_num_threads(order);
#endif
    for (const std::int32_t num_words : {1, 3, 4, 6, 1024}) {
      rlk::RandomBitsParams p;
      p.seed = {seed.data(), 0, 1, rlk::DType::kInt64};
      p.sample_id = {sample.data(), 0, 2, rlk::DType::kInt32};
      p.position = {position.data(), 0, 1, rlk::DType::kInt64};
      p.num_rows = static_cast<std::int64_t>(seed.size());
      p.num_words = num_words;
      p.random_stream = 5;
      const std::vector<std::int64_t> got = run(p);
      for (std::size_t i = 0; i < seed.size(); ++i) {
        const auto id = static_cast<std::uint64_t>(std::int64_t{sample[2 * i]}),
                   key = static_cast<std::uint64_t>(seed[i]);
        const bool valid = position[i] >= 0 && position[i] >> 32 == 0;
        for (std::int32_t w = 0; w < num_words; ++w) {
          const Words c = {static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(id >> 32),
                           static_cast<std::uint32_t>(position[i]), static_cast<std::uint32_t>(5 * 256 + w / 4)};
          const Words want = philox(c, static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32));
          ASSERT_EQ(got[i * num_words + w], valid ? std::int64_t{want[w % 4]} : -1) << "row " << i << " word " << w;
        }
      }
    }
  }
}

TEST(RandomBits, RefusesWhatWouldCorruptMemory) {
  rlk::RandomBitsParams p;
  p.num_rows = 1;
  std::int64_t bits[4];
  p.bits = bits;
  for (const int words : {0, 1025}) {
    p.num_words = words;
#if RLK_TEST_HIP
    EXPECT_THROW(rlk::hip::random_bits(p, 0, 0), rlk::InvalidArgument);
#else
    EXPECT_THROW(rlk::cpu::random_bits(p), rlk::InvalidArgument);
#endif
  }
}

}  // namespace
