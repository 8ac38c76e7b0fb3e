// CPU backend of ops/pack.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/pack.h"

namespace rlk::cpu {

void pack_layout(const PackLayoutParams& p);
void pack(const PackParams& p);

}  // namespace rlk::cpu
