// Tests rope and its transpose bit for bit against a second implementation, written from the contract. The backend is
// the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/rope.h"
#include "rope_reference.h"

namespace rope_test {
namespace {

using linear_test::Data;
using linear_test::for_each_backend;
using linear_test::kWholeElements;
using linear_test::name;
using linear_test::random_pattern;
using rlk::RopeAngles;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

#if RLK_TEST_HIP
constexpr bool kBadIdsThrow = false;
void run(const RopeParams& p) { rlk::hip::rope(p, 0, 0); }
#else
constexpr bool kBadIdsThrow = true;
void run(const RopeParams& p) { rlk::cpu::rope(p); }
#endif

// Elements at any place in memory that otherwise holds a canary, `shift` bytes off any alignment.
class Array {
 public:
  Array() = default;
  Array(std::int64_t elements, DType dtype, std::size_t shift = 0) : dtype_(dtype), begin_(kGuard + shift) {
    memory_.assign(begin_ + static_cast<std::size_t>(elements * rlk::size_of(dtype)) + kGuard, kCanary);
  }
  Array& fill(unsigned seed, Data data) {
    std::mt19937 random(seed);
    for (std::size_t i = begin_; i + kGuard < memory_.size(); i += static_cast<std::size_t>(rlk::size_of(dtype_))) {
      const std::uint32_t pattern = random_pattern(random, dtype_, data);
      std::memcpy(&memory_[i], &pattern, static_cast<std::size_t>(rlk::size_of(dtype_)));
    }
    return *this;
  }
  void set(const Written& written) {
    for (const auto& [at, pattern] : written) {
      std::memcpy(data() + at * rlk::size_of(dtype_), &pattern, static_cast<std::size_t>(rlk::size_of(dtype_)));
    }
  }
  unsigned char* data() { return memory_.data() + begin_; }

  // Expects the written elements to equal `want`, and every other byte to equal `before`.
  void expect(const Written& want, Array before, const std::string& where) {
    for (const auto& [at, pattern] : want) {
      const std::uint32_t got = load_pattern(data(), dtype_, at);
      const bool nans =
          !linear_test::kCanonicalNan && std::isnan(value_of(got, dtype_)) && std::isnan(value_of(pattern, dtype_));
      ASSERT_TRUE(got == pattern || nans)
          << where << ", element " << at << std::hex << ": wanted " << pattern << ", got " << got;
      before.set({{at, got}});
    }
    ASSERT_EQ(before.memory_, memory_) << where << ": written outside of the output";
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kCanary = 0x5a;
  DType dtype_ = DType::kFloat32;
  std::size_t begin_ = 0;
  std::vector<unsigned char> memory_;
};

enum class Layout { kTokens, kHeadsFirst, kSlice };  // [T, H, D]; [B, H, S, D]; heads of a fused projection

struct Case {
  std::int64_t tokens, q_heads, k_heads, head_dim, rotary_dim;
  DType dtype = DType::kBFloat16, angle_dtype = DType::kFloat32, id_dtype = DType::kInt64;
  bool interleaved = false, round_products = false, transposed = false;
  bool per_pair = true;                // width is rotary_dim / 2
  bool ids = true;                     // tables and position_ids
  std::int64_t pairs[3] = {-1, 0, 0};  // sections, or none
  Layout layout = Layout::kTokens;
  std::int64_t inner = 1;  // tokens of an inner step
  std::int64_t pad = 0;    // elements between heads of the output, and between rows of angles
  std::size_t shift = 0;
  Data data = Data::kNormal;
  unsigned seed = 1;
  bool bad_ids = false;

