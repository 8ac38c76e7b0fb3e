// The host side of preference_loss on HIP checks memory safety and launches the kernels.
#include "rlk/ops/preference_loss.h"

#include "hip/common/launch.h"
#include "kernels/losses/preference_loss_check.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

void preference_loss(const PreferenceLossParams& p, int device, Stream stream) {
  check_preference_loss(p);
  const std::int64_t losses = preference_losses(p);
  const bool pairs = p.kind != Preference::kKto;
  if (p.sort != PreferenceSort::kNone && losses > 0) {
    const std::int64_t runs = order_runs(losses), blocks = ceil_div(losses, kPairThreads);
    launch_blocks(device, stream, {kOrderThreads, sizeof(OrderShared)}, "rlk_preference_loss_order", 2 * runs, p, runs,
                  order_begins_first(losses));
    for_each_merge(losses, [&](std::int32_t run, bool from_first) {
      launch_blocks(device, stream, {kPairThreads, 0}, "rlk_preference_loss_merge", 2 * blocks, p, blocks, run,
                    from_first);
    });
  }
  launch_blocks(device, stream, {kPairThreads, 0}, pairs ? "rlk_preference_loss_pairs" : "rlk_preference_loss_unpaired",
                ceil_div(losses, kPairThreads), p);
  launch_blocks(device, stream, {kPreferenceMetricThreads, kMetricLds}, "rlk_preference_loss_metrics", 1, p);
}

void preference_loss_backward(const PreferenceLossBackwardParams& p, int device, Stream stream) {
  check_preference_loss_backward(p);
  launch_blocks(device, stream, {kPairThreads, 0}, "rlk_preference_loss_backward",
                ceil_div(p.chosen.num + p.rejected.num, kPairThreads), p);
}

}  // namespace rlk::hip
