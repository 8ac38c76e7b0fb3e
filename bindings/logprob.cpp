// Bindings of the operators `logprob` and `linear_logprob`. All their arguments are the same, except for the logits.
// The checks turn Python's arrays and numbers into a LogprobInput, or raise an error that names the argument, the
// expected value and the given value.
#include "rlk/ops/logprob.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

#include "call.h"
#include "rlk/ops/linear_logprob.h"
#include "rlk/ops/sample.h"

namespace rlk::bindings {
namespace {

float read_positive(nb::handle h, const char* name, const char* expected) {
  const double x = read_number(h, name);
  const auto single = static_cast<float>(x);
  require(single > 0.0f && std::isfinite(single), name, expected, "a finite number > 0, got ", x);
  return single;
}

std::int64_t read_size(nb::handle value, const char* name, std::int64_t otherwise = 0) {
  return value.is_none() ? otherwise : read_integer(value, name, "an integer");
}

float read_temperature_value(nb::handle temperature) {
  const double t = read_number(temperature, "temperature");
  const auto single = static_cast<float>(t);
  require(single > 0.0f && std::isnormal(single), "temperature", "a finite number > 0 (fp32, not subnormal), got ", t,
          "; for greedy decoding take the argmax, a temperature of 0 has no log-probabilities");
  return single;
}

// Arguments that the Python operator passes; an argument is None if the user did not give it.
struct LogprobArguments {
  nb::handle logits, target;
  // (temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, kept ids, kept offsets)
  const nb::tuple& numbers;
  nb::handle exp;                                          // a value that read_exp() reads
  nb::handle vocab_start = Py_None, vocab_size = Py_None;  // None if the logits hold the whole row
  double label_smoothing = 0.0;
};

// Params that point into the arrays of a call.
struct LogprobCall : LogprobInput {
  LogprobCall(Frame* frame, const LogprobArguments& a) : first(frame->read(a.logits, "logits", kFloats)) {
    require_backend("logprob", first);
    require_shape(first->ndim > 0, first, "shape [..., vocab_size]");
    const int last = first->ndim - 1;
    dtype = first->dtype;
    logits = first->data;
    num_columns = first->shape[last];
    const std::int64_t stride = first->stride(last);  // NumPy gives an empty array the stride 0
    require(first->num_elements() == 0 || num_columns == 1 || stride == 1, first,
            "a contiguous last dimension (stride 1), got stride ", stride, kCopyHint);
    logits_rows = read_layout(first, last, "leading dimensions");
    read(frame, a);
  }
  // This constructor is for linear_logprob, which has no array of logits [rows of hidden, columns]. a.logits is None.
  LogprobCall(Frame* frame, const LogprobArguments& a, const Array& hidden, std::int64_t columns, DType of_logits)
      : first(hidden) {
    dtype = of_logits;
    num_columns = columns;
    read(frame, a);
  }

  std::span<const std::int64_t> rows_shape() const { return first.shape().first(first->ndim - 1); }

  // Checks a further input or output with one element per row. It must be contiguous if `layout` is null; otherwise
  // `layout` gets its strides.
  void check_rows(const Array& array, RowLayout* layout = nullptr) const {
    check_shape(array, rows_shape(), " (", first, " without the last dimension)");
    if (layout == nullptr) return require_contiguous(array);
    const auto rows = row_layout(array.view(), array->ndim);
    require(rows.has_value(), array, "at most two strides", kCopyHint);
    *layout = *rows;
  }

  const Array& first;  // logits or hidden, whose leading dimensions are the rows

