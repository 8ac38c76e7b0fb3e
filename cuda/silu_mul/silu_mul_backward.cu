// silu_mul and gelu_mul backward. Bound by HBM: dy, gate and up are read once, d_gate and d_up written once. The activation
// is computed again. Work is split as forward's.
// One body for every architecture; each gets its own machine code.
#include "place.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Blocks of a multiprocessor, at least: what registers allow beside the octets of dy, gate and up.
template <class T, int kOctets>
constexpr int kBackwardBlocks = Octet<T>::kVectors* kOctets == 1   ? 8
                                : Octet<T>::kVectors* kOctets == 2 ? 6
                                                                   : 4;

// Eight columns: from dy, gate and up to d_gate, in dy, and d_up, in up.
template <class T, Activation kActivation>
__device__ __forceinline__ void gradients(bool round_before_mul, float (&dy)[kOctet], float (&g)[kOctet],
                                          float (&u)[kOctet]) {
#pragma unroll
  for (int j = 0; j < kOctet; ++j) {
    const Activated<float> a = activated<kActivation, true>(g[j]);
    u[j] = __fmul_rn(__fmul_rn(dy[j], u[j]), a.slope);
    g[j] = a.value;
  }
  if (round_before_mul) round_octet<T>(g);
#pragma unroll
  for (int j = 0; j < kOctet; ++j) {
    const float d_gate = u[j];
    u[j] = __fmul_rn(dy[j], g[j]);
    dy[j] = d_gate;
  }
}

template <class T, Activation kActivation, int kOctets>
__global__ void __launch_bounds__(kGatedBlock, (kBackwardBlocks<T, kOctets>))
    gated_mul_backward_kernel(const __grid_constant__ GatedMulBackwardParams p, const RowSplit split) {
  const RowPlace at = place<kOctets>(split);
  allow_next_kernel();
  wait_for_previous_kernel();
  if (at.row >= p.num_rows) return;
  const int octets = static_cast<int>(p.columns) / kOctet;
  const std::int64_t gate_offset = p.gate_rows.offset(at.row);
  const auto* dy = row_of<T>(p.dy, p.dy_rows.offset(at.row));
  const auto* gate = row_of<T>(p.gate, gate_offset);
  const auto* up = row_of<T>(p.up, same_rows(p.gate_rows, p.up_rows) ? gate_offset : p.up_rows.offset(at.row));
  Octet<T> d[kOctets], g[kOctets], u[kOctets];
#pragma unroll
  for (int i = 0; i < kOctets; ++i) {
    const int octet = at.first + i * at.step;
    if (octet < octets) {
      g[i] = load_octet_once<T>(gate + octet * kOctet);
      u[i] = load_octet_once<T>(up + octet * kOctet);
      d[i] = load_octet_once<T>(dy + octet * kOctet);
    }
  }
  const std::int64_t d_gate_offset = p.d_gate_rows.offset(at.row);
  auto* d_gate = row_of<T>(p.d_gate, d_gate_offset);
  auto* d_up = row_of<T>(p.d_up, same_rows(p.d_gate_rows, p.d_up_rows) ? d_gate_offset : p.d_up_rows.offset(at.row));
#pragma unroll
  for (int i = 0; i < kOctets; ++i) {
    const int octet = at.first + i * at.step;
    if (octet >= octets) continue;
    float a[kOctet], b[kOctet], c[kOctet];
    d[i].to_float(a);
    g[i].to_float(b);
    u[i].to_float(c);
    gradients<T, kActivation>(p.round_before_mul, a, b, c);
    if (p.d_gate != nullptr) store_octet(d_gate + octet * kOctet, octet_of<T>(a));
    if (p.d_up != nullptr) store_octet(d_up + octet * kOctet, octet_of<T>(c));
  }
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kGatedBlock)
    gated_mul_backward_any_kernel(const __grid_constant__ GatedMulBackwardParams p, const RowSplit split) {
  const RowPlace at = place<kOctet>(split);
  allow_next_kernel();
  wait_for_previous_kernel();
  if (at.row >= p.num_rows) return;
  const auto* dy = row_of<T>(p.dy, p.dy_rows.offset(at.row));
  const auto* gate = row_of<T>(p.gate, p.gate_rows.offset(at.row));
  const auto* up = row_of<T>(p.up, p.up_rows.offset(at.row));
  const int columns = static_cast<int>(p.columns);
  float a[kOctet], b[kOctet], c[kOctet];
#pragma unroll
  for (int j = 0; j < kOctet; ++j) {
    const int k = at.first + j * at.step;
    const bool exists = k < columns;
    a[j] = exists ? T::load(dy[k]) : 0.0f;
    b[j] = exists ? T::load(gate[k]) : 0.0f;
    c[j] = exists ? T::load(up[k]) : 0.0f;
  }
  gradients<T, kActivation>(p.round_before_mul, a, b, c);
  auto* d_gate = row_of<T>(p.d_gate, p.d_gate_rows.offset(at.row));
  auto* d_up = row_of<T>(p.d_up, p.d_up_rows.offset(at.row));
#pragma unroll
  for (int j = 0; j < kOctet; ++j) {
    const int k = at.first + j * at.step;
    if (k >= columns) continue;
    if (p.d_gate != nullptr) d_gate[k] = T::store(a[j]);
    if (p.d_up != nullptr) d_up[k] = T::store(c[j]);
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void gated_mul_backward(const GatedMulBackwardParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    with_activation(p.activation, [&](auto activation) {
      using T = decltype(t);
      constexpr Activation kActivation = decltype(activation)::value;
      if (plan.octets == 0) {
        launch_over_rows<kOverlap>(&gated_mul_backward_any_kernel<T, kActivation>, p, p.columns, kOctet, 1, stream);
      } else if (plan.octets == 1) {
        launch_over_rows<kOverlap>(&gated_mul_backward_kernel<T, kActivation, 1>, p, p.columns / kOctet, 1, 1, stream);
      } else {
        launch_over_rows<kOverlap>(&gated_mul_backward_kernel<T, kActivation, 2>, p, p.columns / kOctet, 2, 1, stream);
      }
    });
  });
  check(cudaGetLastError(), "launch of silu_mul_backward");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
