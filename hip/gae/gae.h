// HIP backend of gae: gfx90a and gfx942.
#pragma once

#include "rlk/ops/gae.h"

namespace rlk::hip {

void gae(const GaeParams& p, int device, Stream stream);

}  // namespace rlk::hip
