#include "sequences_args.h"

#include <algorithm>

#include "linear_args.h"

namespace rlk::bindings {
namespace {

std::string names_of(std::initializer_list<DType> dtypes) {
  std::string text;
  std::size_t i = 0;
  for (const DType t : dtypes) {
    text += (i == 0 ? "" : i + 1 == dtypes.size() ? " or " : ", ") + std::string(name_of(t));
    ++i;
  }
  return text;
}

void require_float32(const Array& a) {
  if (a.view().dtype != DType::kFloat32) dtype_error(a, "float32");
}

}  // namespace

float read_number_in(nb::handle value, const char* name, float low, float high, const char* expected) {
  const float narrow = static_cast<float>(read_number(value, name));
  if (!(narrow >= low && narrow <= high)) {
    argument_error(name, std::string("expected ") + expected + ", got " + nb::str(value).c_str());
  }
  return narrow;
}

Array read_offsets(nb::handle object, const char* name, Device device) {
  Array a(object, name, "int32 or int64");
  const TensorView& v = a.view();
  if (v.dtype != DType::kInt32 && v.dtype != DType::kInt64) dtype_error(a, "int32 or int64");
  require_device(a, device);
  if (v.ndim != 1 || v.shape[0] < 1) {
    argument_error(name, "expected shape [num + 1], got " + shape_text(a.shape()));
  }
  require_columns(a);
  return a;
}

Array read_spans(nb::handle object) {
  Array a(object, "spans", "int32 or int64");
  const TensorView& v = a.view();
  if (v.dtype != DType::kInt32 && v.dtype != DType::kInt64) dtype_error(a, "int32 or int64");
  if (v.ndim != 2 || v.shape[1] != 2 || !v.is_contiguous()) {
    argument_error(a, "expected a contiguous array of shape [num_spans, 2], got " + shape_text(a.shape()));
  }
  return a;
}

SequencesArgument::SequencesArgument(nb::handle tokens, const char* name, nb::handle cu_seqlens)
    : first_(tokens, name, "float32") {
  require_float32(first_);
  const TensorView& v = first_.view();
  if (cu_seqlens.is_none()) {
    if (v.ndim != 2) {
      argument_error(name, "expected shape [num_sequences, num_tokens], or [num_tokens] beside cu_seqlens, got " +
                               shape_text(first_.shape()));
    }
    sequences_.num_sequences = v.shape[0];
    sequences_.num_tokens = v.shape[1];
  } else {
    if (v.ndim != 1) {
      argument_error(name, "expected shape [num_tokens] beside cu_seqlens, got " + shape_text(first_.shape()));
    }
    cu_.emplace(read_offsets(cu_seqlens, "cu_seqlens", v.device));
    sequences_.cu_seqlens = cu_->view().data;
    sequences_.cu_dtype = cu_->view().dtype;
    sequences_.num_sequences = cu_->view().shape[0] - 1;
    sequences_.num_tokens = v.shape[0];
    if (sequences_.num_sequences == 0 && sequences_.num_tokens > 0) {
      argument_error("cu_seqlens", "expected " + std::to_string(sequences_.num_tokens) +
                                       " (the number of tokens) last, got shape [1]");
    }
  }
  if (sequences_.num_sequences >= std::int64_t{1} << 31) {
    argument_error(name, "expected fewer than 2^31 sequences, got " + std::to_string(sequences_.num_sequences));
  }
  require_columns(first_);
}

TokenArray<const float> SequencesArgument::tokens() const {
  return {static_cast<const float*>(first_.view().data), row_stride(first_)};
}

void SequencesArgument::check(const Array& a) const {
  require_device(a, device());
  if (!std::ranges::equal(a.shape(), first_.shape())) {
    argument_error(a.name(), "expected shape " + shape_text(first_.shape()) + " (that of " + first_.name() + "), got " +
                                 shape_text(a.shape()));
  }
  require_columns(a);
}

TokensArgument::TokensArgument(nb::handle object, const char* name, const SequencesArgument& of) {
  if (object.is_none()) return;
  array_.emplace(object, name, "float32");
  require_float32(*array_);
  of.check(*array_);
  tokens_ = {static_cast<const float*>(array_->view().data), of.row_stride(*array_)};
}

MaskArgument::MaskArgument(nb::handle object, const SequencesArgument& of) {
  if (object.is_none()) return;
  constexpr const char* kMasks = "bool, uint8, int32, int64 or float32";
  array_.emplace(object, "mask", kMasks);
  const TensorView& v = array_->view();
  if (v.dtype == DType::kBFloat16 || v.dtype == DType::kFloat16) dtype_error(*array_, kMasks);
  of.check(*array_);
  mask_ = {v.data, of.row_stride(*array_), v.dtype == DType::kUInt8 ? DType::kBool : v.dtype};  // bytes alike
}

VectorArgument::VectorArgument(nb::handle object, const char* name, std::initializer_list<DType> dtypes,
                               std::int64_t count, const char* of, Device device) {
  if (object.is_none()) return;
  const std::string expected = names_of(dtypes);
  array_.emplace(object, name, expected.c_str());
  const TensorView& v = array_->view();
  if (std::ranges::find(dtypes, v.dtype) == dtypes.end()) dtype_error(*array_, expected);
  require_device(*array_, device);
  if (v.ndim != 1 || v.shape[0] != count) {
    argument_error(name,
                   "expected shape [" + std::to_string(count) + "] (" + of + "), got " + shape_text(array_->shape()));
  }
}

void VectorArgument::require_contiguous() const {
  if (array_ && stride() != 1) {
    argument_error(array_->name(),
                   "expected contiguous elements (stride 1), got stride " + std::to_string(stride()) + kCopyHint);
  }
}

}  // namespace rlk::bindings
