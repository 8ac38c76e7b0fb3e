// The CUDA backend of masked_whiten, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/masked_whiten.h"

namespace rlk::cuda {

std::int64_t masked_whiten_workspace_bytes(const MaskedWhitenParams& p);
void masked_whiten(const MaskedWhitenParams& p, int device, Stream stream);

}  // namespace rlk::cuda
