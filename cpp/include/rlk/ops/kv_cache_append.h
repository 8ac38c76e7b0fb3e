// THE CONTRACT of `kv_cache_append`: writes keys and values of new tokens to their slots in a paged cache, in place.
// The operator only moves bytes, so every backend has the same bytes.
//
// Slot s of a cache is token s % page_size of page s / page_size; there are num_pages * page_size slots.
// For each token t in [0, num_slots), for all heads and columns:
//   k_cache[slot[t] / page_size, slot[t] % page_size, h, d] = k[t, h, d]          v_cache likewise
// A token with slot -1, such as padding, is not stored and not read. Tokens from num_slots on have no slot and are not
// read. Slots that no token names keep their bytes. If several tokens name the same slot, the slot may hold any of
// these tokens, or parts of several tokens.
// If a slot is below -1 or beyond the cache, the CPU throws InvalidArgument before it writes anything. A GPU skips the
// token, so nothing out of range is read or written.
// A cache is described by strides, so the layout of each engine can be passed as a view: pages
// [num_pages, page_size, heads, columns] (NHD), [num_pages, heads, page_size, columns] (HND), K and V as halves of
// [num_pages, 2, ...] or of [2, num_pages, ...], or columns K|V of one array. The attention operator takes the same
// views as its pages.
// The call enqueues its work on `stream`; it neither allocates nor synchronises. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

// The new tokens and the cache of one side: k or v. Strides are in elements. Columns are contiguous, with any
// alignment.
struct CacheAppendSide {
  const void* tokens = nullptr;  // [num_slots or more, num_heads, columns], dtype
  std::int64_t token_stride = 0, head_stride = 0;
  void* cache = nullptr;  // [num_pages, page_size, num_heads, columns], dtype; elements do not overlap
  std::int64_t page_stride = 0, slot_stride = 0, cache_head_stride = 0;
  std::int64_t columns = 0;
};

struct CacheAppendParams {
  CacheAppendSide k, v;
  const void* slots = nullptr;  // [num_slots], slot_dtype
  std::int64_t num_slots = 0, num_heads = 0;
  std::int64_t num_pages = 0, page_size = 1;  // num_pages * page_size is below 2^31
  DType slot_dtype = DType::kInt64;           // kInt32, kInt64
  DType dtype = DType::kBFloat16;             // kBFloat16, kFloat16, kFloat32
};

void kv_cache_append(const CacheAppendParams& p, Device device, Stream stream);

}  // namespace rlk
