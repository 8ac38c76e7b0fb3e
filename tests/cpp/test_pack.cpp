// Tests pack and unpack byte for byte against a second implementation, written from the contract. The backend is the
// CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "rlk/backends.h"
#include "rlk/ops/pack.h"
#include "sequence_cases.h"

namespace sequence_test {
namespace {

using linear_test::for_each_backend;
using rlk::DType;
using rlk::PackArray;
using rlk::PackLayoutParams;
using rlk::PackParams;

#if RLK_TEST_HIP
constexpr bool kThrows = false;
void run(const PackLayoutParams& p) { rlk::hip::pack_layout(p, 0, 0); }
void run(const PackParams& p) { rlk::hip::pack(p, 0, 0); }
#else
constexpr bool kThrows = true;
void run(const PackLayoutParams& p) { rlk::cpu::pack_layout(p); }
void run(const PackParams& p) { rlk::cpu::pack(p); }
#endif

struct Case {
  std::int64_t rows, columns;
  std::vector<std::int64_t> token_bytes;
  bool by_mask = false;
  std::int64_t spare = 0;  // unneeded tokens at the end of the packed arrays
  std::int64_t gap = 0;    // bytes between tokens of the padded arrays
  std::size_t shift = 0;
  std::uint64_t fill = 0;
  unsigned seed = 1;
};

void check(const Case& c) {
  auto lengths = random_lengths(c.rows, c.columns, c.seed);
  std::mt19937 random(c.seed);
  std::vector<std::uint8_t> mask;
  std::vector<std::int32_t> positions;
  for (std::int64_t i = 0; i < c.rows; ++i) {
    std::int32_t position = 0;
    for (std::int64_t t = 0; t < c.columns; ++t) {
      const bool kept = c.by_mask ? random() % 3 != 0 : t < lengths[static_cast<std::size_t>(i)];
      mask.push_back(kept ? static_cast<std::uint8_t>(1 + random() % 255) : 0);
      positions.push_back(kept ? position++ : -1);
    }
    lengths[static_cast<std::size_t>(i)] = position;
  }
  const auto offsets = offsets_of(lengths);
  const std::int64_t capacity = offsets.back() + c.spare;
  const std::string text = "[" + std::to_string(c.rows) + ", " + std::to_string(c.columns) + "]" +
                           (c.by_mask ? " by mask" : "") + " gap " + std::to_string(c.gap) + " shift " +
                           std::to_string(c.shift);
  const auto fill_at = [&](std::int64_t byte) { return static_cast<unsigned char>(c.fill >> (byte % 8 * 8)); };
  std::vector<Bytes> padded;
  std::vector<std::vector<unsigned char>> packed_want, padded_want;
  for (const std::int64_t bytes : c.token_bytes) {
    const std::int64_t stride = bytes + c.gap;
    padded.emplace_back(c.rows * c.columns * stride, c.shift);
    padded.back().random(c.seed);
    std::vector<unsigned char> packed(static_cast<std::size_t>(capacity * bytes)), back;
    for (std::int64_t b = 0; b < capacity * bytes; ++b) packed[static_cast<std::size_t>(b)] = fill_at(b % bytes);
    for (std::int64_t i = 0; i < c.rows * c.columns; ++i) {
      const std::int32_t position = positions[static_cast<std::size_t>(i)];
      for (std::int64_t b = 0; b < bytes; ++b) {
        const unsigned char value = position < 0 ? fill_at(b) : padded.back().data()[i * stride + b];
        back.push_back(value);
        if (position < 0) continue;
        const std::int64_t at = offsets[static_cast<std::size_t>(i / c.columns)] + position;
        packed[static_cast<std::size_t>(at * bytes + b)] = value;
      }
    }
    packed_want.push_back(packed);
    padded_want.push_back(back);
  }
  for_each_backend([&](const std::string& backend) {
    Bytes cu_seqlens((c.rows + 1) * 4), where(c.rows * c.columns * 4), status(4);
    PackLayoutParams l;
    l.num_sequences = c.rows;
    l.num_tokens = c.columns;
    l.capacity = capacity;
    l.cu_seqlens = cu_seqlens.as<std::int32_t>();
    l.status = status.as<std::int32_t>();
    if (c.by_mask && !mask.empty()) {
      l.mask = {mask.data(), c.columns, 1, false};
      l.positions = where.as<std::int32_t>();
    } else {
      l.lengths = c.rows == 0 ? nullptr : lengths.data();
    }
    run(l);
    ASSERT_NO_FATAL_FAILURE(cu_seqlens.expect(bytes_of(offsets), text + ", cu_seqlens, " + backend));
    ASSERT_NO_FATAL_FAILURE(status.expect({0, 0, 0, 0}, text + ", status, " + backend));
    if (l.positions != nullptr) {
      ASSERT_NO_FATAL_FAILURE(where.expect(bytes_of(positions), text + ", positions, " + backend));
    }
    PackParams p;
    p.num_arrays = static_cast<std::int32_t>(c.token_bytes.size());
    p.cu_seqlens = {l.cu_seqlens, DType::kInt32};
    p.positions = l.positions;
    p.num_sequences = c.rows;
    p.num_tokens = c.columns;
    p.capacity = capacity;
    std::vector<Bytes> packed, back;
    for (std::size_t k = 0; k < c.token_bytes.size(); ++k) {
      const std::int64_t bytes = c.token_bytes[k];
      packed.emplace_back(capacity * bytes, c.shift);
      back.emplace_back(c.rows * c.columns * bytes, c.shift);
      PackArray& a = p.arrays[k];
      a.token_bytes = a.packed_stride = bytes;
      a.token_stride = bytes + c.gap;
      a.sequence_stride = c.columns * a.token_stride;
      a.fill = c.fill;
      a.padded = padded[k].data();
      a.packed = packed[k].data();
    }
    for (const bool covered : {true, false}) {
      p.covered = covered;
      run(p);
      for (std::size_t k = 0; k < packed.size(); ++k) {
        ASSERT_NO_FATAL_FAILURE(packed[k].expect(packed_want[k], text + ", packed, " + backend));
        std::fill_n(packed[k].data(), covered ? packed_want[k].size() : 0, kCanary);
      }
    }
    p.unpacks = true;
    for (std::size_t k = 0; k < packed.size(); ++k) {
      p.arrays[k].padded = back[k].data();
      p.arrays[k].token_stride = c.token_bytes[k];
      p.arrays[k].sequence_stride = c.columns * c.token_bytes[k];
    }
    run(p);
    for (std::size_t k = 0; k < back.size(); ++k) {
      ASSERT_NO_FATAL_FAILURE(back[k].expect(padded_want[k], text + ", unpacked, " + backend));
    }
  });
}

class Pack : public linear_test::Linear {};

// Bytes per token for every unit: bytes, ids, vectors, rows of odd and of even widths; and zero.
const std::vector<std::int64_t> kTokens = {1, 2, 4, 8, 16, 0, 12, 96};

TEST_F(Pack, EveryShapeHasTheBytesOfTheContract) {
  unsigned seed = 0;
  for (const std::int64_t rows : {0, 1, 3, 40}) {
    for (const std::int64_t columns : {0, 1, 7, 33, 300}) {
      for (const bool by_mask : {false, true}) {
        Case c{rows, columns, kTokens, by_mask};
        c.seed = ++seed;
        c.spare = seed % 3 * 20;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Pack, AnyAlignmentAndStrideAndFillIsRight) {
  for (const bool by_mask : {false, true}) {
    Case c{5, 50, {1, 5, 33}, by_mask, 9, 3, 1, 0x8787878787878787};
    ASSERT_NO_FATAL_FAILURE(check(c));
    c = {5, 50, {4, 20, 64}, by_mask, 9, 8, 4, 0xffffff9cffffff9c};
    ASSERT_NO_FATAL_FAILURE(check(c));
    c = {5, 50, {16, 48, 128}, by_mask, 9, 16, 0, 0x4000000000000000};
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

TEST_F(Pack, ManyRowsAndWideTokens) {
  check({3000, 9, {4, 1}, false, 3});
  check({3000, 9, {4, 1}, true, 3});
  check({4, 20, {4096, 40}, false, 3});
  check({4, 20, {4096, 40}, true, 3});
  check({2, 5000, {4}, true, 3});
}

TEST_F(Pack, LengthsOutOfRangeThrowOrAreClampedWithAStatus) {
  const std::vector<std::int64_t> lengths = {2, -1, 9, 3};
  std::vector<std::int32_t> cu_seqlens(5), status(1);
  PackLayoutParams p;
  p.lengths = lengths.data();
  p.num_sequences = 4;
  p.num_tokens = 5;
  p.capacity = 20;
  p.cu_seqlens = cu_seqlens.data();
  p.status = status.data();
  const auto expect = [&](std::vector<std::int32_t> want, std::int32_t bits) {
    if (kThrows) {
      EXPECT_THROW(run(p), rlk::InvalidArgument);
      return;
    }
    run(p);
    EXPECT_EQ(cu_seqlens, want);
    EXPECT_EQ(status[0], bits);
  };
  expect({0, 2, 2, 7, 10}, rlk::kPackBadLength);
  p.capacity = 6;
  expect({0, 2, 2, 6, 6}, rlk::kPackBadLength | rlk::kPackOverflow);
}

TEST_F(Pack, OffsetsThatAreNoneThrowOrTouchNothingElse) {
  const std::vector<std::vector<std::int64_t>> all = {
      {0, 5, 3, 8}, {0, 5, 100, 8}, {-3, 2, 4, 8}, {0, std::int64_t{1} << 40, 4, 8}, {0, 7, 8, 8}};
  for (const auto& offsets : all) {
    for (const bool unpacks : {false, true}) {
      Bytes padded(3 * 6 * 4), packed(8 * 4);
      padded.random(1);
      packed.random(2);
      PackParams p;
      p.num_arrays = 1;
      p.unpacks = unpacks;
      p.covered = false;
      p.cu_seqlens = {offsets.data(), DType::kInt64};
      p.num_sequences = 3;
      p.num_tokens = 6;
      p.capacity = 8;
      p.arrays[0] = {padded.data(), 24, 4, packed.data(), 4, 4, 0};
      if (kThrows) {
        EXPECT_THROW(run(p), rlk::InvalidArgument);
        continue;
      }
      run(p);
      ASSERT_NO_FATAL_FAILURE(padded.expect(padded.bytes(), "padded"));
      ASSERT_NO_FATAL_FAILURE(packed.expect(packed.bytes(), "packed"));
    }
  }
}

}  // namespace
}  // namespace sequence_test
