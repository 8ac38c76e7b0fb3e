// THE CONTRACT of linear: y = x W^T + b and its gradients, with bits that depend on no batch size, tile or split.
// Rules are those of docs/numerics.md.
//
// Dot product over an index i of `count` elements (rule 1): one fp32 accumulator, +0 at first, ascending steps of 16
// indices counted from the first; a last short step is filled with +0. What one step computes is the unit's:
// math/mma_model.h says it for each (Arithmetic), IEEE is one fma per index, ascending (fp32 operands: IEEE only).
//   y[m, n]  = round(fl(dot_k(x[m, k], weight[n, k]) + bias[n]))    to out_dtype, nearest even; no bias, no addition
//              with k_segments S > 1 the dot product is ((d0 + d1) + (d2 + d3)) + ((d4 + d5) + (d6 + d7)), fp32 additions
//              of S dot products over K / S consecutive indices each (rule 2). With `start` the accumulator begins there
//              in place of +0: a contraction cut at multiples of 16, each piece continuing the fp32 y of the one before,
//              gives the bits of one product
//   dx[m, k] = round(dot_n(dy[m, n], weight[n, k]))                 to dx_dtype; where y has another type, the caller
//              rounds dy to dtype first, for dx, dw and db alike. `start` as for y
//   dw[n, k] = fold over blocks of 8192 rows (rule 9): block b is dot_m(dy[m, n], x[m, k]) over its rows; the first is
//              added to main_grad[n, k] where that is given, else taken as it is; each later one is added to the result,
//              fp32, ascending; rounded to dweight's dtype at the end
//   db[n]    = the same fold over blocks of 8192 rows; in a block 128 groups of 64 consecutive rows, each an ascending
//              chain of fp32 additions from +0, groups combined by a perfect binary tree over their index (missing rows
//              and groups are +0)
//   tree_sum = round(fl(scale * tree over parts + bias[column])), the tree and the rounding of y with k_segments; scale is
//              one fp32 multiplication, none where it is 1
//
// A row of y or dx has the same bits for any number of rows, any position and stride, and on every kernel of one
// arithmetic. An empty sum is +0, and so is a zero dot product of a matrix unit. NaN results are canonical on the CPU; on
// a GPU they are the unit's.
// All functions enqueue on `stream`; they neither allocate nor synchronise. CPU backends ignore `stream`.
// allow_vendor: a library of the hardware's vendor may serve a product that is recorded for it (linear_vendor_products). On
// this GPU and in this version it had these bits and took less time.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "rlk/base.h"

