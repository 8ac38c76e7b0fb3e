// The CUDA backend of preference_loss, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/preference_loss.h"

namespace rlk::cuda {

void preference_loss(const PreferenceLossParams& p, int device, Stream stream);
void preference_loss_backward(const PreferenceLossBackwardParams& p, int device, Stream stream);

}  // namespace rlk::cuda
