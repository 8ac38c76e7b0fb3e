// Host entry points of the kernels of kv_cache_append, one per architecture. Arguments were checked in
// kv_cache_append.cpp; `vectors` says whether every array is made of aligned vectors of 16 bytes.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/cache_append.h"

namespace rlk::cuda {

RLK_CUDA_KERNELS(void kv_cache_append(const CacheAppendParams& p, bool vectors, cudaStream_t stream);)

}  // namespace rlk::cuda
