// Python's entry to gae, discounted_returns and vtrace: fields move from checked arguments to the contract's params, outputs
// come from the caller.
#include "rlk/ops/gae.h"

#include <limits>

#include "define.h"
#include "gil.h"
#include "module.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

float read_share(nb::handle value, const char* name) {
  return read_number_in(value, name, 0.0f, 1.0f, "a number in [0, 1]");
}
float read_bound(nb::handle value, const char* name) {
  return read_number_in(value, name, std::numeric_limits<float>::min(), kLargest, "a finite number > 0 in float32");
}

// (advantages or None, returns).
nb::object run(GaeParams p, nb::handle tokens, TokenArguments* given, nb::handle mask, nb::handle bootstrap,
               nb::handle allocate, std::uintptr_t stream) {
  TokenArguments& sequences = *given;
  const Device device = sequences.device();
  const VectorArgument boots(bootstrap, "bootstrap", {DType::kFloat32}, sequences.sequences().num_sequences,
                             "num_sequences", device);
  boots.require_contiguous();
  p.sequences = sequences.sequences();
  p.rewards = rows_of(sequences.first());
  p.mask = sequences.optional_mask(mask);
  p.bootstrap = boots.floats();
  const Caller caller = make_caller(tokens, device, allocate, stream);
  const auto fresh = [&](TokenArray<float>* to) {
    Caller::Fresh out = caller.empty(sequences.shape(), DType::kFloat32);
    *to = {static_cast<float*>(out.data), sequences.contiguous_stride()};
    return out.array;
  };
  nb::object advantages = nb::none();
  if (p.kind != GaeKind::kDiscountedReturns) advantages = fresh(&p.advantages);
  nb::object returns = fresh(&p.returns);
  {
    const ReleasedGil released;
    rlk::gae(p, device, caller.stream);
  }
  return nb::make_tuple(advantages, returns);
}

nb::object call_gae(nb::handle rewards, nb::handle values, nb::handle mask, nb::handle cu_seqlens, nb::handle bootstrap,
                    nb::handle gamma, nb::handle lam, nb::handle allocate, std::uintptr_t stream) {
  TokenArguments sequences(rewards, "rewards", cu_seqlens);
  require_backend("gae", sequences.device());
  GaeParams p;
  p.kind = GaeKind::kGae;
  p.values = rows_of(sequences.optional(values, "values", false));
  p.gamma = read_share(gamma, "gamma");
  p.lam = read_share(lam, "lam");
  return run(p, rewards, &sequences, mask, bootstrap, allocate, stream);
}

nb::object call_discounted_returns(nb::handle rewards, nb::handle mask, nb::handle cu_seqlens, nb::handle gamma,
                                   bool reset, nb::handle allocate, std::uintptr_t stream) {
  TokenArguments sequences(rewards, "rewards", cu_seqlens);
  require_backend("gae", sequences.device());
  GaeParams p;
  p.kind = GaeKind::kDiscountedReturns;
  p.gamma = read_share(gamma, "gamma");
  p.reset = reset;
  return run(p, rewards, &sequences, mask, nb::none(), allocate, stream);
}

nb::object call_vtrace(nb::handle rewards, nb::handle values, nb::handle logprob, nb::handle rollout_logprob,
                       nb::handle mask, nb::handle cu_seqlens, nb::handle bootstrap, nb::handle gamma, nb::handle lam,
                       nb::handle rho_bar, nb::handle c_bar, bool rollout_neutral, nb::handle allocate,
                       std::uintptr_t stream) {
  TokenArguments sequences(rewards, "rewards", cu_seqlens);
  require_backend("gae", sequences.device());
  GaeParams p;
  p.kind = GaeKind::kVtrace;
  p.values = rows_of(sequences.optional(values, "values", false));
  p.logprob = rows_of(sequences.optional(logprob, "logprob", false));
  p.rollout_logprob = rows_of(sequences.optional(rollout_logprob, "rollout_logprob", false));
  p.gamma = read_share(gamma, "gamma");
  p.lam = read_share(lam, "lam");
  p.rho_bar = read_bound(rho_bar, "rho_bar");
  p.c_bar = read_bound(c_bar, "c_bar");
  p.rollout_neutral = rollout_neutral;
  return run(p, rewards, &sequences, mask, bootstrap, allocate, stream);
}

}  // namespace

void bind_gae(nb::module_& m) {
  define(m, "gae", &call_gae);
  define(m, "discounted_returns", &call_discounted_returns);
  define(m, "vtrace", &call_vtrace);
}

}  // namespace rlk::bindings
