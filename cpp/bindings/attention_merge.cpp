// Python's entry to attention_merge.
#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "linear_args.h"
#include "rlk/ops/attention.h"

namespace rlk::bindings {
namespace {

void require_contiguous(const Array& a) {
  if (!a.view().is_contiguous()) argument_error(a.name(), std::string("expected a contiguous array") + kCopyHint);
}

// The parts or partials of a call: [parts, batch, tokens, heads, head_dim], packed without batch.
void read_shape(const Array& a, AttentionMergeParams* p) {
  const TensorView& v = a.view();
  if (v.ndim != 4 && v.ndim != 5) {
    argument_error(a,
                   "expected shape [splits, batch, tokens, heads, head_dim], or packed [splits, tokens, heads, "
                   "head_dim], got " +
                       shape_text(a.shape()));
  }
  p->num_splits = v.shape[0];
  p->head_dim = v.shape[v.ndim - 1];
  p->num_q_heads = v.shape[v.ndim - 2];
  p->q_tokens = v.shape[v.ndim - 3];
  p->rows = p->q_tokens * (v.ndim == 5 ? v.shape[1] : 1);
  if (p->head_dim < 8 || p->head_dim > kMaxHeadDim || p->head_dim % 8 != 0) {
    argument_error(a, "expected a last dimension (head_dim) that is a multiple of 8 in [8, " +
                          std::to_string(kMaxHeadDim) + "], got shape " + shape_text(a.shape()));
  }
  if (p->num_splits > kMaxMergedSplits) {
    argument_error(
        a, "expected at most " + std::to_string(kMaxMergedSplits) + " splits, got shape " + shape_text(a.shape()));
  }
  require_contiguous(a);
}

// A shape of lse: heads in front of tokens.
std::vector<std::int64_t> rows_of(const Array& a) {
  const TensorView& v = a.view();
  std::vector<std::int64_t> shape(v.shape + 1, v.shape + v.ndim - 1);
  std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  return shape;
}

void read_like(const Array& a, std::span<const std::int64_t> shape, const Array& like, const char* what) {
  require_device(a, like.view().device);
  if (!std::ranges::equal(a.shape(), shape)) {
    argument_error(a, "expected shape " + shape_text(shape) + " (" + what + "), got " + shape_text(a.shape()));
  }
  require_contiguous(a);
}

nb::object run(AttentionMergeParams* p, const Array& first, nb::handle array, bool wants_lse, nb::handle allocate,
               std::uintptr_t stream) {
  return Results("attention", array, first.view().device, allocate, stream)
      .add(&p->out, first.shape().subspan(1), p->dtype)
      .add(&p->lse, rows_of(first), wants_lse)
      .run(rlk::attention_merge, *p);
}

// `splits`: the numbers of partials, in any order.
nb::object merge(nb::handle sums_given, nb::handle stats_given, nb::handle sinks_given, nb::handle splits, int dtype,
                 int exp, bool wants_lse, nb::handle allocate, std::uintptr_t stream) {
  AttentionMergeParams p;
  const Array sums(sums_given, "sums", kFloat32), stats(stats_given, "stats", kFloat32);
  read_shape(sums, &p);
  std::vector<std::int64_t> of_stats(sums.shape().begin(), sums.shape().end());
  of_stats.back() = 2;
  read_like(stats, of_stats, sums, "m and l of each row of sums");
  std::vector<std::int64_t> numbers;
  for (const nb::handle number : splits) numbers.push_back(nb::cast<std::int64_t>(number));
  if (static_cast<std::int64_t>(numbers.size()) != p.num_splits) {
    argument_error("splits", "expected " + std::to_string(p.num_splits) +
                                 " numbers (the first dimension of sums), got " + std::to_string(numbers.size()));
  }
  std::iota(p.order, p.order + p.num_splits, std::int16_t{0});
  std::sort(p.order, p.order + p.num_splits, [&](std::int16_t a, std::int16_t b) { return numbers[a] < numbers[b]; });
  for (std::int64_t i = 1; i < p.num_splits; ++i) {
    if (numbers[p.order[i]] == numbers[p.order[i - 1]])
      argument_error("splits", "expected each number once, got " + std::to_string(numbers[p.order[i]]) + " twice");
  }
  std::optional<Array> sinks;
  if (!sinks_given.is_none()) {
    sinks.emplace(sinks_given, "sinks", kFloat32);
    const std::int64_t heads[] = {p.num_q_heads};
    read_like(*sinks, heads, sums, "the heads of sums");
    static constexpr float kEmpty = 0.0f;
    p.sinks = sinks->view().data != nullptr ? static_cast<const float*>(sinks->view().data) : &kEmpty;
  }
  p.stats = static_cast<const float*>(stats.view().data);
  p.sums = static_cast<const float*>(sums.view().data);
  p.dtype = static_cast<DType>(dtype);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  return run(&p, sums, sums_given, wants_lse, allocate, stream);
}

nb::object approximate(nb::handle outs_given, nb::handle lses_given, int exp, bool wants_lse, nb::handle allocate,
                       std::uintptr_t stream) {
  AttentionMergeParams p;
  const Array outs(outs_given, "outs", kFloats), lses(lses_given, "lses", kFloat32);
  read_shape(outs, &p);
  std::vector<std::int64_t> of_lses = rows_of(outs);
  of_lses.insert(of_lses.begin(), p.num_splits);
  read_like(lses, of_lses, outs, "a number for each row of outs, heads in front of tokens");
  std::iota(p.order, p.order + p.num_splits, std::int16_t{0});
  p.outs = outs.view().data;
  p.lses = static_cast<const float*>(lses.view().data);
  p.dtype = outs.view().dtype;
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  return run(&p, outs, outs_given, wants_lse, allocate, stream);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "attention_merge", &merge);
  define(m, "attention_merge_approximate", &approximate);
});

}  // namespace
}  // namespace rlk::bindings
