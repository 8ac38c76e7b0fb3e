// Kernels for weights whose rows begin at any element.
#include "gemm_few_rows_sm90.cuh"
#include "gemm_run_sm90.cuh"

namespace rlk::cuda {
namespace {

template <class T, int kTiles, int kUnit, int kLogPieces>
void run_few_rows(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  FewRowsLaunch launch{launch_of(p, kFewRowsPiece / 2, plan.tile_m),
                       row_streams(p.b, p.n, p.contraction),
                       row_streams(p.a, p.m, p.contraction),
                       plan.tile_m,
                       static_cast<int>((p.n + plan.tile_m - 1) / plan.tile_m),
                       0,
                       plan.tile_m < 64 ? 1 : 4};
  launch.pieces = launch.gemm.k_steps;
  auto* kernel = gemm_few_rows_sm90_kernel<T, kTiles, kUnit, kLogPieces>;
  allow_shared_memory<gemm_few_rows_sm90_kernel<T, kTiles, kUnit, kLogPieces>>();
  const int memory = few_rows_fixed_bytes(plan.tile_m) + (plan.tile_m + 8 * kTiles) * FewRowsRing<kLogPieces>::kPitch;
  launch_dependent<true>(kernel, std::min(launch.slices, multiprocessors(current_device())),
                         plan.tile_m * 2 + kWarpgroup, memory, stream, launch);
}

template <class T, int kTiles, int kUnit>
void run_few_rows(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  // Each row takes 2 KB of shared memory, or 1 KB if there are more than 96 rows.
  const int rows = plan.tile_m + 8 * kTiles;
  rows <= 96 ? run_few_rows<T, kTiles, kUnit, 3>(p, plan, stream) : run_few_rows<T, kTiles, kUnit, 2>(p, plan, stream);
}
template <class T, int kTiles>
bool run_few_rows(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  if (plan.tile_n != 8 * kTiles) return false;
  plan.row_unit == 8 ? run_few_rows<T, kTiles, 8>(p, plan, stream) : run_few_rows<T, kTiles, 2>(p, plan, stream);
  return true;
}

template <class T>
bool run(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  using Tiles = TileList<RowTile<64, 64, 2>, RowTile<64, 64, 4>, RowTile<64, 128, 2>, RowTile<64, 128, 4>,
                         RowTile<64, 256, 2>, RowTile<64, 256, 4>>;
  if (!plan.small_m) return run_tiled_plan<T>(Tiles{}, p, plan, stream);
  return run_few_rows<T, 1>(p, plan, stream) || run_few_rows<T, 2>(p, plan, stream) ||
         run_few_rows<T, 4>(p, plan, stream);
}

}  // namespace

bool run_row_plan(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? run<Bf16>(p, plan, stream) : run<Fp16>(p, plan, stream);
}

}  // namespace rlk::cuda
