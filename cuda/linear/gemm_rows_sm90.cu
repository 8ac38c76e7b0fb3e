// Products of few rows with weights whose rows begin at any element.
#include "gemm_run_sm90.cuh"

namespace rlk::cuda {

bool run_row_plan(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  using Tiles = TileList<RowTile<64, 64>, RowTile<64, 128>, RowTile<64, 256>>;
  return p.dtype == DType::kBFloat16 ? run_tiled_plan<Bf16>(Tiles{}, p, plan, stream)
                                     : run_tiled_plan<Fp16>(Tiles{}, p, plan, stream);
}

}  // namespace rlk::cuda
