// Python's entries to operators over tokens that have one function each.
#include "call.h"
#include "packed_fields.h"
#include "rlk/ops/covariance_mask.h"
#include "rlk/ops/importance_weights.h"
#include "rlk/ops/kl.h"
#include "rlk/ops/masked_whiten.h"
#include "rlk/ops/mismatch_metrics.h"
#include "rlk/ops/optimal_token_baseline.h"
#include "rlk/ops/value_loss.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

nb::object covariance_mask(Frame* frame, nb::handle logprob, nb::handle old_logprob, nb::handle advantage,
                           nb::handle mask, nb::handle cu_seqlens, int kind, double ratio, double lower, double upper,
                           double clip_low, double clip_high, std::int64_t seed) {
  const bool entropy = static_cast<CovarianceKind>(kind) == CovarianceKind::kEntropy;
  TokenArguments tokens(frame, logprob, entropy ? "entropy" : "logprob", cu_seqlens);
  CovarianceMaskParams p;
  p.sequences = tokens.sequences();
  require(p.sequences.num_slots() < std::int64_t{1} << 32, tokens.array(), "fewer than 2^32 elements");
  p.logprob = tokens.first();
  p.old_logprob = tokens.optional(old_logprob, "old_logprob");
  if (!entropy) p.advantage = tokens.required(advantage, "advantage", true);
  p.mask = tokens.mask(mask);
  p.kind = static_cast<CovarianceKind>(kind);
  p.ratio = ratio;
  p.lower = static_cast<float>(lower);
  p.upper = static_cast<float>(upper);
  p.clip_low = static_cast<float>(clip_low);
  p.clip_high = static_cast<float>(clip_high);
  p.seed = static_cast<std::uint64_t>(seed);
  return Results("covariance_mask", tokens.array(), frame)
      .add(&p.selected, tokens.shape())
      .run(rlk::covariance_mask, &p, covariance_mask_workspace_bytes);
}

ImportanceSpec read_spec(nb::handle packed) {
  ImportanceSpec s;
  PackedFields fields(packed, "24 doubles");
  fields.read(&s.level, &s.zero_outside, &s.normalize, &s.low, &s.high, &s.limit);
  for (RejectionBounds* b : {&s.token, &s.sum, &s.mean, &s.most}) fields.read(&b->k1_low, &b->k1_high, &b->k2, &b->k3);
  fields.read(&s.veto_below, &s.rollout_neutral);
  fields.require_end();
  return s;
}

// Returns (weights, kept, metrics or None).
nb::object importance_weights(Frame* frame, nb::handle logprob, nb::handle rollout_logprob, nb::handle mask,
                              nb::handle cu_seqlens, nb::handle spec, bool return_metrics) {
  TokenArguments tokens(frame, logprob, "logprob", cu_seqlens);
  ImportanceWeightsParams p;
  p.spec = read_spec(spec);
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.rollout_logprob = tokens.required(rollout_logprob, "rollout_logprob");
  p.mask = tokens.mask(mask);
  return Results("importance_weights", tokens.array(), frame)
      .add(&p.weights, tokens.shape())
      .add(&p.kept, tokens.shape())
      .add(&p.metrics, {kImportanceMetrics}, return_metrics)
      .run(rlk::importance_weights, &p, importance_weights_workspace_bytes);
}

// Returns (kl, None, None). With d_kl it returns (None, d_logprob, d_importance_weight or None), as far as they are
// wanted.
nb::object kl(Frame* frame, nb::handle logprob, nb::handle ref_logprob, nb::handle weight, nb::handle mask,
              nb::handle d_kl, int estimator, bool straight_through, int weight_kind, double input_limit, double limit,
              bool return_d_logprob, bool return_d_importance_weight) {
  TokenArguments tokens(frame, logprob, "logprob", nb::none());
  KlParams p;
  p.spec = {static_cast<KlEstimator>(estimator), straight_through, static_cast<KlWeight>(weight_kind),
            static_cast<float>(input_limit), static_cast<float>(limit)};
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.ref_logprob = tokens.required(ref_logprob, "ref_logprob");
  p.weight = tokens.optional(weight, p.spec.weight == KlWeight::kOldLogprob ? "old_logprob" : "importance_weight");
  p.mask = tokens.mask(mask);
  p.d_kl = tokens.optional(d_kl, "d_kl");
  const bool backward = !d_kl.is_none();
  return Results("kl", tokens.array(), frame)
      .add(&p.kl, tokens.shape(), !backward)
      .add(&p.d_logprob, tokens.shape(), backward && return_d_logprob)
      .add(&p.d_importance_weight, tokens.shape(), backward && return_d_importance_weight)
      .run(rlk::kl, p);
}

