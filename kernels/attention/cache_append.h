// kv_cache_append on GPUs, shared by CUDA and HIP: how tokens are split over threads, and what each thread copies. The
// file also has the checks for memory safety of every backend.
#pragma once

#include "kernels/rows/divisor.h"
#include "rlk/ops/kv_cache_append.h"
#include "rlk/unroll.h"

namespace rlk {

inline void check_cache_append(const CacheAppendParams& p) {
  RLK_CHECK(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16 || p.dtype == DType::kFloat32,
            "kv_cache_append: k and v are bfloat16, float16 or float32");
  RLK_CHECK(p.slot_dtype == DType::kInt32 || p.slot_dtype == DType::kInt64,
            "kv_cache_append: slots are int32 or int64");
  RLK_CHECK(p.num_slots >= 0 && p.num_heads >= 0 && p.num_pages >= 0 && p.page_size > 0,
            "kv_cache_append: sizes are not negative");
  RLK_CHECK(p.num_slots < std::int64_t{1} << 31, "kv_cache_append: fewer than 2^31 tokens");
  RLK_CHECK(p.num_pages < (std::int64_t{1} << 31) / p.page_size, "kv_cache_append: fewer than 2^31 slots of a cache");
  for (const CacheAppendSide* side : {&p.k, &p.v}) {
    RLK_CHECK(side->columns >= 0 && p.num_heads * side->columns < std::int64_t{1} << 30,
              "kv_cache_append: fewer than 2^30 columns of all heads");
    if (p.num_slots == 0 || p.num_heads == 0 || side->columns == 0) continue;
    RLK_CHECK(p.slots && side->tokens && (side->cache || p.num_pages == 0),
              "kv_cache_append: tokens, caches and slots are given");
  }
}

constexpr int kCacheAppendThreads = 128;
constexpr int kCacheAppendUnits = 2;  // number of units of k (and of v) that a thread loads before it stores any

// 2^lanes_log2 threads copy a token. If tokens are small, a block copies several tokens. Tokens are copied in units of
// 16 bytes. If an address, stride or head size is not a multiple of 16 bytes, a unit is one element.
struct CacheAppendGrid {
  Divisor k_units, v_units;            // units per head
  std::uint32_t all_k = 0, all_v = 0;  // units of all heads
  Divisor page_size;
  std::uint32_t num_slots = 0;  // slots in the cache
  int lanes_log2 = 0;
  std::int64_t blocks = 0;
};
inline bool cache_append_has_vectors(const CacheAppendParams& p) {
  const std::int64_t size = size_of(p.dtype);
  const auto whole = [&](std::int64_t elements) { return elements * size % 16 == 0; };
  const auto aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  const auto serves = [&](const CacheAppendSide& s) {
    return aligned(s.tokens) && aligned(s.cache) && whole(s.columns) && whole(s.token_stride) && whole(s.head_stride) &&
           whole(s.page_stride) && whole(s.slot_stride) && whole(s.cache_head_stride);
  };
  return serves(p.k) && serves(p.v);
}
inline CacheAppendGrid cache_append_grid(const CacheAppendParams& p, int unit_bytes) {
  CacheAppendGrid g;
  const auto units = [&](std::int64_t columns) {
    return static_cast<std::uint32_t>(columns * size_of(p.dtype) / unit_bytes);
  };
  const auto heads = static_cast<std::uint32_t>(p.num_heads);
  g.all_k = units(p.k.columns) * heads;
  g.all_v = units(p.v.columns) * heads;
  if (g.all_k > 0) g.k_units = Divisor(units(p.k.columns));
  if (g.all_v > 0) g.v_units = Divisor(units(p.v.columns));
  g.page_size = Divisor(static_cast<std::uint32_t>(p.page_size));
  g.num_slots = static_cast<std::uint32_t>(p.num_pages * p.page_size);
  const std::uint32_t most = g.all_k > g.all_v ? g.all_k : g.all_v;
  while ((1 << g.lanes_log2) < kCacheAppendThreads && kCacheAppendUnits * (1u << g.lanes_log2) < most) ++g.lanes_log2;
  const std::int64_t tokens = kCacheAppendThreads >> g.lanes_log2;
  g.blocks = most == 0 ? 0 : (p.num_slots + tokens - 1) / tokens;
  return g;
}

// Element offsets of unit `unit` of a token: `from` in the array of tokens, and `to` in the cache.
struct CacheAppendPlace {
  std::int64_t from, to;

