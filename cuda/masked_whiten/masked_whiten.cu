// masked_whiten in five launches: the sum of each sequence, the batch's mean, sums of squares, the variance, the
// tokens. Bound by HBM: x is read three times, and y is written once.
//
// Each block sums one sequence. Each warp takes a chunk of 128 tokens at a time, four tokens per lane. The first warp
// adds up the sums of the chunks. All architectures share this source; each has its own machine code.
#include "../common/kernels.h"
#include "../common/team.cuh"
#include "../tokens/vec4_access.cuh"
#include "kernels/advantages/masked_whiten_token.h"
#include "kernels/tokens/slots.h"
#include "kernels/tokens/team_sum.h"
#include "rlk/ops/masked_whiten.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kMostWhitenWarps = 16;
constexpr int kWhitenBatchThreads = 512;
constexpr int kWhitenRegisters = 56;  // 36 warps on a multiprocessor

// A lane's tokens in a chunk of the block's sequence.
struct WhitenLane {
  FourTokens x;
  TokenMasks<> mask;
  int count;

  __device__ __forceinline__ void load(const MaskedWhitenParams& p, const TokenSpan& span, std::int64_t chunk,
                                       bool vectors) {
    const std::int64_t first = chunk * kTeamChunk + threadIdx.x % 32 * kLaneTokens, left = span.length - first;
    count = left <= 0 ? 0 : left < kLaneTokens ? static_cast<int>(left) : kLaneTokens;
    if (count == 0) return;
    x = load_tokens(p.x.data + span.offset(p.x.row_stride) + first, count, vectors);
    mask = load_mask(p.mask, span.offset(p.mask.row_stride) + first, count, vectors);
  }
  __device__ __forceinline__ unsigned counted(const MaskedWhitenParams& p, bool vectors) const {
    return mask.bits(p.mask, count, vectors);
  }
};

__device__ __forceinline__ bool has_vectors(const MaskedWhitenParams& p, const TokenSpan& span) {
  const auto at = [&](const float* data, std::int64_t row_stride) {
    return reinterpret_cast<std::uintptr_t>(data + span.offset(row_stride));
  };
  return (at(p.x.data, p.x.row_stride) | at(p.y.data, p.y.row_stride)) % 16 == 0 && mask_has_vectors(p.mask, span);
}

// Results for a sequence: the sum, minimum and maximum of its tokens. With kSquares: the sum of the tokens' squared
// deviations from the mean.
template <bool kSquares>
__global__ void __maxnreg__(kWhitenRegisters) whiten_sums_kernel(const __grid_constant__ MaskedWhitenParams p) {
  // Two tiles alternate between two buffers, so one barrier per tile is enough.
  __shared__ float sums[2][kMostWhitenWarps];
  __shared__ float least_of[kMostWhitenWarps], largest_of[kMostWhitenWarps];
  __shared__ int counts_of[kMostWhitenWarps];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const std::int64_t sequence = blockIdx.x;
  const TokenSpan span = span_of(p.sequences, sequence);
  const bool vectors = has_vectors(p, span);
  const WhitenMemory memory(p);
  WhitenStatistics statistics;
  if constexpr (kSquares) statistics = *memory.statistics;
  const std::int64_t chunks = (span.length + kTeamChunk - 1) / kTeamChunk;
  TeamSumTree<Warp> tree{Warp()};
  float least = infinity(), largest = -infinity();
  std::int64_t num = 0;
  WhitenLane coming;
  coming.load(p, span, warp, vectors);
  int turn = 0;
#pragma unroll 1
  for (std::int64_t first = 0; first < chunks; first += warps, turn ^= 1) {
    const WhitenLane tokens = coming;
    coming.load(p, span, first + warps + warp, vectors);
    const unsigned counted = tokens.counted(p, vectors);
    float v[kLaneTokens];
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      v[j] = 0.0f;
      if (!(counted >> j & 1)) continue;
      const float x = tokens.x.v[j];
      if constexpr (kSquares) {
        v[j] = whiten_square(statistics, x);
      } else {
        v[j] = x;
        least = x < least ? x : least;
        largest = x > largest ? x : largest;
      }
    }
    if constexpr (!kSquares) num += __popc(counted);
    const float sum = tree_of_chunk(Warp(), v);
    if (warps == 1) {
      tree.take(sum);
      continue;
    }
    if (threadIdx.x % 32 == 0) sums[turn][warp] = sum;
    __syncthreads();
    if (warp != 0) continue;
    const float of_warp = threadIdx.x < warps ? sums[turn][threadIdx.x] : 0.0f;
    tree.take(sum_over_lanes<kMostWhitenWarps>(Warp(), of_warp));
  }
  // Bad offsets make the sum NaN, and therefore the mean and all tokens.
  const float total = has_bad_offsets(p.sequences, sequence) ? canonical_nan() : finished_sum(tree.finish());
  if constexpr (!kSquares) {
    // A lane counts fewer than 2^31 tokens of a sequence, and so does the whole block, so the counts fit an int.
    int n = static_cast<int>(num);
#pragma unroll
    for (int h = 16; h > 0; h /= 2) {
      const float low = __shfl_xor_sync(0xffffffffu, least, h), high = __shfl_xor_sync(0xffffffffu, largest, h);
      least = low < least ? low : least;
      largest = high > largest ? high : largest;
      n += __shfl_xor_sync(0xffffffffu, n, h);
    }
    if (threadIdx.x % 32 == 0) {
      least_of[warp] = least;
      largest_of[warp] = largest;
      counts_of[warp] = n;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      std::int64_t all = 0;
      for (int w = 0; w < warps; ++w) {
        least = least_of[w] < least ? least_of[w] : least;
        largest = largest_of[w] > largest ? largest_of[w] : largest;
        all += counts_of[w];
      }
      memory.counts[sequence] = all;
      memory.least[sequence] = least;
      memory.largest[sequence] = largest;
    }
  }
  if (threadIdx.x == 0) memory.sums[sequence] = total;
}

