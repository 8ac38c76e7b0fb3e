// Paths through the trees of a call, for every backend. Each call first makes a table with the ancestors of every
// segment at distances 1, 2, 4, and so on. With this table, the number of steps to find a key grows with the logarithm
// of the depth.
#pragma once

#include "kernels/attention/places.h"
#include "rlk/ops/attention.h"
#include "rlk/unroll.h"

namespace rlk {

// Params of a call whose sequences are segments of trees. These calls have separate kernels, because the other kernels
// have no registers left for paths. On a host, the type may also describe a call without trees. In such a call,
// `parents` and `paths` are null.
template <class Params>
struct AttentionTree : Params {
  const std::uint32_t* paths = nullptr;  // the table of ancestors: attention_path_words(num_sequences) words
};

// Whether code with these params handles trees.
template <class Params>
constexpr bool kMayBranch = false;
template <class Params>
constexpr bool kMayBranch<AttentionTree<Params>> = true;

// The table consists of rows with one word per segment. Row kDepths holds the segments' depths, and the next row is
// scratch memory for sums. Rows from kAncestors on hold the ancestors at distances 1, 2, 4 and so on, up to the longest
// possible path.
constexpr int kDepths = 0, kAncestors = 2;
constexpr std::uint32_t kNoSegment = ~std::uint32_t{0};
RLK_HD constexpr int attention_path_levels(std::int64_t segments) {
  int levels = 1;
  while ((std::int64_t{1} << levels) < segments) ++levels;
  return levels;
}
RLK_HD constexpr std::int64_t attention_path_words(std::int64_t segments) {
  return segments * (kAncestors + attention_path_levels(segments));
}
inline std::int64_t attention_path_bytes(const AttentionInput& p) {
  return p.parents == nullptr ? 0 : 4 * attention_path_words(p.num_sequences);
}

// One block of threads fills the table. Depths are clamped: contradictory offsets could otherwise give a segment more
// than q_tokens + 1 keys.
template <class Gpu>
RLK_DEVICE void make_attention_paths(const AttentionInput& p, std::uint32_t* table) {
  const std::int64_t segments = p.num_sequences;
  std::uint32_t* const words = in_memory(table);
  const int levels = attention_path_levels(segments);
  const auto length = [&](std::int64_t s) {
    const AttentionRange own = attention_place(p.cu_seqlens_q, s, p.q_tokens);
    return own.last - own.first;
  };
  const auto at_most = [](std::int64_t x, std::int64_t most) {
    return static_cast<std::uint32_t>(x < most ? x : most);
  };
  RLK_UNROLL_NOT
  for (std::int64_t s = Gpu::thread(); s < segments; s += Gpu::threads()) {
    const std::int64_t parent = in_memory(p.parents)[s];
    const bool bad = parent < -1 || parent >= s, root = bad || parent < 0;
    words[kAncestors * segments + s] = root ? kNoSegment : static_cast<std::uint32_t>(parent);
    words[s] = bad ? 1 : root ? 0 : static_cast<std::uint32_t>(length(parent));
  }
  Gpu::barrier();
  // Sums of tokens over the 2^level nearest ancestors. An invalid parent counts as an ancestor with one key.
  RLK_UNROLL_NOT
  for (int level = 0; level < levels; ++level) {
    const std::uint32_t *const sums = words + level % 2 * segments, *const ancestors =
                                                                        words + (kAncestors + level) * segments;
    std::uint32_t* const next_sums = words + (level + 1) % 2 * segments;
    std::uint32_t* const next_ancestors = words + (kAncestors + level + 1) * segments;
    RLK_UNROLL_NOT
    for (std::int64_t s = Gpu::thread(); s < segments; s += Gpu::threads()) {
      const std::uint32_t ancestor = ancestors[s];
      const bool none = ancestor == kNoSegment;
      next_sums[s] = none ? sums[s] : at_most(std::int64_t{sums[s]} + sums[ancestor], p.q_tokens + 1);
      if (level + 1 < levels) next_ancestors[s] = none ? kNoSegment : ancestors[ancestor];
    }
    Gpu::barrier();
  }
  RLK_UNROLL_NOT
  for (std::int64_t s = Gpu::thread(); s < segments; s += Gpu::threads()) {
    words[kDepths * segments + s] = at_most(words[levels % 2 * segments + s], p.q_tokens + 1 - length(s));
  }
}

// A position on a segment's path to the root. The path starts at the segment itself.
struct AttentionPath {
  std::int64_t segment;
  AttentionRange tokens;  // the segment's own tokens
  std::int64_t depth;     // number of earlier keys: the ancestors' tokens, and one for an invalid parent

  template <class Params>
  RLK_HD AttentionPath(const Params& p, std::int64_t s)
      : segment(s), tokens(attention_place(p.cu_seqlens_q, s, p.q_tokens)), depth(depth_of(p, s)) {}

  RLK_HD std::int64_t keys() const { return depth + (tokens.last - tokens.first); }

  // The token of key j, with j < keys(), or -1 if the key has no token. The position moves to the key's segment, so a
  // loop over descending keys takes few steps per segment.
  template <class Params>
  RLK_HD std::int64_t token(const Params& p, std::int64_t j) {
    if (j < depth) {
      const std::int64_t below = highest(p, [&](std::int64_t s) { return depth_of(p, s) > j; });
      const std::uint32_t parent = ancestor(p, 0, below);
      if (parent == kNoSegment || depth_of(p, parent) > j) return -1;
      *this = AttentionPath(p, parent);
    }
    return tokens.first + (j - depth);
  }
  // Whether segment a is on the path.
  template <class Params>
  RLK_HD bool passes(const Params& p, std::int64_t a) const {
    if (segment <= a) return segment == a;
    return ancestor(p, 0, highest(p, [&](std::int64_t s) { return s > a; })) == a;
  }

 private:
  template <class Params>
  static RLK_HD std::int64_t depth_of(const Params& p, std::int64_t s) {
    return in_memory(p.paths)[kDepths * p.num_sequences + s];
  }
  // The segment's ancestor at distance 2^level, or kNoSegment.
  template <class Params>
  static RLK_HD std::uint32_t ancestor(const Params& p, int level, std::int64_t s) {
    return in_memory(p.paths)[(kAncestors + level) * p.num_sequences + s];
  }
  // The segment nearest to the root for which `holds` is true. `holds` must be true for the current segment, and from
  // there up to the result.
  template <class Params, class F>
  RLK_HD std::int64_t highest(const Params& p, const F& holds) const {
    const int levels = attention_path_levels(p.num_sequences);
    std::int64_t at = segment;
    int level = 0;
    RLK_UNROLL_NOT
    for (; level < levels; ++level) {
      const std::uint32_t above = ancestor(p, level, at);
      if (above == kNoSegment || !holds(above)) break;
      at = above;
    }
    RLK_UNROLL_NOT
    while (--level >= 0) {
      const std::uint32_t above = ancestor(p, level, at);
      if (above != kNoSegment && holds(above)) at = above;
    }
    return at;
  }
};

}  // namespace rlk
