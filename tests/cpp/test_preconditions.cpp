// Every function in the table of operators rejects a negative size, and missing arrays of one element, before it reads or
// writes. The test runs on the CPU, and on HIP's host side in the HIP build. An operator that is added to operators.inc
// is tested, too.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "kernels/advantages/gae_check.h"
#include "kernels/advantages/group_advantage_check.h"
#include "kernels/losses/covariance_terms.h"
#include "kernels/losses/kl_check.h"
#include "kernels/losses/value_check.h"
#include "kernels/packing/pack_check.h"
#include "kernels/rows/linear_check.h"
#include "kernels/sample/check.h"
#include "rlk/backends.h"
#include "rlk/ops/attention.h"
#include "rlk/ops/covariance_mask.h"
#include "rlk/ops/embedding.h"
#include "rlk/ops/gae.h"
#include "rlk/ops/group_advantage.h"
#include "rlk/ops/importance_weights.h"
#include "rlk/ops/kl.h"
#include "rlk/ops/kv_cache_append.h"
#include "rlk/ops/linear.h"
#include "rlk/ops/linear_logprob.h"
#include "rlk/ops/logprob.h"
#include "rlk/ops/masked_whiten.h"
#include "rlk/ops/mismatch_metrics.h"
#include "rlk/ops/optimal_token_baseline.h"
#include "rlk/ops/pack.h"
#include "rlk/ops/policy_loss.h"
#include "rlk/ops/preference_loss.h"
#include "rlk/ops/random_bits.h"
#include "rlk/ops/rms_norm.h"
#include "rlk/ops/rope.h"
#include "rlk/ops/sample.h"
#include "rlk/ops/scatter_rewards.h"
#include "rlk/ops/sequence_logprob.h"
#include "rlk/ops/shift_labels_packed.h"
#include "rlk/ops/silu_mul.h"
#include "rlk/ops/value_loss.h"

