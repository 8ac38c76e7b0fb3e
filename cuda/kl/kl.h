// The CUDA backend of kl, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/kl.h"

namespace rlk::cuda {

void kl(const KlParams& p, int device, Stream stream);

}  // namespace rlk::cuda
