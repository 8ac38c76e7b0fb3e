#include "logprob_args.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear_args.h"

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

}  // namespace

float read_temperature_value(nb::handle temperature) {
  const double t = read_number(temperature, "temperature");
  const auto single = static_cast<float>(t);
  require(single > 0.0f && std::isnormal(single), "temperature", "a finite number > 0 (fp32, not subnormal), got ", t,
          "; for greedy decoding take the argmax, a temperature of 0 has no log-probabilities");
  return single;
}

int read_exp(nb::handle exp) {
  if (exp.is_none()) return 1;
  return PyUnicode_Check(exp.ptr()) && PyUnicode_CompareWithASCIIString(exp.ptr(), "portable") == 0 ? 0 : -1;
}

void refuse_parts(std::int64_t vocab_size, std::int64_t start, std::int64_t columns, const char* names) {
  const std::int64_t padded = (vocab_size + 63) / 64 * 64;
  const std::string pad = words("; pad the vocabulary to a multiple of 64 columns (", names, padded,
                                "), so that equal shards are whole parts");
  argument_error("vocab_start", "expected a shard of whole parts of a vocabulary of ", vocab_size,
                 " columns (it has eight parts, so 1, 2, 4 or 8 equal shards), got [", start, ", ", start + columns,
                 ")", padded == vocab_size ? "" : pad);
}

LogprobCall::LogprobCall(Frame* frame, const LogprobArguments& a)
    : rows_of_(&frame->read(a.logits, "logits", kFloats)), logits_(rows_of_) {
  const TensorView& x = logits_->view();
  require_backend("logprob", *logits_);
  require_shape(x.ndim > 0, *logits_, "shape [..., vocab_size]");
  input_.dtype = x.dtype;
  input_.logits = x.data;
  input_.num_columns = x.shape[x.ndim - 1];
  count_rows();
  const std::int64_t stride = x.stride(x.ndim - 1);  // NumPy gives an empty array the stride 0
  require(input_.num_rows == 0 || input_.num_columns <= 1 || stride == 1, *logits_,
          "a contiguous last dimension (stride 1), got stride ", stride, kCopyHint);
  input_.logits_rows = read_layout(*logits_, x.ndim - 1, "leading dimensions");
  read(frame, a);
}

LogprobCall::LogprobCall(Frame* frame, const LogprobArguments& a, const Array& hidden, std::int64_t num_columns,
                         DType logits_dtype)
    : rows_of_(&hidden) {
  input_.dtype = logits_dtype;
  input_.num_columns = num_columns;
  count_rows();
  read(frame, a);
}

void LogprobCall::count_rows() {
  input_.num_rows = 1;
  for (std::int64_t s : rows_shape()) input_.num_rows *= s;
}

void LogprobCall::read(Frame* frame, const LogprobArguments& a) {
  target_ = &frame->read(a.target, "target", kIndices);
  check_rows(*target_, target_->view().dtype, &input_.target_rows);
  input_.target = target_->view().data;
  input_.target_dtype = target_->view().dtype;
  input_.ignore_index = read_integer(entry(a.numbers, 3), "ignore_index", "an integer");
  read_temperature(frame, entry(a.numbers, 0));
  input_.logit_scale = read_positive(entry(a.numbers, 1), "logit_scale", "");
  const nb::handle softcap = entry(a.numbers, 2);
  if (!softcap.is_none()) input_.softcap = read_positive(softcap, "softcap", "None or ");
  input_.label_smoothing = static_cast<float>(a.label_smoothing);
  input_.exp = a.exp == 1 ? Exp::kHardware : Exp::kPortable;
  read_vocabulary(a);
  read_kept(frame, entry(a.numbers, 6), entry(a.numbers, 7));
}

void LogprobCall::check_device(const Array& array) const {
  require(array.view().device == device(), array, "device ", device(), " (that of ", *rows_of_, "), got ",
          array.view().device);
}

void LogprobCall::check_rows(const Array& array, DType dtype, RowLayout* layout) const {
  const TensorView& v = array.view();
  if (v.dtype != dtype) dtype_error(array, name_of(dtype));
  check_device(array);
  require_shape(std::ranges::equal(array.shape(), rows_shape()), array, "shape ", rows_shape(), " (", *rows_of_,
                " without the last dimension)");
  if (layout == nullptr) return require(v.is_contiguous(), array, "a contiguous array", kCopyHint);
  const auto rows = row_layout(v, v.ndim);
  require(rows.has_value(), array, "at most two strides", kCopyHint);
  *layout = *rows;
}

