// A tile of a sequence as the CPU backend's inner loops take it.
#pragma once

#include <cstdint>

namespace rlk::cpu {

constexpr int kTile = 10;  // 2^10 positions: what a thread takes at a time
constexpr int kTilePositions = 1 << kTile;

struct TokenTile {
  std::int64_t sequence;
  std::int64_t begin;  // where the sequence begins in packed arrays
  std::int64_t first;  // position
  int count;           // positions, at most kTilePositions
};

}  // namespace rlk::cpu