 private:
  void read(Frame* frame, const LogprobArguments& a) {
    num_rows = 1;
    for (std::int64_t s : rows_shape()) num_rows *= s;
    frame->names_first = true;
    const Array& ids = frame->read(a.target, "target", kIndices);
    check_rows(ids, &target_rows);
    target = ids->data;
    target_dtype = ids->dtype;
    const auto [given_temperature, scale, cap, ignored, valid, canonical, kept, offsets] = entries<8>(a.numbers);
    ignore_index = read_integer(ignored, "ignore_index", "an integer");
    read_temperature(frame, given_temperature);
    logit_scale = read_positive(scale, "logit_scale", "");
    if (!cap.is_none()) softcap = read_positive(cap, "softcap", "None or ");
    label_smoothing = static_cast<float>(a.label_smoothing);
    exp = read_exp(a.exp, frame->device());
    read_vocabulary(a, valid, canonical);
    if (!offsets.is_none()) read_kept(frame, kept, offsets);
  }
  void read_temperature(Frame* frame, nb::handle given) {
    if (!is_array(given)) return void(temperature_value = read_temperature_value(given));
    const Array& of_rows = frame->read(given, "temperature", kFloat32);
    require(of_rows->ndim > 0 || rows_shape().empty(), of_rows, "a number, or an array of shape ", rows_shape(),
            ", one for each row; got an array of shape []");
    check_rows(of_rows);
    temperature = of_rows.data<float>();
  }
  void read_vocabulary(const LogprobArguments& a, nb::handle given_valid, nb::handle canonical_vocab) {
    constexpr std::int64_t kWidest = std::numeric_limits<std::int32_t>::max();
    const bool shard = !a.vocab_size.is_none();
    const std::int64_t whole = read_size(a.vocab_size, "vocab_size", num_columns);
    const std::int64_t start = vocab_start = read_size(a.vocab_start, "vocab_start");
    if (!shard && num_rows > 0 && whole < 1) {
      if (!a.logits.is_none()) argument_error(first, "expected at least one column, got shape ", first.shape());
      argument_error("weight", "expected at least one row");
    }
    require(whole <= kWidest, "vocab_size", "at most ", kWidest, " columns, got ", whole);
    require(start >= 0 && start <= whole && num_columns <= whole - start && (!shard || whole >= 1),
            "vocab_start, vocab_size", "0 <= vocab_start and vocab_start + ", num_columns,
            " (columns of the shard) <= vocab_size, got vocab_start ", start, ", vocab_size ", whole);
    const std::int64_t canonical = vocab_size = read_size(canonical_vocab, "canonical_vocab", whole);
    require(canonical >= 0 && canonical <= kWidest, "canonical_vocab", "a width up to ", kWidest, ", got ", canonical);
    require(!given_valid.is_none() || whole <= canonical, "canonical_vocab", "at least the ", whole,
            " columns of logits, got ", canonical, "; or give valid_vocab, the number of real tokens");
    const std::int64_t widest = std::min(whole, canonical);
    const std::int64_t valid = valid_vocab = read_size(given_valid, "valid_vocab", widest);
    require(valid <= widest && valid >= (num_rows > 0 ? 1 : 0), "valid_vocab", "1 <= valid_vocab <= ", widest, ", got ",
            valid);
    if (shard && parts_of_columns(canonical, valid, start, num_columns).count == 0) {
      refuse_parts(canonical, start, num_columns, "canonical_vocab=");
    }
  }
  void read_kept(Frame* frame, nb::handle ids, nb::handle offsets) {
    const Array &kept = frame->read(ids, "kept ids", kInt32), &rows = frame->read(offsets, "kept offsets", kInt64);
    require_shape(kept->ndim == 1 && kept->is_contiguous(), kept, "a contiguous array of shape [number of ids]");
    check_dense(rows, {num_rows + 1}, " (rows + 1)");
    kept_ids = kept.data<std::int32_t>();
    kept_offsets = rows.data<std::int64_t>();
    kept_size = kept->shape[0];
  }
};

// Reads the inputs that a backward has in addition to those of a forward: `rows` is (lse, entropy, dlogprob, dlse,
// dentropy).
template <class Params>
void read_backward_rows(Frame* frame, const LogprobCall& call, const nb::tuple& rows, Params* p) {
  const auto [lse, entropy, dlogprob, dlse, dentropy] = entries<5>(rows);
  const auto read = [&](nb::handle given, const char* name, const float** data, RowLayout* layout) {
    const Array* const array = frame->optional(given, name, kFloat32);
    if (array) call.check_rows(*array, layout);
    if (array) *data = array->data<float>();
  };
  frame->names_first = true;
  read(lse, "lse", &p->lse, nullptr);
  read(entropy, "entropy", &p->entropy, nullptr);
  read(dlogprob, "dlogprob", &p->dlogprob, &p->dlogprob_rows);
  read(dlse, "dlse", &p->dlse, &p->dlse_rows);
  read(dentropy, "dentropy", &p->dentropy, &p->dentropy_rows);
  frame->names_first = false;
}

// Names of the outputs in errors. Each output has shape [...]. All functions use this order, and bit i of `returns`
// asks for output i.
constexpr std::array<const char*, 5> kOutputs = {"out.logprob", "out.lse", "out.entropy", "out.sum_p_sq", "out.status"};

// Adds outputs of shape `rows`, and points the params to the outputs. `out` has the arrays that the caller gave for
// outputs; the function checks them. If logprob alone is wanted, no other output is added, and the call returns one
// array in place of a tuple.
template <class Params>
void add_outputs(Frame* frame, Results* results, std::span<const std::int64_t> rows, int returns, Params* p,
                 const LogprobCall* call = nullptr, nb::handle out = nb::none()) {
  const auto add_one = [&]<class T>(int i, T** field) {
    const bool wanted = returns >> i & 1;
    const nb::object given = wanted && call != nullptr && !out.is_none() ? nb::object(out[i]) : nb::none();
    if (given.is_none()) return void(results->add(field, rows, wanted));
    const Array& a = frame->read(given, kOutputs[i], std::is_same_v<T, float> ? kFloat32 : kInt32);
    call->check_rows(a);
    frame->require_writable(a);
    *field = static_cast<T*>(a->data);
    results->add(given);
  };
  add_one(0, &p->logprob);
  if (returns == 1) return;
  add_one(1, &p->lse);
  add_one(2, &p->entropy);
  add_one(3, &p->sum_p_sq);
  add_one(4, &p->status);
}

// `numbers` is `LogprobArguments::numbers`. In an eager call, rows have no kept set (a list of the columns that top-k
// or top-p left), and `out` is None.
RLK_EAGER_FUNCTION(logprob, 1, (logits, target), nb::tuple numbers, nb::handle exp, int returns, nb::handle out) {
  const LogprobCall call(frame, {logits, target, numbers, exp});
  LogprobParams p{call};
  Results results("logprob", frame);
  add_outputs(frame, &results, call.rows_shape(), returns, &p, &call, out);
  return results.run(rlk::logprob, &p, logprob_workspace_bytes);
}

RLK_FUNCTION(logprob_partial, (logits, target), nb::tuple numbers, nb::handle exp, nb::handle vocab_start,
             nb::handle vocab_size) {
  const LogprobCall call(frame, {logits, target, numbers, exp, vocab_start, vocab_size});
  LogprobParams p{call};
  return Results("logprob", frame)
      .add(&p.stats, shape_with(call.rows_shape(), kStatsFields))
      .run(rlk::logprob, &p, logprob_workspace_bytes);
}

// `stats` is [num_shards, ..., 5]. valid_vocab counts columns of the whole vocabulary; only label smoothing reads it.
RLK_FUNCTION(logprob_merge, (stats, temperature), int returns, double label_smoothing, std::int64_t valid_vocab) {
  const Array& s = frame->read(stats, "stats", kFloat32);
  require_shape(s->ndim >= 2 && s->shape[s->ndim - 1] == kStatsFields && s->is_contiguous(), s,
                "a contiguous array of shape [shards, ..., 5]");
  const std::int64_t shards = s->shape[0];
  require_shape(is_tree(shards), s, "1, 2, 4 or 8 shards (first dimension)");
  const std::span<const std::int64_t> rows = s.shape().subspan(1, s->ndim - 2);
  LogprobMergeParams p;
  p.stats = s.data<float>();
  p.num_shards = static_cast<std::int32_t>(shards);
  p.num_rows = s->num_elements() / shards / kStatsFields;
  p.label_smoothing = static_cast<float>(label_smoothing);
  p.valid_vocab = valid_vocab;
  if (is_array(temperature)) {
    const Array& t = frame->read(temperature, "temperature", kFloat32);
    require(std::ranges::equal(t.shape(), rows) && t->is_contiguous(), t, "a contiguous array of shape ", rows);
    p.temperature = t.data<float>();
  } else {
    p.temperature_value = read_temperature_value(temperature);
  }
  Results results("logprob", frame);
  add_outputs(frame, &results, rows, returns, &p);
  return results.run(rlk::logprob_merge, p);
}

// Layout of a given dlogits. The function raises an error if dlogits does not match logits, overlaps itself, or
// overlaps logits without being logits.
RowLayout gradient_layout(const Frame& frame, const Array& out, const Array& logits) {
  const TensorView &v = out.view(), &x = logits.view();
  check_dtype(out, logits);
  check_shape(out, logits.shape());
  frame.require_writable(out, &logits);
  require_columns(out);
  bool same = v.data == x.data;
  for (int i = 0; i < v.ndim && same; ++i) same = x.shape[i] == 1 || v.stride(i) == x.stride(i);
  if (!same && ranges_overlap(v, x)) argument_error(out, "overlaps logits without being logits itself");
  return read_layout(out, v.ndim - 1, "leading dimensions");
}

// `rows` has the values that read_backward_rows reads.
RLK_FUNCTION(logprob_backward, (logits, target), nb::tuple numbers, nb::handle exp, nb::handle vocab_start,
             nb::handle vocab_size, nb::tuple rows, nb::handle out) {
  const LogprobCall call(frame, {logits, target, numbers, exp, vocab_start, vocab_size});
  LogprobBackwardParams p;
  static_cast<LogprobInput&>(p) = call;
  if (entry(rows, 0).is_none()) type_error("lse", "the lse that logprob returned, got None");
  read_backward_rows(frame, call, rows, &p);
  if (!entry(rows, 4).is_none() && entry(rows, 1).is_none()) {
    type_error("entropy", "the entropy that logprob returned, got None");
  }
  Results results("logprob", frame);
  if (out.is_none()) {
    results.add(&p.dlogits, call.first.shape(), p.dtype);
    p.dlogits_rows = dense(p.num_rows, p.num_columns);
  } else {
    const Array& given = frame->read(out, "out", name_of(p.dtype));
    p.dlogits_rows = gradient_layout(*frame, given, call.first);
    p.dlogits = given->data;
    results.add(out);
  }
  return results.run(rlk::logprob_backward, p);
}

constexpr int kReturnsLargest = 32;  // a bit of `returns`, after the bits of logprob's outputs
// Indices into a tuple of arrays: the head of a language model, then the targets. Each array but the last has a
// gradient.
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

