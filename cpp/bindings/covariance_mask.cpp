// Python's entry to covariance_mask: fields move from checked arguments to the contract's params, the mask comes from the
// caller.
#include "rlk/ops/covariance_mask.h"

#include <string>

#include "define.h"
#include "gil.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

nb::object call(nb::handle logprob, nb::handle old_logprob, nb::handle advantage, nb::handle mask,
                nb::handle cu_seqlens, int kind, double ratio, double lower, double upper, double clip_low,
                double clip_high, std::int64_t seed, nb::handle allocate, std::uintptr_t stream) {
  const bool entropy = static_cast<CovarianceKind>(kind) == CovarianceKind::kEntropy;
  const char* const first = entropy ? "entropy" : "logprob";
  TokenArguments tokens(logprob, first, cu_seqlens);
  const Device device = tokens.device();
  require_backend("covariance_mask", device);
  CovarianceMaskParams p;
  p.sequences = tokens.sequences();
  if (p.sequences.num_slots() >= std::int64_t{1} << 32) {
    throw nb::value_error((std::string(first) + ": expected fewer than 2^32 elements").c_str());
  }
  p.logprob = tokens.first();
  p.old_logprob = tokens.optional(old_logprob, "old_logprob", false);
  if (!entropy) p.advantage = tokens.required(advantage, "advantage", true);
  p.mask = tokens.optional_mask(mask);
  p.kind = static_cast<CovarianceKind>(kind);
  p.ratio = ratio;
  p.lower = static_cast<float>(lower);
  p.upper = static_cast<float>(upper);
  p.clip_low = static_cast<float>(clip_low);
  p.clip_high = static_cast<float>(clip_high);
  p.seed = static_cast<std::uint64_t>(seed);
  const Caller caller = make_caller(logprob, device, allocate, stream);
  const Caller::Fresh selected = caller.empty(tokens.shape(), DType::kFloat32);
  p.selected = static_cast<float*>(selected.data);
  const nb::object workspace = take_workspace(caller, covariance_mask_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::covariance_mask(p, device, caller.stream);
  }
  return selected.array;
}

}  // namespace

void bind_covariance_mask(nb::module_& m) { define(m, "covariance_mask", &call); }

}  // namespace rlk::bindings
