// CPU backend of ops/masked_whiten.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/masked_whiten.h"

namespace rlk::cpu {

void masked_whiten(const MaskedWhitenParams& p);

}  // namespace rlk::cpu
