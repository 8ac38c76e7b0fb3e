// The kernels of elementwise operators, under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation. HBM bandwidth bounds the kernels, which read each input once and write each output
// once. A thread processes a vec8 of a row's columns. If rows are not whole, aligned vec8s, a thread processes eight
// columns that lie apart. A thread reads all of its elements before it writes any, so an output may be the same array
// as an input.
#include "hip/common/vec8.h"
#include "hip/elementwise/launches.h"
#include "kernels/rows/elementwise_formulas.h"

namespace rlk::hip {

template <class T>
using Eight = Numbers<T, kVec8, float>;
// The formulas call rounded(); argument-dependent lookup finds this function.
template <class T>
RLK_DEVICE Eight<T> rounded(const Eight<T>& x) {
  Eight<T> r;
#pragma unroll
  for (int j = 0; j < kVec8; ++j) r.v[j] = rounded<T>(x.v[j]);
  return r;
}

// Loads a thread's eight columns. With kVector they are from[0] to from[7]. Without kVector they are from[0],
// from[step], from[2 * step] and so on. Columns with an index of `left` or more do not exist, and are read as 0.
template <class T, bool kVector>
RLK_DEVICE Eight<T> load_eight(const typename T::Storage* from, int left, int step) {
  Eight<T> x;
  if constexpr (kVector) {
    const Columns loaded = load_columns<T, true>(from, kVec8);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) x.v[j] = loaded.v[j];
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) x.v[j] = j * step < left ? T::load(from[j * step]) : 0.0f;
  }
  return x;
}
template <class T, bool kVector>
RLK_DEVICE void store_eight(typename T::Storage* to, int left, int step, const Eight<T>& x) {
  if constexpr (kVector) {
    Columns stored;
#pragma unroll
    for (int j = 0; j < kVec8; ++j) stored.v[j] = x.v[j];
    store_columns<T, true>(to, kVec8, stored);
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      if (j * step < left) to[j * step] = T::store(x.v[j]);
    }
  }
}

template <class T, bool kVector, int kForm, class Params>
RLK_DEVICE void elementwise_kernel(const Params& p, std::int64_t first_block, const RowSplit& split) {
  using Operator = Elementwise<Params>;
  constexpr int kCount = kVector ? kElementwiseVec8s : 1, kItems = kVector ? kElementwiseVec8s : kElementwiseElements;
  static_assert(kElementwiseElements == kVec8);
  const RowPlace at = place_in_rows(split, kItems, static_cast<std::uint32_t>(first_block + block_id_x()), thread_id());
  if (at.row >= p.num_rows) return;
  const int columns = static_cast<int>(p.columns);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = kVector ? (at.first + i * at.step) * kVec8 : at.first;
    if (column >= columns) continue;
    Eight<T> in[kInputs<Params>], out[kOutputs<Params>];
    for_each(typename Operator::Inputs{}, [&](auto array, int k) {
      if (array.is_given(p)) {
        in[k] = load_eight<T, kVector>(row_at<T>(p.*array.kData, p.*array.kRows, at.row) + column, columns - column,
                                       at.step);
      } else {
#pragma unroll
        for (int j = 0; j < kVec8; ++j) in[k].v[j] = -0.0f;
      }
    });
    Operator::template apply<kForm>(p, in, out);
    for_each(typename Operator::Outputs{}, [&](auto array, int k) {
      if (kOutputs<Params> == 1 || p.*array.kData != nullptr) {
        store_eight<T, kVector>(row_at<T>(p.*array.kData, p.*array.kRows, at.row) + column, columns - column, at.step,
                                out[k]);
      }
    });
  }
}

}  // namespace rlk::hip

#define RLK_ELEMENTWISE_KERNEL(name, T, vectors, form, Params)                       \
  RLK_KERNEL(rlk::hip::kElementwiseThreads)                                          \
  name(rlk::Params p, std::int64_t first_block, rlk::RowSplit split) {               \
    rlk::hip::elementwise_kernel<rlk::hip::T, vectors, form>(p, first_block, split); \
  }
#define RLK_ELEMENTWISE(operator, function, Params, forms) \
  RLK_ELEMENTWISE_KERNELS(RLK_ELEMENTWISE_KERNEL, function, forms, Params)
#include "rlk/elementwise.inc"
#undef RLK_ELEMENTWISE
