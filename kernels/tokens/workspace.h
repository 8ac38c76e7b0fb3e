// Splits a GPU's passes over tokens into blocks, and defines the layout of the memory by which one pass leaves results
// for the next.
#pragma once

#include <type_traits>

#include "kernels/tokens/terms.h"

namespace rlk {

inline std::int64_t mean_length(const Sequences& q) {
  return q.packed() && q.num_sequences > 0 ? q.num_tokens / q.num_sequences + 1 : q.num_tokens;
}
// The largest value of `lanes`. A block processes 64 >> lanes sequences, and reads 2^lanes tiles of each sequence at a
// time.
constexpr int kMostGatherLanes = 6;
inline int gather_lanes(const Sequences& q, int tile) {
  const std::int64_t mean = mean_length(q);
  int lanes = 0;
  while (lanes < kMostGatherLanes && (std::int64_t{1} << lanes) < tiles_of(mean, tile)) ++lanes;
  return lanes;
}
inline std::int64_t gather_blocks(const Sequences& q, int lanes) {
  const std::int64_t each = std::int64_t{1} << (kMostGatherLanes - lanes);
  return q.num_sequences == 0 ? 1 : (q.num_sequences + each - 1) / each;
}

// If there are few sequences with few tiles, one block sums them with one thread per sequence. No blocks then need to
// exchange sums.
constexpr int kFewTiles = 2;
constexpr int kFewSequences = 256;
inline bool are_few(const Sequences& q, int tile, std::int64_t most = kFewSequences) {
  return !q.packed() && q.num_slots() > 0 && q.num_sequences <= most && tiles_of(q.num_tokens, tile) <= kFewTiles;
}

inline std::int64_t slots_of(const Sequences& q, int tile) { return q.num_slots() == 0 ? 0 : workspace_slots(q, tile); }

// The number of blocks of each pass. If each wave computes one tile, a block computes as many tiles as it has waves.
struct TokenPasses {
  std::int64_t slots, token_blocks, sequence_blocks;
  int lanes;

  TokenPasses(const Sequences& q, int tile, int wave_tile, int waves)
      : slots(slots_of(q, tile)),
        token_blocks(tile == wave_tile ? (slots + waves - 1) / waves : slots),
        lanes(gather_lanes(q, tile)) {
    sequence_blocks = gather_blocks(q, lanes);
  }
};
// The number of blocks of an elementwise pass over `count` values.
inline std::int64_t map_blocks(std::int64_t count) {
  constexpr std::int64_t kEach = 1024, kMost = 2048;
  const std::int64_t blocks = (count + kEach - 1) / kEach;
  return blocks < kMost ? blocks : kMost;
}

// The arrays of a workspace, one after another, each at a multiple of 16 bytes. With null memory only the total size is
// computed. Larger tiles never need more memory.
template <class Batch>
struct TokenWorkspace {
  typename Batch::Shared* shared;            // [1]
  TilePartial<8>* partials[Batch::kGroups];  // [slots] each: partial results of the first pass, later those of the pass
                                             // over tokens
  typename Batch::Factors* factors;          // [num_sequences]
  TotalsOf<Batch>* blocks;                   // [gather_blocks]
  std::uint32_t* finished;                   // [1]: number of finished blocks, set to 0 by the pass over tokens
  std::int64_t bytes = 0;

  TokenWorkspace(const Sequences& q, int tile, void* memory) {
    take(memory, 1, &shared);
    for (auto& of_group : partials) take(memory, slots_of(q, tile), &of_group);
    take(memory, kHasStatistics<Batch> ? q.num_sequences : 0, &factors);
    take(memory, gather_blocks(q, gather_lanes(q, tile)), &blocks);
    take(memory, 1, &finished);
  }
  RLK_HD TokenContext<Batch> context() const { return {factors, shared}; }

 private:
  template <class T>
  void take(void* memory, std::int64_t count, T** part) {
    *part = memory == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<unsigned char*>(memory) + bytes);
    if (!std::is_empty_v<T>) bytes += (count * static_cast<std::int64_t>(sizeof(T)) + 15) / 16 * 16;
  }
};

}  // namespace rlk
