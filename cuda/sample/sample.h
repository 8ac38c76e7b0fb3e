// The CUDA backend of sample, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/sample.h"

namespace rlk::cuda {

void sample(const SampleParams& p, int device, Stream stream);

}  // namespace rlk::cuda
