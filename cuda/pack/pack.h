// The CUDA backend of pack, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/pack.h"

namespace rlk::cuda {

void pack_layout(const PackLayoutParams& p, int device, Stream stream);
void pack(const PackParams& p, int device, Stream stream);

}  // namespace rlk::cuda
