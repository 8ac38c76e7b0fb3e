// Python's entry to kl: fields move from checked arguments to the contract's params, outputs come from the caller.
#include "rlk/ops/kl.h"

#include "define.h"
#include "gil.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"

namespace rlk::bindings {
namespace {

// Returns (kl, None, None); given d_kl, (None, d_logprob, d_importance_weight or None), those that were asked for.
nb::object kl(nb::handle logprob, nb::handle ref_logprob, nb::handle weight, nb::handle mask, nb::handle d_kl,
              int estimator, bool straight_through, int weight_kind, double input_limit, double limit,
              bool return_d_logprob, bool return_d_importance_weight, nb::handle allocate, std::uintptr_t stream) {
  TokenArguments tokens(logprob, "logprob", nb::none());
  const Device device = tokens.device();
  require_backend("kl", device);
  KlParams p;
  p.spec = {static_cast<KlEstimator>(estimator), straight_through, static_cast<KlWeight>(weight_kind),
            static_cast<float>(input_limit), static_cast<float>(limit)};
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.ref_logprob = tokens.required(ref_logprob, "ref_logprob", false);
  p.weight =
      tokens.optional(weight, p.spec.weight == KlWeight::kOldLogprob ? "old_logprob" : "importance_weight", false);
  p.mask = tokens.optional_mask(mask);
  p.d_kl = tokens.optional(d_kl, "d_kl", false);
  const Caller caller = make_caller(logprob, device, allocate, stream);
  Caller::Fresh fresh[3] = {{nb::none(), nullptr}, {nb::none(), nullptr}, {nb::none(), nullptr}};
  float** const outputs[] = {&p.kl, &p.d_logprob, &p.d_importance_weight};
  const bool is_backward = p.d_kl.data != nullptr || !d_kl.is_none();
  const bool wanted[] = {!is_backward, is_backward && return_d_logprob, is_backward && return_d_importance_weight};
  for (int i = 0; i < 3; ++i) {
    if (!wanted[i]) continue;
    fresh[i] = caller.empty(tokens.shape(), DType::kFloat32);
    *outputs[i] = static_cast<float*>(fresh[i].data);
  }
  {
    const ReleasedGil released;
    rlk::kl(p, device, caller.stream);
  }
  return nb::make_tuple(fresh[0].array, fresh[1].array, fresh[2].array);
}

}  // namespace

void bind_kl(nb::module_& m) { define(m, "kl", &kl); }

}  // namespace rlk::bindings
