// THE CONTRACT of preference_loss: losses of pairs of sequences, one chosen and one rejected, from their log-probabilities,
// with the gradients. Rules are those of docs/numerics.md. Written formulas are fp32 with the roundings shown, in the order
// shown; logsigmoid, sigmoid, exp, expm1, log1p and log2 are those of math/. The number `beta` and constants made of the
// options (margin, half, log_keep, log_flip, unflipped) are computed in double and rounded once. x * y is fl(x y), and +0
// of a zero and an infinity.
//
// A side (w chosen, l rejected) has, with n = fl(max(count, 1)) where counts are given:
//   a = fl(policy - ref), or policy without a reference
//   x = a, or fl(a / n) with Average::kLogprob
//   score kLogRatio: s = x, s' = 1      kForwardKl: s = -expm1(-x), s' = exp(-x)
//     kJsDivergence: s = fl(ln2 + logsigmoid(x)), s' = sigmoid(-x)
//     kAlphaDivergence, c = alpha - 1: t = min(fl(c x), 80); s = fl(expm1(t) / c), s' = exp(t), or 0 where t was cut
//     kAlphaPo: t = fl(-alpha x), s = fl(-expm1(t) / alpha), s' = exp(t)
//   with Average::kScore s = fl(s / n).  h = ds / dpolicy = s', or fl(s' / n) with either average
//   reward = fl(beta x), of kAlphaPo fl(beta s)
// A pair's fl(s_w - s_l) is, where both are the same infinity, that of the sign of fl(x_w - x_l), or 0 where x are equal;
// delta = fl(fl(s_w - s_l) - margin), z = fl(beta delta); c = fl(beta s_w), r = fl(beta s_l); with
// P(v) = logsigmoid(v), S(v) = sigmoid(v), e = label_smoothing, k = fl(1 - e); dz, dc, dr are the derivatives of L:
//   kSigmoid : L = fl(-fl(k P(z)) - fl(e P(-z)))             dz = fl(fl(e S(z)) - fl(k S(-z)))     e = 0: no terms of e
//   kHinge   : L = max(fl(1 - z), 0)                         dz = -1 where fl(1 - z) > 0, else 0
//   kIpo     : d = fl(delta - half), L = fl(d d)             g_w = fl(2 d), g_l = -g_w
//   kExoPair : A = fl(P(z) - log_keep), B = fl(P(-z) - log_flip); L = fl(S(z) * A + S(-z) * B)
//              dz = fl(S(z) S(-z)) * fl(A - B)
//   kNcaPair : L = fl(fl(-P(c) - fl(P(-c) / 2)) - fl(P(-r) / 2))     dc = fl(fl(S(c) / 2) - S(-c)), dr = fl(S(r) / 2)
//   kRobust  : L = fl(fl(-fl(k P(z)) + fl(e P(-z))) / unflipped), dz = fl(fl(-fl(k S(-z)) - fl(e S(z))) / unflipped)
//              e = 0: no terms of e
//   kBcoPair : L = fl(-P(c) - P(-r))                         dc = -S(-c), dr = S(r)
//   kSppoHard: d_w = fl(s_w - half), d_l = fl(s_l + half); L = fl(fl(d_w d_w) + fl(d_l d_l)); g_w = fl(2 d_w), g_l = fl(2 d_l)
//   kApoZero : L = fl(S(-c) + S(r))                          dc = -fl(S(c) S(-c)), dr = fl(S(r) S(-r))
//   kApoDown : L = fl(S(c) + S(-z))                          dc = fl(S(c) S(-c)), dz = -fl(S(z) S(-z))
//   kDiscopop: q = fl(z / tau), m = S(q), o = S(-q), E = exp(fl(P(q) - z)), which is e^-z m, 0 of -Inf; L = fl(-(P(z) * o) + E);
//              dz = fl(fl(-fl(S(-z) o) - E) + fl(P(z) * m + E) * fl(o / tau)), of an infinite E fl(E fl(fl(o / tau) - 1))
//   kOrpo    : u = -expm1(s_w), v = -expm1(s_l); z = fl(fl(s_w - s_l) - fl(M(s_w) - M(s_l))), 0 where u = v = 0;
//              L = fl(-fl(beta P(z))), g = fl(beta / fma(exp(fl(s_w - s_l)), v, u)); g_w = -g, g_l = g * fl(u / v), 0 where
//              u = v = 0: in exact numbers beta S(-z) / u and beta S(-z) / v. L = g_w = g_l = 0 of a side whose count is
//              below 1: what has no token has no odds
//              M(v) = log(1 - e^v): fl(ln2 log2(-expm1(v))) where v > -fl(ln 2), else log1p(-exp(v))
//   others   : g_w = fl(beta fl(dc + dz)), g_l = fl(beta fl(dr - dz)), what is absent left out
//   kKto     : no pairs; sides may differ in number. K = max(kl, 0), NaN if kl is. v = fl(beta fl(s - K)) of a chosen one,
//              fl(beta fl(K - s)) of a rejected one; L = S(-v), g = -+ fl(beta fl(S(v) S(-v))), negative for chosen ones;
//              both times side weight, last. losses: the chosen ones', then the rejected ones'
//   loss     = L; with aligned: weight = exp(fl(A_w + A_l)), A = fl(aligned / n) or aligned without counts,
//              loss = L * weight; with nll_weight: loss = fl(loss - fl(nll_weight N)), N = fl(policy_w / n) or policy_w
//   d_policy = g * h; with aligned that * weight; of the chosen side with nll_weight fl(that - fl(nll_weight / n))
// Sorted (optimal transport): kAot sorts fl(policy_w - policy_l) and fl(ref_w - ref_l), kAotUnpaired fl(policy - ref) of
// either side, ascending, equal ones by index, NaN last. Loss k is kSigmoid's of delta = the k-th of the first less the k-th of
// the second. ranks[0, i] is the place of pair i among the first, ranks[1, i] among the second.
//   metrics  = means of losses, chosen rewards, rejected rewards, margins fl(reward_w - reward_l) and of reward_w > reward_l:
//              sums over pairs by math/tree_sum.h, fl(sum / fl(num)); 0 of none. kKto's margin is the
//              chosen mean less the rejected mean and the last is NaN.
// A NaN result is canonical. A pair has the same bits in any batch (but for the sorted ones), and on every backend.
// Enqueues on `stream`; neither allocates nor synchronises. CPU backends ignore `stream`.
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
  const float* aligned = nullptr;       // [num] or null; of both sides or of none
  const std::int64_t* count = nullptr;  // [num] or null
  std::int64_t policy_stride = 1, reference_stride = 1, aligned_stride = 1, count_stride = 1;  // elements
  std::int64_t num = 0;
  float* reward = nullptr;    // [num]
  float* d_policy = nullptr;  // [num]
};

