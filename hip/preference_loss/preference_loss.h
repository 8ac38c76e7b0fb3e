// HIP backend of preference_loss: gfx90a and gfx942.
#pragma once

#include "rlk/ops/preference_loss.h"

namespace rlk::hip {

void preference_loss(const PreferenceLossParams& p, int device, Stream stream);
void preference_loss_backward(const PreferenceLossBackwardParams& p, int device, Stream stream);

}  // namespace rlk::hip
