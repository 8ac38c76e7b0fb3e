// Host entry points of the kernels of random_bits, one per architecture. Arguments were checked in random_bits.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/random_words.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void random_bits(const RandomBitsParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
