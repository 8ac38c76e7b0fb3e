// HIP backend of sample: gfx90a and gfx942.
#pragma once

#include "rlk/ops/sample.h"

namespace rlk::hip {

void sample(const SampleParams& p, int device, Stream stream);

}  // namespace rlk::hip
