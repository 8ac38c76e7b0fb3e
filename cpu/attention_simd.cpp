// The inner loops of the operator `attention`. CMake compiles this file once per instruction set. Loops over scores
// have one key per lane; loops over sums have one column per lane. Each loop keeps a tile of several rows and vectors
// in registers while it computes their chains of fma.
#include "attention_simd.h"

#include <type_traits>

#include "rlk/math/softmax_stats.h"
#include "rlk/math/tanh.h"
#include "simd.h"
#include "simd_memory.h"
#include "simd_softmax.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

constexpr int kRows = 4;     // rows of a register tile
constexpr int kVectors = 2;  // vectors per row of the tile
static_assert(kAttentionGroup % (kVectors * kLanes) == 0 && kColumns % kLanes == 0);

RLK_HD Floats load_floats(const float* p) { return load_bytes<Floats>(p); }
RLK_HD Floats lane_numbers(int first) {
  Floats r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<float>(first + i);
  return r;
}
// Lanes of the vector at column j that lie in the range.
RLK_HD Mask inside(int j, AttentionColumns range) {
  const Floats columns = lane_numbers(j);
  return (columns >= broadcast<Floats>(static_cast<float>(range.first))) &
         (columns < broadcast<Floats>(static_cast<float>(range.last)));
}

void load(const unsigned char* from, DType dtype, std::int64_t head_dim, std::int64_t columns, float* to) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    for_each_vector(head_dim, [&](std::int64_t k, int some) { store_bytes(to + k, load_at<T>(from, k, some)); });
  });
  for (std::int64_t k = head_dim; k < columns; ++k) to[k] = 0.0f;
}

void transpose(const float* rows, int count, std::int64_t head_dim, std::int64_t columns, float* to) {
  for (std::int64_t d = 0; d < head_dim; ++d) {
    float* out = to + d * kTileKeys;
    for (int r = 0; r < count; ++r) out[r] = rows[r * columns + d];
    for (int r = count; r < kTileKeys; ++r) out[r] = 0.0f;
  }
}

