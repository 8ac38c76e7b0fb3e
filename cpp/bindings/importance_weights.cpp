// Python's entry to importance_weights: fields move from checked arguments to the contract's params, outputs come from the
// caller.
#include "rlk/ops/importance_weights.h"

#include <cstring>

#include "define.h"
#include "gil.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

// ImportanceSpec as Python packs it (ops/importance_weights.py): doubles, in the order of the fields.
ImportanceSpec read_spec(nb::handle packed) {
  constexpr int kFields = 24;
  char* bytes = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(packed.ptr(), &bytes, &size) != 0) throw nb::python_error();
  if (size != kFields * static_cast<Py_ssize_t>(sizeof(double))) throw nb::value_error("spec: expected 24 doubles");
  double values[kFields];
  std::memcpy(values, bytes, sizeof values);
  int next = 0;
  const auto read = [&] { return static_cast<float>(values[next++]); };
  const auto read_integer = [&] { return static_cast<std::int32_t>(values[next++]); };
  ImportanceSpec s;
  s.level = static_cast<ImportanceLevel>(read_integer());
  s.zero_outside = read_integer();
  s.normalize = read_integer();
  for (float* field : {&s.low, &s.high, &s.limit}) *field = read();
  for (RejectionBounds* b : {&s.token, &s.sum, &s.mean, &s.most}) {
    for (float* field : {&b->k1_low, &b->k1_high, &b->k2, &b->k3}) *field = read();
  }
  s.veto_below = read();
  s.rollout_neutral = read_integer();
  return s;
}

// (weights, kept, metrics or None).
nb::object call(nb::handle logprob, nb::handle rollout_logprob, nb::handle mask, nb::handle cu_seqlens, nb::handle spec,
                bool return_metrics, nb::handle allocate, std::uintptr_t stream) {
  TokenArguments tokens(logprob, "logprob", cu_seqlens);
  const Device device = tokens.device();
  require_backend("importance_weights", device);
  ImportanceWeightsParams p;
  p.spec = read_spec(spec);
  p.sequences = tokens.sequences();
  p.logprob = tokens.first();
  p.rollout_logprob = tokens.required(rollout_logprob, "rollout_logprob", false);
  p.mask = tokens.optional_mask(mask);
  const Caller caller = make_caller(logprob, device, allocate, stream);
  const Caller::Fresh weights = caller.empty(tokens.shape(), DType::kFloat32),
                      kept = caller.empty(tokens.shape(), DType::kFloat32);
  p.weights = static_cast<float*>(weights.data);
  p.kept = static_cast<float*>(kept.data);
  Caller::Fresh metrics{nb::none(), nullptr};
  const std::int64_t vector[] = {kImportanceMetrics};
  if (return_metrics) metrics = caller.empty(vector, DType::kFloat32);
  p.metrics = static_cast<float*>(metrics.data);
  const nb::object workspace = take_workspace(caller, importance_weights_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::importance_weights(p, device, caller.stream);
  }
  return nb::make_tuple(weights.array, kept.array, metrics.array);
}

}  // namespace

void bind_importance_weights(nb::module_& m) { define(m, "importance_weights", &call); }

}  // namespace rlk::bindings
