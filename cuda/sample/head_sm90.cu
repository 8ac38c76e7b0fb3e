// Instantiates the kernels of linear_sample for SM90. CMake compiles this file once per operand type.
#include "head_run_sm90.cuh"

namespace rlk::cuda {
template void run_fused_rows<RLK_PART>(const LinearParams&, const SampleParams&, cudaStream_t);
}
