// Host side of the HIP backend of preference_loss: what would corrupt memory, its launches.
#include "preference_loss.h"

#include "hip/common/launch.h"
#include "launches.h"
#include "rlk/kernels/preference_loss_check.h"

namespace rlk::hip {

void preference_loss(const PreferenceLossParams& p, int device, Stream stream) {
  check_preference_loss(p);
  const std::int64_t losses = preference_losses(p);
  const bool pairs = p.kind != Preference::kKto;
  if (p.sort != PreferenceSort::kNone && losses > 0) {
    launch_blocks(device, stream, {kPairThreads, 0}, "rlk_preference_loss_rank", ceil_div(2 * losses, kPairThreads), p);
  }
  launch_blocks(device, stream, {kPairThreads, 0}, pairs ? "rlk_preference_loss_pairs" : "rlk_preference_loss_unpaired",
                ceil_div(losses, kPairThreads), p);
  launch_blocks(device, stream, {kPreferenceMetricThreads, kMetricLds}, "rlk_preference_loss_metrics", 1, p);
}

void preference_loss_backward(const PreferenceLossBackwardParams& p, int device, Stream stream) {
  launch_blocks(device, stream, {kPairThreads, 0}, "rlk_preference_loss_backward",
                ceil_div(p.chosen.num + p.rejected.num, kPairThreads), p);
}

}  // namespace rlk::hip
