// sequence_logprob and its gradient, bound by HBM: log-probabilities and flags are read once.
//
// sequence_logprob_kernel: a warp has a chunk of 2,048 positions; a sequence is a warp's, or all warps' of a block, a chunk each
// at a time. Neighbouring threads read neighbouring positions, at any alignment, two rows of lanes at a time.
// sequence_logprob_backward_kernel: a block has a tile of tokens; rlk/kernels/sequence_gradient.h, shared with HIP.
// One body for every architecture; each gets its own machine code.
#pragma once

#include "../common/octet.cuh"
#include "../common/sequence_chunk.cuh"
#include "kernels.h"
#include "rlk/kernels/sequence_gradient.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kSteps = kSequenceChunk / kSequenceLanes;  // positions of a lane in a chunk

// kTogether rows of lanes, a thread's first position on; of its positions those below `left` exist, or all.
template <class T, int kTogether, bool kAll, class Flags>
__device__ __forceinline__ void add_rows(const typename T::Storage* logprob, const Flags& flags, int left,
                                         float (&lanes)[kChunkWarpLanes], int& count) {
  typename T::Storage x[kTogether * kChunkWarpLanes];
  typename Flags::Flag flag[kTogether * kChunkWarpLanes];
#pragma unroll
  for (int i = 0; i < kTogether * kChunkWarpLanes; ++i) {
    x[i] = 0;
    flag[i] = 0;
    if (kAll || 32 * i < left) {
      x[i] = logprob[32 * i];
      flag[i] = flags.load(32 * i);
    }
  }
#pragma unroll
  for (int i = 0; i < kTogether * kChunkWarpLanes; ++i) {
    const bool counts = flags.counts(flag[i]);
    float& lane = lanes[i % kChunkWarpLanes];
    count += counts ? 1 : 0;
    lane = add_rn(lane, counts ? T::load(x[i]) : 0.0f);
  }
}

// A chunk's sum, of whose positions `left` exist; adds to the thread's count of those that count.
template <class T, int kBytes>
__device__ __forceinline__ float sum_of_chunk(const typename T::Storage* logprob, const TokenFlags& m,
                                              std::int64_t mask_at, int left, int& count) {
  constexpr int kTogether = kBytes == 8 ? 1 : 4;  // rows whose loads are under way together
  const int lane = static_cast<int>(threadIdx.x) % 32;
  FlagsFrom<kBytes> flags(m, mask_at + lane);
  logprob += lane;
  float lanes[kChunkWarpLanes] = {};
#pragma unroll 1
  while (left > 0) {
    const bool all = left >= kTogether * kSequenceLanes;
    const int rows = all ? kTogether : 1;
    all ? add_rows<T, kTogether, true>(logprob, flags, left, lanes, count)
        : add_rows<T, 1, false>(logprob, flags, left - lane, lanes, count);
    left -= rows * kSequenceLanes;
    logprob += rows * kSequenceLanes;
    flags.flags += rows * kSequenceLanes;
  }
  return sum_of_chunk_lanes(lanes);
}

template <class T>
__global__ void __launch_bounds__(kSequenceMostThreads)
    sequence_logprob_kernel(const __grid_constant__ SequenceLogprobParams p, int warps) {
  __shared__ float chunks_of_warps[2]
                                  [kSequenceMostThreads / 32];  // two, so that a round need not wait for the one before
  __shared__ long long counts_of_warps[kSequenceMostThreads / 32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int member = warps == 1 ? 0 : warp;
  const std::int64_t sequence = warps == 1 ? std::int64_t{blockIdx.x} * (blockDim.x / 32) + warp : blockIdx.x;
  if (sequence >= p.num_sequences) return;
  const bool packed = p.cu_seqlens.data != nullptr;
  const Span span = span_of(p.cu_seqlens, p.num_tokens, sequence);
  const auto* logprob =
      static_cast<const typename T::Storage*>(p.logprob) + (packed ? span.begin : sequence * p.logprob_stride);
  const std::int64_t mask_at = packed ? span.begin : sequence * p.mask.row_stride;
  const std::int64_t chunks = (span.length + kSequenceChunk - 1) / kSequenceChunk;
  float sum = 0.0f;
  long long count = 0;
  int which = 0;
#pragma unroll 1
  for (std::int64_t round = 0; round < chunks; round += warps, which ^= 1) {
    const std::int64_t first = (round + member) * kSequenceChunk;
    const std::int64_t left = span.length - first;
    float chunk = 0.0f;
    if (left > 0) {
      int counted = 0;
      with_flag_bytes(p.mask, [&](auto bytes) {
        chunk = sum_of_chunk<T, decltype(bytes)::value>(logprob + first, p.mask, mask_at + first,
                                                        left < kSequenceChunk ? static_cast<int>(left) : kSequenceChunk,
                                                        counted);
      });
      count += counted;
    }
    if (warps == 1) {
      sum = add_rn(sum, chunk);
      continue;
    }
    if (lane == 0) chunks_of_warps[which][warp] = chunk;
    __syncthreads();
    const int num = chunks - round < warps ? static_cast<int>(chunks - round) : warps;
    if (warp == 0) {
      for (int w = 0; w < num; ++w) sum = add_rn(sum, chunks_of_warps[which][w]);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) count += __shfl_xor_sync(0xffffffffu, count, distance);
  if (warps > 1) {
    if (lane == 0) counts_of_warps[warp] = count;
    __syncthreads();
    for (int w = 1; w < warps && warp == 0; ++w) count += counts_of_warps[w];
  }
  if (lane != 0 || member != 0) return;
  p.sum[sequence] = span.good ? Fp32::store(sum) : canonical_nan();
  p.count[sequence] = count;
  if (p.status != nullptr) p.status[sequence] = span.good ? 0 : 1;
}

template <class T>
__global__ void __launch_bounds__(kGradientThreads)
    sequence_logprob_backward_kernel(const __grid_constant__ SequenceLogprobBackwardParams p,
                                     const __grid_constant__ GradientGrid g) {
  __shared__ std::int64_t shared[2];
  auto* to = static_cast<typename T::Storage*>(p.d_logprob);
  sequence_gradient<PlainMemory>(
      p, g, blockIdx.x, static_cast<int>(threadIdx.x), shared, [] { __syncthreads(); },
      [to](std::int64_t i, float value) { to[i] = T::store(value); });
}

inline void run_sequence_logprob(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream) {
  const int sequences = plan.warps == 1 ? kSequencesOfBlock : 1;  // of a block
  const auto blocks = static_cast<unsigned>((p.num_sequences + sequences - 1) / sequences);
  with_element_type(p.dtype, [&](auto t) {
    sequence_logprob_kernel<decltype(t)>
        <<<blocks, static_cast<unsigned>(32 * sequences * plan.warps), 0, stream>>>(p, plan.warps);
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
