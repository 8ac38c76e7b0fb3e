// CUDA backend of linear: checks memory safety, describes the three products as GemmParams, and chooses the kernel.
#include "rlk/ops/linear.h"

#include "../common/launch.h"
#include "cublaslt_records.h"
#include "gemm.h"
#include "gemm_copies.h"
#include "gemm_sm90.h"
#include "kernels/rows/linear_check.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"
#include "sums.h"

namespace rlk::cuda {

namespace {

constexpr std::int64_t kCopyAlign = 16;

void* at_16_bytes(void* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return reinterpret_cast<void*>((address + kCopyAlign - 1) / kCopyAlign * kCopyAlign);
}

RowLayout dense_rows(std::int64_t rows, std::int64_t stride) { return {rows > 0 ? rows : 1, 0, stride}; }

// The name of a tile of the kernel for any layout.
std::string name_of(Sm80Tile tile) {
  constexpr const char* kNames[] = {"fewest rows", "few rows", "medium", "square", "large", "token blocks"};
  return std::string("any layout, ") + kNames[static_cast<int>(tile)];
}

void require_16_bit(DType t) {
  RLK_CHECK(t == DType::kBFloat16 || t == DType::kFloat16, "linear: CUDA kernels take bfloat16 and float16");
}

// Runs cuBLASLt if it is allowed and the product is recorded. Otherwise the function runs the sm_90 kernels, if they
// can read the operands or copies of them in the workspace. If the sm_90 kernels cannot read them, the function runs
// the kernel for any layout. All of these kernels give the same bits.
void run(const GemmParams& p, bool allow_vendor, void* workspace, int device, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) no_kernel("linear");
  if (allow_vendor && p.row_limit == nullptr) {
    if (const CublasLtRecord* record = recorded(p, device)) {
      note_plan([] { return std::string("cuBLASLt"); });
      return CublasLt::on(device)->run(p, record->algorithm, to_stream(stream));
    }
  }
  if (capability == 90) {
    const GemmCopies copies = gemm_copies(p);
    if (copies.serve() && (copies.bytes == 0 || workspace != nullptr)) {
      if (copies.bytes > 0) note_plan([] { return std::string("copies"); });
      return gemm_by_copies(p, copies, at_16_bytes(workspace), device, to_stream(stream));
    }
    if (gemm_sm90_serves(p)) return gemm_sm90(p, choose_plan_sm90(p, multiprocessors(device)), to_stream(stream));
  }
  note_plan([&] { return name_of(RLK_CUDA_IN_USE("linear", device, choose_tile)(p)); });
  RLK_CUDA_IN_USE("linear", device, gemm)(p, to_stream(stream));
}

GemmParams gemm_of(const LinearParams& p) {
  GemmParams g;
  g.a = {p.x, p.x_rows, true};
  g.b = {p.weight, dense_rows(p.out_features, p.weight_stride), true};
  g.d = p.y;
  g.d_rows = p.y_rows;
  g.bias = p.bias;
  g.m = p.num_rows;
  g.n = p.out_features;
  g.contraction = p.in_features;
  g.addend = p.start;
  g.addend_rows = dense_rows(p.num_rows, p.start_stride);
  g.continues = p.start != nullptr;
  g.segments = p.k_segments;
  g.dtype = p.dtype;
  g.d_dtype = p.out_dtype;
  g.bias_dtype = p.bias_dtype;
  return g;
}

GemmParams gemm_of(const LinearInputGradParams& p) {
  GemmParams g;
  g.a = {p.dy, p.dy_rows, true};
  g.b = {p.weight, dense_rows(p.out_features, p.weight_stride), false};
  g.d = p.dx;
  g.d_rows = p.dx_rows;
  g.m = p.num_rows;
  g.n = p.in_features;
  g.contraction = p.out_features;
  g.addend = p.start;
  g.addend_rows = dense_rows(p.num_rows, p.start_stride);
  g.continues = p.start != nullptr;
  g.row_limit = p.row_limit;
  g.dtype = p.dtype;
  g.d_dtype = p.dx_dtype;
  return g;
}

GemmParams gemm_of(const LinearWeightGradParams& p) {
  GemmParams g;
  g.a = {p.dy, p.dy_rows, false};
  g.b = {p.x, p.x_rows, false};
  g.d = p.dweight;
  g.d_rows = dense_rows(p.out_features, p.dweight_stride);
  g.addend = p.main_grad;
  g.addend_rows = dense_rows(p.out_features, p.main_grad_stride);
  g.m = p.out_features;
  g.n = p.in_features;
  g.contraction = p.num_rows;
  g.block = kTokenBlock;
  g.row_limit = p.row_limit;
  g.dtype = p.dtype;
  g.d_dtype = p.dweight_dtype;
  return g;
}

}  // namespace

template <class Params>
std::int64_t linear_workspace_bytes(const Params& p, int device) {
  if (compute_capability(device) != 90) return 0;
  const std::int64_t bytes = gemm_copies(gemm_of(p)).bytes;
  return bytes == 0 ? 0 : bytes + kCopyAlign;
}
template std::int64_t linear_workspace_bytes(const LinearParams& p, int device);
template std::int64_t linear_workspace_bytes(const LinearInputGradParams& p, int device);
template std::int64_t linear_workspace_bytes(const LinearWeightGradParams& p, int device);

void linear(const LinearParams& p, int device, Stream stream) {
  check_linear(p);
  require_16_bit(p.dtype);
  run(gemm_of(p), p.allow_vendor, p.workspace, device, stream);
}

void linear_input_grad(const LinearInputGradParams& p, int device, Stream stream) {
  check_linear_input_grad(p);
  require_16_bit(p.dtype);
  run(gemm_of(p), p.allow_vendor, p.workspace, device, stream);
}

void linear_weight_grad(const LinearWeightGradParams& p, int device, Stream stream) {
  check_linear_weight_grad(p);
  require_16_bit(p.dtype);
  run(gemm_of(p), p.allow_vendor, p.workspace, device, stream);
}

void linear_bias_grad(const LinearBiasGradParams& p, int device, Stream stream) {
  check_linear_bias_grad(p);
  if (p.out_features == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("linear", device, linear_bias_grad)(p, to_stream(stream));
}

void tree_sum(const TreeSumParams& p, int device, Stream stream) {
  check_tree_sum(p);
  if (p.size == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("linear", device, tree_sum)(p, to_stream(stream));
}

std::vector<LinearProducts> linear_vendor_products(int device) { return recorded_products(device); }

}  // namespace rlk::cuda
