// Python's entry to optimal_token_baseline.
#include "rlk/ops/optimal_token_baseline.h"

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

// Returns (advantages, returns). The caller gives either offsets or a size; the missing one is None or 0.
nb::object call(Frame frame, nb::handle logprob, nb::handle rewards, nb::handle sum_p_sq, nb::handle mask,
                nb::handle importance, nb::handle cu_seqlens, nb::handle group_offsets, std::int64_t group_size,
                bool zero_tail, nb::handle eps) {
  TokenArguments tokens(logprob, "logprob", cu_seqlens);
  OptimalTokenBaselineParams p;
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.rewards = tokens.required(rewards, "rewards", true);
  p.sum_p_sq = tokens.required(sum_p_sq, "sum_p_sq");
  p.importance = tokens.optional(importance, "importance_weight", true);
  p.mask = tokens.optional_mask(mask);
  const GroupsArgument groups(group_offsets, group_size, p.sequences.num_sequences, 25, tokens.device());
  p.group_offsets = groups.offsets.data;
  p.group_dtype = groups.offsets.dtype;
  p.group_size = groups.size;
  p.num_groups = groups.num_groups;
  p.zero_tail = zero_tail ? 1 : 0;
  p.eps = read_positive(eps, "eps");
  return Results("optimal_token_baseline", tokens.array(), frame)
      .add(&p.advantages, tokens.shape())
      .add(&p.returns, tokens.shape())
      .run(rlk::optimal_token_baseline, &p, optimal_token_baseline_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "optimal_token_baseline", &call); });

}  // namespace
}  // namespace rlk::bindings