namespace rlk {

// What the CPU computes products with; GPUs have their own and ignore it.
enum class Arithmetic : std::uint8_t { kIeee, kSm80, kSm90, kGfx90a, kGfx942 };

constexpr std::int64_t kTokenBlock = 8192;  // rows of rule 9
constexpr int kBiasGroupRows = 64;
constexpr int kMaxSegments = 8;

// A matrix of any row layout; columns are contiguous.
struct LinearParams {
  const void* x = nullptr;       // [num_rows, in_features], dtype
  const void* weight = nullptr;  // [out_features, in_features], dtype
  const void* bias = nullptr;    // [out_features], bias_dtype, or null
  const float* start = nullptr;  // [num_rows, out_features], or null; may be y itself, in its layout. k_segments is 1
  void* y = nullptr;             // [num_rows, out_features], out_dtype
  RowLayout x_rows, y_rows;
  std::int64_t weight_stride = 0, start_stride = 0;  // elements between rows
  std::int64_t num_rows = 0, in_features = 0, out_features = 0;
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16; kFloat32 on the CPU
  DType bias_dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;  // dtype, or kFloat32, or the other 16-bit type
  // Segments that in_features is cut into, 1, 2, 4 or 8: in_features % (16 * k_segments) == 0 where it is not 1. For a
  // shard of a larger in_features this is the number of its own segments.
  int k_segments = 1;
  Arithmetic arithmetic = Arithmetic::kIeee;
  bool allow_vendor = true;
};
void linear(const LinearParams& p, Device device, Stream stream);

struct LinearInputGradParams {
  const void* dy = nullptr;      // [num_rows, out_features], dtype
  const void* weight = nullptr;  // [out_features, in_features], dtype
  void* dx = nullptr;            // [num_rows, in_features], dx_dtype
  const float* start = nullptr;  // [num_rows, in_features], or null; may be dx itself, in its layout
  // In the device's memory, or null: rows from there on (a multiple of 128) are of no use, and may be left as they are.
  const std::int32_t* row_limit = nullptr;
  RowLayout dy_rows, dx_rows;
  std::int64_t weight_stride = 0, start_stride = 0;
  std::int64_t num_rows = 0, in_features = 0, out_features = 0;
  DType dtype = DType::kBFloat16;
  DType dx_dtype = DType::kBFloat16;  // dtype or kFloat32
  Arithmetic arithmetic = Arithmetic::kIeee;
  bool allow_vendor = true;
};
void linear_input_grad(const LinearInputGradParams& p, Device device, Stream stream);

struct LinearWeightGradParams {
  const void* dy = nullptr;          // [num_rows, out_features], dtype
  const void* x = nullptr;           // [num_rows, in_features], dtype
  const float* main_grad = nullptr;  // [out_features, in_features], or null; may be dweight itself
  void* dweight = nullptr;           // [out_features, in_features], dweight_dtype
  // In the device's memory, or null: rows from there on (a multiple of 128) are zeros. At most one block of rows.
  const std::int32_t* row_limit = nullptr;
  RowLayout dy_rows, x_rows;
  std::int64_t main_grad_stride = 0, dweight_stride = 0;
  std::int64_t num_rows = 0, in_features = 0, out_features = 0;
  DType dtype = DType::kBFloat16;
  DType dweight_dtype = DType::kFloat32;  // dtype or kFloat32
  Arithmetic arithmetic = Arithmetic::kIeee;
  bool allow_vendor = true;
};
void linear_weight_grad(const LinearWeightGradParams& p, Device device, Stream stream);

struct LinearBiasGradParams {
  const void* dy = nullptr;  // [num_rows, out_features], dtype
  void* dbias = nullptr;     // [out_features], dbias_dtype: dtype or kFloat32
  RowLayout dy_rows;
  std::int64_t num_rows = 0, out_features = 0;
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16, kFloat32, on every device: nothing is multiplied
  DType dbias_dtype = DType::kFloat32;
};
void linear_bias_grad(const LinearBiasGradParams& p, Device device, Stream stream);

// Perfect binary tree over `count` (1, 2, 4, 8) fp32 arrays: rule 2's combination of the subtrees of ranks.
struct TreeSumParams {
  const float* parts[kMaxSegments] = {};  // [size] each, contiguous
  const void* bias = nullptr;             // [columns], bias_dtype, or null; added after the tree
  void* sum = nullptr;                    // [size], out_dtype: kFloat32, kBFloat16 or kFloat16
  float scale = 1.0f;                     // factor of the sum, before bias and rounding
  std::int64_t size = 0;
  std::int64_t columns = 0;  // columns per row of parts, with a bias: size is a multiple of it; 0 without
  int count = 1;
  DType bias_dtype = DType::kBFloat16;
  DType out_dtype = DType::kFloat32;
};
void tree_sum(const TreeSumParams& p, Device device, Stream stream);

enum class LinearPass : std::uint8_t { kForward, kInputGrad, kWeightGrad };
// Products of every number of rows from first_rows to last_rows.
struct LinearProducts {
  LinearPass pass;
  DType dtype, out_dtype;  // operands' dtype; dtype of y, dx or dweight
  std::int64_t in_features, out_features, last_rows, first_rows;
  auto operator<=>(const LinearProducts&) const = default;
};
// What the vendor's library serves on a device where allow_vendor is set, if operands and result are dense and begin at 16
// bytes, without bias, k_segments and main_grad. Empty where the library is not there.
std::vector<LinearProducts> linear_vendor_products(Device device);

}  // namespace rlk
