// The CUDA backend of embedding, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/embedding.h"

namespace rlk::cuda {

void embedding(const EmbeddingParams& p, int device, Stream stream);
std::int64_t embedding_backward_workspace_bytes(const EmbeddingBackwardParams& p);
void embedding_backward(const EmbeddingBackwardParams& p, int device, Stream stream);

}  // namespace rlk::cuda
