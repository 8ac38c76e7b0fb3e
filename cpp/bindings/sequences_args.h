// The one checker of arguments that are tokens of sequences, and of the arrays beside them: each reads an array of Python's,
// or raises an error that names the argument, what was expected and what came.
#pragma once

#include <optional>
#include <string>

#include "ndarray.h"
#include "rlk/sequences.h"

namespace rlk::bindings {

// What says where sequences are: the first array of tokens, and cu_seqlens or None.
class SequencesArgument {
 public:
  SequencesArgument(nb::handle tokens, const char* name, nb::handle cu_seqlens);

  const Sequences& sequences() const { return sequences_; }
  const Array& first() const { return first_; }
  Device device() const { return first_.view().device; }
  std::int64_t row_stride(const Array& a) const { return cu_ ? 0 : a.view().stride(0); }
  std::int64_t contiguous_stride() const { return cu_ ? 0 : sequences_.num_tokens; }
  TokenArray<const float> tokens() const;

  // Raises where shape or device is another, or tokens are not contiguous.
  void check(const Array& a) const;

 private:
  Array first_;
  std::optional<Array> cu_;
  Sequences sequences_;
};

// float32 tokens of the same sequences; None: no data.
class TokensArgument {
 public:
  TokensArgument(nb::handle object, const char* name, const SequencesArgument& of);
  TokenArray<const float> tokens() const { return tokens_; }

 private:
  std::optional<Array> array_;
  TokenArray<const float> tokens_;
};

class MaskArgument {
 public:
  MaskArgument(nb::handle object, const SequencesArgument& of);
  const TokenMask& mask() const { return mask_; }

 private:
  std::optional<Array> array_;
  TokenMask mask_;
};

// [count] of any stride, or None. `dtypes` are those allowed, `of` what the count is.
class VectorArgument {
 public:
  VectorArgument(nb::handle object, const char* name, std::initializer_list<DType> dtypes, std::int64_t count,
                 const char* of, Device device);
  const void* data() const { return array_ ? array_->view().data : nullptr; }
  const float* floats() const { return static_cast<const float*>(data()); }
  DType dtype(DType otherwise) const { return array_ ? array_->view().dtype : otherwise; }
  std::int64_t stride() const { return array_ && array_->view().shape[0] > 1 ? array_->view().stride(0) : 1; }
  void require_contiguous() const;

 private:
  std::optional<Array> array_;
};

// Offsets, int32 or int64, contiguous, at least one.
Array read_offsets(nb::handle object, const char* name, Device device);
// `spans`, [num_spans, 2], int32 or int64, contiguous.
Array read_spans(nb::handle object);

// A Python number as a float32 in [low, high].
float read_number_in(nb::handle value, const char* name, float low, float high, const char* expected);

}  // namespace rlk::bindings
