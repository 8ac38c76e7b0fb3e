// CPU backend of ops/random_bits.h. Returns when the work is done.
#pragma once

#include "rlk/ops/random_bits.h"

namespace rlk::cpu {

void random_bits(const RandomBitsParams& p);

}  // namespace rlk::cpu
