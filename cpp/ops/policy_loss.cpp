// Dispatch of policy_loss by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/policy_loss.h"

#include <algorithm>

#include "cpp/cpu/policy_loss.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/policy_loss/policy_loss.h"
#endif
#if RLK_WITH_HIP
#include "hip/policy_loss/policy_loss.h"
#endif

namespace rlk {
namespace {

MismatchMetricsParams ratio_metrics(const PolicyLossParams& p) {
  MismatchMetricsParams m;
  m.sequences = p.sequences;
  m.logprob_train = p.logprob;
  m.logprob_rollout = p.old_logprob.data != nullptr ? p.old_logprob : p.logprob;
  m.mask = p.mask;
  m.limit = kRatioMetricsLimit;
  m.metrics = p.ratio_metrics;
  m.workspace = p.workspace;  // after the loss, which has no more use for it
  return m;
}

std::int64_t loss_workspace_bytes([[maybe_unused]] const PolicyLossParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::policy_loss_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::policy_loss_workspace_bytes(p);
#endif
  no_backend("policy_loss", device);
}

void loss(const PolicyLossParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::policy_loss(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::policy_loss(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::policy_loss(p, device.index, stream);
#endif
  no_backend("policy_loss", device);
}

}  // namespace

void require_policy_loss_backend(Device device) { require_backend("policy_loss", device); }

std::int64_t policy_loss_workspace_bytes(const PolicyLossParams& p, Device device) {
  const std::int64_t bytes = loss_workspace_bytes(p, device);
  if (p.ratio_metrics == nullptr) return bytes;
  return std::max(bytes, mismatch_metrics_workspace_bytes(ratio_metrics(p), device));
}

void policy_loss(const PolicyLossParams& p, Device device, Stream stream) {
  loss(p, device, stream);
  if (p.ratio_metrics != nullptr) mismatch_metrics(ratio_metrics(p), device, stream);
}

void scale_gradients(const ScaleGradientsParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::scale_gradients(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::scale_gradients(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::scale_gradients(p, device.index, stream);
#endif
  no_backend("policy_loss", device);
}

}  // namespace rlk
