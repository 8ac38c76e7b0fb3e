// HIP backend of pack: gfx90a and gfx942.
#pragma once

#include "rlk/ops/pack.h"

namespace rlk::hip {

void pack_layout(const PackLayoutParams& p, int device, Stream stream);
void pack(const PackParams& p, int device, Stream stream);

}  // namespace rlk::hip
