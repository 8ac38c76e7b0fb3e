// HIP backend of masked_whiten: gfx90a and gfx942.
#pragma once

#include "rlk/ops/masked_whiten.h"

namespace rlk::hip {

std::int64_t masked_whiten_workspace_bytes(const MaskedWhitenParams& p);
void masked_whiten(const MaskedWhitenParams& p, int device, Stream stream);

}  // namespace rlk::hip
