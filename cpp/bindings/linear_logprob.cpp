// Python's entry to linear_logprob.
#include "rlk/ops/linear_logprob.h"

#include <cmath>
#include <optional>

#include "call.h"
#include "linear_args.h"
#include "logprob_args.h"
#include "rlk/ops/sample.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

constexpr int kReturnsLargest = 32;  // a bit of `returns`, behind the bits of logprob's outputs
// Entries of a head; all but the last have gradients.
constexpr int kHidden = 0, kWeight = 1, kBias = 2, kLoraA = 3, kLoraB = 4, kTarget = 5;

void require_one_stride(const RowLayout& rows, std::int64_t num_rows, const char* name) {
  if (num_rows > 1 && rows.inner < num_rows) argument_error(name, "expected one stride", kCopyHint);
}

// Hidden states, the weight, and logprob's arguments for their logits.
struct HeadArguments {
  RowsArgument hidden;
  WeightArgument weight;
  int dh_segments;
  LogprobCall call;
  std::optional<std::int64_t> workspace_bytes;  // none: the usual size
  Head head;

  // `of`: entries of a head. `numbers` are those of LogprobArguments. `how` is (exp, dtype of the logits or -1,
  // workspace_bytes or None, unit, dh_segments, lora_scale, label_smoothing). `shard` is (vocab_start, vocab_size) of the
  // weight's rows, or None.
  HeadArguments(Frame* frame, const nb::tuple& of, const nb::tuple& numbers, const nb::tuple& how,
                nb::handle shard = Py_None)
      : hidden(frame, entry(of, kHidden), "hidden"),
        weight((check_operand(hidden), frame), entry(of, kWeight), "weight", hidden, 1),
        dh_segments(nb::cast<int>(entry(how, 4))),
        call(frame,
             {Py_None, entry(of, kTarget), numbers, nb::cast<int>(entry(how, 0)), of_shard(shard, 0),
              of_shard(shard, 1), nb::cast<double>(entry(how, 6))},
             hidden.array, weight.out_features, read_logits_dtype(nb::cast<int>(entry(how, 1)), hidden.view().dtype)) {
    put_bias(read_bias(frame, entry(of, kBias), "float32 or that of hidden", weight.out_features, hidden.view().device,
                       hidden.view().dtype, " (that of hidden)"),
             &head);
    require(call.input().num_rows == 0 || weight.out_features > 0, "weight", "at least one row");
    require_one_stride(call.input().target_rows, call.input().num_rows, "target");
    hidden.lead(&head.hidden, &head.hidden_rows, &head);
    weight.put(&head);
    head.arithmetic = read_arithmetic(nb::cast<int>(entry(how, 3)), hidden.view());
    read_lora(frame, entry(of, kLoraA), entry(of, kLoraB), nb::cast<double>(entry(how, 5)));
    workspace_bytes = read_workspace_bytes(entry(how, 2));
  }

  template <class Params>
  Params params() const {
    Params p;
    static_cast<LogprobInput&>(p) = call.input();
    p.head = head;
    return p;
  }

 private:
  static nb::handle of_shard(nb::handle shard, int i) {
    return shard.is_none() ? shard : entry(nb::borrow<nb::tuple>(shard), i);
  }

  void read_lora(Frame* frame, nb::handle given_a, nb::handle given_b, double scale) {
    head.lora_scale = static_cast<float>(scale);
    require(std::isfinite(head.lora_scale), "lora_scale", "a finite number of float32, got ", scale);
    if (given_a.is_none() && given_b.is_none()) return;
    require(!given_a.is_none(), "lora_a", "an array beside lora_b, got None");
    require(!given_b.is_none(), "lora_b", "an array beside lora_a, got None");
    const Array &a = frame->read(given_a, "lora_a", name_of(head.dtype)),
                &b = frame->read(given_b, "lora_b", name_of(head.dtype));
    const TensorView &va = a.view(), &vb = b.view();
    const std::int64_t ins = head.in_features, outs = weight.out_features;
    check_same(a, hidden.array);
    require_shape(va.ndim == 2 && va.shape[1] == ins && va.shape[0] > 0, a, "shape [rank, ", ins,
                  "], at least one row of the last dimension of hidden");
    require_columns(a);
    head.lora_rank = va.shape[0];
    check_same(b, hidden.array);
    require_shape(vb.ndim == 2 && vb.shape[1] == head.lora_rank && vb.shape[0] == outs, b, "shape [", outs, ", ",
                  head.lora_rank, "] (the rows of weight, those of lora_a)");
    require_columns(b);
    head.lora_a = va.data;
    head.lora_b = vb.data;
    head.lora_a_stride = va.stride(0);
    head.lora_b_stride = vb.stride(0);
  }
};

// Calls a kernel with a workspace of at most `limit` bytes, or of the usual size. The CPU backend allocates its own.
template <class Params>
nb::object run_within(std::optional<std::int64_t> limit, WorkspaceRange (*range_of)(const Params&, Device),
                      Results* results, void (*kernel)(const Params&, Device, Stream), Params* p,
                      bool accumulates = false) {
  if (results->caller().describes()) return results->result();
  const WorkspaceRange range = range_of(*p, results->caller().device);
  if (limit) require_bytes(least_bytes(range), *limit, "this call");
  const bool on_cpu = results->caller().device.type == DeviceType::kCpu;
  const nb::object workspace = on_cpu ? nb::none() : allocate_workspace(p, range, limit, *results);
  return results->run(kernel, *p, accumulates);
}

