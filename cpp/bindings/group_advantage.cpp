// Python's entry to group_advantage.
#include "rlk/ops/group_advantage.h"

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

// Returns (advantage, mean or None, std or None, status or None). The three kinds and the flags are the contract's
// numbers, from ops/group_advantage.py. Exactly one of offsets, ids and a size is given.
nb::object call(Frame* frame, nb::handle rewards, nb::handle group_offsets, nb::handle group_ids,
                std::int64_t group_size, nb::handle lengths, nb::handle baseline, int baseline_kind, int scale,
                int alone, bool leave_one_out, bool best_only, bool by_nonzero, bool exclude_nan, nb::handle eps,
                nb::handle f_norm, bool return_stats, bool return_status) {
  const VectorArgument of_rewards(frame, rewards, "rewards", kFloat32, "num_sequences");
  const Device device = of_rewards.device();
  GroupAdvantageParams p;
  p.num_sequences = of_rewards.size();
  require(p.num_sequences < std::int64_t{1} << 30, "rewards", "fewer than 2^30 sequences, got ", p.num_sequences);
  p.rewards = of_rewards.floats();
  p.reward_stride = of_rewards.stride();
  const auto one_a_sequence = [&](nb::handle given, const char* name, const Dtypes& dtypes) {
    return VectorArgument(frame, given, name, dtypes, p.num_sequences, "num_sequences", device);
  };
  const VectorArgument ids = one_a_sequence(group_ids, "group_ids", kIndices);
  ids.require_contiguous();
  const bool by_ids = group_offsets.is_none() && !group_ids.is_none();
  const GroupsArgument groups(frame, group_offsets, by_ids ? 1 : group_size, p.num_sequences, 31, device);
  p.group_offsets = groups.offsets.data;
  if (groups.offsets.data != nullptr) p.num_groups = groups.num_groups;
  if (by_ids) p.group_ids = ids.data();
  p.index_dtype = by_ids ? ids.dtype(DType::kInt64) : groups.offsets.dtype;
  p.group_size = group_size;
  const VectorArgument of_lengths = one_a_sequence(lengths, "lengths", kCounts);
  const VectorArgument of_baseline = one_a_sequence(baseline, "baseline", kFloat32);
  p.lengths = of_lengths.data();
  p.length_dtype = of_lengths.dtype(DType::kInt64);
  p.length_stride = of_lengths.stride();
  p.baseline = of_baseline.floats();
  p.baseline_stride = of_baseline.stride();
  p.baseline_kind = static_cast<GroupBaseline>(baseline_kind);
  p.scale = static_cast<GroupScale>(scale);
  p.alone = static_cast<GroupAlone>(alone);
  p.leave_one_out = leave_one_out;
  p.best_only = best_only;
  p.by_nonzero = by_nonzero;
  p.exclude_nan = exclude_nan;
  p.eps = read_number_in(eps, "eps", 0.0f, kMostFloat, "a finite number >= 0 in float32");
  p.f_norm = read_positive(f_norm, "f_norm");
  return Results("group_advantage", *of_rewards.array(), frame)
      .add(&p.advantage, {p.num_sequences})
      .add(&p.mean, {p.num_sequences}, return_stats)
      .add(&p.std, {p.num_sequences}, return_stats)
      .add(&p.status, {p.num_sequences}, return_status)
      .run(rlk::group_advantage, &p, group_advantage_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "group_advantage", &call); });

}  // namespace
}  // namespace rlk::bindings
