// Python's entry to masked_whiten.
#include "rlk/ops/masked_whiten.h"

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

// Returns (y, mean or None, var or None).
nb::object call(Frame frame, nb::handle x, nb::handle mask, nb::handle cu_seqlens, nb::handle eps, bool shift_mean,
                bool unbiased, bool return_stats) {
  TokenArguments tokens(x, "x", cu_seqlens);
  MaskedWhitenParams p;
  p.sequences = tokens.sequences();
  p.x = rows_of(tokens.first());
  p.mask = tokens.optional_mask(mask);
  p.eps = read_positive(eps, "eps");
  p.shift_mean = shift_mean;
  p.unbiased = unbiased;
  p.y = tokens.output();
  return Results("masked_whiten", tokens.array(), frame)
      .add(&p.y.data, tokens.shape())
      .add(&p.mean, {}, return_stats)
      .add(&p.var, {}, return_stats)
      .run(rlk::masked_whiten, &p, masked_whiten_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "masked_whiten", &call); });

}  // namespace
}  // namespace rlk::bindings
