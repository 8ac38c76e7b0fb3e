// A tile of a sequence: the part of a sequence that an inner loop of the CPU backend processes at a time.
#pragma once

#include <cstdint>

namespace rlk::cpu {

constexpr int kTile = 10;  // 2^10 positions, which a thread takes at a time
constexpr int kTilePositions = 1 << kTile;

struct TokenTile {
  std::int64_t sequence;
  std::int64_t begin;  // the sequence's first token in packed arrays
  std::int64_t first;  // first position
  int count;           // number of positions, at most kTilePositions
};

}  // namespace rlk::cpu
