// Host entry points of the gae kernels, one per architecture. All have the same bits. Arguments were checked in gae.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/gae.h"

namespace rlk::cuda {

// `warps` of a block, which has a sequence: one of kSequenceWarps, each with a chunk at a time.
RLK_CUDA_KERNELS(void gae(const GaeParams& p, int warps, cudaStream_t stream);)

}  // namespace rlk::cuda
