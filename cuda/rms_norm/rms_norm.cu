// The forward of rms_norm. HBM limits the speed: x and the residual are read once, and y and the new residual are
// written once.
//
// rms_norm_row_kernel: kThreads threads hold a row in registers between its sum and its output. Thread t has vec8s t, t
//   + kThreads, ..., which make up whole lanes of the contract's sum (row.cuh). There are many short blocks, so that
//   the hardware's scheduler keeps every multiprocessor busy with memory requests. The weight stays in L1.
//   rms_norm_any_kernel: a block reads a row twice. This kernel supports any width and alignment. All architectures
//   share this source; each has its own machine code.
#include "../common/dependent_launch.cuh"
#include "kernels.h"
#include "row.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

constexpr int kForwardBlock = 128;     // minimum number of threads per block
constexpr int kForwardThreads = 1024;  // minimum number of threads per multiprocessor, with 64 registers each
constexpr int kAnyThreads = kRmsNormLanes;
// In calls that move fewer bytes than this, loads and stores are evict-first in L2. So the inputs leave room in L2 for
// the outputs.
constexpr std::int64_t kLargeBytes = std::int64_t{1} << 27;

template <int kThreads>
constexpr int kRowBlock = kThreads < kForwardBlock ? kForwardBlock : kThreads;
template <class T, int kThreads, int kVec8s>
constexpr int kRowBlocks = kForwardThreads / kRowBlock<kThreads> / (Vec8<T>::kVectors * kVec8s > 4 ? 2 : 1);

// Prefetches up to two rows of up to kVec8s vec8s into L2. One of them is a row that a later block will load. The other
// is this block's own row, if no earlier block prefetches it.
template <class T, int kVec8s, bool kResidual>
__device__ __forceinline__ void prefetch_rows(const RmsNormParams& p, std::int64_t row) {
  using Storage = typename T::Storage;
  constexpr int kRowBytes = kVec8s * kVec8 * static_cast<int>(sizeof(Storage));
  constexpr std::int64_t kAhead = kPrefetchBytes / kRowBytes;
  const auto bytes = static_cast<std::uint32_t>(p.columns) * static_cast<std::uint32_t>(sizeof(Storage));
  const Storage* x = static_cast<const Storage*>(p.x);
  if (row < kAhead) {
    prefetch_to_l2(x + p.x_rows.offset(row), bytes);
    if constexpr (kResidual) {
      prefetch_to_l2(static_cast<const Storage*>(p.residual) + p.residual_rows.offset(row), bytes);
    }
  }
  if constexpr (T::kPacked && !kResidual) {  // rows of float32 have enough bytes in flight without prefetches
    if (row + kAhead < p.num_rows) prefetch_to_l2(x + p.x_rows.offset(row + kAhead), bytes);
  }
}

