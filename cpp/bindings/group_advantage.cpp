// Python's entry to group_advantage: fields move from checked arguments to the contract's params, outputs come from the
// caller.
#include "rlk/ops/group_advantage.h"

#include <limits>
#include <optional>

#include "define.h"
#include "gil.h"
#include "linear_args.h"
#include "module.h"
#include "tokens.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// (advantage, mean or None, std or None, status or None). The three kinds and the flags are the contract's numbers, of
// ops/group_advantage.py; of offsets, ids and a size one is given.
nb::object call(nb::handle rewards, nb::handle group_offsets, nb::handle group_ids, std::int64_t group_size,
                nb::handle lengths, nb::handle baseline, int baseline_kind, int scale, int alone, bool leave_one_out,
                bool best_only, bool by_nonzero, bool exclude_nan, nb::handle eps, nb::handle f_norm, bool return_stats,
                bool return_status, nb::handle allocate, std::uintptr_t stream) {
  const Array s(rewards, "rewards", "float32");
  const TensorView& v = s.view();
  const Device device = v.device;
  require_backend("group_advantage", device);
  if (v.dtype != DType::kFloat32) dtype_error(s, "float32");
  if (v.ndim != 1) argument_error("rewards", "expected shape [num_sequences], got " + shape_text(s.shape()));
  GroupAdvantageParams p;
  p.num_sequences = v.shape[0];
  if (p.num_sequences >= std::int64_t{1} << 30) {
    argument_error("rewards", "expected fewer than 2^30 sequences, got " + std::to_string(p.num_sequences));
  }
  p.rewards = static_cast<const float*>(v.data);
  p.reward_stride = v.shape[0] > 1 ? v.stride(0) : 1;
  const OffsetsArgument offsets(group_offsets, device, "group_offsets", "num_groups");
  const VectorArgument ids(group_ids, "group_ids", {DType::kInt32, DType::kInt64}, p.num_sequences, "num_sequences",
                           device);
  ids.require_contiguous();
  if (!group_offsets.is_none()) {
    p.group_offsets = offsets.offsets.data;
    p.index_dtype = offsets.offsets.dtype;
    p.num_groups = offsets.num_sequences;
    if (p.num_groups >= std::int64_t{1} << 31) {
      argument_error("group_offsets", "expected fewer than 2^31 groups, got " + std::to_string(p.num_groups));
    }
    if (p.num_groups == 0 && p.num_sequences > 0) {
      argument_error("group_offsets",
                     "expected " + std::to_string(p.num_sequences) + " (the number of sequences) last, got shape [1]");
    }
  } else if (!group_ids.is_none()) {
    p.group_ids = ids.data();
    p.index_dtype = ids.dtype(DType::kInt64);
  } else if (group_size < 1 || p.num_sequences % group_size != 0) {
    argument_error("group_size", "expected a divisor of " + std::to_string(p.num_sequences) +
                                     " (the number of sequences), got " + std::to_string(group_size));
  }
  p.group_size = group_size;
  const VectorArgument of_lengths(lengths, "lengths", {DType::kInt32, DType::kInt64, DType::kFloat32}, p.num_sequences,
                                  "num_sequences", device);
  const VectorArgument of_baseline(baseline, "baseline", {DType::kFloat32}, p.num_sequences, "num_sequences", device);
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
  p.eps = read_number_in(eps, "eps", 0.0f, kLargest, "a finite number >= 0 in float32");
  p.f_norm =
      read_number_in(f_norm, "f_norm", std::numeric_limits<float>::min(), kLargest, "a finite number > 0 in float32");
  const Caller caller = make_caller(rewards, device, allocate, stream);
  const auto fresh = [&](DType t, void** to) {
    Caller::Fresh out = caller.empty(s.shape(), t);
    *to = out.data;
    return out.array;
  };
  void *advantage = nullptr, *mean = nullptr, *std = nullptr, *status = nullptr;
  const nb::object advantages = fresh(DType::kFloat32, &advantage);
  nb::object means = nb::none(), stds = nb::none(), states = nb::none();
  if (return_stats) {
    means = fresh(DType::kFloat32, &mean);
    stds = fresh(DType::kFloat32, &std);
  }
  if (return_status) states = fresh(DType::kInt32, &status);
  p.advantage = static_cast<float*>(advantage);
  p.mean = static_cast<float*>(mean);
  p.std = static_cast<float*>(std);
  p.status = static_cast<std::int32_t*>(status);
  const nb::object workspace = take_workspace(caller, group_advantage_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::group_advantage(p, device, caller.stream);
  }
  return nb::make_tuple(advantages, means, stds, states);
}

}  // namespace

void bind_group_advantage(nb::module_& m) { define(m, "group_advantage", &call); }

}  // namespace rlk::bindings
