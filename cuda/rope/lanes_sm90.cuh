// rope on SM90, for heads whose number of vec8s (eight neighbouring columns each) is a power of two up to 32. HBM
// limits the speed. In two heads of a token, a lane has the vec8 at the same columns. Shuffles give the lane the second
// column of each of its pairs, so it needs the angles of only eight columns. So a thread needs few registers, and the
// loads of many warps overlap with the arithmetic of other warps. A warp reads and writes whole rows. With only two
// heads, a thread must compute addresses in few instructions. So offsets have 32 bits and count units of 16 bytes, and
// no thread executes an integer division.
#pragma once

#include "../common/dependent_launch.cuh"
#include "rotate.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

constexpr int kLaneHeads = 2;  // a slot has two heads
// The number of blocks per multiprocessor. It determines how many registers a thread may have.
template <bool kNarrow>
constexpr int kLaneBlocks = kNarrow ? 12 : 10;

// The arrays of the queries or of the keys. Offsets count units of 16 bytes.
struct LaneHeads {
  const uint4* x;
  uint4* y;
  std::uint32_t x_outer, x_inner, x_head, y_outer, y_inner, y_head;
  std::int32_t heads, slots;  // slots: number of slots per token

  explicit LaneHeads(const RopeHeads& h)
      : x(static_cast<const uint4*>(h.x)),
        y(static_cast<uint4*>(h.y)),
        x_outer(vectors(h.x_tokens.outer)),
        x_inner(vectors(h.x_tokens.inner)),
        x_head(vectors(h.x_head_stride)),
        y_outer(vectors(h.y_tokens.outer)),
        y_inner(vectors(h.y_tokens.inner)),
        y_head(vectors(h.y_head_stride)),
        heads(static_cast<std::int32_t>(h.num_heads)),
        slots((heads + kLaneHeads - 1) / kLaneHeads) {}
  static std::uint32_t vectors(std::int64_t elements) { return static_cast<std::uint32_t>(elements / kVec8); }
};

// The grid of a launch. A slot is a group of 1 << shift lanes, as many as a head has vec8s. A slot rotates two
// neighbouring heads of a token's queries or keys.
struct LaneGrid {
  LaneHeads sides[2];
  const uint4 *cos, *sin;
  std::uint32_t cos_outer, cos_inner, sin_outer, sin_inner;  // in units of 16 bytes
  std::uint32_t first_token, slots;
  Divisor of_token, inner_tokens;     // slots per token; tokens per outer index (token = outer * inner_tokens + inner)
  std::int32_t shift, rotated, half;  // 1 << shift: lanes of a slot; rotated: lanes of a slot that rotate; half: a
                                      // pair's second column lies this many lanes further
  bool per_pair;

  // The grid for the tokens from first_token on.
  LaneGrid(const RopeParams& p, std::int64_t first)
      : sides{LaneHeads(p.q), LaneHeads(p.k)},
        cos(static_cast<const uint4*>(p.cos.data)),
        sin(static_cast<const uint4*>(p.sin.data)),
        first_token(static_cast<std::uint32_t>(first)),
        of_token(static_cast<std::uint32_t>(sides[0].slots + sides[1].slots)),
        inner_tokens(static_cast<std::uint32_t>(std::min(p.inner_tokens, p.num_tokens))),
        shift(0),
        rotated(static_cast<std::int32_t>(p.rotary_dim / kVec8)),
        half(rotated / 2),
        per_pair(p.width < p.rotary_dim) {
    const auto vectors = [&](std::int64_t stride) {
      return static_cast<std::uint32_t>(stride * size_of(p.angle_dtype) / 16);
    };
    cos_outer = vectors(p.cos.tokens.outer);
    cos_inner = vectors(p.cos.tokens.inner);
    sin_outer = vectors(p.sin.tokens.outer);
    sin_inner = vectors(p.sin.tokens.inner);
    while ((kVec8 << shift) < p.head_dim) ++shift;
    const std::int64_t most = std::max<std::int64_t>((std::int64_t{1} << 29) / of_token.value, 1);
    slots = static_cast<std::uint32_t>(std::min(most, p.num_tokens - first)) * of_token.value;
  }
};

