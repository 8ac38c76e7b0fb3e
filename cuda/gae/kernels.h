// Host entry points of the gae kernels, one per architecture. All have the same bits. Arguments were checked in gae.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/gae.h"

namespace rlk::cuda {

// `warps` of a block, which has a sequence: one of kSequenceWarps, each with a chunk at a time.
void gae_sm80(const GaeParams& p, int warps, cudaStream_t stream);
void gae_sm90(const GaeParams& p, int warps, cudaStream_t stream);

}  // namespace rlk::cuda
