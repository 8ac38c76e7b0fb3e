// The formulas of ops/covariance_mask.h that every backend shares, and the checks for memory safety.
#pragma once

#include "kernels/losses/policy_check.h"
#include "rlk/math/exp.h"
#include "rlk/math/philox.h"
#include "rlk/ops/covariance_mask.h"

namespace rlk {

inline void check_covariance_mask(const CovarianceMaskParams& p) {
  check_sequences(p.sequences, p.mask, "covariance_mask");
  RLK_CHECK(p.sequences.num_slots() < std::int64_t{1} << 32, "covariance_mask: fewer than 2^32 slots");
  const bool entropy = p.kind == CovarianceKind::kEntropy;
  RLK_CHECK((entropy ? p.ratio >= 0.0 : p.ratio > 0.0) && p.ratio <= 1.0, "covariance_mask: ratio is in (0, 1]");
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(p.logprob.data && p.logprob.token_stride == 1, "covariance_mask: logprob, one a token");
  RLK_CHECK(p.kind != CovarianceKind::kClip || (p.old_logprob.data && p.old_logprob.token_stride == 1),
            "covariance_mask: old_logprob, one a token");
  RLK_CHECK(entropy != (p.advantage.data != nullptr), "covariance_mask: advantage is given, but with entropies");
  RLK_CHECK(p.selected != nullptr, "covariance_mask: selected is given");
}

// The select works on digits of 64-bit keys. The upper 32 bits of a key are the token's priority, and the lower 32 bits
// are its slot. Slots ascend by sequence and position, in padded and in packed arrays.
constexpr int kSelectPasses = 6, kSelectBins = 1 << 11;
RLK_HD int select_shift(int pass) {
  return pass == 0 ? 53 : pass == 1 ? 42 : pass == 2 ? 32 : pass == 3 ? 22 : pass == 4 ? 11 : 0;
}
struct SelectState {
  std::uint64_t prefix;  // the known digits of the last chosen key; all digits if `remaining` is 0
  // number of tokens to choose among those whose keys begin with these digits; 0: the selection is complete
  std::uint32_t remaining;
};

// Values that all tokens read, and values that a GPU's pass leaves for the next pass.
struct CovarianceShared {
  float mean_advantage, mean_logprob;
  std::int32_t broken;  // number of offsets that do not ascend
  SelectState state[kSelectPasses];
  std::uint32_t counts[kSelectPasses][kSelectBins];
};

struct CovarianceSumTerms : LowerSums {
  static constexpr int kInputs = 2, kOutputs = 1, kSums = 8;
  enum : int { kAdvantage, kLogprob };
  using Params = CovarianceMaskParams;
  struct Factors {};
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) { return i == kAdvantage ? p.advantage : p.logprob; }
  static RLK_HD float* output(const Params&, int) { return nullptr; }

  template <class F>
  static RLK_HD void token(const Params&, const Factors&, const F (&in)[kInputs], MaskOf<F> mask, F (&out)[kOutputs],
                           TokenSums<F, kSums>* sums) {
    out[0] = broadcast<F>(0.0f);
    clear(sums);
    sums->sum[kAdvantage] = in[kAdvantage];
    sums->sum[kLogprob] = in[kLogprob];
    sums->count[0] = counted<F>(mask);
  }
};

constexpr std::int32_t kNoCandidate = -1;  // bits of a NaN that no covariance has; they mark a token that is no
                                           // candidate

// Computes covariances for tokens that may be selected (candidates). For other tokens the class writes the bits of
// kNoCandidate.
struct CovarianceTerms : EverySum {
  static constexpr int kInputs = 3, kOutputs = 1, kSums = 0;
  using Params = CovarianceMaskParams;
  struct Factors {
    float mean_advantage, mean_logprob;
  };
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) {
    return i == 0 ? p.advantage : i == 1 ? p.logprob : p.old_logprob;
  }
  static RLK_HD float* output(const Params& p, int) { return p.selected; }
  static RLK_HD float rest() { return float_of(kNoCandidate); }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors& f, const F (&in)[kInputs], MaskOf<F> mask,
                           F (&out)[kOutputs], TokenSums<F, kSums>*) {
    const F none = broadcast<F>(float_of(kNoCandidate)), advantage = in[0], logprob = in[1];
    const F c = either(
        p.kind == CovarianceKind::kEntropy, logprob,
        mul_rn(sub_rn(advantage, broadcast<F>(f.mean_advantage)), sub_rn(logprob, broadcast<F>(f.mean_logprob))));
    F of_candidate = canonical(c);
    if (p.kind == CovarianceKind::kClip) {
      const F r = exp(sub_rn(logprob, in[2])), minus = -advantage;
      const auto clipped = mul_rn(minus, clamped(r, p.clip_low, p.clip_high)) > mul_rn(minus, r);
      const auto above = c > broadcast<F>(p.lower), below = c < broadcast<F>(p.upper);
      const auto inside = MaskOf<F>(above & below);
      of_candidate = select(inside, select(clipped, none, of_candidate), none);
    }
    out[0] = select(mask, of_candidate, none);
  }
};

