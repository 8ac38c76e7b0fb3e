// CPU backend of ops/group_advantage.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/group_advantage.h"

namespace rlk::cpu {

void group_advantage(const GroupAdvantageParams& p);

}  // namespace rlk::cpu
