// Python's entry to covariance_mask.
#include "rlk/ops/covariance_mask.h"

#include "call.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

nb::object call(Frame frame, nb::handle logprob, nb::handle old_logprob, nb::handle advantage, nb::handle mask,
                nb::handle cu_seqlens, int kind, double ratio, double lower, double upper, double clip_low,
                double clip_high, std::int64_t seed) {
  const bool entropy = static_cast<CovarianceKind>(kind) == CovarianceKind::kEntropy;
  TokenArguments tokens(logprob, entropy ? "entropy" : "logprob", cu_seqlens);
  CovarianceMaskParams p;
  p.sequences = tokens.sequences();
  require(p.sequences.num_slots() < std::int64_t{1} << 32, tokens.array(), "fewer than 2^32 elements");
  p.logprob = tokens.first();
  p.old_logprob = tokens.optional(old_logprob, "old_logprob");
  if (!entropy) p.advantage = tokens.required(advantage, "advantage", true);
  p.mask = tokens.optional_mask(mask);
  p.kind = static_cast<CovarianceKind>(kind);
  p.ratio = ratio;
  p.lower = static_cast<float>(lower);
  p.upper = static_cast<float>(upper);
  p.clip_low = static_cast<float>(clip_low);
  p.clip_high = static_cast<float>(clip_high);
  p.seed = static_cast<std::uint64_t>(seed);
  return Results("covariance_mask", tokens.array(), frame)
      .add(&p.selected, tokens.shape())
      .run(rlk::covariance_mask, &p, covariance_mask_workspace_bytes);
}

const Functions kFunctions([](nb::module_& m) { define(m, "covariance_mask", &call); });

}  // namespace
}  // namespace rlk::bindings