template <int kCount, int kStep>
RLK_HD void multiply_rows(const float* a, std::int64_t columns, const float* b, std::int64_t head_dim, int keys,
                          float* products) {
  static_assert(kTileKeys / 2 % (kStep * kLanes) == 0);
  for (int j = 0; j < keys; j += kStep * kLanes) {
    Floats sums[kCount][kStep];
    for (auto& row : sums) {
      for (Floats& sum : row) sum = broadcast<Floats>(0.0f);
    }
    for (std::int64_t d = 0; d < head_dim; ++d) {
      Floats x[kStep];
      for (int v = 0; v < kStep; ++v) x[v] = load_floats(b + d * kTileKeys + j + v * kLanes);
      for (int i = 0; i < kCount; ++i) {
        const Floats w = broadcast<Floats>(a[i * columns + d]);
        for (int v = 0; v < kStep; ++v) sums[i][v] = fma_rn(w, x[v], sums[i][v]);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      for (int v = 0; v < kStep; ++v) store_bytes(products + i * kTileKeys + j + v * kLanes, sums[i][v]);
    }
  }
}
void multiply(const float* a, int rows, std::int64_t columns, const float* b, std::int64_t head_dim, int keys,
              float* products) {
  constexpr int kAlone = kTileKeys / 2 / kLanes;  // vectors of a single row
  int i = 0;
  for (; i + kRows <= rows; i += kRows) {
    multiply_rows<kRows, kVectors>(a + i * columns, columns, b, head_dim, keys, products + i * kTileKeys);
  }
  for (; i < rows; ++i) {
    multiply_rows<1, kAlone>(a + i * columns, columns, b, head_dim, keys, products + i * kTileKeys);
  }
}

void cap(float* products, AttentionColumns sees, AttentionScores how) {
  const Floats most = broadcast<Floats>(how.cap), inner = broadcast<Floats>(how.inner);
  for (int j = sees.first / kLanes * kLanes; j < sees.last; j += kLanes) {
    store_bytes(products + j, mul_rn(most, tanh(mul_rn(load_floats(products + j), inner))));
  }
}

float largest(const float* scores, AttentionColumns sees) {
  Floats most = broadcast<Floats>(-infinity());
  Mask nan = {};
  for (int j = sees.first / kLanes * kLanes; j < sees.last; j += kLanes) {
    const Floats s = load_floats(scores + j);
    const Mask in = inside(j, sees);
    nan = nan | (in & is_nan(s));
    most = select(in & (s > most), s, most);
  }
  if (lanes_of(nan) != 0) return canonical_nan();
  float result = -infinity();
  for (int i = 0; i < kLanes; ++i) result = most.v[i] > result ? most.v[i] : result;
  return result;
}

// Sums of a block by chain: chain r takes columns 8i + r, ascending in each group.
class BlockSums {
 public:
  // Adds the group that begins at column j, a multiple of kAttentionGroup.
  RLK_HD void add_group(int j, const Floats (&p)[kAttentionGroup / kLanes]) {
    Eight parts[kAttentionGroup / kAttentionChains];
    std::memcpy(parts, p, sizeof p);
    groups_[j / kAttentionGroup] = ((parts[0] + parts[1]) + parts[2]) + parts[3];
  }
  // In a block of 64 keys, the groups past its end are +0.
  RLK_HD void add_to(float* chains) const {
    const Eight block = (groups_[0] + groups_[1]) + (groups_[2] + groups_[3]);
    store_bytes(chains, load_bytes<Eight>(chains) + block);
  }

 private:
  using Eight = Vector<float, 4 * kAttentionChains>;
  static_assert(kAttentionGroup == 4 * kAttentionChains && kTileKeys == 4 * kAttentionGroup);
  Eight groups_[kTileKeys / kAttentionGroup] = {};
};

// `p` may be anything in columns that the row does not see; these columns get kNothing.
template <class T>
RLK_HD bool store_weights(float* to, Mask contributes, Mask in, Floats p) {
  const Floats nothing = float_of(splat(kNothing));
  store_bytes(to, select(contributes, rounded<T>(p), nothing));
  return lanes_of(in & ~contributes) != 0;
}

template <class T, Exp kExp>
RLK_HD bool probabilities_of(float* scores, AttentionColumns sees, float c_of_row, float m, float q_of_row,
                             float* chains) {
  const Floats c = broadcast<Floats>(c_of_row), q = broadcast<Floats>(q_of_row);
  const Floats addend = broadcast<Floats>(kExp == Exp::kHardware ? -m : rlk::sub_rn(kStatsShift, m));
  const Floats least = broadcast<Floats>(-127.0f), bottom = broadcast<Floats>(-infinity());
  bool holes = false;
  BlockSums sums;
  for (int group = sees.first / kAttentionGroup * kAttentionGroup; group < sees.last; group += kAttentionGroup) {
    Floats unrounded[kAttentionGroup / kLanes];
    for (int v = 0; v < kAttentionGroup / kLanes; ++v) {
      const int j = group + v * kLanes;
      const Floats s = load_floats(scores + j);
      const Mask in = inside(j, sees), contributes = in & (s > bottom);
      Floats p;
      if constexpr (kExp == Exp::kHardware) {
        const Floats x = select(contributes, fma_rn(s, c, addend), least);
        alignas(64) float hardware[kLanes];
        store_bytes(hardware, select(x > least, x, least));
        exp2_hardware(hardware, kLanes);
        p = load_bytes<Floats>(hardware);
      } else {
        p = stat_exp_portable(select(s > q, s, q), c, addend);
      }
      unrounded[v] = select(contributes, p, broadcast<Floats>(0.0f));
      holes |= store_weights<T>(scores + j, contributes, in, p);
    }
    sums.add_group(group, unrounded);
  }
  sums.add_to(chains);
  return holes;
}
bool probabilities(float* scores, AttentionColumns sees, float c, float m, float q, Exp exp, DType dtype,
                   float* chains) {
  bool holes = false;
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    holes = exp == Exp::kHardware ? probabilities_of<T, Exp::kHardware>(scores, sees, c, m, q, chains)
                                  : probabilities_of<T, Exp::kPortable>(scores, sees, c, m, q, chains);
  });
  return holes;
}

