// CPU backend of ops/rope.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/rope.h"

namespace rlk::cpu {

void rope(const RopeParams& p);

}  // namespace rlk::cpu
