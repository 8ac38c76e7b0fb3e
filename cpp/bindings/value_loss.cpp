// Python's entry to value_loss.
#include "rlk/ops/value_loss.h"

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

// Returns (loss, metrics, d_value or None).
nb::object loss(Frame frame, nb::handle value, nb::handle old_value, nb::handle returns, nb::handle mask,
                nb::handle cu_seqlens, nb::handle token_weight, double clip, double huber, int denominator_kind,
                bool sequence_mean, double horizon, double scale, nb::handle denominator, bool return_d_value) {
  TokenArguments tokens(value, "value", cu_seqlens);
  ValueLossParams p;
  p.spec = {static_cast<float>(clip),
            static_cast<float>(huber),
            static_cast<DenominatorKind>(denominator_kind),
            sequence_mean,
            static_cast<float>(horizon),
            static_cast<float>(scale)};
  p.sequences = tokens.sequences();
  p.value = tokens.first();
  p.old_value = tokens.optional(old_value, "old_value");
  p.returns = tokens.required(returns, "returns");
  p.mask = tokens.optional_mask(mask);
  p.token_weight = tokens.optional(token_weight, "token_weight");
  p.denominator_value = tokens.denominator(denominator, &p.denominator);
  return Results("value_loss", tokens.array(), frame)
      .add(&p.loss, {})
      .add(&p.metrics, {kValueMetrics})
      .add(&p.d_value, tokens.shape(), return_d_value)
      .run(rlk::value_loss, &p, value_loss_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "value_loss", &loss); });

}  // namespace
}  // namespace rlk::bindings
