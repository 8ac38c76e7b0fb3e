#include "arguments.h"

#include <algorithm>
#include <string>

#include "call.h"
#include "rlk/ops/attention.h"

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
  check_dtype(array, like.array);
  const bool first = dimension == 0;
  require_shape(array->ndim == 2 && array->shape[dimension] == like.columns, array,
                first ? "shape [" : "shape [out_features, ", like.columns, first ? ", in_features] (" : "] (",
                like.columns, " is the last dimension of ", like.array, ")");
  require_columns(array);
  out_features = array->shape[0];
  in_features = array->shape[1];
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

Exp read_exp(nb::handle exp, Device device) {
  if (PyLong_Check(exp.ptr())) return PyLong_AsLong(exp.ptr()) == 1 ? Exp::kHardware : Exp::kPortable;
  const bool on_cuda = device.type == DeviceType::kCuda;
  if (on_cuda && exp.is_none()) return Exp::kHardware;
  const bool is_text = PyUnicode_Check(exp.ptr());
  if (on_cuda && is_text && PyUnicode_CompareWithASCIIString(exp.ptr(), "portable") == 0) return Exp::kPortable;
  type_error("exp", "a number, got ", kind_of(exp));
}

void refuse_parts(std::int64_t vocab_size, std::int64_t start, std::int64_t columns, const char* names) {
  const std::int64_t padded = (vocab_size + 63) / 64 * 64;
  const std::string pad = words("; pad the vocabulary to a multiple of 64 columns (", names, padded,
                                "), so that equal shards are whole parts");
  argument_error("vocab_start", "expected a shard of whole parts of a vocabulary of ", vocab_size,
                 " columns (it has eight parts, so 1, 2, 4 or 8 equal shards), got [", start, ", ", start + columns,
                 ")", padded == vocab_size ? "" : pad);
}

int read_segments(nb::handle k_segments, std::int64_t in_features) {
  const std::int64_t s = read_integer(k_segments, "k_segments", "an integer");
  require(is_tree(s), "k_segments", "1, 2, 4 or 8, got ", s);
  const std::int64_t step = 16 * s;
  require(s == 1 || in_features % step == 0, "k_segments", "in_features to be a multiple of ", step,
          " (16 * k_segments), got ", in_features, "; pad x and weight with zero columns to ",
          (in_features + step - 1) / step * step);
  return static_cast<int>(s);
}

void check_dtype(const Array& a, const Array& like) {
  if (a->dtype == like->dtype) return;
  type_error(a.name(), "dtype ", like->dtype, " (that of ", like, "), got ", a->dtype, autocast_hint());
}

