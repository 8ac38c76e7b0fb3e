// Python's entry to optimal_token_baseline: fields move from checked arguments to the contract's params, outputs come from the
// caller.
#include "rlk/ops/optimal_token_baseline.h"

#include <limits>
#include <optional>

#include "define.h"
#include "gil.h"
#include "linear_args.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

// Returns (advantages, returns). The caller gives either offsets or a size; the other is None or 0.
nb::object call(nb::handle logprob, nb::handle rewards, nb::handle sum_p_sq, nb::handle mask, nb::handle importance,
                nb::handle cu_seqlens, nb::handle group_offsets, std::int64_t group_size, bool zero_tail,
                nb::handle eps, nb::handle allocate, std::uintptr_t stream) {
  TokenArguments tokens(logprob, "logprob", cu_seqlens);
  const Device device = tokens.device();
  require_backend("optimal_token_baseline", device);
  OptimalTokenBaselineParams p;
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.rewards = tokens.required(rewards, "rewards", true);
  p.sum_p_sq = tokens.required(sum_p_sq, "sum_p_sq", false);
  p.importance = tokens.optional(importance, "importance_weight", true);
  p.mask = tokens.optional_mask(mask);
  const std::int64_t num_sequences = p.sequences.num_sequences;
  const OffsetsArgument offsets(group_offsets, device, "group_offsets", "num_groups");
  if (!group_offsets.is_none()) {
    p.group_offsets = offsets.offsets.data;
    p.group_dtype = offsets.offsets.dtype;
    p.num_groups = offsets.num_sequences;
    if (p.num_groups >= std::int64_t{1} << 25) {
      argument_error("group_offsets", "expected fewer than 2^25 groups, got " + std::to_string(p.num_groups));
    }
    if (p.num_groups == 0 && num_sequences > 0) {
      argument_error("group_offsets",
                     "expected " + std::to_string(num_sequences) + " (the number of sequences) last, got shape [1]");
    }
  } else if (group_size < 1 || num_sequences % group_size != 0) {
    argument_error("group_size", "expected a divisor of " + std::to_string(num_sequences) +
                                     " (the number of sequences), got " + std::to_string(group_size));
  } else {
    p.group_size = group_size;
    p.num_groups = num_sequences / group_size;
    if (p.num_groups >= std::int64_t{1} << 25) {
      argument_error("group_size", "expected fewer than 2^25 groups, got " + std::to_string(p.num_groups));
    }
  }
  p.zero_tail = zero_tail ? 1 : 0;
  p.eps = read_number_in(eps, "eps", std::numeric_limits<float>::min(), std::numeric_limits<float>::max(),
                         "a finite number > 0 in float32");
  const Caller caller = make_caller(logprob, device, allocate, stream);
  const Caller::Fresh advantages = caller.empty(tokens.shape(), DType::kFloat32),
                      returns = caller.empty(tokens.shape(), DType::kFloat32);
  p.advantages = static_cast<float*>(advantages.data);
  p.returns = static_cast<float*>(returns.data);
  const nb::object workspace = take_workspace(caller, optimal_token_baseline_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::optimal_token_baseline(p, device, caller.stream);
  }
  return nb::make_tuple(advantages.array, returns.array);
}

}  // namespace

void bind_optimal_token_baseline(nb::module_& m) { define(m, "optimal_token_baseline", &call); }

}  // namespace rlk::bindings
