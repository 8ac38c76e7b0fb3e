// The CUDA backend of kv_cache_append, called by the dispatch in cpp/ops.
#pragma once

#include "rlk/ops/kv_cache_append.h"

namespace rlk::cuda {

void kv_cache_append(const CacheAppendParams& p, int device, Stream stream);

}  // namespace rlk::cuda
