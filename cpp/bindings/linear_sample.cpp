// Python's entry to linear_sample.
#include "rlk/ops/linear_sample.h"

#include "row_array.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

constexpr int kWantsLogprob = 1, kWantsRaw = 2;

nb::object tokens(Frame* frame, nb::handle hidden, nb::handle weight, nb::handle bias, nb::tuple rows,
                  nb::handle valid_vocab, int exp, int arithmetic, int logits_dtype, int wants,
                  nb::handle workspace_bytes) {
  const RowsArgument x(frame, hidden, "hidden");
  check_operand(x);
  require_shape(x.view().ndim == 2, x.array, "shape [num_rows, in_features]");
  const WeightArgument w(frame, weight, "weight", x, 1);
  require(w.out_features > 0 && w.out_features <= kSampleVocab, w.array, "1 to ", kSampleVocab, " rows, got ",
          w.out_features);
  const Device device = x.view().device;
  LinearSampleParams p;
  x.lead(&p.product.x, &p.product.x_rows, &p.product);
  w.put(&p.product);
  put_bias(
      read_bias(frame, bias, "float32 or that of hidden", w.out_features, device, p.product.dtype, " (that of hidden)"),
      &p.product);
  p.product.out_dtype = read_logits_dtype(logits_dtype, p.product.dtype);
  p.product.arithmetic = read_arithmetic(arithmetic, x.view());
  p.draw.num_rows = x.num_rows;
  p.draw.vocab_size = w.out_features;
  p.draw.top_p.value = 1.0f;
  read_valid_vocab(valid_vocab, &p.draw);
  read_drawn_rows(frame, rows, device, &p.draw);
  p.draw.exp = exp == 1 ? Exp::kHardware : Exp::kPortable;
  const std::int64_t bytes = read_integer(workspace_bytes, "workspace_bytes", "a number of bytes");
  Results results("linear_sample", x.array, frame);
  results.add(&p.draw.ids, {x.num_rows})
      .add(&p.draw.logprob, {x.num_rows}, wants & kWantsLogprob)
      .add(&p.draw.raw_logprob, {x.num_rows}, wants & kWantsRaw)
      .add(&p.draw.status, {x.num_rows});
  if (results.caller().describes()) return results.result();
  const nb::object workspace = allocate_workspace(&p, linear_sample_workspace(p, device), bytes, results);
  return results.run(rlk::linear_sample, p);
}

const Functions kFunctions([](nb::module_& m) { define(m, "linear_sample", &tokens); });

}  // namespace
}  // namespace rlk::bindings
