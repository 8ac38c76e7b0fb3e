// Computes dhidden of `linear_logprob` as a sum over the vocabulary's parts, so that its bits do not depend on the
// number of ranks. With LoRA, each part also has its own v (the product of dlogits and lora_b), which dlora_a uses.
#pragma once

#include "rlk/ops/linear_logprob.h"

namespace rlk {

inline bool is_by_parts(const LinearLogprobBackwardParams& p) {
  return p.dh_segments > 1 && (p.dhidden != nullptr || p.dlora_a != nullptr);
}
WorkspaceRange by_parts_workspace(const LinearLogprobBackwardParams& p, Device device);
void backward_by_parts(const LinearLogprobBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
