#include "gemm_run_sm90.cuh"

namespace rlk::cuda {

bool run_plan_bf16(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  return run_plan<Bf16>(BuiltTiles{}, p, plan, stream);
}

}  // namespace rlk::cuda
