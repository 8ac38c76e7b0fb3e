// gae, discounted_returns and vtrace. Bound by HBM: every input is read once and every output written once.
//
// Each block processes one sequence, from its end to its beginning. A warp takes a chunk of 128 tokens at a time, four
// tokens per lane. A token counts if the mask includes it. x is the state of the backward recursion (in gae the
// advantage). A chunk needs two numbers of the later chunks: the value of the first token there that counts, and x.
// Warps exchange both values through shared memory. Each warp first scans its chunk as if x after the chunk were 0.
// Then each warp computes x from chunk to chunk, with the chunks' totals. The loads of the next chunks are in flight
// meanwhile. In most chunks all tokens count. If coefficients are constants (gae and discounted_returns), all such
// chunks share the coefficients of the scan, and only x is scanned. All architectures share this source; each has its
// own machine code.
#include <limits>

#include "../common/kernels.h"
#include "../tokens/vec4_access.cuh"
#include "kernels/advantages/gae_scan.h"
#include "rlk/ops/gae.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kMostScanWarps = 16;
constexpr unsigned kAllLanes = 0xffffffffu;

// Number of a warp's chunks whose loads are in flight. discounted_returns reads one array besides the mask, so the
// loads of a single chunk would not hide the latency of HBM.
template <GaeKind kKind, bool kWideMask>
constexpr int kChunksAhead = kKind == GaeKind::kDiscountedReturns && !kWideMask ? 2 : 1;

// Addresses of a lane's tokens in the first chunk of a sequence.
template <GaeKind kKind>
struct LaneArrays {
  const float *reward, *value = nullptr, *logprob = nullptr, *rollout_logprob = nullptr;
  TokenMask mask;
  float *returns, *advantages = nullptr;
  bool vectors;  // whether four tokens of this sequence are a vector in every array

  __device__ __forceinline__ LaneArrays(const GaeParams& p, const TokenSpan& span, int lane) : mask(p.mask) {
    std::uintptr_t bits = 0;
    const auto at = [&](const auto& a) {
      auto* const data = a.data + span.offset(a.row_stride);
      bits |= reinterpret_cast<std::uintptr_t>(data);
      return data + lane * kLaneTokens;
    };
    reward = at(p.rewards);
    returns = at(p.returns);
    if constexpr (kKind != GaeKind::kDiscountedReturns) {
      value = at(p.values);
      advantages = at(p.advantages);
    }
    if constexpr (kKind == GaeKind::kVtrace) {
      logprob = at(p.logprob);
      rollout_logprob = at(p.rollout_logprob);
    }
    vectors = bits % 16 == 0 && mask_has_vectors(p.mask, span);
    if (mask.data != nullptr) {
      const std::int64_t first = span.offset(mask.row_stride) + lane * kLaneTokens;
      mask.data = static_cast<const char*>(mask.data) + first * mask.bytes;
    }
  }
};

template <GaeKind kKind, bool kWideMask>
struct LaneTokens {
  FourTokens reward, value, logprob, rollout_logprob;
  TokenMasks<kWideMask> mask;

  // How many of a lane's four places hold tokens of the sequence.
  __device__ __forceinline__ static int count_of(std::int64_t length, int chunk, int lane) {
    if (chunk < 0) return 0;
    const std::int64_t left = length - std::int64_t{chunk} * kScanChunk;
    if (left >= kScanChunk) return kLaneTokens;
    return min(max(static_cast<int>(left) - lane * kLaneTokens, 0), kLaneTokens);
  }
  __device__ __forceinline__ void load(const LaneArrays<kKind>& from, std::int64_t length, int chunk, int lane) {
    const int count = count_of(length, chunk, lane);
    if (count == 0) return;
    const std::int64_t first = std::int64_t{chunk} * kScanChunk;
    reward = load_tokens(from.reward + first, count, from.vectors);
    if constexpr (kKind != GaeKind::kDiscountedReturns) value = load_tokens(from.value + first, count, from.vectors);
    if constexpr (kKind == GaeKind::kVtrace) {
      logprob = load_tokens(from.logprob + first, count, from.vectors);
      rollout_logprob = load_tokens(from.rollout_logprob + first, count, from.vectors);
    }
    mask = load_mask<kWideMask>(from.mask, first, count, from.vectors);
  }
};

// Inclusive suffix scan over the lanes' steps (a step maps x to c x + d): a lane's result composes its own step with
// the steps of all later lanes.
__device__ __forceinline__ ScanStep scan_lanes(ScanStep block, int lane) {
#pragma unroll
  for (int h = 1; h < kScanLanes; h *= 2) {
    const ScanStep other = {__shfl_down_sync(kAllLanes, block.c, h), __shfl_down_sync(kAllLanes, block.d, h)};
    if (lane + h < kScanLanes) block = scan_compose(block, other);
  }
  return block;
}

