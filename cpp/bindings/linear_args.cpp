#include "linear_args.h"

#include <algorithm>
#include <string>

#include "rlk/ops/attention.h"
#include "torch_state.h"

namespace rlk::bindings {
void require_columns(const Array& a) {
  const std::int64_t stride = a->stride(a->ndim - 1);
  require(a->shape[a->ndim - 1] <= 1 || stride == 1 || a->num_elements() == 0, a,
          "a contiguous last dimension (stride 1), got stride ", stride, stride == 0 ? " (one element, expanded)" : "",
          kCopyHint);
}

void require_contiguous(const Array& a) { require(a->is_contiguous(), a, "a contiguous array", kCopyHint); }

void require_columns_below(const RowsArgument& a, int bits) {
  require(a.columns < std::int64_t{1} << bits, a.array, "fewer than 2^", bits, " columns, got ", a.columns);
}

void require_device(const Array& a, Device device) {
  require(a->device == device, a, "device ", device, ", got ", a->device);
}

RowsArgument::RowsArgument(Frame* frame, nb::handle object, const char* name)
    : array(frame->read(object, name, kFloats)) {
  const TensorView& v = array.view();
  require_shape(v.ndim > 0, array, "shape [..., features]");
  columns = v.shape[v.ndim - 1];
  for (std::int64_t s : leading()) num_rows *= s;
  require(num_rows < std::int64_t{1} << 32, array, "fewer than 2^32 rows, got ", num_rows);
  require_columns(array);
  rows = read_layout(array, v.ndim - 1, "leading dimensions");
}

RowLayout read_layout(const Array& a, int dims, const char* what) {
  const auto layout = row_layout(a.view(), dims);
  require(layout.has_value(), a, what, " that collapse to at most two strides, got shape ", a.shape(), kCopyHint);
  return *layout;
}

Sizes shape_with(std::span<const std::int64_t> leading, std::int64_t columns) {
  Sizes shape(leading.begin(), leading.end());
  shape.push_back(columns);
  return shape;
}

WeightArgument::WeightArgument(Frame* frame, nb::handle object, const char* name, const RowsArgument& like,
                               int dimension)
    : array(frame->read(object, name, kFloats)) {
  check_same(array, like.array);
  const bool first = dimension == 0;
  require_shape(array->ndim == 2 && array->shape[dimension] == like.columns, array,
                first ? "shape [" : "shape [out_features, ", like.columns, first ? ", in_features] (" : "] (",
                like.columns, " is the last dimension of ", like.array, ")");
  require_columns(array);
  out_features = array->shape[0];
  in_features = array->shape[1];
}

RowLayout contiguous_rows(std::int64_t num_rows, std::int64_t columns) {
  return {.inner = std::max<std::int64_t>(num_rows, 1), .outer_stride = 0, .inner_stride = columns};
}

void check_operand(const RowsArgument& a) {
  require_backend("linear", a.array);
  if (a->device.type != DeviceType::kCpu && a->dtype == DType::kFloat32) {
    dtype_error(a.array, "bfloat16 or float16 on ", a->device,
                " (float32 products are the CPU's alone: a GPU's matrix units would round to TF32)");
  }
}

Arithmetic read_arithmetic(int code, const RowsArgument& operand) {
  if (operand->device.type != DeviceType::kCpu) return Arithmetic::kIeee;
  require(operand->dtype != DType::kFloat32 || code == 0, "arithmetic",
          "ieee for float32 operands, matrix units have no such product; got another unit from rk.arithmetic");
  return static_cast<Arithmetic>(code);
}

DType read_dtype(int code, DType otherwise) { return code < 0 ? otherwise : static_cast<DType>(code); }

DType read_logits_dtype(int code, DType operands) {
  const DType logits = read_dtype(code, operands);
  if (logits != DType::kFloat32 && logits != operands) {
    const std::string other = operands == DType::kFloat32 ? "" : words(" or ", operands);
    type_error("logits_dtype", "float32", other, " (that of hidden), got ", logits);
  }
  return logits;
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

// Returns the value as a Python int; refuses a bool.
static nb::object index_of(nb::handle value, bool refused, const char* name, const char* expected) {
  PyObject* const index = refused || PyBool_Check(value.ptr()) ? nullptr : PyNumber_Index(value.ptr());
  if (index) return nb::steal(index);
  PyErr_Clear();  // __index__ of an array with several elements raises
  type_error(name, expected, ", got ", kind_of(value));
}

std::int64_t read_integer(nb::handle value, const char* name, const char* expected) {
  // An array's __index__ waits for its device if the array is one integer, and raises otherwise.
  const bool is_array = !PyLong_Check(value.ptr()) && nb::hasattr(value, "__dlpack__");
  const nb::object index = index_of(value, is_array, name, expected);
  int too_large = 0;
  const long long x = PyLong_AsLongLongAndOverflow(index.ptr(), &too_large);
  if (too_large != 0) {
    // Python refuses to print a number of thousands of digits.
    const auto bits = nb::cast<std::int64_t>(index.attr("bit_length")());
    argument_error(name, "expected an integer of 64 bits, got ",
                   bits > 64 ? words("one of ", bits, " bits") : word(index));
  }
  return x;
}

int read_segments(nb::handle k_segments, std::int64_t in_features) {
  const nb::object index = index_of(k_segments, false, "k_segments", "an integer");
  int too_large = 0;
  const long long s = PyLong_AsLongLongAndOverflow(index.ptr(), &too_large);
  require(too_large == 0 && is_tree(s), "k_segments", "1, 2, 4 or 8, got ", index);
  const std::int64_t step = 16 * s;
  require(s == 1 || in_features % step == 0, "k_segments", "in_features to be a multiple of ", step,
          " (16 * k_segments), got ", in_features, "; pad x and weight with zero columns to ",
          (in_features + step - 1) / step * step);
  return static_cast<int>(s);
}

void check_same(const Array& a, const Array& like) {
  if (a->dtype != like->dtype) {
    type_error(a.name(), "dtype ", like->dtype, " (that of ", like, "), got ", a->dtype, autocast_hint());
  }
  require_device(a, like->device);
}

void check_shape(const Array& a, std::span<const std::int64_t> shape, const char* like) {
  require_shape(std::ranges::equal(a.shape(), shape), a, "shape ", shape, " (that of ", like, ")");
}

void check_like(const RowsArgument& a, const RowsArgument& like) {
  check_same(a.array, like.array);
  check_shape(a.array, like.array.shape(), like.array.name());
}

void check_leading(const RowsArgument& a, const RowsArgument& like) {
  if (std::ranges::equal(a.leading(), like.leading())) return;
  const std::string leading = shape_text(like.leading());
  require_shape(false, a.array, "shape [", leading == "[]" ? "" : leading.substr(1, leading.size() - 2) + ", ",
                "features] (the leading dimensions of ", like.array, ")");
}

void check_float32_or(const Array& a, const Array& like) {
  const DType dtype = like->dtype;
  if (a->dtype == DType::kFloat32 || a->dtype == dtype) return;
  dtype_error(a, "float32", dtype == DType::kFloat32 ? "" : words(" or ", dtype, " (that of ", like, ")"));
}

const Array* read_bias(Frame* frame, nb::handle object, const char* dtypes, std::int64_t columns, Device device,
                       DType dtype, const char* like, DType also) {
  if (object.is_none()) return nullptr;
  const Array& bias = frame->read(object, "bias", dtypes);
  if (bias->dtype != DType::kFloat32 && bias->dtype != dtype && bias->dtype != also) {
    dtype_error(bias, "float32", dtype == DType::kFloat32 ? "" : words(" or ", dtype, like));
  }
  require_device(bias, device);
  require_shape(bias->ndim == 1 && bias->shape[0] == columns, bias, "shape [", columns, "] (out_features)");
  require_columns(bias);
  return &bias;
}

void check_head_dim(const Array& a) {
  const std::int64_t size = a.shape().back();
  require(size >= 8 && size <= kMaxHeadDim && size % 8 == 0, a,
          "a last dimension (head_dim) that is a multiple of 8 in [8, ", kMaxHeadDim, "], got shape ", a.shape());
}

void check_gradient_dtype(const char* name, DType dtype, DType rows) {
  if (dtype == rows || dtype == DType::kFloat32) return;
  type_error(name, "float32 or ", rows, " (that of dy), got ", dtype);
}

std::int64_t check_output(const Array& out, std::int64_t rows, std::int64_t columns, Device device, const char* what) {
  require_device(out, device);
  require_shape(out->ndim == 2 && out->shape[0] == rows && out->shape[1] == columns, out, "shape [", rows, ", ",
                columns, "] (", what, ")");
  require_writable(out);
  require_columns(out);
  return out->stride(0);
}

void require_writable(const Array& out) {
  if (out->read_only) throw nb::buffer_error(words(out, ": is read-only").c_str());
  require(!overlaps_itself(out.view()), out, "strides that do not overlap");
}

}  // namespace rlk::bindings