nb::object forward(Frame* frame, nb::tuple head, nb::tuple numbers, nb::tuple how, int returns) {
  const HeadArguments a(frame, head, numbers, how);
  Results results("linear_logprob", a.hidden.array, frame);
  auto p = a.params<LinearLogprobParams>();
  add_outputs(frame, &results, a.call.rows_shape(), returns, &p);
  if (returns & kReturnsLargest) {
    require(p.num_columns <= kSampleVocab, "weight", "at most ", kSampleVocab, " rows for the token accuracy, got ",
            p.num_columns);
    results.add(&p.largest, a.call.rows_shape());
  }
  return run_within(a.workspace_bytes, linear_logprob_workspace, &results, rlk::linear_logprob, &p);
}

// Returns the statistics of a shard, [..., 5].
nb::object partial(Frame* frame, nb::tuple head, nb::tuple numbers, nb::tuple how, nb::tuple shard) {
  const HeadArguments a(frame, head, numbers, how, shard);
  Results results("linear_logprob", a.hidden.array, frame);
  auto p = a.params<LinearLogprobParams>();
  results.add(&p.stats, shape_with(a.hidden.leading(), kStatsFields));
  return run_within(a.workspace_bytes, linear_logprob_workspace, &results, rlk::linear_logprob, &p);
}

// Params for the gradients of the operands whose bits `needs` has, before their memory is allocated. The gradient of a
// weight with a main_grad is float32. The gradient of hidden is float32, too, if it is a shard's share of a tree.
LinearLogprobBackwardParams backward_params(const HeadArguments& a, int needs, bool accumulates, nb::handle shard) {
  auto p = a.params<LinearLogprobBackwardParams>();
  p.dh_segments = a.dh_segments;
  p.wide_dhidden = needs & 1 << kHidden && !shard.is_none() && a.dh_segments > 1;
  p.dhidden_rows = contiguous_rows(p.num_rows, a.head.in_features);
  p.dweight_dtype = accumulates ? DType::kFloat32 : a.head.dtype;
  p.dweight_stride = p.main_grad_stride = a.head.in_features;
  p.dbias_dtype = a.head.bias_dtype;
  return p;
}

// Refuses, before a forward, a workspace that is too small for its backward.
nb::object require_workspace(nb::tuple head, nb::tuple numbers, nb::tuple how, nb::handle shard, int needs,
                             bool has_main_grad) {
  Frame frame;
  const HeadArguments a(&frame, head, numbers, how, shard);
  auto p = backward_params(a, needs, has_main_grad, shard);
  // Replaces memory that is not allocated yet by an address. The size of the workspace does not depend on it.
  const auto some = [&](int operand, bool there = true) {
    return needs >> operand & 1 && there ? reinterpret_cast<void*>(kAlign) : nullptr;
  };
  p.dhidden = some(kHidden);
  p.dweight = some(kWeight);
  p.main_grad = static_cast<const float*>(some(kWeight, has_main_grad));
  p.dbias = some(kBias);
  p.dlora_a = some(kLoraA, a.head.lora_rank > 0);
  p.dlora_b = some(kLoraB, a.head.lora_rank > 0);
  const WorkspaceRange range = linear_logprob_backward_workspace(p, a.call.device());
  if (a.workspace_bytes) require_bytes(least_bytes(range), *a.workspace_bytes, "the backward of this call");
  return nb::none();
}

// Returns (dhidden, dweight, dbias, dlora_a, dlora_b), with None for each that is not wanted. If main_grad is given,
// dweight is main_grad itself.
// `rows` are those of read_backward_rows.
nb::object backward(Frame* frame, nb::tuple head, nb::tuple numbers, nb::tuple how, nb::handle shard, nb::tuple rows,
                    int needs, nb::handle main_grad) {
  const HeadArguments a(frame, head, numbers, how, shard);
  const Device device = a.call.device();
  const auto wants = [&](int operand) { return (needs >> operand & 1) != 0; };
  const bool accumulates = wants(kWeight) && !main_grad.is_none();
  auto p = backward_params(a, needs, accumulates, shard);
  read_backward_rows(frame, a.call, rows, &p);
  if (p.dlogprob != nullptr) require_one_stride(p.dlogprob_rows, p.num_rows, "dlogprob");
  if (p.dlse != nullptr) require_one_stride(p.dlse_rows, p.num_rows, "dlse");
  if (p.dentropy != nullptr) require_one_stride(p.dentropy_rows, p.num_rows, "dentropy");
  Results results("linear_logprob", a.hidden.array, frame);
  results.add(&p.dhidden, a.hidden.array.shape(), p.wide_dhidden ? DType::kFloat32 : a.head.dtype, wants(kHidden));
  if (accumulates) {
    const Array& total = frame->read(main_grad, "main_grad", kFloat32);
    p.main_grad_stride = p.dweight_stride = check_output(total, p.num_columns, a.head.in_features, device);
    p.dweight = total.view().data;
    p.main_grad = total.data<float>();
    results.add(main_grad);
  } else {
    results.add(&p.dweight, {p.num_columns, a.head.in_features}, p.dweight_dtype, wants(kWeight));
  }
  const std::int64_t rank = a.head.lora_rank;
  results.add(&p.dbias, {p.num_columns}, p.dbias_dtype, wants(kBias))
      .add(&p.dlora_a, {rank, a.head.in_features}, a.head.dtype, wants(kLoraA) && rank > 0)
      .add(&p.dlora_b, {p.num_columns, rank}, a.head.dtype, wants(kLoraB) && rank > 0);
  return run_within(a.workspace_bytes, linear_logprob_backward_workspace, &results, rlk::linear_logprob_backward, &p,
                    true);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "linear_logprob", &forward);
  define(m, "linear_logprob_partial", &partial);
  define(m, "linear_logprob_backward", &backward);
  define(m, "linear_logprob_require_workspace", &require_workspace);
});

}  // namespace
}  // namespace rlk::bindings
