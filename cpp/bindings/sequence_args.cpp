#include "sequence_args.h"

#include <algorithm>

#include "linear_args.h"
#include "sequences_args.h"

namespace rlk::bindings {
std::int64_t row_stride(const Array& a) { return a.view().ndim < 2 ? 0 : a.view().stride(0); }

void require_flags(const Array& mask) {
  const std::string dtype = mask.dtype_name();
  const bool is_float8 = mask.element_bytes() == 1 && dtype.starts_with("float");  // kinds without a -0, or a 0, too
  if (mask.element_bytes() > 8 || is_float8 || dtype.starts_with("complex")) {
    throw nb::type_error(
        ("mask: expected dtype bool, of integers or of floats of 16 bits and more, got " + dtype).c_str());
  }
}

TokenFlagsArgument::TokenFlagsArgument(nb::handle object, std::span<const std::int64_t> shape, const char* whose,
                                       Device device) {
  if (object.is_none()) return;
  array_.emplace(Array::of_any_dtype(object, "mask"));
  const TensorView& v = array_->view();
  require_flags(*array_);
  require_device(*array_, device);
  if (!std::ranges::equal(array_->shape(), shape)) {
    argument_error("mask", "expected shape " + shape_text(shape) + " (the tokens of " + whose + "), got " +
                               shape_text(array_->shape()));
  }
  require_columns(*array_);
  mask.data = v.num_elements() == 0 ? nullptr : v.data;
  mask.row_stride = row_stride(*array_);
  mask.bytes = mask.data == nullptr ? 0 : array_->element_bytes();
  mask.is_float = array_->is_float();
}

OffsetsArgument::OffsetsArgument(nb::handle object, Device device) {
  if (object.is_none()) return;
  array_.emplace(object, "cu_seqlens", "int32 or int64");
  const TensorView& v = array_->view();
  if (v.dtype != DType::kInt32 && v.dtype != DType::kInt64) dtype_error(*array_, "int32 or int64");
  require_device(*array_, device);
  if (v.ndim != 1 || v.shape[0] < 1) {
    argument_error("cu_seqlens", "expected shape [num_sequences + 1], got " + shape_text(array_->shape()));
  }
  if (!v.is_contiguous()) {
    argument_error("cu_seqlens", "expected a contiguous array, got stride " + std::to_string(v.stride(0)) + kCopyHint);
  }
  offsets.data = v.data;
  offsets.dtype = v.dtype;
  num_sequences = v.shape[0] - 1;
}

std::int64_t read_count(nb::handle value, const char* name) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) {
    throw nb::type_error((std::string(name) + ": expected an integer, got " + kind_of(value)).c_str());
  }
  const Py_ssize_t count = PyNumber_AsSsize_t(value.ptr(), nullptr);
  if (PyErr_Occurred()) throw nb::python_error();
  if (count < 0) argument_error(name, "expected a number >= 0, got " + std::to_string(count));
  return count;
}

}  // namespace rlk::bindings
