// Kernels of products that also copy the operands that TMA cannot read.
#include "gemm_run_sm90.cuh"

namespace rlk::cuda {
namespace {

using Tiles = TileList<CopyingTile<false, false>, CopyingTile<false, true>, CopyingTile<true, true>>;

}  // namespace

bool run_copying_plan(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? run_tiled_plan<Bf16>(Tiles{}, p, plan, stream)
                                     : run_tiled_plan<Fp16>(Tiles{}, p, plan, stream);
}

}  // namespace rlk::cuda
