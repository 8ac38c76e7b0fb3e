// Kernels of elementwise operators. Bound by HBM: each input is read once, each output is written once.
//
// elementwise_kernel: a thread takes kVec8s times eight columns of a row, and their loads are in flight together.
// elementwise_any_kernel: a thread takes eight single columns. This kernel supports any width and any alignment. Each
// thread reads all elements that it will overwrite before it writes any element, so an output array may be an input
// array. All architectures share this source; each has its own machine code.
#include "../common/dependent_launch.cuh"
#include "../common/vec8.cuh"
#include "kernels.h"
#include "kernels/rows/elementwise_formulas.h"
#include "kernels/rows/row_split.h"

namespace rlk {
namespace cuda {

// Operations by which the formulas compute on a vec8 of columns. Argument-dependent lookup must find these operations,
// so they are outside the unnamed namespace.
template <class T>
using Eight = Numbers<T, kVec8, float>;
template <class T>
struct InMemory : Vec8<T> {
  __device__ __forceinline__ InMemory& operator=(const Eight<T>& x) {
    static_cast<Vec8<T>&>(*this) = vec8_of<T>(x.v);
    return *this;
  }
};
template <class T>
__device__ __forceinline__ Eight<T> numbers(const InMemory<T>& x) {
  Eight<T> r;
  x.to_float(r.v);
  return r;
}
template <class T>
__device__ __forceinline__ Eight<T> rounded(Eight<T> x) {
  round_vec8<T>(x.v);
  return x;
}
template <class T>
__device__ __forceinline__ InMemory<T> rounded_product(const Eight<T>& a, const InMemory<T>& x) {
  return {rounded_product<T>(a.v, x)};
}

// -kGateLimit in the element type; both halves of the word hold this value.
template <class T>
constexpr std::uint32_t kGateLimits = std::is_same_v<T, Bf16> ? 0xc2b0c2b0u : 0xd580d580u;
static_assert(kGateLimit == 88.0f);

// silu of 16-bit types. One instruction limits the gates of two columns, and one instruction compares two gates.
template <Activation kActivation, class T>
requires(kActivation == Activation::kSilu &&
         T::kPacked) __device__ __forceinline__ Eight<T> activations(const InMemory<T>& gate) {
  const uint4& v = gate.v[0].v;
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
  Eight<T> r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t m = T::max2(words[i], kGateLimits<T>);
    const PairOfConditions negative = T::negative2(m);
    const float low = T::low(m), high = T::high(m);
    r.v[2 * i] = mul_rn(low, sigmoid_of_half(low, negative.low));
    r.v[2 * i + 1] = mul_rn(high, sigmoid_of_half(high, negative.high));
  }
  return r;
}

}  // namespace cuda

template <class T>
constexpr bool kGainsFromHalves<cuda::InMemory<T>> = T::kPacked;
template <class T>
constexpr bool kGainsFromHalves<cuda::Eight<T>> = T::kPacked;

namespace cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kLog2Block = 7, kBlock = 1 << kLog2Block;  // short blocks, which the scheduler spreads evenly

// The least number of blocks per multiprocessor: as many blocks as the registers allow. A thread holds `vectors`
// vectors of each input. For more than three inputs the compiler decides how many registers a thread uses.
constexpr int least_blocks(int inputs, int vectors) {
  if (inputs > 3) return 1;
  if (inputs == 3) return vectors == 1 ? 8 : vectors == 2 ? 6 : 4;
  return vectors == 1 ? 10 : vectors == 2 ? 8 : 5;
}
template <class T>
__device__ __forceinline__ const typename T::Storage* row_of(const void* base, std::int64_t offset) {
  return static_cast<const typename T::Storage*>(base) + offset;
}
template <class T>
__device__ __forceinline__ typename T::Storage* row_of(void* base, std::int64_t offset) {
  return static_cast<typename T::Storage*>(base) + offset;
}
// kOneRow: a launch has a single row, so no thread divides to find its chunk or multiplies by a row stride. kWhole:
// whole chunks fill this row, so no thread tests whether a column exists.
enum class Split { kRows, kOneRow, kWhole };
// Whether a kernel prefetches. Kernels with three inputs, and kernels for whole chunks, keep enough loads in flight
// without prefetches; other kernels gain from them.
template <class T, int kInputs, Split kSplit>
constexpr bool kPrefetches = T::kPacked&& kInputs < 3 && kSplit != Split::kWhole;

