// dlogits of logprob, lse and entropy: elementwise over a row given its saved lse and entropy.
// Bound by HBM: each logit is read once and each gradient written once (2 * vocab_size * sizeof(T) bytes a row).
// One body for every architecture: it uses nothing that SM90 adds; each gets its own machine code.
#pragma once

#include "kernels.h"
#include "leaf_group.cuh"
#include "rlk/math/expm1.h"

namespace rlk::cuda {

constexpr int kBackwardThreads = 256;
constexpr int kBackwardOctets = 4;  // per thread, loaded before the first is used
constexpr int kBackwardColumns = kBackwardThreads * kBackwardOctets * kOctet;

// Row constants of the contract.
struct BackwardRow {
  float c, u;     // log2 p = fma(z, c, -u)
  float a, b, g;  // of lse and entropy, of entropy's log p, of the target
  float minus_a;  // fl(a - g): what a column other than the target gets
};

__device__ __forceinline__ float gradient_at(const float* gradient, const RowLayout& rows, std::int64_t row) {
  return gradient ? gradient[rows.offset(row)] : 0.0f;
}

template <Exp kExp>
__device__ __forceinline__ float probability(float t) {
  if constexpr (kExp == Exp::kHardware) {
    return ex2_approx(t);
  } else {
    const float p = exp2_normal(t < 127.0f ? t : (is_nan(t) ? t : 127.0f));
    return t < -126.0f ? 0.0f : p;
  }
}

template <Exp kExp>
__device__ __forceinline__ float column_gradient(float z, const BackwardRow& r, bool is_target) {
  const float t = fma_rn(z, r.c, -r.u);
  const float clamped = t < -127.0f ? -127.0f : t;  // keeps a NaN
  const float p = probability<kExp>(clamped);
  if (is_target) return fma_rn(p, fma_rn(r.b, clamped, r.a), mul_rn(-r.g, expm1(mul_rn(kLn2, t))));
  return fma_rn(p, fma_rn(r.b, clamped, r.minus_a), 0.0f);
}

// Under a scale or a softcap: the gradient of x through z.
template <Exp kExp>
__device__ __forceinline__ float transformed_gradient(float x, const LogprobInput& p, float inverse,
                                                      const BackwardRow& r, bool is_target) {
  float z = mul_rn(x, p.logit_scale);
  if (p.softcap == 0.0f) return column_gradient<kExp>(z, r, is_target);
  if (abs_of(z) == infinity()) return z < 0.0f ? 0.0f : canonical_nan();
  const float h = tanh(mul_rn(z, inverse));
  z = mul_rn(p.softcap, h);
  return mul_rn(column_gradient<kExp>(z, r, is_target), fma_rn(-h, h, 1.0f));
}

template <class T, Exp kExp>
__device__ __forceinline__ void backward_segment(const LogprobBackwardParams& p, std::uint32_t* bitmap) {
  using Storage = typename T::Storage;
  const int segments = static_cast<int>((p.num_columns + kBackwardColumns - 1) / kBackwardColumns);
  const std::int64_t row = blockIdx.x / segments;
  const std::int64_t first = std::int64_t{blockIdx.x % segments} * kBackwardColumns;
  const std::int64_t left = p.num_columns - first;
  const int columns = left < kBackwardColumns ? static_cast<int>(left) : kBackwardColumns;
  const Storage* logits = row_of<T>(p, row) + first;
  Storage* dlogits = static_cast<Storage*>(p.dlogits) + p.dlogits_rows.offset(row) + first;
  const bool vectors = (reinterpret_cast<std::uintptr_t>(logits) | reinterpret_cast<std::uintptr_t>(dlogits)) % 16 == 0;

  const std::int64_t target = target_of(p, row);
  const float dlogprob = gradient_at(p.dlogprob, p.dlogprob_rows, row);
  const float dlse = gradient_at(p.dlse, p.dlse_rows, row);
  const float dentropy = gradient_at(p.dentropy, p.dentropy_rows, row);
  const bool empty = target == p.ignore_index || (dlogprob == 0.0f && dlse == 0.0f && dentropy == 0.0f);
  // Columns past valid_vocab get +0 like those of an empty row.
  const std::int64_t valid_left = p.valid_vocab - (p.vocab_start + first);
  const int valid = empty || valid_left <= 0 ? 0 : valid_left < columns ? static_cast<int>(valid_left) : columns;

  Octet<T> x[kBackwardOctets];
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kBackwardOctets; ++i) {
      const int column = (i * kBackwardThreads + static_cast<int>(threadIdx.x)) * kOctet;
      if (column + kOctet <= valid) {
#pragma unroll
        for (int j = 0; j < Octet<T>::kVectors; ++j) x[i].v[j] = reinterpret_cast<const uint4*>(logits + column)[j];
      }
    }
  }

  BackwardRow r{};
  float inverse = 0.0f;
  const std::uint32_t* keep = nullptr;
  if (!empty) {
    const float temperature = temperature_of(p, row);
    const float k = div_rn(p.logit_scale, temperature);
    r.c = log2_scale(temperature);
    r.u = mul_rn(p.lse[row], kLog2e);
    const float entropy = p.dentropy ? p.entropy[row] : 0.0f;
    r.a = mul_rn(fma_rn(-dentropy, entropy, dlse), k);
    r.b = mul_rn(mul_rn(-dentropy, kLn2), k);
    const bool bad_target = target < 0 || target >= p.valid_vocab;
    r.g = bad_target && dlogprob != 0.0f ? canonical_nan() : mul_rn(dlogprob, k);
    r.minus_a = sub_rn(r.a, r.g);
    inverse = inverse_softcap(p);
    const KeptRange kept = kept_range(p, row);
    if (kept.restricts()) {
      for (int i = threadIdx.x; i < kBackwardColumns / 32; i += kBackwardThreads) bitmap[i] = 0;
      __syncthreads();
      const std::int64_t start = p.vocab_start + first;
      scan_kept(p, kept, target, threadIdx.x, kBackwardThreads, [&](std::int64_t id) {
        const std::int64_t column = id - start;
        if (column >= 0 && column < columns) atomicOr(&bitmap[column >> 5], 1u << (column & 31));
      });
      __syncthreads();
      keep = bitmap;
    }
  }
  const bool transformed = p.logit_scale != 1.0f || p.softcap != 0.0f;
  const std::int64_t target_column = target - (p.vocab_start + first);

  const auto gradient = [&](float value, int column) -> float {
    if (column >= valid || (keep && !(keep[column >> 5] >> (column & 31) & 1))) return 0.0f;
    const bool is_target = column == target_column;
    return transformed ? transformed_gradient<kExp>(value, p, inverse, r, is_target)
                       : column_gradient<kExp>(value, r, is_target);
  };

  if (!vectors) {
    for (int column = threadIdx.x; column < columns; column += kBackwardThreads) {
      const float value = column < valid ? T::load(logits[column]) : 0.0f;
      dlogits[column] = T::store(gradient(value, column));
    }
    return;
  }
  const bool plain = !transformed && !keep;
