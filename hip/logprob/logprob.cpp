// The host side of logprob on HIP checks memory safety, and cuts a call into launches.
#include "rlk/ops/logprob.h"

#include <algorithm>
#include <string>

#include "hip/common/runtime.h"
#include "kernels/vocabulary/logprob_check.h"
#include "kernels/vocabulary/logprob_groups.h"
#include "kernels/vocabulary/logprob_smoothing.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {
namespace {

// The most rows of one launch. There are two limits: the second dimension of a grid, and the size of the workspace,
// which has a node for each group of each row.
std::int64_t rows_of_launch(const GroupGrid& grid) {
  constexpr std::int64_t kMostNodes = std::int64_t{1} << 19, kMostRows = 65535;
  return std::min(kMostRows, kMostNodes / grid.nodes);
}

std::string kernel_name(const char* what, DType t) {
  return std::string("rlk_logprob_") + what +
         (t == DType::kBFloat16  ? "_bf16"
          : t == DType::kFloat16 ? "_f16"
                                 : "_f32");
}

void require_portable(Exp exp) {
  if (exp != Exp::kPortable) throw Unsupported("logprob: HIP kernels have the portable exponential only");
}

}  // namespace

std::int64_t logprob_workspace_bytes(const LogprobParams& p, int) {
  if (p.num_rows == 0) return 0;
  const GroupGrid grid = group_grid(p);
  return std::min(p.num_rows, rows_of_launch(grid)) * grid.nodes * kNodeBytes;
}

void logprob(const LogprobParams& p, int device, Stream stream) {
  check_logprob_input(p);
  check_logprob_smoothing(p);
  require_portable(p.exp);
  if (p.num_rows == 0) return;
  RLK_CHECK(p.vocab_size > 0, "logprob: the vocabulary is not empty");
  RLK_CHECK(p.workspace != nullptr, "logprob: a workspace is given");
  const Runtime& runtime = Runtime::get();
  const GroupGrid grid = group_grid(p);
  const bool moments = p.stats || p.entropy || p.sum_p_sq;
  const std::string groups = kernel_name(moments ? "groups_moments" : "groups", p.dtype);
  const std::string roots = kernel_name("roots", p.dtype);
  auto* nodes = static_cast<float*>(p.workspace);
  for (std::int64_t first = 0; first < p.num_rows; first += rows_of_launch(grid)) {
    const std::int64_t rows = std::min(p.num_rows - first, rows_of_launch(grid));
    runtime.launch(device, groups.c_str(), {grid.groups, rows, kGroupThreads, group_lds_bytes(p.dtype)}, stream, p,
                   grid, first, nodes);
    runtime.launch(device, roots.c_str(), {rows, 1, kGroupThreads, 0}, stream, p, grid, first, nodes);
  }
  if (p.label_smoothing == 0.0f) return;
  const std::string smoothing = kernel_name("smoothing", p.dtype);
  constexpr std::int64_t kMostRows = 65535;
  for (std::int64_t first = 0; first < p.num_rows; first += kMostRows) {
    const std::int64_t rows = std::min(p.num_rows - first, kMostRows);
    runtime.launch(device, smoothing.c_str(), {rows, 1, kSmoothingThreads, kMostSmoothingNodes * 4}, stream, p, grid,
                   first);
  }
}

void logprob_merge(const LogprobMergeParams& p, int device, Stream stream) {
  check_logprob_merge(p);
  RLK_CHECK(p.num_rows < std::int64_t{1} << 31, "logprob_merge: fewer than 2^31 rows");
  if (p.num_rows == 0) return;
  const std::int64_t blocks = (p.num_rows + kMergeThreads - 1) / kMergeThreads;
  Runtime::get().launch(device, "rlk_logprob_merge", {blocks, 1, kMergeThreads, 0}, stream, p);
}

void logprob_backward(const LogprobBackwardParams& p, int device, Stream stream) {
  check_logprob_backward(p);
  RLK_CHECK(p.num_columns <= std::int64_t{1} << 30, "logprob_backward: at most 2^30 columns");
  require_portable(p.exp);
  if (p.num_rows == 0 || p.num_columns == 0) return;
  constexpr std::int64_t kMostRows = 65535;
  const std::string name = kernel_name("backward", p.dtype);
  const std::int64_t segments = (p.num_columns + kSegmentColumns - 1) / kSegmentColumns;
  for (std::int64_t first = 0; first < p.num_rows; first += kMostRows) {
    const std::int64_t rows = std::min(p.num_rows - first, kMostRows);
    Runtime::get().launch(device, name.c_str(), {segments, rows, kBackwardThreads, kBackwardLds}, stream, p, first);
  }
}

}  // namespace rlk::hip
