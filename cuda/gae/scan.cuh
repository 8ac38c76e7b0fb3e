// gae, discounted_returns and vtrace. Bound by HBM: every input is read once and every output written once.
//
// A block has a sequence and goes through it from its end, a chunk of 128 tokens a warp at a time, four tokens a lane. What a
// chunk needs of those behind it, the value of their first token that counts and x, goes through shared memory: warps learn
// the first, scan their chunks as if x were unknown, then run the short chain over the chunks' totals, each for itself. The
// next chunk's loads are under way meanwhile.
// One body for every architecture; each gets its own machine code.
#pragma once

#include "../common/launch.h"
#include "../common/tokens.cuh"
#include "kernels.h"
#include "rlk/kernels/gae_scan.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kMostScanWarps = 16;
constexpr unsigned kAllLanes = 0xffffffffu;

template <GaeKind kKind>
struct LaneTokens {
  FourTokens reward, value, logprob, rollout_logprob;
  TokenMasks mask;
  int count;  // of the four that are tokens of the sequence

  __device__ __forceinline__ void load(const GaeParams& p, const SequenceSpan& span, std::int64_t chunk, int lane,
                                       bool vectors) {
    const std::int64_t first = chunk * kScanChunk + lane * kLaneTokens, left = span.length - first;
    count = chunk < 0 || left <= 0 ? 0 : left < kLaneTokens ? static_cast<int>(left) : kLaneTokens;
    if (count == 0) return;
    const auto read = [&](const TokenArray<const float>& a) {
      return load_tokens(a.data + span.offset(a.row_stride) + first, count, vectors);
    };
    reward = read(p.rewards);
    if constexpr (kKind != GaeKind::kDiscountedReturns) value = read(p.values);
    if constexpr (kKind == GaeKind::kVtrace) {
      logprob = read(p.logprob);
      rollout_logprob = read(p.rollout_logprob);
    }
    mask = load_mask(p.mask, span.offset(p.mask.row_stride) + first, count, vectors);
  }
};

// Whether four tokens of every array are a vector, of this sequence.
template <GaeKind kKind>
__device__ __forceinline__ bool has_vectors(const GaeParams& p, const SequenceSpan& span) {
  std::uintptr_t bits = 0;
  const auto add = [&](const float* data, std::int64_t row_stride) {
    bits |= reinterpret_cast<std::uintptr_t>(data + span.offset(row_stride));
  };
  add(p.rewards.data, p.rewards.row_stride);
  add(p.returns.data, p.returns.row_stride);
  if constexpr (kKind != GaeKind::kDiscountedReturns) {
    add(p.values.data, p.values.row_stride);
    add(p.advantages.data, p.advantages.row_stride);
  }
  if constexpr (kKind == GaeKind::kVtrace) {
    add(p.logprob.data, p.logprob.row_stride);
    add(p.rollout_logprob.data, p.rollout_logprob.row_stride);
  }
  return bits % 16 == 0 && mask_has_vectors(p.mask, span);
}

__device__ __forceinline__ ScanStep step_of_lane(const ScanStep& s, int lane) {
  return {__shfl_sync(kAllLanes, s.c, lane), __shfl_sync(kAllLanes, s.d, lane)};
}

// Blocks of lanes to inclusive suffixes.
__device__ __forceinline__ ScanStep scan_lanes(ScanStep block, int lane) {
#pragma unroll
  for (int h = 1; h < kScanLanes; h *= 2) {
    const ScanStep other = {__shfl_down_sync(kAllLanes, block.c, h), __shfl_down_sync(kAllLanes, block.d, h)};
    if (lane + h < kScanLanes) block = scan_compose(block, other);
  }
  return block;
}

