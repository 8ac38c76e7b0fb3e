// HIP backend of random_bits: gfx90a and gfx942.
#pragma once

#include "rlk/ops/random_bits.h"

namespace rlk::hip {

void random_bits(const RandomBitsParams& p, int device, Stream stream);

}  // namespace rlk::hip
