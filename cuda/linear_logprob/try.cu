#include "forward_sm90.cuh"
namespace rlk::cuda {
template __global__ void linear_logprob_sm90_kernel<Bf16, Exp::kHardware, false, HeadLogits::LOGITS, 128>(const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, const __grid_constant__ HeadLaunch);
}
