// The one checker of linear's arguments: each reads an array of Python's, or raises an error that names the argument,
// what was expected and what came.
#pragma once

#include <optional>
#include <vector>

#include "ndarray.h"
#include "rlk/ops/linear.h"

namespace rlk::bindings {

using Sizes = std::vector<std::int64_t>;

// Leading dimensions and one more.
Sizes shape_with(std::span<const std::int64_t> leading, std::int64_t columns);

// An operand [..., columns] with contiguous columns; its leading dimensions are rows.
struct RowsArgument {
  RowsArgument(nb::handle object, const char* name);

  const TensorView& view() const { return array.view(); }
  std::span<const std::int64_t> leading() const { return array.shape().first(array.view().ndim - 1); }
  // A kernel's params: the rows, and those of the first operand, which say how many there are.
  template <class T>
  void put(const T** data, RowLayout* layout) const {
    *data = array.data<T>();
    *layout = rows;
  }
  template <class T, class Params>
  void lead(const T** data, RowLayout* layout, Params* p) const {
    put(data, layout);
    if constexpr (requires { p->num_rows; }) p->num_rows = num_rows;
    p->dtype = view().dtype;
  }

  Array array;
  RowLayout rows;
  std::int64_t num_rows = 1, columns = 0;
};

// [out_features, in_features], rows of any stride.
struct WeightArgument {
  // Raises where the dtype or device differs from that of `like`, or the weight's dimension `dimension` from its number
  // of columns.
  WeightArgument(nb::handle object, const char* name, const RowsArgument& like, int dimension);

  template <class Params>
  void put(Params* p) const {
    p->weight = array.data();
    p->weight_stride = array.view().stride(0);
    p->in_features = in_features;
    if constexpr (requires { p->out_features; }) p->out_features = out_features;
  }

  Array array;
  std::int64_t out_features = 0, in_features = 0;
};

// [out_features] of float32 or of a dtype, that of operands, or None; `dtypes` and `like` are words about it.
class BiasArgument {
 public:
  BiasArgument(nb::handle object, const char* dtypes, std::int64_t columns, Device device, DType dtype,
               const char* like, DType also = DType::kFloat32);
  template <class Params>
  void put(Params* p) const {
    if (!array_) return;
    p->bias = array_->data();
    p->bias_dtype = array_->view().dtype;
  }

 private:
  std::optional<Array> array_;
};

RowLayout contiguous_rows(std::int64_t num_rows, std::int64_t columns);
// The layout of the rows that leading dimensions span; an error says what they are.
RowLayout read_layout(const Array& a, int dims, const char* what);
// Whether so many parts are a tree.
inline bool is_tree(std::int64_t parts) { return parts == 1 || parts == 2 || parts == 4 || parts == 8; }

// A GPU's matrix units have no float32, and a build may lack the device's backend.
void check_operand(const RowsArgument& a);
// `code` is a number of _arithmetic.py. GPUs ignore it and compute with their own units.
Arithmetic read_arithmetic(int code, const TensorView& operand);
// `code` is a DType's, or negative for `otherwise`.
DType read_dtype(int code, DType otherwise);
DType read_logits_dtype(int code, DType operands);  // float32, or that of the operands
// A Python integer of 64 bits.
std::int64_t read_integer(nb::handle value, const char* name, const char* expected);
int read_segments(nb::handle k_segments, std::int64_t in_features);

void require_contiguous(const Array& a);
void require_columns(const Array& a);                         // contiguous ones
void require_columns_below(const RowsArgument& a, int bits);  // fewer than 2^bits
void require_device(const Array& a, Device device);
void check_same(const Array& a, const Array& like);                                       // dtype and device
void check_shape(const Array& a, std::span<const std::int64_t> shape, const char* like);  // that of `like`
void check_like(const RowsArgument& a, const RowsArgument& like);                         // dtype, device and shape
void check_head_dim(const Array& a);                                   // the last dimension, of attention
void check_gradient_dtype(const char* name, DType dtype, DType rows);  // float32, or that of dy
void check_leading(const RowsArgument& a, const RowsArgument& like);   // shapes but for the last dimension
void check_float32_or(const Array& a, const Array& like);              // or the dtype of `like`
// A matrix that a call writes, whose dimensions are called `what`; gives its row stride.
std::int64_t check_output(const Array& out, std::int64_t rows, std::int64_t columns, Device device,
                          const char* what = "out_features, in_features");
void require_writable(const Array& out);  // no element twice
void check_apart(const Array& out, const Array& input);

}  // namespace rlk::bindings
