// Host entry points of the masked_whiten kernels, one per architecture. Arguments were checked in masked_whiten.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/masked_whiten.h"

namespace rlk::cuda {

// `warps` of a block, which has a sequence: one of kSequenceWarps. All have the same bits.
RLK_CUDA_KERNELS(void masked_whiten(const MaskedWhitenParams& p, int warps, cudaStream_t stream);)

}  // namespace rlk::cuda
