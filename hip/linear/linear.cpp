// The host side of linear on HIP selects the product and the tile of each function, and launches the kernels.
#include "rlk/ops/linear.h"

#include <algorithm>
#include <limits>
#include <string>

#include "hip/common/runtime.h"
#include "kernels/rows/linear_check.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

RowLayout matrix_rows(std::int64_t stride) { return {std::numeric_limits<std::int64_t>::max(), 0, stride}; }

GemmOperand operand(const void* data, const RowLayout& rows, int at_once) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(data) % (2 * static_cast<std::uintptr_t>(at_once)) == 0;
  return {data, rows, aligned && rows.inner_stride % at_once == 0 && rows.outer_stride % at_once == 0};
}
GemmOperand along_row(const void* data, const RowLayout& rows) { return operand(data, rows, kAlongRow); }
GemmOperand across_rows(const void* data, const RowLayout& rows, std::int64_t size) {
  GemmOperand x = operand(data, rows, kAcrossRows);
  x.vectors = x.vectors && size % kAcrossRows == 0;
  return x;
}

std::string kernel_name(const char* what, DType t) {
  return std::string("rlk_linear_") + what + (t == DType::kBFloat16 ? "_bf16" : t == DType::kFloat16 ? "_f16" : "_f32");
}

void require_halves(DType t) {
  if (t == DType::kFloat32) throw Unsupported("linear: HIP kernels have bfloat16 and float16 operands");
}

template <class Tile>
void launch_gemm(int device, Stream stream, const char* what, DType t, GemmParams p) {
  p.tiles_down = ceil_div(p.a_size, kTileRows<Tile>);
  const std::string name = kernel_name(what, t);
  for_each_launch(p.tiles_down * ceil_div(p.b_size, kTileColumns<Tile>), [&](std::int64_t first, std::int64_t count) {
    Runtime::get().launch(device, name.c_str(), {count, 1, kGemmThreads, kGemmLds<Tile>}, stream, p, first);
  });
}

}  // namespace

// linear needs no workspace: all sums stay in registers, even the sums of segments and of blocks of tokens.

void linear(const LinearParams& p, int device, Stream stream) {
  check_linear(p);
  require_halves(p.dtype);
  if (p.num_rows == 0 || p.out_features == 0) return;
  GemmParams g{};
  g.a = along_row(p.x, p.x_rows);
  g.b = along_row(p.weight, matrix_rows(p.weight_stride));
  g.a_size = p.num_rows;
  g.b_size = p.out_features;
  g.contraction = p.in_features;
  g.segment = p.in_features / p.k_segments;
  g.out = p.y;
  g.out_rows = p.y_rows;
  g.out_dtype = p.out_dtype;
  g.bias = p.bias;
  g.bias_dtype = p.bias_dtype;
  g.initial = p.start;
  g.initial_stride = p.start_stride;
  const bool small = p.num_rows <= kMostSmallRows;
  if (p.k_segments > 1) {
    small ? launch_gemm<SmallTile>(device, stream, "forward_segments_small", p.dtype, g)
          : launch_gemm<SegmentsTile>(device, stream, "forward_segments_large", p.dtype, g);
  } else {
    small ? launch_gemm<SmallTile>(device, stream, "forward_small", p.dtype, g)
          : launch_gemm<LargeTile>(device, stream, "forward_large", p.dtype, g);
  }
}

void linear_input_grad(const LinearInputGradParams& p, int device, Stream stream) {
  check_linear_input_grad(p);
  require_halves(p.dtype);
  if (p.num_rows == 0 || p.in_features == 0) return;
  GemmParams g{};
  g.a = along_row(p.dy, p.dy_rows);
  g.b = across_rows(p.weight, matrix_rows(p.weight_stride), p.in_features);
  g.a_size = p.num_rows;
  g.b_size = p.in_features;
  g.contraction = g.segment = p.out_features;
  g.out = p.dx;
  g.out_rows = p.dx_rows;
  g.out_dtype = p.dx_dtype;
  g.initial = p.start;
  g.initial_stride = p.start_stride;
  p.num_rows <= kMostSmallRows ? launch_gemm<SmallTile>(device, stream, "input_grad_small", p.dtype, g)
                               : launch_gemm<LargeTile>(device, stream, "input_grad_large", p.dtype, g);
}

void linear_weight_grad(const LinearWeightGradParams& p, int device, Stream stream) {
  check_linear_weight_grad(p);
  require_halves(p.dtype);
  if (p.in_features == 0 || p.out_features == 0) return;
  GemmParams g{};
  g.a = across_rows(p.dy, p.dy_rows, p.out_features);
  g.b = across_rows(p.x, p.x_rows, p.in_features);
  g.a_size = p.out_features;
  g.b_size = p.in_features;
  g.contraction = p.num_rows;
  g.segment = kTokenBlock;
  g.out = p.dweight;
  g.out_rows = matrix_rows(p.dweight_stride);
  g.out_dtype = p.dweight_dtype;
  g.initial = p.main_grad;
  g.initial_stride = p.main_grad_stride;
  p.out_features <= kMostSmallRows ? launch_gemm<SmallTile>(device, stream, "weight_grad_small", p.dtype, g)
                                   : launch_gemm<LargeTile>(device, stream, "weight_grad_large", p.dtype, g);
}

void linear_bias_grad(const LinearBiasGradParams& p, int device, Stream stream) {
  check_linear_bias_grad(p);
  const std::string name = kernel_name("bias_grad", p.dtype);
  for_each_launch(ceil_div(p.out_features, kBiasColumns), [&](std::int64_t first, std::int64_t count) {
    Runtime::get().launch(device, name.c_str(), {count, 1, kBiasThreads, kBiasLds}, stream, p, first);
  });
}

void tree_sum(const TreeSumParams& p, int device, Stream stream) {
  check_tree_sum(p);
  const std::string name = kernel_name("tree_sum", p.out_dtype);
  for_each_launch(ceil_div(p.size, kTreeThreads * kTreeElements), [&](std::int64_t first, std::int64_t count) {
    Runtime::get().launch(device, name.c_str(), {count, 1, kTreeThreads, 0}, stream, p, first);
  });
}

}  // namespace rlk::hip
