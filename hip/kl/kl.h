// The HIP backend of kl, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/kl.h"

namespace rlk::hip {

void kl(const KlParams& p, int device, Stream stream);

}  // namespace rlk::hip
