// The CUDA backend of rope, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/rope.h"

namespace rlk::cuda {

void rope(const RopeParams& p, int device, Stream stream);

}  // namespace rlk::cuda
