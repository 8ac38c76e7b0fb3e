// Arguments of operators on rows of logits: the logits, and arrays with an element a row, where Python may give a number
// for all of them.
#pragma once

#include <optional>
#include <string>

#include "linear_args.h"
#include "rlk/ops/sample.h"
#include "row_integers.h"

namespace rlk::bindings {

inline std::int64_t read_vocab_size(nb::handle given) {
  const std::int64_t size = read_integer(given, "vocab_size", "an integer");
  if (size < 1 || size > kSampleVocab) {
    argument_error("vocab_size",
                   "expected an integer in [1, " + std::to_string(kSampleVocab) + "], got " + std::to_string(size));
  }
  return size;
}

// Checks logits [num_rows, vocab_size], and sets their address, sizes and strides in `p`. vocab_size: None, or that of which
// they are columns.
template <class Params>
Array read_logits(nb::handle given, Params* p, nb::handle vocab_size = nb::none(), const char* name = "logits") {
  Array x(given, name, kFloats);
  const TensorView& v = x.view();
  const bool whole = vocab_size.is_none();
  if (v.ndim != 2) argument_error(x, "expected shape [num_rows, vocab_size], got " + shape_text(x.shape()));
  if (v.shape[1] < (whole ? 1 : 0) || v.shape[1] > kSampleVocab) {
    argument_error(x, "expected 1 to " + std::to_string(kSampleVocab) + " columns, got " + std::to_string(v.shape[1]));
  }
  require_columns(x);
  p->logits = v.data;
  p->dtype = v.dtype;
  p->num_rows = v.shape[0];
  p->vocab_size = whole ? v.shape[1] : read_vocab_size(vocab_size);
  p->logits_stride = v.stride(0);
  return x;
}

// The first column of a shard.
inline std::int64_t read_vocab_start(nb::handle given, std::int64_t vocab_size, std::int64_t columns) {
  const std::int64_t start = given.is_none() ? 0 : read_integer(given, "vocab_start", "an integer");
  if (start < 0 || start > vocab_size || columns > vocab_size - start) {
    argument_error("vocab_start", "expected 0 <= vocab_start and vocab_start + " + std::to_string(columns) +
                                      " (columns of the shard) <= vocab_size, got vocab_start " +
                                      std::to_string(start) + ", vocab_size " + std::to_string(vocab_size));
  }
  return start;
}

// An array with one element for each row, or nothing where Python gave a number, which it checked.
class RowArray {
 public:
  RowArray(nb::handle given, const char* name, const Dtypes& dtypes, std::int64_t num_rows, Device device) {
    if (!is_array(given)) return;
    array_.emplace(given, name, dtypes);
    require_device(*array_, device);
    const TensorView& v = array_->view();
    if (v.ndim != 1 || v.shape[0] != num_rows) {
      argument_error(name, "expected shape [" + std::to_string(num_rows) + "], got " + shape_text(array_->shape()));
    }
  }
  const Array* operator->() const { return &*array_; }
  explicit operator bool() const { return array_.has_value(); }
  std::int64_t stride() const { return array_->view().stride(0); }

 private:
  std::optional<Array> array_;
};

inline RowFloats floats_of(const RowArray& given, nb::handle number, const char* name) {
  if (!given) return {nullptr, static_cast<float>(read_number(number, name)), 0};
  const TensorView& v = given->view();
  return {static_cast<const float*>(v.data), 0.0f, given.stride()};
}

}  // namespace rlk::bindings
