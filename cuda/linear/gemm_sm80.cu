// Which tile a product takes. Bits do not depend on it.
#include <algorithm>

#include "../common/alignment.h"
#include "../common/kernel_memory.h"
#include "gemm_sm80.cuh"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kMaxGrid = (std::int64_t{1} << 31) - 1;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool is_aligned(const GemmOperand& x, std::int64_t extent, std::int64_t contraction) {
  return rows_begin_at_16_bytes(x.data, x.rows, x.contraction_contiguous ? extent : contraction, 2);
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
  // As many stages as let all blocks of the launch be resident, or as many of them as registers allow.
  constexpr int kReserved = 1024;  // of a block, for the system
  const int resident = static_cast<int>(
      std::clamp<std::int64_t>(ceil_div(blocks, multiprocessors(current_device())), 1, Tile::kMinBlocks));
  const int stages = std::clamp(((most + kReserved) / resident - kReserved) / Tile::kStageBytes, 3,
                                std::min(kMaxGemmStages, most / Tile::kStageBytes));
  const GemmLaunchSm80 launch{p,
                              std::max<std::int64_t>(part, 1),
                              static_cast<int>(tiles_m),
                              static_cast<int>(tiles_n),
                              stages,
                              is_aligned(p.a, p.m, p.contraction),
                              is_aligned(p.b, p.n, p.contraction),
                              rows_begin_at_16_bytes(p.d, p.d_rows, p.m, size_of(p.d_dtype))};
  gemm_sm80_kernel<Tile, kContractionA, kContractionB, kLevels>
      <<<blocks, Tile::kThreads, stages * Tile::kStageBytes, stream>>>(launch);
  check(cudaGetLastError(), "launch of gemm_sm80");
}

// What a tile would cost, in the time of a multiprocessor that has it alone: tiles in turn, by their products, by the
// part of the tensor cores' speed that shared memory allows.
template <class Tile>
double cost(const GemmParams& p, double efficiency) {
  const std::int64_t blocks = ceil_div(p.m, Tile::kM) * ceil_div(p.n, Tile::kN);
  return static_cast<double>(ceil_div(blocks, multiprocessors(current_device()))) * Tile::kM * Tile::kN / efficiency;
}

}  // namespace

void gemm_sm80(const GemmParams& p, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return;
  const bool a = p.a.contraction_contiguous, b = p.b.contraction_contiguous;
  const bool blocks = p.block > 0 && p.contraction > p.block, segments = p.segments > 1;
  constexpr int kLevels = kSegmentLevels;
  if (!a && b) return run<MediumTile, false, true, kLevels>(p, stream);  // no operator asks for it
  const double medium = cost<MediumTile>(p, 0.55);
  if (a && (p.m <= FewRowsTile::kM || cost<FewRowsTile>(p, 0.25) < medium)) {
    if (p.m <= FewestRowsTile::kM) {
      return b ? run<FewestRowsTile, true, true, kLevels>(p, stream)
               : run<FewestRowsTile, true, false, kLevels>(p, stream);
    }
    return b ? run<FewRowsTile, true, true, kLevels>(p, stream) : run<FewRowsTile, true, false, kLevels>(p, stream);
  }
  if (!segments && !blocks && cost<LargeTile>(p, 0.9) < medium) {
    if (!a) return run<LargeTile, false, false, 0>(p, stream);
    return b ? run<LargeTile, true, true, 0>(p, stream) : run<LargeTile, true, false, 0>(p, stream);
  }
  if (!a) {
    if (blocks && cost<LargeBlocksTile>(p, 0.8) < medium) return run<LargeBlocksTile, false, false, 1>(p, stream);
    return run<MediumTile, false, false, kLevels>(p, stream);
  }
  return b ? run<MediumTile, true, true, kLevels>(p, stream) : run<MediumTile, true, false, kLevels>(p, stream);
}

}  // namespace rlk::cuda
