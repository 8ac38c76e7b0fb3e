#include "logprob_args.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear_args.h"
#include "row_integers.h"

namespace rlk::bindings {
namespace {

std::string number_text(double x) { return nb::repr(nb::float_(x)).c_str(); }

float read_positive(nb::handle h, const char* name, const char* expected) {
  const double x = read_number(h, name);
  const auto single = static_cast<float>(x);
  if (!(single > 0.0f) || !std::isfinite(single)) {
    value_error(std::string(name) + ": " + expected + " a finite number > 0, got " + number_text(x));
  }
  return single;
}

std::int64_t read_size(nb::handle value, const char* name) { return read_integer(value, name, "an integer"); }

std::string got_shape(const Array& a) { return shape_text(a.shape()); }

}  // namespace

float read_temperature_value(nb::handle temperature) {
  const double t = read_number(temperature, "temperature");
  if (!(t > 0.0) || !std::isfinite(t) || !(static_cast<float>(t) >= std::numeric_limits<float>::min()) ||
      !std::isfinite(static_cast<float>(t))) {
    value_error("temperature: expected a finite number > 0 (fp32, not subnormal), got " + number_text(t) +
                "; for greedy decoding take the argmax, a temperature of 0 has no log-probabilities");
  }
  return static_cast<float>(t);
}

int read_exp(nb::handle exp) {
  if (exp.is_none()) return 1;
  return PyUnicode_Check(exp.ptr()) && PyUnicode_CompareWithASCIIString(exp.ptr(), "portable") == 0 ? 0 : -1;
}

LogprobCall::LogprobCall(const LogprobArguments& a) {
  logits_.emplace(a.logits, "logits", kFloats);
  rows_of_ = &*logits_;
  const TensorView& x = logits_->view();
  require_backend("logprob", x.device);
  if (x.ndim < 1) value_error("logits: expected shape [..., vocab_size], got []");
  input_.dtype = x.dtype;
  input_.logits = x.data;
  input_.num_columns = x.shape[x.ndim - 1];
  input_.num_rows = 1;
  for (std::int64_t s : rows_shape()) input_.num_rows *= s;
  if (input_.num_rows > 0 && input_.num_columns > 1 && x.stride(x.ndim - 1) != 1) {  // NumPy strides an empty array 0
    value_error("logits: expected a contiguous last dimension (stride 1), got stride " +
                std::to_string(x.stride(x.ndim - 1)) + kCopyHint);
  }
  const auto layout = row_layout(x, x.ndim - 1);
  if (!layout) {
    value_error("logits: expected leading dimensions that collapse to at most two strides, got shape " +
                got_shape(*logits_) + kCopyHint);
  }
  input_.logits_rows = *layout;
  read(a);
}

LogprobCall::LogprobCall(const LogprobArguments& a, const Array& hidden, std::int64_t num_columns, DType logits_dtype)
    : rows_of_(&hidden) {
  input_.dtype = logits_dtype;
  input_.num_columns = num_columns;
  input_.num_rows = 1;
  for (std::int64_t s : rows_shape()) input_.num_rows *= s;
  read(a);
}

void LogprobCall::read(const LogprobArguments& a) {
  target_.emplace(a.target, "target", kIndices);
  check_rows(*target_, target_->view().dtype, &input_.target_rows);
  input_.target = target_->view().data;
  input_.target_dtype = target_->view().dtype;
  input_.ignore_index = read_size(a.ignore_index, "ignore_index");

  read_temperature(a.temperature);
  input_.logit_scale = read_positive(a.logit_scale, "logit_scale", "expected");
  if (!a.softcap.is_none()) {
    input_.softcap = read_positive(a.softcap, "softcap", "expected None or");
  }
  input_.label_smoothing = static_cast<float>(a.label_smoothing);
  input_.exp = a.exp == 1 ? Exp::kHardware : Exp::kPortable;
  read_vocabulary(a);
  read_kept(a);
}

const float* BackwardRows::read(const LogprobCall& call, nb::handle given, const char* name, RowLayout* layout) {
  if (given.is_none()) return nullptr;
  const Array& array = arrays_.emplace_back(given, name, "float32");
  call.check_rows(array, DType::kFloat32, layout);
  return static_cast<const float*>(array.view().data);
}

void LogprobCall::check_device(const Array& array) const {
  if (!(array.view().device == device())) {
    argument_error(array, std::string("expected device ") + name_of(device()) + " (that of " + rows_of_->name() +
                              "), got " + name_of(array.view().device));
  }
}

void LogprobCall::check_rows(const Array& array, DType dtype, RowLayout* layout) const {
  const TensorView& v = array.view();
  if (v.dtype != dtype) dtype_error(array, name_of(dtype));
  check_device(array);
  const std::span<const std::int64_t> rows_shape = this->rows_shape();
  if (!std::ranges::equal(array.shape(), rows_shape)) {
    argument_error(array, std::string("expected shape ") + shape_text(rows_shape) + " (" + rows_of_->name() +
                              " without the last dimension), got " + got_shape(array));
  }
  if (layout) {
    const auto rows = row_layout(v, v.ndim);
    if (!rows) argument_error(array, std::string("expected at most two strides") + kCopyHint);
    *layout = *rows;
  } else if (!v.is_contiguous()) {
    argument_error(array, std::string("expected a contiguous array") + kCopyHint);
  }
}

void LogprobCall::check_output(const Array& array, DType dtype) const {
  check_rows(array, dtype);
  require_writable(array);
  check_apart(array, true);
}

void LogprobCall::check_apart(const Array& output, bool from_logits) const {
  for (const auto* input : {&target_, &temperature_, &kept_ids_, &kept_offsets_}) {
    if (*input) bindings::check_apart(output, **input);
  }
  if (from_logits && logits_) bindings::check_apart(output, *logits_);
}

void LogprobCall::read_temperature(nb::handle temperature) {
  if (!is_array(temperature)) {
    input_.temperature_value = read_temperature_value(temperature);
    return;
  }
  temperature_.emplace(temperature, "temperature", "float32");
  if (temperature_->view().ndim == 0 && !rows_shape().empty()) {
    value_error("temperature: expected a number, or an array of shape " + shape_text(rows_shape()) +
                ", one for each row; got an array of shape []");
  }
  check_rows(*temperature_, DType::kFloat32);
  input_.temperature = static_cast<const float*>(temperature_->view().data);
}

void LogprobCall::read_vocabulary(const LogprobArguments& a) {
  constexpr std::int64_t kWidest = std::numeric_limits<std::int32_t>::max();
  const bool shard = !a.vocab_size.is_none();
  const std::int64_t whole = shard ? read_size(a.vocab_size, "vocab_size") : input_.num_columns;
  input_.vocab_start = a.vocab_start.is_none() ? 0 : read_size(a.vocab_start, "vocab_start");
  if (!shard && input_.num_rows > 0 && whole < 1) {
    value_error((logits_ ? "logits: expected at least one column, got shape " + got_shape(*logits_)
                         : std::string("weight: expected at least one row")));
  }
  if (whole > kWidest) {
    value_error("vocab_size: expected at most " + std::to_string(kWidest) + " columns, got " + std::to_string(whole));
  }
  if (input_.vocab_start < 0 || input_.vocab_start > whole || input_.num_columns > whole - input_.vocab_start ||
      (shard && whole < 1)) {
    value_error("vocab_start, vocab_size: expected 0 <= vocab_start and vocab_start + " +
                std::to_string(input_.num_columns) + " (columns of the shard) <= vocab_size, got vocab_start " +
                std::to_string(input_.vocab_start) + ", vocab_size " + std::to_string(whole));
  }
  input_.vocab_size = a.canonical_vocab.is_none() ? whole : read_size(a.canonical_vocab, "canonical_vocab");
  if (input_.vocab_size < 0 || input_.vocab_size > kWidest) {
    value_error("canonical_vocab: expected a width up to " + std::to_string(kWidest) + ", got " +
                std::to_string(input_.vocab_size));
  }
  const std::int64_t widest = std::min(whole, input_.vocab_size);
  if (a.valid_vocab.is_none() && whole > input_.vocab_size) {
    value_error("canonical_vocab: expected at least the " + std::to_string(whole) + " columns of logits, got " +
                std::to_string(input_.vocab_size) + "; or give valid_vocab, the number of real tokens");
  }
  input_.valid_vocab = a.valid_vocab.is_none() ? widest : read_size(a.valid_vocab, "valid_vocab");
  if (input_.valid_vocab > widest || input_.valid_vocab < (input_.num_rows > 0 ? 1 : 0)) {
    value_error("valid_vocab: expected 1 <= valid_vocab <= " + std::to_string(widest) + ", got " +
                std::to_string(input_.valid_vocab));
  }
  if (shard) require_whole_parts();
}

void LogprobCall::require_whole_parts() const {
  const std::int64_t whole = input_.vocab_size, end = input_.vocab_start + input_.num_columns;
  if (parts_of_columns(whole, input_.valid_vocab, input_.vocab_start, input_.num_columns).count > 0) return;
  const std::int64_t padded = (whole + 63) / 64 * 64;
  const std::string pad =
      "; pad the vocabulary to a multiple of 64 columns (canonical_vocab=" + std::to_string(padded) +
      "), so that equal shards are whole parts";
  value_error("vocab_start: expected a shard of whole parts of a vocabulary of " + std::to_string(whole) +
              " columns (it has eight parts, so 1, 2, 4 or 8 equal shards), got [" +
              std::to_string(input_.vocab_start) + ", " + std::to_string(end) + ")" + (padded == whole ? "" : pad));
}

void LogprobCall::read_kept(const LogprobArguments& a) {
  if (a.kept_offsets.is_none()) return;
  kept_ids_.emplace(a.kept_ids, "kept ids", kInt32);
  kept_offsets_.emplace(a.kept_offsets, "kept offsets", kInt64);
  const auto check = [&](const Array& array, std::int64_t length) {
    check_device(array);
    if (array.view().ndim != 1 || (length >= 0 && array.view().shape[0] != length) || !array.view().is_contiguous()) {
      argument_error(array, std::string("expected a contiguous array of shape [") +
                                (length >= 0 ? std::to_string(length) + "] (rows + 1)" : "number of ids]") + ", got " +
                                got_shape(array));
    }
  };
  check(*kept_ids_, -1);
  check(*kept_offsets_, input_.num_rows + 1);
  input_.kept_ids = static_cast<const std::int32_t*>(kept_ids_->view().data);
  input_.kept_offsets = static_cast<const std::int64_t*>(kept_offsets_->view().data);
  input_.kept_size = kept_ids_->view().shape[0];
}

}  // namespace rlk::bindings
