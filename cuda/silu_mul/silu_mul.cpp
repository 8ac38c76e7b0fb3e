// CUDA backend of silu_mul: checks of memory safety, which kernel serves a call, which architecture's runs.
#include "rlk/ops/silu_mul.h"

#include "../common/alignment.h"
#include "kernels.h"
#include "rlk/backends.h"
#include "rlk/kernels/silu_mul_check.h"

namespace rlk::cuda {
namespace {

constexpr int kVec8 = 8;
constexpr std::int64_t kFewThreads =
    1024;  // threads per multiprocessor: with fewer, loads of more threads beat more loads of each

// Whether rows are whole vectors of eight columns at multiples of 16 bytes.
template <class Params>
bool whole(const Params& p, const void* base, const RowLayout& rows) {
  return base == nullptr || rows_begin_at_16_bytes(base, rows, p.num_rows, size_of(p.dtype));
}
bool has_vectors(const GatedMulParams& p) {
  return p.columns % kVec8 == 0 && whole(p, p.gate, p.gate_rows) && whole(p, p.up, p.up_rows) &&
         whole(p, p.y, p.y_rows);
}
bool has_vectors(const GatedMulBackwardParams& p) {
  return p.columns % kVec8 == 0 && whole(p, p.dy, p.dy_rows) && whole(p, p.gate, p.gate_rows) &&
         whole(p, p.up, p.up_rows) && whole(p, p.d_gate, p.d_gate_rows) && whole(p, p.d_up, p.d_up_rows);
}

template <class Params>
GatedMulPlan choose(const Params& p, int multiprocessors) {
  if (!has_vectors(p)) return {0};
  const std::int64_t vec8s = p.num_rows * (p.columns / kVec8);
  return {vec8s >= 2 * kFewThreads * multiprocessors ? 2 : 1};
}

}  // namespace

bool serves(const GatedMulPlan& plan, const GatedMulParams& p) {
  // Twice two vec8s of float32 would not fit the registers.
  return plan.vec8s == 0 || (has_vectors(p) && (plan.vec8s * plan.chunks < 8 || p.dtype != DType::kFloat32));
}
bool serves(const GatedMulPlan& plan, const GatedMulBackwardParams& p) {
  return plan.vec8s == 0 || (has_vectors(p) && plan.chunks == 1);
}
GatedMulPlan choose_plan(const GatedMulParams& p, int multiprocessors) { return choose(p, multiprocessors); }
GatedMulPlan choose_plan(const GatedMulBackwardParams& p, int multiprocessors) { return choose(p, multiprocessors); }

void gated_mul(const GatedMulParams& p, int device, Stream stream) {
  check_gated_mul(p);
  if (p.num_rows == 0 || p.columns == 0) return;
  const DeviceGuard guard(device);
  const GatedMulPlan plan = choose_plan(p, multiprocessors(device));
  RLK_CUDA_IN_USE("silu_mul", device, gated_mul)(p, plan, to_stream(stream));
}

void gated_mul_backward(const GatedMulBackwardParams& p, int device, Stream stream) {
  check_gated_mul_backward(p);
  if (p.num_rows == 0 || p.columns == 0 || (p.d_gate == nullptr && p.d_up == nullptr)) return;
  const DeviceGuard guard(device);
  const GatedMulPlan plan = choose_plan(p, multiprocessors(device));
  RLK_CUDA_IN_USE("silu_mul", device, gated_mul_backward)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
