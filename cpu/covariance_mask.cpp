// CPU backend of the operator `covariance_mask`. Tiles of sequences are spread over threads. One thread then finds the
// chosen token that comes last in the order of priorities. It counts priorities by their upper half, then orders the
// priorities with the same upper half as that of the last chosen token.
#include "rlk/ops/covariance_mask.h"

#include <algorithm>
#include <vector>

#include "covariance_mask_simd.h"
#include "kernels/losses/covariance_terms.h"
#include "rlk/backends.h"
#include "tokens/passes.h"

namespace rlk::cpu {
namespace {

const CovarianceMaskLanes& lanes() { return RLK_CPU_LANES_IN_USE(covariance_mask_simd); }

std::int64_t slot_of(const Sequences& q, const TokenTile& tile) {
  return (q.packed() ? tile.begin : tile.sequence * q.num_tokens) + tile.first;
}

// Turns candidates' covariances in `values` into their priorities.
void to_priorities(const CovarianceMaskParams& p, const TokenTile& tile, float* values) {
  for (int i = 0; i < tile.count; ++i) {
    if (bits_of(values[i]) == kNoCandidate) continue;
    const std::uint32_t priority = p.kind != CovarianceKind::kClip
                                       ? largest_first(values[i])
                                       : draw_priority(p.seed, tile.sequence, tile.first + i);
    values[i] = float_of(static_cast<std::int32_t>(priority));
  }
}

using Key = std::uint64_t;  // upper half: a token's priority; lower half: its index
Key key_of(const float* values, std::int64_t i) {
  return Key{static_cast<std::uint32_t>(bits_of(values[i]))} << 32 | static_cast<Key>(i);
}

// The largest key of the chosen tokens: the `most` candidates with the least keys. If there are fewer candidates, the
// result is a key above all others.
Key last_chosen(const float* values, std::int64_t count, std::uint32_t most) {
  constexpr int kShift = 48;
  std::vector<std::uint32_t> counts(std::size_t{1} << (64 - kShift));
  for (std::int64_t i = 0; i < count; ++i) {
    if (bits_of(values[i]) != kNoCandidate) ++counts[key_of(values, i) >> kShift];
  }
  Key upper = 0;
  std::uint32_t left = most;
  while (upper < counts.size() && counts[upper] < left) left -= counts[upper++];
  if (upper == counts.size()) return ~Key{0};
  std::vector<Key> keys;
  for (std::int64_t i = 0; i < count; ++i) {
    const Key key = key_of(values, i);
    if (key >> kShift == upper && bits_of(values[i]) != kNoCandidate) keys.push_back(key);
  }
  const auto last = keys.begin() + (left - 1);
  std::nth_element(keys.begin(), last, keys.end());
  return *last;
}

}  // namespace

void covariance_mask(const CovarianceMaskParams& p) {
  check_covariance_mask(p);
  const Sequences& q = p.sequences;
  check_offset_values(q);
  const std::int64_t count = q.num_slots();
  if (count == 0) return;
  const auto sums = [&](const auto&, const TokenTile& tile, TilePartial<8>* const* partials) {
    lanes().sums(p, tile, partials[0]);
  };
  const CovarianceShared shared = run_token_passes<CovarianceBatch, CovarianceSumTerms>(p, nullptr, sums);
  for_each_tile(q, [&](const TokenTile& tile, std::int64_t) {
    lanes().covariances(p, shared.mean_advantage, shared.mean_logprob, tile);
    to_priorities(p, tile, p.selected + slot_of(q, tile));
  });
  clear_rest(q, {p.selected}, float_of(kNoCandidate));
  const Key last = last_chosen(p.selected, count, shared.state[0].remaining);
  parallel_for(count, 16384, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const bool candidate = bits_of(p.selected[i]) != kNoCandidate;
      p.selected[i] = candidate && is_chosen(p.kind, key_of(p.selected, i), last) ? 1.0f : 0.0f;
    }
  });
}

}  // namespace rlk::cpu
