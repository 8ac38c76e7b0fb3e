// Python's entry to importance_weights.
#include "rlk/ops/importance_weights.h"

#include "call.h"
#include "packed_fields.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

ImportanceSpec read_spec(nb::handle packed) {
  ImportanceSpec s;
  PackedFields fields(packed, "24 doubles");
  fields.read(&s.level, &s.zero_outside, &s.normalize, &s.low, &s.high, &s.limit);
  for (RejectionBounds* b : {&s.token, &s.sum, &s.mean, &s.most}) fields.read(&b->k1_low, &b->k1_high, &b->k2, &b->k3);
  fields.read(&s.veto_below, &s.rollout_neutral);
  fields.require_end();
  return s;
}

// Returns (weights, kept, metrics or None).
nb::object call(Frame frame, nb::handle logprob, nb::handle rollout_logprob, nb::handle mask, nb::handle cu_seqlens,
                nb::handle spec, bool return_metrics) {
  TokenArguments tokens(logprob, "logprob", cu_seqlens);
  ImportanceWeightsParams p;
  p.spec = read_spec(spec);
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.rollout_logprob = tokens.required(rollout_logprob, "rollout_logprob");
  p.mask = tokens.optional_mask(mask);
  return Results("importance_weights", tokens.array(), frame)
      .add(&p.weights, tokens.shape())
      .add(&p.kept, tokens.shape())
      .add(&p.metrics, {kImportanceMetrics}, return_metrics)
      .run(rlk::importance_weights, &p, importance_weights_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "importance_weights", &call); });

}  // namespace
}  // namespace rlk::bindings
