// Python's entry to kl.
#include "rlk/ops/kl.h"

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

// Returns (kl, None, None). With d_kl it returns (None, d_logprob, d_importance_weight or None), as far as they are
// wanted.
nb::object kl(Frame frame, nb::handle logprob, nb::handle ref_logprob, nb::handle weight, nb::handle mask,
              nb::handle d_kl, int estimator, bool straight_through, int weight_kind, double input_limit, double limit,
              bool return_d_logprob, bool return_d_importance_weight) {
  TokenArguments tokens(logprob, "logprob", nb::none());
  KlParams p;
  p.spec = {static_cast<KlEstimator>(estimator), straight_through, static_cast<KlWeight>(weight_kind),
            static_cast<float>(input_limit), static_cast<float>(limit)};
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.ref_logprob = tokens.required(ref_logprob, "ref_logprob");
  p.weight = tokens.optional(weight, p.spec.weight == KlWeight::kOldLogprob ? "old_logprob" : "importance_weight");
  p.mask = tokens.optional_mask(mask);
  p.d_kl = tokens.optional(d_kl, "d_kl");
  const bool backward = !d_kl.is_none();
  return Results("kl", tokens.array(), frame)
      .add(&p.kl, tokens.shape(), !backward)
      .add(&p.d_logprob, tokens.shape(), backward && return_d_logprob)
      .add(&p.d_importance_weight, tokens.shape(), backward && return_d_importance_weight)
      .run(rlk::kl, p);
}

const Functions kFunctions([](nb::module_& m) { define(m, "kl", &kl); });

}  // namespace
}  // namespace rlk::bindings
