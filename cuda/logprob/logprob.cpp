// CUDA backend of logprob: checks of memory safety, the choice of the plan and of the architecture's kernel, and the
// cut of rows into groups.
#include "rlk/ops/logprob.h"

#include "../common/kernels.h"
#include "kernels/vocabulary/logprob_check.h"
#include "kernels/vocabulary/logprob_groups.h"
#include "plan.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;

LogprobPlan plan_of(const LogprobInput& p, int device) {
  return choose_plan(p, compute_capability(device), multiprocessors(device));
}

}  // namespace

std::int64_t logprob_workspace_bytes(const LogprobParams& p, int device) {
  return workspace_bytes_of(p, plan_of(p, device));
}

void logprob(const LogprobParams& p, int device, Stream stream) {
  check_logprob_input(p);
  check_logprob_smoothing(p);
  if (p.num_rows == 0) return;
  RLK_CHECK(p.vocab_size > 0, "logprob: the vocabulary is not empty");
  const GroupGrid grid = group_grid(p);
  RLK_CHECK(p.num_rows <= kMaxBlocks / grid.nodes, "logprob: too many rows for one launch");
  const DeviceGuard guard(device);
  const LogprobPlan plan = plan_of(p, device);
  RLK_CHECK(p.workspace || workspace_bytes_of(p, plan) == 0, "logprob: a workspace is given");
  note_plan([=] { return std::string(name_of(plan)); });
  RLK_CUDA_IN_USE("logprob", device, logprob_forward)(p, grid, plan, to_stream(stream));
  if (p.label_smoothing != 0.0f) RLK_CUDA_IN_USE("logprob", device, logprob_smoothing)(p, grid, to_stream(stream));
}

void logprob_merge(const LogprobMergeParams& p, int device, Stream stream) {
  check_logprob_merge(p);
  RLK_CHECK(p.num_rows < std::int64_t{1} << 31, "logprob_merge: fewer than 2^31 rows");
  if (p.num_rows == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("logprob", device, logprob_merge)(p, to_stream(stream));
}

void logprob_backward(const LogprobBackwardParams& p, int device, Stream stream) {
  check_logprob_backward(p);
  RLK_CHECK(p.num_columns <= std::int64_t{1} << 30, "logprob_backward: at most 2^30 columns");
  if (p.num_rows == 0 || p.num_columns == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("logprob", device, logprob_backward)(p, to_stream(stream));
}

}  // namespace rlk::cuda