// kPlain: is_plain() is true for the call, as for most calls, so the kernel need not test these properties. `many`: the
// call has many rows, as every call of a kernel with kPlain and kResidual. For many rows with a residual, the kernel
// prefetches no rows and loads weights only after a row's sum. This leaves registers for loads of more rows.
template <class T, int kThreads, int kVec8s, bool kResidual, bool kPlain>
__global__ void __launch_bounds__(kRowBlock<kThreads>, (kRowBlocks<T, kThreads, kVec8s>))
    rms_norm_row_kernel(const __grid_constant__ RmsNormParams p, [[maybe_unused]] bool many, bool evict_first) {
  using Storage = typename T::Storage;
  constexpr int kRows = kRowBlock<kThreads> / kThreads;
  constexpr int kLanes = kVec8s < kRmsNormLanes / kThreads ? kVec8s : kRmsNormLanes / kThreads;  // lanes per thread
  __shared__ float of_warps[kRows][kSumNodes<kThreads, kLanes>];
  const bool sum_first = kResidual && (kPlain || many);  // whether weights are loaded after the sum
  const int of_block = kRows == 1 ? 0 : static_cast<int>(threadIdx.x / kThreads);
  const int thread = static_cast<int>(threadIdx.x) - of_block * kThreads;
  const std::int64_t row = std::int64_t{blockIdx.x} * kRows + of_block;
  const int vec8s = row < p.num_rows ? static_cast<int>(static_cast<std::uint32_t>(p.columns) / kVec8) : 0;
  const auto offset = [&](const RowLayout& rows) {
    if constexpr (kPlain) return row * rows.inner_stride;
    return rows.offset(row);
  };
  Vec8<T> h[kVec8s]{}, w[kVec8s];
  const Storage* x = static_cast<const Storage*>(p.x) + offset(p.x_rows);
  const std::uint64_t policy = l2_policy(evict_first);
  allow_next_kernel();
  if constexpr (kThreads >= 32) {  // narrow rows are not faster with prefetches
    if (!sum_first && thread == 0 && vec8s > 0) prefetch_rows<T, kThreads * kVec8s, kResidual>(p, row);
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    const int vec8 = thread + i * kThreads;
    if (vec8 < vec8s) h[i] = load_vec8_in_order<T>(x + vec8 * kVec8, policy);
  }
  const bool early_weight =
      !sum_first && (kPlain || (p.weight != nullptr && p.weight_dtype == p.dtype && p.y != nullptr));
  if constexpr (kResidual) {
    const Storage* residual = static_cast<const Storage*>(p.residual) + offset(p.residual_rows);
    Storage* new_residual = static_cast<Storage*>(p.new_residual) + offset(p.new_residual_rows);
    Vec8<T> more[kVec8s];
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      const int vec8 = thread + i * kThreads;
      if (vec8 < vec8s) more[i] = load_vec8_in_order<T>(residual + vec8 * kVec8, policy);
    }
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      const int vec8 = thread + i * kThreads;
      if (vec8 >= vec8s) continue;
      float a[kVec8], b[kVec8];
      h[i].to_float(a);
      more[i].to_float(b);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) a[j] = __fadd_rn(a[j], b[j]);
      h[i] = vec8_of<T>(a);
      store_vec8<T>(new_residual + vec8 * kVec8, h[i], policy);
    }
  }
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    const int vec8 = thread + i * kThreads;
    if (early_weight && vec8 < vec8s) w[i] = load_vec8<T>(static_cast<const Storage*>(p.weight) + vec8 * kVec8);
  }
  float lanes[kLanes] = {};
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {  // missing vec8s are +0, which changes no sum of squares
    float z[kVec8];
    h[i].to_float(z);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) lanes[i % kLanes] = __fmaf_rn(z[j], z[j], lanes[i % kLanes]);
  }
  const float rstd = rms_norm_rstd(row_sum<kThreads>(lanes, of_warps[of_block]), p.columns, p.eps);
  if (p.rstd != nullptr && thread == 0 && row < p.num_rows) p.rstd[row] = Fp32::store(rstd);
  if (!kPlain && p.y == nullptr) return;
  Storage* y = static_cast<Storage*>(p.y) + offset(p.y_rows);
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    const int vec8 = thread + i * kThreads;
    if (vec8 >= vec8s) continue;
    float z[kVec8], weight[kVec8];
    h[i].to_float(z);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) z[j] = __fmul_rn(z[j], rstd);
    if (kPlain || p.weight != nullptr) {
      if constexpr (kPlain) {
        if (!early_weight) w[i] = load_vec8<T>(static_cast<const Storage*>(p.weight) + vec8 * kVec8);
      }
      if (kPlain || early_weight) {
        w[i].to_float(weight);
#pragma unroll
        for (int j = 0; j < kVec8; ++j) weight[j] = rms_norm_weight(weight[j], p.weight_offset);
      } else {
        load_weights<T, true>(p, vec8 * kVec8, kVec8, weight);
      }
      if (p.round_before_weight) round_vec8<T>(z);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) z[j] = __fmul_rn(z[j], weight[j]);
    }
    store_vec8<T>(y + vec8 * kVec8, vec8_of<T>(z), policy);
  }
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kAnyThreads) rms_norm_any_kernel(const __grid_constant__ RmsNormParams p) {
  using Storage = typename T::Storage;
  __shared__ float of_warps[kSumNodes<kAnyThreads, 1>];
  const std::int64_t row = blockIdx.x;
  const int columns = static_cast<int>(p.columns), first = static_cast<int>(threadIdx.x) * kVec8;
  constexpr int kStep = kAnyThreads * kVec8;
  const Storage* x = static_cast<const Storage*>(p.x) + p.x_rows.offset(row);
  const Storage* residual = static_cast<const Storage*>(p.residual);
  Storage* new_residual = static_cast<Storage*>(p.new_residual);
  if (residual != nullptr) {
    residual += p.residual_rows.offset(row);
    new_residual += p.new_residual_rows.offset(row);
  }
  allow_next_kernel();
  wait_for_previous_kernel();
  float lanes[1] = {};
#pragma unroll 1
  for (std::int64_t k = first; k < columns; k += kStep) {
    const int count = static_cast<int>(columns - k);
    float z[kVec8];
    load_columns<T, kVector>(x + k, count, z);
    if (residual != nullptr) {
      float more[kVec8];
      load_columns<T, kVector>(residual + k, count, more);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) z[j] = __fadd_rn(z[j], more[j]);
      round_vec8<T>(z);
      store_columns<T, kVector>(new_residual + k, count, z);
    }
#pragma unroll
    for (int j = 0; j < kVec8; ++j) lanes[0] = __fmaf_rn(z[j], z[j], lanes[0]);
  }
  const float rstd = rms_norm_rstd(row_sum<kAnyThreads>(lanes, of_warps), p.columns, p.eps);
  if (p.rstd != nullptr && threadIdx.x == 0) p.rstd[row] = Fp32::store(rstd);
  if (p.y == nullptr) return;
  const Storage* h = residual != nullptr ? new_residual : x;  // each thread reads only its own writes
  Storage* y = static_cast<Storage*>(p.y) + p.y_rows.offset(row);
