// Constants and arguments of linear that host and kernels share: tiles, arguments, how work is cut into launches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hip/common/launch_shape.h"
#include "rlk/ops/linear.h"

namespace rlk::hip {

constexpr int kGemmThreads = 256;  // four waves, one for each SIMD unit
constexpr int kGemmBlocks = 2;     // minimum number of blocks per compute unit: one multiplies while the other loads

// A tile: the waves of a block, and the matrix instructions (kMfma x kMfma) of a wave. LDS holds two stages of kStageK
// contraction indices of both operands. The sizes are not measured. These sizes let two large or three small blocks fit
// on a compute unit.
struct LargeTile {
  static constexpr int kMfma = 32, kWavesDown = 2, kWavesAcross = 2, kMfmasDown = 2, kMfmasAcross = 2, kStageK = 32;
};
struct SegmentsTile {  // for segments, where a wave keeps up to three earlier sums of each output
  static constexpr int kMfma = 32, kWavesDown = 2, kWavesAcross = 2, kMfmasDown = 2, kMfmasAcross = 1, kStageK = 32;
};
struct SmallTile {
  static constexpr int kMfma = 16, kWavesDown = 1, kWavesAcross = 4, kMfmasDown = 1, kMfmasAcross = 1, kStageK = 64;
};
template <class Tile>
constexpr int kTileRows = Tile::kMfma* Tile::kWavesDown* Tile::kMfmasDown;
template <class Tile>
constexpr int kTileColumns = Tile::kMfma* Tile::kWavesAcross* Tile::kMfmasAcross;
template <class Tile>
constexpr int kStageElements = (kTileRows<Tile> + kTileColumns<Tile>)*Tile::kStageK;
template <class Tile>
constexpr std::size_t kGemmLds = 2 * kStageElements<Tile> * sizeof(std::uint16_t);

constexpr std::int64_t kMostSmallRows = 32;  // most rows of outputs that use small tiles; unmeasured

// Element (i, k) lies at rows.offset(i) + k, or at rows.offset(k) + i if the row number is the contraction index.
struct GemmOperand {
  const void* data;
  RowLayout rows;
  bool vectors;  // whether each row consists of whole, aligned vectors of the size that a lane loads at once
};
constexpr int kAlongRow = 8;    // elements that a lane loads at once along the contraction
constexpr int kAcrossRows = 4;  // elements that a lane loads at once from each of four rows across the tile

// out[i, j] = the dot product of a's row i and b's row j. The contraction is cut into segments, and the kernel adds up
// their dot products: as a tree (rule 2), or ascending from `initial` if that is given (rule 9). A single dot product
// begins with `initial`.
struct GemmParams {
  GemmOperand a, b;
  std::int64_t a_size, b_size, contraction, segment;
  void* out;
  const void* bias;      // [b_size], or null
  const float* initial;  // [a_size, b_size], or null
  RowLayout out_rows;
  std::int64_t initial_stride;
  std::int64_t tiles_down;
  DType out_dtype, bias_dtype;
};

// dbias: a block takes kBiasColumns columns. Each column has kBiasSlices threads, which take kBiasGroups / kBiasSlices
// groups of rows each.
constexpr int kBiasThreads = 256, kBiasColumns = 32, kBiasSlices = kBiasThreads / kBiasColumns;
constexpr int kBiasGroups = kTokenBlock / kBiasGroupRows;
constexpr std::size_t kBiasLds = kBiasThreads * sizeof(float);

constexpr int kTreeThreads = 256, kTreeElements = 4;  // elements per thread, kTreeThreads apart

}  // namespace rlk::hip
