// CPU backend of ops/gae.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/gae.h"

namespace rlk::cpu {

void gae(const GaeParams& p);

}  // namespace rlk::cpu
