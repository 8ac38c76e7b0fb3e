// sequence_logprob and its gradient, bound by HBM: log-probabilities and flags are read once.
//
// sequence_logprob_kernel: a block has a sequence; 64 threads have a chunk of 2,048 positions, 32 positions each, whose
// loads are under way together. kWidth 4: thread t has the lanes 4t ... 4t + 3, a vector of positions at a time. kWidth 1:
// lanes t, t + 64, ..., at any alignment; neighbouring threads read neighbouring positions. The levels of the tree over the
// lanes are a thread's, a warp's, then the chunk's; a warp adds the chunks.
// sequence_logprob_backward_kernel: a token is a thread's; a packed one searches for its sequence.
// One body for every architecture; each gets its own machine code.
#pragma once

#include "../common/octet.cuh"
#include "kernels.h"
#include "rlk/kernels/sequence_gradient.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kChunksOfRound = 32;                             // whose sums a warp adds
constexpr int kSteps = kSequenceChunk / kSequenceLanes;        // positions of a lane in a chunk
constexpr int kThreadLanes = kSequenceLanes / kSequenceGroup;  // of a thread
constexpr int kGroupWarps = kSequenceGroup / 32;

// Four neighbouring elements.
template <class T>
__device__ __forceinline__ void load_four(const typename T::Storage* from, float (&x)[4]) {
  if constexpr (T::kPacked) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    x[0] = T::low(v.x);
    x[1] = T::high(v.x);
    x[2] = T::low(v.y);
    x[3] = T::high(v.y);
  } else {
    const float4 v = *reinterpret_cast<const float4*>(from);
    x[0] = v.x;
    x[1] = v.y;
    x[2] = v.z;
    x[3] = v.w;
  }
}
// Bit w: token w of four counts.
template <int kBytes>
__device__ __forceinline__ unsigned four_flags(const TokenMask& m, std::int64_t i) {
  const std::uint64_t bits = m.bits();
  const unsigned low = static_cast<unsigned>(bits), high = static_cast<unsigned>(bits >> 32);
  if constexpr (kBytes == 1) {
    const unsigned v = *reinterpret_cast<const unsigned*>(static_cast<const std::uint8_t*>(m.data) + i);
    return ((v & 0xffu) != 0) | ((v & 0xff00u) != 0) << 1 | ((v & 0xff0000u) != 0) << 2 | ((v & 0xff000000u) != 0) << 3;
  } else if constexpr (kBytes == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(m.data) + i);
    return ((v.x & low) != 0) | ((v.x >> 16 & low) != 0) << 1 | ((v.y & low) != 0) << 2 | ((v.y >> 16 & low) != 0) << 3;
  } else if constexpr (kBytes == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const std::uint32_t*>(m.data) + i);
    return ((v.x & low) != 0) | ((v.y & low) != 0) << 1 | ((v.z & low) != 0) << 2 | ((v.w & low) != 0) << 3;
  } else if constexpr (kBytes == 8) {
    const uint4 a = reinterpret_cast<const uint4*>(static_cast<const std::uint64_t*>(m.data) + i)[0];
    const uint4 b = reinterpret_cast<const uint4*>(static_cast<const std::uint64_t*>(m.data) + i)[1];
    return (((a.x & low) | (a.y & high)) != 0) | (((a.z & low) | (a.w & high)) != 0) << 1 |
           (((b.x & low) | (b.y & high)) != 0) << 2 | (((b.z & low) | (b.w & high)) != 0) << 3;
  } else {
    return 15;
  }
}

