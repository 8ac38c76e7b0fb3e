// Constants and arguments of linear that host and kernels share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hip/common/launch_shape.h"
#include "rlk/ops/linear.h"

namespace rlk::hip {

constexpr int kGemmThreads = 256;  // four waves, one for each SIMD unit
constexpr int kGemmBlocks = 2;     // least number of blocks per compute unit: one block multiplies while another loads

// A tile is given by the waves of a block, and by the matrix instructions (kMfma x kMfma) of a wave. LDS holds two
// stages of both operands, each with kStageK contraction indices. With these sizes, two large or three small blocks fit
// on a compute unit. The sizes were not tuned by measurements.
struct LargeTile {
  static constexpr int kMfma = 32, kWavesDown = 2, kWavesAcross = 2, kMfmasDown = 2, kMfmasAcross = 2, kStageK = 32;
};
// for products in segments, because a wave also keeps up to three sums of earlier segments per output
struct SegmentsTile {
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

constexpr std::int64_t kMostSmallRows = 32;  // most rows of outputs for which small tiles are used; not tuned by
                                             // measurements

// Element (i, k), where k is the contraction index, lies at rows.offset(i) + k. If an operand is stored the other way
// (AcrossRows), element (i, k) lies at rows.offset(k) + i.
struct GemmOperand {
  const void* data;
  RowLayout rows;
  bool vectors;  // whether each row consists of whole, aligned vectors of kAlongRow or kAcrossRows elements
};
constexpr int kAlongRow = 8;  // elements of a vector, if rows run along the contraction
// elements of a vector, if rows run across the contraction; a lane loads vectors of four rows
constexpr int kAcrossRows = 4;

// out[i, j] is the dot product of row i of a and row j of b. The contraction is cut into segments, whose dot products
// the kernel adds. The kernel adds the segments' dot products as a tree (rule 2), or in ascending order to `initial` if
// that is given (rule 9). If there is a single segment, its dot product starts from `initial`.
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

// dbias: a block sums kBiasColumns columns. kBiasSlices threads share a column, and each of them sums kBiasGroups /
// kBiasSlices groups of rows.
constexpr int kBiasThreads = 256, kBiasColumns = 32, kBiasSlices = kBiasThreads / kBiasColumns;
constexpr int kBiasGroups = kTokenBlock / kBiasGroupRows;
constexpr std::size_t kBiasLds = kBiasThreads * sizeof(float);

constexpr int kTreeThreads = 256, kTreeElements = 4;  // elements per thread, at a stride of kTreeThreads

}  // namespace rlk::hip
