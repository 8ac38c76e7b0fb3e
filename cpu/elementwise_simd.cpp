// The inner loops of elementwise operators, which compute one vector of columns at a time. CMake compiles this file
// once per instruction set.
#include "elementwise_simd.h"

#include "kernels/rows/elementwise_formulas.h"
#include "simd.h"
#include "simd_memory.h"

namespace rlk::cpu::RLK_CPU_ISA {

template <class T>
using Lanes = Numbers<T, 1, Floats>;

// Argument-dependent lookup finds this function, so it is outside the unnamed namespace.
template <class T>
RLK_HD Lanes<T> rounded(const Lanes<T>& x) {
  return {rounded<T>(x.v[0])};
}

namespace {

template <class Params, int kForms>
void columns_of(const Params& p, const unsigned char* const* from, unsigned char* const* to, std::int64_t columns) {
  with_type(p.dtype, [&](auto t) {
    with_form<kForms>(form_of(p), [&](auto form) {
      using T = decltype(t);
      for_each_vector(columns, [&](std::int64_t k, int count) {
        Lanes<T> in[kInputs<Params>], out[kOutputs<Params>];
        for_each(typename Elementwise<Params>::Inputs{}, [&](auto array, int i) {
          in[i] = {array.is_given(p) ? load_at<T>(from[i], k, count) : broadcast<Floats>(-0.0f)};
        });
        Elementwise<Params>::template apply<decltype(form)::value>(p, in, out);
        for (int i = 0; i < kOutputs<Params>; ++i) {
          if (to[i] != nullptr) store_at<T>(to[i], k, count, out[i].v[0]);
        }
      });
    });
  });
}

}  // namespace

#define RLK_ELEMENTWISE(operator, function, Params, forms) \
  const ElementwiseLanes<Params> function##_columns = {columns_of<Params, forms>};
#include "rlk/elementwise.inc"

}  // namespace rlk::cpu::RLK_CPU_ISA
