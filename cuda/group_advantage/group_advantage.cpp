// CUDA backend of group_advantage: checks memory safety, then calls the kernels for the GPU's architecture.
#include "rlk/ops/group_advantage.h"

#include "../common/kernels.h"
#include "kernels/advantages/group_advantage_team.h"
#include "rlk/backends.h"

namespace rlk::cuda {

std::int64_t group_advantage_workspace_bytes(const GroupAdvantageParams& p, int) { return workspace_bytes_of_teams(p); }

void group_advantage(const GroupAdvantageParams& p, int device, Stream stream) {
  check_group_advantage(p);
  if (p.num_sequences == 0) return;
  RLK_CHECK(workspace_bytes_of_teams(p) == 0 || p.workspace != nullptr, "group_advantage: no workspace");
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("group_advantage", device, group_advantage)(p, to_stream(stream));
}

}  // namespace rlk::cuda
