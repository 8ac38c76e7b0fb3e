// dlogits of logprob, lse and entropy. The computation is elementwise, with the saved lse and entropy of the row. HBM
// limits the speed: each logit is read once, and each gradient is written once (2 * vocab_size * sizeof(T) bytes per
// row).
//
// Each block computes one segment of a row. Segments are short, so that the hardware's scheduler passes over memory in
// order and balances the multiprocessors. A thread loads all of its 16-byte vectors before it uses the first vector.
// Vectors are aligned in dlogits. If a row of dlogits does not begin at a multiple of 16 bytes, its first and last
// columns are processed one by one. In place (dlogits == logits) the thread that writes a vector has read it before.
// All architectures share this source; each has its own machine code.
#include <algorithm>

#include "../common/element.cuh"
#include "../common/kernels.h"
#include "kernels/vocabulary/logprob_groups.h"
#include "probability.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

constexpr int kBackwardThreads = 128;
constexpr int kBackwardVectors = 8;  // vectors per thread
// Blocks per multiprocessor. These numbers were fastest in measurements, and the portable exponential is fastest with
// one more block than the hardware's.
template <Exp kExp>
constexpr int kBackwardBlocks = kExp == Exp::kHardware ? 6 : 7;
template <class T>
constexpr int kSegmentColumns = kBackwardThreads* kBackwardVectors* Vector<T>::kColumns;
constexpr int kMaxGridRows = 32768;  // the most rows in the grid's second dimension

// Returns the gradients of a vector of columns, as if none were the target, in calls that neither scale nor softcap
// logits. If all columns lie within the bounds of the exponential, the code is shorter, since no column is clamped.
template <class T, Exp kExp, class Row>
__device__ __forceinline__ Vector<T> vector_gradient(const Vector<T>& x, const Row& r) {
  constexpr int kColumns = Vector<T>::kColumns;
  RangeOf<T> range_of(x);
  range_of.add(x);
  const Range range = range_of.range();
  float z[kColumns];
  x.to_float(z);
  if (fma_rn(range.smallest, r.c, -r.u) >= -126.0f && fma_rn(range.largest, r.c, -r.u) <= 127.0f) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float t = fma_rn(z[j], r.c, -r.u);
      const float p = kExp == Exp::kHardware ? ex2_approx(t) : exp2_normal(t);
      z[j] = fma_rn(p, fma_rn(r.b, t, r.minus_a), of_every_column(r));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) z[j] = column_gradient<Probability<kExp>>(z[j], r, false);
  }
  Vector<T> d;
  d.from_float(z);
  return d;
}

// A block's segment of a row, in vectors of 16 bytes. Vector v holds kColumns columns from first + v * kColumns on. In
// dlogits the vectors are aligned.
template <class T>
struct Segment {
  const typename T::Storage* logits;  // the row's logits
  typename T::Storage* dlogits;
  int first;   // column where vector 0 begins; it is negative if the vector begins before the row
  int valid;   // number of columns of the row that have a gradient; 0 if the row is ignored or has no gradient
  int target;  // target column; -1 if the shard does not contain it

  __device__ __forceinline__ int column(int i) const {
    return first + (i * kBackwardThreads + static_cast<int>(threadIdx.x)) * Vector<T>::kColumns;
  }
  // Whether all columns of the vector at `column` lie inside the row and have a gradient.
  __device__ __forceinline__ bool holds(int column) const {
    return column >= 0 && column + Vector<T>::kColumns <= valid;
  }
};
template <class T>
__device__ __forceinline__ Segment<T> segment_of(const LogprobBackwardParams& p, const RowGradient& g,
                                                 std::int64_t row) {
  using Storage = typename T::Storage;
  const Storage* logits = row_of<T>(p, row);
  Storage* dlogits = static_cast<Storage*>(p.dlogits) + p.dlogits_rows.offset(row);
  const auto to = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(dlogits));
  // Columns from valid_vocab on get +0, and so do all columns of a row without a gradient.
  const std::int64_t valid = g.empty(p.ignore_index) ? 0 : p.valid_vocab - p.vocab_start;
  const std::int64_t target = g.target - p.vocab_start;
  return {logits, dlogits,
          static_cast<int>(blockIdx.x) * kSegmentColumns<T> - static_cast<int>(to % 16 / sizeof(Storage)),
          static_cast<int>(valid < p.num_columns ? valid : p.num_columns),
          target >= 0 && target < p.num_columns ? static_cast<int>(target) : -1};
}

