// Declares the host entry points of the kernels that kernels.inc and cuda/tokens/operators.inc list. Each kernel has
// one entry point per architecture. Each operator's .cpp checks the arguments.
#pragma once

#include "../tokens/plan.h"
#include "launch.h"

namespace rlk {
struct GroupGrid;
struct PackGrid;
namespace cuda {
enum class LogprobPlan : std::int32_t;
}
}  // namespace rlk

#define RLK_KERNEL(function, Params, ...)                                                           \
  namespace rlk {                                                                                   \
  struct Params;                                                                                    \
  }                                                                                                 \
  namespace rlk::cuda {                                                                             \
  RLK_CUDA_KERNELS(void function(const Params& p __VA_OPT__(, ) __VA_ARGS__, cudaStream_t stream);) \
  }
#define RLK_TOKEN_OPERATOR(op, function, Params, Batch) RLK_KERNEL(function, Params, const TokenPlan& plan)
#include "../tokens/operators.inc"
#include "kernels.inc"
#undef RLK_TOKEN_OPERATOR
#undef RLK_KERNEL
