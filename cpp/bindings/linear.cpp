// Python's entry to linear.
#include "call.h"
#include "linear_args.h"

namespace rlk::bindings {
namespace {

RLK_EAGER_FUNCTION(linear, 3, (x, weight, bias, k_segments), int out_dtype, bool allow_vendor, int arithmetic) {
  const RowsArgument a(frame, x, "x");
  check_operand(a);
  const WeightArgument w(frame, weight, "weight", a, 1);
  LinearParams p;
  a.lead(&p.x, &p.x_rows, &p);
  w.put(&p);
  const char* const dtypes = "float32 or that of x";
  put_bias(read_bias(frame, bias, dtypes, p.out_features, a->device, p.dtype, " (that of x)"), &p);
  p.out_dtype = read_dtype(out_dtype, p.dtype);
  if (p.dtype == DType::kFloat32 && p.out_dtype != DType::kFloat32) {
    type_error("out_dtype", "float32 (that of x), got ", p.out_dtype);
  }
  p.k_segments = read_segments(k_segments, p.in_features);
  p.arithmetic = read_arithmetic(arithmetic, a);
  p.allow_vendor = allow_vendor;
  p.y_rows = contiguous_rows(p.num_rows, p.out_features);
  return Results("linear", a.array, frame)
      .add(&p.y, shape_with(a.leading(), p.out_features), p.out_dtype)
      .run(rlk::linear, &p, linear_workspace_bytes);
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
  p.dx_rows = contiguous_rows(p.num_rows, p.in_features);
  return Results("linear", g.array, frame)
      .add(&p.dx, shape_with(g.leading(), p.in_features), p.dtype)
      .run(rlk::linear_input_grad, &p, linear_workspace_bytes);
}

// Accumulates main_grad in place; without it, writes out or a new array. At most one of the two is given.
RLK_FUNCTION(linear_weight_grad, (dy, x, main_grad, out), int out_dtype, bool allow_vendor, int arithmetic) {
  const RowsArgument g(frame, dy, "dy"), a(frame, x, "x");
  check_operand(g);
  check_same(a.array, g.array);
  check_leading(a, g);
  const Device device = g->device;
  LinearWeightGradParams p;
  g.lead(&p.dy, &p.dy_rows, &p);
  a.put(&p.x, &p.x_rows);
  p.in_features = a.columns;
  p.out_features = g.columns;
  p.arithmetic = read_arithmetic(arithmetic, g);
  p.allow_vendor = allow_vendor;
  Results results("linear", g.array, frame);
  const Array* given = nullptr;
  if (!main_grad.is_none() || !out.is_none()) {
    const bool accumulate = !main_grad.is_none();
    given = &frame->read(accumulate ? main_grad : out, accumulate ? "main_grad" : "out", "float32");
    const TensorView& v = given->view();
    p.dweight_dtype = accumulate ? DType::kFloat32 : read_dtype(out_dtype, v.dtype);
    if (v.dtype != p.dweight_dtype) dtype_error(*given, name_of(p.dweight_dtype));
    p.dweight_stride = p.main_grad_stride = check_output(*given, p.out_features, p.in_features, device);
    check_apart(*given, {&g.array, &a.array});
    p.dweight = v.data;
    if (accumulate) p.main_grad = static_cast<const float*>(v.data);
    results.add(accumulate ? main_grad : out);
  } else {
    p.dweight_dtype = read_dtype(out_dtype, p.dtype);
  }
  if (p.dweight_dtype != p.dtype && p.dweight_dtype != DType::kFloat32) {
    if (given) dtype_error(*given, "float32 or ", p.dtype, " (that of dy)");
    check_gradient_dtype("out_dtype", p.dweight_dtype, p.dtype);
  }
  if (!given) {
    p.dweight_stride = p.in_features;
    results.add(&p.dweight, {p.out_features, p.in_features}, p.dweight_dtype);
  }
  return results.run(rlk::linear_weight_grad, &p, linear_workspace_bytes, p.main_grad != nullptr);
}

RLK_FUNCTION(linear_bias_grad, (dy), int out_dtype) {
  const RowsArgument g(frame, dy, "dy");
  LinearBiasGradParams p;
  g.lead(&p.dy, &p.dy_rows, &p);
  p.out_features = g.columns;
  p.dbias_dtype = read_dtype(out_dtype, p.dtype);
  check_gradient_dtype("out_dtype", p.dbias_dtype, p.dtype);
  return Results("linear", g.array, frame).add(&p.dbias, {p.out_features}, p.dbias_dtype).run(rlk::linear_bias_grad, p);
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
    check_same(part, whole);
    check_shape(part, whole.shape(), kNames[0]);
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
  put_bias(
      read_bias(frame, bias, kFloats.names, p.columns, whole->device, DType::kBFloat16, " or float16", DType::kFloat16),
      &p);
  return Results("linear", whole, frame).add(&p.sum, whole.shape(), p.out_dtype).run(rlk::tree_sum, p);
}

// The products that cuBLASLt serves on a CUDA device, each as (pass, dtype, out_dtype, in_features, out_features,
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
