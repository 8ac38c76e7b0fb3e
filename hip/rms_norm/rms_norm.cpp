// The host side of rms_norm on HIP checks memory safety, and chooses and launches the kernels of a call.
#include "rlk/ops/rms_norm.h"

#include <string>

#include "hip/common/launch.h"
#include "kernels/rows/rms_norm_check.h"
#include "kernels/rows/rms_norm_row.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {
namespace {

std::string kernel_name(const char* what, const std::string& shape, DType t) {
  return std::string("rlk_rms_norm_") + what + shape + type_suffix(t);
}

// The part of a kernel's name that tells which threads share a row, and how they load it.
std::string row_shape(std::int64_t columns, bool vectors) {
  return std::string(columns <= kMostWaveColumns ? "_wave" : "_block") + (vectors ? "" : "_elements");
}
std::int64_t row_blocks(std::int64_t rows, std::int64_t columns) {
  constexpr int kRows = kNormThreads / 64;
  return columns <= kMostWaveColumns ? ceil_div(rows, kRows) : rows;
}

}  // namespace

void rms_norm(const RmsNormParams& p, int device, Stream stream) {
  check_rms_norm(p);
  if (p.num_rows == 0) return;
  const bool vectors = p.columns % kVec8 == 0 && at_16_bytes(p.weight) && has_vectors(p.x, p.x_rows, p.dtype) &&
                       has_vectors(p.residual, p.residual_rows, p.dtype) && has_vectors(p.y, p.y_rows, p.dtype) &&
                       has_vectors(p.new_residual, p.new_residual_rows, p.dtype);
  launch_blocks(device, stream, {kNormThreads, kNormLds},
                kernel_name("forward", row_shape(p.columns, vectors), p.dtype), row_blocks(p.num_rows, p.columns), p);
}

std::int64_t rms_norm_backward_workspace_bytes(const RmsNormBackwardParams& p, int) {
  return p.dweight == nullptr ? 0 : rms_norm_groups(p.num_rows) * p.columns * static_cast<std::int64_t>(sizeof(float));
}

void rms_norm_backward(const RmsNormBackwardParams& p, int device, Stream stream) {
  check_rms_norm_backward(p);
  if (p.columns == 0) return;
  RLK_CHECK(p.workspace || rms_norm_backward_workspace_bytes(p, 0) == 0, "rms_norm_backward: a workspace is given");
  const bool vectors = p.columns % kVec8 == 0 && at_16_bytes(p.weight) && has_vectors(p.dy, p.dy_rows, p.dtype) &&
                       has_vectors(p.h, p.h_rows, p.dtype) && has_vectors(p.dx, p.dx_rows, p.dtype) &&
                       has_vectors(p.d_new_residual, p.d_new_residual_rows, p.dtype);
  if (p.dx != nullptr && p.num_rows > 0) {
    launch_blocks(device, stream, {kNormThreads, kNormLds}, kernel_name("dx", row_shape(p.columns, vectors), p.dtype),
                  row_blocks(p.num_rows, p.columns), p);
  }
  if (p.dweight == nullptr) return;
  const std::int64_t column_blocks = ceil_div(p.columns, std::int64_t{kNormThreads} * kVec8);
  launch_blocks(device, stream, {kNormThreads, kNormLds},
                kernel_name("chains", vectors ? "_vectors" : "_elements", p.dtype),
                rms_norm_groups(p.num_rows) * column_blocks, p, column_blocks);
  launch_blocks(device, stream, {kNormThreads, kNormLds}, kernel_name("fold", "", p.dtype),
                ceil_div(p.columns, kNormThreads), p);
}

}  // namespace rlk::hip
