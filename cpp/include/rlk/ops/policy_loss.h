// THE CONTRACT of `policy_loss`: the clipped policy objectives, their KL and entropy terms, gradients and metrics, in
// one pass over per-token log-probabilities. Rule numbers refer to docs/numerics.md; docs/objectives.md has the names
// of papers and frameworks. Formulas are in fp32, in the order shown, with one rounding per operation; exp, expm1, log2
// and sigmoid come from math/. Minimum and maximum return their first operand unless the second is strictly better,
// so a NaN in the first operand stays.
//
// In the formulas x * y is fl(x y), but +0 for zero times infinity, which is the limit of such products. A term whose
// coefficient is 0 is left out of every sum. rlk/tokens.h defines slots, sequences and their sums. A token has
// l = logprob, o = old_logprob (l itself if there is none), A = advantage, f = ref_logprob, m = rollout_logprob and
// H = entropy. n is the number of a sequence's tokens; sum() adds over the tokens of a sequence.
//
// Log-ratio x and its ratio r = exp(x), with slope r' = r, or 0 where a limit cuts x:
//   kToken      x = limited(fl(l - o))
//   kSequence   x = limited(sum(fl(l - o)));  kGeometric x = limited(sum(fl(l - o)) / n)
//   limited(x) = min(max(x, log_ratio_min), log_ratio_max)
//   kGeometricClip sums min(fl(l - o), clip_high) for A > 0, max(fl(l - o), clip_low) for A < 0, 0 for A = 0.
//   kGamma sums fl(l - o), each limited to +-20. With importance weights, it adds the sum of fl(log w), each limited
//     to [ln 1e-8, 20]. kGamma limits x to [ln 1e-8, 20]
// Policy term P, with slope P_x along x and slope P_l along l. For A = 0, P and its slopes are 0; kGeometricClip alone
//   keeps its P:
//   kRatio          p1 = -A min(r, ratio_cap), p2 = -A min(max(r, clip_low), clip_high); P = max(p1, p2). For A < 0
//                   P = min(P, fl(-A dual_clip)). P_x = -A r' of the operand that P equals, and p1 if p1 = p2. P_x = 0
//                   where this operand does not depend on r
//   kWeighted       P = ((-w) A) * l, P_l = (-w) A, w = min(max(r, clip_low), clip_high)
//   kLogprob        kWeighted with w = 1
//   kSigmoid        s = sigmoid(t (r - 1)), t = tau_positive for A > 0, else tau_negative; P = (-(s (4/t))) A,
//                   P_x = -A ((4 s sigmoid(-t (r - 1))) * r')
//   kGeometricClip  P = -(sum(A) / n) r for every token. With importance weights
//                   r = exp(fl(x + sum(log(w + 1e-10)) / n)). P_l = P where A is not 0 and the log-ratio is not
//                   clipped, else 0
//   kGamma          kWeighted with w = exp((lambda + k x) - lambda r), or 0 where that is infinite; A >= 0 selects
//                   k_positive and lambda_positive, A < 0 k_negative and lambda_negative
//   kQuadratic      d = fl(l - o); P = fl((quadratic / 2 d) d - l A), Inf where both terms are infinite;
//                   P_l = -(A - quadratic d)
// Importance weight w of the rollout: d = fl(o - m), or fl(l - m) with importance_of_current. ImportanceLevel selects d
// itself, its sum or its mean over the sequence. The selected value is limited to +-importance_limit, and e is its
// exponential.
// w = min(max(e, low), high). With importance_mask w = e in [low, high] and 0 outside. With kGiven, w is the value of
// `importance`. With `gate`, w = 0 for a sequence whose exp(sum(d) / n) is not in [gate_low, gate_high]. P, P_x, P_l
// become P * w, P_x * w, P_l * w; kGamma and kGeometricClip use w in their formulas above instead. Where the gate, or
// the drop below, sets a term to 0, the result is 0, even if the term is NaN. With rollout_neutral, each difference to
// m is +0 where m is NaN, in d and in the drop. The token's weight is then 1, limited by its bounds.
// Drop: if sum(fl(o - l)) / n of a sequence is not <= drop_above, its tokens with A < 0 lose their policy terms. With
// drop_by_rollout, m replaces o.
// KL term K of e = fl(f - l), limited to +-kl_input_limit. The slope K_l is 0 where a limit cuts e or K:
//   k1, k2, k3, abs: as in ops/kl.h. With kl_straight_through K_l = fl(l - f) even where a limit cuts. With
//   kl_gradient_ratio K_l becomes K_l * min(r, kl_gradient_ratio).
//   With kl_times_ratio the term is K * r, with the slope of this product. For k3, value and slope are those of
//   kOldLogprob in ops/kl.h, which computes the slope in closed form, and the value with G where e > 16. Here
//   G = exp(fl(f - o)) where r is a token's ratio and no limit cuts, else exp(fl(x + e)). Where a limit cuts the ratio,
//   the slope is K_l * r; for k3 with e > 16 it is min(r, largest) - G.
//   With kTimesOwnRatio r is exp(fl(l - o)) here, whatever the ratio of P is. K and K_l are those of kOldLogprob, and a
//   token's K gives no gradient to other tokens.
//   K is then limited to +-kl_limit
// Selected tokens are those whose element of `selected` is not zero. They add fl(selected_kl w) * |fl(l - o)| to P and
// its slope to P_l; with selected_drops they have no policy term instead. An infinite P stays as it is.
// With token_weight u of each token, P, P_x, P_l, H, and the limited K and its slope are multiplied by u: a value v
// becomes fl(u v). In the sums of a sequence's shared gradient (see Gradient), A becomes fl(u fl(A w)). The K that
// kl_times_ratio passes to other tokens becomes fl(u K). kGeometricClip takes no token_weight. D and n still count
// every token.
// Weight of a sequence's tokens: q = scale / D, divided by `horizon` if `horizon` is not 0, and divided by n with
// sequence_mean. q is 0 where D or n is 0, and NaN where D is negative, subnormal, infinite or NaN. D is `denominator`
// if the caller gives one, else the number of tokens, of sequences, or of sequences that have a token. A product with a
// weight of 0 is 0, even if the other factor is infinite or NaN.
// Gradient: d_logprob = weight fma(kl_coef, K_l, P_x + P_l). If the ratio is a sequence's and straight_through is not
// set, all tokens of the sequence share one P_x: sum(w P_x), or sum(w P_x) / n for kGeometric. It is computed from two
// sums: sum(w A) over A > 0 or NaN, and sum(w A) over A < 0. Selected tokens that are dropped are in neither sum. A sum
// of 0 adds 0 to P_x, whatever the ratio is. With kl_times_ratio, each K of such a sequence gives a gradient to all its
// tokens, with the share h = 1, or 1 / n for kGeometric. A token's own K gives fl(fl(h min(K, largest)) + K_l) * r, or
// fl(-(e * r) - fl(1 - h) * (K r)) for k3. The other tokens' K give fl(h r') * fl(sum(K) - K), or +0 where K is
// infinite. Both formulas take the K of min(e, 80). d_entropy = -entropy_coef weight. With entropy_token_mean the
// weight of H is entropy_scale / number of tokens. A masked token has gradient +0.
// Loss: each sequence's sum(P), sum(K) and sum(H) times its weight, summed over sequences, give policy, kl and entropy;
//   loss = fma(-entropy_coef, entropy, fma(kl_coef, kl, policy)).
// The bits are the same for padded and packed sequences, for any strides and on every backend. Given a denominator,
// gradients have the same bits for any split of the batch. Every NaN result is the canonical NaN. All functions enqueue
// their work on `stream`; they neither allocate nor synchronise.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/ops/kl.h"
#include "rlk/ops/mismatch_metrics.h"
#include "rlk/tokens.h"

