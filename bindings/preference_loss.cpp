// Python's entry to the operator `preference_loss`.
#include "rlk/ops/preference_loss.h"

#include "call.h"

namespace rlk::bindings {
namespace {

// Names of a side's arguments: policy, reference, aligned and count. The last entry is a text for errors: it says which
// array decides the length.
using Names = const char* const[5];
constexpr Names kChosen = {"policy_chosen", "ref_chosen", "chosen_aligned", "chosen_count", "that of policy_chosen"};
constexpr Names kRejected = {"policy_rejected", "ref_rejected", "rejected_aligned", "rejected_count",
                             "that of policy_rejected"};

// Reads the arrays of one side. Optional arrays have the length of the side's policy. For pairs, the policy must have
// the length of the `other` side's policy.
PreferenceSide read_side(Frame* frame, const Names& names, nb::handle policy, nb::handle reference, nb::handle count,
                         nb::handle aligned, const PreferenceSide* other) {
  const VectorArgument first(frame, policy, names[0], kFloat32, other ? other->num : -1,
                             other ? "that of policy_chosen" : "num_pairs",
                             other ? "" : "; sums over tokens are those of rk.sequence_logprob(logprob, mask).sum");
  PreferenceSide side;
  first.put(&side.policy, &side.policy_stride);
  side.num = first.size();
  const auto read = [&]<class T>(int i, nb::handle object, const Dtypes& dtypes, const T** data, std::int64_t* stride) {
    VectorArgument(frame, object, names[i], dtypes, side.num, names[4]).put(data, stride);
  };
  read(1, reference, kFloat32, &side.reference, &side.reference_stride);
  read(2, aligned, kFloat32, &side.aligned, &side.aligned_stride);
  read(3, count, kInt64, &side.count, &side.count_stride);
  return side;
}

// Returns (losses, chosen_rewards, rejected_rewards, metrics, d_chosen, d_rejected, ranks or None). `numbers` has the
// order of the contract's fields.
RLK_FUNCTION(preference_loss,
             (policy_chosen, policy_rejected, ref_chosen, ref_rejected, chosen_count, rejected_count, chosen_aligned,
              rejected_aligned, kl),
             int kind, int sort, int score, int average, nb::list numbers) {
  require_given(policy_chosen, "policy_chosen");
  require_given(policy_rejected, "policy_rejected");
  PreferenceLossParams p;
  p.chosen = read_side(frame, kChosen, policy_chosen, ref_chosen, chosen_count, chosen_aligned, nullptr);
  RLK_FILL(p, as_given, kind, sort, score, average)
  float* const fields[] = {&p.beta,     &p.label_smoothing, &p.margin,        &p.tau,
                           &p.alpha,    &p.nll_weight,      &p.half,          &p.log_keep,
                           &p.log_flip, &p.unflipped,       &p.chosen_weight, &p.rejected_weight};
  for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = static_cast<float>(nb::cast<double>(numbers[i]));
  const bool pairs = p.kind != Preference::kKto;
  p.rejected = read_side(frame, kRejected, policy_rejected, ref_rejected, rejected_count, rejected_aligned,
                         pairs ? &p.chosen : nullptr);
  const VectorArgument of_kl(frame, kl, "kl", kFloat32, 1, "that of one number");
  p.kl = of_kl.floats();
  const std::int64_t w = p.chosen.num, l = p.rejected.num;
  Results results("preference_loss", frame);
  const bool sorts = p.sort != PreferenceSort::kNone;
  results.add(&p.losses, {pairs ? w : w + l})
      .add(&p.chosen.reward, {w})
      .add(&p.rejected.reward, {l})
      .add(&p.metrics, {kPreferenceMetrics})
      .add(&p.chosen.d_policy, {w})
      .add(&p.rejected.d_policy, {l})
      .add(&p.ranks, {2, w}, sorts);
  Caller::Fresh order;
  if (sorts) order = results.caller().empty({2, w}, DType::kInt32);
  p.order = static_cast<std::int32_t*>(order.data);
  return results.run(rlk::preference_loss, p);
}

// Returns (d_policy_chosen, d_policy_rejected). `sort` is the value that the forward got.
RLK_FUNCTION(preference_loss_backward, (dlosses, d_chosen, d_rejected, ranks), int sort) {
  const VectorArgument in(frame, dlosses, "dlosses", kFloat32, "num_losses");
  const Array &w = frame->read(d_chosen, "d_chosen", kFloat32), &l = frame->read(d_rejected, "d_rejected", kFloat32);
  for (const Array* a : {&w, &l}) {
    require_shape(a->view().ndim == 1 && a->view().is_contiguous(), *a, "a contiguous array of shape [num]");
  }
  PreferenceLossBackwardParams p;
  in.put(&p.dlosses, &p.dlosses_stride);
  p.num_losses = in.size();
  p.chosen.num = w->shape[0];
  p.rejected.num = l->shape[0];
  p.chosen.d_policy = w.data<float>();
  p.rejected.d_policy = l.data<float>();
  const bool pairs = p.num_losses == p.chosen.num && p.chosen.num == p.rejected.num;
  require_shape(pairs || p.num_losses == p.chosen.num + p.rejected.num, *in.array(), "shape [", p.chosen.num, "]");
  p.rejected.first = pairs ? 0 : p.chosen.num;
  if (!ranks.is_none()) {
    const Array& r = frame->read(ranks, "ranks", "int32");
    require_shape(r->dtype == DType::kInt32 && r->ndim == 2 && r->shape[0] == 2 && r->shape[1] == p.chosen.num &&
                      r->is_contiguous(),
                  r, "a contiguous int32 array of shape [2, ", p.chosen.num, "]");
    p.chosen.rank = r.data<std::int32_t>();
    p.rejected.rank =
        p.chosen.rank + (static_cast<PreferenceSort>(sort) == PreferenceSort::kAotUnpaired ? p.chosen.num : 0);
  }
  return Results("preference_loss", frame)
      .add(&p.chosen.d, w.shape())
      .add(&p.rejected.d, l.shape())
      .run(rlk::preference_loss_backward, p);
}

}  // namespace
}  // namespace rlk::bindings