// The angles of a lane's columns. Each sine has the sign that its product needs.
template <class T, bool kNarrow, bool kInterleaved>
struct LaneAngles {
  using Values = std::conditional_t<kNarrow, NarrowValues<T, kVec8>, WideValues<kVec8>>;
  Values cos, sin;

  __device__ __forceinline__ void load(const RopeParams& p, const LaneGrid& g, const RopeToken& at, int unit) {
    constexpr int kVectors = kNarrow ? 1 : 2;  // eight angles take this many vectors of 16 bytes
    std::uint32_t of_cos = at.outer * g.cos_outer + at.inner * g.cos_inner;
    std::uint32_t of_sin = at.outer * g.sin_outer + at.inner * g.sin_inner;
    bool exist = true;
    if (p.position_ids != nullptr) {
      const std::int64_t id = position_of(p, at, 0);
      exist = id >= 0 && id < p.max_position;
      of_cos = static_cast<std::uint32_t>(id) * g.cos_inner;
      of_sin = static_cast<std::uint32_t>(id) * g.sin_inner;
    }
    const bool second = !kInterleaved && unit >= g.half;
    const bool exchanges = p.transposed && !g.per_pair;  // whether each column takes the sine of its pair's other
                                                         // column
    if (!exist) {
      cos.fill_nan(0, kVec8);
      sin.fill_nan(0, kVec8);
    } else if (kInterleaved && g.per_pair) {
      cos.load(g.cos + of_cos, unit * kVec8 / 2, 0, kVec8 / 2);
      sin.load(g.sin + of_sin, unit * kVec8 / 2, 0, kVec8 / 2);
      cos.repeat();
      sin.repeat();
    } else {
      const int own = g.per_pair && second ? unit - g.half : unit;
      const int other = exchanges && !kInterleaved ? unit ^ g.half : own;
      cos.load(g.cos + of_cos + own * kVectors, 0, 0, kVec8);
      sin.load(g.sin + of_sin + other * kVectors, 0, 0, kVec8);
    }
    if (kInterleaved && exchanges) sin.exchange(true);
    if (!kNarrow && p.round_products) {
      cos.template round<T>(0, kVec8);
      sin.template round<T>(0, kVec8);
    }
    // Rounding is symmetric, so a product with a negated sine has the bits of the negated product.
    kInterleaved ? sin.negate(!p.transposed, p.transposed) : sin.negate(second == p.transposed, second == p.transposed);
  }
};

