// HIP backend of kv_cache_append: gfx90a and gfx942.
#pragma once

#include "rlk/ops/kv_cache_append.h"

namespace rlk::hip {

void kv_cache_append(const CacheAppendParams& p, int device, Stream stream);

}  // namespace rlk::hip
