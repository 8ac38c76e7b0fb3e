// Python's entry to rms_norm.
#include "rlk/ops/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "call.h"
#include "linear_args.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

// One that may be subnormal.
float read_eps(nb::handle value) {
  return read_number_in(value, "eps", std::numeric_limits<float>::denorm_min(), kMostFloat, kPositive);
}

// Checks a vector [columns], contiguous, on the device of `like`.
void check_vector(const Array& a, const RowsArgument& like) {
  const TensorView& v = a.view();
  require_device(a, like.view().device);
  require_shape(v.ndim == 1 && v.shape[0] == like.columns, a, "shape [", like.columns, "] (the last dimension of ",
                like.array, ")");
  require(v.shape[0] <= 1 || v.stride(0) == 1, a, "contiguous elements (stride 1), got stride ", v.stride(0));
}

// Reads the weight, null for None, and its offset.
template <class Params>
const Array* read_weight(Frame* frame, nb::handle given, nb::handle weight_offset, const RowsArgument& like,
                         Params* p) {
  p->weight_offset = static_cast<float>(read_number(weight_offset, "weight_offset"));
  require(std::isfinite(p->weight_offset), "weight_offset", "a finite number, got ", weight_offset);
  require(!given.is_none() || p->weight_offset == 0.0f, "weight_offset", "0 where weight is None");
  p->weight_dtype = like.view().dtype;
  const Array* const weight = frame->optional(given, "weight", "float32 or that of x");
  if (!weight) return nullptr;
  check_float32_or(*weight, like.array);
  check_vector(*weight, like);
  p->weight = weight->data();
  p->weight_dtype = weight->view().dtype;
  return weight;
}

// Reads optional rows with the shape, dtype and device of `like`.
void read_more(Frame* frame, nb::handle object, const char* name, const RowsArgument& like, const void** data,
               RowLayout* rows) {
  if (object.is_none()) return;
  const RowsArgument more(frame, object, name);
  check_like(more, like);
  more.put(data, rows);
}

// Returns y, or (y, new_residual or None, rstd or None) if one of the latter two is wanted.
nb::object forward(Frame* frame, nb::handle x, nb::handle weight, nb::handle residual, nb::handle eps,
                   nb::handle weight_offset, bool round_before_weight, bool return_rstd) {
  const RowsArgument a(frame, x, "x");
  require_columns_below(a, 31);
  RmsNormParams p;
  read_weight(frame, weight, weight_offset, a, &p);
  a.lead(&p.x, &p.x_rows, &p);
  p.columns = a.columns;
  p.eps = read_eps(eps);
  p.round_before_weight = round_before_weight;
  read_more(frame, residual, "residual", a, &p.residual, &p.residual_rows);
  p.y_rows = p.new_residual_rows = contiguous_rows(p.num_rows, p.columns);
  Results results("rms_norm", a.array, frame);
  results.add(&p.y, a.array.shape(), p.dtype);
  const bool adds = !residual.is_none();
  if (adds || return_rstd) {
    results.add(&p.new_residual, a.array.shape(), p.dtype, adds).add(&p.rstd, a.leading(), return_rstd);
  }
  return results.run(rlk::rms_norm, p);
}

// Returns (dx or None, dweight or None). If rstd is None, it is computed from h and eps; otherwise eps is not read.
// main_grad is accumulated in place and returned as dweight.
nb::object backward(Frame* frame, nb::handle dy, nb::handle h, nb::handle weight, nb::handle eps, nb::handle rstd,
                    nb::handle d_new_residual, nb::handle weight_offset, bool round_before_weight, nb::handle main_grad,
                    bool return_dx, bool return_dweight, int dweight_dtype) {
  const RowsArgument g(frame, dy, "dy"), a(frame, h, "h");
  require_columns_below(g, 31);
  check_like(a, g);
  RmsNormBackwardParams p;
  const Array* const w = read_weight(frame, weight, weight_offset, g, &p);
  g.lead(&p.dy, &p.dy_rows, &p);
  a.put(&p.h, &p.h_rows);
  p.columns = g.columns;
  p.round_before_weight = round_before_weight;
  read_more(frame, d_new_residual, "d_new_residual", g, &p.d_new_residual, &p.d_new_residual_rows);
  Results results("rms_norm", g.array, frame);
  RmsNormParams statistics;
  Caller::Fresh fresh;
  if (rstd.is_none()) {
    statistics.eps = read_eps(eps);
    a.lead(&statistics.x, &statistics.x_rows, &statistics);
    statistics.columns = p.columns;
    fresh = results.caller().empty(g.leading(), DType::kFloat32);
    p.rstd = statistics.rstd = static_cast<float*>(fresh.data);
  } else {
    const Array& given = frame->read(rstd, "rstd", kFloat32, g.view().device);
    require_shape(std::ranges::equal(given.shape(), g.leading()) && given.view().is_contiguous(), given,
                  "a contiguous array of shape ", g.leading(), " (the leading dimensions of dy)");
    p.rstd = given.data<float>();
  }
  p.dx_rows = contiguous_rows(p.num_rows, p.columns);
  results.add(&p.dx, g.array.shape(), p.dtype, return_dx);
  if (!main_grad.is_none()) {
    const Array& total = frame->read(main_grad, "main_grad", kFloat32);
    check_vector(total, g);
    require_writable(total);
    for (const Array* input : {&g.array, &a.array, w}) {
      if (input) check_apart(total, *input);
    }
    p.dweight = total.view().data;
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

const Functions kFunctions([](nb::module_& m) {
  define(m, "rms_norm", &forward);
  define_eager<&forward, 3>(m, "rms_norm_eager");
  define(m, "rms_norm_backward", &backward);
});

}  // namespace
}  // namespace rlk::bindings
