// The CUDA backend of group_advantage, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/group_advantage.h"

namespace rlk::cuda {

std::int64_t group_advantage_workspace_bytes(const GroupAdvantageParams& p);
void group_advantage(const GroupAdvantageParams& p, int device, Stream stream);

}  // namespace rlk::cuda