#pragma unroll 1
  for (std::int64_t k = first; k < columns; k += kStep) {
    const int count = static_cast<int>(columns - k);
    float z[kVec8], weight[kVec8];
    load_columns<T, kVector>(h + k, count, z);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) z[j] = __fmul_rn(z[j], rstd);
    if (p.weight != nullptr) {
      load_weights<T, kVector>(p, static_cast<int>(k), count, weight);
      if (p.round_before_weight) round_vec8<T>(z);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) z[j] = __fmul_rn(z[j], weight[j]);
    }
    store_columns<T, kVector>(y + k, count, z);
  }
}

template <bool kOverlap, class T, int kThreads, int kVec8s>
void run_rows(const RmsNormParams& p, cudaStream_t stream) {
  constexpr int kRows = kRowBlock<kThreads> / kThreads;
  const unsigned blocks = checked_blocks((p.num_rows + kRows - 1) / kRows, "rms_norm");
  const bool many = p.num_rows > kMostFewRows;
  const std::int64_t arrays = p.residual == nullptr ? 2 : 4;
  const bool evict_first = p.num_rows * p.columns * size_of(p.dtype) * arrays < kLargeBytes;
  const auto launch = [&](auto* kernel) {
    launch_dependent<kOverlap>(kernel, static_cast<int>(blocks), kRowBlock<kThreads>, 0, stream, p, many, evict_first);
  };
  if (p.residual == nullptr) {
    launch(is_plain(p) ? rms_norm_row_kernel<T, kThreads, kVec8s, false, true>
                       : rms_norm_row_kernel<T, kThreads, kVec8s, false, false>);
  } else {
    launch(is_plain(p) && many ? rms_norm_row_kernel<T, kThreads, kVec8s, true, true>
                               : rms_norm_row_kernel<T, kThreads, kVec8s, true, false>);
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void rms_norm(const RmsNormParams& p, const RmsNormPlan& plan, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if (plan.threads == 0) {
      const unsigned blocks = checked_blocks(p.num_rows, "rms_norm");
      launch_dependent<kOverlap>(has_vectors(p) ? rms_norm_any_kernel<T, true> : rms_norm_any_kernel<T, false>,
                                 static_cast<int>(blocks), kAnyThreads, 0, stream, p);
    } else if (plan.threads == 8) {
      run_rows<kOverlap, T, 8, 4>(p, stream);
    } else if (plan.threads == 32) {
      run_rows<kOverlap, T, 32, 4>(p, stream);
    } else if (plan.threads == 128) {
      run_rows<kOverlap, T, 128, 4>(p, stream);
    } else if (plan.vec8s == 4) {
      run_rows<kOverlap, T, 256, 4>(p, stream);
    } else if constexpr (T::kPacked) {  // registers do not hold eight vec8s of fp32
      run_rows<kOverlap, T, 256, 8>(p, stream);
    }
  });
  check(cudaGetLastError(), "launch of rms_norm");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
