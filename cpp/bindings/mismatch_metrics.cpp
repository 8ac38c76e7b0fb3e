// Python's entry to mismatch_metrics: fields move from checked arguments to the contract's params, the vector comes from the
// caller.
#include "rlk/ops/mismatch_metrics.h"

#include "define.h"
#include "gil.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

nb::object call(nb::handle logprob_train, nb::handle logprob_rollout, nb::handle mask, nb::handle cu_seqlens,
                double limit, bool rollout_neutral, nb::handle allocate, std::uintptr_t stream) {
  TokenArguments tokens(logprob_train, "logprob_train", cu_seqlens);
  const Device device = tokens.device();
  require_backend("mismatch_metrics", device);
  MismatchMetricsParams p;
  p.sequences = tokens.sequences();
  p.logprob_train = tokens.first();
  p.logprob_rollout = tokens.required(logprob_rollout, "logprob_rollout", false);
  p.mask = tokens.optional_mask(mask);
  p.limit = static_cast<float>(limit);
  p.rollout_neutral = rollout_neutral;
  const Caller caller = make_caller(logprob_train, device, allocate, stream);
  const std::int64_t vector[] = {kMismatchMetrics};
  const Caller::Fresh metrics = caller.empty(vector, DType::kFloat32);
  p.metrics = static_cast<float*>(metrics.data);
  const nb::object workspace = take_workspace(caller, mismatch_metrics_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::mismatch_metrics(p, device, caller.stream);
  }
  return metrics.array;
}

}  // namespace

void bind_mismatch_metrics(nb::module_& m) { define(m, "mismatch_metrics", &call); }

}  // namespace rlk::bindings
