// Arrays with an element a row, where Python may give a number for all of them.
#pragma once

#include <optional>
#include <string>

#include "linear_args.h"
#include "rlk/ops/sample.h"
#include "row_integers.h"

namespace rlk::bindings {

// An array with one element for each row, or nothing where Python gave a number, which it checked.
class RowArray {
 public:
  RowArray(nb::handle given, const char* name, const char* dtypes, std::int64_t num_rows, Device device) {
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
  const Array& array() const { return *array_; }
  std::int64_t stride() const { return array_->view().stride(0); }

 private:
  std::optional<Array> array_;
};

inline RowFloats floats_of(const RowArray& given, nb::handle number, const char* name) {
  if (!given) return {nullptr, static_cast<float>(read_number(number, name)), 0};
  const TensorView& v = given->view();
  if (v.dtype != DType::kFloat32) dtype_error(given.array(), "float32");
  return {static_cast<const float*>(v.data), 0.0f, given.stride()};
}

}  // namespace rlk::bindings
