// The CUDA backend of attention, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/attention.h"

namespace rlk::cuda {

std::int64_t attention_workspace_bytes(const AttentionParams& p, int device);
void attention(const AttentionParams& p, int device, Stream stream);
std::int64_t attention_backward_workspace_bytes(const AttentionBackwardParams& p, int device);
void attention_backward(const AttentionBackwardParams& p, int device, Stream stream);

}  // namespace rlk::cuda