  std::string text() const {
    return std::string(name(dtype)) + " [" + std::to_string(tokens) + ", " + std::to_string(q_heads) + "+" +
           std::to_string(k_heads) + ", " + std::to_string(head_dim) + "] rotary " + std::to_string(rotary_dim) +
           (interleaved ? " interleaved" : "") + (round_products ? " round_products" : "") +
           (transposed ? " transposed" : "") + (per_pair ? " per pair" : "") + (ids ? " ids" : "") +
           (pairs[0] < 0 ? "" : " sections") + " " + name(data) + ", seed " + std::to_string(seed);
  }
};

// The arrays of a call and its params.
struct Call {
  explicit Call(const Case& c) {
    p.num_tokens = c.tokens;
    p.inner_tokens = c.inner;
    p.head_dim = c.head_dim;
    p.rotary_dim = c.rotary_dim;
    p.width = c.per_pair ? c.rotary_dim / 2 : c.rotary_dim;
    p.dtype = c.dtype;
    p.angle_dtype = c.angle_dtype;
    p.id_dtype = c.id_dtype;
    p.interleaved = c.interleaved;
    p.round_products = c.round_products;
    p.transposed = c.transposed;
    if (c.pairs[0] >= 0) {
      p.num_sections = 3;
      for (int i = 0; i < 3; ++i) p.section_pairs[i] = static_cast<std::int32_t>(c.pairs[i]);
    }
    lay_out(c, c.q_heads, &p.q, &q_in, &q_out);
    lay_out(c, c.k_heads, &p.k, &k_in, &k_out);
    q_in.fill(c.seed * 10 + 1, c.data);
    k_in.fill(c.seed * 10 + 2, c.data);
    const std::int64_t row = p.width + c.pad, rows = c.ids ? kPositions : p.num_sections * c.tokens;
    const std::int64_t cos_size = rows * row, sin_size = rows * (row + c.pad);
    cos = Array(cos_size, c.angle_dtype, c.shift);
    sin = Array(sin_size, c.angle_dtype, c.shift);
    p.cos.data = cos.fill(c.seed * 10 + 3, c.data).data();
    p.sin.data = sin.fill(c.seed * 10 + 4, c.data).data();
    p.cos.tokens = {row * c.inner, row};
    p.sin.tokens = {(row + c.pad) * c.inner, row + c.pad};
    p.cos.section_stride = row * c.tokens;
    p.sin.section_stride = (row + c.pad) * c.tokens;
    if (!c.ids) return;
    p.max_position = kPositions;
    // Sections are neighbours: the ids of a token follow one another.
    p.id_tokens = {p.num_sections * c.inner, p.num_sections};
    p.id_section_stride = 1;
    std::mt19937 random(c.seed);
    constexpr std::int64_t kBad[] = {-1, kPositions, std::int64_t{1} << 31, -(std::int64_t{1} << 31), 1000};
    for (std::int64_t i = 0; i < p.num_sections * c.tokens; ++i) {
      std::int64_t id = random() % kPositions;
      if (c.bad_ids && random() % 4 == 0) id = kBad[random() % 5];
      wide_ids.push_back(id);
      narrow_ids.push_back(static_cast<std::int32_t>(id));
    }
    wide_ids.resize(wide_ids.size() + 1);
    narrow_ids.resize(narrow_ids.size() + 1);
    p.position_ids = c.id_dtype == DType::kInt64 ? static_cast<const void*>(wide_ids.data()) : narrow_ids.data();
  }

  static void lay_out(const Case& c, std::int64_t heads, rlk::RopeHeads* params, Array* in, Array* out) {
    const std::int64_t d = c.head_dim, e = d + c.pad, outer = (c.tokens + c.inner - 1) / c.inner;
    params->num_heads = heads;
    std::int64_t in_size = c.tokens * heads * d;
    if (c.layout == Layout::kHeadsFirst) {
      params->x_tokens = {heads * c.inner * d, d};
      params->x_head_stride = c.inner * d;
      in_size = outer * heads * c.inner * d;
    } else {
      const std::int64_t step = (c.layout == Layout::kSlice ? heads + 3 : heads) * d;
      params->x_tokens = {step * c.inner, step};
      params->x_head_stride = d;
      in_size = c.tokens * step;
    }
    params->y_tokens = {heads * e * c.inner, heads * e};
    params->y_head_stride = e;
    *in = Array(in_size, c.dtype, c.shift);
    *out = Array(c.tokens * heads * e, c.dtype, c.shift);
    params->x = in->data();
  }