// Returns (y, mean or None, var or None).
nb::object masked_whiten(Frame* frame, nb::handle x, nb::handle mask, nb::handle cu_seqlens, nb::handle eps,
                         bool shift_mean, bool unbiased, bool return_stats) {
  TokenArguments tokens(frame, x, "x", cu_seqlens);
  MaskedWhitenParams p;
  p.sequences = tokens.sequences();
  p.x = rows_of(tokens.first());
  p.mask = tokens.mask(mask);
  p.eps = read_positive(eps, "eps");
  p.shift_mean = shift_mean;
  p.unbiased = unbiased;
  p.y = tokens.output();
  return Results("masked_whiten", tokens.array(), frame)
      .add(&p.y.data, tokens.shape())
      .add(&p.mean, {}, return_stats)
      .add(&p.var, {}, return_stats)
      .run(rlk::masked_whiten, &p, masked_whiten_workspace_bytes);
}

nb::object mismatch_metrics(Frame* frame, nb::handle logprob_train, nb::handle logprob_rollout, nb::handle mask,
                            nb::handle cu_seqlens, double limit, bool rollout_neutral) {
  TokenArguments tokens(frame, logprob_train, "logprob_train", cu_seqlens);
  MismatchMetricsParams p;
  p.sequences = tokens.sequences();
  p.logprob_train = tokens.first();
  p.logprob_rollout = tokens.required(logprob_rollout, "logprob_rollout");
  p.mask = tokens.mask(mask);
  p.limit = static_cast<float>(limit);
  p.rollout_neutral = rollout_neutral;
  return Results("mismatch_metrics", tokens.array(), frame)
      .add(&p.metrics, {kMismatchMetrics})
      .run(rlk::mismatch_metrics, &p, mismatch_metrics_workspace_bytes);
}

// Returns (advantages, returns). The caller gives either offsets or a size; the missing one is None or 0.
nb::object optimal_token_baseline(Frame* frame, nb::handle logprob, nb::handle rewards, nb::handle sum_p_sq,
                                  nb::handle mask, nb::handle importance, nb::handle cu_seqlens,
                                  nb::handle group_offsets, std::int64_t group_size, bool zero_tail, nb::handle eps) {
  TokenArguments tokens(frame, logprob, "logprob", cu_seqlens);
  OptimalTokenBaselineParams p;
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.rewards = tokens.required(rewards, "rewards", true);
  p.sum_p_sq = tokens.required(sum_p_sq, "sum_p_sq");
  p.importance = tokens.optional(importance, "importance_weight", true);
  p.mask = tokens.mask(mask);
  const GroupsArgument groups(frame, group_offsets, group_size, p.sequences.num_sequences, 25, tokens.device());
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

// Returns (loss, metrics, d_value or None).
nb::object value_loss(Frame* frame, nb::handle value, nb::handle old_value, nb::handle returns, nb::handle mask,
                      nb::handle cu_seqlens, nb::handle token_weight, double clip, double huber, int denominator_kind,
                      bool sequence_mean, double horizon, double scale, nb::handle denominator, bool return_d_value) {
  TokenArguments tokens(frame, value, "value", cu_seqlens);
  ValueLossParams p;
  p.spec = {static_cast<float>(clip),
            static_cast<float>(huber),
            static_cast<DenominatorKind>(denominator_kind),
            sequence_mean,
            static_cast<float>(horizon),
            static_cast<float>(scale)};
  p.sequences = tokens.sequences();
  p.value = tokens.first();
  p.old_value = tokens.optional(old_value, "old_value");
  p.returns = tokens.required(returns, "returns");
  p.mask = tokens.mask(mask);
  p.token_weight = tokens.optional(token_weight, "token_weight");
  p.denominator_value = tokens.denominator(denominator, &p.denominator);
  return Results("value_loss", tokens.array(), frame)
      .add(&p.loss, {})
      .add(&p.metrics, {kValueMetrics})
      .add(&p.d_value, tokens.shape(), return_d_value)
      .run(rlk::value_loss, &p, value_loss_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "covariance_mask", &covariance_mask);
  define(m, "importance_weights", &importance_weights);
  define(m, "kl", &kl);
  define(m, "masked_whiten", &masked_whiten);
  define(m, "mismatch_metrics", &mismatch_metrics);
  define(m, "optimal_token_baseline", &optimal_token_baseline);
  define(m, "value_loss", &value_loss);
});

}  // namespace
}  // namespace rlk::bindings