template <GaeKind kKind>
__global__ void __launch_bounds__(kMostScanWarps * 32, kKind == GaeKind::kVtrace ? 1 : 2)
    gae_kernel(const __grid_constant__ GaeParams p) {
  constexpr bool kHasValues = kKind != GaeKind::kDiscountedReturns;
  // Of the chunks that the block's warps have: x's step through all of it; the value of the first token that counts.
  __shared__ ScanStep totals[2][kMostScanWarps];  // of two tiles in turn: one barrier a tile is enough
  __shared__ float first_values[kMostScanWarps];
  __shared__ int any_counts[kMostScanWarps];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const std::int64_t sequence = blockIdx.x;
  const SequenceSpan span = span_of(p.sequences, sequence);
  const GaeConstants constants(p);
  const bool vectors = has_vectors<kKind>(p, span), reset = kKind == GaeKind::kDiscountedReturns && p.reset;
  const std::int64_t chunks = (span.length + kScanChunk - 1) / kScanChunk;

  float next_behind = kHasValues && p.bootstrap != nullptr ? p.bootstrap[sequence] : 0.0f;
  float x_behind = 0.0f;
  LaneTokens<kKind> coming;
  std::int64_t chunk = chunks - warps + warp;  // negative: there is none
  coming.load(p, span, chunk, lane, vectors);
#pragma unroll 1
  for (std::int64_t tiles = (chunks + warps - 1) / warps; tiles > 0; --tiles, chunk -= warps) {
    const LaneTokens<kKind> tokens = coming;
    coming.load(p, span, chunk - warps, lane, vectors);
    const unsigned counted = tokens.count == 0 ? 0 : tokens.mask.bits(p.mask.dtype, tokens.count);

    float next = next_behind;  // of the lane's last token
    if constexpr (kHasValues) {
      const unsigned lanes = __ballot_sync(kAllLanes, counted != 0);
      float first = 0.0f;
#pragma unroll
      for (int j = kLaneTokens - 1; j >= 0; --j) {
        if (counted >> j & 1) first = tokens.value.v[j];
      }
      if (warps > 1) {
        const float first_of_warp = __shfl_sync(kAllLanes, first, lanes == 0 ? 0 : __ffs(lanes) - 1);
        if (lane == 0) {
          first_values[warp] = first_of_warp;
          any_counts[warp] = lanes != 0;
        }
        __syncthreads();
#pragma unroll 1
        for (int w = warps - 1; w >= 0; --w) {
          if (w == warp) next = next_behind;
          if (any_counts[w]) next_behind = first_values[w];
        }
      } else if (lanes != 0) {
        next_behind = __shfl_sync(kAllLanes, first, __ffs(lanes) - 1);
      }
      const unsigned later = lane == 31 ? 0 : lanes >> (lane + 1);
      const float found = __shfl_sync(kAllLanes, first, later == 0 ? lane : lane + __ffs(later));
      if (later != 0) next = found;
    }

    ScanStep steps[kLaneTokens], block = {1.0f, 0.0f};
    float nexts[kLaneTokens], rho[kLaneTokens];
#pragma unroll
    for (int j = kLaneTokens - 1; j >= 0; --j) {
      nexts[j] = next;
      rho[j] = 0.0f;
      if (counted >> j & 1) {
        const float log_ratio =
            kKind == GaeKind::kVtrace ? __fsub_rn(tokens.logprob.v[j], tokens.rollout_logprob.v[j]) : 0.0f;
        steps[j] = gae_step<kKind>(constants, tokens.reward.v[j], tokens.value.v[j], next, log_ratio, &rho[j]);
        block = scan_compose(steps[j], block);
        if constexpr (kHasValues) next = tokens.value.v[j];
      } else {
        steps[j] = {reset ? 0.0f : 1.0f, 0.0f};
        if (reset) block = {0.0f, 0.0f};
      }
    }
    block = scan_lanes(block, lane);

    float x = x_behind;  // behind the chunk
    if (warps > 1) {
      if (lane == 0) totals[tiles & 1][warp] = block;
      __syncthreads();
#pragma unroll 1
      for (int w = warps - 1; w >= 0; --w) {
        if (w == warp) x = x_behind;
        x_behind = scan_advance(totals[tiles & 1][w], x_behind);
      }
    } else {
      x_behind = scan_advance(step_of_lane(block, 0), x_behind);
    }
    const ScanStep behind = {__shfl_down_sync(kAllLanes, block.c, 1), __shfl_down_sync(kAllLanes, block.d, 1)};
    if (lane < 31) x = scan_advance(behind, x);

    FourTokens advantages, returns;
#pragma unroll
    for (int j = kLaneTokens - 1; j >= 0; --j) {
      const bool counts = counted >> j & 1;
      const float after = x;
      if (counts || reset) x = scan_advance(steps[j], x);
      if constexpr (kHasValues) {
        returns.v[j] = canonical(__fadd_rn(x, counts ? tokens.value.v[j] : nexts[j]));
        advantages.v[j] = canonical(x);
        if constexpr (kKind == GaeKind::kVtrace) {
          advantages.v[j] = counts ? canonical(vtrace_advantage(constants, tokens.reward.v[j], tokens.value.v[j],
                                                                nexts[j], after, rho[j]))
                                   : 0.0f;
        }
      } else {
        returns.v[j] = canonical(x);
      }
    }
    if (tokens.count > 0) {
      const std::int64_t first = chunk * kScanChunk + lane * kLaneTokens;
      store_tokens(p.returns.data + span.offset(p.returns.row_stride) + first, tokens.count, vectors, returns);
      if constexpr (kHasValues) {
        store_tokens(p.advantages.data + span.offset(p.advantages.row_stride) + first, tokens.count, vectors,
                     advantages);
      }
    }
  }
}

inline void run_gae(const GaeParams& p, int warps, cudaStream_t stream) {
  const auto launch = [&](auto* kernel) {
    kernel<<<static_cast<unsigned>(p.sequences.num_sequences), 32 * warps, 0, stream>>>(p);
  };
  switch (p.kind) {
    case GaeKind::kGae:
      launch(gae_kernel<GaeKind::kGae>);
      break;
    case GaeKind::kDiscountedReturns:
      launch(gae_kernel<GaeKind::kDiscountedReturns>);
      break;
    case GaeKind::kVtrace:
      launch(gae_kernel<GaeKind::kVtrace>);
      break;
  }
  check(cudaGetLastError(), "launch of gae");
}

}  // namespace
}  // namespace rlk::cuda
