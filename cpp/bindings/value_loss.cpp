// Python's entry to value_loss: fields move from checked arguments to the contract's params, outputs come from the caller.
#include "rlk/ops/value_loss.h"

#include "define.h"
#include "gil.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

// (loss, metrics, d_value or None).
nb::object loss(nb::handle value, nb::handle old_value, nb::handle returns, nb::handle mask, nb::handle cu_seqlens,
                nb::handle token_weight, double clip, double huber, int denominator_kind, bool sequence_mean,
                double horizon, double scale, nb::handle denominator, bool return_d_value, nb::handle allocate,
                std::uintptr_t stream) {
  TokenArguments tokens(value, "value", cu_seqlens);
  const Device device = tokens.device();
  require_backend("value_loss", device);
  ValueLossParams p;
  p.spec = {static_cast<float>(clip),
            static_cast<float>(huber),
            static_cast<DenominatorKind>(denominator_kind),
            sequence_mean,
            static_cast<float>(horizon),
            static_cast<float>(scale)};
  p.sequences = tokens.sequences();
  p.value = tokens.first();
  p.old_value = tokens.optional(old_value, "old_value", false);
  p.returns = tokens.required(returns, "returns", false);
  p.mask = tokens.optional_mask(mask);
  p.token_weight = tokens.optional(token_weight, "token_weight", false);
  p.denominator_value = tokens.denominator(denominator, &p.denominator);
  const Caller caller = make_caller(value, device, allocate, stream);
  const std::int64_t vector[] = {kValueMetrics};
  Caller::Fresh of_loss = caller.empty({}, DType::kFloat32), metrics = caller.empty(vector, DType::kFloat32);
  Caller::Fresh d_value{nb::none(), nullptr};
  if (return_d_value) d_value = caller.empty(tokens.shape(), DType::kFloat32);
  p.loss = static_cast<float*>(of_loss.data);
  p.metrics = static_cast<float*>(metrics.data);
  p.d_value = static_cast<float*>(d_value.data);
  const nb::object workspace = take_workspace(caller, value_loss_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::value_loss(p, device, caller.stream);
  }
  return nb::make_tuple(of_loss.array, metrics.array, d_value.array);
}

}  // namespace

void bind_value_loss(nb::module_& m) { define(m, "value_loss", &loss); }

}  // namespace rlk::bindings
