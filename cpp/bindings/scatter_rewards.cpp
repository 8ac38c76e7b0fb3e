// Python's entry to scatter_rewards: fields move from checked arguments to the contract's params, outputs come from the
// caller.
#include "rlk/ops/scatter_rewards.h"

#include <cstring>
#include <optional>

#include "define.h"
#include "gil.h"
#include "linear_args.h"
#include "module.h"
#include "tokens.h"
#include "torch_state.h"
#include "workspace.h"

namespace rlk::bindings {
namespace {

// RewardSpec as Python packs it (ops/scatter_rewards.py): doubles, in the order of the fields.
RewardSpec read_spec(nb::handle packed) {
  constexpr int kFields = 10;
  char* bytes = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(packed.ptr(), &bytes, &size) != 0) throw nb::python_error();
  if (size != kFields * static_cast<Py_ssize_t>(sizeof(double))) throw nb::value_error("spec: expected 10 doubles");
  double v[kFields];
  std::memcpy(v, bytes, sizeof v);
  return {static_cast<KlEstimator>(v[0]),  static_cast<float>(v[1]),        static_cast<float>(v[2]),
          static_cast<float>(v[3]),        static_cast<float>(v[4]),        static_cast<float>(v[5]),
          static_cast<std::int64_t>(v[6]), static_cast<std::int64_t>(v[7]), static_cast<SpanPlace>(v[8]),
          static_cast<std::int32_t>(v[9])};
}

class SpanArguments {
 public:
  SpanArguments(nb::handle spans, nb::handle offsets, nb::handle rewards, const TokenArguments& of)
      : spans_(read_spans(spans)),
        offsets_(offsets, of.device(), "span_offsets"),
        rewards_(rewards, "span_rewards", {DType::kFloat32}, spans_.view().shape[0], "one a span", of.device()) {
    require_device(spans_, of.device());
    offsets_.require_given();
    rewards_.require_contiguous();
    if (const std::int64_t n = of.sequences().num_sequences; offsets_.num_sequences != n) {
      argument_error("span_offsets", "expected shape [" + std::to_string(n + 1) + "] (num_sequences + 1), got " + "[" +
                                         std::to_string(offsets_.num_sequences + 1) + "]");
    }
  }
  void put(ScatterRewardsParams* p) const {
    p->spans = {spans_.view().data, spans_.view().dtype};
    p->span_offsets = offsets_.offsets;
    p->span_rewards = rewards_.floats();
    p->num_spans = spans_.view().shape[0];
  }

 private:
  Array spans_;
  OffsetsArgument offsets_;
  VectorArgument rewards_;
};

// (rewards, costs or None, combined or None, lengths). lagrange: None, a number, or one element on the device.
nb::object call(nb::handle mask, nb::handle rewards, nb::handle token_rewards, nb::handle spans,
                nb::handle span_offsets, nb::handle span_rewards, nb::handle logprob, nb::handle ref_logprob,
                nb::handle cost, nb::handle cu_seqlens, nb::handle lagrange, nb::handle spec, nb::handle allocate,
                std::uintptr_t stream) {
  TokenArguments tokens(mask, "mask", cu_seqlens, TokenKind::kMask);
  const Device device = tokens.device();
  require_backend("scatter_rewards", device);
  const Sequences& q = tokens.sequences();
  const VectorArgument of_sequences(rewards, "rewards", {DType::kFloat32}, q.num_sequences, "one a sequence", device),
      costs(cost, "cost", {DType::kFloat32}, q.num_sequences, "one a sequence", device);
  ScatterRewardsParams p;
  p.spec = read_spec(spec);
  p.sequences = q;
  p.mask = tokens.first_mask();
  p.rewards = {of_sequences.floats(), of_sequences.stride(), 0};
  p.token_rewards = tokens.optional(token_rewards, "token_rewards", false);
  p.logprob = tokens.optional(logprob, "logprob", false);
  p.ref_logprob = tokens.optional(ref_logprob, "ref_logprob", false);
  p.cost = {costs.floats(), costs.stride(), 0};
  std::optional<SpanArguments> of_spans;
  if (!spans.is_none()) of_spans.emplace(spans, span_offsets, span_rewards, tokens);
  if (of_spans) of_spans->put(&p);
  p.lagrange_value = tokens.number(lagrange, "lagrange", &p.lagrange);

  const Caller caller = make_caller(mask, device, allocate, stream);
  const bool wanted[] = {true, !cost.is_none(), !lagrange.is_none()};
  float** const outputs[] = {&p.to_tokens, &p.costs, &p.combined};
  nb::object arrays[] = {nb::none(), nb::none(), nb::none()};
  for (int i = 0; i < 3; ++i) {
    if (!wanted[i]) continue;
    Caller::Fresh fresh = caller.empty(tokens.shape(), DType::kFloat32);
    *outputs[i] = static_cast<float*>(fresh.data);
    arrays[i] = std::move(fresh.array);
  }
  const std::int64_t num[] = {q.num_sequences};
  const Caller::Fresh lengths = caller.empty(num, DType::kInt64);
  p.lengths = static_cast<std::int64_t*>(lengths.data);
  const nb::object workspace = take_workspace(caller, scatter_rewards_workspace_bytes(p, device), &p.workspace);
  {
    const ReleasedGil released;
    rlk::scatter_rewards(p, device, caller.stream);
  }
  return nb::make_tuple(arrays[0], arrays[1], arrays[2], lengths.array);
}

}  // namespace

void bind_scatter_rewards(nb::module_& m) { define(m, "scatter_rewards", &call); }

}  // namespace rlk::bindings
