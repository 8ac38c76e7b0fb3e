// Host entry points of the gae kernels, one per architecture, and the ways in which each can serve a call. All have the same
// bits. Arguments were checked in gae.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/ops/gae.h"

namespace rlk::cuda {

// A block has a sequence, of which each of its warps takes a chunk at a time.
struct GaePlan {
  int warps = 1;
};
constexpr GaePlan kGaePlans[] = {{1}, {2}, {4}, {8}, {16}};
GaePlan choose_plan(const GaeParams& p, int multiprocessors);

void gae_sm80(const GaeParams& p, const GaePlan& plan, cudaStream_t stream);
void gae_sm90(const GaeParams& p, const GaePlan& plan, cudaStream_t stream);

}  // namespace rlk::cuda
