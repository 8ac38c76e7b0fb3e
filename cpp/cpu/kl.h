// The CPU backend of kl, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/kl.h"

namespace rlk::cpu {

void kl(const KlParams& p);

}  // namespace rlk::cpu
