// The CUDA backend of gae, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/gae.h"

namespace rlk::cuda {

void gae(const GaeParams& p, int device, Stream stream);

}  // namespace rlk::cuda
