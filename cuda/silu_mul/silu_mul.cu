// silu_mul and gelu_mul. Bound by HBM: gate and up are read once, y written once; about 30 instructions an element for silu
// fit into that time on an H200.
//
// gated_mul_kernel: a thread has kOctets times eight columns of a row, whose loads are under way together, and of kChunks
// chunks the next one's while it computes one's.
// gated_mul_any_kernel: a thread has eight single columns. Any width, any alignment.
// A thread has read all that it writes over before it writes, so outputs may be inputs.
// One body for every architecture; each gets its own machine code.
#include "place.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Least number of blocks of a multiprocessor: as many as registers allow beside the octets of gate and up.
template <class T, int kOctets>
constexpr int kForwardBlocks = Octet<T>::kVectors* kOctets == 1   ? 10
                               : Octet<T>::kVectors* kOctets == 2 ? 8
                                                                  : 5;

// What a thread has of one chunk.
template <class T, int kOctets>
struct GatedOctets {
  Octet<T> gate[kOctets], up[kOctets];
  RowPlace at;
};

template <class T, Activation kActivation, int kOctets, int kChunks>
__global__ void __launch_bounds__(kGatedBlock, (kForwardBlocks<T, kOctets*(kChunks > 1 ? 2 : 1)>))
    gated_mul_kernel(const __grid_constant__ GatedMulParams p, const RowSplit split) {
  const int octets = static_cast<int>(p.columns) / kOctet;
  const auto at = [&](int chunk) {
    return place_in_rows(split, kOctets, blockIdx.x * kChunks + chunk, static_cast<int>(threadIdx.x));
  };
  const auto load = [&](const RowPlace& place) {
    GatedOctets<T, kOctets> x;
    x.at = place;
    if (x.at.row >= p.num_rows) return x;
    const std::int64_t gate_offset = p.gate_rows.offset(x.at.row);
    const auto* gate = row_of<T>(p.gate, gate_offset);
    const auto* up = row_of<T>(p.up, same_rows(p.gate_rows, p.up_rows) ? gate_offset : p.up_rows.offset(x.at.row));
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      const int octet = x.at.first + i * x.at.step;
      if (octet < octets) {
        x.gate[i] = load_octet_once<T>(gate + octet * kOctet);
        x.up[i] = load_octet_once<T>(up + octet * kOctet);
      }
    }
    return x;
  };
  const auto finish = [&](GatedOctets<T, kOctets>& x) {
    if (x.at.row >= p.num_rows) return;
    auto* y = row_of<T>(p.y, p.y_rows.offset(x.at.row));
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      const int octet = x.at.first + i * x.at.step;
      if (octet >= octets) continue;
      float a[kOctet];
      x.gate[i].to_float(a);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) a[j] = activated<kActivation, false>(a[j]).value;
      Octet<T> product;
      if (p.round_before_mul) {
        product = rounded_product<T>(a, x.up[i]);
      } else {
        float b[kOctet];
        x.up[i].to_float(b);
#pragma unroll
        for (int j = 0; j < kOctet; ++j) a[j] = __fmul_rn(a[j], b[j]);
        product = octet_of<T>(a);
      }
      store_octet(y + octet * kOctet, product);
    }
  };
  allow_next_kernel();
  const RowPlace first = at(0);
  if constexpr (T::kPacked && kChunks == 1) {
    constexpr int kBlockBytes = 2 * kGatedBlock * kOctets * static_cast<int>(sizeof(Vector<T>));
    constexpr std::uint32_t kAhead = kPrefetchBytes / kBlockBytes;
    const auto prefetch = [&](const RowPlace& place) {
      if (place.row >= p.num_rows) return;
      const unsigned bytes = min(kOctets * kGatedBlock, octets - place.first) * sizeof(Vector<T>);
      prefetch_to_l2(row_of<T>(p.gate, p.gate_rows.offset(place.row)) + place.first * kOctet, bytes);
      prefetch_to_l2(row_of<T>(p.up, p.up_rows.offset(place.row)) + place.first * kOctet, bytes);
    };
    if (threadIdx.x == 0 && split.log2_rows == 0) {  // the block has a chunk of one row
      if (blockIdx.x < kAhead) prefetch(first);
      prefetch(place_in_rows(split, kOctets, blockIdx.x + kAhead, 0));
    }
  }
  wait_for_previous_kernel();
  GatedOctets<T, kOctets> now = load(first);
#pragma unroll 2
  for (int chunk = 1; chunk < kChunks; ++chunk) {  // the next chunk is under way while this one is computed
    const GatedOctets<T, kOctets> next = load(at(chunk));
    finish(now);
    now = next;
  }
  finish(now);
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kGatedBlock)
    gated_mul_any_kernel(const __grid_constant__ GatedMulParams p, const RowSplit split) {
  const RowPlace at = place<kOctet>(split);
  allow_next_kernel();
  wait_for_previous_kernel();
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

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void gated_mul(const GatedMulParams& p, const GatedMulPlan& plan, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    with_activation(p.activation, [&](auto activation) {
      using T = decltype(t);
      constexpr Activation kActivation = decltype(activation)::value;
      const std::int64_t octets = p.columns / kOctet;
      if (plan.octets == 0) {
        launch_over_rows<kOverlap>(&gated_mul_any_kernel<T, kActivation>, p, p.columns, kOctet, 1, stream);
      } else if (plan.octets == 1 && plan.chunks == 1) {
        launch_over_rows<kOverlap>(&gated_mul_kernel<T, kActivation, 1, 1>, p, octets, 1, 1, stream);
      } else if (plan.octets == 1) {
        launch_over_rows<kOverlap>(&gated_mul_kernel<T, kActivation, 1, kMoreChunks>, p, octets, 1, kMoreChunks,
                                   stream);
      } else if (plan.octets == 2 && plan.chunks == 1) {
        launch_over_rows<kOverlap>(&gated_mul_kernel<T, kActivation, 2, 1>, p, octets, 2, 1, stream);
      } else if constexpr (T::kPacked) {
        launch_over_rows<kOverlap>(&gated_mul_kernel<T, kActivation, 2, kMoreChunks>, p, octets, 2, kMoreChunks,
                                   stream);
      }
    });
  });
  check(cudaGetLastError(), "launch of silu_mul");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
