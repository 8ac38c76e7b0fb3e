// The inner loops of the operator `gae`. CMake compiles this file once per instruction set. Vectors hold the 32 lanes
// of a chunk side by side.
#include "gae_simd.h"

#include "kernels/advantages/gae_scan.h"
#include "simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

// The steps of a chunk, token 4 lane + j at [j][lane].
struct Steps {
  alignas(64) float c[kScanLaneTokens][kScanLanes], d[kScanLaneTokens][kScanLanes];
};

// Inputs of the chunk's tokens, in token order. Tokens that do not count are zeros.
struct Tokens {
  alignas(64) float reward[kScanChunk], value[kScanChunk], next[kScanChunk], log_ratio[kScanChunk], rho[kScanChunk];
  alignas(64) std::int32_t counted[kScanChunk];
};

// Combines the block of each lane with the blocks of all later lanes.
RLK_HD void scan_lanes(float (&c)[kScanLanes], float (&d)[kScanLanes]) {
  for (int h = 1; h < kScanLanes; h *= 2) {
    for (int l = 0; l < kScanLanes - h; ++l) {
      const ScanStep s = scan_compose({c[l], d[l]}, {c[l + h], d[l + h]});
      c[l] = s.c;
      d[l] = s.d;
    }
  }
}

template <GaeKind kKind>
class Sequence {
 public:
  Sequence(const GaeParams& p, std::int64_t sequence) : p_(p), constants_(p), span_(span_of(p.sequences, sequence)) {
    if (kKind != GaeKind::kDiscountedReturns && p.bootstrap != nullptr) next_ = p.bootstrap[sequence];
  }

  void run() {
    for (std::int64_t k = (span_.length + kScanChunk - 1) / kScanChunk; k-- > 0;) {
      const std::int64_t first = k * kScanChunk;
      const int count = static_cast<int>(span_.length - first < kScanChunk ? span_.length - first : kScanChunk);
      load(first, count);
      scan();
      store(first, count);
    }
  }

 private:
  template <class T>
  T* at(const TokenArray<T>& array, std::int64_t first) const {
    return array.data + span_.offset(array.row_stride) + first;
  }

  void load(std::int64_t first, int count) {
    load_mask(first, count);
    fill(at(p_.rewards, first), count, tokens_.reward);
    if constexpr (kKind != GaeKind::kDiscountedReturns) {
      fill(at(p_.values, first), count, tokens_.value);
      float next = next_;
      for (int i = kScanChunk; i-- > 0;) {
        tokens_.next[i] = next;
        next = tokens_.counted[i] != 0 ? tokens_.value[i] : next;
      }
      next_ = next;
    }
    if constexpr (kKind == GaeKind::kVtrace) {
      fill(at(p_.logprob, first), count, tokens_.log_ratio);
      fill(at(p_.rollout_logprob, first), count, tokens_.rho);
      const bool neutral = p_.rollout_neutral;
      for (int i = 0; i < kScanChunk; ++i) {
        tokens_.log_ratio[i] = vtrace_log_ratio(neutral, tokens_.log_ratio[i], tokens_.rho[i]);
      }
    }
    alignas(64) float c[kScanChunk], d[kScanChunk];
    const GaeConstants constants = constants_;
    const float c_of_others = p_.reset ? 0.0f : 1.0f;
    for (int i = 0; i < kScanChunk; ++i) {
      float rho = 0.0f;
      const ScanStep s =
          gae_step<kKind>(constants, tokens_.reward[i], tokens_.value[i], tokens_.next[i], tokens_.log_ratio[i], &rho);
      tokens_.rho[i] = rho;
      const bool counted = tokens_.counted[i] != 0;
      c[i] = rlk::select(counted, s.c, c_of_others);
      d[i] = rlk::select(counted, s.d, 0.0f);
    }
    for (int l = 0; l < kScanLanes; ++l) {
      for (int j = 0; j < kScanLaneTokens; ++j) {
        steps_.c[j][l] = c[l * kScanLaneTokens + j];
        steps_.d[j][l] = d[l * kScanLaneTokens + j];
        counted_[j][l] = tokens_.counted[l * kScanLaneTokens + j];
      }
    }
  }

