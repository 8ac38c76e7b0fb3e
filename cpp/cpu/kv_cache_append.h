// CPU backend of ops/kv_cache_append.h. Returns when the work is done.
#pragma once

#include "rlk/ops/kv_cache_append.h"

namespace rlk::cpu {

void kv_cache_append(const CacheAppendParams& p);

}  // namespace rlk::cpu
