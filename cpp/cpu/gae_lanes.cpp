// Inner loops of gae, compiled once per instruction set: the 32 lanes of a chunk side by side.
#include "simd.h"
// After simd.h, which decides how inline functions are compiled.
#include "gae_lanes.h"
#include "rlk/kernels/gae_scan.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

// The steps of a chunk, token 4 lane + j at [j][lane].
struct Steps {
  alignas(64) float c[kScanLaneTokens][kScanLanes], d[kScanLaneTokens][kScanLanes];
};

// What the chunk's tokens are computed from, in the order of tokens. Those that do not count are zeros.
struct Tokens {
  alignas(64) float reward[kScanChunk], value[kScanChunk], next[kScanChunk], log_ratio[kScanChunk], rho[kScanChunk];
  alignas(64) bool counted[kScanChunk];
};

// Blocks of lanes to inclusive suffixes.
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
    const std::int64_t mask_at = span_.offset(p_.mask.row_stride) + first;
    for (int i = 0; i < kScanChunk; ++i) {
      tokens_.counted[i] = i < count && (p_.mask.data == nullptr || counts(p_.mask.data, p_.mask.dtype, mask_at + i));
    }
    const auto fill = [&](const float* from, float* to) {
      for (int i = 0; i < count; ++i) to[i] = tokens_.counted[i] ? from[i] : 0.0f;
      for (int i = count; i < kScanChunk; ++i) to[i] = 0.0f;
    };
    fill(at(p_.rewards, first), tokens_.reward);
    if constexpr (kKind != GaeKind::kDiscountedReturns) {
      fill(at(p_.values, first), tokens_.value);
      for (int i = kScanChunk; i-- > 0;) {
        tokens_.next[i] = next_;
        next_ = tokens_.counted[i] ? tokens_.value[i] : next_;
      }
    }
    if constexpr (kKind == GaeKind::kVtrace) {
      fill(at(p_.logprob, first), tokens_.log_ratio);
      fill(at(p_.rollout_logprob, first), tokens_.rho);
      for (int i = 0; i < kScanChunk; ++i) tokens_.log_ratio[i] = rlk::sub_rn(tokens_.log_ratio[i], tokens_.rho[i]);
    }
    const float c_of_others = p_.reset ? 0.0f : 1.0f;
    for (int j = 0; j < kScanLaneTokens; ++j) {
      for (int l = 0; l < kScanLanes; ++l) {
        const int i = l * kScanLaneTokens + j;
        const ScanStep s = gae_step<kKind>(constants_, tokens_.reward[i], tokens_.value[i], tokens_.next[i],
                                           tokens_.log_ratio[i], &tokens_.rho[i]);
        steps_.c[j][l] = tokens_.counted[i] ? s.c : c_of_others;
        steps_.d[j][l] = tokens_.counted[i] ? s.d : 0.0f;
        counted_[j][l] = tokens_.counted[i];
      }
    }
  }

  // steps_ to x at each token, after_ to x behind it.
  void scan() {
    alignas(64) float c[kScanLanes], d[kScanLanes], x[kScanLanes];
    for (int l = 0; l < kScanLanes; ++l) {
      c[l] = 1.0f;
      d[l] = 0.0f;
    }
    const bool reset = p_.reset;
    for (int j = kScanLaneTokens; j-- > 0;) {
      for (int l = 0; l < kScanLanes; ++l) {
        const ScanStep s = scan_compose({steps_.c[j][l], steps_.d[j][l]}, {c[l], d[l]});
        const bool keeps = !counted_[j][l] && !reset;
        c[l] = keeps ? c[l] : s.c;
        d[l] = keeps ? d[l] : s.d;
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
        x[l] = counted_[j][l] || reset ? y : x[l];
        steps_.d[j][l] = x[l];
      }
    }
  }

  void store(std::int64_t first, int count) const {
    float* returns = at(p_.returns, first);
    for (int i = 0; i < count; ++i) {
      const int j = i % kScanLaneTokens, l = i / kScanLaneTokens;
      const float x = steps_.d[j][l];
      if constexpr (kKind == GaeKind::kDiscountedReturns) {
        returns[i] = canonical(x);
      } else {
        const float reward = tokens_.reward[i], value = tokens_.value[i], next = tokens_.next[i];
        returns[i] = canonical(rlk::add_rn(x, tokens_.counted[i] ? value : next));
        float advantage = x;
        if constexpr (kKind == GaeKind::kVtrace) {
          advantage = tokens_.counted[i]
                          ? vtrace_advantage(constants_, reward, value, next, after_[j][l], tokens_.rho[i])
                          : 0.0f;
        }
        at(p_.advantages, first)[i] = canonical(advantage);
      }
    }
  }

  const GaeParams& p_;
  GaeConstants constants_;
  SequenceSpan span_;
  float next_ = 0.0f;  // value of the nearest later token that counts
  float x_ = 0.0f;     // behind the chunk
  Tokens tokens_ = {};
  Steps steps_;
  alignas(64) float after_[kScanLaneTokens][kScanLanes];
  alignas(64) bool counted_[kScanLaneTokens][kScanLanes];
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

const GaeLanes gae_lanes = {scan_sequence};

}  // namespace rlk::cpu::RLK_CPU_ISA
