// Every backend checks these preconditions of an elementwise operator, because a violation would corrupt memory. Users'
// input is checked earlier, by the bindings.
#pragma once

#include <string>

#include "kernels/rows/elementwise.h"

namespace rlk {

template <int kForms, class Params>
void check_elementwise(const Params& p) {
  using Operator = Elementwise<Params>;
  const auto what = [](const char* says) { return std::string(Operator::kName) + ": " + says; };
  RLK_CHECK(p.num_rows >= 0 && p.columns >= 0, what("sizes are not negative"));
  RLK_CHECK(p.num_rows < std::int64_t{1} << 32, what("fewer than 2^32 rows"));
  RLK_CHECK(p.columns < std::int64_t{1} << 30, what("fewer than 2^30 columns"));
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            what("arrays are float32, bfloat16 or float16"));
  RLK_CHECK(form_of(p) >= 0 && form_of(p) < kForms, what("a known form"));
  if (p.num_rows == 0 || p.columns == 0) return;
  const auto check = [&](auto array, const char* name, bool may_be_null) {
    const bool given = p.*array.kData != nullptr;
    RLK_CHECK(given || may_be_null, what(name) + " is given");
    RLK_CHECK(!given || (p.*array.kRows).inner > 0, what(name) + " has rows of inner >= 1");
  };
  for_each(typename Operator::Inputs{},
           [&](auto array, int k) { check(array, Operator::kArrays[k], array.kOptional); });
  for_each(typename Operator::Outputs{},
           [&](auto array, int k) { check(array, Operator::kArrays[kInputs<Params> + k], kOutputs<Params> > 1); });
}

// Whether a call writes anything.
template <class Params>
bool writes(const Params& p) {
  bool wanted = false;
  for_each(typename Elementwise<Params>::Outputs{},
           [&](auto array, int) { wanted = wanted || p.*array.kData != nullptr; });
  return wanted && p.num_rows > 0 && p.columns > 0;
}

}  // namespace rlk
