// The CUDA backend of random_bits, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/random_bits.h"

namespace rlk::cuda {

void random_bits(const RandomBitsParams& p, int device, Stream stream);

}  // namespace rlk::cuda
