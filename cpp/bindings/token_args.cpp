#include "token_args.h"

#include <algorithm>
#include <string>

#include "linear_args.h"

namespace rlk::bindings {
namespace {

// Stride of tokens: that of the last dimension, where it matters.
std::int64_t token_stride(const Array& a) {
  const TensorView& v = a.view();
  return v.shape[v.ndim - 1] > 1 && v.num_elements() > 0 ? v.stride(v.ndim - 1) : 1;
}

constexpr const char* kMaskTypes = "bool, uint8, int32, int64 or float32";

}  // namespace

TokenArguments::TokenArguments(nb::handle tokens, const char* name, nb::handle cu_seqlens)
    : TokenArguments(tokens, name, cu_seqlens, false) {}

TokenArguments::TokenArguments(nb::handle tokens, const char* name, nb::handle cu_seqlens, bool is_mask)
    : first_(tokens, name, is_mask ? kMaskTypes : "float32") {
  const TensorView& v = first_.view();
  if (v.dtype != DType::kFloat32 && !is_mask) dtype_error(first_, "float32");
  const bool packed = !cu_seqlens.is_none();
  if (v.ndim != 1 && (packed || v.ndim != 2)) {
    argument_error(first_,
                   std::string("expected shape ") +
                       (packed ? "[num_tokens] (with cu_seqlens)" : "[num_sequences, num_tokens] or [num_tokens]") +
                       ", got " + shape_text(first_.shape()));
  }
  sequences_.num_tokens = v.shape[v.ndim - 1];
  sequences_.num_sequences = v.ndim == 2 ? v.shape[0] : 1;
  if (packed) {
    Array cuts(cu_seqlens, "cu_seqlens", "int32 or int64");
    const TensorView& c = cuts.view();
    if (c.dtype != DType::kInt32 && c.dtype != DType::kInt64) dtype_error(cuts, "int32 or int64");
    require_device(cuts, v.device);
    if (c.ndim != 1 || c.shape[0] < 1 || (c.shape[0] > 1 && c.stride(0) != 1)) {
      argument_error(cuts, "expected shape [num_sequences + 1], contiguous, got " + shape_text(cuts.shape()));
    }
    sequences_.cu_seqlens = c.data;
    sequences_.cu_dtype = c.dtype;
    sequences_.num_sequences = c.shape[0] - 1;
    if (sequences_.num_sequences == 0 && sequences_.num_tokens > 0) {  // what a GPU's kernels could not say
      argument_error(
          cuts, "expected " + std::to_string(sequences_.num_tokens) + " (the number of tokens) last, got shape [1]");
    }
    kept_.push_back(std::move(cuts));
  }
  if (sequences_.num_sequences >= std::int64_t{1} << 31) argument_error(first_, "expected fewer than 2^31 sequences");
  if (sequences_.num_tokens >= std::int64_t{1} << 33) argument_error(first_, "expected fewer than 2^33 tokens");
  if (!is_mask) tokens_ = read(first_, false);
}

PolicyTokens TokenArguments::read(const Array& a, bool per_sequence) const {
  const TensorView& v = a.view();
  if (v.dtype != DType::kFloat32) dtype_error(a, "float32");
  require_device(a, device());
  PolicyTokens array;
  array.data = static_cast<const float*>(v.data);
  if (std::ranges::equal(a.shape(), shape())) {
    array.token_stride = token_stride(a);
    array.sequence_stride = v.ndim == 2 ? v.stride(0) : 0;
    if (per_sequence && array.token_stride == 0 && !sequences_.packed()) return array;  // expanded
    if (array.token_stride != 1) {
      argument_error(
          a, "expected contiguous tokens (stride 1), got stride " + std::to_string(array.token_stride) + kCopyHint);
    }
    return array;
  }
  // Of as many packed tokens as sequences [n] is one a token, whatever their lengths, which a GPU's caller cannot read;
  // [n, 1] says that it is one a sequence.
  const std::int64_t n = sequences_.num_sequences;
  if (per_sequence && (v.ndim == 1 || (v.ndim == 2 && v.shape[1] == 1)) && v.shape[0] == n) {
    array.token_stride = 0;
    array.sequence_stride = v.stride(0);
    return array;
  }
  const std::string one = std::to_string(n) + (sequences_.packed() && n == sequences_.num_tokens ? ", 1]" : "]");
  argument_error(a, "expected shape " + shape_text(shape()) + (per_sequence ? " or [" + one : "") + " (that of " +
                        first_.name() + (per_sequence ? ", or one a sequence" : "") + "), got " +
                        shape_text(a.shape()));
}

PolicyTokens TokenArguments::optional(nb::handle object, const char* name, bool per_sequence) {
  return object.is_none() ? PolicyTokens{} : required(object, name, per_sequence);
}

PolicyTokens TokenArguments::required(nb::handle object, const char* name, bool per_sequence) {
  kept_.emplace_back(object, name, "float32");
  return read(kept_.back(), per_sequence);
}

PolicyMask TokenArguments::read_mask(const Array& a) const {
  const TensorView& v = a.view();
  if (v.dtype == DType::kBFloat16 || v.dtype == DType::kFloat16) dtype_error(a, kMaskTypes);
  require_device(a, device());
  if (!std::ranges::equal(a.shape(), shape())) {
    argument_error(
        a, "expected shape " + shape_text(shape()) + " (that of " + first_.name() + "), got " + shape_text(a.shape()));
  }
  if (token_stride(a) != 1) {
    argument_error(a,
                   "expected contiguous tokens (stride 1), got stride " + std::to_string(token_stride(a)) + kCopyHint);
  }
  return {v.data, v.ndim == 2 ? v.stride(0) : 0, v.dtype};
}

PolicyMask TokenArguments::mask(nb::handle object) {
  kept_.emplace_back(object, "mask", kMaskTypes);
  return read_mask(kept_.back());
}

PolicyMask TokenArguments::optional_mask(nb::handle object) { return object.is_none() ? PolicyMask{} : mask(object); }

float TokenArguments::number(nb::handle object, const char* name, const float** element) {
  if (PyFloat_Check(object.ptr())) return static_cast<float>(PyFloat_AsDouble(object.ptr()));
  if (object.is_none()) return 0.0f;
  kept_.emplace_back(object, name, "float32");
  const Array& a = kept_.back();
  if (a.view().dtype != DType::kFloat32) dtype_error(a, "float32");
  require_device(a, device());
  if (a.view().num_elements() != 1) argument_error(a, "expected one element, got shape " + shape_text(a.shape()));
  *element = static_cast<const float*>(a.view().data);
  return 0.0f;
}

}  // namespace rlk::bindings
