// Python's entry to policy_loss: fields move from checked arguments to the contract's params, outputs come from the caller.
#include "rlk/ops/policy_loss.h"

#include <cstring>
#include <optional>
#include <type_traits>

#include "define.h"
#include "gil.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

// PolicySpec as Python packs it (ops/policy_spec.py): doubles, in the order of the fields.
PolicySpec read_spec(nb::handle packed) {
  constexpr int kFields = 44;
  char* bytes = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(packed.ptr(), &bytes, &size) != 0) throw nb::python_error();
  if (size != kFields * static_cast<Py_ssize_t>(sizeof(double))) throw nb::value_error("spec: expected a PolicySpec");
  double values[kFields];
  std::memcpy(values, bytes, sizeof values);
  int next = 0;
  const auto read = [&](auto* field) {
    using Field = std::remove_pointer_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, float>) {
      *field = static_cast<float>(values[next++]);
    } else {
      *field = static_cast<Field>(static_cast<std::int32_t>(values[next++]));
    }
  };
  PolicySpec s;
  const auto read_all = [&](auto*... fields) { (read(fields), ...); };
  read_all(&s.level, &s.surrogate, &s.straight_through, &s.log_ratio_min, &s.log_ratio_max, &s.clip_low, &s.clip_high,
           &s.ratio_cap, &s.dual_clip, &s.tau_positive, &s.tau_negative, &s.k_positive, &s.lambda_positive,
           &s.k_negative, &s.lambda_negative, &s.quadratic, &s.kl, &s.kl_straight_through, &s.kl_times_ratio,
           &s.kl_coef, &s.kl_input_limit, &s.kl_limit, &s.selected_kl, &s.selected_drops, &s.entropy_coef,
           &s.entropy_scale, &s.entropy_token_mean, &s.importance, &s.importance_of_current, &s.importance_mask,
           &s.gate, &s.importance_low, &s.importance_high, &s.importance_limit, &s.gate_low, &s.gate_high,
           &s.drop_above, &s.drop_by_rollout, &s.denominator, &s.sequence_mean, &s.horizon, &s.scale,
           &s.kl_gradient_ratio, &s.rollout_neutral);
  if (next != kFields) throw nb::value_error("spec: expected a PolicySpec");
  return s;
}

// (loss, metrics with those of the ratio behind them, d_logprob or None, d_entropy or None).
nb::object loss(nb::handle logprob, nb::handle old_logprob, nb::handle advantage, nb::handle mask,
                nb::handle cu_seqlens, nb::handle ref_logprob, nb::handle importance, nb::handle entropy,
                nb::handle selected, nb::handle token_weight, nb::handle spec, nb::handle denominator,
                bool ratio_metrics, bool return_d_logprob, bool return_d_entropy, nb::handle allocate,
                std::uintptr_t stream) {
  TokenArguments tokens(logprob, "logprob", cu_seqlens);
  const Device device = tokens.device();
  require_backend("policy_loss", device);
  PolicyLossParams p;
  p.spec = read_spec(spec);
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.old_logprob = tokens.optional(old_logprob, "old_logprob", false);
  p.advantage = tokens.required(advantage, "advantage", true);
  p.mask = tokens.mask(mask);
  p.ref_logprob = tokens.optional(ref_logprob, "ref_logprob", false);
  const bool given = p.spec.importance == ImportanceLevel::kGiven;
  p.importance = tokens.optional(importance, given ? "importance_weight" : "rollout_logprob", given);
  p.entropy = tokens.optional(entropy, "entropy", false);
  p.selected = tokens.optional(selected, "selected", false);
  p.token_weight = tokens.optional(token_weight, "token_weight", false);
  p.denominator_value = tokens.denominator(denominator, &p.denominator);
  const Caller caller = make_caller(logprob, device, allocate, stream);
  const std::int64_t vector[] = {kPolicyMetrics + (ratio_metrics ? kMismatchMetrics : 0)};
  Caller::Fresh of_loss = caller.empty({}, DType::kFloat32), metrics = caller.empty(vector, DType::kFloat32);
  Caller::Fresh d_logprob{nb::none(), nullptr}, d_entropy = d_logprob;
  if (return_d_logprob) d_logprob = caller.empty(tokens.shape(), DType::kFloat32);
  if (return_d_entropy && !entropy.is_none()) d_entropy = caller.empty(tokens.shape(), DType::kFloat32);
  p.loss = static_cast<float*>(of_loss.data);
  p.metrics = static_cast<float*>(metrics.data);
  if (ratio_metrics) p.ratio_metrics = p.metrics + kPolicyMetrics;
  p.d_logprob = static_cast<float*>(d_logprob.data);
  p.d_entropy = static_cast<float*>(d_entropy.data);
  const nb::object workspace = take_workspace(caller, policy_loss_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::policy_loss(p, device, caller.stream);
  }
  return nb::make_tuple(of_loss.array, metrics.array, d_logprob.array, d_entropy.array);
}

// Gradients times their factor, in place; nothing is read where it is 1.
nb::object scale(nb::handle first, nb::handle second, nb::handle factor, std::uintptr_t stream) {
  const Array a(first, "d_logprob", "float32"), f(factor, "factor", "float32");
  std::optional<Array> b;
  ScaleGradientsParams p;
  p.first = static_cast<float*>(a.view().data);
  p.count = a.view().num_elements();
  if (!second.is_none()) {
    b.emplace(second, "d_entropy", "float32");
    p.second = static_cast<float*>(b->view().data);
  }
  p.factor = static_cast<const float*>(f.view().data);
  const Caller caller = make_caller(first, a.view().device, nb::none(), stream);
  {
    const ReleasedGil released;
    rlk::scale_gradients(p, a.view().device, caller.stream);
  }
  return nb::none();
}

}  // namespace

void bind_policy_loss(nb::module_& m) {
  define(m, "policy_loss", &loss);
  define(m, "scale_gradients", &scale);
}

}  // namespace rlk::bindings
