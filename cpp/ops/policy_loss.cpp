// The operator `policy_loss` on every device: the loss, then the metrics of its ratios.
#include "rlk/ops/policy_loss.h"

#include <algorithm>

#include "rlk/backends.h"
#include "rlk/ops/mismatch_metrics.h"

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
  m.workspace = p.workspace;  // the loss no longer needs this memory
  return m;
}

}  // namespace

std::int64_t policy_loss_workspace_bytes(const PolicyLossParams& p, Device device) {
  const std::int64_t bytes = policy_loss_alone_workspace_bytes(p, device);
  if (p.ratio_metrics == nullptr) return bytes;
  return std::max(bytes, mismatch_metrics_workspace_bytes(ratio_metrics(p), device));
}

void policy_loss(const PolicyLossParams& p, Device device, Stream stream) {
  policy_loss_alone(p, device, stream);
  if (p.ratio_metrics != nullptr) mismatch_metrics(ratio_metrics(p), device, stream);
}

}  // namespace rlk
