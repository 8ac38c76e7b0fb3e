// Python's entry to logprob.
#include <algorithm>

#include "call.h"
#include "linear_args.h"
#include "logprob_args.h"

namespace rlk::bindings {
namespace {

nb::object run(Frame* frame, const LogprobCall& call, int returns, nb::handle out) {
  LogprobParams p{call.input()};
  Results results("logprob", call.logits(), frame);
  add_outputs(frame, &results, call.rows_shape(), returns, &p, &call, out);
  return results.run(rlk::logprob, &p, logprob_workspace_bytes);
}

// `numbers`: those of LogprobArguments.
nb::object forward(Frame* frame, nb::handle logits, nb::handle target, nb::tuple numbers, int exp, int returns,
                   nb::handle out) {
  return run(frame, LogprobCall(frame, {logits, target, numbers, exp}), returns, out);
}

// Fast path for an eager call on a plain CUDA tensor without gradient, kept set or given outputs, such as a decode
// step. Any other call gets NotImplemented and takes the general path.
nb::object eager(nb::handle logits, nb::handle target, nb::tuple numbers, nb::handle exp, int returns) {
  const int mode = may_bypass_dispatcher({logits}) ? read_exp(exp) : -1;
  if (mode < 0) return nb::borrow(Py_NotImplemented);
  Frame frame;
  return unless_refused([&] {
    const LogprobCall call(&frame, {logits, target, numbers, mode});
    if (call.device().type != DeviceType::kCuda) return nb::borrow(Py_NotImplemented);
    return run(&frame, call, returns, nb::none());
  });
}

nb::object partial(Frame* frame, nb::handle logits, nb::handle target, nb::tuple numbers, int exp,
                   nb::handle vocab_start, nb::handle vocab_size) {
  const LogprobCall call(frame, {logits, target, numbers, exp, vocab_start, vocab_size});
  LogprobParams p{call.input()};
  return Results("logprob", call.logits(), frame)
      .add(&p.stats, shape_with(call.rows_shape(), kStatsFields))
      .run(rlk::logprob, &p, logprob_workspace_bytes);
}

// stats is [num_shards, ..., 5]. valid_vocab is that of the whole vocabulary; only label smoothing reads it.
nb::object merge(Frame* frame, nb::handle stats, nb::handle temperature, int returns, double label_smoothing,
                 std::int64_t valid_vocab) {
  const Array& s = frame->read(stats, "stats", kFloat32);
  const TensorView& v = s.view();
  require_shape(v.ndim >= 2 && v.shape[v.ndim - 1] == kStatsFields && v.is_contiguous(), s,
                "a contiguous array of shape [shards, ..., 5]");
  const std::int64_t shards = v.shape[0];
  require_shape(is_tree(shards), s, "1, 2, 4 or 8 shards (first dimension)");
  const std::span<const std::int64_t> rows = s.shape().subspan(1, v.ndim - 2);
  LogprobMergeParams p;
  p.stats = s.data<float>();
  p.num_shards = static_cast<std::int32_t>(shards);
  p.num_rows = v.num_elements() / shards / kStatsFields;
  p.label_smoothing = static_cast<float>(label_smoothing);
  p.valid_vocab = valid_vocab;
  if (is_array(temperature)) {
    const Array& t = frame->read(temperature, "temperature", kFloat32);
    require(t.view().device == v.device, t, "device ", v.device, " (that of stats), got ", t.view().device);
    require(std::ranges::equal(t.shape(), rows) && t.view().is_contiguous(), t, "a contiguous array of shape ", rows);
    p.temperature = t.data<float>();
  } else {
    p.temperature_value = read_temperature_value(temperature);
  }
  Results results("logprob", s, frame);
  add_outputs(frame, &results, rows, returns, &p);
  return results.run(rlk::logprob_merge, p);
}

// Layout of a given dlogits. It raises an error if dlogits does not match logits, overlaps itself, or overlaps logits
// without being logits.
RowLayout gradient_layout(const Array& out, const Array& logits) {
  const TensorView& v = out.view();
  const TensorView& x = logits.view();
  if (v.dtype != x.dtype) dtype_error(out, x.dtype, " (that of logits)");
  require(v.device == x.device, out, "device ", x.device, " (that of logits), got ", v.device);
  require_shape(std::ranges::equal(out.shape(), logits.shape()), out, "shape ", logits.shape());
  require_writable(out);
  require(v.num_elements() == 0 || v.shape[v.ndim - 1] <= 1 || v.stride(v.ndim - 1) == 1, out,
          "a contiguous last dimension (stride 1)");
  bool same = v.data == x.data;
  for (int i = 0; i < v.ndim && same; ++i) same = x.shape[i] == 1 || v.stride(i) == x.stride(i);
  if (!same && ranges_overlap(v, x)) argument_error(out, "overlaps logits without being logits itself");
  const auto layout = row_layout(v, v.ndim - 1);
  require(layout.has_value(), out, "leading dimensions that collapse to at most two strides");
  return *layout;
}

// `rows` are those of read_backward_rows.
nb::object backward(Frame* frame, nb::handle logits, nb::handle target, nb::tuple numbers, int exp,
                    nb::handle vocab_start, nb::handle vocab_size, nb::tuple rows, nb::handle out) {
  const LogprobCall call(frame, {logits, target, numbers, exp, vocab_start, vocab_size});
  LogprobBackwardParams p;
  static_cast<LogprobInput&>(p) = call.input();
  if (entry(rows, 0).is_none()) type_error("lse", "the lse that logprob returned, got None");
  const auto of_rows = read_backward_rows(frame, call, rows, &p);
  if (!entry(rows, 4).is_none() && entry(rows, 1).is_none()) {
    type_error("entropy", "the entropy that logprob returned, got None");
  }
  Results results("logprob", call.logits(), frame);
  const TensorView& x = call.logits().view();
  if (out.is_none()) {
    results.add(&p.dlogits, call.logits().shape(), x.dtype);
    p.dlogits_rows = contiguous_rows(p.num_rows, p.num_columns);
  } else {
    const Array& given = frame->read(out, "out", name_of(x.dtype));
    p.dlogits_rows = gradient_layout(given, call.logits());
    call.check_apart(given, false);
    for (const Array* row : of_rows) {
      if (row) check_apart(given, *row);
    }
    p.dlogits = given.view().data;
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
