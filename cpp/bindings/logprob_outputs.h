// The outputs of a call of logprob or linear_logprob, [...] each.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "logprob_args.h"

namespace rlk::bindings {

// The outputs in the order that they have everywhere, as errors name those that were given; bit i of `returns` asks for
// output i.
constexpr std::array<const char*, 5> kOutputs = {"out.logprob", "out.lse", "out.entropy", "out.sum_p_sq", "out.status"};
constexpr DType dtype_of_output(int i) { return i == 4 ? DType::kInt32 : DType::kFloat32; }

// Given ones are checked, others allocated.
class Outputs {
 public:
  Outputs(std::span<const std::int64_t> rows, const Caller& caller, int returns) {
    for (int i = 0; i < 5; ++i) {
      objects_[i] = nb::none();
      if (returns >> i & 1) allocate(i, rows, caller);
    }
  }
  Outputs(const LogprobCall& call, const Caller& caller, int returns, nb::handle out) {
    for (int i = 0; i < 5; ++i) {
      objects_[i] = nb::none();
      if (!(returns >> i & 1)) continue;
      nb::object given = out.is_none() ? nb::none() : nb::object(out[i]);
      if (given.is_none()) {
        allocate(i, call.rows_shape(), caller);
      } else {
        given_.emplace_back(given, kOutputs[i], name_of(dtype_of_output(i)));
        call.check_output(given_.back(), dtype_of_output(i));
        for (std::size_t j = 0; j + 1 < given_.size(); ++j) {
          if (ranges_overlap(given_[j].view(), given_.back().view())) {
            throw nb::value_error((std::string(kOutputs[i]) + ": may share memory with " + given_[j].name()).c_str());
          }
        }
        data_[i] = given_.back().view().data;
        objects_[i] = given;
      }
    }
  }
  template <class Params>
  void point(Params* p) const {
    p->logprob = static_cast<float*>(data_[0]);
    p->lse = static_cast<float*>(data_[1]);
    p->entropy = static_cast<float*>(data_[2]);
    p->sum_p_sq = static_cast<float*>(data_[3]);
    p->status = static_cast<std::int32_t*>(data_[4]);
  }
  // The array itself where only logprob was asked for, else five, None where not asked.
  nb::object result(int returns) const {
    if (returns == 1) return objects_[0];
    return nb::make_tuple(objects_[0], objects_[1], objects_[2], objects_[3], objects_[4]);
  }

 private:
  void allocate(int i, std::span<const std::int64_t> rows, const Caller& caller) {
    Caller::Fresh fresh = caller.empty(rows, dtype_of_output(i));
    objects_[i] = std::move(fresh.array);
    data_[i] = fresh.data;
  }

  std::array<nb::object, 5> objects_;
  std::array<void*, 5> data_{};
  std::vector<Array> given_;
};

}  // namespace rlk::bindings