// The priority of a candidate. Candidates with the lowest priorities are chosen. draw_priority() draws a priority at
// random. largest_first() gives lower priorities to larger covariances.
RLK_HD std::uint32_t draw_priority(std::uint64_t seed, std::int64_t sequence, std::int64_t position) {
  constexpr std::uint32_t kMost = 0xfffffffeu;
  const std::uint32_t drawn =
      philox_bits(seed, static_cast<std::uint64_t>(sequence), static_cast<std::uint32_t>(position), 0);
  return drawn < kMost ? drawn : kMost;
}
RLK_HD std::uint32_t largest_first(float c) {
  if (is_nan(c)) return 0;
  const auto bits = static_cast<std::uint32_t>(bits_of(add_rn(c, 0.0f)));
  return (bits >> 31) != 0 ? bits : ~(bits | 0x80000000u);
}

// The number of tokens to choose. Tokens that tie with the last chosen token may come in addition.
RLK_HD std::uint32_t most_selected(CovarianceKind kind, double ratio, std::int64_t tokens) {
  if (kind == CovarianceKind::kEntropy) {
    const float rank = mul_rn(static_cast<float>(1.0 - ratio), static_cast<float>(tokens - 1));
    const auto below = static_cast<std::int64_t>(rank);
    const std::int64_t left = tokens - (static_cast<float>(below) < rank ? below + 1 : below);
    return left < 1 ? 1u : static_cast<std::uint32_t>(left);
  }
  const auto share = static_cast<std::int64_t>(ratio * static_cast<double>(tokens));
  return share < 1 ? 1u : static_cast<std::uint32_t>(share);
}

// Whether the token with this key is chosen, given the last chosen key. A key consists of a priority (upper half) and a
// slot (lower half).
RLK_HD bool is_chosen(CovarianceKind kind, std::uint64_t key, std::uint64_t last) {
  return kind == CovarianceKind::kEntropy ? key >> 32 <= last >> 32 : key <= last;
}

struct CovarianceBatch {
  static constexpr int kGroups = 1, kSums = 2, kCounts = 2, kMaxima = 1, kResults = 1;
  enum : int { kTokens, kBadCuts };
  using Params = CovarianceMaskParams;
  using Factors = CovarianceSumTerms::Factors;
  using Shared = CovarianceShared;
  using Context = TokenContext<CovarianceBatch>;
  using Total = TotalSums<kSums, kCounts, kMaxima>;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD bool needs_pass_before(const Params&) { return false; }
  static RLK_HD bool needs_sums(const Params&) { return true; }
  template <class Terms>
  static RLK_HD typename Terms::Factors factors(const Params&, const Context& context, bool, std::int64_t) {
    if constexpr (Terms::kSums > 0) {
      return {};
    } else {
      const Shared* const shared = in_global(context.shared);
      return {shared->mean_advantage, shared->mean_logprob};
    }
  }
  static RLK_HD Total missing() { return {}; }
  static RLK_HD Total of_sequence(const Params& p, const Context&, std::int64_t s,
                                  const SequenceSums<8> (&groups)[kGroups]) {
    Total t = {};
    for (int i = 0; i < kSums; ++i) t.sum[i] = groups[0].sum[i];
    t.count[kTokens] = groups[0].count[0];
    t.count[kBadCuts] = has_bad_offsets(p.sequences, s);
    return t;
  }
  static RLK_HD void store(const Params& p, const Context& context, const Total& t, int) {
    Shared* const shared = in_global(context.shared);
    const float tokens = static_cast<float>(t.count[kTokens]);
    shared->mean_advantage = quotient_or_zero(t.sum[CovarianceSumTerms::kAdvantage], tokens);
    shared->mean_logprob = quotient_or_zero(t.sum[CovarianceSumTerms::kLogprob], tokens);
    shared->broken = t.count[kBadCuts] > 0;
    shared->state[0] = {0, most_selected(p.kind, p.ratio, t.count[kTokens])};
  }
};

}  // namespace rlk
