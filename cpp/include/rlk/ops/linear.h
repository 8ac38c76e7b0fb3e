// THE CONTRACT of `linear`: y = x W^T + b and its gradients. Their bits are the same for every batch size, tile size
// and split of the work.
// Rule numbers refer to docs/numerics.md.
//
// Dot product over an index i of `count` elements (rule 1): one fp32 accumulator from +0 takes ascending steps of 16
// indices, counted from the first index. A short last step is padded with +0. The arithmetic decides what one step
// computes. math/mma_model.h defines a step for each matrix unit (Arithmetic). IEEE is one fma per index, ascending;
// fp32 operands always use IEEE.
//   y[m, n]  = round(fl(dot_k(x[m, k], weight[n, k]) + bias[n]))    to out_dtype, nearest even. Without a bias, nothing
//              is added.
//              With k_segments S > 1 the dot product is ((d0 + d1) + (d2 + d3)) + ((d4 + d5) + (d6 + d7)). These are
//              fp32 additions of S dot products over K / S consecutive indices each (rule 2).
//   With `start`, the accumulator begins at start[m, n] instead of +0. So a product may be computed in parts, which are
//              cut at multiples of 16 in k. Each part but the first starts from the fp32 y of the previous part. The
//              result has the bits of a single product
//   dx[m, k] = round(dot_n(dy[m, n], weight[n, k]))                 to dx_dtype. If y has another dtype, the caller
//              rounds dy to dtype first, for dx, dw and db alike. `start` works as for y
//   dw[n, k] = fold over blocks of 8192 rows (rule 9). Block b is dot_m(dy[m, n], x[m, k]) over its rows. The first
//              block is added to main_grad[n, k] if given, else taken unchanged. Each later block is added to the
//              result in fp32, ascending. The result is rounded to dweight's dtype at the end
//   db[n]    = the same fold over blocks of 8192 rows. A block has 128 groups of 64 consecutive rows. Each group is an
//              ascending chain of fp32 additions from +0. A perfect binary tree over the groups' index adds the groups;
//              missing rows and groups are +0
//   tree_sum = round(fl(scale * tree over parts + bias[column])). The tree adds the parts as y adds its S dot products,
//              and the sum is rounded like y. The fp32 multiplication by scale is left out where scale is 1
//
// A row of y or dx has the same bits for any number of rows, any position and stride, and in every kernel of the same
// arithmetic. An empty sum is +0. If a dot product of a matrix unit is zero, it is +0. Every NaN result is the
// canonical NaN on the CPU; on a GPU the matrix unit decides its bits. All functions enqueue their work on `stream`;
// they neither allocate nor synchronise. CPU backends ignore `stream`. With allow_vendor the hardware vendor's library
// may compute a product that linear_vendor_products lists. The listed products were measured on a GPU of the same
// model, with the same version of the library: the library's result has the bits that this contract defines, and takes
// less time. The measurements cover every number of rows up to 1024, and several numbers of rows in each larger range.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "rlk/base.h"

