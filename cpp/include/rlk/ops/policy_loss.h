// THE CONTRACT of policy_loss: the clipped policy objectives, their KL and entropy terms, gradients and metrics, in one
// pass over per-token log-probabilities. Rules are those of docs/numerics.md; docs/objectives.md has the names of papers
// and frameworks. Written formulas are fp32, one rounding an operation, in the order shown; exp, expm1, log2 and sigmoid
// are those of math/. Minimum and maximum keep their first operand where the second is no improvement, and so a NaN in it.
//
// x * y is fl(x y), and +0 of a zero and an infinity, whose limit it is. A term whose coefficient is 0 is in no sum.
// Sequences, sums: rlk/tokens.h. A token has l = logprob, o = old_logprob (l itself where there is none), A = advantage,
// f = ref_logprob, m = rollout_logprob, H = entropy; n the number of a sequence's tokens, sum() over these.
//
// Log-ratio  x, and its ratio r = exp(x) with slope r' = r, or 0 where a limit holds:
//   kToken      x = limited(fl(l - o))
//   kSequence   x = limited(sum(fl(l - o)));  kGeometric: that sum / n, before it is limited
//   limited(x) = min(max(x, log_ratio_min), log_ratio_max)
//   kGeometricClip sums min(fl(l - o), clip_high) for A > 0, max(fl(l - o), clip_low) for A < 0, 0 for A = 0
//   kGamma sums fl(l - o) limited to +-20, and where there are importance weights fl(log w) limited to [ln 1e-8, 20];
//   x is limited to [ln 1e-8, 20] there
// Policy term P, its slopes P_x along x and P_l along l; no term and no slope where A = 0:
//   kRatio          p1 = -A min(r, ratio_cap), p2 = -A min(max(r, clip_low), clip_high); P = max(p1, p2); for A < 0
//                   P = min(P, fl(-A dual_clip)); P_x = -A r' of what was chosen, 0 where it does not depend on r;
//                   p1 where they are equal
//   kWeighted       P = ((-w) A) * l, P_l = (-w) A, w = min(max(r, clip_low), clip_high)
//   kLogprob        the same, w = 1
//   kSigmoid        s = sigmoid(t (r - 1)), t = tau_positive for A > 0, else tau_negative; P = (-(s (4/t))) A,
//                   P_x = -A ((4 s sigmoid(-t (r - 1))) * r')
//   kGeometricClip  P = -(sum(A) / n) r of every token, r with importance weights exp(fl(x + sum(log(w + 1e-10)) / n));
//                   P_l = P where A is not 0 and the log-ratio not clipped, else 0
//   kGamma          kWeighted with w = exp((lambda + k x) - lambda r), 0 where that is infinite; k and lambda by A >= 0
//   kQuadratic      d = fl(l - o); P = fl((quadratic / 2 d) d - l A), Inf where both are; P_l = -(A - quadratic d)
// Importance weight w of rollout: d = fl(o - m), or fl(l - m) with importance_of_current, d itself, summed or averaged by
// importance_level, limited to +-importance_limit; e = exp(d); w = min(max(e, low), high), or, with importance_mask, e
// inside of [low, high] and 0 outside. kGiven: `importance` itself. With gate: 0 for a sequence whose exp(sum(d) / n) is
// not in [gate_low, gate_high]. P, P_x, P_l become P * w, P_x * w, P_l * w (kGamma and kGeometricClip use it otherwise:
// above); where it is a gate's, or a drop's below, 0 whatever they are.
// With rollout_neutral differences to an m that is NaN are +0: the token's weight is 1 within its bounds.
// Drop: sequences with sum(fl((m or o) - l)) / n not <= drop_above lose the policy terms of tokens with A < 0.
// KL term K of e = limited(fl(f - l)) (+-kl_input_limit), K_l its slope, 0 where a limit holds:
//   k1, k2, k3, abs: as ops/kl.h; with kl_straight_through K_l = fl(l - f) whatever holds, and with kl_gradient_ratio
//   K_l * min(r, kl_gradient_ratio); with kl_times_ratio K * r and its slope, of k3 by G and in closed form, as of
//   kOldLogprob there: G = exp(fl(f - o)) where r is a token's and no limit holds, else exp(fl(x + e)); where the ratio's
//   limit holds the slope is K_l * r, of k3 and e > 16 min(r, largest) - G. With kTimesOwnRatio r is exp(fl(l - o)) here,
//   whatever the ratio of P is: K and K_l are those of kOldLogprob, and nothing of K reaches other tokens.
//   K is then limited to +-kl_limit
// Selected tokens (an array, not zero) add fl(selected_kl w) * |fl(l - o)| to P and its slope to P_l, or with selected_drops
// have no policy term. A P that is infinite stays what it is.
// With token_weight u, of each token, P, P_x, P_l, what K and its slope are behind the limit, and H become fl(u x), A of
// the sums of the shared gradient fl(u fl(A w)), and K of what kl_times_ratio gives other tokens fl(u K). Not of
// kGeometricClip. D and n count tokens all the same.
// Weight of a sequence's tokens: q = scale / D, / horizon where that is not 0, and / n with sequence_mean; 0 where D or n
// is 0, NaN where D is negative, infinite or NaN. D = denominator, else the number of tokens, of sequences, or of sequences that have a token. A weight of 0 gives 0,
// whatever it multiplies.
// Gradient: d_logprob = weight fma(kl_coef, K_l, P_x + P_l); where the ratio is a sequence's and straight_through is not
// set, P_x is the same for its tokens: sum(w P_x) times 1, or 1 / n of kGeometric. Its only sums are sum(w A) over A > 0 or
// NaN, and over A < 0. Selected tokens that are dropped are in neither, and P_x is 0 where a sum is 0. What kl_times_ratio gives its tokens has
// the share h = 1, or 1 / n: of the token itself fl(fl(h min(K, largest)) + K_l) * r, of k3 fl(-(e * r) - fl(1 - h) * (K r)), and of
// the others fl(h r') * fl(sum(K) - K), K that of min(e, 80) there. d_entropy = -entropy_coef weight; with entropy_token_mean
// the weight of H is entropy_scale / number of tokens. Masked: +0.
// Loss: of each sequence sum(P), sum(K), sum(H) times its weight, summed over sequences: policy, kl, entropy;
//   loss = fma(-entropy_coef, entropy, fma(kl_coef, kl, policy)).
// Same bits for padded and packed sequences, any strides, and on every backend; gradients, given a denominator, for any
// split of the batch. NaN results are canonical. All functions enqueue on `stream`; they neither allocate nor synchronise.
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

