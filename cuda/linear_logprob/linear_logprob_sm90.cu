// Instantiates the kernels of the fused head for SM90. CMake compiles this file once per operand type.
#include "run_sm90.cuh"

namespace rlk::cuda {
template void run_heads<RLK_PART>(const LinearLogprobParams&, const void*, cudaStream_t);
}
