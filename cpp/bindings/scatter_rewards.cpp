// Python's entry to scatter_rewards.
#include "rlk/ops/scatter_rewards.h"

#include "call.h"
#include "linear_args.h"
#include "packed_fields.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

RewardSpec read_spec(nb::handle packed) {
  RewardSpec s;
  PackedFields fields(packed, "10 doubles");
  fields.read(&s.kl, &s.kl_coef, &s.kl_input_limit, &s.kl_limit, &s.length_penalty, &s.overlong_penalty,
              &s.overlong_begin, &s.overlong_buffer, &s.place, &s.normalize_lagrange);
  fields.require_end();
  return s;
}

void read_rewards_of_spans(Frame* frame, nb::handle spans_given, nb::handle offsets_given, nb::handle rewards_given,
                           const TokenArguments& of, ScatterRewardsParams* p) {
  const Array& spans = read_spans(frame, spans_given);
  p->num_spans = spans.view().shape[0];
  const OffsetsArgument offsets(frame, offsets_given, of.device(), "span_offsets");
  const VectorArgument rewards(frame, rewards_given, "span_rewards", kFloat32, p->num_spans, "one a span", of.device());
  require_device(spans, of.device());
  require_given(offsets_given, "span_offsets");
  rewards.require_contiguous();
  const std::int64_t n = of.sequences().num_sequences, given = offsets.num_sequences;
  require(given == n, "span_offsets", "shape [", n + 1, "] (num_sequences + 1), got [", given + 1, "]");
  p->spans = {spans.view().data, spans.view().dtype};
  p->span_offsets = offsets.offsets;
  p->span_rewards = rewards.floats();
}

// Returns (rewards, costs or None, combined or None, lengths). lagrange is None, a number, or one element on the
// device.
nb::object call(Frame* frame, nb::handle mask, nb::handle rewards, nb::handle token_rewards, nb::handle spans,
                nb::handle span_offsets, nb::handle span_rewards, nb::handle logprob, nb::handle ref_logprob,
                nb::handle cost, nb::handle cu_seqlens, nb::handle lagrange, nb::handle spec) {
  TokenArguments tokens(frame, mask, "mask", cu_seqlens, TokenKind::kMask);
  const Sequences& q = tokens.sequences();
  const VectorArgument of_sequences(frame, rewards, "rewards", kFloat32, q.num_sequences, "one a sequence",
                                    tokens.device());
  const VectorArgument costs(frame, cost, "cost", kFloat32, q.num_sequences, "one a sequence", tokens.device());
  ScatterRewardsParams p;
  p.spec = read_spec(spec);
  p.sequences = q;
  p.mask = tokens.first_mask();
  p.rewards = {of_sequences.floats(), of_sequences.stride(), 0};
  p.token_rewards = tokens.optional(token_rewards, "token_rewards");
  p.logprob = tokens.optional(logprob, "logprob");
  p.ref_logprob = tokens.optional(ref_logprob, "ref_logprob");
  p.cost = {costs.floats(), costs.stride(), 0};
  if (!spans.is_none()) read_rewards_of_spans(frame, spans, span_offsets, span_rewards, tokens, &p);
  p.lagrange_value = tokens.number(lagrange, "lagrange", &p.lagrange);
  return Results("scatter_rewards", tokens.array(), frame)
      .add(&p.to_tokens, tokens.shape())
      .add(&p.costs, tokens.shape(), !cost.is_none())
      .add(&p.combined, tokens.shape(), !lagrange.is_none())
      .add(&p.lengths, {q.num_sequences})
      .run(rlk::scatter_rewards, &p, scatter_rewards_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "scatter_rewards", &call); });

}  // namespace
}  // namespace rlk::bindings