namespace rlk {

enum class RatioLevel : std::int32_t { kToken, kSequence, kGeometric };
enum class Surrogate : std::int32_t { kRatio, kWeighted, kLogprob, kSigmoid, kGeometricClip, kGamma, kQuadratic };
enum class ImportanceLevel : std::int32_t { kNone, kToken, kSequence, kGeometric, kGiven };

// How selected tokens lose their policy term. kDropsAsClipped counts them in the clip fractions; kDrops does not.
constexpr std::int32_t kDropsAsClipped = 1, kDrops = 2;

// Ratio that kl_times_ratio uses: the ratio of the policy term, or the token's own ratio.
constexpr std::int32_t kTimesRatio = 1, kTimesOwnRatio = 2;

struct PolicySpec {
  RatioLevel level = RatioLevel::kToken;
  Surrogate surrogate = Surrogate::kRatio;
  std::int32_t straight_through = 0;
  float log_ratio_min = 0.0f, log_ratio_max = 0.0f;  // -Inf, Inf: no limit
  float clip_low = 0.0f, clip_high = 0.0f;           // bounds on r; for kGeometricClip bounds on x
  float ratio_cap = 0.0f, dual_clip = 0.0f;          // Inf: no bound
  float tau_positive = 0.0f, tau_negative = 0.0f;
  float k_positive = 0.0f, lambda_positive = 0.0f, k_negative = 0.0f, lambda_negative = 0.0f;
  float quadratic = 0.0f;
  KlEstimator kl = KlEstimator::kNone;
  std::int32_t kl_straight_through = 0, kl_times_ratio = 0;      // 0, kTimesRatio or kTimesOwnRatio
  float kl_coef = 0.0f, kl_input_limit = 0.0f, kl_limit = 0.0f;  // the limits: Inf means none
  float selected_kl = 0.0f;
  std::int32_t selected_drops = 0;  // 0, kDropsAsClipped or kDrops
  float entropy_coef = 0.0f, entropy_scale = 1.0f;
  std::int32_t entropy_token_mean = 0;
  ImportanceLevel importance = ImportanceLevel::kNone;
  std::int32_t importance_of_current = 0, importance_mask = 0, gate = 0;
  float importance_low = 0.0f, importance_high = 0.0f, importance_limit = 0.0f;
  float gate_low = 0.0f, gate_high = 0.0f;
  float drop_above = 0.0f;  // Inf: no drop
  std::int32_t drop_by_rollout = 0;
  DenominatorKind denominator = DenominatorKind::kTokens;
  std::int32_t sequence_mean = 0;
  float horizon = 0.0f, scale = 1.0f;
  float kl_gradient_ratio = 0.0f;  // needs kl_straight_through and kToken; 0: none
  std::int32_t rollout_neutral = 0;
};

// Elements of `metrics`, in this order. Means are over tokens, and are 0 if no token counts.
enum PolicyMetric : int {
  kPolicyMetricLoss,
  kPolicyMetricPolicyLoss,  // this metric and the next two are weighted like the loss, without its coefficients
  kPolicyMetricKlLoss,
  kPolicyMetricEntropyLoss,
  kPolicyMetricNumTokens,
  kPolicyMetricNumSequences,  // sequences that have a token
  kPolicyMetricDenominator,   // D
  kPolicyMetricPolicySum,     // this metric and the next two are unweighted sums over tokens
  kPolicyMetricKlSum,
  kPolicyMetricEntropySum,
  kPolicyMetricClipFraction,      // p2 > p1; w != r; kGeometricClip: A > 0 and clipped; kDropsAsClipped: selected
  kPolicyMetricClipFractionDual,  // kRatio: dual_clip cuts; kGeometricClip: A < 0 and clipped
  kPolicyMetricClipFractionLow,   // r < clip_low and A < 0
  kPolicyMetricClipFractionHigh,  // r > clip_high and A > 0
  kPolicyMetricPpoKl,             // mean of -x for kToken, of fl(o - l) otherwise
  kPolicyMetricKl,
  kPolicyMetricEntropy,
  kPolicyMetricRatioMean,
  kPolicyMetricRatioMax,
  kPolicyMetricImportanceMean,
  kPolicyMetricImportanceMax,           // at least 0, so negative weights give 0
  kPolicyMetricImportanceClipFraction,  // w != e
  kPolicyMetricImportanceEss,           // sum(w)^2 / sum(w^2) / number of tokens
  kPolicyMetricMismatchMean,            // |fl(o - m)|
  kPolicyMetricMismatchMax,
  kPolicyMetrics,
};

constexpr float kRatioMetricsLimit = 20.0f;

struct PolicyLossParams {
  Sequences sequences;
  PolicyTokens logprob;       // [slots]
  PolicyTokens old_logprob;   // [slots], or null
  PolicyTokens advantage;     // [slots], or one value per sequence
  PolicyTokens ref_logprob;   // [slots]; required unless kl is kNone
  PolicyTokens importance;    // [slots] rollout_logprob; for kGiven the weights, which may be one per sequence; null:
                              // none
  PolicyTokens entropy;       // [slots], or null
  PolicyTokens selected;      // [slots], or null
  PolicyTokens token_weight;  // [slots], or null: 1
  TokenMask mask;             // [slots]
  PolicySpec spec;
  const float* denominator = nullptr;  // one element on the device, or null: denominator_value
  float denominator_value = 0.0f;      // 0: spec.denominator decides
  float* loss = nullptr;               // [1]
  float* metrics = nullptr;            // [kPolicyMetrics]
  float* ratio_metrics = nullptr;      // [kMismatchMetrics], or null: not wanted. One more pass computes
                                       // mismatch_metrics of logprob and old_logprob, with the limit kRatioMetricsLimit
  float* d_logprob = nullptr;          // [slots], contiguous, or null: not wanted
  float* d_entropy = nullptr;          // [slots], contiguous, or null: not wanted
  void* workspace = nullptr;           // policy_loss_workspace_bytes(...), 16-byte aligned
};
std::int64_t policy_loss_workspace_bytes(const PolicyLossParams& p, Device device);
// For bad offsets (docs/tokens.md) the CPU throws InvalidArgument. On a GPU bad offsets make the loss NaN.
void policy_loss(const PolicyLossParams& p, Device device, Stream stream);

// Multiplies one or two arrays [count] by *factor in place (a null array is skipped). If the factor is 1, the arrays
// are neither read nor written.
struct ScaleGradientsParams {
  float *first = nullptr, *second = nullptr;
  std::int64_t count = 0;
  const float* factor = nullptr;
};
void scale_gradients(const ScaleGradientsParams& p, Device device, Stream stream);

}  // namespace rlk
