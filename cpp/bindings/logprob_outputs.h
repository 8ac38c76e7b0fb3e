// The outputs of a call of logprob or linear_logprob, each [...].
#pragma once

#include <array>
#include <type_traits>

#include "call.h"
#include "linear_args.h"
#include "logprob_args.h"

namespace rlk::bindings {

// The outputs in the order that is used everywhere, by the names in errors. Bit i of `returns` asks for output i.
constexpr std::array<const char*, 5> kOutputs = {"out.logprob", "out.lse", "out.entropy", "out.sum_p_sq", "out.status"};

// Adds outputs over `rows`, and points the params to them. `out` has the caller's outputs of a call, which are checked.
// If only logprob is wanted, it is the only output.
template <class Params>
void add_outputs(Frame* frame, Results* results, std::span<const std::int64_t> rows, int returns, Params* p,
                 const LogprobCall* call = nullptr, nb::handle out = nb::none()) {
  std::array<const Array*, kOutputs.size()> others = {};
  const auto add_one = [&]<class T>(int i, T** field) {
    const bool wanted = returns >> i & 1;
    const nb::object given = wanted && call != nullptr && !out.is_none() ? nb::object(out[i]) : nb::none();
    if (given.is_none()) return void(results->add(field, rows, wanted));
    constexpr DType kDtype = std::is_same_v<T, float> ? DType::kFloat32 : DType::kInt32;
    const Array& a = frame->read(given, kOutputs[i], name_of(kDtype));
    call->check_output(a, kDtype);
    for (const Array* other : others) {
      if (other) check_apart(a, *other);
    }
    others[i] = &a;
    *field = static_cast<T*>(a.view().data);
    results->add(given);
  };
  add_one(0, &p->logprob);
  if (returns == 1) return;
  add_one(1, &p->lse);
  add_one(2, &p->entropy);
  add_one(3, &p->sum_p_sq);
  add_one(4, &p->status);
}

}  // namespace rlk::bindings
