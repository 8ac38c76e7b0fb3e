// CPU backend of ops/preference_loss.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/preference_loss.h"

namespace rlk::cpu {

void preference_loss(const PreferenceLossParams& p);
void preference_loss_backward(const PreferenceLossBackwardParams& p);

}  // namespace rlk::cpu