namespace preconditions_test {
namespace {

// Calls visit(set, name) for each size of Params, where set(p, value) sets it.
template <class Params, class F>
int each_size(const F& visit) {
  int members = 0;
#define RLK_MEMBER(member)                                          \
  if constexpr (requires(Params p) { p.member = -1; }) {            \
    visit([](Params& p, int value) { p.member = value; }, #member); \
    ++members;                                                      \
  }
  RLK_MEMBER(sequences.num_sequences)
  RLK_MEMBER(sequences.num_tokens)
  RLK_MEMBER(num_sequences)
  RLK_MEMBER(num_tokens)
  RLK_MEMBER(num_rows)
  RLK_MEMBER(num_columns)
  RLK_MEMBER(columns)
  RLK_MEMBER(in_features)
  RLK_MEMBER(out_features)
  RLK_MEMBER(num_q_heads)
  RLK_MEMBER(rows)
  RLK_MEMBER(head_dim)
  RLK_MEMBER(q.num_heads)
  RLK_MEMBER(k.num_heads)
  RLK_MEMBER(k.columns)
  RLK_MEMBER(q_tokens)
  RLK_MEMBER(k_tokens)
  RLK_MEMBER(size)
  RLK_MEMBER(count)
  RLK_MEMBER(capacity)
  RLK_MEMBER(num_losses)
  RLK_MEMBER(num_slots)
  RLK_MEMBER(num_pages)
  RLK_MEMBER(num_heads)
  RLK_MEMBER(num_words)
  RLK_MEMBER(vocab_size)
  RLK_MEMBER(chosen.num)
#undef RLK_MEMBER
  return members;
}

template <class Params>
concept Complete = requires {
  sizeof(Params);
};

template <class Params, class F>
void expect_refusals(const F& call) {
  if constexpr (Complete<Params>) {
    constexpr bool wants_nothing = std::is_same_v<Params, rlk::PreferenceLossBackwardParams>;  // without an array
    Params no_array{};                                                                         // with sizes of 1
    const int members = each_size<Params>([&](const auto& set, const char* member) {
      Params p{};
      set(p, -1);
      EXPECT_THROW(call(p), rlk::InvalidArgument) << member;
      set(no_array, 1);
    });
    EXPECT_GT(members, 0) << "include its contract above, or add its size to the members";
    if (!wants_nothing) EXPECT_THROW(call(no_array), rlk::InvalidArgument);
  }
}

#if RLK_TEST_HIP
#define RLK_CALL(function, p) rlk::hip::function(p, 0, 0)
#else
#define RLK_CALL(function, p) rlk::cpu::function(p)
#endif
#define RLK_WORKSPACE(operator, function, Params)
#define RLK_COMPOSED(operator, function, Params)
// scored_rows is left out: its Params are incomplete here, since only linear_logprob calls it, after its own checks.
#define RLK_RUNS(operator, function, Params)                                    \
  TEST(Preconditions, function) {                                               \
    expect_refusals<rlk::Params>([](const auto& p) { RLK_CALL(function, p); }); \
  }
#include "rlk/operators.inc"

// The message of a check about params, or nothing.
template <class Check>
std::string refusal(const Check& check) {
  try {
    check();
  } catch (const rlk::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

// A size of `bound` or more is refused in these words. A smaller size may be refused by another check.
template <class Params, class Set, class Check>
void expect_bound(const char* words, std::int64_t bound, const Set& set, const Check& check) {
  Params p{};
  set(p) = bound - 1;
  EXPECT_EQ(refusal([&] { check(p); }).find(words), std::string::npos) << words;
  set(p) = bound;
  EXPECT_NE(refusal([&] { check(p); }).find(words), std::string::npos) << words;
}
#define RLK_BOUND(Params, member, bound, check, words)                        \
  expect_bound<rlk::Params>(                                                  \
      words, bound, [](rlk::Params& p) -> std::int64_t& { return p.member; }, \
      [](const rlk::Params& p) { rlk::check(p); })

TEST(Preconditions, SizesAreRefusedFromTheirBoundOn) {
  constexpr std::int64_t kOne = 1;
  RLK_BOUND(GaeParams, sequences.num_tokens, kOne << 38, check_gae, "gae: fewer than 2^38 tokens");
  RLK_BOUND(GaeParams, sequences.num_sequences, kOne << 31, check_gae, "sequences: fewer than 2^31");
  RLK_BOUND(KlParams, sequences.num_sequences, kOne << 31, check_kl, "kl: fewer than 2^31 sequences");
  RLK_BOUND(KlParams, sequences.num_tokens, kOne << 33, check_kl, "kl: fewer than 2^33 tokens");
  RLK_BOUND(GroupAdvantageParams, num_sequences, kOne << 30, check_group_advantage, "fewer than 2^30 sequences");
  RLK_BOUND(GroupAdvantageParams, num_groups, kOne << 31, check_group_advantage, "fewer than 2^31 groups");
  RLK_BOUND(PackLayoutParams, num_sequences, kOne << 31, check_pack_layout, "pack: fewer than 2^31 sequences");
  RLK_BOUND(PackLayoutParams, num_tokens, kOne << 31, check_pack_layout, "pack: fewer than 2^31 tokens in a row");
  RLK_BOUND(PackLayoutParams, capacity, kOne << 31, check_pack_layout, "pack: a capacity below 2^31 tokens");
  RLK_BOUND(PackParams, num_sequences, kOne << 31, check_pack, "pack: fewer than 2^31 sequences");
  RLK_BOUND(PackParams, num_tokens, kOne << 31, check_pack, "pack: fewer than 2^31 tokens in a row");
  RLK_BOUND(LinearParams, num_rows, kOne << 32, check_linear, "linear: fewer than 2^32 rows");
  RLK_BOUND(LinearBiasGradParams, num_rows, kOne << 32, check_linear_bias_grad, "fewer than 2^32 rows");
  RLK_BOUND(SampleParams, num_rows, kOne << 31, check_sample, "sample: fewer than 2^31 rows");
  RLK_BOUND(SampleParams, vocab_size, rlk::kSampleVocab + 1, check_sample, "sample: 1 to 2^19 columns");
}

// The first array of an operator over tokens is given, with a value for each token.
template <class Params, class Array, class Check>
void expect_values_of_tokens(const char* words, const Array& array, const Check& check) {
  const float value = 0.0f;
  Params p{};
  p.sequences.num_sequences = p.sequences.num_tokens = 1;
  const auto is_refused = [&] { return refusal([&] { check(p); }).find(words) != std::string::npos; };
  EXPECT_TRUE(is_refused()) << words << ", without it";
  array(p).data = &value;
  EXPECT_FALSE(is_refused()) << words;
  array(p).token_stride = 0;
  EXPECT_TRUE(is_refused()) << words << ", with one a sequence";
}
#define RLK_VALUES(Params, member, check, words)                            \
  expect_values_of_tokens<rlk::Params>(                                     \
      words, [](rlk::Params& p) -> rlk::PolicyTokens& { return p.member; }, \
      [](const rlk::Params& p) { rlk::check(p); })

TEST(Preconditions, ValuesAreGivenForEachToken) {
  RLK_VALUES(CovarianceMaskParams, logprob, check_covariance_mask, "covariance_mask: logprob, one a token");
  RLK_VALUES(ValueLossParams, value, check_value_loss, "value_loss: value is given, one a token");
}

TEST(Preconditions, AMaskHasElementsOfAKnownSize) {
  const unsigned char flags[8] = {};
  std::int32_t position = 0;
  for (const int bytes : {0, 1, 2, 3, 4, 5, 8, 16}) {
    rlk::TokenMask mask;
    mask.data = flags;
    mask.bytes = bytes;
    rlk::PackLayoutParams layout;
    layout.mask = mask;
    layout.positions = &position;
    rlk::KlParams tokens;
    tokens.mask = mask;
    const bool known = bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8;
    EXPECT_EQ(refusal([&] { rlk::check_pack_layout(layout); }).empty(), known) << bytes;
    EXPECT_EQ(refusal([&] { rlk::check_kl(tokens); }).empty(), known) << bytes;
  }
}

}  // namespace
}  // namespace preconditions_test