template <class Params, class T, int kForm, int kVec8s, Split kSplit>
__global__ void __launch_bounds__(kBlock, (least_blocks(kInputs<Params>, Vec8<T>::kVectors* kVec8s)))
    elementwise_kernel(const __grid_constant__ Params p, const RowSplit split) {
  using Storage = typename T::Storage;
  using Operator = Elementwise<Params>;
  constexpr int kIn = kInputs<Params>, kOut = kOutputs<Params>;
  constexpr typename Operator::Inputs kInputArrays;
  constexpr typename Operator::Outputs kOutputArrays;
  constexpr bool kOneRow = kSplit != Split::kRows, kWhole = kSplit == Split::kWhole;
  const int vec8s = static_cast<int>(p.columns) / kVec8;
  allow_next_kernel();
  const auto place_of = [&](unsigned block, int thread) {
    if constexpr (kOneRow) return RowPlace{0, static_cast<int>(block) * (kVec8s * kBlock) + thread, kBlock};
    return place_in_rows(split, kVec8s, block, thread);
  };
  const RowPlace at = place_of(blockIdx.x, static_cast<int>(threadIdx.x));
  if constexpr (kPrefetches<T, kIn, kSplit>) {
    constexpr int kBlockBytes = kIn * kBlock * kVec8s * static_cast<int>(sizeof(Vector<T>));
    constexpr std::uint32_t kAhead = kPrefetchBytes / kBlockBytes;
    const auto prefetch = [&](const RowPlace& place) {
      if (kOneRow ? place.first >= vec8s : place.row >= p.num_rows) return;
      const unsigned bytes = min(kVec8s * kBlock, vec8s - place.first) * sizeof(Vector<T>);
      for_each(kInputArrays, [&](auto array, int) {
        if (!array.is_given(p)) return;
        const std::int64_t offset = kOneRow ? 0 : (p.*array.kRows).offset(place.row);
        prefetch_to_l2(row_of<T>(p.*array.kData, offset) + place.first * kVec8, bytes);
      });
    };
    if (threadIdx.x == 0 && (kOneRow || split.log2_rows == 0)) {  // the block has a chunk of one row
      if (blockIdx.x < kAhead) prefetch(at);
      prefetch(place_of(blockIdx.x + kAhead, 0));
    }
  }
  wait_for_previous_kernel();
  if (!kOneRow && at.row >= p.num_rows) return;
  InMemory<T> in[kVec8s][kIn], out[kOut];
  const Storage* from[kIn];
  RowOffsets inputs(p, at.row);
  // Offsets of a thread's vec8s from its first vec8. The thread computes the address of its first vec8 once.
  const int begin = kWhole ? at.first * kVec8 : 0;
  const auto offset = [&](int i) { return (kWhole ? i * kBlock : at.first + i * at.step) * kVec8; };
  for_each(kInputArrays,
           [&](auto array, int k) { from[k] = row_of<T>(p.*array.kData, kOneRow ? begin : inputs.next(array)); });
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    if (!kWhole && at.first + i * at.step >= vec8s) continue;
    for_each(kInputArrays, [&](auto array, int k) {
      if (array.is_given(p)) {
        in[i][k] = {load_vec8_in_order<T>(from[k] + offset(i))};
      } else {
        in[i][k] = Eight<T>{-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
      }
    });
  }
  Storage* to[kOut];
  RowOffsets outputs(p, at.row);
  for_each(kOutputArrays,
           [&](auto array, int k) { to[k] = row_of<T>(p.*array.kData, kOneRow ? begin : outputs.next(array)); });
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    if (!kWhole && at.first + i * at.step >= vec8s) continue;
    Operator::template apply<kForm>(p, in[i], out);
    for_each(kOutputArrays, [&](auto array, int k) {
      if (kOut == 1 || p.*array.kData != nullptr) store_vec8<T>(to[k] + offset(i), out[k]);
    });
  }
}

