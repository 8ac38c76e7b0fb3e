// Chooses the tile of a product and launches the mma.sync kernel. CMake compiles this file once per architecture.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <limits>

#include "../common/alignment.h"
#include "../common/kernel_memory.h"
#include "gemm_sm80.cuh"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kMaxGrid = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxRowChunks = std::numeric_limits<int>::max();  // OperandLoad counts in 32 bits
constexpr int kLeastStages = 3;
constexpr Sm80Tile kTiles[] = {Sm80Tile::kFewestRows, Sm80Tile::kSmallM, Sm80Tile::kMedium,
                               Sm80Tile::kSquare,     Sm80Tile::kLarge,  Sm80Tile::kBlocks};
template <class... Tiles>
constexpr bool kFitEverywhere = ((kLeastStages * Tiles::kStageBytes <= 99 << 10) && ...);
static_assert(kFitEverywhere<FewestRowsTile, SmallMTile, MediumTile, SquareTile, BlocksTile>);

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Whether 32-bit row offsets of OperandLoad reach all rows.
bool are_near(const RowLayout& rows, std::int64_t num) {
  const std::int64_t farthest = (std::min(num, rows.inner) - 1) * std::abs(rows.inner_stride) +
                                (num - 1) / rows.inner * std::abs(rows.outer_stride);
  return farthest / kChunkElements <= kMaxRowChunks;
}
bool copies_chunks(const GemmOperand& x, std::int64_t extent, std::int64_t contraction) {
  const std::int64_t rows = x.contraction_contiguous ? extent : contraction;
  return rows_begin_at_16_bytes(x.data, x.rows, rows, 2) && (!x.contraction_contiguous || are_near(x.rows, rows));
}

template <class Tile, bool kContractionA, bool kContractionB, int kLevels>
void run(const GemmParams& p, cudaStream_t stream) {
  const std::int64_t tiles_m = ceil_div(p.m, Tile::kM), tiles_n = ceil_div(p.n, Tile::kN);
  RLK_CHECK(tiles_m <= kMaxGrid / kGroupTiles / tiles_n, "linear: too many outputs for one launch");
  const int blocks = static_cast<int>(tiles_m * tiles_n);
  std::int64_t part = p.contraction;
  if (p.segments > 1) part = p.contraction / p.segments;
  if (p.block > 0) part = p.block;
  const int most = allow_shared_memory<gemm_sm80_kernel<Tile, kContractionA, kContractionB, kLevels>>();
  // As many stages as possible, provided that all blocks of the launch are resident, or as many blocks as the registers
  // allow.
  constexpr int kReserved = 1024;  // bytes of shared memory that the system reserves per block
  const int resident = static_cast<int>(
      std::clamp<std::int64_t>(ceil_div(blocks, multiprocessors(current_device())), 1, Tile::kMinBlocks));
  const int stages = std::clamp(((most + kReserved) / resident - kReserved) / Tile::kStageBytes, kLeastStages,
                                std::min(Tile::kMostStages, most / Tile::kStageBytes));
  const GemmLaunchSm80 launch{p,
                              std::max<std::int64_t>(part, 1),
                              static_cast<int>(tiles_m),
                              static_cast<int>(tiles_n),
                              stages,
                              copies_chunks(p.a, p.m, p.contraction),
                              copies_chunks(p.b, p.n, p.contraction),
                              rows_begin_at_16_bytes(p.d, p.d_rows, p.m, size_of(p.d_dtype))};
  gemm_sm80_kernel<Tile, kContractionA, kContractionB, kLevels>
      <<<blocks, Tile::kThreads, stages * Tile::kStageBytes, stream>>>(launch);
  check(cudaGetLastError(), "launch of gemm_sm80");
}

template <class Tile, int kLevels>
void run_contiguous_a(const GemmParams& p, cudaStream_t stream) {
  return p.b.contraction_contiguous ? run<Tile, true, true, kLevels>(p, stream)
                                    : run<Tile, true, false, kLevels>(p, stream);
}
template <class Tile, int kLevels>
void run(const GemmParams& p, cudaStream_t stream) {
  return p.a.contraction_contiguous ? run_contiguous_a<Tile, kLevels>(p, stream)
                                    : run<Tile, false, false, kLevels>(p, stream);
}

