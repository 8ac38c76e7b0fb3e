// The host side of group_advantage on HIP checks memory safety and launches the kernels.
#include "rlk/ops/group_advantage.h"

#include "hip/common/launch.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

std::int64_t group_advantage_workspace_bytes(const GroupAdvantageParams& p, int) { return workspace_bytes_of_teams(p); }

void group_advantage(const GroupAdvantageParams& p, int device, Stream stream) {
  check_group_advantage(p);
  if (p.num_sequences == 0) return;
  RLK_CHECK(workspace_bytes_of_teams(p) == 0 || p.workspace != nullptr, "group_advantage: no workspace");
  const auto launch = [&](const char* name, std::int64_t waves) {
    launch_blocks(device, stream, {kGroupAdvantageThreads, 0}, name, ceil_div(waves, kGroupsOfBlock), p, waves);
  };
  if (p.group_ids != nullptr) {
    launch_blocks(device, stream, {kOrderThreads, sizeof(OrderShared)}, "rlk_group_advantage_order_ids",
                  order_runs(p.num_sequences), p, order_begins_first(p.num_sequences));
    for_each_merge(p.num_sequences, [&](std::int32_t run, bool from_first) {
      launch_blocks(device, stream, {kGroupAdvantageThreads, 0}, "rlk_group_advantage_merge_ids",
                    ceil_div(p.num_sequences, kGroupAdvantageThreads), p, run, from_first);
    });
  }
  if (reads_batch(p)) {
    launch_blocks(device, stream, {kGroupBatchThreads, kGroupBatchLdsBytes}, "rlk_group_advantage_batch", 1, p,
                  std::int64_t{1});
  }
  launch(p.group_ids != nullptr ? "rlk_group_advantage_ids" : "rlk_group_advantage_ranges", num_groups_of_teams(p));
}

}  // namespace rlk::hip
