// All checks of arguments. Each class or function reads an array or a number from Python, or raises an error that names
// the argument, the expected value and the given value. Operands with independent rows come first. Then follow arrays
// over the tokens of sequences (docs/tokens.md), and vectors.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "cpp/ops/workspace.h"
#include "ndarray.h"
#include "rlk/ops/linear.h"
#include "rlk/ops/logprob.h"
#include "rlk/ops/random_bits.h"
#include "rlk/tokens.h"

namespace rlk::bindings {

using Sizes = std::vector<std::int64_t>;

// The shape [leading..., columns].
Sizes shape_with(std::span<const std::int64_t> leading, std::int64_t columns);

// An operand [..., columns]. Its columns are contiguous, and its leading dimensions are the rows.
struct RowsArgument {
  RowsArgument(Frame* frame, nb::handle object, const char* name);

  const TensorView* operator->() const { return array.operator->(); }
  std::span<const std::int64_t> leading() const { return array.shape().first(array->ndim - 1); }
  // put() sets the address and the layout of the rows in a kernel's params. lead() is for the first operand of a call;
  // it also sets the number of rows, the number of columns and the dtype.
  template <class T>
  void put(const T** data, RowLayout* layout) const {
    *data = array.data<T>();
    *layout = rows;
  }
  template <class T, class Params>
  void lead(const T** data, RowLayout* layout, Params* p) const {
    put(data, layout);
    if constexpr (requires { p->num_rows; }) p->num_rows = num_rows;
    if constexpr (requires { p->columns; }) p->columns = columns;
    p->dtype = array->dtype;
  }

  const Array& array;
  RowLayout rows;
  std::int64_t num_rows = 1, columns = 0;
};

// A weight [out_features, in_features]. Its rows may have any stride.
struct WeightArgument {
  // Raises an error if the dtype or device differs from that of `like`, or if the weight's size in dimension number
  // `dimension` differs from the number of columns of `like`.
  WeightArgument(Frame* frame, nb::handle object, const char* name, const RowsArgument& like, int dimension);

  template <class Params>
  void put(Params* p) const {
    p->weight = array.data();
    p->weight_stride = array->stride(0);
    p->in_features = in_features;
    if constexpr (requires { p->out_features; }) p->out_features = out_features;
  }