// Lanes of a thread after a chunk's positions from `from` on, of which `left` exist; gives how many count.
template <class T, int kWidth, int kBytes>
__device__ __forceinline__ int add_chunk(const typename T::Storage* logprob, const TokenMask& m, std::int64_t mask_at,
                                         std::int64_t left, int thread, float (&lanes)[kThreadLanes]) {
  int count = 0;
#pragma unroll
  for (int j = 0; j < kThreadLanes; ++j) lanes[j] = 0.0f;
  if constexpr (kWidth == kThreadLanes) {
    float x[kSteps][kThreadLanes];
    unsigned flags[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = i * kSequenceLanes + thread * kWidth;
      flags[i] = 0;
      if (at + kWidth <= left) {
        load_four<T>(logprob + at, x[i]);
        flags[i] = four_flags<kBytes>(m, mask_at + at);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          x[i][j] = 0.0f;
          if (at + j < left && counts(m, mask_at + at + j)) {
            x[i][j] = T::load(logprob[at + j]);
            flags[i] |= 1u << j;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      count += __popc(flags[i]);
#pragma unroll
      for (int j = 0; j < kThreadLanes; ++j) lanes[j] = __fadd_rn(lanes[j], flags[i] >> j & 1 ? x[i][j] : 0.0f);
    }
  } else {
    constexpr int kTogether = 2;  // steps whose loads are under way together
#pragma unroll 2
    for (int i = 0; i < kSteps; i += kTogether) {
      float x[kTogether][kThreadLanes];
      bool kept[kTogether][kThreadLanes];
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
#pragma unroll
        for (int j = 0; j < kThreadLanes; ++j) {
          const int at = (i + s) * kSequenceLanes + j * kSequenceGroup + thread;
          kept[s][j] = at < left;
          x[s][j] = kept[s][j] ? T::load(logprob[at]) : 0.0f;
          if (kBytes > 0 && kept[s][j]) kept[s][j] = counts(m, mask_at + at);
        }
      }
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
#pragma unroll
        for (int j = 0; j < kThreadLanes; ++j) {
          count += kept[s][j];
          lanes[j] = __fadd_rn(lanes[j], kept[s][j] ? x[s][j] : 0.0f);
        }
      }
    }
  }
  return count;
}