// How selected tokens have no policy term: as a kind of clipping, whose fraction they are, or beside it.
constexpr std::int32_t kDropsAsClipped = 1, kDrops = 2;

// Which ratio kl_times_ratio is: that of the policy term, or the token's own.
constexpr std::int32_t kTimesRatio = 1, kTimesOwnRatio = 2;

struct PolicySpec {
  RatioLevel level = RatioLevel::kToken;
  Surrogate surrogate = Surrogate::kRatio;
  std::int32_t straight_through = 0;
  float log_ratio_min = 0.0f, log_ratio_max = 0.0f;  // -Inf, Inf: none
  float clip_low = 0.0f, clip_high = 0.0f;           // bounds on r; under kGeometricClip on x
  float ratio_cap = 0.0f, dual_clip = 0.0f;          // Inf: none
  float tau_positive = 0.0f, tau_negative = 0.0f;
  float k_positive = 0.0f, lambda_positive = 0.0f, k_negative = 0.0f, lambda_negative = 0.0f;
  float quadratic = 0.0f;
  KlEstimator kl = KlEstimator::kNone;
  std::int32_t kl_straight_through = 0, kl_times_ratio = 0;      // 0, kTimesRatio or kTimesOwnRatio
  float kl_coef = 0.0f, kl_input_limit = 0.0f, kl_limit = 0.0f;  // limits: Inf: none
  float selected_kl = 0.0f;
  std::int32_t selected_drops = 0;  // 0, kDropsAsClipped or kDrops
  float entropy_coef = 0.0f, entropy_scale = 1.0f;
  std::int32_t entropy_token_mean = 0;
  ImportanceLevel importance = ImportanceLevel::kNone;
  std::int32_t importance_of_current = 0, importance_mask = 0, gate = 0;
  float importance_low = 0.0f, importance_high = 0.0f, importance_limit = 0.0f;
  float gate_low = 0.0f, gate_high = 0.0f;
  float drop_above = 0.0f;  // Inf: none
  std::int32_t drop_by_rollout = 0;
  DenominatorKind denominator = DenominatorKind::kTokens;
  std::int32_t sequence_mean = 0;
  float horizon = 0.0f, scale = 1.0f;
  float kl_gradient_ratio = 0.0f;  // under kl_straight_through and kToken; 0: none
  std::int32_t rollout_neutral = 0;
};

