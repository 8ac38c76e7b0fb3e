// silu_mul and gelu_mul backward. Bound by HBM: dy, gate and up are read once, d_gate and d_up written once. The activation
// is computed again. Work is split as forward's.
// One body for every architecture; each gets its own machine code.
#include "place.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Blocks of a multiprocessor, at least: what registers allow beside the vec8s of dy, gate and up.
template <class T, int kVec8s>
constexpr int kBackwardBlocks = Vec8<T>::kVectors* kVec8s == 1   ? 8
                                : Vec8<T>::kVectors* kVec8s == 2 ? 6
                                                                 : 4;

// Eight columns: from dy, gate and up to d_gate, in dy, and d_up, in up.
template <class T, Activation kActivation>
__device__ __forceinline__ void gradients(bool round_before_mul, float (&dy)[kVec8], float (&g)[kVec8],
                                          float (&u)[kVec8]) {
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    const Activated<float> a = activated<kActivation, true>(g[j]);
    u[j] = __fmul_rn(__fmul_rn(dy[j], u[j]), a.slope);
    g[j] = a.value;
  }
  if (round_before_mul) round_vec8<T>(g);
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    const float d_gate = u[j];
    u[j] = __fmul_rn(dy[j], g[j]);
    dy[j] = d_gate;
  }
}

template <class T, Activation kActivation, int kVec8s>
__global__ void __launch_bounds__(kGatedBlock, (kBackwardBlocks<T, kVec8s>))
    gated_mul_backward_kernel(const __grid_constant__ GatedMulBackwardParams p, const RowSplit split) {
  const RowPlace at = place<kVec8s>(split);
  allow_next_kernel();
  wait_for_previous_kernel();
  if (at.row >= p.num_rows) return;
  const int vec8s = static_cast<int>(p.columns) / kVec8;
  const std::int64_t gate_offset = p.gate_rows.offset(at.row);
  const auto* dy = row_of<T>(p.dy, p.dy_rows.offset(at.row));
  const auto* gate = row_of<T>(p.gate, gate_offset);
  const auto* up = row_of<T>(p.up, same_rows(p.gate_rows, p.up_rows) ? gate_offset : p.up_rows.offset(at.row));
  Vec8<T> d[kVec8s], g[kVec8s], u[kVec8s];
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    const int vec8 = at.first + i * at.step;
    if (vec8 < vec8s) {
      g[i] = load_vec8_once<T>(gate + vec8 * kVec8);
      u[i] = load_vec8_once<T>(up + vec8 * kVec8);
      d[i] = load_vec8_once<T>(dy + vec8 * kVec8);
    }
  }
  const std::int64_t d_gate_offset = p.d_gate_rows.offset(at.row);
  auto* d_gate = row_of<T>(p.d_gate, d_gate_offset);
  auto* d_up = row_of<T>(p.d_up, same_rows(p.d_gate_rows, p.d_up_rows) ? d_gate_offset : p.d_up_rows.offset(at.row));
#pragma unroll
  for (int i = 0; i < kVec8s; ++i) {
    const int vec8 = at.first + i * at.step;
    if (vec8 >= vec8s) continue;
    float a[kVec8], b[kVec8], c[kVec8];
    d[i].to_float(a);
    g[i].to_float(b);
    u[i].to_float(c);
    gradients<T, kActivation>(p.round_before_mul, a, b, c);
    if (p.d_gate != nullptr) store_vec8(d_gate + vec8 * kVec8, vec8_of<T>(a));
    if (p.d_up != nullptr) store_vec8(d_up + vec8 * kVec8, vec8_of<T>(c));
  }
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kGatedBlock)
    gated_mul_backward_any_kernel(const __grid_constant__ GatedMulBackwardParams p, const RowSplit split) {
  const RowPlace at = place<kVec8>(split);
  allow_next_kernel();
  wait_for_previous_kernel();
  if (at.row >= p.num_rows) return;
  const auto* dy = row_of<T>(p.dy, p.dy_rows.offset(at.row));
  const auto* gate = row_of<T>(p.gate, p.gate_rows.offset(at.row));
  const auto* up = row_of<T>(p.up, p.up_rows.offset(at.row));
  const int columns = static_cast<int>(p.columns);
  float a[kVec8], b[kVec8], c[kVec8];
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
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
  for (int j = 0; j < kVec8; ++j) {
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
      if (plan.vec8s == 0) {
        launch_over_rows<kOverlap>(&gated_mul_backward_any_kernel<T, kActivation>, p, p.columns, kVec8, 1, stream);
      } else if (plan.vec8s == 1) {
        launch_over_rows<kOverlap>(&gated_mul_backward_kernel<T, kActivation, 1>, p, p.columns / kVec8, 1, 1, stream);
      } else {
        launch_over_rows<kOverlap>(&gated_mul_backward_kernel<T, kActivation, 2>, p, p.columns / kVec8, 2, 1, stream);
      }
    });
  });
  check(cudaGetLastError(), "launch of silu_mul_backward");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
