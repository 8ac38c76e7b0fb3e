// Sorts the tokens of embedding's gradient by row, and within a row by index. The sort is a stable radix sort that
// begins with the lowest digit. A pass consists of three kernels. In the first kernel, each wave counts the digits of
// its tile. In the second kernel, one block turns all counts into positions for each tile and digit. In the third
// kernel, each wave moves its tile's tokens to their positions in order, 64 at a time. Ballots find equal digits.
#pragma once

#include "hip/embedding/forward.h"

namespace rlk::hip {

RLK_DEVICE std::int64_t row_of(EmbeddingKey key) { return static_cast<std::int64_t>(key >> 32); }
RLK_DEVICE std::int64_t token_of(EmbeddingKey key) { return static_cast<std::int64_t>(key & 0xffffffffu); }
RLK_DEVICE std::uint32_t digit_of(EmbeddingKey key, const EmbeddingDigit& digit) {
  return static_cast<std::uint32_t>(key >> digit.shift) & ((1u << digit.width) - 1);
}

template <bool kFromIds>
RLK_DEVICE EmbeddingKey key_at(const EmbeddingBackwardParams& p, const EmbeddingKey* keys, std::int64_t i) {
  if constexpr (kFromIds) {
    return static_cast<EmbeddingKey>(embedding_grad_row(p, id_of(p, i))) << 32 | static_cast<EmbeddingKey>(i);
  } else {
    return global_pointer(keys)[i];
  }
}

// Returns a bit for each lane whose key exists and has the same digit as this lane's key.
RLK_DEVICE std::uint64_t equal_lanes(std::uint32_t d, bool exists, int width) {
  std::uint64_t equal = ballot(exists);
  for (int bit = 0; bit < width; ++bit) {
    const bool one = (d >> bit & 1u) != 0;
    const std::uint64_t ones = ballot(one);
    equal &= one ? ones : ~ones;
  }
  return equal;
}

// Visits the keys of the block's tile in order. places[d] is the position of the next key with digit d, and starts at
// begin(d). Each key is passed to take(key, place) with its position.
template <bool kFromIds, class Begin, class Take>
RLK_DEVICE void walk_tile(const EmbeddingBackwardParams& p, const EmbeddingKey* keys, const EmbeddingDigit& digit,
                          std::int64_t tile, const Begin& begin, const Take& take) {
  auto* places = reinterpret_cast<std::uint32_t*>(lds());
  const int lane = thread_id();
  for (int d = lane; d < kDigits; d += kSortThreads) places[d] = begin(d);
  wave_barrier();
  for (int i = 0; i < kSortTile; i += kSortThreads) {
    const std::int64_t at = tile * kSortTile + i + lane;
    const bool exists = at < p.num_tokens;
    const EmbeddingKey key = exists ? key_at<kFromIds>(p, keys, at) : 0;
    const std::uint32_t d = digit_of(key, digit);
    const std::uint64_t equal = equal_lanes(d, exists, digit.width), below = (std::uint64_t{1} << lane) - 1;
    const std::uint32_t before = places[d];
    wave_barrier();
    if (exists) {
      if ((equal & below) == 0) places[d] = before + static_cast<std::uint32_t>(__builtin_popcountll(equal));
      take(key, before + static_cast<std::uint32_t>(__builtin_popcountll(equal & below)));
    }
    wave_barrier();
  }
}

template <bool kFromIds>
RLK_DEVICE void embedding_count_kernel(const EmbeddingBackwardParams& p, std::int64_t first_block,
                                       const EmbeddingWorkspace& w, const EmbeddingKey* keys,
                                       const EmbeddingDigit& digit, std::int64_t tiles) {
  const std::int64_t tile = first_block + block_id_x();
  if (kFromIds) {
    auto* present = global_pointer(w.present);
    for (std::int64_t v = tile * kSortThreads + thread_id(); v < p.num_rows; v += tiles * kSortThreads) present[v] = 0;
  }
  walk_tile<kFromIds>(
      p, keys, digit, tile, [](int) { return 0u; }, [](EmbeddingKey, std::uint32_t) {});
  const auto* places = reinterpret_cast<const std::uint32_t*>(lds());
  auto* counts = global_pointer(w.counts);
  for (int d = thread_id(); d < kDigits; d += kSortThreads) counts[d * tiles + tile] = places[d];
}

// One block runs this kernel. Each thread processes the same number of counts.
RLK_DEVICE void embedding_begin_kernel(std::uint32_t* all_counts, std::int64_t num) {
  auto* sums = reinterpret_cast<std::uint32_t*>(lds());
  const std::int64_t of_thread = num / kBeginThreads;
  static_assert(kDigits % kBeginThreads == 0);
  auto* counts = global_pointer(all_counts) + thread_id() * of_thread;
  std::uint32_t sum = 0;
  for (std::int64_t i = 0; i < of_thread; ++i) sum += counts[i];
  sums[thread_id()] = sum;
  block_barrier();
  std::uint32_t begin = 0;
  for (int i = 0; i < thread_id(); ++i) begin += sums[i];
  for (std::int64_t i = 0; i < of_thread; ++i) {
    const std::uint32_t count = counts[i];
    counts[i] = begin;
    begin += count;
  }
}

template <bool kFromIds>
RLK_DEVICE void embedding_scatter_kernel(const EmbeddingBackwardParams& p, std::int64_t first_block,
                                         const EmbeddingWorkspace& w, const EmbeddingKey* keys, EmbeddingKey* sorted,
                                         const EmbeddingDigit& digit, std::int64_t tiles, bool is_last) {
  const std::int64_t tile = first_block + block_id_x();
  const auto* counts = global_pointer(w.counts);
  auto* to = global_pointer(sorted);
  auto* present = global_pointer(w.present);
  walk_tile<kFromIds>(
      p, keys, digit, tile, [&](int d) { return counts[d * tiles + tile]; },
      [&](EmbeddingKey key, std::uint32_t place) {
        to[place] = key;
        if (is_last && row_of(key) < p.num_rows) present[row_of(key)] = 1;
      });
}

}  // namespace rlk::hip
