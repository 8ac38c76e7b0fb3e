// Python's entry to gae, discounted_returns and vtrace.
#include "rlk/ops/gae.h"

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

float read_share(nb::handle value, const char* name) {
  return read_number_in(value, name, 0.0f, 1.0f, "a number in [0, 1]");
}

// Returns (advantages or None, returns).
nb::object run(Frame* frame, GaeParams p, TokenArguments* tokens, nb::handle mask, nb::handle bootstrap) {
  const VectorArgument boots(frame, bootstrap, "bootstrap", kFloat32, tokens->sequences().num_sequences,
                             "num_sequences", tokens->device());
  boots.require_contiguous();
  p.sequences = tokens->sequences();
  p.rewards = rows_of(tokens->first());
  p.mask = tokens->mask(mask);
  p.bootstrap = boots.floats();
  p.advantages = p.returns = tokens->output();
  return Results("gae", tokens->array(), frame)
      .add(&p.advantages.data, tokens->shape(), p.kind != GaeKind::kDiscountedReturns)
      .add(&p.returns.data, tokens->shape())
      .run(rlk::gae, p);
}

nb::object call_gae(Frame* frame, nb::handle rewards, nb::handle values, nb::handle mask, nb::handle cu_seqlens,
                    nb::handle bootstrap, nb::handle gamma, nb::handle lam) {
  TokenArguments tokens(frame, rewards, "rewards", cu_seqlens);
  GaeParams p;
  p.kind = GaeKind::kGae;
  p.values = rows_of(tokens.optional(values, "values"));
  p.gamma = read_share(gamma, "gamma");
  p.lam = read_share(lam, "lam");
  return run(frame, p, &tokens, mask, bootstrap);
}

nb::object call_discounted_returns(Frame* frame, nb::handle rewards, nb::handle mask, nb::handle cu_seqlens,
                                   nb::handle gamma, bool reset) {
  TokenArguments tokens(frame, rewards, "rewards", cu_seqlens);
  GaeParams p;
  p.kind = GaeKind::kDiscountedReturns;
  p.gamma = read_share(gamma, "gamma");
  p.reset = reset;
  return run(frame, p, &tokens, mask, nb::none());
}

nb::object call_vtrace(Frame* frame, nb::handle rewards, nb::handle values, nb::handle logprob,
                       nb::handle rollout_logprob, nb::handle mask, nb::handle cu_seqlens, nb::handle bootstrap,
                       nb::handle gamma, nb::handle lam, nb::handle rho_bar, nb::handle c_bar, bool rollout_neutral) {
  TokenArguments tokens(frame, rewards, "rewards", cu_seqlens);
  GaeParams p;
  p.kind = GaeKind::kVtrace;
  p.values = rows_of(tokens.optional(values, "values"));
  p.logprob = rows_of(tokens.optional(logprob, "logprob"));
  p.rollout_logprob = rows_of(tokens.optional(rollout_logprob, "rollout_logprob"));
  p.gamma = read_share(gamma, "gamma");
  p.lam = read_share(lam, "lam");
  p.rho_bar = read_positive(rho_bar, "rho_bar");
  p.c_bar = read_positive(c_bar, "c_bar");
  p.rollout_neutral = rollout_neutral;
  return run(frame, p, &tokens, mask, bootstrap);
}

const Functions kFunctions([](nb::module_& m) {
  define(m, "gae", &call_gae);
  define(m, "discounted_returns", &call_discounted_returns);
  define(m, "vtrace", &call_vtrace);
});

}  // namespace
}  // namespace rlk::bindings