void LogprobCall::check_output(const Array& array, DType dtype) const {
  check_rows(array, dtype);
  require_writable(array);
  check_apart(array, true);
}

void LogprobCall::check_apart(const Array& output, bool from_logits) const {
  for (const Array* input : {target_, temperature_, kept_ids_, kept_offsets_, from_logits ? logits_ : nullptr}) {
    if (input) bindings::check_apart(output, *input);
  }
}

void LogprobCall::read_temperature(Frame* frame, nb::handle temperature) {
  if (!is_array(temperature)) {
    input_.temperature_value = read_temperature_value(temperature);
    return;
  }
  temperature_ = &frame->read(temperature, "temperature", "float32");
  require(temperature_->view().ndim > 0 || rows_shape().empty(), *temperature_, "a number, or an array of shape ",
          rows_shape(), ", one for each row; got an array of shape []");
  check_rows(*temperature_, DType::kFloat32);
  input_.temperature = temperature_->data<float>();
}

void LogprobCall::read_vocabulary(const LogprobArguments& a) {
  constexpr std::int64_t kWidest = std::numeric_limits<std::int32_t>::max();
  const nb::handle valid_vocab = entry(a.numbers, 4);
  const bool shard = !a.vocab_size.is_none();
  const std::int64_t whole = read_size(a.vocab_size, "vocab_size", input_.num_columns);
  const std::int64_t start = input_.vocab_start = read_size(a.vocab_start, "vocab_start");
  if (!shard && input_.num_rows > 0 && whole < 1) {
    if (logits_) argument_error(*logits_, "expected at least one column, got shape ", logits_->shape());
    argument_error("weight", "expected at least one row");
  }
  require(whole <= kWidest, "vocab_size", "at most ", kWidest, " columns, got ", whole);
  require(start >= 0 && start <= whole && input_.num_columns <= whole - start && (!shard || whole >= 1),
          "vocab_start, vocab_size", "0 <= vocab_start and vocab_start + ", input_.num_columns,
          " (columns of the shard) <= vocab_size, got vocab_start ", start, ", vocab_size ", whole);
  const std::int64_t canonical = input_.vocab_size = read_size(entry(a.numbers, 5), "canonical_vocab", whole);
  require(canonical >= 0 && canonical <= kWidest, "canonical_vocab", "a width up to ", kWidest, ", got ", canonical);
  require(!valid_vocab.is_none() || whole <= canonical, "canonical_vocab", "at least the ", whole,
          " columns of logits, got ", canonical, "; or give valid_vocab, the number of real tokens");
  const std::int64_t widest = std::min(whole, canonical);
  const std::int64_t valid = input_.valid_vocab = read_size(valid_vocab, "valid_vocab", widest);
  require(valid <= widest && valid >= (input_.num_rows > 0 ? 1 : 0), "valid_vocab", "1 <= valid_vocab <= ", widest,
          ", got ", valid);
  if (shard) require_whole_parts();
}

void LogprobCall::require_whole_parts() const {
  if (parts_of_columns(input_.vocab_size, input_.valid_vocab, input_.vocab_start, input_.num_columns).count > 0) return;
  refuse_parts(input_.vocab_size, input_.vocab_start, input_.num_columns, "canonical_vocab=");
}

void LogprobCall::read_kept(Frame* frame, nb::handle ids, nb::handle offsets) {
  if (offsets.is_none()) return;
  kept_ids_ = &frame->read(ids, "kept ids", kInt32);
  kept_offsets_ = &frame->read(offsets, "kept offsets", kInt64);
  const auto check = [&](const Array& array, std::int64_t length) {
    check_device(array);
    const TensorView& v = array.view();
    if (v.ndim == 1 && (length < 0 || v.shape[0] == length) && v.is_contiguous()) return;
    require_shape(false, array, "a contiguous array of shape [",
                  length < 0 ? "number of ids]" : words(length, "] (rows + 1)"));
  };
  check(*kept_ids_, -1);
  check(*kept_offsets_, input_.num_rows + 1);
  input_.kept_ids = kept_ids_->data<std::int32_t>();
  input_.kept_offsets = kept_offsets_->data<std::int64_t>();
  input_.kept_size = kept_ids_->view().shape[0];
}

}  // namespace rlk::bindings
