// CPU backend of ops/attention.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/attention.h"

namespace rlk::cpu {

void attention(const AttentionParams& p);
void attention_backward(const AttentionBackwardParams& p);

}  // namespace rlk::cpu
