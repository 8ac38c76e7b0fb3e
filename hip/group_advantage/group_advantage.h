// HIP backend of group_advantage: gfx90a and gfx942.
#pragma once

#include "rlk/ops/group_advantage.h"

namespace rlk::hip {

std::int64_t group_advantage_workspace_bytes(const GroupAdvantageParams& p);
void group_advantage(const GroupAdvantageParams& p, int device, Stream stream);

}  // namespace rlk::hip
