// HIP backend of embedding: gfx90a and gfx942.
#pragma once

#include "rlk/ops/embedding.h"

namespace rlk::hip {

void embedding(const EmbeddingParams& p, int device, Stream stream);
std::int64_t embedding_backward_workspace_bytes(const EmbeddingBackwardParams& p);
void embedding_backward(const EmbeddingBackwardParams& p, int device, Stream stream);

}  // namespace rlk::hip
