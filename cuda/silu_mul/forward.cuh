// silu_mul and gelu_mul. Bound by HBM: gate and up are read once, y written once; about 30 instructions an element for silu
// fit into that time on an H200.
//
// gated_mul_kernel: a thread has kOctets times eight columns of a row, whose loads are under way together.
// gated_mul_any_kernel: a thread has eight single columns. Any width, any alignment.
// A thread has read all that it writes over before it writes, so outputs may be inputs.
// One body for every architecture; each gets its own machine code.
#pragma once

#include "place.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Blocks of a multiprocessor, at least: what registers allow beside the octets of gate and up.
template <class T, int kOctets>
constexpr int kForwardBlocks = Octet<T>::kVectors* kOctets == 1   ? 10
                               : Octet<T>::kVectors* kOctets == 2 ? 8
                                                                  : 5;

template <class T, Activation kActivation, int kOctets>
__global__ void __launch_bounds__(kGatedBlock, (kForwardBlocks<T, kOctets>))
    gated_mul_kernel(const __grid_constant__ GatedMulParams p, const RowSplit split) {
  const RowPlace at = place<kOctets>(split);
  if (at.row >= p.num_rows) return;
  const int octets = static_cast<int>(p.columns) / kOctet;
  const std::int64_t gate_offset = p.gate_rows.offset(at.row);
  const auto* gate = row_of<T>(p.gate, gate_offset);
  const auto* up = row_of<T>(p.up, same_rows(p.gate_rows, p.up_rows) ? gate_offset : p.up_rows.offset(at.row));
  Octet<T> g[kOctets], u[kOctets];
#pragma unroll
  for (int i = 0; i < kOctets; ++i) {
    const int octet = at.first + i * at.step;
    if (octet < octets) {
      g[i] = load_octet_once<T>(gate + octet * kOctet);
      u[i] = load_octet_once<T>(up + octet * kOctet);
    }
  }
  auto* y = row_of<T>(p.y, p.y_rows.offset(at.row));
#pragma unroll
  for (int i = 0; i < kOctets; ++i) {
    const int octet = at.first + i * at.step;
    if (octet >= octets) continue;
    float a[kOctet];
    g[i].to_float(a);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) a[j] = activated<kActivation, false>(a[j]).value;
    if (p.round_before_mul) {
      g[i] = rounded_product<T>(a, u[i]);
    } else {
      float b[kOctet];
      u[i].to_float(b);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) a[j] = __fmul_rn(a[j], b[j]);
      g[i] = octet_of<T>(a);
    }
    store_octet(y + octet * kOctet, g[i]);
  }
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kGatedBlock)
    gated_mul_any_kernel(const __grid_constant__ GatedMulParams p, const RowSplit split) {
  const RowPlace at = place<kOctet>(split);
  if (at.row >= p.num_rows) return;
  const auto* gate = row_of<T>(p.gate, p.gate_rows.offset(at.row));
  const auto* up = row_of<T>(p.up, p.up_rows.offset(at.row));
  auto* y = row_of<T>(p.y, p.y_rows.offset(at.row));
  const int columns = static_cast<int>(p.columns);
  float g[kOctet], u[kOctet];
#pragma unroll
  for (int j = 0; j < kOctet; ++j) {
    const int k = at.first + j * at.step;
    g[j] = k < columns ? T::load(gate[k]) : 0.0f;
    u[j] = k < columns ? T::load(up[k]) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kOctet; ++j) g[j] = activated<kActivation, false>(g[j]).value;
  if (p.round_before_mul) round_octet<T>(g);
#pragma unroll
  for (int j = 0; j < kOctet; ++j) {
    const int k = at.first + j * at.step;
    if (k < columns) y[k] = T::store(__fmul_rn(g[j], u[j]));
  }
}

inline void run_forward(const GatedMulParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    with_activation(p.activation, [&](auto activation) {
      using T = decltype(t);
      constexpr Activation kActivation = decltype(activation)::value;
      if (plan.octets == 0) {
        launch_over_rows(&gated_mul_any_kernel<T, kActivation>, p, p.columns, kOctet, stream);
      } else if (plan.octets == 1) {
        launch_over_rows(&gated_mul_kernel<T, kActivation, 1>, p, p.columns / kOctet, 1, stream);
      } else if (plan.octets == 2) {
        launch_over_rows(&gated_mul_kernel<T, kActivation, 2>, p, p.columns / kOctet, 2, stream);
      } else if constexpr (T::kPacked) {
        launch_over_rows(&gated_mul_kernel<T, kActivation, 4>, p, p.columns / kOctet, 4, stream);
      }
    });
  });
  check(cudaGetLastError(), "launch of silu_mul");
}

}  // namespace
}  // namespace rlk::cuda
