// The CPU backend of value_loss, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/value_loss.h"

namespace rlk::cpu {

void value_loss(const ValueLossParams& p);

}  // namespace rlk::cpu
