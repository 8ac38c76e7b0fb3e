// Bindings of the operators over rows of a matrix: `embedding`, `rms_norm`, `silu_mul`, `gelu_mul` and `linear`.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "call.h"
#include "rlk/ops/embedding.h"
#include "rlk/ops/rms_norm.h"
#include "rlk/ops/silu_mul.h"

namespace rlk::bindings {
namespace {

std::int64_t read_size(nb::handle value, const char* name) {
  const std::int64_t size = read_integer(value, name, "an integer");
  require(size >= 0, name, "an integer >= 0, got ", size);
  return size;
}

// Reads ids [...]. Their shape may have any number of dimensions that two strides can describe.
const Array& read_ids(Frame* frame, nb::handle object, EmbeddingTokens* to) {
  const Array& ids = frame->read(object, "ids", kIndices);
  to->id_rows = read_layout(ids, ids->ndim, "dimensions");
  to->ids = ids->data;
  to->id_dtype = ids->dtype;
  to->num_tokens = ids->num_elements();
  require(to->num_tokens < std::int64_t{1} << 32, ids, "fewer than 2^32 ids, got ", to->num_tokens);
  return ids;
}

// Reads the vocabulary of a table of num_rows rows. The function returns padding_idx, or -1 for None.
std::int64_t read_vocabulary(nb::handle vocab_start, nb::handle vocab_size, nb::handle padding_idx, const char* table,
                             EmbeddingTokens* to) {
  require(to->num_rows < INT32_MAX, table, "fewer than 2^31 - 1 rows, got ", to->num_rows);
  const std::int64_t start = to->vocab_start = read_size(vocab_start, "vocab_start");
  require(start <= INT64_MAX - to->num_rows, "vocab_start", "vocab_start + rows in 64 bits, got ", start);
  const std::int64_t size = vocab_size.is_none() ? start + to->num_rows : read_size(vocab_size, "vocab_size");
  require(start <= size, "vocab_start", "an id in [0, ", size, "] (vocab_size), got ", start);
  to->vocab_size = size;
  if (padding_idx.is_none()) return -1;
  const std::int64_t id = read_integer(padding_idx, "padding_idx", "an integer or None");
  require(id >= 0 && id < size, "padding_idx", "None or an id in [0, ", size, ") (vocab_size), got ", id);
  return id;
}

RLK_EAGER_FUNCTION(embedding, 2, (ids, weight, vocab_start, vocab_size, padding_idx)) {
  const RowsArgument table(frame, weight, "weight");
  require_shape(table->ndim == 2, table.array, "shape [rows, columns]");
  require_columns_below(table, 31);
  EmbeddingParams p;
  const Array& tokens = read_ids(frame, ids, &p);
  p.num_rows = table.num_rows;
  p.columns = table.columns;
  read_vocabulary(vocab_start, vocab_size, padding_idx, "weight", &p);
  p.weight = table->data;
  p.weight_stride = table->stride(0);
  p.dtype = table->dtype;
  p.y_stride = p.columns;
  return Results("embedding", frame).add(&p.y, shape_with(tokens.shape(), p.columns), p.dtype).run(rlk::embedding, p);
}

// Returns dweight, or main_grad, to which the gradient is added in place.
RLK_FUNCTION(embedding_backward, (dy, ids, num_rows, vocab_start, vocab_size, padding_idx, main_grad),
             int dweight_dtype) {
  const RowsArgument g(frame, dy, "dy");
  require_columns_below(g, 31);
  EmbeddingBackwardParams p;
  const Array& tokens = read_ids(frame, ids, &p);
  check_shape(tokens, g.leading(), " (the leading dimensions of dy)");
  p.num_rows = read_size(num_rows, "num_rows");
  p.columns = g.columns;
  p.padding_idx = read_vocabulary(vocab_start, vocab_size, padding_idx, "num_rows", &p);
  g.put(&p.dy, &p.dy_rows);
  p.dtype = g->dtype;
  const Array* const total = frame->optional(main_grad, "main_grad", kFloat32);
  p.accumulate = total != nullptr;
  p.dweight_dtype = total ? DType::kFloat32 : read_dtype(dweight_dtype, p.dtype);
  check_gradient_dtype("dweight_dtype", p.dweight_dtype, p.dtype);
  return Results("embedding", frame)
      .add_matrix(total, p.num_rows, p.columns, &p.dweight, &p.dweight_stride, p.dweight_dtype,
                  "num_rows, columns of dy")
      .run(rlk::embedding_backward, &p, embedding_backward_workspace_bytes, p.accumulate);
}

// Reads eps, which may be subnormal.
float read_eps(nb::handle value) {
  return read_number_in(value, "eps", std::numeric_limits<float>::denorm_min(), kMostFloat, kPositive);
}

// Checks a contiguous vector [columns].
void check_vector(const Array& a, const RowsArgument& like) {
  check_shape(a, {like.columns}, " (the last dimension of ", like.array, ")");
  require(a->shape[0] <= 1 || a->stride(0) == 1, a, "contiguous elements (stride 1), got stride ", a->stride(0));
}

// Reads the weight, and the offset that is added to each of its elements.
template <class Params>
void read_weight(Frame* frame, nb::handle given, nb::handle weight_offset, const RowsArgument& like, Params* p) {
  p->weight_offset = static_cast<float>(read_number(weight_offset, "weight_offset"));
  require(std::isfinite(p->weight_offset), "weight_offset", "a finite number, got ", weight_offset);
  require(!given.is_none() || p->weight_offset == 0.0f, "weight_offset", "0 where weight is None");
  p->weight_dtype = like->dtype;
  const Array* const weight = frame->optional(given, "weight", "float32 or that of x");
  if (!weight) return;
  check_float32_or(*weight, like.array);
  check_vector(*weight, like);
  p->weight = weight->data();
  p->weight_dtype = weight->view().dtype;
}

// Reads optional rows with the shape, dtype and device of `like`.
void read_more(Frame* frame, nb::handle object, const char* name, const RowsArgument& like, const void** data,
               RowLayout* rows) {
  if (object.is_none()) return;
  const RowsArgument more(frame, object, name);
  check_like(more, like);
  more.put(data, rows);
}

// Returns y, or (y, new_residual or None, rstd or None) if new_residual or rstd is wanted.
RLK_EAGER_FUNCTION(rms_norm, 3, (x, weight, residual, eps, weight_offset), bool round_before_weight, bool return_rstd) {
  const RowsArgument a(frame, x, "x");
  require_columns_below(a, 31);
  RmsNormParams p;
  read_weight(frame, weight, weight_offset, a, &p);
  a.lead(&p.x, &p.x_rows, &p);
  p.eps = read_eps(eps);
  p.round_before_weight = round_before_weight;
  read_more(frame, residual, "residual", a, &p.residual, &p.residual_rows);
  p.y_rows = p.new_residual_rows = dense(p.num_rows, p.columns);
  Results results("rms_norm", frame);
  results.add(&p.y, a.array.shape(), p.dtype);
  const bool adds = !residual.is_none();
  if (adds || return_rstd) {
    results.add(&p.new_residual, a.array.shape(), p.dtype, adds).add(&p.rstd, a.leading(), return_rstd);
  }
  return results.run(rlk::rms_norm, p);
}

// Returns (dx or None, dweight or None). If rstd is None, it is computed from h and eps; otherwise eps is not read.
// If main_grad is given, the gradient is added to it in place, and main_grad is returned as dweight.
RLK_FUNCTION(rms_norm_backward, (dy, h, weight, eps, rstd, d_new_residual, weight_offset), bool round_before_weight,
             nb::handle main_grad, bool return_dx, bool return_dweight, int dweight_dtype) {
  const RowsArgument g(frame, dy, "dy"), a(frame, h, "h");
  require_columns_below(g, 31);
  check_like(a, g);
  RmsNormBackwardParams p;
  read_weight(frame, weight, weight_offset, g, &p);
  g.lead(&p.dy, &p.dy_rows, &p);
  a.put(&p.h, &p.h_rows);
  p.round_before_weight = round_before_weight;
  read_more(frame, d_new_residual, "d_new_residual", g, &p.d_new_residual, &p.d_new_residual_rows);
  Results results("rms_norm", frame);
  RmsNormParams statistics;
  Caller::Fresh fresh;
  if (rstd.is_none()) {
    statistics.eps = read_eps(eps);
    a.lead(&statistics.x, &statistics.x_rows, &statistics);
    fresh = results.caller().empty(g.leading(), DType::kFloat32);
    p.rstd = statistics.rstd = static_cast<float*>(fresh.data);
  } else {
    const Array& given = frame->read(rstd, "rstd", kFloat32);
    check_dense(given, g.leading(), " (the leading dimensions of dy)");
    p.rstd = given.data<float>();
  }
  p.dx_rows = dense(p.num_rows, p.columns);
  results.add(&p.dx, g.array.shape(), p.dtype, return_dx);
  if (!main_grad.is_none()) {
    const Array& total = frame->read(main_grad, "main_grad", kFloat32);
    check_vector(total, g);
    frame->require_writable(total);
    p.dweight = total->data;
    p.main_grad = static_cast<const float*>(p.dweight);
    p.dweight_dtype = DType::kFloat32;
    results.add(main_grad);
  } else {
    if (return_dweight) p.dweight_dtype = read_dtype(dweight_dtype, p.weight_dtype);
    if (return_dweight) check_gradient_dtype("dweight_dtype", p.dweight_dtype, p.dtype);
    results.add(&p.dweight, {p.columns}, p.dweight_dtype, return_dweight);
  }
  if (statistics.rstd != nullptr) results.call(rlk::rms_norm, statistics);
  return results.run(rlk::rms_norm_backward, &p, rms_norm_backward_workspace_bytes, p.main_grad != nullptr);
}

// The operands `gate` and `up`, in two arrays or in one array. The last dimension of one array holds `gate`, then `up`.
struct GateAndUp {
  RowsArgument first;
  std::optional<RowsArgument> second;
  std::int64_t columns;

