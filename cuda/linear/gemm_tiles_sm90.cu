// Instantiates the kernels of linear's tiled and small_m plans for SM90. CMake compiles this file once per operand
// type.
#include "gemm_run_sm90.cuh"

namespace rlk::cuda {
template bool run_plan<RLK_PART>(const GemmParams&, const GemmPlan&, cudaStream_t);
}