// The scan's coefficients for a chunk whose tokens all count and share one coefficient. The coefficients are equal for
// all such chunks of a call.
struct WholeChunk {
  static constexpr int kStages = 5;
  float step = 0.0f;              // 0: whole chunks run the general scan
  float before[kStages] = {};     // product of the coefficients of 2^stage lanes
  float total = 0.0f;             // product of the coefficients of all lanes
  float behind[kScanLanes] = {};  // for each lane, product of the later lanes' coefficients; unused for the last lane

  // If the product of a chunk's coefficients is below the least normal number, `step` stays 0, and chunks run the
  // general scan. The host may round such products differently from the device.
  explicit WholeChunk(const GaeParams& p) {
    if (p.kind == GaeKind::kVtrace) return;
    const GaeConstants constants(p);
    const float each = p.kind == GaeKind::kGae ? constants.decay : constants.gamma;
    float c[kScanLanes];
    for (float& of_lane : c) of_lane = mul_rn(each, mul_rn(each, mul_rn(each, each)));
    for (int stage = 0; stage < kStages; ++stage) {
      const int h = 1 << stage;
      before[stage] = c[0];
      for (int lane = 0; lane + h < kScanLanes; ++lane) c[lane] = mul_rn(c[lane], c[lane + h]);
    }
    if (!(c[0] >= std::numeric_limits<float>::min())) return;
    step = each;
    total = c[0];
    for (int lane = 0; lane + 1 < kScanLanes; ++lane) behind[lane] = c[lane + 1];
  }
  // Inclusive suffix scan of the lanes' values d.
  __device__ __forceinline__ float scan(float d, int lane) const {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const float other = __shfl_down_sync(kAllLanes, d, 1 << stage);
      if (lane + (1 << stage) < kScanLanes) d = __fmaf_rn(before[stage], other, d);
    }
    return d;
  }
};

