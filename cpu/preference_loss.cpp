// CPU backend of the operator `preference_loss`: a few operations per pair. The caller's thread computes them, or
// several threads if there are many pairs.
#include "rlk/ops/preference_loss.h"

#include <algorithm>
#include <numeric>

#include "float_environment.h"
#include "kernels/losses/preference_loss_check.h"
#include "kernels/losses/preference_pair.h"
#include "preference_loss_simd.h"
#include "rlk/backends.h"
#include "thread_pool.h"
#include "tree_sum.h"

namespace rlk::cpu {
namespace {

const PreferenceLossLanes& lanes() { return RLK_CPU_LANES_IN_USE(preference_loss_simd); }

constexpr std::int64_t kTaskPairs = 512;  // a smaller task would save less time than waking a thread costs

void rank(const PreferenceLossParams& p) {
  for (int which = 0; which < 2; ++which) {
    std::int32_t* order = p.order + which * p.chosen.num;
    std::iota(order, order + p.chosen.num, 0);
    std::sort(order, order + p.chosen.num, [&](std::int32_t i, std::int32_t j) {
      return preference_before(preference_key<PlainMemory>(p, which, i), i, preference_key<PlainMemory>(p, which, j),
                               j);
    });
    for (std::int64_t k = 0; k < p.chosen.num; ++k) {
      p.ranks[which * p.chosen.num + order[k]] = static_cast<std::int32_t>(k);
    }
  }
}

// Calls f with a function that gives the term of `metric` at a position. f is compiled for each metric.
template <class F>
void with_metric(const PreferenceLossParams& p, int metric, const F& f) {
  const float *const w = p.chosen.reward, *const l = p.rejected.reward;
  switch (metric) {
    case 0:
      return f([of = p.losses](std::int64_t i) { return of[i]; });
    case 1:
      return f([w](std::int64_t i) { return w[i]; });
    case 2:
      return f([l](std::int64_t i) { return l[i]; });
    case 3:
      return f([w, l](std::int64_t i) { return sub_rn(w[i], l[i]); });
    default:
      return f([w, l](std::int64_t i) { return w[i] > l[i] ? 1.0f : 0.0f; });
  }
}

float metric_sum(const PreferenceLossParams& p, int metric) {
  float sum = 0.0f;
  with_metric(p, metric, [&](const auto& item) { sum = tree_sum(preference_metric_items(p, metric), item); });
  return sum;
}

}  // namespace

void preference_loss(const PreferenceLossParams& p) {
  check_preference_loss(p);
  const FloatEnvironment environment;
  if (p.sort != PreferenceSort::kNone) rank(p);
  parallel_for(preference_losses(p), kTaskPairs, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment of_thread;
    lanes().items(p, begin, end);
  });
  float sums[kPreferenceMetrics];
  for (int m = 0; m < kPreferenceMetrics; ++m) sums[m] = metric_sum(p, m);
  preference_metrics<PlainMemory>(p, sums);
}

void preference_loss_backward(const PreferenceLossBackwardParams& p) {
  check_preference_loss_backward(p);
  const FloatEnvironment environment;
  for (std::int64_t i = 0; i < p.chosen.num + p.rejected.num; ++i) preference_gradient<PlainMemory>(p, i);
}

}  // namespace rlk::cpu