  RopeParams p;
  Array q_in, k_in, q_out, k_out, cos, sin;
  std::vector<std::int64_t> wide_ids;
  std::vector<std::int32_t> narrow_ids;
  static constexpr std::int64_t kPositions = 50;
};

void check(const Case& c) {
  Call call(c);
  const Written q = reference(call.p, call.p.q), k = reference(call.p, call.p.k);
  for_each_backend([&](const std::string& backend) {
    Array q_out = call.q_out, k_out = call.k_out;
    RopeParams p = call.p;
    p.q.y = q_out.data();
    p.k.y = k_out.data();
    run(p);
    ASSERT_NO_FATAL_FAILURE(q_out.expect(q, call.q_out, c.text() + ", q, " + backend));
    ASSERT_NO_FATAL_FAILURE(k_out.expect(k, call.k_out, c.text() + ", k, " + backend));
  });
}

class Rope : public linear_test::Linear {};

// head_dim, rotary_dim. One pair; odd tails; every short vector of lanes. Heads of models: 64, 96, 128 (half rotated:
// GLM), 192, 256 (a quarter rotated: Qwen3-Next). Widths that no vector of a GPU fits.
constexpr std::int64_t kDims[][2] = {{2, 2},    {3, 2},    {8, 8},     {10, 6},   {16, 16},   {18, 18},   {24, 16},
                                     {34, 30},  {48, 32},  {64, 64},   {80, 80},  {96, 96},   {128, 128}, {128, 64},
                                     {129, 64}, {192, 64}, {256, 256}, {256, 64}, {136, 128}, {66, 62}};

TEST_F(Rope, EveryWidthHasTheBitsOfTheContract) {
  unsigned seed = 0;
  for (const DType dtype : kDtypes) {
    for (const auto& [head_dim, rotary_dim] : kDims) {
      for (const bool interleaved : {false, true}) {
        Case c{3, 2, 1, head_dim, rotary_dim};
        ++seed;
        c.dtype = dtype;
        c.angle_dtype = seed % 3 == 0 ? dtype : DType::kFloat32;
        c.interleaved = interleaved;
        c.round_products = seed / 2 % 2 == 0;
        c.transposed = seed / 4 % 2 == 0;
        c.per_pair = seed / 3 % 2 == 0;
        c.ids = seed % 5 != 0;
        c.id_dtype = seed % 7 < 3 ? DType::kInt32 : DType::kInt64;
        c.pad = seed % 4 == 0 ? 8 : seed % 4 == 1 ? 3 : 0;
        c.shift = kWholeElements ? 0 : seed % 3;
        c.seed = seed;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Rope, EveryOptionTogetherWithEveryOther) {
  for (const DType dtype : kDtypes) {
    for (int options = 0; options < 128; ++options) {
      Case c{5, 3, 2, 40, 32};
      c.dtype = dtype;
      c.interleaved = options & 1;
      c.round_products = options & 2;
      c.transposed = options & 4;
      c.per_pair = options & 8;
      c.ids = options & 16;
      c.angle_dtype = options & 32 ? dtype : DType::kFloat32;
      if (options & 64) {
        const std::int64_t even[] = {8, 4, 4}, odd[] = {5, 0, 11};
        std::copy_n(options & 1 ? even : odd, 3, c.pairs);
      }
      c.seed = static_cast<unsigned>(options) + 1000;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

TEST_F(Rope, SectionsOfMultimodalModels) {
  for (const auto& pairs : {std::vector<std::int64_t>{16, 24, 24}, {24, 20, 20}, {0, 64, 0}, {63, 1, 0}, {0, 0, 64}}) {
    for (const bool interleaved : {false, true}) {
      for (const bool ids : {false, true}) {
        Case c{7, 4, 2, 128, 128};
        std::copy_n(pairs.begin(), 3, c.pairs);
        c.interleaved = interleaved;
        c.ids = ids;
        c.per_pair = !ids;
        c.seed = static_cast<unsigned>(pairs[0]) + 30;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Rope, EveryExponentEveryKindOfZeroInfinitiesAndNans) {
  for (const DType dtype : kDtypes) {
    for (const Data data : {Data::kWide, Data::kTiny, Data::kSparse, Data::kEqual, Data::kSpecial}) {
      for (int options = 0; options < 8; ++options) {
        Case c{6, 3, 1, 72, 64};
        c.dtype = dtype;
        c.angle_dtype = options & 1 ? dtype : DType::kFloat32;
        c.interleaved = options & 2;
        c.round_products = options & 4;
        c.transposed = options == 3 || options == 6;
        c.per_pair = options < 4;
        c.data = data;
        c.seed = static_cast<unsigned>(options) + 70;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Rope, LayoutsOfEnginesAndModels) {
  for (const Layout layout : {Layout::kTokens, Layout::kHeadsFirst, Layout::kSlice}) {
    for (const std::int64_t inner : {1, 5, 12}) {
      for (const DType dtype : kDtypes) {
        Case c{12, 5, 2, 128, 128};
        if (inner == 5) c.tokens = 15;
        c.inner = inner;
        c.layout = layout;
        c.dtype = dtype;
        c.pad = inner == 5 ? 8 : 0;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Rope, ManyTokensAndHeadsOfModels) {
  // 32 and 8 heads (Llama); 64 and 1 (MLA); k alone; q alone; more tokens than a task has.
  const std::vector<std::array<std::int64_t, 4>> cases = {
      {33, 32, 8, 128}, {40, 64, 1, 64}, {9, 0, 3, 64}, {9, 3, 0, 64}, {300, 7, 1, 96}};
  for (const auto& [tokens, q, k, dim] : cases) {
    Case c{tokens, q, k, dim, dim};
    c.seed = static_cast<unsigned>(tokens);
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

TEST_F(Rope, InPlace) {
  for (const bool interleaved : {false, true}) {
    for (const auto& [head_dim, rotary_dim] : {std::pair{128, 128}, std::pair{40, 18}}) {
      Case c{6, 4, 2, head_dim, rotary_dim};
      c.interleaved = interleaved;
      Call call(c);
      call.p.q.y_tokens = call.p.q.x_tokens;
      call.p.q.y_head_stride = call.p.q.x_head_stride;
      call.p.k.num_heads = 0;
      const Written want = reference(call.p, call.p.q);
      for_each_backend([&](const std::string& backend) {
        Array both = call.q_in;
        RopeParams p = call.p;
        p.q.x = p.q.y = both.data();
        run(p);
        ASSERT_NO_FATAL_FAILURE(both.expect(want, call.q_in, backend));
      });
    }
  }
}

TEST_F(Rope, IdsOutsideOfTheTablesTouchNothingElse) {
  for (const bool sections : {false, true}) {
    for (const std::int64_t dim : {64, 18}) {
      Case c{30, 3, 2, dim + 8, dim};
      c.bad_ids = true;
      if (sections)
        std::copy_n(std::vector<std::int64_t>{dim / 4, dim / 8, dim / 2 - dim / 4 - dim / 8}.begin(), 3, c.pairs);
      if (!kBadIdsThrow) {
        ASSERT_NO_FATAL_FAILURE(check(c));
        continue;
      }
      Call call(c);
      Array out = call.q_out, k_out = call.k_out;
      call.p.q.y = out.data();
      call.p.k.y = k_out.data();
      EXPECT_THROW(run(call.p), rlk::InvalidArgument);
      ASSERT_NO_FATAL_FAILURE(out.expect({}, call.q_out, "q"));
    }
  }
}

TEST_F(Rope, NothingToDo) {
  for (const auto& [tokens, heads, dim] : std::vector<std::array<std::int64_t, 3>>{{0, 3, 8}, {3, 0, 8}, {3, 2, 0}}) {
    Case c{tokens, heads, 0, dim, dim};
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
  Case c{3, 2, 1, 8, 0};  // nothing is rotated, so all columns are copied
  ASSERT_NO_FATAL_FAILURE(check(c));
}

TEST_F(Rope, WhatWouldCorruptMemoryIsRefused) {
  const Call right(Case{2, 2, 1, 16, 16});
  Array q = right.q_out, k = right.k_out;
  const auto refuses = [&](const auto& spoil) {
    RopeParams p = right.p;
    p.q.y = q.data();
    p.k.y = k.data();
    spoil(p);
    EXPECT_THROW(run(p), rlk::InvalidArgument);
  };
  refuses([](RopeParams& p) { p.rotary_dim = p.width = 15; });
  refuses([](RopeParams& p) { p.rotary_dim = p.width = 18; });
  refuses([](RopeParams& p) { p.width = 7; });
  refuses([](RopeParams& p) { p.num_sections = 2; });
  refuses([](RopeParams& p) { p.num_sections = 3; });  // their sum is wrong
  refuses([](RopeParams& p) { p.inner_tokens = 0; });
  refuses([](RopeParams& p) { p.q.y = nullptr; });
  refuses([](RopeParams& p) { p.sin.data = nullptr; });
  refuses([](RopeParams& p) { p.angle_dtype = DType::kFloat16; });
  refuses([](RopeParams& p) { p.id_dtype = DType::kFloat32; });
  refuses([](RopeParams& p) { p.num_tokens = -1; });
}

}  // namespace
}  // namespace rope_test
