// Tests sequence_logprob and its gradient bit for bit against a second implementation, written from the contract. The
// backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "rlk/backends.h"
#include "rlk/ops/sequence_logprob.h"
#include "sequence_cases.h"
#include "sum_reference.h"

namespace sequence_test {
namespace {

using linear_test::for_each_backend;
using linear_test::load_pattern;
using linear_test::rounded;
using linear_test::value_of;
using rlk::DType;
using rlk::SequenceLogprobBackwardParams;
using rlk::SequenceLogprobParams;

#if RLK_TEST_HIP
constexpr bool kThrows = false;
void run(const SequenceLogprobParams& p) { rlk::hip::sequence_logprob(p, 0, 0); }
void run(const SequenceLogprobBackwardParams& p) { rlk::hip::sequence_logprob_backward(p, 0, 0); }
#else
constexpr bool kThrows = true;
void run(const SequenceLogprobParams& p) { rlk::cpu::sequence_logprob(p); }
void run(const SequenceLogprobBackwardParams& p) { rlk::cpu::sequence_logprob_backward(p); }
#endif

// The contract's sum of the values at positions 0, 1, ...; a position that does not count adds +0.
float contract_sum(const std::vector<float>& x) {
  const float sum = sum_test::tree(x) + 0.0f;
  return std::isnan(sum) ? std::bit_cast<float>(0x7fc00000) : sum;
}

struct Case {
  std::int64_t rows, columns;
  DType dtype = DType::kFloat32;
  int mask_bytes = 1;  // 0: none
  bool float_mask = false, packed = false;
  std::int64_t pad = 0;
  std::size_t shift = 0;
  unsigned seed = 1;
};

bool flag(const unsigned char* mask, const Case& c, std::int64_t i) {
  if (c.mask_bytes == 0) return true;
  std::uint64_t element = 0;
  std::memcpy(&element, mask + i * c.mask_bytes, static_cast<std::size_t>(c.mask_bytes));
  if (c.float_mask) element &= ~(std::uint64_t{1} << (8 * c.mask_bytes - 1));
  return element != 0;
}

void check(const Case& c) {
  const int bytes = rlk::size_of(c.dtype);
  const auto lengths = random_lengths(c.rows, c.columns, c.seed);
  auto offsets = offsets_of(lengths);
  const std::int64_t total = c.packed ? offsets.back() + 5 : c.columns, rows = c.packed ? 1 : c.rows;
  const std::int64_t stride = total + c.pad;
  Bytes logprob(rows * stride * bytes, c.shift);
  Bytes mask(rows * stride * std::max(c.mask_bytes, 1), c.shift / 2 * static_cast<std::size_t>(c.mask_bytes));
  std::mt19937 random(c.seed + 7);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < rows * stride; ++i) {
    const bool kept = random() % 3 != 0;
    std::uint64_t element = kept ? (c.float_mask ? 0x3c00ull << 48 | 0x3c003c00 : random() | 1ull) : 0;
    if (!kept && c.float_mask) element = std::uint64_t{random() % 2} << (8 * c.mask_bytes - 1);  // -0
    if (c.mask_bytes > 0) std::memcpy(mask.data() + i * c.mask_bytes, &element, static_cast<std::size_t>(c.mask_bytes));
    float x = normal(random) - 1.0f;
    if (random() % 997 == 0) x = -std::numeric_limits<float>::infinity();
    if (!flag(mask.data(), c, i) && random() % 2 == 0) x = NAN;
    const std::uint32_t pattern = rounded(x, c.dtype);
    std::memcpy(logprob.data() + i * bytes, &pattern, static_cast<std::size_t>(bytes));
  }
  SequenceLogprobParams p;
  p.logprob = logprob.data();
  p.logprob_stride = stride;
  p.num_sequences = c.rows;
  p.num_tokens = total;
  p.dtype = c.dtype;
  if (c.mask_bytes > 0) p.mask = {mask.data(), stride, c.mask_bytes, c.float_mask};
  if (c.packed) p.cu_seqlens = {offsets.data(), DType::kInt32};
  std::vector<float> sums, dsum;
  std::vector<std::int64_t> counts;
  Bytes want_gradient((c.packed ? 1 : c.rows) * total * bytes);
  std::fill(want_gradient.data(), want_gradient.data() + want_gradient.bytes().size(), 0);
  for (std::int64_t i = 0; i < c.rows; ++i) {
    const std::int64_t first = c.packed ? offsets[static_cast<std::size_t>(i)] : i * stride;
    const std::int64_t out = c.packed ? first : i * total,
                       length = c.packed ? lengths[static_cast<std::size_t>(i)] : total;
    std::vector<float> x;
    std::int64_t count = 0;
    dsum.push_back(normal(random));
    for (std::int64_t t = 0; t < length; ++t) {
      const bool kept = flag(mask.data(), c, first + t);
      x.push_back(kept ? value_of(load_pattern(logprob.data(), c.dtype, first + t), c.dtype) : 0.0f);
      count += kept;
      const std::uint32_t pattern = kept ? rounded(dsum.back(), c.dtype) : 0;
      std::memcpy(want_gradient.data() + (out + t) * bytes, &pattern, static_cast<std::size_t>(bytes));
    }
    sums.push_back(contract_sum(x));
    counts.push_back(count);
  }
  const std::string text = std::string(linear_test::name(c.dtype)) + " [" + std::to_string(c.rows) + ", " +
                           std::to_string(c.columns) + "] mask " + std::to_string(c.mask_bytes) +
                           (c.packed ? " packed" : "") + " pad " + std::to_string(c.pad);
  for_each_backend([&](const std::string& backend) {
    Bytes sum(c.rows * 4), count(c.rows * 8), status(c.rows * 4);
    p.sum = sum.as<float>();
    p.count = count.as<std::int64_t>();
    p.status = status.as<std::int32_t>();
    run(p);
    ASSERT_NO_FATAL_FAILURE(sum.expect(bytes_of(sums), text + ", sum, " + backend));
    ASSERT_NO_FATAL_FAILURE(count.expect(bytes_of(counts), text + ", count, " + backend));
    ASSERT_NO_FATAL_FAILURE(status.expect(std::vector<unsigned char>(static_cast<std::size_t>(c.rows) * 4), text));
    SequenceLogprobBackwardParams q;
    Bytes gradient((c.packed ? 1 : c.rows) * total * bytes);
    q.dsum = dsum.data();
    q.mask = p.mask;
    q.cu_seqlens = p.cu_seqlens;
    q.d_logprob = gradient.data();
    q.num_sequences = c.rows;
    q.num_tokens = total;
    q.dtype = c.dtype;
    run(q);
    ASSERT_NO_FATAL_FAILURE(gradient.expect(want_gradient.bytes(), text + ", gradient, " + backend));
  });
}

class SequenceLogprob : public linear_test::Linear {};

// Columns: 0; 1; around a row of lanes; around a chunk; more chunks than one round of a GPU's block.
constexpr std::int64_t kColumns[] = {0, 1, 63, 255, 256, 257, 2047, 2048, 2049, 5000};

TEST_F(SequenceLogprob, EveryLengthHasTheBitsOfTheContract) {
  unsigned seed = 0;
  for (const std::int64_t columns : kColumns) {
    for (const bool packed : {false, true}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        Case c{3, columns, dtype};
        constexpr int kBytes[] = {1, 8, 0, 4, 2};
        c.mask_bytes = kBytes[++seed % 5];
        c.float_mask = seed % 2 == 0 && c.mask_bytes > 1;
        c.packed = packed;
        c.pad = seed % 3;
        c.shift = dtype == DType::kFloat32 ? 4 * (seed % 4) : 2 * (seed % 8);
        c.seed = seed;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(SequenceLogprob, ALongSequenceHasTheBitsOfTheContract) {
  check({2, 140000, DType::kFloat32, 1});  // 69 chunks
  check({3, 140000, DType::kFloat32, 1, false, true});
}

TEST_F(SequenceLogprob, ManySequencesHaveTheBitsOfTheContract) {
  check({400, 37, DType::kFloat32, 4, true, true});
  check({400, 37, DType::kBFloat16, 1});
}

TEST_F(SequenceLogprob, OffsetsThatAreNoneThrowOrGiveNanAndAStatus) {
  constexpr std::int64_t kBad = 1, kTokens = 12;
  const std::vector<std::vector<std::int64_t>> all = {
      {0, 5, 3, 12}, {0, 5, 13, 12}, {0, -1, 4, 12}, {1, 5, 6, 12}, {0, 4, std::int64_t{1} << 62, 12}};
  const std::vector<float> x(kTokens, 1.0f), dsum(3, 2.0f);
  for (const auto& offsets : all) {
    std::vector<float> sum(3), gradient(kTokens);
    std::vector<std::int64_t> count(3);
    std::vector<std::int32_t> status(3);
    SequenceLogprobParams p;
    p.logprob = x.data();
    p.cu_seqlens = {offsets.data(), DType::kInt64};
    p.num_sequences = 3;
    p.num_tokens = kTokens;
    p.sum = sum.data();
    p.count = count.data();
    p.status = status.data();
    SequenceLogprobBackwardParams q;
    q.dsum = dsum.data();
    q.cu_seqlens = p.cu_seqlens;
    q.d_logprob = gradient.data();
    q.num_sequences = 3;
    q.num_tokens = kTokens;
    if (kThrows) {
      EXPECT_THROW(run(p), rlk::InvalidArgument);
      EXPECT_THROW(run(q), rlk::InvalidArgument);
      continue;
    }
    run(p);
    run(q);
    bool any = false;
    for (std::size_t i = 0; i < 3; ++i) {
      const bool good =
          offsets[i] >= 0 && offsets[i] <= offsets[i + 1] && offsets[i + 1] <= kTokens && (i > 0 || offsets[0] == 0);
      EXPECT_EQ(status[i], good ? 0 : kBad);
      EXPECT_EQ(std::isnan(sum[i]), !good);
      EXPECT_EQ(count[i], good ? offsets[i + 1] - offsets[i] : 0);
      any = any || !good;
    }
    EXPECT_TRUE(any);
    for (const float g : gradient) EXPECT_TRUE(g == 0.0f || g == 2.0f);
  }
}

TEST_F(SequenceLogprob, NothingAtAllIsWellDefined) {
  SequenceLogprobParams p;
  run(p);
  std::int32_t zero = 0;
  float gradient[3] = {1, 1, 1};
  SequenceLogprobBackwardParams q;
  q.cu_seqlens = {&zero, DType::kInt32};
  q.d_logprob = gradient;
  q.num_tokens = 3;
  run(q);
  for (const float g : gradient) EXPECT_EQ(g, 0.0f);
}

}  // namespace
}  // namespace sequence_test