namespace rlk {

// Arithmetic of the CPU's products. GPUs ignore this value, since their arithmetic is fixed.
enum class Arithmetic : std::uint8_t { kIeee, kSm80, kSm90, kGfx90a, kGfx942 };

constexpr std::int64_t kTokenBlock = 8192;  // rows per block of rule 9
constexpr int kBiasGroupRows = 64;
constexpr int kMaxSegments = 8;

// A matrix may have any row layout; its columns are contiguous.
struct LinearParams {
  const void* x = nullptr;       // [num_rows, in_features], dtype
  const void* weight = nullptr;  // [out_features, in_features], dtype
  const void* bias = nullptr;    // [out_features], bias_dtype, or null
  const float* start = nullptr;  // [num_rows, out_features], or null; may be y itself, with the layout of y. k_segments
                                 // must be 1
  void* y = nullptr;             // [num_rows, out_features], out_dtype
  RowLayout x_rows, y_rows;
  std::int64_t weight_stride = 0, start_stride = 0;  // elements between rows
  std::int64_t num_rows = 0, in_features = 0, out_features = 0;
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16; kFloat32 on the CPU
  DType bias_dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;  // dtype, kFloat32, or the other 16-bit type
  // Number of segments that in_features is cut into: 1, 2, 4 or 8. If it is not 1, in_features %
  // (16 * k_segments) == 0. For a shard of a larger in_features, k_segments is the number of the shard's own segments.
  int k_segments = 1;
  Arithmetic arithmetic = Arithmetic::kIeee;
  bool allow_vendor = true;
  void* workspace = nullptr;  // linear_workspace_bytes(...), or null: then a slower kernel may compute the product
};
void linear(const LinearParams& p, Device device, Stream stream);

struct LinearInputGradParams {
  const void* dy = nullptr;      // [num_rows, out_features], dtype
  const void* weight = nullptr;  // [out_features, in_features], dtype
  void* dx = nullptr;            // [num_rows, in_features], dx_dtype
  const float* start = nullptr;  // [num_rows, in_features], or null; may be dx itself, in the layout of dx
  // In device memory, or null. Rows from *row_limit on (a multiple of 128) are not needed and may stay unwritten.
  const std::int32_t* row_limit = nullptr;
  RowLayout dy_rows, dx_rows;
  std::int64_t weight_stride = 0, start_stride = 0;
  std::int64_t num_rows = 0, in_features = 0, out_features = 0;
  DType dtype = DType::kBFloat16;
  DType dx_dtype = DType::kBFloat16;  // dtype or kFloat32
  Arithmetic arithmetic = Arithmetic::kIeee;
  bool allow_vendor = true;
  void* workspace = nullptr;  // linear_workspace_bytes(...), or null: then a slower kernel may compute the product
};
void linear_input_grad(const LinearInputGradParams& p, Device device, Stream stream);

struct LinearWeightGradParams {
  const void* dy = nullptr;          // [num_rows, out_features], dtype
  const void* x = nullptr;           // [num_rows, in_features], dtype
  const float* main_grad = nullptr;  // [out_features, in_features], or null; may be dweight itself
  void* dweight = nullptr;           // [out_features, in_features], dweight_dtype
  // In device memory, or null. Rows from *row_limit on (a multiple of 128) are zeros. num_rows is at most one block.
  const std::int32_t* row_limit = nullptr;
  RowLayout dy_rows, x_rows;
  std::int64_t main_grad_stride = 0, dweight_stride = 0;
  std::int64_t num_rows = 0, in_features = 0, out_features = 0;
  DType dtype = DType::kBFloat16;
  DType dweight_dtype = DType::kFloat32;  // dtype or kFloat32
  Arithmetic arithmetic = Arithmetic::kIeee;
  bool allow_vendor = true;
  void* workspace = nullptr;  // linear_workspace_bytes(...), or null: then a slower kernel may compute the product
};
void linear_weight_grad(const LinearWeightGradParams& p, Device device, Stream stream);

// Bytes of workspace that make a product faster, or 0 if none would. On sm_90 the workspace holds copies of operands
// whose rows do not begin at multiples of 16 bytes. The copies take at most about 256 MiB. No result depends on the
// workspace. `Params` is LinearParams, LinearInputGradParams or LinearWeightGradParams.
template <class Params>
std::int64_t linear_workspace_bytes(const Params& p, Device device);

struct LinearBiasGradParams {
  const void* dy = nullptr;  // [num_rows, out_features], dtype
  void* dbias = nullptr;     // [out_features], dbias_dtype: dtype or kFloat32
  RowLayout dy_rows;
  std::int64_t num_rows = 0, out_features = 0;
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16, kFloat32 on every device, since nothing is multiplied
  DType dbias_dtype = DType::kFloat32;
};
void linear_bias_grad(const LinearBiasGradParams& p, Device device, Stream stream);

// Sums `count` (1, 2, 4, 8) fp32 arrays, such as the sums of several ranks, by a perfect binary tree (rule 2).
struct TreeSumParams {
  const float* parts[kMaxSegments] = {};  // [size] each, contiguous
  const void* bias = nullptr;             // [columns], bias_dtype, or null; added after the tree
  void* sum = nullptr;                    // [size], out_dtype: kFloat32, kBFloat16 or kFloat16
  float scale = 1.0f;                     // factor of the sum, before bias and rounding
  std::int64_t size = 0;
  std::int64_t columns = 0;  // with a bias: columns per row of the parts, a divisor of size; else 0
  int count = 1;
  DType bias_dtype = DType::kBFloat16;
  DType out_dtype = DType::kFloat32;
};
void tree_sum(const TreeSumParams& p, Device device, Stream stream);

enum class LinearPass : std::uint8_t { kForward, kInputGrad, kWeightGrad };
// One product shape for every number of rows from first_rows to last_rows.
struct LinearProducts {
  LinearPass pass;
  DType dtype, out_dtype;  // operands' dtype; dtype of y, dx or dweight
  std::int64_t in_features, out_features, last_rows, first_rows;
  auto operator<=>(const LinearProducts&) const = default;
};
// Products that the vendor's library computes on a device if allow_vendor is set. Operands and result must be dense and
// 16-byte aligned, without bias, k_segments and main_grad. The list is empty if the library is missing.
std::vector<LinearProducts> linear_vendor_products(Device device);

}  // namespace rlk
