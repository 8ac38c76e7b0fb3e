// Host entry points of the pack kernels, one per architecture. Arguments were checked in pack.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/pack_copy.h"
#include "rlk/kernels/pack_scan.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void pack_layout(const PackLayoutParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void pack(const PackParams& p, const PackGrid& g, cudaStream_t stream);)

}  // namespace rlk::cuda
