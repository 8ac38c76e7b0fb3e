// The kernels of group_advantage under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation.
#include "hip/group_advantage/groups.h"

// Defines a kernel in which each wave runs `call` for its group or sequence `i`.
#define RLK_GROUP_KERNEL(name, call)                                                                      \
  RLK_KERNEL(rlk::hip::kGroupAdvantageThreads)                                                            \
  rlk_group_advantage_##name(rlk::GroupAdvantageParams p, std::int64_t first_block, std::int64_t waves) { \
    const std::int64_t i = rlk::hip::wave_of_launch(first_block);                                         \
    if (i < waves) rlk::call(rlk::hip::HalfWave(), p, i);                                                 \
  }

RLK_GROUP_KERNEL(ranges, run_range)
RLK_GROUP_KERNEL(ids, run_ids)

RLK_KERNEL(rlk::kOrderThreads)
rlk_group_advantage_order_ids(rlk::GroupAdvantageParams p, std::int64_t first_block, bool first) {
  rlk::order_run<rlk::hip::GlobalMemory>(
      [&](std::int64_t i) { return rlk::group_id(p, i); }, static_cast<std::int32_t>(p.num_sequences),
      static_cast<std::int32_t>(first_block + rlk::hip::block_id_x()), rlk::hip::thread_id(),
      *reinterpret_cast<rlk::OrderShared*>(rlk::hip::lds()), rlk::order_memory(p, first),
      [] { rlk::hip::block_barrier(); }, [] { rlk::hip::block_barrier(); });
}
RLK_KERNEL(rlk::hip::kGroupAdvantageThreads)
rlk_group_advantage_merge_ids(rlk::GroupAdvantageParams p, std::int64_t first_block, std::int32_t run,
                              bool from_first) {
  const std::int64_t at =
      (first_block + rlk::hip::block_id_x()) * rlk::hip::kGroupAdvantageThreads + rlk::hip::thread_id();
  if (at < p.num_sequences) rlk::merge_ids(p, run, from_first, static_cast<std::int32_t>(at));
}

RLK_KERNEL(rlk::hip::kGroupBatchThreads)
rlk_group_advantage_batch(rlk::GroupAdvantageParams p, std::int64_t, std::int64_t) {
  rlk::statistics_of_batch(rlk::hip::WaveBlock(), p, static_cast<rlk::BatchStatistics*>(p.workspace));
}
