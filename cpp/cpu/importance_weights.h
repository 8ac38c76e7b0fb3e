// The CPU backend of importance_weights, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/importance_weights.h"

namespace rlk::cpu {

void importance_weights(const ImportanceWeightsParams& p);

}  // namespace rlk::cpu
