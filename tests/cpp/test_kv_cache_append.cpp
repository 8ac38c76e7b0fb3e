// Tests kv_cache_append byte for byte against a second implementation, written from the contract. The backend is the
// CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "rlk/backends.h"
#include "rlk/ops/kv_cache_append.h"
#include "sequence_cases.h"

namespace cache_test {
namespace {

using linear_test::for_each_backend;
using rlk::CacheAppendParams;
using rlk::CacheAppendSide;
using rlk::DType;
using sequence_test::Bytes;

#if RLK_TEST_HIP
constexpr bool kThrows = false;
constexpr int kUnalignedBytes = 2;  // addresses are multiples of an element
void run(const CacheAppendParams& p) { rlk::hip::kv_cache_append(p, 0, 0); }
#else
constexpr bool kThrows = true;
constexpr int kUnalignedBytes = 2;
void run(const CacheAppendParams& p) { rlk::cpu::kv_cache_append(p); }
#endif

enum class Layout { kPlain, kNhd, kHnd, kPacked, kHalvesOfPage, kHalvesOfCache };
constexpr Layout kLayouts[] = {Layout::kPlain,  Layout::kNhd,          Layout::kHnd,
                               Layout::kPacked, Layout::kHalvesOfPage, Layout::kHalvesOfCache};

struct Shape {
  std::int64_t pages, page_size, tokens, heads, k_columns, v_columns;
};

// Both caches in one array of `elements`, and their places in it.
struct Placed {
  CacheAppendSide k, v;
  std::int64_t v_offset = 0, elements = 0;
};
Placed place(Layout layout, const Shape& s) {
  Placed found;
  const std::int64_t rows = s.pages * s.page_size, k = s.heads * s.k_columns, v = s.heads * s.v_columns;
  const auto strides = [](CacheAppendSide* side, std::int64_t page, std::int64_t slot, std::int64_t head) {
    side->page_stride = page;
    side->slot_stride = slot;
    side->cache_head_stride = head;
  };
  found.elements = rows * (k + v);
  if (layout == Layout::kPacked) {
    const std::int64_t both = s.k_columns + s.v_columns;
    for (CacheAppendSide* side : {&found.k, &found.v}) {
      strides(side, s.page_size * s.heads * both, s.heads * both, both);
    }
    found.v_offset = s.k_columns;
  } else if (layout == Layout::kHalvesOfPage) {
    strides(&found.k, s.page_size * (k + v), k, s.k_columns);
    strides(&found.v, s.page_size * (k + v), v, s.v_columns);
    found.v_offset = s.page_size * k;
  } else if (layout == Layout::kHnd) {
    strides(&found.k, s.page_size * k, s.k_columns, s.page_size * s.k_columns);
    strides(&found.v, s.page_size * v, s.v_columns, s.page_size * s.v_columns);
    found.v_offset = rows * k;
  } else {
    strides(&found.k, s.page_size * k, k, s.k_columns);
    strides(&found.v, s.page_size * v, v, s.v_columns);
    found.v_offset = rows * k;
  }
  return found;
}

void check(Layout layout, const Shape& s, DType dtype, std::int64_t shift, std::int64_t gap, DType slot_dtype,
           unsigned seed) {
  const std::int64_t size = rlk::size_of(dtype), rows = s.pages * s.page_size;
  std::mt19937 random(seed);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(rows));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random);
  slots.resize(static_cast<std::size_t>(s.tokens));
  for (auto& slot : slots) {
    if (random() % 5 == 0) slot = -1;
  }
  const std::vector<std::int32_t> narrow(slots.begin(), slots.end());
  Placed where = place(layout, s);
  const std::int64_t k_token = s.heads * s.k_columns + gap, v_token = s.heads * s.v_columns + gap;
  Bytes k(s.tokens * k_token * size, static_cast<std::size_t>(shift));
  Bytes v(s.tokens * v_token * size, static_cast<std::size_t>(shift));
  k.random(seed + 1);
  v.random(seed + 2);
  for_each_backend([&](const std::string& backend) {
    Bytes cache(where.elements * size, static_cast<std::size_t>(shift));
    cache.random(seed + 3);
    std::vector<unsigned char> want = cache.bytes();
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      const std::int64_t slot = slots[static_cast<std::size_t>(t)];
      if (slot < 0) continue;
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const auto move = [&](const CacheAppendSide& side, std::int64_t offset, unsigned char* from) {
          const std::int64_t at = slot / s.page_size * side.page_stride + slot % s.page_size * side.slot_stride +
                                  h * side.cache_head_stride + offset;
          const std::int64_t columns = &side == &where.k ? s.k_columns : s.v_columns;
          if (columns == 0) return;  // an empty cache has no address
          std::memcpy(want.data() + at * size, from + h * columns * size, static_cast<std::size_t>(columns * size));
        };
        move(where.k, 0, k.data() + t * k_token * size);
        move(where.v, where.v_offset, v.data() + t * v_token * size);
      }
    }
    CacheAppendParams p;
    p.k = where.k;
    p.v = where.v;
    p.k.tokens = k.data();
    p.v.tokens = v.data();
    p.k.cache = cache.data();
    p.v.cache = cache.data() + where.v_offset * size;
    p.k.columns = s.k_columns;
    p.v.columns = s.v_columns;
    p.k.token_stride = k_token;
    p.v.token_stride = v_token;
    p.k.head_stride = s.k_columns;
    p.v.head_stride = s.v_columns;
    p.slots = slot_dtype == DType::kInt32 ? static_cast<const void*>(narrow.data()) : slots.data();
    p.slot_dtype = slot_dtype;
    p.num_slots = s.tokens;
    p.num_heads = s.heads;
    p.num_pages = s.pages;
    p.page_size = s.page_size;
    p.dtype = dtype;
    run(p);
    cache.expect(want, "layout " + std::to_string(static_cast<int>(layout)) + ", shift " + std::to_string(shift) +
                           ", " + backend);
  });
}

