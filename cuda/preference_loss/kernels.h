// Host entry points of the preference_loss kernels, one per architecture. Arguments were checked in preference_loss.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/preference_pair.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void preference_loss(const PreferenceLossParams& p, cudaStream_t stream);)
RLK_CUDA_KERNELS(void preference_loss_backward(const PreferenceLossBackwardParams& p, cudaStream_t stream);)

}  // namespace rlk::cuda
