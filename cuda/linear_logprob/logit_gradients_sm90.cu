// Instantiates the kernels of the gradients of the head's logits for SM90. CMake compiles this file once per operand
// type.
#include "gradient_sm90.cuh"

namespace rlk::cuda {
template void run_logit_gradients<RLK_PART>(const LogprobBackwardParams&, const Head&, const void*, const ScoredGroups*,
                                            cudaStream_t);
}
