// Python's entry to linear_logprob.
#include "rlk/ops/linear_logprob.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "linear_args.h"
#include "logprob_outputs.h"
#include "rlk/ops/sample.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

constexpr int kReturnsLargest = 32;  // a bit of `returns`, after those of logprob's outputs

void require_one_stride(const RowLayout& rows, std::int64_t num_rows, const char* name) {
  if (num_rows > 1 && rows.inner < num_rows) argument_error(name, std::string("expected one stride") + kCopyHint);
}

// Two arrays or none, and a number.
struct LoraArguments {
  nb::handle a, b;
  double scale;
};

// Hidden states, the weight and what logprob is told about their logits.
struct HeadArguments {
  RowsArgument hidden;
  WeightArgument weight;
  std::optional<Array> bias, lora_a, lora_b;
  Head head;
  LogprobCall call;

  // A shard of the vocabulary where a.vocab_size is given.
  HeadArguments(nb::handle x, nb::handle w, nb::handle b, const LoraArguments& lora, int logits_dtype, int arithmetic,
                const LogprobArguments& a)
      : hidden(x, "hidden"),
        weight((check_operand(hidden), w), "weight", hidden, 1),
        call(a, hidden.array, weight.out_features, read_logits_dtype(logits_dtype, hidden.view().dtype)) {
    if (!b.is_none()) {
      bias.emplace(b, "bias", "float32 or that of hidden");
      check_bias(*bias, weight.out_features, hidden.view().device, hidden.view().dtype, " (that of hidden)");
      head.bias = bias->view().data;
      head.bias_dtype = bias->view().dtype;
    }
    if (call.input().num_rows > 0 && weight.out_features < 1) value_error("weight: expected at least one row");
    require_one_stride(call.input().target_rows, call.input().num_rows, "target");
    head.hidden = hidden.view().data;
    head.weight = weight.view().data;
    head.hidden_rows = hidden.rows;
    head.weight_stride = weight.stride;
    head.in_features = weight.in_features;
    head.dtype = hidden.view().dtype;
    head.arithmetic = read_arithmetic(arithmetic, hidden.view());
    read_lora(lora);
  }

 private:
  void read_lora(const LoraArguments& lora) {
    head.lora_scale = static_cast<float>(lora.scale);
    if (!std::isfinite(head.lora_scale)) {
      value_error(std::string("lora_scale: expected a finite number of float32, got ") +
                  nb::repr(nb::float_(lora.scale)).c_str());
    }
    if (lora.a.is_none() && lora.b.is_none()) return;
    if (lora.a.is_none() || lora.b.is_none()) {
      value_error(std::string(lora.a.is_none() ? "lora_a" : "lora_b") + ": expected an array beside " +
                  (lora.a.is_none() ? "lora_b" : "lora_a") + ", got None");
    }
    lora_a.emplace(lora.a, "lora_a", name_of(head.dtype));
    lora_b.emplace(lora.b, "lora_b", name_of(head.dtype));
    const auto stride_of = [&](const Array& m, std::int64_t rows, std::int64_t columns, const std::string& wanted) {
      check_same(m, hidden.array);
      const TensorView& v = m.view();
      if (v.ndim != 2 || v.shape[1] != columns || (rows < 0 ? v.shape[0] < 1 : v.shape[0] != rows)) {
        argument_error(m, "expected shape " + wanted + ", got " + shape_text(m.shape()));
      }
      require_columns(m);
      return v.stride(0);
    };
    const std::string ins = std::to_string(head.in_features), outs = std::to_string(weight.out_features);
    constexpr std::int64_t kAnyRank = -1;
    head.lora_a_stride = stride_of(*lora_a, kAnyRank, head.in_features,
                                   "[rank, " + ins + "], at least one row of the last dimension of hidden");
    head.lora_rank = lora_a->view().shape[0];
    head.lora_b_stride = stride_of(
        *lora_b, weight.out_features, head.lora_rank,
        std::string("[") + outs + ", " + std::to_string(head.lora_rank) + "] (the rows of weight, those of lora_a)");
    head.lora_a = lora_a->view().data;
    head.lora_b = lora_b->view().data;
  }
};

// The CPU backend has its own where it is given none.
template <class Params>
nb::object allocate_on_gpu(Params* p, const WorkspaceRange& range, std::int64_t bytes, const Results& results) {
  require_bytes(least_bytes(range), bytes, "this call");
  if (results.caller().device.type == DeviceType::kCpu) return nb::none();
  return allocate_workspace(p, range, bytes, results);
}