class KvCacheAppend : public linear_test::Linear {};

TEST_F(KvCacheAppend, EveryLayoutOfAnEngine) {
  unsigned seed = 1;
  for (const Layout layout : kLayouts) {
    const std::int64_t page_size = layout == Layout::kPlain ? 1 : 16;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      // Tokens of a few vectors, of enough for several tokens per block, and of more vectors than a block has lanes.
      for (const Shape& s :
           {Shape{400 / page_size, page_size, 37, 1, 8, 8}, Shape{160 / page_size, page_size, 9, 3, 40, 40},
            Shape{64 / page_size, page_size, 5, 8, 128, 128}}) {
        check(layout, s, dtype, 0, 0, DType::kInt64, ++seed);
        check(layout, s, dtype, 0, 8, DType::kInt32, ++seed);
      }
    }
  }
}

TEST_F(KvCacheAppend, ElementsWhereThereAreNoVectors) {
  unsigned seed = 100;
  for (const Layout layout : kLayouts) {
    const std::int64_t page_size = layout == Layout::kPlain ? 1 : 5;
    for (const Shape& s :
         {Shape{60 / page_size, page_size, 31, 2, 7, 7}, Shape{60 / page_size, page_size, 31, 2, 24, 9},
          Shape{60 / page_size, page_size, 31, 3, 0, 16}, Shape{60 / page_size, page_size, 31, 3, 1, 64}}) {
      check(layout, s, DType::kBFloat16, 0, 0, DType::kInt64, ++seed);
      check(layout, s, DType::kFloat16, kUnalignedBytes, 3, DType::kInt32, ++seed);
      check(layout, s, DType::kFloat32, 4, 1, DType::kInt64, ++seed);
    }
  }
}

TEST_F(KvCacheAppend, NothingOfNothing) {
  unsigned seed = 200;
  check(Layout::kNhd, {4, 8, 0, 2, 16, 16}, DType::kBFloat16, 0, 0, DType::kInt64, ++seed);
  check(Layout::kNhd, {4, 8, 3, 0, 16, 16}, DType::kBFloat16, 0, 0, DType::kInt64, ++seed);
  check(Layout::kNhd, {4, 8, 3, 2, 0, 0}, DType::kBFloat16, 0, 0, DType::kInt64, ++seed);
}

TEST_F(KvCacheAppend, SlotsThatAreNone) {
  for (const std::int64_t bad : {std::int64_t{-2}, std::int64_t{32}, std::int64_t{1} << 32, INT64_MIN, INT64_MAX}) {
    for_each_backend([&](const std::string& backend) {
      Bytes k(2 * 16 * 2), v(2 * 16 * 2), cache(32 * 32 * 2);
      k.random(1);
      v.random(2);
      cache.random(3);
      const std::vector<std::int64_t> slots = {5, bad};
      std::vector<unsigned char> want = cache.bytes();
      CacheAppendParams p;
      for (CacheAppendSide* side : {&p.k, &p.v}) {
        side->tokens = side == &p.k ? k.data() : v.data();
        side->cache = cache.data() + (side == &p.k ? 0 : 32);
        side->token_stride = side->head_stride = side->columns = 16;
        side->page_stride = 8 * 32;
        side->slot_stride = side->cache_head_stride = 32;
      }
      p.slots = slots.data();
      p.num_slots = 2;
      p.num_heads = 1;
      p.num_pages = 4;
      p.page_size = 8;
      if (kThrows) {
        EXPECT_THROW(run(p), rlk::InvalidArgument) << backend;
      } else {
        run(p);
        std::memcpy(want.data() + 5 * 64, k.data(), 32);
        std::memcpy(want.data() + 5 * 64 + 32, v.data(), 32);
      }
      cache.expect(want, backend);
    });
  }
}

}  // namespace
}  // namespace cache_test
