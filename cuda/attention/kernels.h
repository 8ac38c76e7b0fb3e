// Host entry points of the attention kernels, one per architecture, and the ways in which each can serve a call. All have
// the same bits. Arguments were checked in attention.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/attention_tile.h"

namespace rlk::cuda {

enum class AttentionKernel : std::int32_t {
  kTiles,    // blocks of 64 rows; float32: 64, or 32 of more than 128 columns
  kFewRows,  // blocks of 16 rows, where a sequence has few; bf16 and fp16: a block for each of their splits
  kWgmma,    // sm_90: bf16 and fp16, heads of 64 and 128 columns that the copy engine can fetch
};
struct AttentionPlan {
  AttentionKernel kernel = AttentionKernel::kTiles;
};
constexpr AttentionPlan kAttentionPlans[] = {
    {AttentionKernel::kTiles}, {AttentionKernel::kFewRows}, {AttentionKernel::kWgmma}};
// Whether a plan can serve a call on `capability` (10 * major + minor), and the one that does.
bool fits_plan(const AttentionParams& p, const AttentionPlan& plan, int capability);
AttentionPlan choose_plan(const AttentionParams& p, int capability);
// Bytes of workspace: a counter of tiles for kWgmma, splits' results for kFewRows.
std::int64_t workspace_bytes_of(const AttentionParams& p, const AttentionPlan& plan);

void attention_sm80(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream);
void attention_sm90(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream);
void attention_backward_sm80(const AttentionBackwardParams& p, cudaStream_t stream);
void attention_backward_sm90(const AttentionBackwardParams& p, cudaStream_t stream);

}  // namespace rlk::cuda
