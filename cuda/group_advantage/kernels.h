// Host entry points of the group_advantage kernels, one per architecture. Arguments were checked in group_advantage.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/group_advantage.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void group_advantage(const GroupAdvantageParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
