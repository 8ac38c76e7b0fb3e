// Python's entry to mismatch_metrics.
#include "rlk/ops/mismatch_metrics.h"

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

nb::object call(Frame frame, nb::handle logprob_train, nb::handle logprob_rollout, nb::handle mask,
                nb::handle cu_seqlens, double limit, bool rollout_neutral) {
  TokenArguments tokens(logprob_train, "logprob_train", cu_seqlens);
  MismatchMetricsParams p;
  p.sequences = tokens.sequences();
  p.logprob_train = tokens.first();
  p.logprob_rollout = tokens.required(logprob_rollout, "logprob_rollout");
  p.mask = tokens.optional_mask(mask);
  p.limit = static_cast<float>(limit);
  p.rollout_neutral = rollout_neutral;
  return Results("mismatch_metrics", tokens.array(), frame)
      .add(&p.metrics, {kMismatchMetrics})
      .run(rlk::mismatch_metrics, &p, mismatch_metrics_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "mismatch_metrics", &call); });

}  // namespace
}  // namespace rlk::bindings