// Returns the rotated vec8 of a lane. `own` has the lane's columns, and `other` has the other column of each pair.
template <class T, bool kRound, class Angles>
__device__ __forceinline__ uint4 rotate_lane(const Angles& angles, const uint4& own, const uint4& other) {
  const std::uint32_t x[4] = {own.x, own.y, own.z, own.w}, z[4] = {other.x, other.y, other.z, other.w};
  std::uint32_t y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // one word at a time takes fewer registers
    const float cos[2] = {angles.cos(2 * i), angles.cos(2 * i + 1)};
    const float sin[2] = {angles.sin(2 * i), angles.sin(2 * i + 1)};
    const float product[2] = {__fmul_rn(T::low(z[i]), sin[0]), __fmul_rn(T::high(z[i]), sin[1])};
    if constexpr (kRound) {
      const std::uint32_t first = T::pack(__fmul_rn(T::low(x[i]), cos[0]), __fmul_rn(T::high(x[i]), cos[1]));
      const std::uint32_t second = T::pack(product[0], product[1]);
      y[i] = T::pack(__fadd_rn(T::low(first), T::low(second)), __fadd_rn(T::high(first), T::high(second)));
    } else {
      y[i] = T::pack(__fmaf_rn(T::low(x[i]), cos[0], product[0]), __fmaf_rn(T::high(x[i]), cos[1], product[1]));
    }
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

// Returns, for each column of a lane, the other column of its pair. It lies in another lane or, if pairs are
// interleaved, beside the column.
template <bool kInterleaved>
__device__ __forceinline__ uint4 other_columns(const uint4& x, int lanes_apart) {
  const auto other = [&](std::uint32_t word) {
    if constexpr (kInterleaved) return __byte_perm(word, 0, 0x1032);
    return __shfl_xor_sync(0xffffffffu, word, lanes_apart);
  };
  return make_uint4(other(x.x), other(x.y), other(x.z), other(x.w));
}

template <class T, bool kNarrow, bool kRound, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads, kLaneBlocks<kNarrow>)
    rope_lanes_kernel(const __grid_constant__ RopeParams p, const __grid_constant__ LaneGrid g) {
  allow_next_kernel();
  const std::uint32_t slot = blockIdx.x * (kRopeThreads >> g.shift) + (threadIdx.x >> g.shift);
  const int unit = static_cast<int>(threadIdx.x & ((1u << g.shift) - 1));
  const std::uint32_t token = g.of_token.quotient(slot);
  int slot_of_token = static_cast<int>(slot - token * g.of_token.value);
  RopeToken at;
  at.outer = g.inner_tokens.quotient(g.first_token + token);
  at.inner = g.first_token + token - at.outer * g.inner_tokens.value;
  const bool keys = slot_of_token >= g.sides[0].slots;
  if (keys) slot_of_token -= g.sides[0].slots;
  const LaneHeads& h = g.sides[keys];
  const int first = slot_of_token * kLaneHeads;
  const int heads = slot < g.slots ? h.heads - first : 0;  // heads from the slot's first on; lanes without heads also
                                                           // execute the shuffles
  const uint4* from = h.x + (at.outer * h.x_outer + at.inner * h.x_inner + first * h.x_head + unit);
  wait_for_previous_kernel();
  uint4 x[kLaneHeads];
#pragma unroll
  for (int j = 0; j < kLaneHeads; ++j) {
    x[j] = j < heads ? load_once(from) : make_uint4(0, 0, 0, 0);
    from += h.x_head;
  }
  const bool rotates = unit < g.rotated;
  LaneAngles<T, kNarrow, kInterleaved> angles;
  if (rotates && heads > 0) angles.load(p, g, at, unit);
  uint4* to = h.y + (at.outer * h.y_outer + at.inner * h.y_inner + first * h.y_head + unit);
#pragma unroll
  for (int j = 0; j < kLaneHeads; ++j) {
    const uint4 other = other_columns<kInterleaved>(x[j], g.half);
    if (rotates) x[j] = rotate_lane<T, kRound>(angles, x[j], other);
    if (j < heads) __stcs(to, x[j]);
    to += h.y_head;
  }
}

inline void lanes_rope(const RopeParams& p, cudaStream_t stream) {
  for (std::int64_t first = 0; first < p.num_tokens;) {
    const LaneGrid g(p, first);
    first += g.slots / g.of_token.value;
    const std::uint32_t of_block = static_cast<std::uint32_t>(kRopeThreads) >> g.shift;
    const int blocks = static_cast<int>((g.slots + of_block - 1) / of_block);
    const auto with = [&](auto t, auto narrow, auto round, auto interleaved) {
      launch_dependent<true>(rope_lanes_kernel<decltype(t), narrow(), round(), interleaved()>, blocks, kRopeThreads, 0,
                             stream, p, g);
    };
    const auto by = [](bool value, const auto& f) { value ? f(std::true_type{}) : f(std::false_type{}); };
    with_element_type(p.dtype, [&](auto t) {
      if constexpr (decltype(t)::kPacked) {
        by(p.angle_dtype != DType::kFloat32, [&](auto narrow) {
          by(p.round_products,
             [&](auto round) { by(p.interleaved, [&](auto interleaved) { with(t, narrow, round, interleaved); }); });
        });
      }
    });
  }
}

}  // namespace
}  // namespace rlk::cuda
