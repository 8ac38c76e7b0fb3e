// A polynomial's value by Horner's rule, one fma per degree.
#pragma once

#include "rlk/math/ieee.h"

namespace rlk {

// c0 + x * (c1 + x * (c2 + ...)); coefficients in ascending degree, passed by value because device code may not take
// the address of a host constant.
template <class F>
RLK_HD F horner(F, float c0) {
  return broadcast<F>(c0);
}
template <class F, class... Rest>
RLK_HD F horner(F x, float c0, Rest... rest) {
  return fma_rn(horner(x, rest...), x, broadcast<F>(c0));
}

}  // namespace rlk
