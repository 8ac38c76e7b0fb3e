// Splits the heads of a rope call over a GPU's threads, for the hosts and kernels of CUDA and HIP. A vec8 is a vector
// of eight neighbouring columns. This file tells which calls can use vec8s, and what each thread computes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/divisor.h"
#include "rlk/ops/rope.h"

namespace rlk {

constexpr int kRopeVec8 = 8;  // columns of a vec8

// Whether every head and every row of angles begins at a multiple of 16 bytes and consists of whole vec8s.
inline bool rope_has_vec8s(const RopeParams& p) {
  const auto at_16_bytes = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  const auto aligned = [](std::int64_t stride, DType t) { return stride * size_of(t) % 16 == 0; };
  const auto tokens_aligned = [&](const TokenStrides& strides, DType t) {
    return (std::min(p.num_tokens, p.inner_tokens) <= 1 || aligned(strides.inner, t)) &&
           (p.num_tokens <= p.inner_tokens || aligned(strides.outer, t));
  };
  const auto heads_aligned = [&](const RopeHeads& h) {
    return h.num_heads == 0 ||
           (at_16_bytes(h.x) && at_16_bytes(h.y) && tokens_aligned(h.x_tokens, p.dtype) &&
            tokens_aligned(h.y_tokens, p.dtype) &&
            (h.num_heads == 1 || (aligned(h.x_head_stride, p.dtype) && aligned(h.y_head_stride, p.dtype))));
  };
  const auto angles_aligned = [&](const RopeAngles& a) {
    if (!at_16_bytes(a.data)) return false;
    if (p.position_ids != nullptr) return p.max_position <= 1 || aligned(a.tokens.inner, p.angle_dtype);
    return tokens_aligned(a.tokens, p.angle_dtype) && (p.num_sections == 1 || aligned(a.section_stride, p.angle_dtype));
  };
  const int pairs = p.interleaved ? kRopeVec8 / 2 : kRopeVec8;  // pairs with an element in a vec8
  const bool whole_sections =
      p.num_sections == 1 || (p.section_pairs[0] % pairs == 0 && p.section_pairs[1] % pairs == 0);
  return p.head_dim % kRopeVec8 == 0 && p.rotary_dim % (2 * kRopeVec8) == 0 && whole_sections && heads_aligned(p.q) &&
         heads_aligned(p.k) && angles_aligned(p.cos) && angles_aligned(p.sin);
}

// An attention head consists of units, and a thread processes one unit at a time. With vec8s, a unit is two vec8s.
// Without vec8s, a unit is a pair of rotated columns or one other column. Units of rotated columns come first. A slot
// is a group of `threads` threads of a block. The threads of a slot share a token and a lane. They process the heads
// lane, lane + lanes, ... of the token.
struct RopeGrid {
  std::uint32_t first_token;
  std::uint32_t slots, slots_of_block;
  Divisor lanes, threads;
  std::int32_t rotated, units;  // number of units that are rotated, and of all units
};

// Sets `g` to the launch for the tokens from first_token on. Returns the number of tokens that the launch processes.
inline std::int64_t rope_grid(const RopeParams& p, bool vec8s, int heads_of_thread, int threads_of_block,
                              std::int64_t first_token, RopeGrid* g) {
  const std::int64_t rest = p.head_dim - p.rotary_dim, heads = p.q.num_heads + p.k.num_heads;
  g->rotated = static_cast<std::int32_t>(p.rotary_dim / (vec8s ? 2 * kRopeVec8 : 2));
  g->units = static_cast<std::int32_t>(g->rotated + (vec8s ? (rest + 2 * kRopeVec8 - 1) / (2 * kRopeVec8) : rest));
  g->threads = Divisor(static_cast<std::uint32_t>(std::min(g->units, threads_of_block)));
  g->slots_of_block = static_cast<std::uint32_t>(threads_of_block) / g->threads.value;
  const std::int64_t lanes = (heads + heads_of_thread - 1) / heads_of_thread;
  g->lanes = Divisor(static_cast<std::uint32_t>(lanes));
  const std::int64_t most = std::max<std::int64_t>((std::int64_t{1} << 29) / lanes, 1);
  const std::int64_t tokens = std::min(most, p.num_tokens - first_token);
  g->first_token = static_cast<std::uint32_t>(first_token);
  g->slots = static_cast<std::uint32_t>(tokens * lanes);
  return tokens;
}
inline std::int64_t rope_blocks(const RopeGrid& g) {
  return (std::int64_t{g.slots} + g.slots_of_block - 1) / g.slots_of_block;
}

// The two indices of a token, in the outer and in the inner dimension of the token arrays, and the offsets that follow
// from them.
struct RopeToken {
  std::uint32_t outer, inner;

  RopeToken() = default;
  RLK_HD RopeToken(const RopeParams& p, std::uint32_t token) {
    const std::uint32_t inner_tokens = static_cast<std::uint32_t>(p.inner_tokens);
    outer = token < inner_tokens ? 0 : token / inner_tokens;
    inner = token - outer * inner_tokens;
  }
  RLK_HD std::int64_t offset(const TokenStrides& strides) const {
    return outer * strides.outer + inner * strides.inner;
  }
  RLK_HD std::int64_t id_offset(const RopeParams& p, int section) const {
    return section * p.id_section_stride + offset(p.id_tokens);
  }
};

// The token, the lane and the first unit of a thread.
struct RopePlace : RopeToken {
  bool exists;
  std::int32_t lane, first_unit;

  RLK_HD RopePlace(const RopeParams& p, const RopeGrid& g, std::uint32_t block, std::uint32_t thread) {
    const std::uint32_t slot_of_block = g.threads.quotient(thread);
    const std::uint32_t slot = block * g.slots_of_block + slot_of_block;
    exists = slot_of_block < g.slots_of_block && slot < g.slots;
    first_unit = static_cast<std::int32_t>(thread - slot_of_block * g.threads.value);
    const std::uint32_t of_launch = g.lanes.quotient(slot);
    lane = static_cast<std::int32_t>(slot - of_launch * g.lanes.value);
    static_cast<RopeToken&>(*this) = RopeToken(p, g.first_token + of_launch);
  }
};

// Offsets of the rows of cos and sin for a section. `id` is the token's position id, if the call has ids.
struct RopeRows {
  bool exist;  // whether the tables contain the id
  std::int64_t cos, sin;

  RopeRows() = default;
  RLK_HD RopeRows(const RopeParams& p, const RopeToken& at, int section, std::int64_t id) {
    const bool ids = p.position_ids != nullptr;
    exist = !ids || (id >= 0 && id < p.max_position);
    cos = ids ? id * p.cos.tokens.inner : section * p.cos.section_stride + at.offset(p.cos.tokens);
    sin = ids ? id * p.sin.tokens.inner : section * p.sin.section_stride + at.offset(p.sin.tokens);
  }
};

}  // namespace rlk
