// The shape of a wave: the tiles of a matrix that all blocks of a launch compute at the same time, one tile per block.
#pragma once

#include <cmath>

#include "rlk/base.h"

namespace rlk::cuda {

// Returns the height of a wave in tiles. The matrix has `row_tiles` rows of tiles, and a tile has `tile_rows` rows and
// `tile_columns` columns. A nearly square wave reads the fewest rows of operands. The height divides the number of
// blocks if possible, so that a wave consists of whole columns of tiles. Every block then has the same rows in the next
// wave. At 8192 x 128256 x 4096, where the GPU's power limit sets the clock, whole columns took 1 % less energy and
// time (README of linear).
RLK_HD int wave_height(int blocks, int row_tiles, int tile_rows, int tile_columns) {
  const double square = std::sqrt(static_cast<double>(blocks) * tile_columns / tile_rows);
  const int most = square < 1 ? 1 : static_cast<int>(square);
  if (row_tiles <= most) return row_tiles;
  for (int height = most; 2 * height > most; --height) {
    if (blocks % height == 0) return height;
  }
  return most;
}

}  // namespace rlk::cuda