  void load_mask(std::int64_t first, int count) {
    const std::int64_t begin = span_.offset(p_.mask.row_stride) + first;
    with_flag_bytes(p_.mask, [&](auto bytes) {
      const FlagsFrom<decltype(bytes)::value> flags(p_.mask, begin);
      for (int i = 0; i < count; ++i) tokens_.counted[i] = flags.counts(flags.load(i)) ? 1 : 0;
    });
    for (int i = count; i < kScanChunk; ++i) tokens_.counted[i] = 0;
  }
  void fill(const float* from, int count, float* to) const {
    for (int i = 0; i < count; ++i) {
      const float x = from[i];
      to[i] = rlk::select(tokens_.counted[i] != 0, x, 0.0f);
    }
    for (int i = count; i < kScanChunk; ++i) to[i] = 0.0f;
  }

  // Replaces d of each token in `steps_` by the token's x, and sets `after_` to x after the token.
  void scan() {
    alignas(64) float c[kScanLanes], d[kScanLanes], x[kScanLanes];
    for (int l = 0; l < kScanLanes; ++l) {
      c[l] = 1.0f;
      d[l] = 0.0f;
    }
    const std::int32_t reset = p_.reset ? 1 : 0;
    for (int j = kScanLaneTokens; j-- > 0;) {
      for (int l = 0; l < kScanLanes; ++l) {
        const ScanStep s = scan_compose({steps_.c[j][l], steps_.d[j][l]}, {c[l], d[l]});
        const bool changes = (counted_[j][l] | reset) != 0;
        c[l] = rlk::select(changes, s.c, c[l]);
        d[l] = rlk::select(changes, s.d, d[l]);
      }
    }
    scan_lanes(c, d);
    for (int l = 0; l < kScanLanes - 1; ++l) x[l] = scan_advance({c[l + 1], d[l + 1]}, x_);
    x[kScanLanes - 1] = x_;
    x_ = scan_advance({c[0], d[0]}, x_);
    for (int j = kScanLaneTokens; j-- > 0;) {
      for (int l = 0; l < kScanLanes; ++l) {
        const float y = scan_advance({steps_.c[j][l], steps_.d[j][l]}, x[l]);
        after_[j][l] = x[l];
        x[l] = rlk::select((counted_[j][l] | reset) != 0, y, x[l]);
        steps_.d[j][l] = x[l];
      }
    }
  }

  void store(std::int64_t first, int count) const {
    alignas(64) float x[kScanChunk], after[kScanChunk], advantage[kScanChunk], returns[kScanChunk];
    for (int l = 0; l < kScanLanes; ++l) {
      for (int j = 0; j < kScanLaneTokens; ++j) {
        x[l * kScanLaneTokens + j] = steps_.d[j][l];
        after[l * kScanLaneTokens + j] = after_[j][l];
      }
    }
    const GaeConstants constants = constants_;
    for (int i = 0; i < kScanChunk; ++i) {
      if constexpr (kKind == GaeKind::kDiscountedReturns) {
        returns[i] = canonical(x[i]);
      } else {
        const bool counted = tokens_.counted[i] != 0;
        const float value = tokens_.value[i], next = tokens_.next[i];
        returns[i] = canonical(rlk::add_rn(x[i], rlk::select(counted, value, next)));
        advantage[i] = canonical(x[i]);
        if constexpr (kKind == GaeKind::kVtrace) {
          const float of_policy = vtrace_advantage(constants, tokens_.reward[i], value, next, after[i], tokens_.rho[i]);
          advantage[i] = rlk::select(counted, canonical(of_policy), 0.0f);
        }
      }
    }
    std::memcpy(at(p_.returns, first), returns, static_cast<std::size_t>(count) * sizeof(float));
    if constexpr (kKind != GaeKind::kDiscountedReturns) {
      std::memcpy(at(p_.advantages, first), advantage, static_cast<std::size_t>(count) * sizeof(float));
    }
  }

  const GaeParams& p_;
  GaeConstants constants_;
  TokenSpan span_;
  float next_ = 0.0f;  // value of the nearest later token that counts
  float x_ = 0.0f;     // x after the chunk
  Tokens tokens_ = {};
  Steps steps_;
  alignas(64) float after_[kScanLaneTokens][kScanLanes];
  alignas(64) std::int32_t counted_[kScanLaneTokens][kScanLanes];
};

void scan_sequence(const GaeParams& p, std::int64_t sequence) {
  switch (p.kind) {
    case GaeKind::kGae:
      return Sequence<GaeKind::kGae>(p, sequence).run();
    case GaeKind::kDiscountedReturns:
      return Sequence<GaeKind::kDiscountedReturns>(p, sequence).run();
    case GaeKind::kVtrace:
      return Sequence<GaeKind::kVtrace>(p, sequence).run();
  }
}

}  // namespace

const GaeLanes gae_simd = {scan_sequence};

}  // namespace rlk::cpu::RLK_CPU_ISA