nb::object forward(nb::handle hidden, nb::handle weight, nb::handle bias, nb::handle target, nb::handle temperature,
                   nb::handle logit_scale, nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab,
                   nb::handle canonical_vocab, nb::handle kept_ids, nb::handle kept_offsets, int exp, int logits_dtype,
                   int returns, nb::handle workspace_bytes, int arithmetic, nb::handle lora_a, nb::handle lora_b,
                   double lora_scale, double label_smoothing, nb::handle allocate, std::uintptr_t stream) {
  const HeadArguments a(hidden, weight, bias, {lora_a, lora_b, lora_scale}, logits_dtype, arithmetic,
                        {nb::none(), target, temperature, logit_scale, softcap, ignore_index, valid_vocab,
                         canonical_vocab, kept_ids, kept_offsets, nb::none(), nb::none(), exp, label_smoothing});
  const std::int64_t bytes = read_integer(workspace_bytes, "workspace_bytes", "a number of bytes");
  Results results("linear_logprob", hidden, a.call.device(), allocate, stream);
  LinearLogprobParams p;
  static_cast<LogprobInput&>(p) = a.call.input();
  p.head = a.head;
  Outputs().add(&results, a.call.rows_shape(), returns, &p);
  if (returns & kReturnsLargest) {
    if (p.num_columns > kSampleVocab) {
      value_error("weight: expected at most " + std::to_string(kSampleVocab) + " rows for the token accuracy, got " +
                  std::to_string(p.num_columns));
    }
    results.add(&p.largest, a.call.rows_shape());
  }
  const nb::object workspace = allocate_on_gpu(&p, linear_logprob_workspace(p, a.call.device()), bytes, results);
  return results.run(rlk::linear_logprob, p);
}

// Statistics of a shard, [..., 5].
nb::object partial(nb::handle hidden, nb::handle weight, nb::handle bias, nb::handle target, nb::handle temperature,
                   nb::handle logit_scale, nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab,
                   nb::handle canonical_vocab, nb::handle kept_ids, nb::handle kept_offsets, int exp, int logits_dtype,
                   nb::handle vocab_start, nb::handle vocab_size, nb::handle workspace_bytes, int arithmetic,
                   nb::handle lora_a, nb::handle lora_b, double lora_scale, double label_smoothing, nb::handle allocate,
                   std::uintptr_t stream) {
  const HeadArguments a(hidden, weight, bias, {lora_a, lora_b, lora_scale}, logits_dtype, arithmetic,
                        {nb::none(), target, temperature, logit_scale, softcap, ignore_index, valid_vocab,
                         canonical_vocab, kept_ids, kept_offsets, vocab_start, vocab_size, exp, label_smoothing});
  const std::int64_t bytes = read_integer(workspace_bytes, "workspace_bytes", "a number of bytes");
  Results results("linear_logprob", hidden, a.call.device(), allocate, stream);
  LinearLogprobParams p;
  static_cast<LogprobInput&>(p) = a.call.input();
  p.head = a.head;
  results.add(&p.stats, a.hidden.shape_with(kStatsFields));
  const nb::object workspace = allocate_on_gpu(&p, linear_logprob_workspace(p, a.call.device()), bytes, results);
  return results.run(rlk::linear_logprob, p);
}

// Refuses, before a forward, a workspace that would be too small for its backward.
nb::object require_workspace(nb::handle hidden, nb::handle weight, nb::handle bias, nb::handle target,
                             nb::handle temperature, nb::handle logit_scale, nb::handle softcap,
                             nb::handle ignore_index, nb::handle valid_vocab, nb::handle canonical_vocab,
                             nb::handle kept_ids, nb::handle kept_offsets, int exp, int logits_dtype, bool wants_hidden,
                             bool wants_weight, bool wants_bias, bool has_main_grad, int weight_dtype,
                             nb::handle vocab_start, nb::handle vocab_size, int dh_segments, bool wide,
                             nb::handle workspace_bytes, int arithmetic, nb::handle lora_a, nb::handle lora_b,
                             double lora_scale, double label_smoothing, bool wants_lora_a, bool wants_lora_b) {
  const HeadArguments a(hidden, weight, bias, {lora_a, lora_b, lora_scale}, logits_dtype, arithmetic,
                        {nb::none(), target, temperature, logit_scale, softcap, ignore_index, valid_vocab,
                         canonical_vocab, kept_ids, kept_offsets, vocab_start, vocab_size, exp, label_smoothing});
  const std::int64_t bytes = read_integer(workspace_bytes, "workspace_bytes", "a number of bytes");
  LinearLogprobBackwardParams p;
  static_cast<LogprobInput&>(p) = a.call.input();
  p.head = a.head;
  // Memory that is not there yet stands as an address that a workspace's size does not depend on.
  const auto some = [](bool wanted) { return wanted ? reinterpret_cast<void*>(kAlign) : nullptr; };
  p.dh_segments = dh_segments;
  p.dhidden = some(wants_hidden);
  p.wide_dhidden = wants_hidden && wide;
  p.dhidden_rows = contiguous_rows(p.num_rows, a.head.in_features);
  p.dweight = some(wants_weight);
  p.dweight_dtype = has_main_grad ? DType::kFloat32 : read_dtype(weight_dtype, a.head.dtype);
  p.main_grad = static_cast<const float*>(some(wants_weight && has_main_grad));
  p.dweight_stride = p.main_grad_stride = a.head.in_features;
  p.dbias = some(wants_bias);
  p.dbias_dtype = a.head.bias_dtype;
  p.dlora_a = some(wants_lora_a && a.head.lora_rank > 0);
  p.dlora_b = some(wants_lora_b && a.head.lora_rank > 0);
  require_bytes(least_bytes(linear_logprob_backward_workspace(p, a.call.device())), bytes, "the backward of this call");
  return nb::none();
}

