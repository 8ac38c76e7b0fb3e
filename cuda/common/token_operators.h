// Host entry points of the kernels of token_operators.inc. token_operators.cpp checks their arguments.
#pragma once

#include "launch.h"
#include "token_plan.h"

#define RLK_TOKEN_OPERATOR(op, function, Params, Batch)                                         \
  namespace rlk {                                                                               \
  struct Params;                                                                                \
  }                                                                                             \
  namespace rlk::cuda {                                                                         \
  RLK_CUDA_KERNELS(void function(const Params& p, const TokenPlan& plan, cudaStream_t stream);) \
  }
#include "token_operators.inc"
#undef RLK_TOKEN_OPERATOR