  const Array& array;
  std::int64_t out_features = 0, in_features = 0;
};

// Reads a bias [out_features]. Its dtype must be float32, `dtype` (the operands' dtype) or `also`. The result is null
// if Python passed None. `dtypes` and `like` are parts of the error messages.
const Array* read_bias(Frame* frame, nb::handle object, const char* dtypes, std::int64_t columns, DType dtype,
                       const char* like, DType also = DType::kFloat32);
template <class Params>
void put_bias(const Array* bias, Params* p) {
  if (!bias) return;
  p->bias = bias->data();
  p->bias_dtype = bias->view().dtype;
}

// The layout of the rows that the first `dims` dimensions form. `what` names these dimensions in errors.
RowLayout read_layout(const Array& a, int dims, const char* what);
// Whether a perfect binary tree of at most eight leaves can sum this number of parts.
inline bool is_tree(std::int64_t parts) { return parts == 1 || parts == 2 || parts == 4 || parts == 8; }

// Raises an error for float32 on a GPU, because a GPU's matrix units would round it to TF32. Also raises an error for a
// device that this build has no kernels for.
void check_operand(const RowsArgument& a);
// `code` is a number from _arithmetic.py. GPUs ignore `code` and compute with their own units.
Arithmetic read_arithmetic(int code, const RowsArgument& operand);
// The DType with the number `code`; `otherwise` if `code` is negative.
DType read_dtype(int code, DType otherwise);
DType read_logits_dtype(int code, DType operands);  // float32, or the operands' dtype
// Reads the argument `exp` of a call. Python passes it as a number. The exception is an eager call (call.h) on a CUDA
// device, which passes the user's own value. If this function does not know that value, it raises an error, and Python
// makes the call through torch's dispatcher.
Exp read_exp(nb::handle exp, Device device);
// Raises the error about a shard that does not consist of whole parts of the vocabulary (docs/numerics.md, rule 5). The
// message suggests a padded width. Before the width it prints `names`, which is empty or the name of the argument that
// takes this width, followed by "=".
[[noreturn]] void refuse_parts(std::int64_t vocab_size, std::int64_t start, std::int64_t columns, const char* names);
int read_segments(nb::handle k_segments, std::int64_t in_features);

void require_contiguous(const Array& a);
void require_columns(const Array& a);                                  // requires contiguous columns
void require_columns_below(const RowsArgument& a, int bits);           // requires fewer than 2^bits columns
void check_dtype(const Array& a, const Array& like);                   // requires the dtype of `like`
void check_like(const RowsArgument& a, const RowsArgument& like);      // dtype and shape
void check_head_dim(const Array& a);                                   // checks head_dim, the last dimension
void check_gradient_dtype(const char* name, DType dtype, DType rows);  // requires float32 or the dtype of dy
void check_leading(const RowsArgument& a, const RowsArgument& like);   // compares shapes except for the last dimension
void check_float32_or(const Array& a, const Array& like);              // requires float32 or the dtype of `like`

// check_shape() requires a shape, which `why` explains in errors. check_dense() also requires contiguous memory.
template <class... Words>
void check_shape(const Array& a, Shape shape, const Words&... why) {
  require_shape(std::ranges::equal(a.shape(), shape), a, "shape ", shape, why...);
}
template <class... Words>
void check_dense(const Array& a, Shape shape, const Words&... why) {
  require_shape(std::ranges::equal(a.shape(), shape) && a->is_contiguous(), a, "a contiguous array of shape ", shape,
                why...);
}

// ---- tokens of sequences, and vectors -------------------------------------------------------------------------------

// Refuses None where an array is required.
void require_given(nb::handle object, const char* name);
// Raises an error if a mask cannot have this dtype: complex, wider than 8 bytes, or a float of 8 bits.
void require_flags(const Array& mask);
// The TokenMask of an array that require_flags() has checked.
TokenMask flags_of(const Array& mask);

// Reads a mask, which must have the shape `shape`. `whose` is the name of the array with this shape. If Python passed
// None, every token counts.
TokenMask read_mask(Frame* frame, nb::handle object, std::span<const std::int64_t> shape, const char* whose);

// Offsets [num + 1], or None.
struct OffsetsArgument {
  OffsetsArgument(Frame* frame, nb::handle object, const char* name = "cu_seqlens",
                  const char* count = "num_sequences");
  Offsets offsets;
  std::int64_t num_sequences = 0;
};

// Groups of consecutive sequences, given by offsets (fewer than 2^bits groups), or by one size that divides the number
// of sequences.
struct GroupsArgument {
  GroupsArgument(Frame* frame, nb::handle group_offsets, std::int64_t group_size, std::int64_t num_sequences, int bits);
  Offsets offsets{nullptr, DType::kInt64};
  std::int64_t num_groups = 0, size = 0;
};

// Sets a field of params to an array with one value per token.
inline void fill(PolicyTokens* tokens, const PolicyTokens& a) { *tokens = a; }
inline void fill(TokenArray<const float>* rows, const PolicyTokens& a) { *rows = {a.data, a.sequence_stride}; }

// Arrays over the tokens of padded or packed sequences: [num_sequences, num_tokens], [num_tokens] with cu_seqlens, or
// [num_tokens] for one sequence. Tokens are contiguous. The first array of a call decides which of these shapes the
// call has.
class TokenArguments {
 public:
  TokenArguments(Frame* frame, nb::handle tokens, const char* name, nb::handle cu_seqlens,
                 const Dtypes& dtypes = kFloat32);

  const Sequences& sequences() const { return sequences_; }
  std::span<const std::int64_t> shape() const { return first_.shape(); }
  const Array& array() const { return first_; }
  std::int64_t row_stride() const { return stride_of(first_); }  // stride of the first array
  TokenArray<float> output() const { return {nullptr, shape().size() == 2 ? sequences_.num_tokens : 0}; }
  PolicyTokens first() const { return {static_cast<const float*>(first_->data), row_stride(), 1}; }
  TokenMask first_mask() const { return flags_of(first_); }

