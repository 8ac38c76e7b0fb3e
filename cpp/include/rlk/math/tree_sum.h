// The order of a sum (docs/numerics.md, rule 10): the perfect binary tree over the index of its terms. The nodes of
// level 0 are the terms. A node of level k covers the 2^k terms from a multiple of 2^k on; it is fl(left + right) of
// two nodes of level k - 1. A term that is missing or does not count is +0 and keeps its place.
//
// Adding +0 changes no sum except the sign of a zero, and finished_sum makes every zero positive. So a missing node may
// be added or left out, and padding after the last term changes no sum. A part of 2^k terms, cut at multiples of 2^k,
// is a node. So the tree over the parts' index, with the finished sum of each part as a term, gives the sum of the
// whole.
#pragma once

#include <cstdint>

#include "rlk/math/ieee.h"
#include "rlk/unroll.h"

namespace rlk {

// The final form of a sum: -0 becomes +0, and every NaN becomes canonical_nan().
RLK_HD float finished_sum(float x) {
  const float sum = add_rn(x, 0.0f);
  return select(is_nan(sum), canonical_nan(), sum);
}

// The tree over values that arrive in order: call take() for each, then finish().
template <int kLevels>
class SumTree {
 public:
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  // Indices of kept_ are constants once loops are unrolled, so that kept_ lives in registers.
  RLK_HD void take(float value) {
    if constexpr (kLevels <= 4) {  // with more levels, each branch would copy all of kept_
      place<0>(value);
    } else {
      bool carries = true;
      RLK_UNROLL
      for (int level = 0; level < kLevels; ++level) {
        const bool full = (taken_ >> level & 1u) != 0;
        const float sum = add_rn(kept_[level], value);
        kept_[level] = carries && !full ? value : kept_[level];
        value = carries && full ? sum : value;
        carries = carries && full;
      }
    }
    ++taken_;
  }
#else
  RLK_HD void take(float value) {
    int level = 0;
    for (; level + 1 < kLevels && (taken_ >> level & 1u) != 0; ++level) value = add_rn(kept_[level], value);
    kept_[level] = value;
    ++taken_;
  }
#endif
  RLK_HD float finish() const {
    float sum = 0.0f;
    bool any = false;
    RLK_UNROLL
    for (int level = 0; level < kLevels; ++level) {
      const bool full = (taken_ >> level & 1u) != 0;
      const float longer = any ? add_rn(kept_[level], sum) : kept_[level];
      sum = full ? longer : sum;
      any = any || full;
    }
    return sum;
  }

 private:
  template <int kLevel>
  RLK_HD void place(float value) {
    if constexpr (kLevel < kLevels) {
      if ((taken_ >> kLevel & 1u) == 0) {
        kept_[kLevel] = value;
      } else {
        place<kLevel + 1>(add_rn(kept_[kLevel], value));
      }
    }
  }

  std::uint32_t taken_ = 0;
  float kept_[kLevels] = {};
};
constexpr int kTileLevels = 24;      // a sequence has fewer than 2^24 tiles
constexpr int kSequenceLevels = 31;  // a batch has fewer than 2^31 sequences

// A Team is 32 or 64 lanes that run together. lane() is the lane's number. shuffle_xor(value, mask) returns the value
// of lane lane() ^ mask.

// The tree over one value for each of kLanes lanes; every lane gets the sum.
template <int kLanes, class Team>
RLK_DEVICE float sum_over_lanes(const Team& team, float x) {
  RLK_UNROLL
  for (int distance = 1; distance < kLanes; distance *= 2) x = add_rn(x, team.shuffle_xor(x, distance));
  return x;
}

// A SumTree that the lanes of a team compute together. All lanes take the same nodes, and all get the sum. Lane k keeps
// the node of level k, so a node costs one shuffle for each level that it completes. There are fewer than 2^31 values.
template <class Team>
class TeamSumTree {
 public:
  RLK_DEVICE explicit TeamSumTree(const Team& team) : team_(team) {}

  // Takes a node of 2^level values. The number of values taken before must be a multiple of 2^level.
  RLK_DEVICE void take(float node, int level = 0) {
    const std::uint32_t values = 1u << level;
    RLK_UNROLL_NOT
    for (; (taken_ >> level & 1u) != 0; ++level) node = add_rn(kept_at(level), node);
    if (team_.lane() == level) kept_ = node;
    taken_ += values;
  }
  RLK_DEVICE float finish() const {
    float sum = 0.0f;
    RLK_UNROLL_NOT
    for (int level = 0; taken_ >> level != 0; ++level) {
      if ((taken_ >> level & 1u) != 0) sum = add_rn(kept_at(level), sum);
    }
    return sum;
  }

 private:
  RLK_DEVICE float kept_at(int level) const { return team_.shuffle_xor(kept_, team_.lane() ^ level); }

  Team team_;
  std::uint32_t taken_ = 0;
  float kept_ = 0.0f;
};

// Sums kRows rows of kLanes consecutive terms. A lane holds one term of each row, the term with the lane's index; v[r]
// is the term of row r. Each lane gets the sum of one row, whose index is the bit reversal of the lane's lowest bits.
// At the first levels, two neighbouring lanes split the rows between them: each lane passes half of its terms to the
// other lane, which adds them.
template <int kLanes, int kRows, class Team>
RLK_DEVICE float row_of_lane(const Team& team, float (&v)[kRows]) {
  static_assert(kRows <= kLanes && (kRows & (kRows - 1)) == 0);
  RLK_UNROLL
  for (int distance = 1; distance < kRows; distance *= 2) {
    const int half = kRows / 2 / distance;
    const bool upper = (team.lane() & distance) != 0;
    RLK_UNROLL
    for (int j = 0; j < half; ++j) {
      const float given = upper ? v[j] : v[j + half];
      v[j] = add_rn(upper ? v[j + half] : v[j], team.shuffle_xor(given, distance));
    }
  }
  RLK_UNROLL
  for (int distance = kRows; distance < kLanes; distance *= 2) {
    v[0] = add_rn(v[0], team.shuffle_xor(v[0], distance));
  }
  return v[0];
}
// The tree over the terms of all rows, as row_of_lane takes them; every lane gets the sum.
template <int kLanes, int kRows, class Team>
RLK_DEVICE float sum_of_rows(const Team& team, float (&v)[kRows]) {
  float row = row_of_lane<kLanes>(team, v);
  RLK_UNROLL
  for (int distance = kRows / 2; distance > 0; distance /= 2) row = add_rn(row, team.shuffle_xor(row, distance));
  return row;
}

}  // namespace rlk
