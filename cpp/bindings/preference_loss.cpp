// Python's entry to preference_loss: fields move from checked arguments to the contract's params, outputs come from the
// caller.
#include "rlk/ops/preference_loss.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "define.h"
#include "gil.h"
#include "linear_args.h"
#include "module.h"
#include "tokens.h"

namespace rlk::bindings {
namespace {

// A vector of float32, or of int64, of `num` elements where that is not negative.
class Column {
 public:
  Column(nb::handle object, const char* name, DType dtype, std::optional<Device> device, std::int64_t num,
         const char* whose) {
    if (object.is_none()) return;  // of arrays that may be left out
    array_.emplace(object, name, name_of(dtype));
    const TensorView& v = array_->view();
    if (v.dtype != dtype) dtype_error(*array_, name_of(dtype));
    if (device) require_device(*array_, *device);
    if (v.ndim != 1 || (num >= 0 && v.shape[0] != num)) {
      argument_error(name, num < 0 ? "expected shape [num_pairs], got " + shape_text(array_->shape())
                                   : "expected shape [" + std::to_string(num) + "] (that of " + whose + "), got " +
                                         shape_text(array_->shape()));
    }
  }
  template <class T>
  const T* data() const {
    return array_ ? static_cast<const T*>(array_->view().data) : nullptr;
  }
  std::int64_t stride() const { return array_ && array_->view().shape[0] > 1 ? array_->view().stride(0) : 1; }
  std::int64_t size() const { return array_->view().shape[0]; }
  Device device() const { return array_->view().device; }

 private:
  std::optional<Array> array_;
};

// A capsule is read once, so `policy` is read before its device is known to be the call's.
struct Side {
  Side(nb::handle policy, nb::handle reference, nb::handle count, nb::handle aligned, const char* const (&names)[4],
       std::optional<Device> device, std::int64_t expected)
      : policy_(policy, names[0], DType::kFloat32, device, expected, "policy_chosen"),
        reference_(reference, names[1], DType::kFloat32, policy_.device(), policy_.size(), names[0]),
        aligned_(aligned, names[2], DType::kFloat32, policy_.device(), policy_.size(), names[0]),
        count_(count, names[3], DType::kInt64, policy_.device(), policy_.size(), names[0]) {
    side.policy = policy_.data<float>();
    side.reference = reference_.data<float>();
    side.aligned = aligned_.data<float>();
    side.count = count_.data<std::int64_t>();
    side.policy_stride = policy_.stride();
    side.reference_stride = reference_.stride();
    side.aligned_stride = aligned_.stride();
    side.count_stride = count_.stride();
    side.num = policy_.size();
  }
  Device device() const { return policy_.device(); }
  PreferenceSide side;

