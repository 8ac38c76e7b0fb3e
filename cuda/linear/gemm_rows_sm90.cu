// Kernels for weights whose rows begin at any element.
#include "gemm_few_rows_sm90.cuh"
#include "gemm_run_sm90.cuh"

namespace rlk::cuda {
namespace {

template <class T, int kTiles, int kUnit>
void run_few_rows(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  auto* kernel = gemm_few_rows_sm90_kernel<T, kTiles, kUnit>;
  const int memory = allow_shared_memory<gemm_few_rows_sm90_kernel<T, kTiles, kUnit>>();
  const int rows = plan.tile_m + 8 * kTiles, fixed = few_rows_fixed_bytes(plan.tile_m);
  // A block leaves room for a block of the next kernel, unless its rings would then be short.
  const auto ring_within = [&](int bytes, int most) {
    return std::min(most, (bytes - fixed) / rows - few_rows_pitch(0)) / kFewRowsPiece;
  };
  constexpr int kReserved = 1024;  // bytes of shared memory that the system reserves per block
  const int ring = std::max(ring_within((memory - kReserved) / 2, kFewRowsMost), ring_within(memory, kFewRowsEnough));
  FewRowsLaunch launch{launch_of(p, kFewRowsPiece / 2, plan.tile_m),
                       row_streams(p.b, p.n, p.contraction),
                       row_streams(p.a, p.m, p.contraction),
                       plan.tile_m,
                       static_cast<int>((p.n + plan.tile_m - 1) / plan.tile_m),
                       0,
                       ring,
                       plan.tile_m < 64 ? 1 : 4};
  launch.pieces = launch.gemm.k_steps;
  launch_dependent<true>(kernel, std::min(launch.slices, multiprocessors(current_device())),
                         plan.tile_m * 2 + kWarpgroup, fixed + rows * few_rows_pitch(ring * kFewRowsPiece), stream,
                         launch);
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