// The batch's mean, or variance, from the sums of its sequences.
template <bool kSquares>
__global__ void __launch_bounds__(kWhitenBatchThreads)
    whiten_batch_kernel(const __grid_constant__ MaskedWhitenParams p) {
  __shared__ float sums[kWhitenBatchThreads / 32], least_of[kWhitenBatchThreads / 32],
      largest_of[kWhitenBatchThreads / 32];
  __shared__ std::int64_t counts_of[kWhitenBatchThreads / 32];
  const WhitenMemory memory(p);
  const std::int64_t num = p.sequences.num_tokens == 0 ? 0 : p.sequences.num_sequences;
  const float total = sum_of_block(WarpBlock{Warp(), sums}, num, [&](std::int64_t s) { return memory.sums[s]; });
  if constexpr (kSquares) {
    if (threadIdx.x != 0) return;
    WhitenStatistics statistics = *memory.statistics;
    whiten_variance(p, total, &statistics);
    *memory.statistics = statistics;
  } else {
    float least = infinity(), largest = -infinity();
    long long n = 0;
    for (std::int64_t s = threadIdx.x; s < num; s += kWhitenBatchThreads) {
      least = memory.least[s] < least ? memory.least[s] : least;
      largest = memory.largest[s] > largest ? memory.largest[s] : largest;
      n += memory.counts[s];
    }
#pragma unroll
    for (int h = 16; h > 0; h /= 2) {
      const float low = __shfl_xor_sync(0xffffffffu, least, h), high = __shfl_xor_sync(0xffffffffu, largest, h);
      least = low < least ? low : least;
      largest = high > largest ? high : largest;
      n += __shfl_xor_sync(0xffffffffu, n, h);
    }
    if (threadIdx.x % 32 == 0) {
      least_of[threadIdx.x / 32] = least;
      largest_of[threadIdx.x / 32] = largest;
      counts_of[threadIdx.x / 32] = n;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    n = 0;
    for (int w = 0; w < kWhitenBatchThreads / 32; ++w) {
      least = least_of[w] < least ? least_of[w] : least;
      largest = largest_of[w] > largest ? largest_of[w] : largest;
      n += counts_of[w];
    }
    *memory.statistics = whiten_mean(n, total, least, largest);
  }
}

__global__ void __launch_bounds__(kMostWhitenWarps * 32, 2)
    whiten_tokens_kernel(const __grid_constant__ MaskedWhitenParams p) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (const std::int64_t rest = blockIdx.x - p.sequences.num_sequences; rest >= 0) {
    return clear_rest(p.sequences, p.y.data, rest, rest_blocks(p.sequences), static_cast<int>(threadIdx.x),
                      static_cast<int>(blockDim.x));
  }
  const TokenSpan span = span_of(p.sequences, blockIdx.x);
  const bool vectors = has_vectors(p, span);
  const WhitenStatistics statistics = *WhitenMemory(p).statistics;
  const std::int64_t chunks = (span.length + kTeamChunk - 1) / kTeamChunk;
  WhitenLane coming;
  coming.load(p, span, warp, vectors);
#pragma unroll 1
  for (std::int64_t chunk = warp; chunk < chunks; chunk += warps) {
    const WhitenLane tokens = coming;
    coming.load(p, span, chunk + warps, vectors);
    const unsigned counted = tokens.counted(p, vectors);
    FourTokens y;
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      y.v[j] = counted >> j & 1 ? whiten_token(p, statistics, tokens.x.v[j]) : 0.0f;
    }
    if (tokens.count > 0) {
      const std::int64_t first = chunk * kTeamChunk + threadIdx.x % 32 * kLaneTokens;
      store_tokens(p.y.data + span.offset(p.y.row_stride) + first, tokens.count, vectors, y);
    }
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void masked_whiten(const MaskedWhitenParams& p, int warps, cudaStream_t stream) {
  const auto sequences = static_cast<unsigned>(p.sequences.num_tokens == 0 ? 0 : p.sequences.num_sequences);
  const int threads = 32 * warps;
  if (sequences > 0) whiten_sums_kernel<false><<<sequences, threads, 0, stream>>>(p);
  whiten_batch_kernel<false><<<1, kWhitenBatchThreads, 0, stream>>>(p);
  if (sequences > 0) whiten_sums_kernel<true><<<sequences, threads, 0, stream>>>(p);
  whiten_batch_kernel<true><<<1, kWhitenBatchThreads, 0, stream>>>(p);
  const auto blocks = static_cast<unsigned>(sequences + (p.sequences.num_tokens == 0 ? 0 : rest_blocks(p.sequences)));
  if (blocks > 0) whiten_tokens_kernel<<<blocks, threads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of masked_whiten");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