__device__ __forceinline__ uint4 load_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_16(void* to, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Marks the segment's kept columns in `bitmap`. Returns false if the row is not restricted.
template <class T>
__device__ __forceinline__ bool mark_segment(const LogprobBackwardParams& p, std::int64_t row, std::int64_t target,
                                             int first, std::uint32_t* bitmap) {
  const KeptRange kept = kept_range(p, row);
  if (!kept.restricts()) return false;
  for (int i = threadIdx.x; i < kSegmentColumns<T> / 32; i += kBackwardThreads) bitmap[i] = 0;
  __syncthreads();
  const std::int64_t start = p.vocab_start + first;
  scan_kept(p, kept, target, threadIdx.x, kBackwardThreads, [&](std::int64_t id) {
    const std::int64_t bit = id - start;
    if (bit >= 0 && bit < kSegmentColumns<T>) atomicOr(&bitmap[bit >> 5], 1u << (bit & 31));
  });
  __syncthreads();
  return true;
}

// The gradient of a single column: for calls with a transform, for restricted rows, for the ends of rows, and for the
// target.
template <class T, Exp kExp, class Row>
struct ElementGradient {
  const LogprobInput& p;
  const Segment<T>& s;
  const Row& r;
  const std::uint32_t* keep;  // bits of the segment's kept columns; null if the row is not restricted
  float inverse_softcap;

  __device__ __forceinline__ typename T::Storage operator()(int column, typename T::Storage x) const {
    const int bit = column - s.first;
    if (keep && !(keep[bit >> 5] >> (bit & 31) & 1)) return T::store(0.0f);
    return T::store(transformed_gradient<Probability<kExp>>(T::load(x), p, inverse_softcap, r, column == s.target));
  }
  __device__ __forceinline__ typename T::Storage at(int column) const {
    return column < s.valid ? (*this)(column, s.logits[column]) : T::store(0.0f);
  }
  // Writes the columns of a vector, except those outside the row.
  __device__ __forceinline__ void write_columns(int column) const {
    const int end = column + Vector<T>::kColumns, columns = static_cast<int>(p.num_columns);
#pragma unroll 1
    for (int j = column < 0 ? 0 : column; j < end && j < columns; ++j) s.dlogits[j] = at(j);
  }
  // Writes a whole vector: computes its columns one by one in `slot` (shared memory), then stores 16 bytes at once.
  __device__ __forceinline__ void write_whole(int column, Vector<T>* slot) const {
#pragma unroll 1
    for (int j = 0; j < Vector<T>::kColumns; ++j) reinterpret_cast<typename T::Storage*>(slot)[j] = at(column + j);
    store_16(s.dlogits + column, slot->v);
  }
};

// Computes all vectors of a thread, for calls without a transform of logits and without restricted rows.
template <class T, Exp kExp, class Row>
__device__ __forceinline__ void plain_vectors(const Segment<T>& s, const ElementGradient<T, kExp, Row>& element,
                                              const Vector<T> (&x)[kBackwardVectors]) {
  // The target's logit is read first, since in place (dlogits == logits) the store of its vector would overwrite it.
  const int from_target = s.target - s.column(0);
  constexpr int kStride = kBackwardThreads * Vector<T>::kColumns;
  const bool has_target = from_target >= 0 && from_target % kStride < Vector<T>::kColumns &&
                          from_target < kSegmentColumns<T> && s.holds(s.target - from_target % kStride);
  typename T::Storage at_target{};
  if (has_target) at_target = s.logits[s.target];
#pragma unroll
  for (int i = 0; i < kBackwardVectors; ++i) {
    if (s.holds(s.column(i))) store_16(s.dlogits + s.column(i), vector_gradient<T, kExp>(x[i], element.r).v);
  }
  if (has_target) s.dlogits[s.target] = element(s.target, at_target);
}

// kPlain: logits are not transformed, no row is restricted to a kept set, and rows_are_alike() is true. Row:
// SmoothedRow if the call has label smoothing or is not plain, else BackwardRow.
template <class T, Exp kExp, bool kPlain, class Row>
__global__ void __launch_bounds__(kBackwardThreads, kPlain ? kBackwardBlocks<kExp> : 1)
    logprob_backward_kernel(const __grid_constant__ LogprobBackwardParams p) {
  constexpr int kColumns = Vector<T>::kColumns;
  const std::int64_t row = blockIdx.y + std::int64_t{blockIdx.z} * kMaxGridRows;
  if (row >= p.num_rows) return;
  const RowGradient gradient = row_gradient(p, row);
  const Segment<T> s = segment_of<T>(p, gradient, row);
  Vector<T> x[kBackwardVectors];
#pragma unroll
  for (int i = 0; i < kBackwardVectors; ++i) {
    if (kPlain && s.holds(s.column(i))) x[i].v = load_16(s.logits + s.column(i));
  }
  Row r{};
  if (s.valid > 0) set_row(p, gradient, row, &r);
  ElementGradient<T, kExp, Row> element{p, s, r, nullptr, 0.0f};
  Vector<T>* slot = nullptr;
  if constexpr (kPlain) {
    plain_vectors<T, kExp, Row>(s, element, x);
    if (s.holds(s.column(0)) && s.holds(s.column(kBackwardVectors - 1))) return;
  } else {
    __shared__ std::uint32_t bitmap[kSegmentColumns<T> / 32];
    __shared__ Vector<T> slots[kBackwardThreads];
    slot = slots + threadIdx.x;
    element.inverse_softcap = inverse_softcap(p);
    if (s.valid > 0 && mark_segment<T>(p, row, gradient.target, s.first, bitmap)) element.keep = bitmap;
  }
#pragma unroll 1
  for (int i = 0; i < kBackwardVectors; ++i) {
    const int column = s.column(i);
    const bool whole = column >= 0 && column + kColumns <= p.num_columns;
    if (kPlain && s.holds(column)) continue;
    if (whole && column >= s.valid) {
      store_16(s.dlogits + column, uint4{});
    } else if (whole && !kPlain) {
      element.write_whole(column, slot);
    } else {
      element.write_columns(column);
    }
  }
}

// Whether all rows begin at multiples of 16 bytes.
template <class T>
bool rows_are_aligned(const void* base, const RowLayout& rows) {
  return reinterpret_cast<std::uintptr_t>(base) % 16 == 0 &&
         (rows.outer_stride | rows.inner_stride) % Vector<T>::kColumns == 0;
}
// Whether each row's logits and dlogits have the same address modulo 16.
template <class T>
bool rows_are_alike(const LogprobBackwardParams& p) {
  const RowLayout &a = p.logits_rows, &b = p.dlogits_rows;
  const auto difference = reinterpret_cast<std::uintptr_t>(p.logits) - reinterpret_cast<std::uintptr_t>(p.dlogits);
  const bool same_steps = (a.inner == b.inner || (p.num_rows <= a.inner && p.num_rows <= b.inner)) &&
                          (a.inner_stride - b.inner_stride) % Vector<T>::kColumns == 0 &&
                          (a.outer_stride - b.outer_stride) % Vector<T>::kColumns == 0;
  return difference % 16 == 0 &&
         (same_steps || (rows_are_aligned<T>(p.logits, a) && rows_are_aligned<T>(p.dlogits, b)));
}

template <class T, Exp kExp>
void run_backward(const LogprobBackwardParams& p, cudaStream_t stream) {
  // A row that does not begin at a multiple of 16 bytes may need one more vector.
  const std::int64_t extra = rows_are_aligned<T>(p.dlogits, p.dlogits_rows) ? 0 : Vector<T>::kColumns - 1;
  const std::int64_t segments = (p.num_columns + extra + kSegmentColumns<T> - 1) / kSegmentColumns<T>;
  constexpr std::int64_t kMaxGridDepth = 65535;
  RLK_CHECK(p.num_rows <= kMaxGridDepth * kMaxGridRows, "logprob_backward: too many rows for one launch");
  const std::int64_t rows = std::min<std::int64_t>(p.num_rows, kMaxGridRows);
  const dim3 grid(static_cast<unsigned>(segments), static_cast<unsigned>(rows),
                  static_cast<unsigned>((p.num_rows + kMaxGridRows - 1) / kMaxGridRows));
  const bool plain = p.logit_scale == 1.0f && p.softcap == 0.0f && !p.kept_offsets && rows_are_alike<T>(p);
  auto* kernel = !plain                      ? logprob_backward_kernel<T, kExp, false, SmoothedRow>
                 : p.label_smoothing != 0.0f ? logprob_backward_kernel<T, kExp, true, SmoothedRow>
                                             : logprob_backward_kernel<T, kExp, true, BackwardRow>;
  kernel<<<grid, kBackwardThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of logprob_backward");
}

template <class T>
void run_backward(const LogprobBackwardParams& p, cudaStream_t stream) {
  p.exp == Exp::kHardware ? run_backward<T, Exp::kHardware>(p, stream) : run_backward<T, Exp::kPortable>(p, stream);
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void logprob_backward(const LogprobBackwardParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run_backward<Fp32>(p, stream);
    case DType::kBFloat16:
      return run_backward<Bf16>(p, stream);
    default:
      return run_backward<Fp16>(p, stream);
  }
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
