// The kernels of preference_loss under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation. The formulas are in kernels/losses/preference_pair.h, shared with the CPU and CUDA.
#include "hip/common/wave.h"
#include "hip/preference_loss/launches.h"

namespace rlk::hip {
RLK_DEVICE std::int64_t pair_index(std::int64_t first_block) {
  return (first_block + block_id_x()) * kPairThreads + thread_id();
}
}  // namespace rlk::hip

RLK_KERNEL(rlk::kOrderThreads)
rlk_preference_loss_order(rlk::PreferenceLossParams p, std::int64_t first_block, std::int64_t runs, bool first) {
  rlk::preference_order_run<rlk::hip::GlobalMemory>(
      p, {first_block + rlk::hip::block_id_x(), runs}, first, rlk::hip::thread_id(),
      *reinterpret_cast<rlk::OrderShared*>(rlk::hip::lds()), [] { rlk::hip::block_barrier(); },
      [] { rlk::hip::block_barrier(); });
}
RLK_KERNEL(rlk::hip::kPairThreads)
rlk_preference_loss_merge(rlk::PreferenceLossParams p, std::int64_t first_block, std::int64_t blocks, std::int32_t run,
                          bool from_first) {
  const rlk::PreferenceHalf half(first_block + rlk::hip::block_id_x(), blocks);
  const std::int64_t at = std::int64_t{half.block} * rlk::hip::kPairThreads + rlk::hip::thread_id();
  if (at < p.chosen.num) {
    rlk::preference_merge<rlk::hip::GlobalMemory>(p, half.which, static_cast<std::int32_t>(at), run, from_first);
  }
}
RLK_KERNEL(rlk::hip::kPairThreads)
rlk_preference_loss_pairs(rlk::PreferenceLossParams p, std::int64_t first_block) {
  const std::int64_t i = rlk::hip::pair_index(first_block);
  if (i >= p.chosen.num) return;
  if (p.sort != rlk::PreferenceSort::kNone) rlk::preference_ranks<rlk::hip::GlobalMemory>(p, i);
  rlk::preference_pair<rlk::hip::GlobalMemory>(p, i);
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
