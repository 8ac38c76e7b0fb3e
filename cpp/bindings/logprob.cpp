// Python's entry to logprob.
#include <algorithm>
#include <vector>

#include "call.h"
#include "linear_args.h"
#include "logprob_outputs.h"

namespace rlk::bindings {
namespace {

nb::object run(const LogprobCall& call, nb::handle logits, int returns, nb::handle out, nb::handle allocate,
               std::uintptr_t stream) {
  LogprobParams p{call.input()};
  Results results("logprob", logits, call.device(), allocate, stream);
  Outputs outputs;
  outputs.add(&results, call.rows_shape(), returns, &p, &call, out);
  return results.run(rlk::logprob, &p, logprob_workspace_bytes);
}

nb::object forward(nb::handle logits, nb::handle target, nb::handle temperature, nb::handle logit_scale,
                   nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                   nb::handle kept_ids, nb::handle kept_offsets, int exp, int returns, nb::handle out,
                   nb::handle allocate, std::uintptr_t stream) {
  const LogprobCall call({logits, target, temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab,
                          kept_ids, kept_offsets, nb::none(), nb::none(), exp});
  return run(call, logits, returns, out, allocate, stream);
}

// An eager call on a plain CUDA tensor without gradient, kept set or given outputs: what a decode step costs on the
// host. NotImplemented sends every other call the general way.
nb::object eager(nb::handle logits, nb::handle target, nb::handle temperature, nb::handle logit_scale,
                 nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                 nb::handle exp, int returns) {
  const int mode = may_bypass_dispatcher({logits}) ? read_exp(exp) : -1;
  if (mode < 0) return nb::borrow(Py_NotImplemented);
  const LogprobCall call({logits, target, temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab,
                          nb::none(), nb::none(), nb::none(), nb::none(), mode});
  if (call.device().type != DeviceType::kCuda) return nb::borrow(Py_NotImplemented);
  return run(call, logits, returns, nb::none(), nb::none(), 0);
}

nb::object partial(nb::handle logits, nb::handle target, nb::handle temperature, nb::handle logit_scale,
                   nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                   nb::handle kept_ids, nb::handle kept_offsets, int exp, nb::handle vocab_start, nb::handle vocab_size,
                   nb::handle allocate, std::uintptr_t stream) {
  const LogprobCall call({logits, target, temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab,
                          kept_ids, kept_offsets, vocab_start, vocab_size, exp});
  std::vector<std::int64_t> shape(call.rows_shape().begin(), call.rows_shape().end());
  shape.push_back(kStatsFields);
  LogprobParams p{call.input()};
  return Results("logprob", logits, call.device(), allocate, stream)
      .add(&p.stats, shape)
      .run(rlk::logprob, &p, logprob_workspace_bytes);
}

// stats: [num_shards, ..., 5]; valid_vocab: of the whole vocabulary, read under label smoothing alone.
nb::object merge(nb::handle stats, nb::handle temperature, int returns, double label_smoothing,
                 std::int64_t valid_vocab, nb::handle allocate, std::uintptr_t stream) {
  const Array s(stats, "stats", kFloat32);
  const TensorView& v = s.view();
  const std::string got = shape_text(s.shape());
  if (v.ndim < 2 || v.shape[v.ndim - 1] != kStatsFields || !v.is_contiguous()) {
    argument_error(s, "expected a contiguous array of shape [shards, ..., 5], got " + got);
  }
  const std::int64_t shards = v.shape[0];
  if (shards != 1 && shards != 2 && shards != 4 && shards != 8) {
    argument_error(s, "expected 1, 2, 4 or 8 shards (first dimension), got " + got);
  }
  const std::span<const std::int64_t> rows = s.shape().subspan(1, v.ndim - 2);
  LogprobMergeParams p;
  p.stats = static_cast<const float*>(v.data);
  p.num_shards = static_cast<std::int32_t>(shards);
  p.num_rows = v.num_elements() / shards / kStatsFields;
  p.label_smoothing = static_cast<float>(label_smoothing);
  p.valid_vocab = valid_vocab;
  std::optional<Array> t;
  if (PyCapsule_CheckExact(temperature.ptr()) || exchange_api(temperature)) {
    t.emplace(temperature, "temperature", kFloat32);
    if (!(t->view().device == v.device)) {
      argument_error(*t, "expected device " + name_of(v.device) + " (that of stats), got " + name_of(t->view().device));
    }
    if (!std::ranges::equal(t->shape(), rows) || !t->view().is_contiguous()) {
      argument_error(*t, "expected a contiguous array of shape " + shape_text(rows));
    }
    p.temperature = static_cast<const float*>(t->view().data);
  } else {
    p.temperature_value = read_temperature_value(temperature);
  }
  Results results("logprob", stats, v.device, allocate, stream);
  Outputs().add(&results, rows, returns, &p);
  return results.run(rlk::logprob_merge, p);
}

// Layout of a given dlogits; raises where it does not fit logits, overlaps itself, or overlaps logits without being them.
RowLayout gradient_layout(const Array& out, const Array& logits) {
  const TensorView& v = out.view();
  const TensorView& x = logits.view();
  const auto refuse = [&](const std::string& message) { argument_error(out, message); };
  if (v.dtype != x.dtype) {
    dtype_error(out, std::string(name_of(x.dtype)) + " (that of logits)");
  }
  if (!(v.device == x.device)) {
    refuse("expected device " + name_of(x.device) + " (that of logits), got " + name_of(v.device));
  }
  if (!std::ranges::equal(out.shape(), logits.shape())) {
    refuse("expected shape " + shape_text(logits.shape()) + ", got " + shape_text(out.shape()));
  }
  require_writable(out);
  if (v.num_elements() > 0 && v.shape[v.ndim - 1] > 1 && v.stride(v.ndim - 1) != 1)
    refuse("expected a contiguous last dimension (stride 1)");
  bool same = v.data == x.data;
  for (int i = 0; i < v.ndim && same; ++i) same = x.shape[i] == 1 || v.stride(i) == x.stride(i);
  if (!same && ranges_overlap(v, x)) refuse("overlaps logits without being logits itself");
  const auto layout = row_layout(v, v.ndim - 1);
  if (!layout) refuse("expected leading dimensions that collapse to at most two strides");
  return *layout;
}

nb::object backward(nb::handle logits, nb::handle target, nb::handle temperature, nb::handle logit_scale,
                    nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                    nb::handle kept_ids, nb::handle kept_offsets, int exp, nb::handle vocab_start,
                    nb::handle vocab_size, nb::handle lse, nb::handle entropy, nb::handle dlogprob, nb::handle dlse,
                    nb::handle dentropy, nb::handle out, nb::handle allocate, std::uintptr_t stream) {
  const LogprobCall call({logits, target, temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab,
                          kept_ids, kept_offsets, vocab_start, vocab_size, exp});
  LogprobBackwardParams p;
  static_cast<LogprobInput&>(p) = call.input();
  if (lse.is_none()) throw nb::type_error("lse: expected the lse that logprob returned, got None");
  const BackwardRows rows(call, lse, entropy, dlogprob, dlse, dentropy, &p);
  if (!dentropy.is_none() && entropy.is_none())
    throw nb::type_error("entropy: expected the entropy that logprob returned, got None");

  Results results("logprob", logits, call.device(), allocate, stream);
  const TensorView& x = call.logits().view();
  std::optional<Array> given;
  if (out.is_none()) {
    results.add(&p.dlogits, call.logits().shape(), x.dtype);
    p.dlogits_rows = {.inner = p.num_rows > 0 ? p.num_rows : 1, .outer_stride = 0, .inner_stride = p.num_columns};
  } else {
    given.emplace(out, "out", name_of(x.dtype));
    p.dlogits_rows = gradient_layout(*given, call.logits());
    call.check_apart(*given, false);
    for (const Array& row : rows.arrays()) check_apart(*given, row);
    p.dlogits = given->view().data;
    results.add(out);
  }
  return results.run(rlk::logprob_backward, p);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "logprob", &forward);
  define(m, "logprob_eager", &eager);
  define(m, "logprob_partial", &partial);
  define(m, "logprob_merge", &merge);
  define(m, "logprob_backward", &backward);
});

}  // namespace
}  // namespace rlk::bindings
