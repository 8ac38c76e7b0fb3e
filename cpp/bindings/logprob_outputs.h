// The outputs of a call of logprob or linear_logprob, each [...].
#pragma once

#include <array>
#include <string>
#include <vector>

#include "call.h"
#include "linear_args.h"
#include "logprob_args.h"

namespace rlk::bindings {

// The outputs in the order that is used everywhere, by the names in errors. Bit i of `returns` asks for output i.
constexpr std::array<const char*, 5> kOutputs = {"out.logprob", "out.lse", "out.entropy", "out.sum_p_sq", "out.status"};
constexpr DType dtype_of_output(int i) { return i == 4 ? DType::kInt32 : DType::kFloat32; }

// Keeps the caller's outputs alive.
class Outputs {
 public:
  // Adds outputs over `rows`, and points the params to them. `out` has the caller's outputs, which are checked. If only
  // logprob is wanted, it is the only output.
  template <class Params>
  void add(Results* results, std::span<const std::int64_t> rows, int returns, Params* p,
           const LogprobCall* call = nullptr, nb::handle out = nb::none()) {
    void* data[5] = {};
    for (int i = 0; i < (returns == 1 ? 1 : 5); ++i) {
      const bool wanted = returns >> i & 1;
      const nb::object given = wanted && !out.is_none() ? nb::object(out[i]) : nb::none();
      if (given.is_none() || call == nullptr) {
        results->add(&data[i], rows, dtype_of_output(i), wanted);
        continue;
      }
      const Array& a = given_.emplace_back(given, kOutputs[i], name_of(dtype_of_output(i)));
      call->check_output(a, dtype_of_output(i));
      for (std::size_t j = 0; j + 1 < given_.size(); ++j) check_apart(a, given_[j]);
      data[i] = a.view().data;
      results->add(given);
    }
    p->logprob = static_cast<float*>(data[0]);
    p->lse = static_cast<float*>(data[1]);
    p->entropy = static_cast<float*>(data[2]);
    p->sum_p_sq = static_cast<float*>(data[3]);
    p->status = static_cast<std::int32_t*>(data[4]);
  }

 private:
  std::vector<Array> given_;
};

}  // namespace rlk::bindings