  // `of` has the arrays at the indices above. `numbers` is `LogprobArguments::numbers`. `how` is (exp, dtype of the
  // logits or -1, workspace_bytes or None, unit, dh_segments, lora_scale, label_smoothing). `shard` is (vocab_start,
  // vocab_size) of the weight's rows, or None.
  HeadArguments(Frame* frame, const nb::tuple& of, const nb::tuple& numbers, const nb::tuple& how,
                nb::handle shard = Py_None)
      : hidden(frame, entry(of, kHidden), "hidden"),
        weight((check_operand(hidden), frame), entry(of, kWeight), "weight", hidden, 1),
        dh_segments(nb::cast<int>(entry(how, 4))),
        call(frame,
             {Py_None, entry(of, kTarget), numbers, entry(how, 0), of_shard(shard, 0), of_shard(shard, 1),
              nb::cast<double>(entry(how, 6))},
             hidden.array, weight.out_features, read_logits_dtype(nb::cast<int>(entry(how, 1)), hidden->dtype)) {
    frame->names_first = false;
    put_bias(read_bias(frame, entry(of, kBias), "float32 or that of hidden", weight.out_features, hidden->dtype,
                       " (that of hidden)"),
             &head);
    require(call.num_rows == 0 || weight.out_features > 0, "weight", "at least one row");
    require_one_stride(call.target_rows, call.num_rows, "target");
    hidden.lead(&head.hidden, &head.hidden_rows, &head);
    weight.put(&head);
    head.arithmetic = read_arithmetic(nb::cast<int>(entry(how, 3)), hidden);
    read_lora(frame, entry(of, kLoraA), entry(of, kLoraB), nb::cast<double>(entry(how, 5)));
    workspace_bytes = read_workspace_bytes(entry(how, 2));
  }

