// sequence_logprob and its gradient, bound by HBM: log-probabilities and flags are read once.
//
// sequence_logprob_kernel: a warp takes a chunk of 2,048 positions at a time. One warp sums a sequence, or all warps of
//   a block take its chunks in turn. Neighbouring threads read neighbouring positions, at any alignment, 16 rows of 32
//   positions at a time.
// sequence_logprob_backward_kernel: a block takes a tile of tokens; kernels/packing/sequence_gradient.h has
//   its body, shared with HIP.
// All architectures share this source; each has its own machine code.
#include "../common/team.cuh"
#include "../common/vec8.cuh"
#include "kernels.h"
#include "kernels/packing/sequence_gradient.h"
#include "rlk/math/tree_sum.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kBatchRows = 16, kTailRows = 8;  // rows of 32 positions whose loads are in flight together
constexpr int kBatch = 32 * kBatchRows, kTail = 32 * kTailRows;
constexpr int kRoundChunks = 16;  // chunks per warp, between two barriers
// Registers per thread. On sm_90, this number lets nine blocks of kSequencesOfBlock warps run on a multiprocessor. For
// sm_80 ptxas needs more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kSumRegisters = 64;
#else
constexpr int kSumRegisters = 56;
#endif

// Loads a thread's positions, one in each of kRows rows. Positions that do not count become +0. Only positions below
// `left` exist; with kAll every position exists.
template <class T, int kRows, bool kAll, class Flags>
__device__ __forceinline__ void load_rows(const typename T::Storage* logprob, const Flags& flags, int left,
                                          float (&v)[kRows], int& count) {
  typename T::Storage x[kRows];
  typename Flags::Flag flag[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    x[i] = 0;
    flag[i] = 0;
    if (kAll || 32 * i < left) {
      x[i] = logprob[32 * i];
      flag[i] = flags.load(32 * i);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool counts = flags.counts(flag[i]);
    count += counts ? 1 : 0;
    v[i] = counts ? T::load(x[i]) : 0.0f;
  }
}

// The sum of a chunk, of which only the first `left` positions exist. `count` grows by the number of positions that
// count.
template <class T, int kBytes>
__device__ __forceinline__ float sum_of_chunk(const typename T::Storage* logprob, const TokenMask& m,
                                              std::int64_t mask_at, int left, int& count) {
  constexpr bool kHasBatches = kBytes < 4;  // wider flags would take too many registers
  static_assert(kBatch == 2 * kTail && kSequenceChunk == 4 * kBatch);
  const Warp warp;
  FlagsFrom<kBytes> flags(m, mask_at + warp.lane());
  logprob += warp.lane();
  const auto advance = [&](int positions) {
    left -= positions;
    logprob += positions;
    flags.flags += kBytes == 0 ? 0 : positions;
  };
  SumTree<3> batches;
#pragma unroll 1
  while (left > 0) {
    float node = 0.0f;
    if (kHasBatches && left >= kBatch) {
      float v[kBatchRows];
      load_rows<T, kBatchRows, true>(logprob, flags, left, v, count);
      node = sum_of_rows<32>(warp, v);
      advance(kBatch);
    } else {
#pragma unroll 1
      for (int tail = 0; tail < 2 && left > 0; ++tail) {
        float v[kTailRows];
        load_rows<T, kTailRows, false>(logprob, flags, left - warp.lane(), v, count);
        node = add_rn(node, sum_of_rows<32>(warp, v));
        advance(kTail);
      }
    }
    batches.take(node);
  }
  return batches.finish();
}

template <class T>
__global__ void __maxnreg__(kSumRegisters)
    sequence_logprob_kernel(const __grid_constant__ SequenceLogprobParams p, int warps) {
  // Rounds alternate between two buffers, so no round waits until the sums of the previous round have been read.
  __shared__ float chunks_of_warps[2][kRoundChunks * kSequenceMostThreads / 32];
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
  // A sequence has fewer than 2^31 chunks, and a thread takes fewer than 2^31 tokens.
  const int chunks = static_cast<int>((span.length + kSequenceChunk - 1) / kSequenceChunk);
  TeamSumTree<Warp> tree{Warp()};
  int counted = 0, which = 0;
#pragma unroll 1
  for (int round = 0; round < chunks; round += warps * kRoundChunks, which ^= 1) {
    const int end = chunks - round < warps * kRoundChunks ? chunks : round + warps * kRoundChunks;
#pragma unroll 1
    for (int c = round + member; c < end; c += warps) {
      const std::int64_t first = std::int64_t{c} * kSequenceChunk, left = span.length - first;
      float chunk = 0.0f;
      with_flag_bytes(p.mask, [&](auto bytes) {
        chunk = sum_of_chunk<T, decltype(bytes)::value>(logprob + first, p.mask, mask_at + first,
                                                        left < kSequenceChunk ? static_cast<int>(left) : kSequenceChunk,
                                                        counted);
      });
      if (warps == 1) {
        tree.take(chunk);
      } else if (lane == 0) {
        chunks_of_warps[which][c - round] = chunk;
      }
    }
    if (warps == 1) continue;
    __syncthreads();
    if (warp != 0) continue;
#pragma unroll 1
    for (int c = lane; c - lane < end - round; c += 32) {
      tree.take(sum_over_lanes<32>(Warp(), c < end - round ? chunks_of_warps[which][c] : 0.0f), 5);
    }
  }
  const float sum = tree.finish();
  long long count = counted;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) count += __shfl_xor_sync(0xffffffffu, count, distance);
  if (warps > 1) {
    if (lane == 0) counts_of_warps[warp] = count;
    __syncthreads();
    for (int w = 1; w < warps && warp == 0; ++w) count += counts_of_warps[w];
  }
  if (lane != 0 || member != 0) return;
  p.sum[sequence] = span.good ? finished_sum(sum) : canonical_nan();
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

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void sequence_logprob(const SequenceLogprobParams& p, const SequencePlan& plan, cudaStream_t stream) {
  const int sequences = plan.warps == 1 ? kSequencesOfBlock : 1;  // sequences per block
  const auto blocks = static_cast<unsigned>((p.num_sequences + sequences - 1) / sequences);
  with_element_type(p.dtype, [&](auto t) {
    sequence_logprob_kernel<decltype(t)>
        <<<blocks, static_cast<unsigned>(32 * sequences * plan.warps), 0, stream>>>(p, plan.warps);
  });
  check(cudaGetLastError(), "launch of sequence_logprob");
}

void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, cudaStream_t stream) {
  const GradientGrid g = gradient_grid(p);
  const unsigned blocks = checked_blocks(g.blocks, "sequence_logprob");
  with_element_type(p.dtype, [&](auto t) {
    sequence_logprob_backward_kernel<decltype(t)><<<blocks, kGradientThreads, 0, stream>>>(p, g);
  });
  check(cudaGetLastError(), "launch of sequence_logprob_backward");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