// Levels of the tree inside a warp; leaves what the chunk's are of in `partial`, kNodes<kWidth> of a warp.
template <int kWidth>
constexpr int kNodes = kThreadLanes / kWidth;
template <int kWidth>
__device__ __forceinline__ void fold_warp(float (&lanes)[kThreadLanes], float* partial) {
  if constexpr (kWidth == kThreadLanes) {
    lanes[0] = __fadd_rn(__fadd_rn(lanes[0], lanes[1]), __fadd_rn(lanes[2], lanes[3]));
  }
#pragma unroll
  for (int j = 0; j < kNodes<kWidth>; ++j) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      lanes[j] = __fadd_rn(lanes[j], __shfl_xor_sync(0xffffffffu, lanes[j], distance));
    }
  }
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int j = 0; j < kNodes<kWidth>; ++j) partial[j] = lanes[j];
  }
}
// The rest of them: over the warps, then over what each left.
template <int kWidth>
__device__ __forceinline__ float fold_chunk(const float (&partial)[kGroupWarps][kThreadLanes]) {
  float nodes[kNodes<kWidth>];
#pragma unroll
  for (int j = 0; j < kNodes<kWidth>; ++j) nodes[j] = __fadd_rn(partial[0][j], partial[1][j]);
  if constexpr (kWidth == kThreadLanes) {
    return nodes[0];
  } else {
    return __fadd_rn(__fadd_rn(nodes[0], nodes[1]), __fadd_rn(nodes[2], nodes[3]));
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kSequenceMostThreads, 1)
    sequence_logprob_kernel(const __grid_constant__ SequenceLogprobParams p) {
  __shared__ float partial[kChunksOfRound][kGroupWarps][kThreadLanes];
  __shared__ long long counts_of_warps[kSequenceMostThreads / 32];
  const std::int64_t sequence = blockIdx.x;
  const bool packed = p.cu_seqlens.data != nullptr;
  const Span span = span_of(p.cu_seqlens, p.num_tokens, sequence);
  const auto* logprob =
      static_cast<const typename T::Storage*>(p.logprob) + (packed ? span.begin : sequence * p.logprob_stride);
  const std::int64_t mask_at = packed ? span.begin : sequence * p.mask.row_stride;
  const int group = static_cast<int>(threadIdx.x) / kSequenceGroup,
            groups = static_cast<int>(blockDim.x) / kSequenceGroup;
  const int thread = static_cast<int>(threadIdx.x) % kSequenceGroup, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t chunks = (span.length + kSequenceChunk - 1) / kSequenceChunk;
  float sum = 0.0f;
  long long count = 0;
#pragma unroll 1
  for (std::int64_t round = 0; round < chunks; round += kChunksOfRound) {
    const int num = static_cast<int>(chunks - round < kChunksOfRound ? chunks - round : kChunksOfRound);
#pragma unroll 1
    for (int c = group; c < num; c += groups) {
      const std::int64_t first = (round + c) * kSequenceChunk, left = span.length - first;
      float lanes[kThreadLanes];
      const auto add = [&](auto bytes) {
        count +=
            add_chunk<T, kWidth, decltype(bytes)::value>(logprob + first, p.mask, mask_at + first, left, thread, lanes);
      };
      switch (p.mask.bytes) {
        case 0:
          add(std::integral_constant<int, 0>{});
          break;
        case 1:
          add(std::integral_constant<int, 1>{});
          break;
        case 2:
          add(std::integral_constant<int, 2>{});
          break;
        case 4:
          add(std::integral_constant<int, 4>{});
          break;
        default:
          add(std::integral_constant<int, 8>{});
      }
      fold_warp<kWidth>(lanes, partial[c][thread / 32]);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const float chunk = lane < num ? fold_chunk<kWidth>(partial[lane]) : 0.0f;
      for (int c = 0; c < num; ++c) sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, chunk, c));
    }
    __syncthreads();
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) count += __shfl_xor_sync(0xffffffffu, count, distance);
  if (lane == 0) counts_of_warps[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned w = 1; w < blockDim.x / 32; ++w) count += counts_of_warps[w];
  p.sum[sequence] = span.good ? Fp32::store(sum) : canonical_nan();
  p.count[sequence] = count;
  if (p.status != nullptr) p.status[sequence] = span.good ? 0 : 1;
}

template <class T>
__global__ void __launch_bounds__(kGradientThreads)
    sequence_logprob_backward_kernel(const __grid_constant__ SequenceLogprobBackwardParams p,
                                     const __grid_constant__ GradientGrid g) {
  auto* to = static_cast<typename T::Storage*>(p.d_logprob);
  sequence_gradient<PlainMemory>(p, g, blockIdx.x, static_cast<int>(threadIdx.x),
                                 [to](std::int64_t i, float value) { to[i] = T::store(value); });
}

inline void run_sequence_logprob(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream) {
  const unsigned threads = static_cast<unsigned>(plan.groups * kSequenceGroup);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    const auto launch = [&](auto* kernel) {
      kernel<<<static_cast<unsigned>(p.num_sequences), threads, 0, stream>>>(p);
    };
    plan.width == 1 ? launch(sequence_logprob_kernel<T, 1>) : launch(sequence_logprob_kernel<T, 4>);
  });
  check(cudaGetLastError(), "launch of sequence_logprob");
}

inline void run_sequence_logprob_backward(const SequenceLogprobBackwardParams& p, cudaStream_t stream) {
  const GradientGrid g = gradient_grid(p);
  const unsigned blocks = checked_blocks(g.blocks, "sequence_logprob");
  with_element_type(p.dtype, [&](auto t) {
    sequence_logprob_backward_kernel<decltype(t)><<<blocks, kGradientThreads, 0, stream>>>(p, g);
  });
  check(cudaGetLastError(), "launch of sequence_logprob_backward");
}

}  // namespace
}  // namespace rlk::cuda
