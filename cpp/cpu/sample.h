// CPU backend of ops/sample.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/sample.h"

namespace rlk::cpu {

void sample(const SampleParams& p);

}  // namespace rlk::cpu
