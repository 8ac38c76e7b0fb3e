// The only checks of linear's arguments. Each class reads an array from Python, or raises an error that names the
// argument, what was expected and what came.
#pragma once

#include <array>
#include <vector>

#include "ndarray.h"
#include "rlk/ops/linear.h"

namespace rlk::bindings {

using Sizes = std::vector<std::int64_t>;

// The leading dimensions and one more.
Sizes shape_with(std::span<const std::int64_t> leading, std::int64_t columns);

// An operand [..., columns] with contiguous columns, whose leading dimensions are rows.
struct RowsArgument {
  RowsArgument(Frame* frame, nb::handle object, const char* name);

  const TensorView* operator->() const { return array.operator->(); }
  std::span<const std::int64_t> leading() const { return array.shape().first(array->ndim - 1); }
  // Sets the rows in a kernel's params; the first operand also sets their number.
  template <class T>
  void put(const T** data, RowLayout* layout) const {
    *data = array.data<T>();
    *layout = rows;
  }
  template <class T, class Params>
  void lead(const T** data, RowLayout* layout, Params* p) const {
    put(data, layout);
    if constexpr (requires { p->num_rows; }) p->num_rows = num_rows;
    p->dtype = array->dtype;
  }

  const Array& array;
  RowLayout rows;
  std::int64_t num_rows = 1, columns = 0;
};

// A weight [out_features, in_features], whose rows have any stride.
struct WeightArgument {
  // Raises an error if the dtype or device differs from that of `like`, or if the weight's dimension `dimension`
  // differs from its number of columns.
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

// Reads a bias [out_features] in float32, in the operands' dtype or in `also`; null for None. `dtypes` and `like` are
// words for errors.
const Array* read_bias(Frame* frame, nb::handle object, const char* dtypes, std::int64_t columns, Device device,
                       DType dtype, const char* like, DType also = DType::kFloat32);
template <class Params>
void put_bias(const Array* bias, Params* p) {
  if (!bias) return;
  p->bias = bias->data();
  p->bias_dtype = bias->view().dtype;
}

RowLayout contiguous_rows(std::int64_t num_rows, std::int64_t columns);
// Layout of the rows that the leading dimensions span; errors call them `what`.
RowLayout read_layout(const Array& a, int dims, const char* what);
// Whether this number of parts makes a tree.
inline bool is_tree(std::int64_t parts) { return parts == 1 || parts == 2 || parts == 4 || parts == 8; }

// A GPU's matrix units have no float32, and a build may lack the device's backend.
void check_operand(const RowsArgument& a);
// `code` is a number from _arithmetic.py. GPUs ignore it and compute with their own units.
Arithmetic read_arithmetic(int code, const RowsArgument& operand);
// `code` is the number of a DType, or negative for `otherwise`.
DType read_dtype(int code, DType otherwise);
DType read_logits_dtype(int code, DType operands);  // float32, or the operands' dtype
// Number of a call's exp on a GPU, or -1 if Python must decide.
int read_exp(nb::handle exp);
// Refuses a shard that is not whole parts of rule 5. The message puts `names` before the padded width. `names` is
// empty, or the argument that takes this width, followed by "=".
[[noreturn]] void refuse_parts(std::int64_t vocab_size, std::int64_t start, std::int64_t columns, const char* names);
// An element of a tuple, valid as long as the tuple.
inline nb::handle entry(const nb::tuple& of, int i) {
  if (PyObject* const found = PyTuple_GetItem(of.ptr(), i)) return found;
  throw nb::python_error();
}
template <std::size_t kCount>
std::array<nb::handle, kCount> entries(const nb::tuple& of) {
  std::array<nb::handle, kCount> found;
  for (std::size_t i = 0; i < kCount; ++i) found[i] = entry(of, static_cast<int>(i));
  return found;
}
// Reads a Python integer that fits 64 bits.
std::int64_t read_integer(nb::handle value, const char* name, const char* expected);
int read_segments(nb::handle k_segments, std::int64_t in_features);

void require_contiguous(const Array& a);
void require_columns(const Array& a);                         // requires contiguous columns
void require_columns_below(const RowsArgument& a, int bits);  // requires fewer than 2^bits columns
void check_same(const Array& a, const Array& like);           // compares dtype and device
void check_shape(const Array& a, std::span<const std::int64_t> shape, const char* like);  // requires `like`'s shape
void check_like(const RowsArgument& a, const RowsArgument& like);                         // dtype, device and shape
void check_head_dim(const Array& a);                                   // the last dimension, of attention
void check_gradient_dtype(const char* name, DType dtype, DType rows);  // requires float32 or the dtype of dy
void check_leading(const RowsArgument& a, const RowsArgument& like);   // compares shapes except for the last dimension
void check_float32_or(const Array& a, const Array& like);              // requires float32 or the dtype of `like`
// Checks a matrix that a call writes, and returns its row stride. `what` names its dimensions in errors.
std::int64_t check_output(const Array& out, std::int64_t rows, std::int64_t columns, Device device,
                          const char* what = "out_features, in_features");
void require_writable(const Array& out);  // no two elements may share memory
// Raises an error if an output shares memory with an input. Null stands for no input.
template <class Inputs = std::initializer_list<const Array*>>
void check_apart(const Array& out, const Inputs& inputs) {
  for (const Array* input : inputs) {
    if (!input || !ranges_overlap(out.view(), input->view())) continue;
    argument_error(out, "may share memory with ", *input, ": their addresses overlap");
  }
}

}  // namespace rlk::bindings