  GateAndUp(Frame* frame, nb::handle gate, nb::handle up)
      : first(frame, gate, up.is_none() ? "gate_up" : "gate"), columns(first.columns / (up.is_none() ? 2 : 1)) {
    require_columns_below(first, up.is_none() ? 31 : 30);
    if (!up.is_none()) {
      second.emplace(frame, up, "up");
      check_like(*second, first);
    } else {
      require(first.columns % 2 == 0, first.array, "an even last dimension, whose halves are gate and up, got shape ",
              first.array.shape());
    }
  }
  Sizes shape() const { return shape_with(first.leading(), columns); }
  // The address of `up` in `packed`, an array with the shape and dtype of `first`. The result is null if `packed` is
  // null.
  template <class Byte>
  Byte* half_way(Byte* packed) const {
    return packed == nullptr ? nullptr : packed + columns * size_of(first->dtype);
  }

  template <class Params>
  void fill(Params* p, int activation, bool round_before_mul) const {
    first.lead(&p->gate, &p->gate_rows, p);
    p->up = second ? (*second)->data : half_way(static_cast<const unsigned char*>(p->gate));
    p->up_rows = second ? second->rows : first.rows;
    p->columns = columns;
    p->activation = static_cast<Activation>(activation);
    p->round_before_mul = round_before_mul;
  }
};

RLK_EAGER_FUNCTION(gated_mul, 2, (gate, up), int activation, bool round_before_mul) {
  const GateAndUp in(frame, gate, up);
  GatedMulParams p;
  in.fill(&p, activation, round_before_mul);
  p.y_rows = dense(p.num_rows, p.columns);
  return Results("silu_mul", frame).add(&p.y, in.shape(), p.dtype).run(rlk::gated_mul, p);
}

// Returns d_gate_up for a packed array, else (d_gate or None, d_up or None).
RLK_FUNCTION(gated_mul_backward, (dy, gate, up), int activation, bool round_before_mul, bool return_d_gate,
             bool return_d_up) {
  const GateAndUp in(frame, gate, up);
  const RowsArgument g(frame, dy, "dy");
  check_dtype(g.array, in.first.array);
  const Sizes shape = in.shape();
  check_shape(g.array, shape, " (that of the result)");
  GatedMulBackwardParams p;
  in.fill(&p, activation, round_before_mul);
  g.put(&p.dy, &p.dy_rows);
  p.d_gate_rows = p.d_up_rows = dense(p.num_rows, in.first.columns);
  Results results("silu_mul", frame);
  if (in.second) {
    results.add(&p.d_gate, shape, p.dtype, return_d_gate).add(&p.d_up, shape, p.dtype, return_d_up);
  } else {
    results.add(&p.d_gate, in.first.array.shape(), p.dtype);
    p.d_up = in.half_way(static_cast<unsigned char*>(p.d_gate));
  }
  return results.run(rlk::gated_mul_backward, p);
}

RLK_EAGER_FUNCTION(linear, 3, (x, weight, bias, k_segments), int out_dtype, bool allow_vendor, int arithmetic) {
  const RowsArgument a(frame, x, "x");
  check_operand(a);
  const WeightArgument w(frame, weight, "weight", a, 1);
  LinearParams p;
  a.lead(&p.x, &p.x_rows, &p);
  w.put(&p);
  const char* const dtypes = "float32 or that of x";
  put_bias(read_bias(frame, bias, dtypes, p.out_features, p.dtype, " (that of x)"), &p);
  p.out_dtype = read_dtype(out_dtype, p.dtype);
  if (p.dtype == DType::kFloat32 && p.out_dtype != DType::kFloat32) {
    type_error("out_dtype", "float32 (that of x), got ", p.out_dtype);
  }
  p.k_segments = read_segments(k_segments, p.in_features);
  p.arithmetic = read_arithmetic(arithmetic, a);
  p.allow_vendor = allow_vendor;
  p.y_rows = dense(p.num_rows, p.out_features);
  return Results("linear", frame)
      .add(&p.y, shape_with(a.leading(), p.out_features), p.out_dtype)
      .run(rlk::linear, &p, linear_workspace_bytes<LinearParams>);
}

RLK_FUNCTION(linear_input_grad, (dy, weight), bool allow_vendor, int arithmetic) {
  const RowsArgument g(frame, dy, "dy");
  check_operand(g);
  const WeightArgument w(frame, weight, "weight", g, 0);
  LinearInputGradParams p;
  g.lead(&p.dy, &p.dy_rows, &p);
  w.put(&p);
  p.dx_dtype = p.dtype;
  p.arithmetic = read_arithmetic(arithmetic, g);
  p.allow_vendor = allow_vendor;
  p.dx_rows = dense(p.num_rows, p.in_features);
  return Results("linear", frame)
      .add(&p.dx, shape_with(g.leading(), p.in_features), p.dtype)
      .run(rlk::linear_input_grad, &p, linear_workspace_bytes<LinearInputGradParams>);
}

// Adds the gradient to main_grad in place. Without main_grad, writes it to `out` or to a new array. At most one of
// main_grad and `out` is given.
RLK_FUNCTION(linear_weight_grad, (dy, x, main_grad, out), int out_dtype, bool allow_vendor, int arithmetic) {
  const RowsArgument g(frame, dy, "dy"), a(frame, x, "x");
  check_operand(g);
  check_dtype(a.array, g.array);
  check_leading(a, g);
  LinearWeightGradParams p;
  g.lead(&p.dy, &p.dy_rows, &p);
  a.put(&p.x, &p.x_rows);
  p.in_features = a.columns;
  p.out_features = g.columns;
  p.arithmetic = read_arithmetic(arithmetic, g);
  p.allow_vendor = allow_vendor;
  const bool accumulates = !main_grad.is_none();
  const Array* const given =
      frame->optional(accumulates ? main_grad : out, accumulates ? "main_grad" : "out", "float32");
  p.dweight_dtype = accumulates ? DType::kFloat32 : read_dtype(out_dtype, given ? given->view().dtype : p.dtype);
  if (given && given->view().dtype != p.dweight_dtype) dtype_error(*given, name_of(p.dweight_dtype));
  Results results("linear", frame);
  results.add_matrix(given, p.out_features, p.in_features, &p.dweight, &p.dweight_stride, p.dweight_dtype);
  if (p.dweight_dtype != p.dtype && p.dweight_dtype != DType::kFloat32) {
    if (given) dtype_error(*given, "float32 or ", p.dtype, " (that of dy)");
    check_gradient_dtype("out_dtype", p.dweight_dtype, p.dtype);
  }
  p.main_grad_stride = p.dweight_stride;
  if (accumulates) p.main_grad = static_cast<const float*>(p.dweight);
  return results.run(rlk::linear_weight_grad, &p, linear_workspace_bytes<LinearWeightGradParams>, accumulates);
}

RLK_FUNCTION(linear_bias_grad, (dy), int out_dtype) {
  const RowsArgument g(frame, dy, "dy");
  LinearBiasGradParams p;
  g.lead(&p.dy, &p.dy_rows, &p);
  p.out_features = g.columns;
  p.dbias_dtype = read_dtype(out_dtype, p.dtype);
  check_gradient_dtype("out_dtype", p.dbias_dtype, p.dtype);
  return Results("linear", frame).add(&p.dbias, {p.out_features}, p.dbias_dtype).run(rlk::linear_bias_grad, p);
}

// `parts` is a sequence of 1, 2, 4 or 8 arrays in rank order.
RLK_FUNCTION(tree_sum, (parts, bias), int out_dtype) {
  const auto count = static_cast<int>(nb::len(parts));
  require(is_tree(count), "parts", "1, 2, 4 or 8 arrays, got ", count);
  constexpr const char* kNames[kMaxSegments] = {"parts[0]", "parts[1]", "parts[2]", "parts[3]",
                                                "parts[4]", "parts[5]", "parts[6]", "parts[7]"};
  TreeSumParams p;
  p.count = count;
  const Array& whole = frame->read(parts[0], kNames[0], kFloat32);
  for (int i = 0; i < count; ++i) {
    const Array& part = i == 0 ? whole : frame->read(parts[i], kNames[i], kFloat32);
    check_dtype(part, whole);
    check_shape(part, whole.shape(), " (that of ", whole, ")");
    Sizes strides;
    for (int dim = 0; dim < part->ndim && !part->is_contiguous(); ++dim) strides.push_back(part->stride(dim));
    require(strides.empty(), part, "a contiguous array, got shape ", part.shape(), " with strides ", strides,
            kCopyHint);
    p.parts[i] = part.data<float>();
  }
  p.size = whole->num_elements();
  p.out_dtype = read_dtype(out_dtype, DType::kFloat32);
  if (!bias.is_none()) {
    require(whole->ndim > 0, kNames[0], "shape [..., features] with a bias, got []");
    p.columns = whole->shape[whole->ndim - 1];
  }
  put_bias(read_bias(frame, bias, kFloats.names, p.columns, DType::kBFloat16, " or float16", DType::kFloat16), &p);
  return Results("linear", frame).add(&p.sum, whole.shape(), p.out_dtype).run(rlk::tree_sum, p);
}

// The products that cuBLASLt computes on a CUDA device, each as (pass, dtype, out_dtype, in_features, out_features,
// first_rows, last_rows).
RLK_PLAIN_FUNCTION(linear_vendor_products, int device) {
  constexpr const char* kPasses[] = {"forward", "input_grad", "weight_grad"};
  nb::list products;
  for (const LinearProducts& p : rlk::linear_vendor_products({DeviceType::kCuda, device})) {
    products.append(nb::make_tuple(kPasses[static_cast<int>(p.pass)], name_of(p.dtype), name_of(p.out_dtype),
                                   p.in_features, p.out_features, p.first_rows, p.last_rows));
  }
  return products;
}

}  // namespace
}  // namespace rlk::bindings