// The kernel's parameter `kWideMask`: the mask has 64 bits per token, so its words in flight take more registers. The
// function has_no_scan() is not inlined, because its registers would add to those of the scan.
__device__ __noinline__ bool has_no_scan(const GaeParams& p) {
  return clears_or_spoils(p, blockIdx.x, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

template <GaeKind kKind, bool kWideMask>
__global__ void __launch_bounds__(kMostScanWarps * 32, kKind == GaeKind::kVtrace || kWideMask ? 1 : 2)
    gae_kernel(const __grid_constant__ GaeParams p, const __grid_constant__ WholeChunk whole) {
  constexpr bool kHasValues = kKind != GaeKind::kDiscountedReturns, kHasWhole = kKind != GaeKind::kVtrace;
  constexpr int kAhead = kChunksAhead<kKind, kWideMask>;
  // For each warp's chunk: the scan step of the whole chunk, and the value of its first token that counts. Two tiles
  // alternate between two buffers of `totals`, so one barrier per tile is enough for them.
  __shared__ ScanStep totals[2][kMostScanWarps];
  __shared__ float first_values[kMostScanWarps];
  __shared__ int any_counts[kMostScanWarps];
  __shared__ float behind_whole[kScanLanes];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const std::int64_t sequence = blockIdx.x;
  if (p.sequences.packed() && has_no_scan(p)) return;
  const TokenSpan span = span_of(p.sequences, sequence);
  const LaneArrays<kKind> arrays(p, span, lane);
  const GaeConstants constants(p);
  const bool reset = kKind == GaeKind::kDiscountedReturns && p.reset;
  if (kHasWhole && threadIdx.x < kScanLanes) behind_whole[threadIdx.x] = whole.behind[threadIdx.x];
  __syncthreads();
  const int chunks = static_cast<int>((span.length + kScanChunk - 1) / kScanChunk);

  float next_behind = kHasValues && p.bootstrap != nullptr ? p.bootstrap[sequence] : 0.0f;
  float x_behind = 0.0f;
  LaneTokens<kKind, kWideMask> coming[kAhead];
  int chunk = chunks - warps + warp;  // negative: no chunk is left
  int tiles = (chunks + warps - 1) / warps;

  const auto take_chunk = [&](LaneTokens<kKind, kWideMask>& next_tokens) {
    const int count = LaneTokens<kKind, kWideMask>::count_of(span.length, chunk, lane);
    // The bits are computed before the next load, which then may use the registers of the mask's words.
    const unsigned counted = next_tokens.mask.bits(p.mask, count, arrays.vectors);
    const LaneTokens<kKind, kWideMask> tokens = next_tokens;
    next_tokens.load(arrays, span.length, chunk - kAhead * warps, lane);
    const bool is_whole = kHasWhole && whole.step != 0.0f && __all_sync(kAllLanes, counted == (1u << kLaneTokens) - 1);

    float next = next_behind;  // value after the lane's last token
    if constexpr (kHasValues) {
      if (is_whole && warps == 1) {
        const float after = __shfl_down_sync(kAllLanes, tokens.value.v[0], 1);
        if (lane < 31) next = after;
        next_behind = __shfl_sync(kAllLanes, tokens.value.v[0], 0);
      } else {
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
    }

    ScanStep steps[kLaneTokens], block;
    float nexts[kLaneTokens], rho[kLaneTokens];
    if (is_whole) {
      float d = 0.0f;
#pragma unroll
      for (int j = kLaneTokens - 1; j >= 0; --j) {
        steps[j] = gae_step<kKind>(constants, tokens.reward.v[j], tokens.value.v[j], next, 0.0f, nullptr);
        d = __fmaf_rn(whole.step, d, steps[j].d);
        if constexpr (kHasValues) next = tokens.value.v[j];
      }
      block.d = whole.scan(d, lane);
    } else {
      block = {1.0f, 0.0f};
#pragma unroll
      for (int j = kLaneTokens - 1; j >= 0; --j) {
        nexts[j] = next;
        rho[j] = 0.0f;
        if (counted >> j & 1) {
          const float log_ratio = kKind == GaeKind::kVtrace ? vtrace_log_ratio(p.rollout_neutral, tokens.logprob.v[j],
                                                                               tokens.rollout_logprob.v[j])
                                                            : 0.0f;
          steps[j] = gae_step<kKind>(constants, tokens.reward.v[j], tokens.value.v[j], next, log_ratio, &rho[j]);
          block = scan_compose(steps[j], block);
          if constexpr (kHasValues) next = tokens.value.v[j];
        } else {
          steps[j] = {reset ? 0.0f : 1.0f, 0.0f};
          if (reset) block = {0.0f, 0.0f};
        }
      }
      block = scan_lanes(block, lane);
    }

    ScanStep total, behind;  // step of the chunk; step of the lanes after this lane
    total.d = __shfl_sync(kAllLanes, block.d, 0);
    behind.d = __shfl_down_sync(kAllLanes, block.d, 1);
    if (is_whole) {
      total.c = whole.total;
      behind.c = behind_whole[lane];
    } else {
      total.c = __shfl_sync(kAllLanes, block.c, 0);
      behind.c = __shfl_down_sync(kAllLanes, block.c, 1);
    }
    float x = x_behind;  // x after the chunk
    if (warps > 1) {
      if (lane == 0) totals[tiles & 1][warp] = total;
      __syncthreads();
#pragma unroll 1
      for (int w = warps - 1; w >= 0; --w) {
        if (w == warp) x = x_behind;
        x_behind = scan_advance(totals[tiles & 1][w], x_behind);
      }
    } else {
      x_behind = scan_advance(total, x_behind);
    }
    if (lane < 31) x = scan_advance(behind, x);

    FourTokens advantages, returns;
    if (is_whole) {
#pragma unroll
      for (int j = kLaneTokens - 1; j >= 0; --j) {
        x = __fmaf_rn(whole.step, x, steps[j].d);
        returns.v[j] = canonical(kHasValues ? __fadd_rn(x, tokens.value.v[j]) : x);
        advantages.v[j] = canonical(x);
      }
    } else {
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
    }
    if (count > 0) {
      const std::int64_t first = std::int64_t{chunk} * kScanChunk;
      store_tokens(arrays.returns + first, count, arrays.vectors, returns);
      if constexpr (kHasValues) store_tokens(arrays.advantages + first, count, arrays.vectors, advantages);
    }
    chunk -= warps;
    --tiles;
  };

#pragma unroll
  for (int a = 0; a < kAhead; ++a) coming[a].load(arrays, span.length, chunk - a * warps, lane);
#pragma unroll 1
  while (tiles > 0) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (tiles > 0) take_chunk(coming[a]);
    }
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void gae(const GaeParams& p, int warps, cudaStream_t stream) {
  const auto launch = [&](auto* kernel) {
    kernel<<<static_cast<unsigned>(p.sequences.num_sequences + rest_blocks(p.sequences)), 32 * warps, 0, stream>>>(
        p, WholeChunk(p));
  };
  const bool wide = p.mask.bytes == 8;
  switch (p.kind) {
    case GaeKind::kGae:
      launch(wide ? gae_kernel<GaeKind::kGae, true> : gae_kernel<GaeKind::kGae, false>);
      break;
    case GaeKind::kDiscountedReturns:
      launch(wide ? gae_kernel<GaeKind::kDiscountedReturns, true> : gae_kernel<GaeKind::kDiscountedReturns, false>);
      break;
    case GaeKind::kVtrace:
      launch(wide ? gae_kernel<GaeKind::kVtrace, true> : gae_kernel<GaeKind::kVtrace, false>);
      break;
  }
  check(cudaGetLastError(), "launch of gae");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