  template <class Params>
  Params params() const {
    Params p;
    static_cast<LogprobInput&>(p) = call;
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
    check_dtype(a, hidden.array);
    require_shape(va.ndim == 2 && va.shape[1] == ins && va.shape[0] > 0, a, "shape [rank, ", ins,
                  "], at least one row of the last dimension of hidden");
    require_columns(a);
    head.lora_rank = va.shape[0];
    check_dtype(b, hidden.array);
    check_shape(b, {outs, head.lora_rank}, " (the rows of weight, those of lora_a)");
    require_columns(b);
    head.lora_a = va.data;
    head.lora_b = vb.data;
    head.lora_a_stride = va.stride(0);
    head.lora_b_stride = vb.stride(0);
  }
};

RLK_FUNCTION(linear_logprob, (), nb::tuple head, nb::tuple numbers, nb::tuple how, int returns) {
  const HeadArguments a(frame, head, numbers, how);
  Results results("linear_logprob", frame);
  auto p = a.params<LinearLogprobParams>();
  add_outputs(frame, &results, a.call.rows_shape(), returns, &p);
  if (returns & kReturnsLargest) {
    require(p.num_columns <= kSampleVocab, "weight", "at most ", kSampleVocab, " rows for the token accuracy, got ",
            p.num_columns);
    results.add(&p.largest, a.call.rows_shape());
  }
  return results.run_within(a.workspace_bytes, false, linear_logprob_workspace, rlk::linear_logprob, &p);
}

// Returns the statistics of a shard, [..., 5].
RLK_FUNCTION(linear_logprob_partial, (), nb::tuple head, nb::tuple numbers, nb::tuple how, nb::tuple shard) {
  const HeadArguments a(frame, head, numbers, how, shard);
  Results results("linear_logprob", frame);
  auto p = a.params<LinearLogprobParams>();
  results.add(&p.stats, shape_with(a.hidden.leading(), kStatsFields));
  return results.run_within(a.workspace_bytes, false, linear_logprob_workspace, rlk::linear_logprob, &p);
}

// Returns (dhidden, dweight, dbias, dlora_a, dlora_b), with None for each gradient that is not wanted: bit i of `needs`
// asks for the gradient of operand i. If main_grad is given, dweight is main_grad itself, in float32. The gradient of
// hidden is float32, too, if it is one shard's addend of a tree sum over all shards. `rows` has the values that
// read_backward_rows reads. If `rows` is None, the call only refuses a workspace that is too small.
RLK_FUNCTION(linear_logprob_backward, (), nb::tuple head, nb::tuple numbers, nb::tuple how, nb::handle shard,
             nb::handle rows, int needs, nb::handle main_grad) {
  const HeadArguments a(frame, head, numbers, how, shard);
  const auto wants = [&](int operand) { return (needs >> operand & 1) != 0; };
  const bool accumulates = wants(kWeight) && !main_grad.is_none(), runs = !rows.is_none();
  const std::int64_t rank = a.head.lora_rank, features = a.head.in_features;
  auto p = a.params<LinearLogprobBackwardParams>();
  p.dh_segments = a.dh_segments;
  p.wide_dhidden = wants(kHidden) && !shard.is_none() && a.dh_segments > 1;
  p.dhidden_rows = dense(p.num_rows, features);
  p.dweight_dtype = accumulates ? DType::kFloat32 : a.head.dtype;
  p.dbias_dtype = a.head.bias_dtype;
  if (runs) read_backward_rows(frame, a.call, nb::borrow<nb::tuple>(rows), &p);
  if (p.dlogprob != nullptr) require_one_stride(p.dlogprob_rows, p.num_rows, "dlogprob");
  if (p.dlse != nullptr) require_one_stride(p.dlse_rows, p.num_rows, "dlse");
  if (p.dentropy != nullptr) require_one_stride(p.dentropy_rows, p.num_rows, "dentropy");
  Results results("linear_logprob", frame, runs);
  results.add(&p.dhidden, a.hidden.array.shape(), p.wide_dhidden ? DType::kFloat32 : a.head.dtype, wants(kHidden));
  const Array* const total = accumulates ? &frame->read(main_grad, "main_grad", kFloat32) : nullptr;
  results.add_matrix(total, p.num_columns, features, &p.dweight, &p.dweight_stride, p.dweight_dtype,
                     "out_features, in_features", wants(kWeight));
  p.main_grad_stride = p.dweight_stride;
  if (accumulates) p.main_grad = static_cast<const float*>(p.dweight);
  results.add(&p.dbias, {p.num_columns}, p.dbias_dtype, wants(kBias))
      .add(&p.dlora_a, {rank, features}, a.head.dtype, wants(kLoraA) && rank > 0)
      .add(&p.dlora_b, {p.num_columns, rank}, a.head.dtype, wants(kLoraB) && rank > 0);
  if (!runs) {
    const WorkspaceRange range = linear_logprob_backward_workspace(p, frame->device());
    if (a.workspace_bytes) require_bytes(least_bytes(range), *a.workspace_bytes, "the backward of this call");
  }
  return results.run_within(a.workspace_bytes, false, linear_logprob_backward_workspace, rlk::linear_logprob_backward,
                            &p, true);
}

}  // namespace
}  // namespace rlk::bindings
