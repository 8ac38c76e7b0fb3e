// The kernels of preference_loss by the names that the host looks up. Compiled for gfx90a and gfx942, and for the emulation.
// The formulas stand in rlk/kernels/preference_pair.h, shared with the CPU and CUDA.
#include "hip/common/wave.h"
#include "hip/preference_loss/launches.h"

namespace rlk::hip {
RLK_DEVICE std::int64_t pair_index(std::int64_t first_block) {
  return (first_block + block_id_x()) * kPairThreads + thread_id();
}
}  // namespace rlk::hip

RLK_KERNEL(rlk::hip::kPairThreads)
rlk_preference_loss_rank(rlk::PreferenceLossParams p, std::int64_t first_block) {
  const std::int64_t i = rlk::hip::pair_index(first_block);
  if (i < 2 * p.chosen.num) rlk::preference_rank<rlk::hip::GlobalMemory>(p, i);
}
RLK_KERNEL(rlk::hip::kPairThreads)
rlk_preference_loss_pairs(rlk::PreferenceLossParams p, std::int64_t first_block) {
  const std::int64_t i = rlk::hip::pair_index(first_block);
  if (i < p.chosen.num) rlk::preference_pair<rlk::hip::GlobalMemory>(p, i);
}
RLK_KERNEL(rlk::hip::kPairThreads)
rlk_preference_loss_unpaired(rlk::PreferenceLossParams p, std::int64_t first_block) {
  const std::int64_t i = rlk::hip::pair_index(first_block);
  if (i < rlk::preference_losses(p)) rlk::preference_unpaired<rlk::hip::GlobalMemory>(p, i);
}
RLK_KERNEL(rlk::kPreferenceMetricThreads)
rlk_preference_loss_metrics(rlk::PreferenceLossParams p, std::int64_t) {
  rlk::preference_metrics_block<rlk::hip::GlobalMemory>(
      p, rlk::hip::thread_id(), reinterpret_cast<float*>(rlk::hip::lds()), [] { rlk::hip::block_barrier(); });
}
RLK_KERNEL(rlk::hip::kPairThreads)
rlk_preference_loss_backward(rlk::PreferenceLossBackwardParams p, std::int64_t first_block) {
  const std::int64_t i = rlk::hip::pair_index(first_block);
  if (i < p.chosen.num + p.rejected.num) rlk::preference_gradient<rlk::hip::GlobalMemory>(p, i);
}
