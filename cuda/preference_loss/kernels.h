// Host entry points of the preference_loss kernels, one per architecture. Arguments were checked in preference_loss.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/preference_pair.h"

namespace rlk::cuda {

void preference_loss_sm80(const PreferenceLossParams& p, cudaStream_t stream);
void preference_loss_sm90(const PreferenceLossParams& p, cudaStream_t stream);
void preference_loss_backward_sm80(const PreferenceLossBackwardParams& p, cudaStream_t stream);
void preference_loss_backward_sm90(const PreferenceLossBackwardParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
