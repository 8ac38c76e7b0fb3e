// Host entry points of the attention kernels, one per architecture, and the ways in which each can serve a call. All have
// the same bits. Arguments were checked in attention.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/attention_tile.h"

namespace rlk::cuda {

// Rows of a forward's tile: 16 where a sequence has few, else as many as registers hold: 64, or 32 of more than 128
// columns.
struct AttentionPlan {
  bool few_rows = false;
};
constexpr AttentionPlan kAttentionPlans[] = {{false}, {true}};
AttentionPlan choose_plan(const AttentionParams& p);

void attention_sm80(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream);
void attention_sm90(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream);
void attention_backward_sm80(const AttentionBackwardParams& p, cudaStream_t stream);
void attention_backward_sm90(const AttentionBackwardParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
