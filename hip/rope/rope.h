// HIP backend of rope: gfx90a and gfx942.
#pragma once

#include "rlk/ops/rope.h"

namespace rlk::hip {

void rope(const RopeParams& p, int device, Stream stream);

}  // namespace rlk::hip
