// Elementwise operators read rows, and write rows of the same shape and dtype. An output element depends only on the
// input elements at the same row and column. The header rlk/elementwise/<op>.h describes an operator by its params,
// which have num_rows, columns and dtype:
//
//   template <>
//   struct Elementwise<Params> {
//     static constexpr const char* kName;      // the operator, in errors
//     static constexpr const char* kArrays[];  // names of its inputs, then its outputs, in errors
//     using Inputs = Arrays<Rows<&Params::x, &Params::x_rows>, ...>;
//     using Outputs = Arrays<...>;             // a single output is given; one of several may be null if not wanted
//     static constexpr auto kForm = &Params::activation;  // only if a member selects the code; its values start at 0
//     template <int kForm, class V>
//     static RLK_DEVICE void apply(const Params& p, const V (&in)[kInputs], V (&out)[kOutputs]);
//   };
//
// Every backend calls apply() with its own type V, which holds a vector of columns. each(f, in[0], ...) applies f to
// each column's numbers. apply() may set out[i] to numbers (fp32) or to columns (elements of dtype). The backend rounds
// outputs to dtype when it stores them.
#pragma once

#include "rlk/base.h"
#include "rlk/math/ieee.h"
#include "rlk/unroll.h"

namespace rlk {

template <class Params>
struct Elementwise;

// Names an array by two members of the params: its pointer and its layout. Two arrays are often halves of packed rows.
// For the second of them, kBeside is the layout of the first, so that both arrays may have the same row offset.
template <auto kPointer, auto kLayout, auto kBeside = nullptr>
struct Rows {
  static constexpr auto kData = kPointer;
  static constexpr auto kRows = kLayout;
  static constexpr auto kRowsBefore = kBeside;
  static constexpr bool kOptional = false;
  template <class Params>
  static RLK_HD bool is_given(const Params&) {
    return true;
  }
};
// An input that may be null. Each element of a null input is read as -0, because adding -0 changes no sum.
template <auto kPointer, auto kLayout, auto kBeside = nullptr>
struct OptionalRows : Rows<kPointer, kLayout, kBeside> {
  static constexpr bool kOptional = true;
  template <class Params>
  static RLK_HD bool is_given(const Params& p) {
    return p.*kPointer != nullptr;
  }
};
template <class... Array>
struct Arrays {
  static constexpr int kCount = static_cast<int>(sizeof...(Array));
};
// Calls f(array, index) for each array of a list.
template <class... Array, class F>
RLK_HD void for_each(Arrays<Array...>, const F& f) {
  int k = 0;
  (f(Array{}, k++), ...);
}
template <class Params>
constexpr int kInputs = Elementwise<Params>::Inputs::kCount;
template <class Params>
constexpr int kOutputs = Elementwise<Params>::Outputs::kCount;

template <class T>
constexpr bool kIsNull = false;
template <>
inline constexpr bool kIsNull<const decltype(nullptr)> = true;

// Whether two arrays have the same row offsets, as the halves of packed rows have.
RLK_HD bool same_rows(const RowLayout& a, const RowLayout& b) {
  return a.inner == b.inner && a.inner_stride == b.inner_stride && a.outer_stride == b.outer_stride;
}
// Computes the offset of one row in each array of a list. The caller must call next() in the order of the list.
template <class Params>
class RowOffsets {
 public:
  RLK_DEVICE RowOffsets(const Params& p, std::int64_t row) : p_(p), row_(row) {}
  template <class Array>
  RLK_DEVICE std::int64_t next(Array) {
    if constexpr (kIsNull<decltype(Array::kRowsBefore)>) {
      return last_ = (p_.*Array::kRows).offset(row_);
    } else {
      return last_ = same_rows(p_.*Array::kRowsBefore, p_.*Array::kRows) ? last_ : (p_.*Array::kRows).offset(row_);
    }
  }

 private:
  const Params& p_;
  std::int64_t row_, last_ = 0;
};

// The numbers of `kCount` columns. T is the backend's type of an element in memory.
template <class T, int kCount, class Number>
struct Numbers {
  Number v[kCount];
};
template <class T, int kCount, class Number>
RLK_DEVICE const Numbers<T, kCount, Number>& numbers(const Numbers<T, kCount, Number>& x) {
  return x;
}
template <class F, class T, int kCount, class... Number>
RLK_DEVICE auto each_of(const F& f, const Numbers<T, kCount, Number>&... x) {
  Numbers<T, kCount, decltype(f(x.v[0]...))> r;
  RLK_UNROLL
  for (int j = 0; j < kCount; ++j) r.v[j] = f(x.v[j]...);
  return r;
}
// Applies f to the numbers of each column.
template <class F, class... Columns>
RLK_DEVICE auto each(const F& f, const Columns&... x) {
  return each_of(f, numbers(x)...);
}
// The product fl(round(a) * x). The caller rounds the result once more, to dtype. A backend may overload this function
// with a cheaper one.
template <class T, int kCount, class Number>
RLK_DEVICE auto rounded_product(const Numbers<T, kCount, Number>& a, const Numbers<T, kCount, Number>& x) {
  return each([](Number b, Number c) { return mul_rn(b, c); }, rounded(a), x);
}

// Whether columns of type V hold numbers of a 16-bit type, and the backend has faster arithmetic for numbers of that
// type.
template <class V>
constexpr bool kGainsFromHalves = false;

// A form is a variant of an operator's formulas, such as its activation. form_of() returns the form of a call, or 0 if
// the operator has a single form. with_form() calls f(FormConstant<form>{}).
template <class Params>
RLK_HD int form_of(const Params& p) {
  if constexpr (requires { Elementwise<Params>::kForm; }) {
    return static_cast<int>(p.*Elementwise<Params>::kForm);
  } else {
    return 0;
  }
}
template <int kForm>
struct FormConstant {
  static constexpr int value = kForm;
};
template <int kForms, int kForm = 0, class F>
inline __attribute__((always_inline)) void with_form(int form, const F& f) {
  if constexpr (kForm + 1 < kForms) {
    if (form != kForm) return with_form<kForms, kForm + 1>(form, f);
  }
  f(FormConstant<kForm>{});
}

}  // namespace rlk
