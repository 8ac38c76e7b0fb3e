// Tests masked_whiten bit for bit against a second implementation, written from the contract. The backend is the CPU
// or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/masked_whiten.h"
#include "sum_reference.h"

namespace masked_whiten_test {
namespace {

using linear_test::for_each_backend;
using rlk::DType;
using rlk::MaskedWhitenParams;

void run(MaskedWhitenParams p) {
#if RLK_TEST_HIP
  std::vector<std::int64_t> workspace(static_cast<std::size_t>(rlk::hip::masked_whiten_workspace_bytes(p, 0) / 8 + 1),
                                      -1);
  p.workspace = workspace.data();
  rlk::hip::masked_whiten(p, 0, 0);
#else
  rlk::cpu::masked_whiten(p);
#endif
}

// ---- second implementation of the contract
// ---------------------------------------------------------------------------

using Tokens = std::vector<std::pair<bool, float>>;  // whether the token counts, and its value

float sum(const std::vector<float>& v) { return sum_test::tree(v) + 0.0f; }

struct Outputs {
  std::vector<std::vector<float>> y;
  float mean = 0.0f, var = 0.0f;
};

float canonical(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

Outputs reference(const MaskedWhitenParams& p, const std::vector<Tokens>& batch) {
  std::vector<float> counted;
  for (const Tokens& tokens : batch) {
    for (const auto& [counts, x] : tokens) {
      if (counts) counted.push_back(x);
    }
  }
  const bool equal = std::all_of(counted.begin(), counted.end(), [&](float x) { return x == counted[0]; });
  const auto n = static_cast<std::int64_t>(counted.size());
  const auto total = [&](const auto& f) {
    std::vector<float> of_sequences;
    for (const Tokens& tokens : batch) {
      std::vector<float> v;
      for (const auto& [counts, x] : tokens) v.push_back(counts ? f(x) : 0.0f);
      of_sequences.push_back(sum(v));
    }
    return sum(of_sequences);
  };
  Outputs out;
  if (n > 0) out.mean = equal ? counted[0] + 0.0f : total([](float x) { return x; }) / static_cast<float>(n);
  const float mean = out.mean;
  sum_test::Scale scale;
  if (n > 0 && !equal) {
    float least = std::numeric_limits<float>::infinity(), largest = -least;
    for (const float x : counted) {
      if (x < least) least = x;
      if (x > largest) largest = x;
    }
    scale = sum_test::scale_of(least, largest);
  }
  const auto deviation = [&](float x) { return equal ? 0.0f : x * scale.down - mean * scale.down; };
  float v = 0.0f;
  if (n > 0 && !equal) {
    const auto square = [&](float x) { return (scale.up * deviation(x)) * (scale.up * deviation(x)); };
    v = total(square) / static_cast<float>(p.unbiased ? n - 1 : n) / scale.up / scale.up;
  }
  out.var = v / scale.down / scale.down;
  const float rstd = 1.0f / std::sqrt(v + p.eps * scale.down * scale.down);
  for (const Tokens& tokens : batch) {
    out.y.emplace_back();
    for (const auto& [counts, x] : tokens) {
      float y = deviation(x) * rstd;
      if (!p.shift_mean) y += mean;
      out.y.back().push_back(counts ? canonical(y) : 0.0f);
    }
  }
  out.mean = canonical(out.mean);
  out.var = canonical(out.var);
  return out;
}

// ---- cases ----------------------------------------------------------------------------------------------------------

std::uint32_t bits(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

struct Case {
  std::vector<std::int64_t> lengths;
  bool packed = false, shift_mean = true, unbiased = true, has_mask = true;
  std::int64_t shift = 0, pad = 0;
  double share = 0.8;
  float constant = 0.0f;  // the value of all tokens that count; 0: normal values
  float size = 1.0f;      // scale of the values
  bool nan = false;
  unsigned seed = 1;
};

void expect_contract(const Case& c, const std::string& where) {
  constexpr float kCanary = -12345.0f;
  std::mt19937 random(c.seed);
  std::normal_distribution<float> normal(3.0f, 2.0f);
  std::int64_t longest = 0, total = 0;
  std::vector<std::int64_t> starts;
  for (const std::int64_t n : c.lengths) {
    starts.push_back(total);
    longest = std::max(longest, n);
    total += n;
  }
  starts.push_back(total);
  const std::int64_t num = static_cast<std::int64_t>(c.lengths.size()), stride = c.packed ? 0 : longest + c.pad;
  const std::size_t size = static_cast<std::size_t>(c.shift + (c.packed ? total : num * stride) + 16);
  std::vector<float> x(size, kCanary), y(size, kCanary), want = y;
  std::vector<std::int32_t> mask(size, 77);
  std::vector<Tokens> batch;
  for (std::int64_t s = 0; s < num; ++s) {
    batch.emplace_back();
    for (std::int64_t t = 0; t < (c.packed ? c.lengths[s] : longest); ++t) {
      const bool counts = !c.has_mask || (t < c.lengths[s] && random() % 1000 < 1000 * c.share);
      float value = c.constant != 0.0f ? c.constant : c.size * normal(random);
      if (c.nan && random() % 300 == 0) value = NAN;
      if (!counts) value = NAN;
      const std::size_t at = static_cast<std::size_t>(c.shift + (c.packed ? starts[s] : s * stride) + t);
      x[at] = value;
      mask[at] = counts ? static_cast<std::int32_t>(1 + random() % 3) : 0;
      batch.back().emplace_back(counts, value);
    }
  }
  MaskedWhitenParams p;
  p.sequences.num_sequences = num;
  p.sequences.num_tokens = c.packed ? total : longest;
  if (c.packed) p.sequences.cu_seqlens = starts.data();
  p.sequences.cu_dtype = DType::kInt64;
  p.x = {x.data() + c.shift, stride};
  p.y = {y.data() + c.shift, stride};
  if (c.has_mask) p.mask = rlk::mask_of(mask.data() + c.shift, stride, DType::kInt32);
  p.shift_mean = c.shift_mean;
  p.unbiased = c.unbiased;
  float mean = kCanary, var = kCanary;
  p.mean = &mean;
  p.var = &var;
  run(p);
  const Outputs out = reference(p, batch);
  EXPECT_EQ(bits(mean), bits(out.mean)) << where << "seed " << c.seed << ": " << mean << " against " << out.mean;
  EXPECT_EQ(bits(var), bits(out.var)) << where << "seed " << c.seed << ": " << var << " against " << out.var;
  for (std::int64_t s = 0; s < num; ++s) {
    const std::size_t at = static_cast<std::size_t>(c.shift + (c.packed ? starts[s] : s * stride));
    std::copy(out.y[s].begin(), out.y[s].end(), want.begin() + static_cast<std::ptrdiff_t>(at));
  }
  for (std::size_t i = 0; i < size; ++i) {
    ASSERT_EQ(bits(want[i]), bits(y[i])) << where << "seed " << c.seed << ", at " << i << ": wanted " << want[i]
                                         << ", got " << y[i];
  }
}

// Lengths: one token; sizes around a chunk; several chunks, and more than a block has teams; empty sequences; many
// short sequences.
const std::vector<std::vector<std::int64_t>> kLengths = {
    {1}, {127, 128, 129}, {0, 3, 0, 1500, 4}, std::vector<std::int64_t>(140, 3), {5, 2100}, {0, 0}};

TEST(MaskedWhiten, EveryOutputHasTheBitsOfTheContract) {
  for_each_backend([](const std::string& where) {
    unsigned seed = 0;
    for (const auto& lengths : kLengths) {
      for (const bool packed : {false, true}) {
        for (int variant = 0; variant < 4; ++variant) {
          Case c{lengths, packed};
          c.seed = ++seed;
          c.shift_mean = variant != 1;
          c.unbiased = variant != 2;
          c.has_mask = seed % 3 != 0;
          c.shift = seed % 5;
          c.pad = seed % 4;
          c.share = seed % 6 == 1 ? 0.0 : 0.8;
          c.constant = variant == 3 ? 0.1f : 0.0f;
          c.nan = seed % 7 == 2;
          expect_contract(c, where);
        }
      }
    }
  });
}

TEST(MaskedWhiten, EverySizeOfValuesHasTheBitsOfTheContract) {
  for_each_backend([](const std::string& where) {
    unsigned seed = 100;
    for (const float size : {0x1p-146f, 0x1p-126f, 1e-30f, 1e-20f, 1e10f, 1e20f, 1e30f, 0x1p+120f, 0x1p+126f}) {
      for (const bool shift_mean : {true, false}) {
        Case c{{5, 0, 700, 129}, seed % 2 == 0};
        c.seed = ++seed;
        c.size = size;
        c.shift_mean = shift_mean;
        expect_contract(c, where);
      }
    }
  });
}

TEST(MaskedWhiten, AnEmptyBatchHasMeanAndVarianceZero) {
  MaskedWhitenParams p;
  float mean = 1.0f, var = 1.0f;
  p.mean = &mean;
  p.var = &var;
  run(p);
  EXPECT_EQ(bits(mean), 0u);
  EXPECT_EQ(bits(var), 0u);
}

}  // namespace
}  // namespace masked_whiten_test
