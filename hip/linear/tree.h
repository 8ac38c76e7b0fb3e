// Sums values that arrive one after another, by a perfect binary tree over their indices.
#pragma once

#include "rlk/base.h"
#include "rlk/math/ieee.h"

namespace rlk::hip {

RLK_DEVICE void add_earlier(float& sum, const float& earlier) { sum = add_rn(earlier, sum); }

// The sum of up to 2^kLevels values. add_earlier(Value&, const Value&) adds two values.
template <class Value, int kLevels>
class TreeSum {
 public:
  // Adds value number `index` to the tree, and sets `value` to the sum of the largest complete subtree that ends with
  // this value. After 2^n values, the result is the sum of all values.
  RLK_DEVICE void take(int index, Value& value) {
    bool complete = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if (!complete) continue;
      complete = (index >> level & 1) != 0;
      if (complete) {
        add_earlier(value, kept_[level]);
      } else {
        kept_[level] = value;
      }
    }
  }

 private:
  Value kept_[kLevels] = {};
};

}  // namespace rlk::hip