// Whether the current device has shared memory for a tile's stages. Compute capabilities 8.6, 8.9 and 12.0 have 99 KB,
// which is enough for every tile except the large tile.
template <class Tile>
bool has_shared_memory() {
  return allow_shared_memory<gemm_sm80_kernel<Tile, true, true, 0>>() >= kLeastStages * Tile::kStageBytes;
}

bool has_blocks(const GemmParams& p) { return p.block > 0 && p.contraction > p.block; }

bool can_have(const GemmParams& p, Sm80Tile tile) {
  const bool a = p.a.contraction_contiguous, b = p.b.contraction_contiguous;
  if (!a && b) return tile == Sm80Tile::kMedium;  // no operator needs this layout
  switch (tile) {
    case Sm80Tile::kFewestRows:
    case Sm80Tile::kSmallM:
      return a;
    case Sm80Tile::kMedium:
      return true;
    case Sm80Tile::kSquare:
      return p.segments <= 1 && !has_blocks(p);
    case Sm80Tile::kLarge:
      return p.segments <= 1 && !has_blocks(p) && has_shared_memory<LargeTile>();
    case Sm80Tile::kBlocks:
      return !a && has_blocks(p);
  }
  return false;
}

// The cost of a product with a tile: the number of tiles per multiprocessor, times the multiplications of a tile,
// divided by `efficiency`. The efficiency is the tile's speed relative to mma.sync alone on an H100.
template <class Tile>
double cost(const GemmParams& p, double efficiency) {
  const std::int64_t blocks = ceil_div(p.m, Tile::kM) * ceil_div(p.n, Tile::kN);
  return static_cast<double>(ceil_div(blocks, multiprocessors(current_device()))) * Tile::kM * Tile::kN / efficiency;
}

double cost(const GemmParams& p, Sm80Tile tile) {
  switch (tile) {
    case Sm80Tile::kFewestRows:
      return p.m <= FewestRowsTile::kM ? 0.0 : HUGE_VAL;
    case Sm80Tile::kSmallM:
      return p.m <= SmallMTile::kM ? 0.0 : cost<SmallMTile>(p, 0.23);
    case Sm80Tile::kMedium:
      return cost<MediumTile>(p, 0.41);
    case Sm80Tile::kSquare:
      return cost<SquareTile>(p, 0.64);
    case Sm80Tile::kLarge:
      return cost<LargeTile>(p, 0.67);
    case Sm80Tile::kBlocks:
      return cost<BlocksTile>(p, 0.49);
  }
  return HUGE_VAL;
}

}  // namespace

namespace RLK_CUDA_ARCH {

std::vector<Sm80Tile> gemm_tiles(const GemmParams& p) {
  std::vector<Sm80Tile> tiles;
  std::copy_if(std::begin(kTiles), std::end(kTiles), std::back_inserter(tiles),
               [&](Sm80Tile tile) { return can_have(p, tile); });
  return tiles;
}

Sm80Tile choose_tile(const GemmParams& p) {
  Sm80Tile best = Sm80Tile::kMedium;
  double least = HUGE_VAL;
  for (const Sm80Tile tile : kTiles) {
    const double here = can_have(p, tile) ? cost(p, tile) : HUGE_VAL;
    if (here < least) best = tile, least = here;
  }
  return best;
}

void gemm_by_tile(const GemmParams& p, Sm80Tile tile, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return;
  RLK_CHECK(can_have(p, tile), "linear: this tile cannot have the product");
  RLK_CHECK(p.segments <= 1 || p.block == 0, "linear: segments and token blocks are not together");
  switch (tile) {
    case Sm80Tile::kFewestRows:
      return run_contiguous_a<FewestRowsTile, kSegmentLevels>(p, stream);
    case Sm80Tile::kSmallM:
      return run_contiguous_a<SmallMTile, kSegmentLevels>(p, stream);
    case Sm80Tile::kMedium:
      if (!p.a.contraction_contiguous && p.b.contraction_contiguous) {
        return run<MediumTile, false, true, kSegmentLevels>(p, stream);
      }
      return run<MediumTile, kSegmentLevels>(p, stream);
    case Sm80Tile::kSquare:
      return run<SquareTile, 0>(p, stream);
    case Sm80Tile::kLarge:
      return run<LargeTile, 0>(p, stream);
    case Sm80Tile::kBlocks:
      return run<BlocksTile, false, false, 1>(p, stream);
  }
}

void gemm(const GemmParams& p, cudaStream_t stream) {
  if (p.m > 0 && p.n > 0) gemm_by_tile(p, choose_tile(p), stream);
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
