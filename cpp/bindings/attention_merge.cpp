// Python's entry to attention_merge.
#include <algorithm>
#include <numeric>

#include "call.h"
#include "linear_args.h"
#include "rlk/ops/attention.h"

namespace rlk::bindings {
namespace {

// The parts or partials of a call: [parts, batch, tokens, heads, head_dim], packed without batch.
void read_shape(const Array& a, AttentionMergeParams* p) {
  require_shape(a->ndim == 4 || a->ndim == 5, a,
                "shape [splits, batch, tokens, heads, head_dim], or packed [splits, tokens, heads, head_dim]");
  p->num_splits = a->shape[0];
  p->value_dim = a->shape[a->ndim - 1];
  p->num_q_heads = a->shape[a->ndim - 2];
  p->q_tokens = a->shape[a->ndim - 3];
  p->rows = p->q_tokens * (a->ndim == 5 ? a->shape[1] : 1);
  check_head_dim(a);
  require(p->num_splits <= kMaxMergedSplits, a, "at most ", kMaxMergedSplits, " splits, got shape ", a.shape());
  require_contiguous(a);
}

// The shape of lse, where heads precede tokens.
Sizes rows_of(const Array& a) {
  Sizes shape(a.shape().begin() + 1, a.shape().end() - 1);
  std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  return shape;
}

void check_like(const Array& a, const Sizes& shape, const Array& like, const char* what) {
  require_device(a, like->device);
  require_shape(std::ranges::equal(a.shape(), shape), a, "shape ", shape, " (", what, ")");
  require_contiguous(a);
}

nb::object run(Frame* frame, AttentionMergeParams* p, const Array& first, bool wants_lse) {
  return Results("attention", first, frame)
      .add(&p->out, first.shape().subspan(1), p->dtype)
      .add(&p->lse, rows_of(first), wants_lse)
      .run(rlk::attention_merge, *p);
}

// `splits` has the split numbers of the partials, in any order.
RLK_FUNCTION(attention_merge, (sums_given, stats_given, sinks_given, splits), int dtype, int exp, bool wants_lse) {
  AttentionMergeParams p;
  const Array &sums = frame->read(sums_given, "sums", kFloat32), &stats = frame->read(stats_given, "stats", kFloat32);
  read_shape(sums, &p);
  const Sizes of_stats = shape_with(sums.shape().first(sums->ndim - 1), 2);
  check_like(stats, of_stats, sums, "m and l of each row of sums");
  Sizes numbers;
  for (const nb::handle number : splits) numbers.push_back(nb::cast<std::int64_t>(number));
  require(std::ssize(numbers) == p.num_splits, "splits", p.num_splits, " numbers (the first dimension of sums), got ",
          numbers.size());
  std::iota(p.order, p.order + p.num_splits, std::int16_t{0});
  std::sort(p.order, p.order + p.num_splits, [&](std::int16_t a, std::int16_t b) { return numbers[a] < numbers[b]; });
  for (std::int64_t i = 1; i < p.num_splits; ++i) {
    const std::int64_t number = numbers[p.order[i]];
    require(number != numbers[p.order[i - 1]], "splits", "each number once, got ", number, " twice");
  }
  if (const Array* const sinks = frame->optional(sinks_given, "sinks", kFloat32)) {
    check_like(*sinks, {p.num_q_heads}, sums, "the heads of sums");
    p.sinks = sinks->elements<float>();
  }
  p.stats = stats.data<float>();
  p.sums = sums.data<float>();
  p.dtype = static_cast<DType>(dtype);
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  return run(frame, &p, sums, wants_lse);
}

RLK_FUNCTION(attention_merge_approximate, (outs_given, lses_given), int exp, bool wants_lse) {
  AttentionMergeParams p;
  const Array &outs = frame->read(outs_given, "outs", kFloats), &lses = frame->read(lses_given, "lses", kFloat32);
  read_shape(outs, &p);
  Sizes of_lses = rows_of(outs);
  of_lses.insert(of_lses.begin(), p.num_splits);
  check_like(lses, of_lses, outs, "a number for each row of outs, heads in front of tokens");
  std::iota(p.order, p.order + p.num_splits, std::int16_t{0});
  p.outs = outs.data();
  p.lses = lses.data<float>();
  p.dtype = outs->dtype;
  p.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  return run(frame, &p, outs, wants_lse);
}

}  // namespace
}  // namespace rlk::bindings