template <class Params, class T, int kForm>
__global__ void __launch_bounds__(kBlock)
    elementwise_any_kernel(const __grid_constant__ Params p, const RowSplit split) {
  using Operator = Elementwise<Params>;
  const RowPlace at = place_in_rows(split, kVec8, blockIdx.x, static_cast<int>(threadIdx.x));
  allow_next_kernel();
  wait_for_previous_kernel();
  if (at.row >= p.num_rows) return;
  const int columns = static_cast<int>(p.columns);
  Eight<T> in[kInputs<Params>], out[kOutputs<Params>];
  const typename T::Storage* from[kInputs<Params>];
  for_each(typename Operator::Inputs{},
           [&](auto array, int k) { from[k] = row_of<T>(p.*array.kData, (p.*array.kRows).offset(at.row)); });
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    const int column = at.first + j * at.step;
    for_each(typename Operator::Inputs{}, [&](auto array, int k) {
      in[k].v[j] = !array.is_given(p) ? -0.0f : column < columns ? T::load(from[k][column]) : 0.0f;
    });
  }
  Operator::template apply<kForm>(p, in, out);
  typename T::Storage* to[kOutputs<Params>];
  for_each(typename Operator::Outputs{},
           [&](auto array, int k) { to[k] = row_of<T>(p.*array.kData, (p.*array.kRows).offset(at.row)); });
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    const int column = at.first + j * at.step;
    if (column >= columns) continue;
    for_each(typename Operator::Outputs{}, [&](auto array, int k) {
      if (kOutputs<Params> == 1 || p.*array.kData != nullptr) to[k][column] = T::store(out[k].v[j]);
    });
  }
}

// Launches a kernel over rows of `items` items (vec8s or columns). Each thread takes `count` items.
template <bool kOverlap, class Params>
void launch_over_rows(void (*kernel)(Params, RowSplit), const Params& p, std::int64_t items, int count,
                      cudaStream_t stream) {
  const RowSplit split = split_rows(items, count, kLog2Block);
  const unsigned blocks = checked_blocks(blocks_of(split, p.num_rows), Elementwise<Params>::kName);
  launch_dependent<kOverlap>(kernel, static_cast<int>(blocks), kBlock, 0, stream, p, split);
}

// A contiguous call is launched as one row.
template <bool kOverlap, class T, int kForm, int kVec8s, class Params>
void launch_vec8s(const Params& p, cudaStream_t stream) {
  const auto launch_split = [&]<Split kSplit>(const Params& q) {
    launch_over_rows<kOverlap>(&elementwise_kernel<Params, T, kForm, kVec8s, kSplit>, q, q.columns / kVec8, kVec8s,
                               stream);
  };
  if constexpr (T::kPacked) {  // a single row makes float32 calls no faster
    const std::int64_t columns = p.num_rows * p.columns;
    if (is_one_row(p) && (kVec8s == 1 || columns % (kBlock * kVec8s * kVec8) == 0)) {
      Params all = p;
      all.num_rows = 1;
      all.columns = columns;
      return launch_split.template operator() < kVec8s == 1 ? Split::kOneRow : Split::kWhole > (all);
    }
  }
  launch_split.template operator()<Split::kRows>(p);
}

template <bool kOverlap, int kForms, class Params>
void launch(const Params& p, int vec8s, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    with_form<kForms>(form_of(p), [&](auto form) {
      using T = decltype(t);
      constexpr int kForm = decltype(form)::value;
      if (vec8s == 0) {
        launch_over_rows<kOverlap>(&elementwise_any_kernel<Params, T, kForm>, p, p.columns, kVec8, stream);
      } else {
        vec8s == 1 ? launch_vec8s<kOverlap, T, kForm, 1>(p, stream) : launch_vec8s<kOverlap, T, kForm, 2>(p, stream);
      }
    });
  });
  check(cudaGetLastError(), "launch of an elementwise operator");
}

}  // namespace
}  // namespace cuda
}  // namespace rlk

namespace rlk::cuda::RLK_CUDA_ARCH {

#define RLK_ELEMENTWISE(operator, function, Params, forms) \
  void function(const Params& p, int vec8s, cudaStream_t stream) { launch<kOverlap, forms>(p, vec8s, stream); }
#include "rlk/elementwise.inc"

}  // namespace rlk::cuda::RLK_CUDA_ARCH
