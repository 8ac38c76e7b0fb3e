// Declares the host entry points of kernels, one per architecture. Each operator's .cpp checks the arguments.
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

// RLK_KERNEL(function, Params, further arguments). The further arguments affect the speed and change no bit of a result.
// They are a plan, `warps` (the number of warps that share a sequence), `vectors` (whether a load takes 16 aligned bytes),
// or `vec8s` (vectors of eight columns per thread).
#define RLK_KERNEL(function, Params, ...)                                                           \
  namespace rlk {                                                                                   \
  struct Params;                                                                                    \
  }                                                                                                 \
  namespace rlk::cuda {                                                                             \
  RLK_CUDA_KERNELS(void function(const Params& p __VA_OPT__(, ) __VA_ARGS__, cudaStream_t stream);) \
  }
#define RLK_TOKEN_OPERATOR(op, function, Params, Batch) RLK_KERNEL(function, Params, const TokenPlan& plan)
#include "../tokens/operators.inc"
#undef RLK_TOKEN_OPERATOR
#define RLK_ELEMENTWISE(operator, function, Params, forms) RLK_KERNEL(function, Params, int vec8s)
#include "rlk/elementwise.inc"
#undef RLK_ELEMENTWISE
RLK_KERNEL(gae, GaeParams, int warps)
RLK_KERNEL(group_advantage, GroupAdvantageParams)
RLK_KERNEL(kl, KlParams, const TokenPlan& plan)
RLK_KERNEL(kv_cache_append, CacheAppendParams, bool vectors)
RLK_KERNEL(logprob_forward, LogprobParams, const GroupGrid& grid, LogprobPlan plan)
RLK_KERNEL(logprob_smoothing, LogprobParams, const GroupGrid& grid)
RLK_KERNEL(logprob_merge, LogprobMergeParams)
RLK_KERNEL(logprob_backward, LogprobBackwardParams)
RLK_KERNEL(masked_whiten, MaskedWhitenParams, int warps)
RLK_KERNEL(optimal_token_baseline, OptimalTokenBaselineParams)
RLK_KERNEL(pack_layout, PackLayoutParams)
RLK_KERNEL(pack, PackParams, const PackGrid& grid)
RLK_KERNEL(preference_loss, PreferenceLossParams)
RLK_KERNEL(preference_loss_backward, PreferenceLossBackwardParams)
RLK_KERNEL(process_logits, ProcessLogitsParams)
RLK_KERNEL(random_bits, RandomBitsParams)
RLK_KERNEL(sample, SampleParams)
RLK_KERNEL(sample_partial, SamplePartialParams)
RLK_KERNEL(sample_merge, SampleMergeParams)
RLK_KERNEL(scatter_rewards, ScatterRewardsParams, const TokenPlan& plan)
RLK_KERNEL(shift_labels_packed, ShiftLabelsParams)
RLK_KERNEL(loss_mask_from_spans, SpanMaskParams)
RLK_KERNEL(tool_mask, ToolMaskParams)
#undef RLK_KERNEL