#pragma unroll
  for (int i = 0; i < kBackwardOctets; ++i) {
    const int column = (i * kBackwardThreads + static_cast<int>(threadIdx.x)) * kOctet;
    if (plain && column + kOctet <= valid) {
      float z[kOctet];
      x[i].to_float(z);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) z[j] = column_gradient<kExp>(z[j], r, false);
      Octet<T> d;
      d.from_float(z);
      const bool has_target = target_column >= column && target_column < column + kOctet;
      const float at_target = has_target ? T::load(logits[target_column]) : 0.0f;  // before an in-place store
#pragma unroll
      for (int j = 0; j < Octet<T>::kVectors; ++j) reinterpret_cast<uint4*>(dlogits + column)[j] = d.v[j];
      if (has_target) dlogits[target_column] = T::store(column_gradient<kExp>(at_target, r, true));
    } else if (valid == 0 && column + kOctet <= columns) {
#pragma unroll
      for (int j = 0; j < Octet<T>::kVectors; ++j) reinterpret_cast<uint4*>(dlogits + column)[j] = uint4{};
    } else {
      const int end = column + kOctet < columns ? column + kOctet : columns;
      for (int j = column; j < end; ++j) dlogits[j] = T::store(gradient(j < valid ? T::load(logits[j]) : 0.0f, j));
    }
  }
}

template <class T, Exp kExp>
__global__ void __launch_bounds__(kBackwardThreads)
    logprob_backward_kernel(const __grid_constant__ LogprobBackwardParams p) {
  __shared__ std::uint32_t bitmap[kBackwardColumns / 32];
  backward_segment<T, kExp>(p, bitmap);
}

template <class T>
void run_backward(const LogprobBackwardParams& p, cudaStream_t stream) {
  const std::int64_t segments = (p.num_columns + kBackwardColumns - 1) / kBackwardColumns;
  const auto blocks = static_cast<unsigned>(p.num_rows * segments);
  if (p.exp == Exp::kHardware) {
    logprob_backward_kernel<T, Exp::kHardware><<<blocks, kBackwardThreads, 0, stream>>>(p);
  } else {
    logprob_backward_kernel<T, Exp::kPortable><<<blocks, kBackwardThreads, 0, stream>>>(p);
  }
  check(cudaGetLastError(), "launch of logprob_backward");
}

inline void run_backward_for_dtype(const LogprobBackwardParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run_backward<Fp32>(p, stream);
    case DType::kBFloat16:
      return run_backward<Bf16>(p, stream);
    default:
      return run_backward<Fp16>(p, stream);
  }
}

}  // namespace rlk::cuda
