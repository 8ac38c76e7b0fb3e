// Bindings of the operators over tokens.
#include <algorithm>
#include <cstring>

#include "call.h"
#include "rlk/ops/covariance_mask.h"
#include "rlk/ops/gae.h"
#include "rlk/ops/group_advantage.h"
#include "rlk/ops/importance_weights.h"
#include "rlk/ops/kl.h"
#include "rlk/ops/masked_whiten.h"
#include "rlk/ops/mismatch_metrics.h"
#include "rlk/ops/optimal_token_baseline.h"
#include "rlk/ops/pack.h"
#include "rlk/ops/policy_loss.h"
#include "rlk/ops/scatter_rewards.h"
#include "rlk/ops/sequence_logprob.h"
#include "rlk/ops/shift_labels_packed.h"
#include "rlk/ops/value_loss.h"

namespace rlk::bindings {
namespace {

// Reads Python's packed form of a struct: doubles in the order of `fields`.
template <class... Fields>
void unpack(nb::handle packed, const char* expected, Fields*... fields) {
  char* bytes = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(packed.ptr(), &bytes, &size) != 0) throw nb::python_error();
  require(size == static_cast<Py_ssize_t>(sizeof...(fields) * sizeof(double)), "spec", expected);
  const auto read = [&]<class Field>(Field* field) {
    constexpr bool kIsNumber = std::is_floating_point_v<Field> || sizeof(Field) == 8;
    double value;
    std::memcpy(&value, bytes, sizeof value);
    bytes += sizeof value;
    *field = static_cast<Field>(static_cast<std::conditional_t<kIsNumber, double, std::int32_t>>(value));
  };
  (read(fields), ...);
}

RLK_FUNCTION(covariance_mask, (logprob, old_logprob, advantage, mask, cu_seqlens), int kind, double ratio, double lower,
             double upper, double clip_low, double clip_high, std::int64_t seed) {
  const bool entropy = static_cast<CovarianceKind>(kind) == CovarianceKind::kEntropy;
  TokenArguments tokens(frame, logprob, entropy ? "entropy" : "logprob", cu_seqlens);
  auto p = tokens.params(mask, &CovarianceMaskParams::logprob);
  require(p.sequences.num_slots() < std::int64_t{1} << 32, tokens.array(), "fewer than 2^32 elements");
  RLK_FILL(p, tokens.optional, old_logprob)
  if (!entropy) p.advantage = tokens.required(advantage, "advantage", true);
  RLK_FILL(p, as_given, kind, ratio, lower, upper, clip_low, clip_high, seed)
  return Results("covariance_mask", frame)
      .add(&p.selected, tokens.shape())
      .run(rlk::covariance_mask, &p, covariance_mask_workspace_bytes);
}

float read_share(nb::handle value, const char* name) {
  return read_number_in(value, name, 0.0f, 1.0f, "a number in [0, 1]");
}

// Returns (advantages or None, returns).
nb::object run_gae(Frame* frame, TokenArguments* tokens, GaeParams p, nb::handle mask, nb::handle bootstrap) {
  p.sequences = tokens->sequences();
  fill(&p.rewards, tokens->first());
  const VectorArgument boots(frame, bootstrap, "bootstrap", kFloat32, p.sequences.num_sequences, "num_sequences");
  boots.require_contiguous();
  p.bootstrap = boots.floats();
  RLK_FILL(p, tokens->mask, mask)
  p.advantages = p.returns = tokens->output();
  return Results("gae", frame)
      .add(&p.advantages.data, tokens->shape(), p.kind != GaeKind::kDiscountedReturns)
      .add(&p.returns.data, tokens->shape())
      .run(rlk::gae, p);
}

RLK_FUNCTION(gae, (rewards, values, mask, cu_seqlens, bootstrap, gamma, lam)) {
  TokenArguments tokens(frame, rewards, "rewards", cu_seqlens);
  GaeParams p;
  RLK_FILL(p, tokens.optional, values)
  RLK_FILL(p, read_share, gamma, lam)
  return run_gae(frame, &tokens, p, mask, bootstrap);
}

RLK_FUNCTION(discounted_returns, (rewards, mask, cu_seqlens, gamma), bool reset) {
  TokenArguments tokens(frame, rewards, "rewards", cu_seqlens);
  GaeParams p;
  p.kind = GaeKind::kDiscountedReturns;
  RLK_FILL(p, as_given, reset)
  RLK_FILL(p, read_share, gamma)
  return run_gae(frame, &tokens, p, mask, nb::none());
}

RLK_FUNCTION(vtrace,
             (rewards, values, logprob, rollout_logprob, mask, cu_seqlens, bootstrap, gamma, lam, rho_bar, c_bar),
             bool rollout_neutral) {
  TokenArguments tokens(frame, rewards, "rewards", cu_seqlens);
  GaeParams p;
  p.kind = GaeKind::kVtrace;
  RLK_FILL(p, as_given, rollout_neutral)
  RLK_FILL(p, tokens.optional, values, logprob, rollout_logprob)
  RLK_FILL(p, read_share, gamma, lam)
  RLK_FILL(p, read_positive, rho_bar, c_bar)
  return run_gae(frame, &tokens, p, mask, bootstrap);
}

// Returns (advantage, mean or None, std or None, status or None). `baseline_kind`, `scale` and `alone` are numbers of
// the contract's enums, as ops/group_advantage.py passes them. Exactly one of offsets, ids and a size is given.
RLK_FUNCTION(group_advantage, (rewards, group_offsets, group_ids, lengths, baseline), std::int64_t group_size,
             int baseline_kind, int scale, int alone, bool leave_one_out, bool best_only, bool by_nonzero,
             bool exclude_nan, nb::handle eps, nb::handle f_norm, bool return_stats, bool return_status) {
  const VectorArgument of_rewards(frame, rewards, "rewards", kFloat32, "num_sequences");
  GroupAdvantageParams p;
  p.num_sequences = of_rewards.size();
  require(p.num_sequences < std::int64_t{1} << 30, "rewards", "fewer than 2^30 sequences, got ", p.num_sequences);
  of_rewards.put(&p.rewards, &p.reward_stride);
  const auto one_a_sequence = [&](nb::handle given, const char* name, const Dtypes& dtypes) {
    return VectorArgument(frame, given, name, dtypes, p.num_sequences, "num_sequences");
  };
  const VectorArgument ids = one_a_sequence(group_ids, "group_ids", kIndices);
  ids.require_contiguous();
  const bool by_ids = group_offsets.is_none() && !group_ids.is_none();
  const GroupsArgument groups(frame, group_offsets, by_ids ? 1 : group_size, p.num_sequences, 31);
  p.group_offsets = groups.offsets.data;
  if (groups.offsets.data != nullptr) p.num_groups = groups.num_groups;
  if (by_ids) p.group_ids = ids.data();
  p.index_dtype = by_ids ? ids.dtype(DType::kInt64) : groups.offsets.dtype;
  const VectorArgument of_lengths = one_a_sequence(lengths, "lengths", kCounts);
  of_lengths.put(&p.lengths, &p.length_stride);
  p.length_dtype = of_lengths.dtype(DType::kInt64);
  one_a_sequence(baseline, "baseline", kFloat32).put(&p.baseline, &p.baseline_stride);
  RLK_FILL(p, as_given, group_size, baseline_kind, scale, alone, leave_one_out, best_only, by_nonzero, exclude_nan)
  p.eps = read_number_in(eps, "eps", 0.0f, kMostFloat, "a finite number >= 0 in float32");
  p.f_norm = read_positive(f_norm, "f_norm");
  return Results("group_advantage", frame)
      .add(&p.advantage, {p.num_sequences})
      .each({p.num_sequences}, return_stats, &p.mean, &p.std)
      .add(&p.status, {p.num_sequences}, return_status)
      .run(rlk::group_advantage, &p, group_advantage_workspace_bytes);
}

// Returns (weights, kept, metrics or None).
RLK_FUNCTION(importance_weights, (logprob, rollout_logprob, mask, cu_seqlens, spec), bool return_metrics) {
  TokenArguments tokens(frame, logprob, "logprob", cu_seqlens);
  auto p = tokens.params(mask, &ImportanceWeightsParams::logprob);
  ImportanceSpec& s = p.spec;
  unpack(spec, "24 doubles", &s.level, &s.zero_outside, &s.normalize, &s.low, &s.high, &s.limit, &s.token.k1_low,
         &s.token.k1_high, &s.token.k2, &s.token.k3, &s.sum.k1_low, &s.sum.k1_high, &s.sum.k2, &s.sum.k3,
         &s.mean.k1_low, &s.mean.k1_high, &s.mean.k2, &s.mean.k3, &s.most.k1_low, &s.most.k1_high, &s.most.k2,
         &s.most.k3, &s.veto_below, &s.rollout_neutral);
  p.rollout_logprob = tokens.required(rollout_logprob, "rollout_logprob");
  return Results("importance_weights", frame)
      .each(tokens.shape(), true, &p.weights, &p.kept)
      .add(&p.metrics, {kImportanceMetrics}, return_metrics)
      .run(rlk::importance_weights, &p, importance_weights_workspace_bytes);
}

// Returns (kl, None, None). With d_kl it returns (None, d_logprob, d_importance_weight or None), each None if unwanted.
RLK_FUNCTION(kl, (logprob, ref_logprob, weight, mask, d_kl), int estimator, bool straight_through, int weight_kind,
             double input_limit, double limit, bool return_d_logprob, bool return_d_importance_weight) {
  TokenArguments tokens(frame, logprob, "logprob", nb::none());
  auto p = tokens.params(mask, &KlParams::logprob);
  p.spec = {static_cast<KlEstimator>(estimator), straight_through, static_cast<KlWeight>(weight_kind),
            static_cast<float>(input_limit), static_cast<float>(limit)};
  RLK_FILL(p, tokens.required, ref_logprob)
  p.weight = tokens.optional(weight, p.spec.weight == KlWeight::kOldLogprob ? "old_logprob" : "importance_weight");
  p.d_kl = tokens.optional(d_kl, "d_kl");
  const bool backward = !d_kl.is_none();
  return Results("kl", frame)
      .add(&p.kl, tokens.shape(), !backward)
      .add(&p.d_logprob, tokens.shape(), backward && return_d_logprob)
      .add(&p.d_importance_weight, tokens.shape(), backward && return_d_importance_weight)
      .run(rlk::kl, p);
}

// Returns (y, mean or None, var or None).
RLK_FUNCTION(masked_whiten, (x, mask, cu_seqlens, eps), bool shift_mean, bool unbiased, bool return_stats) {
  TokenArguments tokens(frame, x, "x", cu_seqlens);
  auto p = tokens.params(mask, &MaskedWhitenParams::x);
  RLK_FILL(p, read_positive, eps)
  RLK_FILL(p, as_given, shift_mean, unbiased)
  p.y = tokens.output();
  return Results("masked_whiten", frame)
      .add(&p.y.data, tokens.shape())
      .each({}, return_stats, &p.mean, &p.var)
      .run(rlk::masked_whiten, &p, masked_whiten_workspace_bytes);
}

RLK_FUNCTION(mismatch_metrics, (logprob_train, logprob_rollout, mask, cu_seqlens), double limit, bool rollout_neutral) {
  TokenArguments tokens(frame, logprob_train, "logprob_train", cu_seqlens);
  auto p = tokens.params(mask, &MismatchMetricsParams::logprob_train);
  RLK_FILL(p, tokens.required, logprob_rollout)
  RLK_FILL(p, as_given, limit, rollout_neutral)
  return Results("mismatch_metrics", frame)
      .add(&p.metrics, {kMismatchMetrics})
      .run(rlk::mismatch_metrics, &p, mismatch_metrics_workspace_bytes);
}

// Returns (advantages, returns). The caller gives either offsets or a size; the missing argument is None or 0.
RLK_FUNCTION(optimal_token_baseline, (logprob, rewards, sum_p_sq, mask, importance, cu_seqlens, group_offsets),
             std::int64_t group_size, bool zero_tail, nb::handle eps) {
  TokenArguments tokens(frame, logprob, "logprob", cu_seqlens);
  auto p = tokens.params(mask, &OptimalTokenBaselineParams::logprob);
  p.rewards = tokens.required(rewards, "rewards", true);
  p.sum_p_sq = tokens.required(sum_p_sq, "sum_p_sq");
  p.importance = tokens.optional(importance, "importance_weight", true);
  const GroupsArgument groups(frame, group_offsets, group_size, p.sequences.num_sequences, 25);
  p.group_offsets = groups.offsets.data;
  p.group_dtype = groups.offsets.dtype;
  p.group_size = groups.size;
  p.num_groups = groups.num_groups;
  RLK_FILL(p, as_given, zero_tail)
  RLK_FILL(p, read_positive, eps)
  return Results("optimal_token_baseline", frame)
      .each(tokens.shape(), true, &p.advantages, &p.returns)
      .run(rlk::optimal_token_baseline, &p, optimal_token_baseline_workspace_bytes);
}

// Returns (loss, metrics, d_logprob or None, d_entropy or None). With ratio_metrics, the metrics of the ratio come last
// in `metrics`.
RLK_FUNCTION(policy_loss, (logprob, old_logprob, advantage, mask, cu_seqlens, ref_logprob, importance, entropy),
             nb::handle selected, nb::handle token_weight, nb::handle spec, nb::handle denominator, bool ratio_metrics,
             bool return_d_logprob, bool return_d_entropy) {
  TokenArguments tokens(frame, logprob, "logprob", cu_seqlens);
  require_given(mask, "mask");
  auto p = tokens.params(mask, &PolicyLossParams::logprob);
  PolicySpec& s = p.spec;
  unpack(spec, "a PolicySpec", &s.level, &s.surrogate, &s.straight_through, &s.log_ratio_min, &s.log_ratio_max,
         &s.clip_low, &s.clip_high, &s.ratio_cap, &s.dual_clip, &s.tau_positive, &s.tau_negative, &s.k_positive,
         &s.lambda_positive, &s.k_negative, &s.lambda_negative, &s.quadratic, &s.kl, &s.kl_straight_through,
         &s.kl_times_ratio, &s.kl_coef, &s.kl_input_limit, &s.kl_limit, &s.selected_kl, &s.selected_drops,
         &s.entropy_coef, &s.entropy_scale, &s.entropy_token_mean, &s.importance, &s.importance_of_current,
         &s.importance_mask, &s.gate, &s.importance_low, &s.importance_high, &s.importance_limit, &s.gate_low,
         &s.gate_high, &s.drop_above, &s.drop_by_rollout, &s.denominator, &s.sequence_mean, &s.horizon, &s.scale,
         &s.kl_gradient_ratio, &s.rollout_neutral);
  RLK_FILL(p, tokens.optional, old_logprob)
  p.advantage = tokens.required(advantage, "advantage", true);
  RLK_FILL(p, tokens.optional, ref_logprob)
  const bool given = p.spec.importance == ImportanceLevel::kGiven;
  p.importance = tokens.optional(importance, given ? "importance_weight" : "rollout_logprob", given);
  RLK_FILL(p, tokens.optional, entropy, selected, token_weight)
  p.denominator_value = tokens.number(denominator, "denominator", &p.denominator);
  Results results("policy_loss", frame);
  results.add(&p.loss, {})
      .add(&p.metrics, {kPolicyMetrics + (ratio_metrics ? kMismatchMetrics : 0)})
      .add(&p.d_logprob, tokens.shape(), return_d_logprob)
      .add(&p.d_entropy, tokens.shape(), return_d_entropy && !entropy.is_none());
  if (ratio_metrics) p.ratio_metrics = p.metrics + kPolicyMetrics;
  return results.run(rlk::policy_loss, &p, policy_loss_workspace_bytes);
}

// Multiplies gradients by a factor in place. If the factor is 1, the gradients are neither read nor written.
RLK_PLAIN_FUNCTION(scale_gradients, nb::handle first, nb::handle second, nb::handle factor, std::uintptr_t stream) {
  Frame frame{nb::none(), stream};
  const Array &a = frame.read(first, "d_logprob", "float32"), &f = frame.read(factor, "factor", "float32");
  ScaleGradientsParams p;
  p.first = static_cast<float*>(a->data);
  p.count = a->num_elements();
  const Array* const b = frame.optional(second, "d_entropy", "float32");
  if (b) p.second = static_cast<float*>(b->view().data);
  p.factor = f.data<float>();
  return Results("policy_loss", &frame).run(rlk::scale_gradients, p);
}

void read_rewards_of_spans(Frame* frame, nb::handle spans_given, nb::handle offsets_given, nb::handle rewards_given,
                           const TokenArguments& of, ScatterRewardsParams* p) {
  const Array& spans = read_spans(frame, spans_given);
  p->num_spans = spans->shape[0];
  const OffsetsArgument offsets(frame, offsets_given, "span_offsets");
  const VectorArgument rewards(frame, rewards_given, "span_rewards", kFloat32, p->num_spans, "one a span");
  require_given(offsets_given, "span_offsets");
  rewards.require_contiguous();
  const std::int64_t n = of.sequences().num_sequences, given = offsets.num_sequences;
  require(given == n, "span_offsets", "shape [", n + 1, "] (num_sequences + 1), got [", given + 1, "]");
  p->spans = {spans->data, spans->dtype};
  p->span_offsets = offsets.offsets;
  p->span_rewards = rewards.floats();
}

// Returns (rewards, costs or None, combined or None, lengths). `lagrange` is None, a number, or one element on the
// device.
RLK_FUNCTION(scatter_rewards, (mask, rewards, token_rewards, spans, span_offsets, span_rewards, logprob, ref_logprob,
                               cost, cu_seqlens, lagrange, spec)) {
  TokenArguments tokens(frame, mask, "mask", cu_seqlens, kAnyDtype);
  const Sequences& q = tokens.sequences();
  const VectorArgument of_sequences(frame, rewards, "rewards", kFloat32, q.num_sequences, "one a sequence");
  const VectorArgument costs(frame, cost, "cost", kFloat32, q.num_sequences, "one a sequence");
  ScatterRewardsParams p;
  RewardSpec& s = p.spec;
  unpack(spec, "10 doubles", &s.kl, &s.kl_coef, &s.kl_input_limit, &s.kl_limit, &s.length_penalty, &s.overlong_penalty,
         &s.overlong_begin, &s.overlong_buffer, &s.place, &s.normalize_lagrange);
  p.sequences = q;
  p.mask = tokens.first_mask();
  p.rewards = {of_sequences.floats(), of_sequences.stride(), 0};
  RLK_FILL(p, tokens.optional, token_rewards, logprob, ref_logprob)
  p.cost = {costs.floats(), costs.stride(), 0};
  if (!spans.is_none()) read_rewards_of_spans(frame, spans, span_offsets, span_rewards, tokens, &p);
  p.lagrange_value = tokens.number(lagrange, "lagrange", &p.lagrange);
  return Results("scatter_rewards", frame)
      .add(&p.to_tokens, tokens.shape())
      .add(&p.costs, tokens.shape(), !cost.is_none())
      .add(&p.combined, tokens.shape(), !lagrange.is_none())
      .add(&p.lengths, {q.num_sequences})
      .run(rlk::scatter_rewards, &p, scatter_rewards_workspace_bytes);
}

// Returns (sum, count, status or None).
RLK_EAGER_FUNCTION(sequence_logprob, 3, (logprob, mask, cu_seqlens), bool return_status) {
  TokenArguments tokens(frame, logprob, "logprob", cu_seqlens, kFloats);
  SequenceLogprobParams p;
  tokens.put(&p.logprob, &p.logprob_stride, &p);
  RLK_FILL(p, tokens.mask, mask)
  return Results("sequence_logprob", frame)
      .each({p.num_sequences}, true, &p.sum, &p.count)
      .add(&p.status, {p.num_sequences}, return_status)
      .run(rlk::sequence_logprob, p);
}

// Returns d_logprob for `num_tokens` tokens (per row, or of all packed sequences). `code` is the number of its DType.
// The mask has the shape of d_logprob. With `is_flat`, tokens of one sequence without offsets have the shape
// [num_tokens].
RLK_FUNCTION(sequence_logprob_backward, (dsum, mask, cu_seqlens), std::int64_t num_tokens, int code, bool is_flat) {
  const Array& in = frame->read(dsum, "dsum", kFloat32);
  const OffsetsArgument offsets(frame, cu_seqlens);
  const bool packed = !cu_seqlens.is_none();
  if (in->ndim != 1 || (packed && in->shape[0] != offsets.num_sequences)) {
    require_shape(false, in, "shape [", packed ? word(offsets.num_sequences) : "num_sequences", "]");
  }
  SequenceLogprobBackwardParams p;
  p.dsum = in.data<float>();
  p.dsum_stride = in->shape[0] > 1 ? in->stride(0) : 1;
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = in->shape[0];
  p.num_tokens = num_tokens;
  p.dtype = static_cast<DType>(code);
  require_shape(!is_flat || packed || p.num_sequences == 1, in, "shape [1] (one sequence)");
  const Sizes shape = packed || is_flat ? Sizes{num_tokens} : Sizes{p.num_sequences, num_tokens};
  p.mask = read_mask(frame, mask, shape, "logprob");
  return Results("sequence_logprob", frame).add(&p.d_logprob, shape, p.dtype).run(rlk::sequence_logprob_backward, p);
}

RLK_FUNCTION(shift_labels_packed, (ids, cu_seqlens, mask), std::int64_t cp_rank, std::int64_t cp_size, bool zigzag,
             std::int64_t ignore_index) {
  const Array& in = frame->read(ids, "ids", kIndices);
  require_shape(in->ndim == 1, in, "shape [num_tokens]");
  require_columns(in);
  require_given(cu_seqlens, "cu_seqlens");
  const OffsetsArgument offsets(frame, cu_seqlens);
  ShiftLabelsParams p;
  p.mask = read_mask(frame, mask, in.shape(), "ids");
  require(cp_size > 0 && cp_size < 1 << 20, "cp_size", "a number in [1, 2^20), got ", cp_size);
  require(cp_rank >= 0 && cp_rank < cp_size, "cp_rank", "a number in [0, ", cp_size, "), got ", cp_rank);
  p.ids = in->data;
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = offsets.num_sequences;
  p.num_tokens = in->shape[0];
  p.dtype = in->dtype;
  RLK_FILL(p, as_given, cp_rank, cp_size, zigzag, ignore_index)
  require(p.num_tokens % cp_size == 0, in, "a number of tokens that is a multiple of ", cp_size, " (cp_size), got ",
          p.num_tokens, "; pad them");
  require(p.dtype == DType::kInt64 || static_cast<std::int32_t>(ignore_index) == ignore_index, "ignore_index",
          "a number that int32 holds, got ", ignore_index);
  return Results("shift_labels_packed", frame)
      .add(&p.labels, {p.num_tokens / cp_size}, p.dtype)
      .run(rlk::shift_labels_packed, p);
}

RLK_FUNCTION(loss_mask_from_spans, (given, span_offsets, cu_seqlens), std::int64_t num_tokens) {
  const Array& in = read_spans(frame, given);
  const Array& of_sequences = frame->read(span_offsets, "span_offsets", kIndices);
  const TensorView& o = of_sequences.view();
  const OffsetsArgument offsets(frame, cu_seqlens);
  const bool packed = !cu_seqlens.is_none();
  if (o.ndim != 1 || o.shape[0] < 1 || !o.is_contiguous() || (packed && o.shape[0] != offsets.num_sequences + 1)) {
    require_shape(false, of_sequences, "a contiguous array of shape [",
                  packed ? word(offsets.num_sequences + 1) : "num_sequences + 1", "]");
  }
  SpanMaskParams p;
  p.spans = in->data;
  p.span_offsets = {o.data, o.dtype};
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = o.shape[0] - 1;
  p.num_tokens = num_tokens;
  p.num_spans = in->shape[0];
  p.dtype = in->dtype;
  const Sizes shape = packed ? Sizes{num_tokens} : Sizes{p.num_sequences, num_tokens};
  return Results("shift_labels_packed", frame).add(&p.mask, shape).run(rlk::loss_mask_from_spans, p);
}

Marker read_marker(nb::list ids, const char*) {
  Marker m;
  m.length = static_cast<std::int32_t>(nb::len(ids));  // Python has checked the number of ids
  for (int i = 0; i < m.length; ++i) m.ids[i] = nb::cast<std::int64_t>(ids[static_cast<std::size_t>(i)]);
  return m;
}

RLK_FUNCTION(tool_mask, (ids, cu_seqlens), nb::list begin, nb::list end, bool include_end) {
  const TokenArguments tokens(frame, ids, "ids", cu_seqlens, kIndices);
  ToolMaskParams p;
  tokens.put(&p.ids, &p.ids_stride, &p);
  RLK_FILL(p, read_marker, begin, end)
  RLK_FILL(p, as_given, include_end)
  return Results("shift_labels_packed", frame).add(&p.mask, tokens.shape()).run(rlk::tool_mask, p);
}

// Returns (loss, metrics, d_value or None).
RLK_FUNCTION(value_loss, (value, old_value, returns, mask, cu_seqlens, token_weight), double clip, double huber,
             int denominator_kind, bool sequence_mean, double horizon, double scale, nb::handle denominator,
             bool return_d_value) {
  TokenArguments tokens(frame, value, "value", cu_seqlens);
  auto p = tokens.params(mask, &ValueLossParams::value);
  fill(&p.spec.denominator, denominator_kind);
  RLK_FILL(p.spec, as_given, clip, huber, sequence_mean, horizon, scale)
  RLK_FILL(p, tokens.optional, old_value)
  RLK_FILL(p, tokens.required, returns)
  RLK_FILL(p, tokens.optional, token_weight)
  p.denominator_value = tokens.number(denominator, "denominator", &p.denominator);
  return Results("value_loss", frame)
      .add(&p.loss, {})
      .add(&p.metrics, {kValueMetrics})
      .add(&p.d_value, tokens.shape(), return_d_value)
      .run(rlk::value_loss, &p, value_loss_workspace_bytes);
}

constexpr std::int64_t kMost = std::int64_t{1} << 31;

void check_counts(std::int64_t num_tokens, std::int64_t capacity, bool unpacks) {
  require(num_tokens < kMost, unpacks ? "max_seqlen" : "tensors", "fewer than 2^31", unpacks ? "" : " tokens a row",
          ", got ", num_tokens);
  require(capacity < kMost, "max_tokens", "fewer than 2^31 (cu_seqlens are int32), got ", capacity);
}

// Returns (cu_seqlens, positions or None, status). `kept` is lengths [rows] or, with `by_mask`, a mask [rows, tokens].
RLK_FUNCTION(pack_layout, (kept), std::int64_t num_tokens, std::int64_t capacity, bool by_mask) {
  const Array& in = by_mask ? frame->read(kept, "mask", kAnyDtype) : frame->read(kept, "lengths", kIndices);
  check_counts(num_tokens, capacity, false);
  PackLayoutParams p;
  if (by_mask) {
    require_shape(in->ndim == 2 && in->shape[1] == num_tokens, in, "shape [num_sequences, ", num_tokens, "]");
    require_flags(in);
    require_columns(in);
    p.mask = flags_of(in);
  } else {
    require_shape(in->ndim == 1 && in->is_contiguous(), in, "a contiguous array of shape [num_sequences]");
    p.lengths = in->shape[0] == 0 ? nullptr : in->data;
    p.lengths_dtype = in->dtype;
  }
  p.num_sequences = in->shape[0];
  p.num_tokens = num_tokens;
  p.capacity = capacity;
  return Results("pack", frame)
      .add(&p.cu_seqlens, {p.num_sequences + 1})
      .add(&p.positions, {p.num_sequences, num_tokens}, by_mask)
      .add(&p.status, {1})
      .run(rlk::pack_layout, p);
}

// Returns (shape, name of the dtype) of any array that DLPack can export, even if the array has no such attributes.
RLK_PLAIN_FUNCTION(shape_and_dtype, nb::handle array, const char* name) {
  const Array a(array, name, kAnyDtype);
  nb::list shape;
  for (const std::int64_t size : a.shape()) shape.append(size);
  return nb::make_tuple(nb::tuple(shape), nb::str(name_of(a.type()).c_str()));
}

// Number of bytes of a token. A token's elements lie in the dimensions from `first` on, which must have no gaps.
std::int64_t token_bytes(const Array& a, int first) {
  std::int64_t elements = 1;
  for (int i = a->ndim; i-- > first;) {
    require(a->shape[i] <= 1 || a->stride(i) == elements || a->num_elements() == 0, a,
            "contiguous dimensions after those of tokens, got stride ", a->stride(i), " of dimension ", i, kCopyHint);
    elements *= a->shape[i];
  }
  return elements * a.element_bytes();
}

// Packs or unpacks a list of arrays. `fills` has eight bytes for each array. `num_tokens` is the length of a padded
// row. `capacity` is the length of the new packed arrays.
RLK_FUNCTION(pack, (), nb::list arrays, nb::handle cu_seqlens, nb::handle positions, bool unpacks, bool covered,
             std::int64_t num_tokens, std::int64_t capacity, nb::list fills) {
  const std::size_t count = nb::len(arrays);
  require(count > 0, "tensors", "at least one array, got none");
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i)
    names.push_back(count == 1 ? "tensors" : "tensors[" + std::to_string(i) + "]");
  std::vector<const Array*> in;
  for (std::size_t i = 0; i < count; ++i) in.push_back(&frame->read(arrays[i], names[i].c_str(), kAnyDtype));
  const Array& first = *in[0];
  check_counts(num_tokens, capacity, unpacks);
  require_given(cu_seqlens, "cu_seqlens");
  const OffsetsArgument offsets(frame, cu_seqlens);
  PackParams p;
  p.unpacks = unpacks;
  p.covered = covered;
  p.cu_seqlens = offsets.offsets;
  p.num_sequences = offsets.num_sequences;
  p.num_tokens = num_tokens;
  p.capacity = unpacks && first->ndim > 0 ? first->shape[0] : capacity;
  if (const Array* const where = frame->optional(positions, "positions", kInt32)) {
    check_dense(*where, {p.num_sequences, num_tokens});
    p.positions = where->view().num_elements() == 0 ? nullptr : where->data<std::int32_t>();
  }
  const Results results("pack", frame);
  nb::list out;
  std::vector<PackArray> parts;
  for (std::size_t i = 0; i < count; ++i) {
    const Array& a = *in[i];
    const int dims = unpacks ? 1 : 2;  // number of token dimensions
    if (unpacks ? a->ndim < 1 || a->shape[0] != p.capacity
                : a->ndim < 2 || a->shape[0] != p.num_sequences || a->shape[1] != num_tokens) {
      const std::string tokens =
          unpacks ? (i == 0 ? "num_tokens" : word(p.capacity)) : words(p.num_sequences, ", ", num_tokens);
      require_shape(false, a, "shape [", tokens, ", ...]");
    }
    PackArray part;
    part.token_bytes = token_bytes(a, dims);
    (unpacks ? part.packed : part.padded) = a->data;
    const auto stride = [&](int dim) { return a->stride(dim) * a.element_bytes(); };
    part.packed_stride = unpacks ? stride(0) : part.token_bytes;
    part.sequence_stride = unpacks ? num_tokens * part.token_bytes : stride(0);
    part.token_stride = unpacks ? part.token_bytes : stride(1);
    Sizes shape = unpacks ? Sizes{p.num_sequences, num_tokens} : Sizes{capacity};
    shape.insert(shape.end(), a.shape().begin() + dims, a.shape().end());
    part.fill = nb::cast<std::uint64_t>(fills[i]);
    require(shape.size() <= 8, a, "at most 7 dimensions, got 8");
    Caller::Fresh fresh = results.caller().empty(shape, a.type());
    (unpacks ? part.padded : part.packed) = fresh.data;
    parts.push_back(part);
    out.append(fresh.array);
  }
  for (std::size_t i = 0; i < count; i += kPackArrays) {
    p.num_arrays = static_cast<std::int32_t>(std::min<std::size_t>(kPackArrays, count - i));
    std::copy_n(parts.begin() + static_cast<std::ptrdiff_t>(i), p.num_arrays, p.arrays);
    results.call(rlk::pack, p);
  }
  return out;
}

}  // namespace
}  // namespace rlk::bindings
