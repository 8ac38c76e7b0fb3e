// The kernels of group_advantage by the names that the host looks up. Compiled for gfx90a and gfx942, and for the emulation.
#include "hip/group_advantage/groups.h"

// `call` of the wave's group or sequence `i`.
#define RLK_GROUP_KERNEL(name, call)                                                                      \
  RLK_KERNEL(rlk::hip::kGroupAdvantageThreads)                                                            \
  rlk_group_advantage_##name(rlk::GroupAdvantageParams p, std::int64_t first_block, std::int64_t waves) { \
    const std::int64_t i = rlk::hip::wave_of_launch(first_block);                                         \
    if (i < waves) rlk::call(rlk::hip::HalfWave(), p, i);                                                 \
  }

RLK_GROUP_KERNEL(find_groups, find_group)
RLK_GROUP_KERNEL(place_members, place_member)
RLK_GROUP_KERNEL(ranges, run_range)
RLK_GROUP_KERNEL(ids, run_ids)

RLK_KERNEL(rlk::hip::kGroupBatchThreads)
rlk_group_advantage_batch(rlk::GroupAdvantageParams p, std::int64_t, std::int64_t) {
  rlk::statistics_of_batch(rlk::hip::WaveBlock(), p, static_cast<rlk::BatchStatistics*>(p.workspace));
}
