#include "linear_args.h"

#include <algorithm>
#include <string>
#include <vector>

#include "torch_state.h"

namespace rlk::bindings {
namespace {

std::string got_shape(const Array& a) { return ", got " + shape_text(a.shape()); }

}  // namespace

void require_columns(const Array& a) {
  const TensorView& v = a.view();
  if (v.shape[v.ndim - 1] > 1 && v.stride(v.ndim - 1) != 1 && v.num_elements() > 0) {
    const std::int64_t stride = v.stride(v.ndim - 1);
    argument_error(a, "expected a contiguous last dimension (stride 1), got stride " + std::to_string(stride) +
                          (stride == 0 ? " (one element, expanded)" : "") + kCopyHint);
  }
}

void require_columns_below(const RowsArgument& a, int bits) {
  if (a.columns >= std::int64_t{1} << bits) {
    argument_error(a.array,
                   "expected fewer than 2^" + std::to_string(bits) + " columns, got " + std::to_string(a.columns));
  }
}

void require_device(const Array& a, Device device) {
  if (!(a.view().device == device)) {
    argument_error(a, "expected device " + name_of(device) + ", got " + name_of(a.view().device));
  }
}

RowsArgument::RowsArgument(nb::handle object, const char* name) : array(object, name, kFloats) {
  const TensorView& v = view();
  if (v.ndim < 1) argument_error(array, "expected shape [..., features], got []");
  columns = v.shape[v.ndim - 1];
  for (std::int64_t s : leading()) num_rows *= s;
  if (num_rows >= std::int64_t{1} << 32) {
    argument_error(array, "expected fewer than 2^32 rows, got " + std::to_string(num_rows));
  }
  require_columns(array);
  const auto layout = row_layout(v, v.ndim - 1);
  if (!layout) {
    argument_error(array, "expected leading dimensions that collapse to at most two strides, got shape " +
                              shape_text(array.shape()) + kCopyHint);
  }
  rows = *layout;
}

std::vector<std::int64_t> RowsArgument::shape_with(std::int64_t other_columns) const {
  std::vector<std::int64_t> shape(leading().begin(), leading().end());
  shape.push_back(other_columns);
  return shape;
}

WeightArgument::WeightArgument(nb::handle object, const char* name, const RowsArgument& like, int dimension)
    : array(object, name, kFloats) {
  check_same(array, like.array);
  const TensorView& v = view();
  if (v.ndim != 2 || v.shape[dimension] != like.columns) {
    const std::string n = std::to_string(like.columns);
    argument_error(array, "expected shape " + (dimension == 1 ? "[out_features, " + n : "[" + n + ", in_features") +
                              "] (" + n + " is the last dimension of " + like.array.name() + ")" + got_shape(array));
  }
  require_columns(array);
  out_features = v.shape[0];
  in_features = v.shape[1];
  stride = v.stride(0);
}

RowLayout contiguous_rows(std::int64_t num_rows, std::int64_t columns) {
  return {.inner = std::max<std::int64_t>(num_rows, 1), .outer_stride = 0, .inner_stride = columns};
}

void check_operand(const RowsArgument& a) {
  require_backend("linear", a.view().device);
  if (a.view().device.type != DeviceType::kCpu && a.view().dtype == DType::kFloat32) {
    dtype_error(a.array, "bfloat16 or float16 on " + name_of(a.view().device) +
                             " (float32 products are the CPU's alone: a GPU's matrix units would round to TF32)");
  }
}

Arithmetic read_arithmetic(int code, const TensorView& operand) {
  if (operand.device.type != DeviceType::kCpu) return Arithmetic::kIeee;
  if (operand.dtype == DType::kFloat32 && code != 0) {
    throw nb::value_error(
        "arithmetic: expected ieee for float32 operands, matrix units have no such product; got another unit from "
        "rk.arithmetic");
  }
  return static_cast<Arithmetic>(code);
}

DType read_dtype(int code, DType otherwise) { return code < 0 ? otherwise : static_cast<DType>(code); }

DType read_logits_dtype(int code, DType operands) {
  const DType logits = read_dtype(code, operands);
  if (logits != DType::kFloat32 && logits != operands) {
    const std::string other = operands == DType::kFloat32 ? "" : std::string(" or ") + name_of(operands);
    throw nb::type_error(
        ("logits_dtype: expected float32" + other + " (that of hidden), got " + name_of(logits)).c_str());
  }
  return logits;
}

std::int64_t read_integer(nb::handle value, const char* name, const char* expected) {
  // An array has an __index__ that raises where it is not one integer, and waits for its device where it is.
  const bool is_array = !PyLong_Check(value.ptr()) && nb::hasattr(value, "__dlpack__");
  PyObject* const given = is_array || PyBool_Check(value.ptr()) ? nullptr : PyNumber_Index(value.ptr());
  if (given == nullptr) {
    PyErr_Clear();
    throw nb::type_error((std::string(name) + ": expected " + expected + ", got " + kind_of(value)).c_str());
  }
  const nb::object index = nb::steal(given);
  int too_large = 0;
  const long long x = PyLong_AsLongLongAndOverflow(index.ptr(), &too_large);
  if (too_large != 0) {
    // Python refuses to print a number of thousands of digits.
    const auto bits = nb::cast<std::int64_t>(index.attr("bit_length")());
    argument_error(name, "expected an integer of 64 bits, got " +
                             (bits > 64 ? "one of " + std::to_string(bits) + " bits" : nb::str(index).c_str()));
  }
  return x;
}

int read_segments(nb::handle k_segments, std::int64_t in_features) {
  PyObject* const given = PyBool_Check(k_segments.ptr()) ? nullptr : PyNumber_Index(k_segments.ptr());
  if (!given) {
    PyErr_Clear();  // an array of several elements has an __index__ that raises
    throw nb::type_error(("k_segments: expected an integer, got " + kind_of(k_segments)).c_str());
  }
  const nb::object index = nb::steal(given);
  int too_large = 0;
  const long long s = PyLong_AsLongLongAndOverflow(index.ptr(), &too_large);
  if (too_large != 0 || (s != 1 && s != 2 && s != 4 && s != 8)) {
    throw nb::value_error((std::string("k_segments: expected 1, 2, 4 or 8, got ") + nb::repr(index).c_str()).c_str());
  }
  if (s > 1 && in_features % (16 * s) != 0) {
    const std::int64_t padded = (in_features + 16 * s - 1) / (16 * s) * (16 * s);
    throw nb::value_error(("k_segments: expected in_features to be a multiple of " + std::to_string(16 * s) +
                           " (16 * k_segments), got " + std::to_string(in_features) +
                           "; pad x and weight with zero columns to " + std::to_string(padded))
                              .c_str());
  }
  return static_cast<int>(s);
}

void check_same(const Array& a, const Array& like) {
  if (a.view().dtype != like.view().dtype) {
    throw nb::type_error((std::string(a.name()) + ": expected dtype " + name_of(like.view().dtype) + " (that of " +
                          like.name() + "), got " + name_of(a.view().dtype) + autocast_hint())
                             .c_str());
  }
  require_device(a, like.view().device);
}

void check_shape(const Array& a, std::span<const std::int64_t> shape, const char* like) {
  if (std::ranges::equal(a.shape(), shape)) return;
  argument_error(a, "expected shape " + shape_text(shape) + " (that of " + like + ")" + got_shape(a));
}

void check_like(const RowsArgument& a, const RowsArgument& like) {
  check_same(a.array, like.array);
  check_shape(a.array, like.array.shape(), like.array.name());
}

void check_leading(const RowsArgument& a, const RowsArgument& like) {
  if (std::ranges::equal(a.leading(), like.leading())) return;
  const std::string leading = shape_text(like.leading());
  argument_error(a.array, "expected shape [" +
                              (leading == "[]" ? "features]" : leading.substr(1, leading.size() - 2) + ", features]") +
                              " (the leading dimensions of " + like.array.name() + ")" + got_shape(a.array));
}

void check_float32_or(const Array& a, const Array& like) {
  const DType dtype = like.view().dtype;
  if (a.view().dtype == DType::kFloat32 || a.view().dtype == dtype) return;
  const std::string other = dtype == DType::kFloat32 ? "" : std::string(" or ") + name_of(dtype) + " (that of ";
  dtype_error(a, "float32" + (other.empty() ? "" : other + like.name() + ")"));
}

void check_bias(const Array& bias, std::int64_t columns, Device device, DType dtype, const char* like) {
  const TensorView& v = bias.view();
  if (v.dtype != DType::kFloat32 && v.dtype != dtype) {
    dtype_error(bias, dtype == DType::kFloat32 ? "float32" : std::string("float32 or ") + name_of(dtype) + like);
  }
  require_device(bias, device);
  if (v.ndim != 1 || v.shape[0] != columns) {
    argument_error(bias, "expected shape [" + std::to_string(columns) + "] (out_features)" + got_shape(bias));
  }
  require_columns(bias);
}

void check_part(const Array& part, const Array& first) {
  if (!std::ranges::equal(part.shape(), first.shape())) {
    argument_error(part,
                   "expected shape " + shape_text(first.shape()) + " (that of " + first.name() + ")" + got_shape(part));
  }
  const TensorView& v = part.view();
  if (v.is_contiguous()) return;
  std::vector<std::int64_t> strides;
  for (std::int32_t i = 0; i < v.ndim; ++i) strides.push_back(v.stride(i));
  argument_error(part, "expected a contiguous array, got shape " + shape_text(part.shape()) + " with strides " +
                           shape_text(strides) + kCopyHint);
}

void check_gradient_dtype(const char* name, DType dtype, DType rows) {
  if (dtype == rows || dtype == DType::kFloat32) return;
  throw nb::type_error(
      (std::string(name) + ": expected float32 or " + name_of(rows) + " (that of dy), got " + name_of(dtype)).c_str());
}

std::int64_t check_output(const Array& out, std::int64_t rows, std::int64_t columns, Device device, const char* what) {
  const TensorView& v = out.view();
  require_device(out, device);
  if (v.ndim != 2 || v.shape[0] != rows || v.shape[1] != columns) {
    argument_error(out, "expected shape [" + std::to_string(rows) + ", " + std::to_string(columns) + "] (" + what +
                            ")" + got_shape(out));
  }
  require_writable(out);
  require_columns(out);
  return v.stride(0);
}

void require_writable(const Array& out) {
  if (out.view().read_only) throw nb::buffer_error((std::string(out.name()) + ": is read-only").c_str());
  if (overlaps_itself(out.view())) argument_error(out, "expected strides that do not overlap");
}

void check_apart(const Array& out, const Array& input) {
  if (ranges_overlap(out.view(), input.view())) {
    argument_error(out, std::string("may share memory with ") + input.name() + ": their addresses overlap");
  }
}

}  // namespace rlk::bindings