  template <class Unit>
  RLK_HD CacheAppendPlace(const CacheAppendSide& s, const Divisor& units, std::uint32_t unit, std::int64_t token,
                          std::int64_t page, std::int64_t slot, int element_bytes, const Unit*) {
    const std::uint32_t head = units.quotient(unit);
    const std::int64_t column =
        std::int64_t{unit - head * units.value} * static_cast<int>(sizeof(Unit)) / element_bytes;
    from = token * s.token_stride + head * s.head_stride + column;
    to = page * s.page_stride + slot * s.slot_stride + head * s.cache_head_stride + column;
  }
};

template <class Unit, class Memory>
RLK_DEVICE void cache_append_block(const CacheAppendParams& p, const CacheAppendGrid& g, std::int64_t block,
                                   std::uint32_t thread) {
  const std::int64_t t = block * (kCacheAppendThreads >> g.lanes_log2) + (thread >> g.lanes_log2);
  if (t >= p.num_slots) return;
  const std::int64_t at = p.slot_dtype == DType::kInt64 ? Memory::global(static_cast<const std::int64_t*>(p.slots))[t]
                                                        : Memory::global(static_cast<const std::int32_t*>(p.slots))[t];
  if (at < 0 || at >= g.num_slots) return;
  const std::uint32_t page = g.page_size.quotient(static_cast<std::uint32_t>(at));
  const std::uint32_t slot = static_cast<std::uint32_t>(at) - page * g.page_size.value;
  const int bytes = size_of(p.dtype);
  const std::uint32_t step = 1u << g.lanes_log2, most = g.all_k > g.all_v ? g.all_k : g.all_v;
  const auto place = [&](const CacheAppendSide& s, const Divisor& units, std::uint32_t unit) {
    return CacheAppendPlace(s, units, unit, t, page, slot, bytes, static_cast<const Unit*>(nullptr));
  };
  const auto load = [&](const CacheAppendSide& s, std::int64_t from) {
    return *Memory::global(reinterpret_cast<const Unit*>(static_cast<const char*>(s.tokens) + from * bytes));
  };
  const auto store = [&](const CacheAppendSide& s, std::int64_t to, const Unit& x) {
    *Memory::global(reinterpret_cast<Unit*>(static_cast<char*>(s.cache) + to * bytes)) = x;
  };
  RLK_UNROLL_NOT
  for (std::uint32_t first = thread & (step - 1); first < most; first += kCacheAppendUnits * step) {
    Unit k[kCacheAppendUnits], v[kCacheAppendUnits];
    RLK_UNROLL
    for (int i = 0; i < kCacheAppendUnits; ++i) {
      const std::uint32_t unit = first + static_cast<std::uint32_t>(i) * step;
      if (unit < g.all_k) k[i] = load(p.k, place(p.k, g.k_units, unit).from);
      if (unit < g.all_v) v[i] = load(p.v, place(p.v, g.v_units, unit).from);
    }
    RLK_UNROLL
    for (int i = 0; i < kCacheAppendUnits; ++i) {
      const std::uint32_t unit = first + static_cast<std::uint32_t>(i) * step;
      if (unit < g.all_k) store(p.k, place(p.k, g.k_units, unit).to, k[i]);
      if (unit < g.all_v) store(p.v, place(p.v, g.v_units, unit).to, v[i]);
    }
  }
}

}  // namespace rlk
