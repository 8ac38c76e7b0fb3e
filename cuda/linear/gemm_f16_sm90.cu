#include "gemm_run_sm90.cuh"

namespace rlk::cuda {

bool run_plan_f16(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  return run_plan<Fp16>(BuiltTiles{}, p, plan, stream);
}

}  // namespace rlk::cuda