// p in backward. The result for a NaN is arbitrary.
template <Exp kExp>
RLK_HD Floats backward_probability(Floats t) {
  if constexpr (kExp == Exp::kPortable) return probability<kExp>(t);
  const Floats most = broadcast<Floats>(128.0f);
  const Floats bounded = select((t >= broadcast<Floats>(-126.0f)) & (t < most), t, broadcast<Floats>(-127.0f));
  alignas(64) float hardware[kLanes];
  store_bytes(hardware, bounded);
  exp2_hardware(hardware, kLanes);
  return select(t >= most, broadcast<Floats>(infinity()), load_bytes<Floats>(hardware));
}

template <class T, Exp kExp, bool kCaps>
RLK_HD bool gradients_of(float* products, float* dp, AttentionColumns sees, AttentionScores how, const float* u,
                         const float* delta, int step) {
  const Floats most = broadcast<Floats>(how.cap), inner = broadcast<Floats>(how.inner);
  const Floats c = broadcast<Floats>(how.c), bottom = broadcast<Floats>(-infinity());
  bool holes = false;
  for (int j = sees.first / kLanes * kLanes; j < sees.last; j += kLanes) {
    Floats s = load_floats(products + j), slope = broadcast<Floats>(1.0f);
    if (kCaps) {
      const Floats h = tanh(mul_rn(s, inner));
      s = mul_rn(most, h);
      slope = fma_rn(-h, h, slope);
    }
    const Mask in = inside(j, sees), contributes = in & ~(s == bottom);
    const Floats u_of = step != 0 ? load_floats(u + j) : broadcast<Floats>(*u);
    const Floats delta_of = step != 0 ? load_floats(delta + j) : broadcast<Floats>(*delta);
    const Floats t = fma_rn(s, c, -u_of);
    const Floats p = select(is_nan(t), broadcast<Floats>(canonical_nan()), backward_probability<kExp>(t));
    Floats ds = mul_rn(p, sub_rn(load_floats(dp + j), delta_of));
    if (kCaps) ds = mul_rn(ds, slope);
    // Adding 0 turns a ds of -0 into +0, because the bits of -0 are kNothing. This addition changes only the sign of a
    // zero sum.
    holes |= store_weights<T>(dp + j, contributes, in, add_rn(rounded<T>(ds), broadcast<Floats>(0.0f)));
    store_weights<T>(products + j, contributes, in, p);
  }
  return holes;
}
bool gradients(float* products, float* dp, AttentionColumns sees, AttentionScores how, const float* u,
               const float* delta, int step, Exp exp, DType dtype) {
  bool holes = false;
  const auto run = [&](auto t, auto caps) {
    using T = decltype(t);
    constexpr bool kCaps = decltype(caps)::value;
    holes = exp == Exp::kHardware ? gradients_of<T, Exp::kHardware, kCaps>(products, dp, sees, how, u, delta, step)
                                  : gradients_of<T, Exp::kPortable, kCaps>(products, dp, sees, how, u, delta, step);
  };
  with_type(dtype, [&](auto t) { how.cap > 0.0f ? run(t, std::true_type{}) : run(t, std::false_type{}); });
  return holes;
}

