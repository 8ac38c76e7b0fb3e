// CPU backend of the operator `kv_cache_append`: tokens are spread over threads, heads are copied whole.
#include "rlk/ops/kv_cache_append.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/attention/cache_append.h"
#include "rlk/backends.h"
#include "rlk/load_index.h"
#include "rlk/plan_note.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTaskBytes = 1 << 17;  // a smaller task would save less time than waking a thread costs

void copy(const CacheAppendParams& p, const CacheAppendSide& s, std::int64_t t, std::int64_t at) {
  const std::int64_t size = size_of(p.dtype);
  const char* from = static_cast<const char*>(s.tokens) + t * s.token_stride * size;
  char* to = static_cast<char*>(s.cache) + (at / p.page_size * s.page_stride + at % p.page_size * s.slot_stride) * size;
  const bool whole = s.head_stride == s.columns && s.cache_head_stride == s.columns;
  const auto bytes = static_cast<std::size_t>((whole ? p.num_heads : 1) * s.columns * size);
  if (bytes == 0) return;
  for (std::int64_t h = 0; h < (whole ? 1 : p.num_heads); ++h) {
    std::memcpy(to + h * s.cache_head_stride * size, from + h * s.head_stride * size, bytes);
  }
}

}  // namespace

void kv_cache_append(const CacheAppendParams& p) {
  check_cache_append(p);
  note_plan([] { return std::string("copies"); });
  const std::int64_t slots = p.num_pages * p.page_size;
  for (std::int64_t t = 0; t < p.num_slots; ++t) {
    const std::int64_t at = load_index(p.slots, p.slot_dtype, t);
    if (at >= -1 && at < slots) continue;
    throw InvalidArgument("slot_mapping: expected -1 or a slot in [0, " + std::to_string(slots) +
                          ") (pages * page_size of the cache), got " + std::to_string(at) + " at index " +
                          std::to_string(t));
  }
  const std::int64_t bytes = std::max<std::int64_t>(p.num_heads * (p.k.columns + p.v.columns) * size_of(p.dtype), 1);
  parallel_for(p.num_slots, std::max<std::int64_t>(kTaskBytes / bytes, 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t at = load_index(p.slots, p.slot_dtype, t);
      if (at < 0) continue;
      copy(p, p.k, t, at);
      copy(p, p.v, t, at);
    }
  });
}

}  // namespace rlk::cpu