// Returns (dhidden, dweight, dbias, dlora_a, dlora_b), None for each that is not asked for. If main_grad is given,
// dweight is main_grad itself. With `wide`, dhidden is float32: a shard's share.
nb::object backward(nb::handle hidden, nb::handle weight, nb::handle bias, nb::handle target, nb::handle temperature,
                    nb::handle logit_scale, nb::handle softcap, nb::handle ignore_index, nb::handle valid_vocab,
                    nb::handle canonical_vocab, nb::handle kept_ids, nb::handle kept_offsets, int exp, int logits_dtype,
                    nb::handle lse, nb::handle entropy, nb::handle dlogprob, nb::handle dlse, nb::handle dentropy,
                    bool wants_hidden, bool wants_weight, bool wants_bias, nb::handle main_grad, int weight_dtype,
                    nb::handle vocab_start, nb::handle vocab_size, int dh_segments, bool wide,
                    nb::handle workspace_bytes, int arithmetic, nb::handle lora_a, nb::handle lora_b, double lora_scale,
                    double label_smoothing, bool wants_lora_a, bool wants_lora_b, nb::handle allocate,
                    std::uintptr_t stream) {
  const HeadArguments a(hidden, weight, bias, {lora_a, lora_b, lora_scale}, logits_dtype, arithmetic,
                        {nb::none(), target, temperature, logit_scale, softcap, ignore_index, valid_vocab,
                         canonical_vocab, kept_ids, kept_offsets, vocab_start, vocab_size, exp, label_smoothing});
  const std::int64_t bytes = read_integer(workspace_bytes, "workspace_bytes", "a number of bytes");
  const Device device = a.call.device();
  LinearLogprobBackwardParams p;
  static_cast<LogprobInput&>(p) = a.call.input();
  p.head = a.head;
  const BackwardRows rows(a.call, lse, entropy, dlogprob, dlse, dentropy, &p);
  if (p.dlogprob != nullptr) require_one_stride(p.dlogprob_rows, p.num_rows, "dlogprob");
  if (p.dlse != nullptr) require_one_stride(p.dlse_rows, p.num_rows, "dlse");
  if (p.dentropy != nullptr) require_one_stride(p.dentropy_rows, p.num_rows, "dentropy");
  Results results("linear_logprob", hidden, device, allocate, stream);
  p.dh_segments = dh_segments;
  p.wide_dhidden = wants_hidden && wide;
  if (wants_hidden) p.dhidden_rows = contiguous_rows(p.num_rows, a.head.in_features);
  results.add(&p.dhidden, a.hidden.array.shape(), wide ? DType::kFloat32 : a.head.dtype, wants_hidden);
  std::optional<Array> total;
  if (wants_weight && !main_grad.is_none()) {
    total.emplace(main_grad, "main_grad", kFloat32);
    p.main_grad_stride = p.dweight_stride = check_output(*total, p.num_columns, a.head.in_features, device);
    p.dweight = total->view().data;
    p.main_grad = static_cast<const float*>(total->view().data);
    p.dweight_dtype = DType::kFloat32;
    results.add(main_grad);
  } else {
    if (wants_weight) p.dweight_dtype = read_dtype(weight_dtype, a.head.dtype);
    if (wants_weight) p.dweight_stride = a.head.in_features;
    results.add(&p.dweight, {p.num_columns, a.head.in_features}, p.dweight_dtype, wants_weight);
  }
  if (wants_bias) p.dbias_dtype = a.head.bias_dtype;
  const std::int64_t rank = a.head.lora_rank;
  results.add(&p.dbias, {p.num_columns}, p.dbias_dtype, wants_bias)
      .add(&p.dlora_a, {rank, a.head.in_features}, a.head.dtype, wants_lora_a && rank > 0)
      .add(&p.dlora_b, {p.num_columns, rank}, a.head.dtype, wants_lora_b && rank > 0);
  const nb::object workspace = allocate_on_gpu(&p, linear_logprob_backward_workspace(p, device), bytes, results);
  return results.run(rlk::linear_logprob_backward, p, true);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "linear_logprob", &forward);
  define(m, "linear_logprob_partial", &partial);
  define(m, "linear_logprob_backward", &backward);
  define(m, "linear_logprob_require_workspace", &require_workspace);
});

}  // namespace
}  // namespace rlk::bindings
