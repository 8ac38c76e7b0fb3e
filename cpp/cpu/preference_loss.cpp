// CPU backend of preference_loss: a few numbers a pair, on the caller's thread or, of many pairs, on several.
#include "preference_loss.h"

#include <algorithm>
#include <numeric>

#include "float_environment.h"
#include "rlk/kernels/preference_loss_check.h"
#include "rlk/kernels/preference_pair.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTaskPairs = 512;  // below these a thread's wake-up costs more than its help

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

float metric_sum(const PreferenceLossParams& p, int metric) {
  constexpr int kLanes = kPreferenceMetricThreads, kChunk = 2048;
  const std::int64_t num = preference_metric_items(p, metric);
  float sum = 0.0f;
  for (std::int64_t chunk = 0; chunk < num; chunk += kChunk) {
    float lanes[kLanes] = {};
    for (std::int64_t i = chunk; i < std::min(chunk + kChunk, num); ++i) {
      lanes[i % kLanes] = add_rn(lanes[i % kLanes], preference_metric_item<PlainMemory>(p, metric, i));
    }
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lanes[i] = add_rn(lanes[2 * i], lanes[2 * i + 1]);
    }
    sum = add_rn(sum, lanes[0]);
  }
  return sum;
}

}  // namespace

void preference_loss(const PreferenceLossParams& p) {
  check_preference_loss(p);
  const FloatEnvironment environment;
  if (p.sort != PreferenceSort::kNone) rank(p);
  parallel_for(preference_losses(p), kTaskPairs, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment of_thread;
    for (std::int64_t i = begin; i < end; ++i) preference_item<PlainMemory>(p, i);
  });
  float sums[kPreferenceMetrics];
  for (int m = 0; m < kPreferenceMetrics; ++m) sums[m] = metric_sum(p, m);
  preference_metrics<PlainMemory>(p, sums);
}

void preference_loss_backward(const PreferenceLossBackwardParams& p) {
  const FloatEnvironment environment;
  for (std::int64_t i = 0; i < p.chosen.num + p.rejected.num; ++i) preference_gradient<PlainMemory>(p, i);
}

}  // namespace rlk::cpu
