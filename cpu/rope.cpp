// CPU backend of the operator `rope`. It checks the ids, then spreads tokens over threads. All heads of a token use the
// same angles, which are loaded once.
#include "rlk/ops/rope.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "float_environment.h"
#include "kernels/rows/rope_check.h"
#include "kernels/rows/rope_rotate.h"
#include "note_isa.h"
#include "rlk/backends.h"
#include "rope_simd.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTaskElements = 16384;  // a smaller task would save less time than waking a thread costs

const RopeLanes& lanes() { return RLK_CPU_LANES_IN_USE(rope_simd); }

struct Token {
  std::int64_t outer, inner;
  Token(const RopeParams& p, std::int64_t token) : outer(token / p.inner_tokens), inner(token % p.inner_tokens) {}
  std::int64_t offset(const TokenStrides& strides) const { return outer * strides.outer + inner * strides.inner; }
};

std::int64_t id_of(const RopeParams& p, int section, const Token& token) {
  const std::int64_t i = section * p.id_section_stride + token.offset(p.id_tokens);
  if (p.id_dtype == DType::kInt64) return static_cast<const std::int64_t*>(p.position_ids)[i];
  return static_cast<const std::int32_t*>(p.position_ids)[i];
}

void check_ids(const RopeParams& p) {
  if (p.position_ids == nullptr) return;
  for (int section = 0; section < p.num_sections; ++section) {
    for (std::int64_t i = 0; i < p.num_tokens; ++i) {
      const std::int64_t id = id_of(p, section, Token(p, i));
      if (id >= 0 && id < p.max_position) continue;
      throw InvalidArgument("position_ids: expected ids in [0, " + std::to_string(p.max_position) +
                            ") (the rows of cos), got " + std::to_string(id) + " for token " + std::to_string(i) +
                            (p.num_sections > 1 ? ", section " + std::to_string(section) : ""));
    }
  }
}

// The angles of a token's pairs, in a buffer per thread.
class Angles {
 public:
  explicit Angles(const RopeParams& p)
      : p_(p), pairs_(p.rotary_dim / 2), rows_(static_cast<std::size_t>(4 * p.rotary_dim)) {}

  RopeRow row(const Token& token) {
    float *cos = rows_.data(), *sin = cos + p_.rotary_dim, *pairs = sin + p_.rotary_dim;
    load(p_.cos, token, cos);
    load(p_.sin, token, sin);
    RopeRow row = {};
    row.pairs = pairs_;
    row.dtype = p_.dtype;
    row.interleaved = p_.interleaved;
    row.round_products = p_.round_products;
    if (p_.width < p_.rotary_dim) {
      if (p_.transposed) negate(sin, pairs_);
      row.cos_a = row.cos_b = cos;
      row.sin_a = row.sin_b = sin;
      return row;
    }
    if (p_.transposed) negate(sin, p_.rotary_dim);
    const int a = p_.transposed ? 1 : 0;
    row.cos_a = half(cos, 0, pairs);
    row.cos_b = half(cos, 1, pairs + pairs_);
    row.sin_a = half(sin, a, pairs + 2 * pairs_);
    row.sin_b = half(sin, 1 - a, pairs + 3 * pairs_);
    return row;
  }

 private:
  // The first or second elements of all pairs, in pair order.
  const float* half(const float* columns, int which, float* to) const {
    if (!p_.interleaved) return columns + which * pairs_;
    for (std::int64_t i = 0; i < pairs_; ++i) to[i] = columns[2 * i + which];
    return to;
  }
  static void negate(float* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = -values[i];
  }

  // Loads a row of cos or sin as factors. With three sections, each section fills its own columns.
  void load(const RopeAngles& angles, const Token& token, float* to) const {
    const bool per_pair = p_.width < p_.rotary_dim, halves = !per_pair && !p_.interleaved;
    const std::int64_t columns_of_pair = per_pair || halves ? 1 : 2;
    std::int64_t first = 0;
    for (int section = 0; section < p_.num_sections; ++section) {
      const std::int64_t count = p_.num_sections == 1 ? pairs_ : p_.section_pairs[section];
      const std::int64_t at = p_.position_ids != nullptr
                                  ? id_of(p_, section, token) * angles.tokens.inner
                                  : section * angles.section_stride + token.offset(angles.tokens);
      const auto* row = static_cast<const unsigned char*>(angles.data) + at * size_of(p_.angle_dtype);
      for (int half = 0; half < (halves ? 2 : 1); ++half) {
        const std::int64_t column = first * columns_of_pair + half * pairs_;
        lanes().load_angles(row + column * size_of(p_.angle_dtype), p_.angle_dtype,
                            p_.round_products ? p_.dtype : DType::kFloat32, count * columns_of_pair, to + column);
      }
      first += count;
    }
  }

  const RopeParams& p_;
  std::int64_t pairs_;
  std::vector<float> rows_;  // cos, sin, and the four arrays of interleaved pairs
};

void run_heads(const RopeParams& p, const RopeHeads& heads, const Token& token, RopeRow row) {
  const std::int64_t bytes = size_of(p.dtype);
  const auto rotated = static_cast<std::size_t>(p.rotary_dim * bytes);
  const auto* x = static_cast<const unsigned char*>(heads.x) + token.offset(heads.x_tokens) * bytes;
  auto* y = static_cast<unsigned char*>(heads.y) + token.offset(heads.y_tokens) * bytes;
  for (std::int64_t h = 0; h < heads.num_heads; ++h) {
    row.x = x + h * heads.x_head_stride * bytes;
    row.y = y + h * heads.y_head_stride * bytes;
    lanes().rotate(row);
    if (p.rotary_dim == p.head_dim || row.x == row.y) continue;
    std::memcpy(row.y + rotated, row.x + rotated, static_cast<std::size_t>(p.head_dim * bytes) - rotated);
  }
}

}  // namespace

void rope(const RopeParams& p) {
  check_rope(p);
  if (p.num_tokens == 0 || p.head_dim == 0 || p.q.num_heads + p.k.num_heads == 0) return;
  check_ids(p);
  note_isa();
  const std::int64_t elements = (p.q.num_heads + p.k.num_heads) * p.head_dim;
  parallel_for(p.num_tokens, std::max<std::int64_t>(kTaskElements / elements, 1),
               [&](std::int64_t begin, std::int64_t end) {
                 const FloatEnvironment environment;
                 Angles angles(p);
                 for (std::int64_t i = begin; i < end; ++i) {
                   const Token token(p, i);
                   const RopeRow row = angles.row(token);
                   run_heads(p, p.q, token, row);
                   run_heads(p, p.k, token, row);
                 }
               });
}

}  // namespace rlk::cpu