 private:
  Column policy_, reference_, aligned_, count_;
};
constexpr const char* kChosenNames[4] = {"policy_chosen", "ref_chosen", "chosen_aligned", "chosen_count"};
constexpr const char* kRejectedNames[4] = {"policy_rejected", "ref_rejected", "rejected_aligned", "rejected_count"};

float number(nb::list numbers, std::size_t i) { return static_cast<float>(nb::cast<double>(numbers[i])); }

// (losses, chosen_rewards, rejected_rewards, metrics, d_chosen, d_rejected, ranks or None). numbers: in the order of the
// contract's fields.
nb::object forward(nb::handle policy_chosen, nb::handle policy_rejected, nb::handle ref_chosen, nb::handle ref_rejected,
                   nb::handle chosen_count, nb::handle rejected_count, nb::handle chosen_aligned,
                   nb::handle rejected_aligned, nb::handle kl, int kind, int sort, int score, int average,
                   nb::list numbers, nb::handle allocate, std::uintptr_t stream) {
  for (const auto& [array, name] : {std::pair{policy_chosen, "policy_chosen"}, {policy_rejected, "policy_rejected"}}) {
    if (!array.is_none()) continue;
    throw nb::type_error((std::string(name) + ": expected an array that speaks DLPack, got NoneType").c_str());
  }
  const Side chosen(policy_chosen, ref_chosen, chosen_count, chosen_aligned, kChosenNames, std::nullopt, -1);
  const Device device = chosen.device();
  require_backend("preference_loss", device);
  PreferenceLossParams p;
  p.kind = static_cast<Preference>(kind);
  p.sort = static_cast<PreferenceSort>(sort);
  p.score = static_cast<PreferenceScore>(score);
  p.average = static_cast<PreferenceAverage>(average);
  float* const fields[] = {&p.beta,     &p.label_smoothing, &p.margin,        &p.tau,
                           &p.alpha,    &p.nll_weight,      &p.half,          &p.log_keep,
                           &p.log_flip, &p.unflipped,       &p.chosen_weight, &p.rejected_weight};
  for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = number(numbers, i);
  const bool pairs = p.kind != Preference::kKto;
  p.chosen = chosen.side;
  const Side rejected(policy_rejected, ref_rejected, rejected_count, rejected_aligned, kRejectedNames, device,
                      pairs ? p.chosen.num : -1);
  p.rejected = rejected.side;
  const Column of_kl(kl, "kl", DType::kFloat32, device, 1, "one number");
  p.kl = of_kl.data<float>();
  const Caller caller = make_caller(policy_chosen, device, allocate, stream);
  const std::int64_t w[] = {p.chosen.num}, l[] = {p.rejected.num}, five[] = {kPreferenceMetrics},
                     two[] = {2, p.chosen.num};
  const std::int64_t all[] = {pairs ? p.chosen.num : p.chosen.num + p.rejected.num};
  Caller::Fresh losses = caller.empty(all, DType::kFloat32), metrics = caller.empty(five, DType::kFloat32);
  Caller::Fresh reward_w = caller.empty(w, DType::kFloat32), reward_l = caller.empty(l, DType::kFloat32);
  Caller::Fresh d_w = caller.empty(w, DType::kFloat32), d_l = caller.empty(l, DType::kFloat32);
  p.losses = static_cast<float*>(losses.data);
  p.metrics = static_cast<float*>(metrics.data);
  p.chosen.reward = static_cast<float*>(reward_w.data);
  p.rejected.reward = static_cast<float*>(reward_l.data);
  p.chosen.d_policy = static_cast<float*>(d_w.data);
  p.rejected.d_policy = static_cast<float*>(d_l.data);
  nb::object ranks = nb::none(), order = nb::none();
  if (p.sort != PreferenceSort::kNone) {
    Caller::Fresh of_ranks = caller.empty(two, DType::kInt32), of_order = caller.empty(two, DType::kInt32);
    p.ranks = static_cast<std::int32_t*>(of_ranks.data);
    p.order = static_cast<std::int32_t*>(of_order.data);
    ranks = of_ranks.array;
    order = of_order.array;
  }
  {
    const ReleasedGil released;
    preference_loss(p, device, caller.stream);
  }
  return nb::make_tuple(losses.array, reward_w.array, reward_l.array, metrics.array, d_w.array, d_l.array, ranks);
}

// (d_policy_chosen, d_policy_rejected). sort: as of the forward.
nb::object backward(nb::handle dlosses, nb::handle d_chosen, nb::handle d_rejected, nb::handle ranks, int sort,
                    nb::handle allocate, std::uintptr_t stream) {
  const Array in(dlosses, "dlosses", "float32");
  const TensorView& v = in.view();
  require_backend("preference_loss", v.device);
  if (v.dtype != DType::kFloat32) dtype_error(in, "float32");
  if (v.ndim != 1) argument_error("dlosses", "expected shape [num_losses], got " + shape_text(in.shape()));
  const Array w(d_chosen, "d_chosen", "float32"), l(d_rejected, "d_rejected", "float32");
  for (const Array* a : {&w, &l}) {
    require_device(*a, v.device);
    if (a->view().dtype != DType::kFloat32) dtype_error(*a, "float32");
    if (a->view().ndim != 1 || !a->view().is_contiguous()) {
      argument_error(a->name(), "expected a contiguous array of shape [num], got " + shape_text(a->shape()));
    }
  }
  PreferenceLossBackwardParams p;
  p.dlosses = static_cast<const float*>(v.data);
  p.dlosses_stride = v.shape[0] > 1 ? v.stride(0) : 1;
  p.num_losses = v.shape[0];
  p.chosen.num = w.view().shape[0];
  p.rejected.num = l.view().shape[0];
  p.chosen.d_policy = static_cast<const float*>(w.view().data);
  p.rejected.d_policy = static_cast<const float*>(l.view().data);
  const bool pairs = p.num_losses == p.chosen.num && p.chosen.num == p.rejected.num;
  if (!pairs && p.num_losses != p.chosen.num + p.rejected.num) {
    argument_error("dlosses", "expected shape [" + std::to_string(p.chosen.num) + "], got " + shape_text(in.shape()));
  }
  p.rejected.first = pairs ? 0 : p.chosen.num;
  std::optional<Array> of_ranks;
  if (!ranks.is_none()) {
    of_ranks.emplace(ranks, "ranks", "int32");
    const TensorView& r = of_ranks->view();
    require_device(*of_ranks, v.device);
    if (r.dtype != DType::kInt32 || r.ndim != 2 || r.shape[0] != 2 || r.shape[1] != p.chosen.num ||
        !r.is_contiguous()) {
      argument_error("ranks", "expected a contiguous int32 array of shape [2, " + std::to_string(p.chosen.num) +
                                  "], got " + shape_text(of_ranks->shape()));
    }
    p.chosen.rank = static_cast<const std::int32_t*>(r.data);
    p.rejected.rank =
        p.chosen.rank + (static_cast<PreferenceSort>(sort) == PreferenceSort::kAotUnpaired ? p.chosen.num : 0);
  }
  const Caller caller = make_caller(dlosses, v.device, allocate, stream);
  Caller::Fresh to_w = caller.empty(w.shape(), DType::kFloat32), to_l = caller.empty(l.shape(), DType::kFloat32);
  p.chosen.d = static_cast<float*>(to_w.data);
  p.rejected.d = static_cast<float*>(to_l.data);
  {
    const ReleasedGil released;
    preference_loss_backward(p, v.device, caller.stream);
  }
  return nb::make_tuple(to_w.array, to_l.array);
}

}  // namespace

void bind_preference_loss(nb::module_& m) {
  define(m, "preference_loss", &forward);
  define(m, "preference_loss_backward", &backward);
}

}  // namespace rlk::bindings
