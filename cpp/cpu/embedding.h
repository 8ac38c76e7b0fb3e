// CPU backend of ops/embedding.h: the bit oracle. Returns when the work is done.
#pragma once

#include "rlk/ops/embedding.h"

namespace rlk::cpu {

void embedding(const EmbeddingParams& p);
void embedding_backward(const EmbeddingBackwardParams& p);

}  // namespace rlk::cpu