void check_like(const RowsArgument& a, const RowsArgument& like) {
  check_dtype(a.array, like.array);
  check_shape(a.array, like.array.shape(), " (that of ", like.array, ")");
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

const Array* read_bias(Frame* frame, nb::handle object, const char* dtypes, std::int64_t columns, DType dtype,
                       const char* like, DType also) {
  if (object.is_none()) return nullptr;
  const Array& bias = frame->read(object, "bias", dtypes);
  if (bias->dtype != DType::kFloat32 && bias->dtype != dtype && bias->dtype != also) {
    dtype_error(bias, "float32", dtype == DType::kFloat32 ? "" : words(" or ", dtype, like));
  }
  check_shape(bias, {columns}, " (out_features)");
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

// ---- tokens of sequences, and vectors -------------------------------------------------------------------------------

void require_given(nb::handle object, const char* name) {
  if (object.is_none()) type_error(name, kNothing);
}

void require_flags(const Array& mask) {
  const std::string dtype = name_of(mask.type());
  // Floats of 8 bits are refused as a mask, since some of these types have no -0, or not even 0.
  const bool is_float8 = mask.element_bytes() == 1 && dtype.starts_with("float");
  if (mask.element_bytes() > 8 || is_float8 || dtype.starts_with("complex")) {
    type_error(mask.name(), "dtype bool, of integers or of floats of 16 bits and more, got ", dtype);
  }
}

TokenMask flags_of(const Array& mask) {
  if (mask->num_elements() == 0) return {};
  return {mask->data, mask->ndim == 2 ? mask->stride(0) : 0, mask.element_bytes(), mask.type().is_float()};
}

TokenMask read_mask(Frame* frame, nb::handle object, std::span<const std::int64_t> shape, const char* whose) {
  if (object.is_none()) return {};
  const Array& a = frame->read(object, "mask", kAnyDtype);
  require_flags(a);
  check_shape(a, shape, " (that of ", whose, ")");
  if (a->ndim > 0) require_columns(a);
  return flags_of(a);
}

OffsetsArgument::OffsetsArgument(Frame* frame, nb::handle object, const char* name, const char* count) {
  if (object.is_none()) return;
  const Array& a = frame->read(object, name, kIndices);
  require_shape(a->ndim == 1 && a->shape[0] > 0, a, "shape [", count, " + 1]");
  require_columns(a);
  offsets.data = a->data;
  offsets.dtype = a->dtype;
  num_sequences = a->shape[0] - 1;
}

GroupsArgument::GroupsArgument(Frame* frame, nb::handle group_offsets, std::int64_t group_size,
                               std::int64_t num_sequences, int bits) {
  const OffsetsArgument given(frame, group_offsets, "group_offsets", "num_groups");
  const bool by_offsets = !group_offsets.is_none();
  const char* const name = by_offsets ? "group_offsets" : "group_size";
  if (by_offsets) {
    offsets = given.offsets;
    num_groups = given.num_sequences;
  } else {
    require(group_size > 0 && num_sequences % group_size == 0, name, "a divisor of ", num_sequences,
            " (the number of sequences), got ", group_size);
    size = group_size;
    num_groups = num_sequences / size;
  }
  require(num_groups < std::int64_t{1} << bits, name, "fewer than 2^", bits, " groups, got ", num_groups);
  require(!by_offsets || num_groups > 0 || num_sequences == 0, name, num_sequences,
          " (the number of sequences) last, got shape [1]");
}

TokenArguments::TokenArguments(Frame* frame, nb::handle tokens, const char* name, nb::handle cu_seqlens,
                               const Dtypes& dtypes)
    : frame_(frame), first_(frame->read(tokens, name, dtypes)) {
  if (dtypes.moves) require_flags(first_);
  const bool packed = !cu_seqlens.is_none();
  require_shape(first_->ndim == 1 || (!packed && first_->ndim == 2), first_, "shape ",
                packed ? "[num_tokens] beside cu_seqlens" : "[num_sequences, num_tokens] or [num_tokens]");
  sequences_.num_tokens = first_->shape[first_->ndim - 1];
  sequences_.num_sequences = first_->ndim == 2 ? first_->shape[0] : 1;
  if (packed) {
    const OffsetsArgument given(frame, cu_seqlens);
    sequences_.cu_seqlens = given.offsets.data;
    sequences_.cu_dtype = given.offsets.dtype;
    sequences_.num_sequences = given.num_sequences;
  }
  require(sequences_.num_sequences < std::int64_t{1} << 31, first_, "fewer than 2^31 sequences, got ",
          sequences_.num_sequences);
  require_columns(first_);
}

PolicyTokens TokenArguments::required(nb::handle object, const char* name, bool per_sequence) {
  const Array& a = frame_->read(object, name, kFloat32);
  const auto* const data = a.data<float>();
  if (std::ranges::equal(a.shape(), shape())) {
    const std::int64_t tokens = a->shape[a->ndim - 1];
    const bool is_expanded = tokens > 1 && a->num_elements() > 0 && a->stride(a->ndim - 1) == 0;
    if (per_sequence && is_expanded && !sequences_.packed()) return {data, stride_of(a), 0};
    require_columns(a);
    return {data, stride_of(a), 1};
  }
  // If there are as many packed tokens as sequences, an array [n] is read as one value per token, because the call
  // cannot read the sequences' lengths on a GPU. An array [n, 1] is read as one value per sequence.
  const std::int64_t n = sequences_.num_sequences;
  if (per_sequence && (a->ndim == 1 || (a->ndim == 2 && a->shape[1] == 1)) && a->shape[0] == n) {
    return {data, a->stride(0), 0};
  }
  const bool has_one_shape = shape().size() == 1 && n == sequences_.num_tokens;
  const std::string one = per_sequence ? words(" or [", n, has_one_shape ? ", 1]" : "]") : "";
  argument_error(
      a, "expected shape ", shape(), one, " (that of ", first_, per_sequence ? ", or one a sequence" : "", "), got ",
      a.shape(),
      a.name() == std::string_view("advantage") && !sequences_.packed() ? "; packed sequences need cu_seqlens" : "");
}

PolicyTokens TokenArguments::optional(nb::handle object, const char* name, bool per_sequence) {
  return object.is_none() ? PolicyTokens{} : required(object, name, per_sequence);
}

TokenMask TokenArguments::mask(nb::handle object, const char*) {
  return read_mask(frame_, object, shape(), first_.name());
}

float TokenArguments::number(nb::handle object, const char* name, const float** element) {
  if (PyFloat_Check(object.ptr())) return static_cast<float>(PyFloat_AsDouble(object.ptr()));
  if (object.is_none()) return 0.0f;
  const Array& a = frame_->read(object, name, kFloat32);
  require(a->num_elements() == 1, a, "one element, got shape ", a.shape());
  *element = a.data<float>();
  return 0.0f;
}

float read_number_in(nb::handle value, const char* name, float low, float high, const char* expected) {
  const float narrow = static_cast<float>(read_number(value, name));
  require(narrow >= low && narrow <= high, name, expected, ", got ", value);
  return narrow;
}

const Array& read_spans(Frame* frame, nb::handle object) {
  const Array& a = frame->read(object, "spans", kIndices);
  const TensorView& v = a.view();
  require_shape(v.ndim == 2 && v.shape[1] == 2 && v.is_contiguous(), a, "a contiguous array of shape [num_spans, 2]");
  return a;
}

VectorArgument::VectorArgument(Frame* frame, nb::handle object, const char* name, const Dtypes& dtypes,
                               std::int64_t count, const char* of, const char* cure)
    : array_(frame->optional(object, name, dtypes)) {
  if (array_) check(count, of, cure);
}

void VectorArgument::check(std::int64_t count, const char* of, const char* cure) const {
  const TensorView& v = array_->view();
  if (v.ndim == 1 && (count < 0 || v.shape[0] == count)) return;
  const bool has_words = count >= 0 && *of != 0;
  argument_error(*array_, "expected shape [", count < 0 ? of : word(count), "]", has_words ? words(" (", of, ")") : "",
                 ", got ", array_->shape(), v.ndim > 1 ? cure : "");
}

void VectorArgument::require_contiguous() const {
  if (array_) require(stride() == 1, *array_, "contiguous elements (stride 1), got stride ", stride(), kCopyHint);
}

}  // namespace rlk::bindings
