// silu_mul and gelu_mul. Bound by HBM: gate and up are read once, y written once; about 30 instructions an element for silu
// fit into that time on an H200.
//
// gated_mul_kernel: a thread has kVec8s times eight columns of a row, whose loads are under way together, and of kChunks
// chunks the next one's while it computes one's.
// gated_mul_any_kernel: a thread has eight single columns. Any width, any alignment.
// A thread has read all that it writes over before it writes, so outputs may be inputs.
// One body for every architecture; each gets its own machine code.
#include "place.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Least number of blocks of a multiprocessor: as many as registers allow beside the vec8s of gate and up.
template <class T, int kVec8s>
constexpr int kForwardBlocks = Vec8<T>::kVectors* kVec8s == 1   ? 10
                               : Vec8<T>::kVectors* kVec8s == 2 ? 8
                                                                : 5;

// What a thread has of one chunk.
template <class T, int kVec8s>
struct GatedVec8s {
  Vec8<T> gate[kVec8s], up[kVec8s];
  RowPlace at;
};

template <class T, Activation kActivation, int kVec8s, int kChunks>
__global__ void __launch_bounds__(kGatedBlock, (kForwardBlocks<T, kVec8s*(kChunks > 1 ? 2 : 1)>))
    gated_mul_kernel(const __grid_constant__ GatedMulParams p, const RowSplit split) {
  const int vec8s = static_cast<int>(p.columns) / kVec8;
  const auto at = [&](int chunk) {
    return place_in_rows(split, kVec8s, blockIdx.x * kChunks + chunk, static_cast<int>(threadIdx.x));
  };
  const auto load = [&](const RowPlace& place) {
    GatedVec8s<T, kVec8s> x;
    x.at = place;
    if (x.at.row >= p.num_rows) return x;
    const std::int64_t gate_offset = p.gate_rows.offset(x.at.row);
    const auto* gate = row_of<T>(p.gate, gate_offset);
    const auto* up = row_of<T>(p.up, same_rows(p.gate_rows, p.up_rows) ? gate_offset : p.up_rows.offset(x.at.row));
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      const int vec8 = x.at.first + i * x.at.step;
      if (vec8 < vec8s) {
        x.gate[i] = load_vec8_once<T>(gate + vec8 * kVec8);
        x.up[i] = load_vec8_once<T>(up + vec8 * kVec8);
      }
    }
    return x;
  };
  const auto finish = [&](GatedVec8s<T, kVec8s>& x) {
    if (x.at.row >= p.num_rows) return;
    auto* y = row_of<T>(p.y, p.y_rows.offset(x.at.row));
#pragma unroll
    for (int i = 0; i < kVec8s; ++i) {
      const int vec8 = x.at.first + i * x.at.step;
      if (vec8 >= vec8s) continue;
      float a[kVec8];
      x.gate[i].to_float(a);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) a[j] = activated<kActivation, false>(a[j]).value;
      Vec8<T> product;
      if (p.round_before_mul) {
        product = rounded_product<T>(a, x.up[i]);
      } else {
        float b[kVec8];
        x.up[i].to_float(b);
#pragma unroll
        for (int j = 0; j < kVec8; ++j) a[j] = __fmul_rn(a[j], b[j]);
        product = vec8_of<T>(a);
      }
      store_vec8(y + vec8 * kVec8, product);
    }
  };
  allow_next_kernel();
  const RowPlace first = at(0);
  if constexpr (T::kPacked && kChunks == 1) {
    constexpr int kBlockBytes = 2 * kGatedBlock * kVec8s * static_cast<int>(sizeof(Vector<T>));
    constexpr std::uint32_t kAhead = kPrefetchBytes / kBlockBytes;
    const auto prefetch = [&](const RowPlace& place) {
      if (place.row >= p.num_rows) return;
      const unsigned bytes = min(kVec8s * kGatedBlock, vec8s - place.first) * sizeof(Vector<T>);
      prefetch_to_l2(row_of<T>(p.gate, p.gate_rows.offset(place.row)) + place.first * kVec8, bytes);
      prefetch_to_l2(row_of<T>(p.up, p.up_rows.offset(place.row)) + place.first * kVec8, bytes);
    };
    if (threadIdx.x == 0 && split.log2_rows == 0) {  // the block has a chunk of one row
      if (blockIdx.x < kAhead) prefetch(first);
      prefetch(place_in_rows(split, kVec8s, blockIdx.x + kAhead, 0));
    }
  }
  wait_for_previous_kernel();
  GatedVec8s<T, kVec8s> now = load(first);
#pragma unroll 2
  for (int chunk = 1; chunk < kChunks; ++chunk) {  // the next chunk is under way while this one is computed
    const GatedVec8s<T, kVec8s> next = load(at(chunk));
    finish(now);
    now = next;
  }
  finish(now);
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kGatedBlock)
    gated_mul_any_kernel(const __grid_constant__ GatedMulParams p, const RowSplit split) {
  const RowPlace at = place<kVec8>(split);
  allow_next_kernel();
  wait_for_previous_kernel();
  if (at.row >= p.num_rows) return;
  const auto* gate = row_of<T>(p.gate, p.gate_rows.offset(at.row));
  const auto* up = row_of<T>(p.up, p.up_rows.offset(at.row));
  auto* y = row_of<T>(p.y, p.y_rows.offset(at.row));
  const int columns = static_cast<int>(p.columns);
  float g[kVec8], u[kVec8];
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    const int k = at.first + j * at.step;
    g[j] = k < columns ? T::load(gate[k]) : 0.0f;
    u[j] = k < columns ? T::load(up[k]) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kVec8; ++j) g[j] = activated<kActivation, false>(g[j]).value;
  if (p.round_before_mul) round_vec8<T>(g);
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    const int k = at.first + j * at.step;
    if (k < columns) y[k] = T::store(__fmul_rn(g[j], u[j]));
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void gated_mul(const GatedMulParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    with_activation(p.activation, [&](auto activation) {
      using T = decltype(t);
      constexpr Activation kActivation = decltype(activation)::value;
      const std::int64_t vec8s = p.columns / kVec8;
      if (plan.vec8s == 0) {
        launch_over_rows<kOverlap>(&gated_mul_any_kernel<T, kActivation>, p, p.columns, kVec8, 1, stream);
      } else if (plan.vec8s == 1 && plan.chunks == 1) {
        launch_over_rows<kOverlap>(&gated_mul_kernel<T, kActivation, 1, 1>, p, vec8s, 1, 1, stream);
      } else if (plan.vec8s == 1) {
        launch_over_rows<kOverlap>(&gated_mul_kernel<T, kActivation, 1, kMoreChunks>, p, vec8s, 1, kMoreChunks, stream);
      } else if (plan.vec8s == 2 && plan.chunks == 1) {
        launch_over_rows<kOverlap>(&gated_mul_kernel<T, kActivation, 2, 1>, p, vec8s, 2, 1, stream);
      } else if constexpr (T::kPacked) {
        launch_over_rows<kOverlap>(&gated_mul_kernel<T, kActivation, 2, kMoreChunks>, p, vec8s, 2, kMoreChunks, stream);
      }
    });
  });
  check(cudaGetLastError(), "launch of silu_mul");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
