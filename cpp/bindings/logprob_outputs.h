// The outputs of a call of logprob or linear_logprob, each [...].
#pragma once

#include <array>
#include <type_traits>
#include <vector>

#include "call.h"
#include "linear_args.h"
#include "logprob_args.h"

namespace rlk::bindings {

// The outputs in the order that is used everywhere, by the names in errors. Bit i of `returns` asks for output i.
constexpr std::array<const char*, 5> kOutputs = {"out.logprob", "out.lse", "out.entropy", "out.sum_p_sq", "out.status"};

// Keeps the caller's outputs alive.
class Outputs {
 public:
  // Adds outputs over `rows`, and points the params to them. `out` has the caller's outputs, which are checked. If only
  // logprob is wanted, it is the only output.
  template <class Params>
  void add(Results* results, std::span<const std::int64_t> rows, int returns, Params* p,
           const LogprobCall* call = nullptr, nb::handle out = nb::none()) {
    const auto add_one = [&]<class T>(int i, T** field) {
      const bool wanted = returns >> i & 1;
      const nb::object given = wanted && call != nullptr && !out.is_none() ? nb::object(out[i]) : nb::none();
      if (given.is_none()) return void(results->add(field, rows, wanted));
      constexpr DType kDtype = std::is_same_v<T, float> ? DType::kFloat32 : DType::kInt32;
      const Array& a = given_.emplace_back(given, kOutputs[i], name_of(kDtype));
      call->check_output(a, kDtype);
      for (std::size_t j = 0; j + 1 < given_.size(); ++j) check_apart(a, given_[j]);
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

 private:
  std::vector<Array> given_;
};

}  // namespace rlk::bindings
