// Host entry points of the kl kernel, one per architecture. Arguments were checked in kl.cpp.
#pragma once

#include "../common/launch.h"
#include "../common/token_plan.h"
#include "rlk/ops/kl.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void kl(const KlParams& p, const TokenPlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