// What comes out beside the loss, in this order. Means are over tokens; of no tokens they are 0.
enum PolicyMetric : int {
  kPolicyMetricLoss,
  kPolicyMetricPolicyLoss,  // weighted as the loss is, without coefficients: these three
  kPolicyMetricKlLoss,
  kPolicyMetricEntropyLoss,
  kPolicyMetricNumTokens,
  kPolicyMetricNumSequences,  // that have a token
  kPolicyMetricDenominator,   // D
  kPolicyMetricPolicySum,     // over tokens, unweighted: these three
  kPolicyMetricKlSum,
  kPolicyMetricEntropySum,
  kPolicyMetricClipFraction,      // p2 > p1; w != r; kGeometricClip: A > 0 and clipped; of kDropsAsClipped: selected
  kPolicyMetricClipFractionDual,  // kRatio: dual_clip holds; kGeometricClip: A < 0 and clipped
  kPolicyMetricClipFractionLow,   // r < clip_low and A < 0
  kPolicyMetricClipFractionHigh,  // r > clip_high and A > 0
  kPolicyMetricPpoKl,             // mean of -x of kToken, of fl(o - l) of others
  kPolicyMetricKl,
  kPolicyMetricEntropy,
  kPolicyMetricRatioMean,
  kPolicyMetricRatioMax,
  kPolicyMetricImportanceMean,
  kPolicyMetricImportanceMax,           // at least 0: negative weights give 0
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
  PolicyTokens advantage;     // [slots], or one a sequence
  PolicyTokens ref_logprob;   // [slots]; given where kl is not kNone
  PolicyTokens importance;    // [slots] rollout_logprob, or of kGiven weights, which may be one a sequence; null: none
  PolicyTokens entropy;       // [slots], or null
  PolicyTokens selected;      // [slots], or null
  PolicyTokens token_weight;  // [slots], or null: 1
  TokenMask mask;             // [slots]
  PolicySpec spec;
  const float* denominator =
      nullptr;  // one element on the device, or null: denominator_value, of which 0 means counting
  float denominator_value = 0.0f;
  float* loss = nullptr;           // [1]
  float* metrics = nullptr;        // [kPolicyMetrics]
  float* ratio_metrics = nullptr;  // [kMismatchMetrics], by one pass more: mismatch_metrics of logprob and
                                   // old_logprob, whose limit is kRatioMetricsLimit; or null: not wanted
  float* d_logprob = nullptr;      // [slots], contiguous, or null: not wanted
  float* d_entropy = nullptr;      // [slots], contiguous, or null: not wanted
  void* workspace = nullptr;       // policy_loss_workspace_bytes(...), 16-byte aligned
};
std::int64_t policy_loss_workspace_bytes(const PolicyLossParams& p, Device device);
// Bad offsets (docs/tokens.md) are an InvalidArgument on the CPU; on a GPU the loss is NaN.
void policy_loss(const PolicyLossParams& p, Device device, Stream stream);

// values *= *factor in place, [count], for one array or two (null: none); nothing is read or written where it is 1.
struct ScaleGradientsParams {
  float *first = nullptr, *second = nullptr;
  std::int64_t count = 0;
  const float* factor = nullptr;
};
void scale_gradients(const ScaleGradientsParams& p, Device device, Stream stream);

}  // namespace rlk
