// Tests attention, forward and backward, bit for bit against a second implementation, written from the contract. The
// backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention_checks.h"
#include "kernels/attention/span.h"
#include "rlk/ops/attention.h"

namespace attention_test {
namespace {

class Attention : public linear_test::Linear {};

// Every width at which a vector of lanes, a vec8 or a tile of columns may end.
TEST_F(Attention, EveryWidthHasTheBitsOfTheContract) {
  unsigned seed = 0;
  for (const std::int64_t head_dim : {8, 16, 24, 40, 64, 72, 96, 120, 128, 136, 192, 248, 256}) {
    Case c{{{5, 9}, {3, 3}}};
    c.head_dim = head_dim;
    c.dtype = kFloatTypes[seed % 3];
    c.exp = kExps[seed % std::size(kExps)];
    c.shift = kWholeElements ? 0 : seed % 3;
    c.seed = ++seed;
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

// Values narrower than keys, in both block widths and in every form. DeepSeek uses the last pair of widths.
TEST_F(Attention, ValuesMayBeNarrower) {
  unsigned seed = 700;
  for (const auto& [head_dim, value_dim] : {std::pair{16, 8}, {72, 64}, {128, 40}, {256, 8}, {192, 128}}) {
    for (const Form form : {Form::kPacked, Form::kPadded, Form::kLeftPadded, Form::kPaged}) {
      Case c{{{5, 9}, {20, 150}, {2, head_dim == 16 ? 1100 : 70}}};
      c.head_dim = head_dim;
      c.value_dim = value_dim;
      c.q_form = form == Form::kPadded ? Form::kPadded : Form::kPacked;
      c.k_form = form;
      c.layout = form == Form::kPadded ? Layout::kHeadsFirst : Layout::kTokens;
      c.q_heads = 4;
      c.kv_heads = 2;
      c.sinks = seed % 2 == 0;
      c.softcap = seed % 3 == 0 ? 3.0f : 0.0f;
      c.data = seed % 5 == 0 ? Data::kSpecial : Data::kNormal;
      c.dtype = kFloatTypes[seed % 3];
      c.exp = kExps[seed / 2 % std::size(kExps)];
      c.shift = kWholeElements ? 0 : seed % 3;
      c.seed = ++seed;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
  Case tree{{{70, 70}, {30, 30}, {9, 9}, {5, 5}}};
  tree.parents = {-1, 0, 0, 1};
  tree.head_dim = 24;
  tree.value_dim = 16;
  ASSERT_NO_FATAL_FAILURE(check(tree));
}

// A block has 128 keys, and a tile has 64 rows. Lengths lie around both numbers. Other cases are decode, a chunk, more
// queries than keys, no query and no key.
TEST_F(Attention, LengthsAroundBlocksAndTiles) {
  unsigned seed = 20;
  for (const auto& lengths :
       std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>{{{1, 1}},
                                                                       {{1, 127}, {1, 128}, {1, 129}},
                                                                       {{17, 130}},
                                                                       {{130, 130}},
                                                                       {{9, 4}, {0, 3}, {3, 0}},
                                                                       {{64, 257}}}) {
    for (const DType dtype : kFloatTypes) {
      for (const bool causal : {true, false}) {
        ++seed;
        if (kInTurn && causal == ((seed - 1) / 2 % 2 == 0)) continue;
        Case c{lengths};
        c.dtype = dtype;
        c.causal = causal;
        c.exp = kExps[seed % std::size(kExps)];
        c.dlse = seed % 3 != 0;
        c.seed = seed;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Attention, EveryFormOfQueriesWithEveryFormOfKeysInEveryLayout) {
  unsigned seed = 50;
  for (const Form q_form : {Form::kPadded, Form::kLeftPadded, Form::kPacked}) {
    for (const Form k_form : {Form::kPadded, Form::kLeftPadded, Form::kPacked, Form::kPaged}) {
      for (const Layout layout : {Layout::kTokens, Layout::kHeadsFirst, Layout::kSlice}) {
        ++seed;
        // With kInTurn, each pair of forms runs in only one of the three layouts.
        if (kInTurn && (int(q_form) + int(k_form) + int(layout)) % 3 != 0) continue;
        Case c{{{4, 7}, {2, 30}, {6, 6}}};
        // With left padding all sequences need the same number of queries; some queries stand before the first key.
        if (q_form == Form::kLeftPadded) c.lengths = {{6, 4}, {6, 30}, {6, 6}};
        c.q_form = q_form;
        c.k_form = k_form;
        c.layout = layout;
        c.dtype = kFloatTypes[seed % 3];
        c.kv_heads = 2;
        c.q_heads = 6;
        c.page_size = seed % 2 == 0 ? 3 : 16;
        c.shift = kWholeElements ? 0 : seed % 2;
        c.seed = seed;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

// Some prefixes are empty. Others end inside a page, at a page's end, or after a sequence's last key. One sequence has
// no group. A
// window ends inside a prefix, and there are several splits.
TEST_F(Attention, SharedPrefixes) {
  unsigned seed = 80;
  for (const std::int64_t page_size : {1, 3, 16, 200}) {
    for (const Form form : {Form::kPadded, Form::kPacked}) {
      Case c{{{2, 40}, {3, 29}, {1, 32}, {4, 33}, {2, 7}, {5, 12}}};
      if (page_size == 200) c.lengths[0].second = 1100;
      c.groups = {{2, page_size == 200 ? 1030 : 21}, {0, 3}, {2, 32}, {1, 0}};
      if (page_size == 200) c.lengths[1].second = 1029;  // fewer keys than its group shares
      c.k_form = Form::kPaged;
      c.q_form = form;
      c.page_size = page_size;
      c.window = page_size == 3 ? 15 : 0;
      c.causal = page_size != 16 || form == Form::kPacked;
      c.layout = page_size == 1 ? Layout::kHeadsFirst : Layout::kTokens;
      c.kv_heads = 2;
      c.q_heads = 4;
      c.dtype = kFloatTypes[seed % 3];
      c.exp = kExps[seed % std::size(kExps)];
      c.seed = ++seed;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

// Trees have several roots and segments of every kind: empty, of one token, longer than a block, with branch points
// inside blocks. One path is longer than a split.
TEST_F(Attention, Trees) {
  unsigned seed = 70;
  for (const std::int64_t head_dim : {24, 72, 192}) {
    for (const bool deep : {false, true}) {
      Case c{{{70, 70}, {1, 1}, {0, 0}, {61, 61}, {9, 9}, {3, 3}, {20, 20}, {17, 17}}};
      c.parents = {-1, 0, 0, 0, 2, -1, 3, 5};
      if (deep) {
        c.lengths = {{1000, 1000}, {3, 3}, {40, 40}, {2, 2}};
        c.parents = {-1, 0, 0, 2};
      }
      c.head_dim = head_dim;
      c.q_heads = deep ? 1 : 4;
      c.kv_heads = deep ? 1 : 2;
      c.layout = head_dim == 72 ? Layout::kHeadsFirst : Layout::kTokens;
      c.window = seed % 3 == 0 ? (deep ? 1020 : 50) : 0;
      c.softcap = seed % 3 == 1 ? 3.0f : 0.0f;
      c.sinks = seed % 2 == 0;
      c.dtype = kFloatTypes[seed % 3];
      c.exp = kExps[seed % std::size(kExps)];
      c.shift = kWholeElements ? 0 : seed % 2;
      c.seed = ++seed;
      if (deep && head_dim != 24) continue;  // skipped since the reference is slow
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

// Chains of many short or empty segments, which branch at many depths, and several roots.
TEST_F(Attention, DeepTrees) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    Case c{{}};
    for (std::int32_t s = 0; s < (kInTurn ? 60 : 150); ++s) {
      const std::int64_t tokens = s % 11 == 3 ? 0 : s % 17 == 5 ? 2 : 1;
      c.lengths.push_back({tokens, tokens});
      c.parents.push_back(s % 50 == 0 ? -1 : s % 7 == 6 ? s - 5 : s % 23 == 22 ? s / 2 : s - 1);
    }
    c.dtype = dtype;
    c.window = dtype == DType::kFloat32 ? 33 : 0;
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

// On a GPU an invalid parent is one key that is NaN: rows below it fail, and all others keep their bits.
TEST_F(Attention, ParentsThatAreNone) {
  for (const std::int32_t parent : {2, 1, 1000, -2, 2147483647, -2147483647}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      const std::int64_t below = parent == 1 ? 130 : 12;  // the rows that fail: more than a block of keys once
      Case c{{{20, 20}, {9, 9}, {below, below}, {4, 4}}};
      c.parents = {-1, parent, 1, 0};
      c.dtype = dtype;
      Problem problem(c);
      if (!kBadListsThrow) {
        ASSERT_NO_FATAL_FAILURE(check_forward(problem));
        ASSERT_NO_FATAL_FAILURE(check_backward(problem));
        continue;
      }
      AttentionParams p{problem.input};
      Output out(problem.q_places() * c.head_dim, c.dtype);
      p.out = out.data();
      EXPECT_THROW(run(p), rlk::InvalidArgument);
    }
  }
}

TEST_F(Attention, Windows) {
  unsigned seed = 90;
  for (const std::int64_t window : {1, 2, 31, 128, 200, 1000}) {
    Case c{{{150, 290}, {3, 2}}};
    c.window = window;
    c.dtype = kFloatTypes[seed % 3];
    c.seed = ++seed;
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

// Softcaps bind, hardly bind, or leave one power of two. The cases have a window, several blocks of either width,
// splits, and values that are not finite. A product of -Inf has the score -softcap.
TEST_F(Attention, Softcaps) {
  unsigned seed = 110;
  for (const float softcap : {0.5f, 20.0f, 50.0f}) {
    for (const Data data : {Data::kNormal, Data::kSpecial}) {
      Case c{{{3, 3}, {20, 150}, {2, softcap == 50.0f ? 1100 : 70}}};
      c.softcap = softcap;
      c.head_dim = softcap == 20.0f ? 192 : 24;
      c.data = data;
      c.spread = 6.0f;
      c.window = seed % 3 == 0 ? 90 : 0;
      c.dtype = kFloatTypes[seed % 3];
      c.exp = kExps[seed / 2 % std::size(kExps)];
      c.q_form = c.k_form = seed % 2 == 0 ? Form::kPadded : Form::kPacked;
      c.seed = ++seed;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

// Sinks have every size; some contribute nothing, and some make the rows of their heads NaN. Some rows have only
// products of -Inf. The cases have more rows than a group of 64, and several splits.
TEST_F(Attention, Sinks) {
  unsigned seed = 130;
  for (const Data data : {Data::kNormal, Data::kSpecial, Data::kWide}) {
    for (const Exp exp : kExps) {
      for (const Form form : {Form::kPadded, Form::kPacked}) {
        Case c{{{3, 3}, {70, 80}, {2, form == Form::kPacked ? 1100 : 40}, {4, 2}}};
        c.sinks = true;
        c.softcap = form == Form::kPacked && data != Data::kWide ? 3.0f : 0.0f;
        c.q_heads = 4;
        c.kv_heads = 2;
        c.data = data;
        c.dtype = kFloatTypes[seed % 3];
        c.exp = exp;
        c.q_form = c.k_form = form;
        c.seed = ++seed;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

// More than a block of 8192 rows; no other gradient is wanted.
TEST_F(Attention, SinksOfManyRows) {
  Case c{{{8200, 3}, {90, 2}}};
  c.sinks = true;
  c.causal = false;
  c.q_heads = 1;
  c.dtype = DType::kFloat32;
  Problem problem(c);
  AttentionBackwardParams p{problem.input};
  p.dout = problem.like_out();
  p.out = problem.like_out();
  std::vector<float> lse(static_cast<std::size_t>(problem.q_places()));
  for (std::size_t i = 0; i < lse.size(); ++i) lse[i] = static_cast<float>(i % 7) / 4;
  p.lse = lse.data();
  const Patterns want = reference(p).dsinks;
  Output dsinks(1, DType::kFloat32);
  p.dsinks = static_cast<float*>(dsinks.data());
  run(p);
  ASSERT_NO_FATAL_FAILURE(dsinks.expect(want, c.text()));
}

TEST_F(Attention, GroupsOfHeads) {
  unsigned seed = 100;
  for (const auto& [q_heads, kv_heads] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {3, 3}, {7, 1}, {14, 2}, {70, 1}, {0, 2}}) {
    Case c{{{5, 20}, {11, 11}}};
    c.q_heads = q_heads;
    c.kv_heads = kv_heads;
    c.seed = ++seed;
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

// Scores are in the hundreds. The reference rises by many powers of two between blocks, and sums fall below 2^-126.
// Portable's lower clamp takes effect, and probabilities underflow.
TEST_F(Attention, ReferencesThatRiseAndSumsThatVanish) {
  unsigned seed = 120;
  for (const DType dtype : kFloatTypes) {
    for (const Exp exp : kExps) {
      for (const float spread : {8.0f, 60.0f, 900.0f}) {
        Case c{{{5, 700}}};
        c.dtype = dtype;
        c.exp = exp;
        c.spread = spread;
        c.scale = 1.0f;
        c.head_dim = 16;
        c.seed = ++seed;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Attention, EveryExponentInfinitiesAndNans) {
  unsigned seed = 150;
  for (const DType dtype : kFloatTypes) {
    for (const Data data : {Data::kWide, Data::kTiny, Data::kSparse, Data::kEqual, Data::kSpecial}) {
      for (const Exp exp : kExps) {
        Case c{{{9, 140}, {4, 4}}};
        c.dtype = dtype;
        c.data = data;
        c.exp = exp;
        c.seed = ++seed;
        if (seed % 2 == 0) c.q_form = c.k_form = Form::kPadded;  // unused rows lie next to such values
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

// Lengths of a split, of one key more, and of more than three splits; a window begins inside the second split.
TEST_F(Attention, SplitsMerge) {
  unsigned seed = 200;
  constexpr std::int64_t kSplit = 1024;  // size of the first splits
  for (const auto& [keys, window] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {kSplit, 0}, {kSplit + 1, 0}, {3 * kSplit + 700, 0}, {2 * kSplit + 900, kSplit - 300}, {10300, 0}}) {
    for (const float spread : {1.0f, 100.0f}) {
      ++seed;
      if (kInTurn && (spread == 1.0f) == ((seed - 1) / 2 % 2 == 0)) continue;
      Case c{{{2, keys}}};
      c.window = window;
      c.dtype = kFloatTypes[seed % 3];
      c.exp = kExps[seed % std::size(kExps)];
      c.spread = spread;
      c.seed = seed;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

// Splits end where the contract says, for blocks of either width.
TEST_F(Attention, SplitsAreCountedFromKeyZero) {
  constexpr std::int64_t kSplit = 1024;  // size of the first splits
  EXPECT_TRUE(rlk::attention_split_begins(0));
  for (const std::int64_t key : {std::int64_t{0}, kSplit - 1, kSplit, 5 * kSplit + 7}) {
    EXPECT_EQ(rlk::attention_split_end(key), (key / kSplit + 1) * kSplit);
  }
  // The splits grow at keys 8192 and 65536. Numbers and ends of splits agree.
  std::int64_t number = 0;
  for (std::int64_t begin = 0; begin < 131072; ++number) {
    const auto keys = static_cast<std::int64_t>(keys_of_split(Order{}, static_cast<std::size_t>(begin)));
    ASSERT_EQ(rlk::attention_split_begin(number), begin);
    for (const std::int64_t key : {begin, begin + 1, begin + keys - 1}) {
      ASSERT_EQ(rlk::attention_split_end(key), begin + keys) << key;
      ASSERT_EQ(rlk::attention_splits(key + 1), number + 1) << key;
    }
    begin += keys;
  }
  for (const std::int64_t key : {std::int64_t{1}, kSplit - 1, kSplit + 1}) {
    EXPECT_FALSE(rlk::attention_split_begins(key));
  }
  EXPECT_TRUE(rlk::attention_split_begins(3 * kSplit));
  for (const std::int64_t head_dim : {8, 128, 136, 256}) {
    EXPECT_EQ(rlk::attention_block(head_dim), head_dim > 128 ? Order{}.block_of_wide : Order{}.block);
    EXPECT_EQ(kSplit % rlk::attention_block(head_dim), 0);
  }
}

// Shapes for which every part of the order decides bits: more keys than a split, a window that begins inside a split,
// chunks, grouped heads.
std::vector<Case> cases_of_the_order() {
  constexpr std::int64_t kSplit = 1024;  // size of the first splits
  std::vector<Case> cases;
  unsigned seed = 300;
  for (const std::int64_t head_dim : kOrderWidths) {
    Case c{{{12, kSplit + 333}, {21, 150}}};
    c.head_dim = head_dim;
    c.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    c.seed = ++seed;
    c.dtype = kFloatTypes[seed % 3];
    cases.push_back(c);
    c.window = 400;
    c.seed = ++seed;
    cases.push_back(c);
  }
  return cases;
}
TEST_F(Attention, TheOrderHasTheBitsOfTheContract) {
  for (const Case& c : cases_of_the_order()) ASSERT_NO_FATAL_FAILURE(check(c));
}

// For these shapes the reference has other bits in every other order, so a backend with another order fails above.
TEST_F(Attention, AnotherOrderHasOtherBits) {
  for (Case c : cases_of_the_order()) {
    if (c.window != 0) continue;
    c.dtype = DType::kFloat32;
    Problem problem(c);
    AttentionParams forward{problem.input};
    const ForwardPatterns want = reference(forward);
    const auto differs = [&](const Patterns& other, const Patterns& ours, const char* what) {
      EXPECT_TRUE(other != ours) << what << ": " << c.text();
    };
    Order split, block, groups, reciprocal, descending, chained, heads;
    split.split = 1536;
    std::swap(block.block, block.block_of_wide);
    groups.grouped = false;
    reciprocal.reciprocal = false;
    descending.descending = false;
    chained.chained = true;
    heads.heads_outside = false;
    differs(reference(forward, split).out, want.out, "splits");
    differs(reference(forward, block).out, want.out, "blocks");
    differs(reference(forward, groups).lse, want.lse, "groups of l");
    differs(reference(forward, reciprocal).out, want.out, "1 / l");

    AttentionBackwardParams p{problem.input};
    p.dout = problem.like_out();
    std::vector<float> out, lse;
    for (const std::uint32_t x : want.out) out.push_back(value_of(x, DType::kFloat32));
    for (const std::uint32_t x : want.lse) lse.push_back(value_of(x, DType::kFloat32));
    p.out = {out.data(), 0, c.q_heads * c.head_dim, c.head_dim};
    p.lse = lse.data();
    const BackwardPatterns gradients = reference(p);
    differs(reference(p, block).dq, gradients.dq, "blocks of dq");
    differs(reference(p, descending).dq, gradients.dq, "descending blocks of dq");
    differs(reference(p, chained).dq, gradients.dq, "chains of dq");
    const BackwardPatterns other = reference(p, heads);
    differs(other.dk, gradients.dk, "heads of dk");
    differs(other.dv, gradients.dv, "heads of dv");
  }
}

// Values are near 2^-126. When the reference rises, their sums become subnormal, within a split and in a merge.
TEST_F(Attention, SumsThatBecomeSubnormalStay) {
  Case c{{{4, 300}, {2, 1024 + 200}}};
  c.dtype = DType::kFloat32;
  c.scale = 1.0f;
  c.spread = 3.0f;
  c.seed = 400;
  Problem problem(c);
  std::vector<float> values;
  for (std::int64_t i = 0; i < problem.k_places() * c.head_dim; ++i)
    values.push_back(std::ldexp(static_cast<float>(i * 37 % 101 - 50), -129));
  problem.input.v.data = values.data();
  ASSERT_NO_FATAL_FAILURE(check_forward(problem));
  const AttentionParams p{problem.input};
  Order flushed;
  flushed.flushed = true;
  EXPECT_TRUE(reference(p, flushed).out != reference(p).out);
}

// A row whose scores all lie at or below -2^21 has no reference; neither has a row with a score at 2^21.
TEST_F(Attention, ScoresOutOfRangeAreNan) {
  for (const float spread : {1e5f, 3e6f, 1e8f}) {
    Case c{{{3, 3}, {1, 1}, {1, 1}}};
    c.dtype = DType::kFloat32;
    c.spread = spread;
    c.scale = 1.0f;
    c.seed = static_cast<unsigned>(spread);
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

TEST_F(Attention, NothingToDo) {
  for (const Form form : {Form::kPadded, Form::kPacked}) {
    Case none{{}}, empty{{{0, 0}, {0, 5}, {5, 0}}};
    none.q_form = empty.q_form = none.k_form = empty.k_form = form;
    ASSERT_NO_FATAL_FAILURE(check(none));
    ASSERT_NO_FATAL_FAILURE(check(empty));
  }
}

// Lists contradict the arrays. The CPU throws and writes nothing. A GPU reads nothing out of range, and the other
// sequences keep their bits.
TEST_F(Attention, ListsThatContradictTheArrays) {
  const auto try_forward = [&](Problem& problem, const std::string& what) {
    AttentionParams p{problem.input};
    Output out(problem.q_places() * problem.what().head_dim, problem.what().dtype);
    p.out = out.data();
    if (kBadListsThrow) {
      EXPECT_THROW(run(p), rlk::InvalidArgument) << what;
    } else {
      run(p);
      ASSERT_NO_FATAL_FAILURE(out.expect({}, what));
    }
  };
  const auto backward = [&](Problem& problem, const std::string& what) {
    AttentionBackwardParams p{problem.input};
    const std::int64_t d = problem.what().head_dim;
    Output dq(problem.q_places() * d, problem.what().dtype), dk(problem.k_places() * d, problem.what().dtype);
    Output dv(problem.k_places() * d, problem.what().dtype);
    std::vector<float> lse(static_cast<std::size_t>(problem.q_places()), 1.0f);
    p.dout = p.out = problem.input.q;
    p.lse = lse.data();
    p.dq = dq.data();
    p.dk = dk.data();
    p.dv = dv.data();
    if (kBadListsThrow) {
      EXPECT_THROW(run(p), rlk::InvalidArgument) << what;
    } else {
      run(p);
      ASSERT_NO_FATAL_FAILURE(dq.expect({}, what));
      ASSERT_NO_FATAL_FAILURE(dk.expect({}, what));
      ASSERT_NO_FATAL_FAILURE(dv.expect({}, what));
    }
  };
  for (const std::vector<std::int32_t>& offsets : std::vector<std::vector<std::int32_t>>{{1, 4, 6},
                                                                                         {0, 4, 9},
                                                                                         {0, 7, 6},
                                                                                         {0, 4, 3},
                                                                                         {-3, 4, 6},
                                                                                         {0, -2000000000, 6},
                                                                                         {0, 2000000000, 6},
                                                                                         {6, 6, 6}}) {
    Case c{{{4, 4}, {2, 2}}};
    Problem q(c), k(c);
    q.input.cu_seqlens_q = offsets.data();
    k.input.cu_seqlens_k = offsets.data();
    for (Problem* problem : {&q, &k}) {
      ASSERT_NO_FATAL_FAILURE(try_forward(*problem, "offsets"));
      ASSERT_NO_FATAL_FAILURE(backward(*problem, "offsets"));
    }
  }
  for (const std::vector<std::int32_t>& offsets : std::vector<std::vector<std::int32_t>>{
           {1, 4, 6}, {0, 4, 5}, {0, 4, 9}, {0, 7, 6}, {0, 4, 3}, {0, -2000000000, 6}, {0, 2000000000, 6}, {6, 6, 6}}) {
    Case c{{{4, 4}, {2, 2}}};
    c.parents = {-1, 0};
    Problem problem(c);
    problem.input.cu_seqlens_q = problem.input.cu_seqlens_k = offsets.data();
    ASSERT_NO_FATAL_FAILURE(try_forward(problem, "segments"));
    ASSERT_NO_FATAL_FAILURE(backward(problem, "segments"));
  }
  for (const std::int32_t count : {-1, 100, 2147483647, -2147483647}) {
    const std::vector<std::int32_t> counts = {count, 2};
    Case c{{{4, 4}, {2, 2}}};
    c.q_form = c.k_form = Form::kPadded;
    for (auto list : {&AttentionInput::seqused_q, &AttentionInput::seqused_k, &AttentionInput::leftpad_k}) {
      Problem problem(c);
      problem.input.*list = counts.data();
      ASSERT_NO_FATAL_FAILURE(try_forward(problem, "counts"));
      ASSERT_NO_FATAL_FAILURE(backward(problem, "counts"));
    }
  }
}

TEST_F(Attention, PagesThatAreNoneAreNanForTheirSequenceAlone) {
  for (const std::int32_t page : {-1, 1000, 2147483647, -2147483647}) {
    Case c{{{3, 30}, {2, 20}}};
    c.k_form = Form::kPaged;
    c.page_size = 8;
    Problem problem(c);
    std::vector<std::int32_t> table;
    for (std::int64_t i = 0; i < 2 * problem.input.table_stride; ++i) table.push_back(problem.input.block_table[i]);
    table[1] = page;
    problem.input.block_table = table.data();
    if (!kBadListsThrow) {
      ASSERT_NO_FATAL_FAILURE(check_forward(problem));
      continue;
    }
    AttentionParams p{problem.input};
    Output out(problem.q_places() * c.head_dim, c.dtype);
    p.out = out.data();
    EXPECT_THROW(run(p), rlk::InvalidArgument);
  }
}

// The same for lists of shared pages. Sequence 2 has no group and keeps its bits.
TEST_F(Attention, SharedPrefixesThatContradictTheArrays) {
  const auto with = [](const std::int32_t* from, std::int64_t count, std::int64_t at, std::int32_t x) {
    std::vector<std::int32_t> list(from, from + count);
    list[static_cast<std::size_t>(at)] = x;
    return list;
  };
  for (const std::int32_t x : {-1, 1000, 2147483647, -2147483647}) {
    for (const int which : {0, 1, 2, 3}) {
      Case c{{{2, 30}, {3, 25}, {2, 20}}};
      c.k_form = Form::kPaged;
      c.page_size = 8;
      c.groups = {{2, 21}};
      Problem problem(c);
      AttentionInput& input = problem.input;
      const std::vector<std::int32_t> list = which == 0   ? with(input.prefix_table, input.prefix_stride, 1, x)
                                             : which == 1 ? with(input.prefix_lens, 1, 0, x)
                                             : which == 2 ? with(input.group_offsets, 2, 1, x)
                                                          : with(input.group_offsets, 2, 0, x);
      (which == 0 ? input.prefix_table : which == 1 ? input.prefix_lens : input.group_offsets) = list.data();
      if (!kBadListsThrow && which == 0) {
        ASSERT_NO_FATAL_FAILURE(check_forward(problem));
        continue;
      }
      AttentionParams p{input};
      Output out(problem.q_places() * c.head_dim, c.dtype);
      p.out = out.data();
      if (kBadListsThrow) {
        EXPECT_THROW(run(p), rlk::InvalidArgument) << which << ": " << x;
        continue;
      }
      run(p);
      ASSERT_NO_FATAL_FAILURE(out.expect({}, "lists of a shared prefix"));
    }
  }
}

TEST_F(Attention, WhatWouldCorruptMemoryIsRefused) {
  const Problem right(Case{{{2, 2}}});
  Output out(right.q_places() * 8, DType::kBFloat16);
  const auto refuses = [&](const auto& spoil) {
    AttentionParams p{right.input};
    p.out = out.data();
    spoil(p);
    EXPECT_THROW(run(p), rlk::InvalidArgument);
  };
  refuses([](AttentionParams& p) { p.head_dim = 12; });
  refuses([](AttentionParams& p) { p.head_dim = 264; });
  refuses([](AttentionParams& p) { p.head_dim = 0; });
  for (const std::int64_t value_dim : {0, 4, 16}) {
    refuses([&](AttentionParams& p) { p.value_dim = value_dim; });
  }
  refuses([](AttentionParams& p) { p.num_q_heads = 3, p.num_kv_heads = 2; });
  refuses([](AttentionParams& p) { p.num_kv_heads = 0; });
  refuses([](AttentionParams& p) { p.dtype = DType::kInt32; });
  refuses([](AttentionParams& p) { p.softmax_scale = 0.0f; });
  refuses([](AttentionParams& p) { p.softmax_scale = std::nanf(""); });
  refuses([](AttentionParams& p) { p.softmax_scale = 5e-39f; });
  refuses([](AttentionParams& p) { p.softmax_scale = 3e38f; });
  for (const float softcap : {-1.0f, std::nanf(""), INFINITY, 3e38f, 1e-40f}) {
    refuses([&](AttentionParams& p) { p.softcap = softcap; });
  }
  refuses([](AttentionParams& p) { p.window_size = -1; });
  refuses([](AttentionParams& p) { p.window_size = 4, p.causal = false; });
  refuses([](AttentionParams& p) { p.q_tokens = -1; });
  refuses([](AttentionParams& p) { p.out = nullptr; });
  refuses([](AttentionParams& p) { p.k.data = nullptr; });
  refuses([](AttentionParams& p) { p.block_table = p.cu_seqlens_k; });
  refuses([](AttentionParams& p) { p.leftpad_k = p.cu_seqlens_k; });
  refuses([](AttentionParams& p) { p.prefix_table = p.prefix_lens = p.group_offsets = p.cu_seqlens_k; });
  refuses([](AttentionParams& p) { p.max_prefix_pages = 1; });
#if RLK_TEST_HIP
  refuses([](AttentionParams& p) { p.exp = Exp::kHardware; });
#endif
}

}  // namespace
}  // namespace attention_test
