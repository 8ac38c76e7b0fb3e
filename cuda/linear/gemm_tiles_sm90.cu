// The tiled and small_m plans of linear for SM90, compiled once per operand type.
#include "gemm_run_sm90.cuh"

namespace rlk::cuda {
template bool run_plan<RLK_PART>(const GemmParams&, const GemmPlan&, cudaStream_t);
}
