// Arguments of operators on rows of logits: the logits, and arrays with an element a row, where Python may give a number
// for all of them.
#pragma once

#include <optional>
#include <string>

#include "linear_args.h"
#include "rlk/ops/sample.h"
#include "row_integers.h"

namespace rlk::bindings {

// Checks logits [num_rows, vocab_size], and sets their address, sizes and strides in `p`.
template <class Params>
Array read_logits(nb::handle given, Params* p) {
  Array x(given, "logits", kFloats);
  const TensorView& v = x.view();
  if (v.ndim != 2) argument_error(x, "expected shape [num_rows, vocab_size], got " + shape_text(x.shape()));
  if (v.shape[1] < 1 || v.shape[1] > kSampleVocab) {
    argument_error(x, "expected 1 to " + std::to_string(kSampleVocab) + " columns, got " + std::to_string(v.shape[1]));
  }
  require_columns(x);
  p->logits = v.data;
  p->dtype = v.dtype;
  p->num_rows = v.shape[0];
  p->vocab_size = v.shape[1];
  p->logits_stride = v.stride(0);
  return x;
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