struct PreferenceLossParams {
  PreferenceSide chosen, rejected;
  const float* kl = nullptr;      // [1], of kKto; null: 0
  float* losses = nullptr;        // [chosen.num], of kKto [chosen.num + rejected.num]
  float* metrics = nullptr;       // [5]
  std::int32_t* ranks = nullptr;  // [2, num], where sorted
  std::int32_t* order = nullptr;  // [2, num], where sorted: memory to work in
  float beta = 0.1f, label_smoothing = 0.0f, margin = 0.0f, tau = 0.05f, alpha = 1.0f, nll_weight = 0.0f;
  float half = 0.0f;                                   // 1 / (2 beta)
  float log_keep = 0.0f;                               // log(1 - label_smoothing)
  float log_flip = 0.0f;                               // log(label_smoothing)
  float unflipped = 1.0f;                              // 1 - 2 label_smoothing
  float chosen_weight = 1.0f, rejected_weight = 1.0f;  // kKto alone
  Preference kind = Preference::kSigmoid;
  PreferenceSort sort = PreferenceSort::kNone;
  PreferenceScore score = PreferenceScore::kLogRatio;
  PreferenceAverage average = PreferenceAverage::kNone;
};

// d = dlosses[the loss of a side's element] * d_policy of the forward, +0 of a zero and an infinity.
struct PreferenceGradient {
  const float* d_policy = nullptr;     // [num]
  const std::int32_t* rank = nullptr;  // [num]: which loss; null: number `first` + index
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
