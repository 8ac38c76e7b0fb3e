// Host entry points of the kernels of random_bits, one per architecture. Arguments were checked in random_bits.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/random_words.h"

namespace rlk::cuda {

void random_bits_sm80(const RandomBitsParams& p, cudaStream_t stream);
void random_bits_sm90(const RandomBitsParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
