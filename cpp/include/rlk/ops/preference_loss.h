// THE CONTRACT of `preference_loss`: losses of pairs of sequences, one chosen and one rejected, from their
// log-probabilities, with the gradients. Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the
// roundings and the order that they show; logsigmoid, sigmoid, exp, expm1, log1p and log2 come from math/. `beta`
// and the constants made from options (margin, half, log_keep, log_flip, unflipped) are computed in double and rounded
// once. x * y is fl(x y), and +0 for zero times infinity.
//
// Each side (w chosen, l rejected) has the following values, with n = fl(max(count, 1)) if counts are given:
//   a = fl(policy - ref), or policy without a reference
//   x = a, or fl(a / n) with Average::kLogprob
//   score kLogRatio: s = x, s' = 1      kForwardKl: s = -expm1(-x), s' = exp(-x)
//     kJsDivergence: s = fl(ln2 + logsigmoid(x)), s' = sigmoid(-x)
//     kAlphaDivergence, c = alpha - 1: t = min(fl(c x), 80); s = fl(expm1(t) / c), s' = exp(t), or 0 where t was cut
//     kAlphaPo: t = fl(-alpha x), s = fl(-expm1(t) / alpha), s' = exp(t)
//   with Average::kScore s = fl(s / n).  h = ds / dpolicy = s', or fl(s' / n) with kLogprob or kScore
//   reward = fl(beta x); for kAlphaPo fl(beta s)
// Where s_w and s_l are the same infinity, fl(s_w - s_l) counts as an infinity with the sign of fl(x_w - x_l), or as 0
// where x_w = x_l.
// A pair has delta = fl(fl(s_w - s_l) - margin), z = fl(beta delta), c = fl(beta s_w) and r = fl(beta s_l). With
// P(v) = logsigmoid(v), S(v) = sigmoid(v), e = label_smoothing and k = fl(1 - e), L is the loss. dz, dc, dr are the
// derivatives of L along z, c, r. g_w, g_l are the derivatives of L along s_w, s_l:
//   kSigmoid : L = fl(-fl(k P(z)) - fl(e P(-z)))             dz = fl(fl(e S(z)) - fl(k S(-z)))
//              e = 0: without the e terms
//   kHinge   : L = max(fl(1 - z), 0)                         dz = -1 where fl(1 - z) > 0, else 0
//   kIpo     : d = fl(delta - half), L = fl(d d)             g_w = fl(2 d), g_l = -g_w
//   kExoPair : A = fl(P(z) - log_keep), B = fl(P(-z) - log_flip); L = fl(S(z) * A + S(-z) * B)
//              dz = fl(S(z) S(-z)) * fl(A - B)
//   kNcaPair : L = fl(fl(-P(c) - fl(P(-c) / 2)) - fl(P(-r) / 2))     dc = fl(fl(S(c) / 2) - S(-c)), dr = fl(S(r) / 2)
//   kRobust  : L = fl(fl(-fl(k P(z)) + fl(e P(-z))) / unflipped), dz = fl(fl(-fl(k S(-z)) - fl(e S(z))) / unflipped)
//              e = 0: without the e terms
//   kBcoPair : L = fl(-P(c) - P(-r))                         dc = -S(-c), dr = S(r)
//   kSppoHard: d_w = fl(s_w - half), d_l = fl(s_l + half); L = fl(fl(d_w d_w) + fl(d_l d_l));
//              g_w = fl(2 d_w), g_l = fl(2 d_l)
//   kApoZero : L = fl(S(-c) + S(r))                          dc = -fl(S(c) S(-c)), dr = fl(S(r) S(-r))
//   kApoDown : L = fl(S(c) + S(-z))                          dc = fl(S(c) S(-c)), dz = -fl(S(z) S(-z))
//   kDiscopop: q = fl(z / tau), m = S(q), o = S(-q), E = exp(fl(P(q) - z)), which is e^-z m, or 0 for -Inf;
//   L = fl(-(P(z) * o) + E);
//              dz = fl(fl(-fl(S(-z) o) - E) + fl(P(z) * m + E) * fl(o / tau)), or fl(E fl(fl(o / tau) - 1)) for an
//              infinite E
//   kOrpo    : u = -expm1(s_w), v = -expm1(s_l); z = fl(fl(s_w - s_l) - fl(M(s_w) - M(s_l))), 0 where u = v = 0;
//              L = fl(-fl(beta P(z))), g = fl(beta / fma(exp(fl(s_w - s_l)), v, u)); g_w = -g, g_l = g * fl(u / v),
//              0 where u = v = 0. In exact numbers |g_w| and |g_l| are beta S(-z) / u and beta S(-z) / v.
//              L = g_w = g_l = 0 if the count of a side is below 1, since a side without a token has no odds
//              M(v) = log(1 - e^v): fl(ln2 log2(-expm1(v))) where v > -fl(ln 2), else log1p(-exp(v))
//   others   : g_w = fl(beta fl(dc + dz)), g_l = fl(beta fl(dr - dz)); a derivative that a loss lacks is left out
//   kKto     : no pairs, so the sides may have different numbers of answers. K = max(kl, 0), NaN if kl is NaN.
//              v = fl(beta fl(s - K)) for a chosen answer, fl(beta fl(K - s)) for a rejected answer. L = S(-v),
//              g = -+ fl(beta fl(S(v) S(-v))), negative for a chosen answer. At the end, L and g are multiplied by the
//              side's weight. losses holds the losses of chosen answers, then of rejected answers
//   loss     = L; with aligned: weight = exp(fl(A_w + A_l)), A = fl(aligned / n) or aligned without counts,
//              loss = L * weight; with nll_weight: loss = fl(loss - fl(nll_weight N)), N = fl(policy_w / n) or policy_w
//   d_policy = g * h; with `aligned` it is multiplied by `weight`. With nll_weight, d_policy of the chosen side then
//   becomes fl(d_policy - fl(nll_weight / n))
// Sorted losses (optimal transport) sort two arrays in ascending order, equal values by index, NaN last. For kAot these
// are fl(policy_w - policy_l) and fl(ref_w - ref_l); for kAotUnpaired they are fl(policy - ref) of each side. Loss k is
// that of kSigmoid, with delta = the k-th value of the first array minus the k-th value of the second. ranks[0, i] is
// the place of pair i in the first array, ranks[1, i] its place in the second array.
//   metrics  = means of losses, chosen rewards, rejected rewards, margins fl(reward_w - reward_l) and of
//              reward_w > reward_l. A mean is fl(sum / fl(num)) with the sum over pairs by math/tree_sum.h, or 0
//              without pairs. For kKto the margin is the chosen mean minus the rejected mean, and the last metric is
//              NaN.
// Every NaN result is the canonical NaN. A pair has the same bits in any batch (except for the sorted losses), and on
// every backend. The call enqueues its work on `stream`; it neither allocates nor synchronises. CPU backends ignore
// `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

