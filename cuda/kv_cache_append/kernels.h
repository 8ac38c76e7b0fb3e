// Host entry points of the kernels of kv_cache_append, one per architecture. Arguments were checked in
// kv_cache_append.cpp; `vectors` says whether every array is made of aligned vectors of 16 bytes.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/cache_append.h"

namespace rlk::cuda {

void kv_cache_append_sm80(const CacheAppendParams& p, bool vectors, cudaStream_t stream);
void kv_cache_append_sm90(const CacheAppendParams& p, bool vectors, cudaStream_t stream);

}  // namespace rlk::cuda