  // Reads a float32 array that has the shape of the first array. With `per_sequence` it may also have one value per
  // sequence. If Python passed None, the result has no data.
  PolicyTokens optional(nb::handle object, const char* name, bool per_sequence = false);
  PolicyTokens required(nb::handle object, const char* name, bool per_sequence = false);
  TokenMask mask(nb::handle object, const char* name = "mask");  // None: every token counts
  // Returns params with three fields set: the sequences, the mask, and the field `to`, which gets the first array.
  template <class Params, class Field>
  Params params(nb::handle mask_object, Field Params::*to) {
    Params p;
    p.sequences = sequences_;
    p.mask = mask(mask_object);
    fill(&(p.*to), first());
    return p;
  }
  // Sets the first array and its sequences in params that have a separate field for each property of the sequences.
  template <class Params>
  void put(const void** data, std::int64_t* between_rows, Params* p) const {
    *data = first_->data;
    *between_rows = row_stride();
    p->cu_seqlens = sequences_.offsets();
    p->num_sequences = sequences_.num_sequences;
    p->num_tokens = sequences_.num_tokens;
    p->dtype = first_->dtype;
  }
  // Returns a number unchanged, and 0 for None. For one float32 element on the device, it sets `element` to its address
  // and returns 0.
  float number(nb::handle object, const char* name, const float** element);

 private:
  static std::int64_t stride_of(const Array& a) { return a->ndim == 2 ? a->stride(0) : 0; }

  Frame* frame_;
  const Array& first_;
  Sequences sequences_;
};

constexpr Dtypes kCounts{{DType::kInt32, DType::kInt64, DType::kFloat32}, "int32, int64 or float32"};

// An array [count] of any stride, or None. A negative count allows any number of elements. In error messages, the text
// `of` says what is counted, and the text `cure` gives the remedy for an array with more dimensions.
class VectorArgument {
 public:
  VectorArgument(Frame* frame, nb::handle object, const char* name, const Dtypes& dtypes, std::int64_t count,
                 const char* of, const char* cure = "");
  // Reads the first array of a call, which must not be None and may have any number of elements.
  VectorArgument(Frame* frame, nb::handle object, const char* name, const Dtypes& dtypes, const char* of)
      : array_(&frame->read(object, name, dtypes)) {
    check(-1, of, "");
  }
  template <class T = void>
  const T* data() const {
    return array_ ? array_->data<T>() : nullptr;
  }
  const float* floats() const { return data<float>(); }
  template <class T>
  void put(const T** elements, std::int64_t* between) const {
    *elements = data<T>();
    *between = stride();
  }
  RowIntegers integers() const { return {data(), 0, stride(), dtype(DType::kInt64)}; }
  std::int64_t size() const { return array_ ? array_->view().shape[0] : 0; }
  const Array* array() const { return array_; }
  DType dtype(DType otherwise) const { return array_ ? array_->view().dtype : otherwise; }
  std::int64_t stride() const { return array_ && array_->view().shape[0] > 1 ? array_->view().stride(0) : 1; }
  void require_contiguous() const;

 private:
  void check(std::int64_t count, const char* of, const char* cure) const;

  const Array* array_;
};

// Reads `spans`, [num_spans, 2], int32 or int64, contiguous.
const Array& read_spans(Frame* frame, nb::handle object);

// Reads a Python number as a float32 in [low, high].
float read_number_in(nb::handle value, const char* name, float low, float high, const char* expected);

constexpr float kMostFloat = std::numeric_limits<float>::max();
constexpr const char* kPositive = "a finite number > 0 in float32";
inline float read_positive(nb::handle value, const char* name) {
  return read_number_in(value, name, std::numeric_limits<float>::min(), kMostFloat, kPositive);
}

}  // namespace rlk::bindings
