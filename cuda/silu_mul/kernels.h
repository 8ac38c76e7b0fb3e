// Host entry points of the silu_mul kernels, one set per architecture, and the ways in which each can serve a call. All
// have the same bits. Arguments were checked in silu_mul.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/silu_mul.h"

namespace rlk::cuda {

// A thread has `vec8s` times eight columns of a row; 0: eight single columns, which serves any width and alignment. A
// block has `chunks` chunks of as many columns as its threads have, and loads the next while it computes one.
struct GatedMulPlan {
  int vec8s = 0, chunks = 1;
  friend bool operator==(const GatedMulPlan&, const GatedMulPlan&) = default;
};
constexpr int kMoreChunks = 4;
constexpr GatedMulPlan kGatedMulPlans[] = {{1, 1}, {2, 1}, {1, kMoreChunks}, {2, kMoreChunks}, {0, 1}};
bool serves(const GatedMulPlan& plan, const GatedMulParams& p);
bool serves(const GatedMulPlan& plan, const GatedMulBackwardParams& p);
GatedMulPlan choose_plan(const GatedMulParams& p, int multiprocessors);
GatedMulPlan choose_plan(const GatedMulBackwardParams& p, int multiprocessors);

RLK_CUDA_KERNELS(void gated_mul(const GatedMulParams& p, const GatedMulPlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void gated_mul_backward(const GatedMulBackwardParams& p, const GatedMulPlan& plan,
                                         cudaStream_t stream);)

}  // namespace rlk::cuda
