#include "tokens.h"

#include <algorithm>

#include "linear_args.h"

namespace rlk::bindings {
namespace {

const Array& read_first(Frame* frame, nb::handle tokens, const char* name, TokenKind kind) {
  if (kind == TokenKind::kMask) {
    const Array& mask = frame->read_any(tokens, name);
    require_flags(mask);
    return mask;
  }
  const bool floats = kind == TokenKind::kFloats;
  return frame->read(tokens, name, kind == TokenKind::kFloat32 ? kFloat32 : floats ? kFloats : kIndices);
}

}  // namespace

void require_given(nb::handle object, const char* name) {
  if (object.is_none()) type_error(name, kNothing);
}

void require_flags(const Array& mask) {
  const std::string dtype = mask.dtype_name();
  // Some floats of 8 bits lack -0, or even 0.
  const bool is_float8 = mask.element_bytes() == 1 && dtype.starts_with("float");
  if (mask.element_bytes() > 8 || is_float8 || dtype.starts_with("complex")) {
    type_error(mask.name(), "dtype bool, of integers or of floats of 16 bits and more, got ", dtype);
  }
}

TokenMask flags_of(const Array& mask) {
  if (mask->num_elements() == 0) return {};
  return {mask->data, mask->ndim == 2 ? mask->stride(0) : 0, mask.element_bytes(), mask.is_float()};
}

TokenMask read_mask(Frame* frame, nb::handle object, std::span<const std::int64_t> shape, const char* whose,
                    Device device) {
  if (object.is_none()) return {};
  const Array& a = frame->read_any(object, "mask");
  require_flags(a);
  require_device(a, device);
  check_shape(a, shape, whose);
  if (a->ndim > 0) require_columns(a);
  return flags_of(a);
}

OffsetsArgument::OffsetsArgument(Frame* frame, nb::handle object, Device device, const char* name, const char* count) {
  if (object.is_none()) return;
  const Array& a = frame->read(object, name, kIndices, device);
  require_shape(a->ndim == 1 && a->shape[0] > 0, a, "shape [", count, " + 1]");
  require_columns(a);
  offsets.data = a->data;
  offsets.dtype = a->dtype;
  num_sequences = a->shape[0] - 1;
}

GroupsArgument::GroupsArgument(Frame* frame, nb::handle group_offsets, std::int64_t group_size,
                               std::int64_t num_sequences, int bits, Device device) {
  const OffsetsArgument given(frame, group_offsets, device, "group_offsets", "num_groups");
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

TokenArguments::TokenArguments(Frame* frame, nb::handle tokens, const char* name, nb::handle cu_seqlens, TokenKind kind)
    : frame_(frame), first_(read_first(frame, tokens, name, kind)) {
  const bool packed = !cu_seqlens.is_none();
  require_shape(first_->ndim == 1 || (!packed && first_->ndim == 2), first_, "shape ",
                packed ? "[num_tokens] beside cu_seqlens" : "[num_sequences, num_tokens] or [num_tokens]");
  sequences_.num_tokens = first_->shape[first_->ndim - 1];
  sequences_.num_sequences = first_->ndim == 2 ? first_->shape[0] : 1;
  if (packed) {
    const OffsetsArgument given(frame, cu_seqlens, first_->device);
    sequences_.cu_seqlens = given.offsets.data;
    sequences_.cu_dtype = given.offsets.dtype;
    sequences_.num_sequences = given.num_sequences;
  }
  require(sequences_.num_sequences < std::int64_t{1} << 31, first_, "fewer than 2^31 sequences, got ",
          sequences_.num_sequences);
  require_columns(first_);
}

PolicyTokens TokenArguments::read(const Array& a, bool per_sequence) const {
  require_device(a, device());
  const auto* const data = a.data<float>();
  if (std::ranges::equal(a.shape(), shape())) {
    const std::int64_t tokens = a->shape[a->ndim - 1];
    const bool is_expanded = tokens > 1 && a->num_elements() > 0 && a->stride(a->ndim - 1) == 0;
    if (per_sequence && is_expanded && !sequences_.packed()) return {data, stride_of(a), 0};
    require_columns(a);
    return {data, stride_of(a), 1};
  }
  // If there are as many packed tokens as sequences, [n] means one value per token, since on a GPU the lengths cannot
  // be read. [n, 1] means one value per sequence.
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

PolicyTokens TokenArguments::required(nb::handle object, const char* name, bool per_sequence) {
  return read(frame_->read(object, name, kFloat32), per_sequence);
}

TokenMask TokenArguments::mask(nb::handle object, const char*) {
  return read_mask(frame_, object, shape(), first_.name(), device());
}

float TokenArguments::number(nb::handle object, const char* name, const float** element) {
  if (PyFloat_Check(object.ptr())) return static_cast<float>(PyFloat_AsDouble(object.ptr()));
  if (object.is_none()) return 0.0f;
  const Array& a = frame_->read(object, name, kFloat32, device());
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
                               std::int64_t count, const char* of, std::optional<Device> device, const char* cure)
    : array_(frame->optional(object, name, dtypes)) {
  if (array_) check(count, of, device, cure);
}

void VectorArgument::check(std::int64_t count, const char* of, std::optional<Device> device, const char* cure) const {
  if (device) require_device(*array_, *device);
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
