// CUDA backend of rms_norm: checks of memory safety, the choice of a plan, and the launch for the device's
// architecture.
#include "rlk/ops/rms_norm.h"

#include "../common/alignment.h"
#include "kernels.h"
#include "kernels/rows/rms_norm_check.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {
namespace {

constexpr int kVec8 = kRmsNormLaneColumns;

// Whether the threads of a plan can hold a row in registers or shared memory. A plan whose `threads` is 0 selects the
// kernel that reads each row twice, which supports any row.
template <class Plan, class Params>
bool holds_row(const Plan& plan, const Params& p) {
  if (plan.threads == 0) return true;
  const bool few_vec8s = plan.vec8s < 8 || p.dtype != DType::kFloat32;
  return has_vectors(p) && few_vec8s && p.columns <= std::int64_t{plan.threads} * plan.vec8s * kVec8;
}

bool has_one_stride(const void* base, const RowLayout& rows, std::int64_t num_rows) {
  return base == nullptr || rows.inner >= num_rows;
}

}  // namespace

bool has_vectors(const RmsNormParams& p) {
  const auto whole = [&](const void* base, const RowLayout& rows) {
    return base == nullptr || rows_begin_at_16_bytes(base, rows, p.num_rows, size_of(p.dtype));
  };
  return p.columns % kVec8 == 0 && at_16_bytes(p.weight) && whole(p.x, p.x_rows) && whole(p.y, p.y_rows) &&
         whole(p.residual, p.residual_rows) && whole(p.new_residual, p.new_residual_rows);
}

bool has_vectors(const RmsNormBackwardParams& p) {
  const auto whole = [&](const void* base, const RowLayout& rows) {
    return base == nullptr || rows_begin_at_16_bytes(base, rows, p.num_rows, size_of(p.dtype));
  };
  return p.columns % kVec8 == 0 && at_16_bytes(p.weight) && at_16_bytes(p.workspace) && whole(p.dy, p.dy_rows) &&
         whole(p.h, p.h_rows) && whole(p.dx, p.dx_rows) && whole(p.d_new_residual, p.d_new_residual_rows);
}

bool is_plain(const RmsNormParams& p) {
  const auto plain = [&](const void* base, const RowLayout& rows) { return has_one_stride(base, rows, p.num_rows); };
  return p.y != nullptr && p.weight != nullptr && p.weight_dtype == p.dtype && plain(p.x, p.x_rows) &&
         plain(p.y, p.y_rows) && plain(p.residual, p.residual_rows) && plain(p.new_residual, p.new_residual_rows);
}
bool is_plain(const RmsNormBackwardParams& p) {
  const auto plain = [&](const void* base, const RowLayout& rows) {
    return base == nullptr || (has_one_stride(base, rows, p.num_rows) && rows.inner_stride >= 0 &&
                               rows.inner_stride < (std::int64_t{1} << 31) / size_of(p.dtype));
  };
  return plain(p.dy, p.dy_rows) && plain(p.h, p.h_rows) && plain(p.dx, p.dx_rows) &&
         plain(p.d_new_residual, p.d_new_residual_rows);
}

bool serves(const RmsNormPlan& plan, const RmsNormParams& p) { return holds_row(plan, p); }
bool serves(const RmsNormBackwardPlan& plan, const RmsNormBackwardParams& p) {
  if (!holds_row(plan, p)) return false;
  if (!plan.halves) return true;
  return p.dx != nullptr && p.dweight != nullptr && is_plain(p) && p.dtype != DType::kFloat32 &&
         p.columns > std::int64_t{plan.threads} * plan.vec8s / 2 * kVec8;
}

RmsNormPlan choose_plan(const RmsNormParams& p) {
  // With a residual, the loads of two inputs keep memory busy. In this case plans with more threads and fewer vec8s per
  // thread are faster, if few threads are idle.
  const bool is_wide = p.residual != nullptr && p.num_rows > kMostFewRows && p.columns > 384 * kVec8;
  for (const RmsNormPlan& plan : kRmsNormPlans) {
    if (is_wide && plan.threads > 0 && plan.threads < 256) continue;
    if (serves(plan, p)) return plan;
  }
  return {};
}

RmsNormBackwardPlan choose_plan(const RmsNormBackwardParams& p, int multiprocessors) {
  const std::int64_t groups = rms_norm_groups(p.num_rows);
  const bool halves = 2 * groups <= multiprocessors;  // with more groups, "groups" is as fast or faster
  if (5 * groups < multiprocessors) return {};
  for (const RmsNormBackwardPlan& plan : kRmsNormBackwardPlans) {
    if (plan.halves == halves && serves(plan, p)) return plan;
  }
  return {};
}

void rms_norm(const RmsNormParams& p, int device, Stream stream) {
  check_rms_norm(p);
  if (p.num_rows == 0) return;
  const DeviceGuard guard(device);
  const RmsNormPlan plan = choose_plan(p);
  note_plan([&] {
    if (plan.threads == 0) return std::string("rows read twice");
    return std::to_string(plan.threads) + " threads of " + std::to_string(plan.vec8s) + " vec8s";
  });
  RLK_CUDA_IN_USE("rms_norm", device, rms_norm)(p, plan, to_stream(stream));
}

std::int64_t rms_norm_backward_workspace_bytes(const RmsNormBackwardParams& p, int) {
  return p.dweight == nullptr ? 0 : rms_norm_groups(p.num_rows) * p.columns * static_cast<std::int64_t>(sizeof(float));
}

void rms_norm_backward(const RmsNormBackwardParams& p, int device, Stream stream) {
  check_rms_norm_backward(p);
  if (p.columns == 0 || (p.num_rows == 0 && p.dweight == nullptr) || (p.dx == nullptr && p.dweight == nullptr)) return;
  RLK_CHECK(p.workspace || rms_norm_backward_workspace_bytes(p, 0) == 0, "rms_norm_backward: a workspace is given");
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) no_kernel("rms_norm");
  if (capability == 90) {
    return sm90::rms_norm_backward(p, choose_plan(p, multiprocessors(device)), to_stream(stream));
  }
  // Other devices have too little shared memory for the rings of the widest plans.
  RmsNormBackwardPlan plan = choose_plan(p, multiprocessors(device));
  if (plan.threads * plan.vec8s > 256) plan = {};
  sm80::rms_norm_backward(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