enum class Preference : std::uint8_t {
  kSigmoid,
  kHinge,
  kIpo,
  kExoPair,
  kNcaPair,
  kRobust,
  kBcoPair,
  kSppoHard,
  kApoZero,
  kApoDown,
  kDiscopop,
  kOrpo,
  kKto,
};
enum class PreferenceSort : std::uint8_t { kNone, kAot, kAotUnpaired };
enum class PreferenceScore : std::uint8_t { kLogRatio, kForwardKl, kJsDivergence, kAlphaDivergence, kAlphaPo };
enum class PreferenceAverage : std::uint8_t { kNone, kLogprob, kScore };

constexpr int kPreferenceMetrics = 5;

struct PreferenceSide {
  const float* policy = nullptr;        // [num], sums or averages of log-probabilities
  const float* reference = nullptr;     // [num] or null
  const float* aligned = nullptr;       // [num] or null; given for both sides or for neither
  const std::int64_t* count = nullptr;  // [num] or null
  std::int64_t policy_stride = 1, reference_stride = 1, aligned_stride = 1, count_stride = 1;  // in elements
  std::int64_t num = 0;
  float* reward = nullptr;    // [num]
  float* d_policy = nullptr;  // [num]
};

struct PreferenceLossParams {
  PreferenceSide chosen, rejected;
  const float* kl = nullptr;      // [1], for kKto; null: 0
  float* losses = nullptr;        // [chosen.num]; for kKto [chosen.num + rejected.num]
  float* metrics = nullptr;       // [5]
  std::int32_t* ranks = nullptr;  // [2, num], for sorted losses
  std::int32_t* order = nullptr;  // [2, num], for sorted losses: scratch memory
  float beta = 0.1f, label_smoothing = 0.0f, margin = 0.0f, tau = 0.05f, alpha = 1.0f, nll_weight = 0.0f;
  float half = 0.0f;                                   // 1 / (2 beta)
  float log_keep = 0.0f;                               // log(1 - label_smoothing)
  float log_flip = 0.0f;                               // log(label_smoothing)
  float unflipped = 1.0f;                              // 1 - 2 label_smoothing
  float chosen_weight = 1.0f, rejected_weight = 1.0f;  // for kKto alone
  Preference kind = Preference::kSigmoid;
  PreferenceSort sort = PreferenceSort::kNone;
  PreferenceScore score = PreferenceScore::kLogRatio;
  PreferenceAverage average = PreferenceAverage::kNone;
};

// d = dlosses[loss of the side's element] * d_policy of the forward, where zero times infinity is +0.
struct PreferenceGradient {
  const float* d_policy = nullptr;     // [num]
  const std::int32_t* rank = nullptr;  // [num]: index of the loss; null: `first` + index
  std::int64_t first = 0, num = 0;
  float* d = nullptr;  // [num]
};
struct PreferenceLossBackwardParams {
  const float* dlosses = nullptr;
  std::int64_t dlosses_stride = 1, num_losses = 0;
  PreferenceGradient chosen, rejected;
};

void preference_loss(const PreferenceLossParams& p, Device device, Stream stream);
void preference_loss_backward(const PreferenceLossBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