template <int kCount, int kStep, bool kHoles>
RLK_HD void accumulate_tile(const float* weights, AttentionColumns sees, const float* x, std::int64_t columns,
                            float* sums) {
  Floats sum[kCount][kStep];
  for (int i = 0; i < kCount; ++i) {
    for (int v = 0; v < kStep; ++v) sum[i][v] = load_floats(sums + i * columns + v * kLanes);
  }
  for (int j = sees.first; j < sees.last; ++j) {
    Floats y[kStep];
    for (int v = 0; v < kStep; ++v) y[v] = load_floats(x + j * columns + v * kLanes);
    for (int i = 0; i < kCount; ++i) {
      const float weight = weights[i * kTileKeys + j];
      if (kHoles && rlk::bits_of(weight) == kNothing) continue;
      for (int v = 0; v < kStep; ++v) sum[i][v] = fma_rn(broadcast<Floats>(weight), y[v], sum[i][v]);
    }
  }
  for (int i = 0; i < kCount; ++i) {
    for (int v = 0; v < kStep; ++v) store_bytes(sums + i * columns + v * kLanes, sum[i][v]);
  }
}
template <int kCount, bool kHoles>
RLK_HD void accumulate_rows(const float* weights, AttentionColumns sees, const float* x, std::int64_t columns,
                            float* sums) {
  constexpr int kStep = kCount == 1 ? kRows * kVectors : kVectors;
  std::int64_t d = 0;
  for (; d + kStep * kLanes <= columns; d += kStep * kLanes) {
    accumulate_tile<kCount, kStep, kHoles>(weights, sees, x + d, columns, sums + d);
  }
  for (; d < columns; d += kLanes) accumulate_tile<kCount, 1, kHoles>(weights, sees, x + d, columns, sums + d);
}
void accumulate(const float* weights, const AttentionColumns* sees, int rows, bool holes, const float* x,
                std::int64_t columns, float* sums) {
  for (int i = 0; i < rows;) {
    const float* w = weights + i * kTileKeys;
    bool alike = !holes && i + kRows <= rows;
    for (int r = 1; alike && r < kRows; ++r) {
      alike = sees[i + r].first == sees[i].first && sees[i + r].last == sees[i].last;
    }
    if (alike) {
      accumulate_rows<kRows, false>(w, sees[i], x, columns, sums + i * columns);
      i += kRows;
    } else {
      holes ? accumulate_rows<1, true>(w, sees[i], x, columns, sums + i * columns)
            : accumulate_rows<1, false>(w, sees[i], x, columns, sums + i * columns);
      ++i;
    }
  }
}

void scale(float* x, std::int64_t count, float factor) {
  std::int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) store_bytes(x + k, mul_rn(load_floats(x + k), broadcast<Floats>(factor)));
  for (; k < count; ++k) x[k] = rlk::mul_rn(x[k], factor);
}
void merge(float* total, const float* x, std::int64_t count, float factor, float factor_of_x) {
  for (std::int64_t k = 0; k < count; k += kLanes) {
    const Floats scaled = mul_rn(load_floats(x + k), broadcast<Floats>(factor_of_x));
    store_bytes(total + k, fma_rn(load_floats(total + k), broadcast<Floats>(factor), scaled));
  }
}
void add(float* total, const float* x, std::int64_t count) {
  for (std::int64_t k = 0; k < count; k += kLanes)
    store_bytes(total + k, add_rn(load_floats(total + k), load_floats(x + k)));
}

float dot(const float* a, const float* b, std::int64_t head_dim) {
  float s[kAttentionChains] = {};
  for (std::int64_t d = 0; d < head_dim; d += kAttentionChains) {
    for (int r = 0; r < kAttentionChains; ++r) s[r] = rlk::fma_rn(a[d + r], b[d + r], s[r]);
  }
  return combine_chains(s);
}

void store(const float* row, std::int64_t head_dim, DType dtype, unsigned char* to) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    for_each_vector(head_dim, [&](std::int64_t k, int some) { store_at<T>(to, k, some, load_floats(row + k)); });
  });
}

}  // namespace

const AttentionLanes attention_simd = {load,       transpose, multiply, cap, largest, probabilities, gradients,
                                       accumulate, scale,     merge,    add, dot,     store};

}  // namespace rlk::cpu::RLK_CPU_ISA
