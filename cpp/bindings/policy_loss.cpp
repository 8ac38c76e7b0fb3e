// Python's entry to policy_loss.
#include "rlk/ops/policy_loss.h"

#include "call.h"
#include "packed_fields.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

PolicySpec read_spec(nb::handle packed) {
  PolicySpec s;
  PackedFields fields(packed, "a PolicySpec");
  fields.read(&s.level, &s.surrogate, &s.straight_through, &s.log_ratio_min, &s.log_ratio_max, &s.clip_low,
              &s.clip_high, &s.ratio_cap, &s.dual_clip, &s.tau_positive, &s.tau_negative, &s.k_positive,
              &s.lambda_positive, &s.k_negative, &s.lambda_negative, &s.quadratic, &s.kl, &s.kl_straight_through,
              &s.kl_times_ratio, &s.kl_coef, &s.kl_input_limit, &s.kl_limit, &s.selected_kl, &s.selected_drops,
              &s.entropy_coef, &s.entropy_scale, &s.entropy_token_mean, &s.importance, &s.importance_of_current,
              &s.importance_mask, &s.gate, &s.importance_low, &s.importance_high, &s.importance_limit, &s.gate_low,
              &s.gate_high, &s.drop_above, &s.drop_by_rollout, &s.denominator, &s.sequence_mean, &s.horizon, &s.scale,
              &s.kl_gradient_ratio, &s.rollout_neutral);
  fields.require_end();
  return s;
}

// Returns (loss, metrics, d_logprob or None, d_entropy or None). The ratio's metrics come last.
nb::object loss(Frame* frame, nb::handle logprob, nb::handle old_logprob, nb::handle advantage, nb::handle mask,
                nb::handle cu_seqlens, nb::handle ref_logprob, nb::handle importance, nb::handle entropy,
                nb::handle selected, nb::handle token_weight, nb::handle spec, nb::handle denominator,
                bool ratio_metrics, bool return_d_logprob, bool return_d_entropy) {
  TokenArguments tokens(frame, logprob, "logprob", cu_seqlens);
  PolicyLossParams p;
  p.spec = read_spec(spec);
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.old_logprob = tokens.optional(old_logprob, "old_logprob");
  p.advantage = tokens.required(advantage, "advantage", true);
  require_given(mask, "mask");
  p.mask = tokens.mask(mask);
  p.ref_logprob = tokens.optional(ref_logprob, "ref_logprob");
  const bool given = p.spec.importance == ImportanceLevel::kGiven;
  p.importance = tokens.optional(importance, given ? "importance_weight" : "rollout_logprob", given);
  p.entropy = tokens.optional(entropy, "entropy");
  p.selected = tokens.optional(selected, "selected");
  p.token_weight = tokens.optional(token_weight, "token_weight");
  p.denominator_value = tokens.denominator(denominator, &p.denominator);
  Results results("policy_loss", tokens.array(), frame);
  results.add(&p.loss, {})
      .add(&p.metrics, {kPolicyMetrics + (ratio_metrics ? kMismatchMetrics : 0)})
      .add(&p.d_logprob, tokens.shape(), return_d_logprob)
      .add(&p.d_entropy, tokens.shape(), return_d_entropy && !entropy.is_none());
  if (ratio_metrics) p.ratio_metrics = p.metrics + kPolicyMetrics;
  return results.run(rlk::policy_loss, &p, policy_loss_workspace_bytes);
}

// Multiplies gradients by a factor in place. If the factor is 1, nothing is read.
nb::object scale(nb::handle first, nb::handle second, nb::handle factor, std::uintptr_t stream) {
  Frame frame{nb::none(), stream};
  const Array &a = frame.read(first, "d_logprob", "float32"), &f = frame.read(factor, "factor", "float32");
  ScaleGradientsParams p;
  p.first = static_cast<float*>(a.view().data);
  p.count = a.view().num_elements();
  const Array* const b = frame.optional(second, "d_entropy", "float32");
  if (b) p.second = static_cast<float*>(b->view().data);
  p.factor = f.data<float>();
  return Results("policy_loss", a, &frame).run(rlk::scale_gradients, p);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "policy_loss", &loss);
  define(m, "scale_gradients", &scale);
});

}  // namespace
}  // namespace rlk::bindings
