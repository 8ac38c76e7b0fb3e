// Every function in the table of operators rejects a negative size before it reads or writes. This is tested on the
// CPU, and on HIP's host side in the HIP build. An operator that is added to operators.inc is tested, too.
#include <gtest/gtest.h>

#include <string_view>

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

// Sets each size of Params to a negative value, one at a time.
template <class Params, class F>
int with_negative_sizes(const F& call) {
  int members = 0;
#define RLK_MEMBER(member)                               \
  if constexpr (requires(Params p) { p.member = -1; }) { \
    Params p{};                                          \
    p.member = -1;                                       \
    ++members;                                           \
    call(p, #member);                                    \
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

#if RLK_TEST_HIP
#define RLK_CALL(function, p) rlk::hip::function(p, 0, 0)
#else
#define RLK_CALL(function, p) rlk::cpu::function(p)
#endif
#define RLK_WORKSPACE(operator, function, Params)
#define RLK_COMPOSED(operator, function, Params)
// scored_rows is left out, since only linear_logprob calls it, after its own checks.
#define RLK_RUNS(operator, function, Params)                                                            \
  TEST(Preconditions, function) {                                                                       \
    if (std::string_view(#function) == "scored_rows") return;                                           \
    const int members = with_negative_sizes<rlk::Params>([](const rlk::Params& p, const char* member) { \
      EXPECT_THROW(RLK_CALL(function, p), rlk::InvalidArgument) << member;                              \
    });                                                                                                 \
    EXPECT_GT(members, 0) << "include its contract above, or add its size to the members";              \
  }
#include "rlk/operators.inc"

}  // namespace
}  // namespace preconditions_test
