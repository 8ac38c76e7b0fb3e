// The inner loops of the operator `logprob`. CMake compiles this file once per instruction set. A leaf is kLeafColumns
// columns of a row, which are summed in eight chains. A block is kLanes leaves. A first pass finds the largest and
// smallest logit of every leaf. The second pass reads the logits from L1 and computes each leaf's eight chains in eight
// lanes. A vector of sixteen lanes holds the chains of two leaves. Then the tree combines the block's leaves, one per
// lane. The loops are limited by memory with AVX-512 and bf16, and otherwise by the exponential.
#include "logprob_simd.h"

#include "rlk/math/exp2.h"
#include "rlk/math/softmax_stats.h"
#include "rlk/math/tanh.h"
#include "simd.h"
#include "simd_fold.h"
#include "simd_softmax.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

constexpr int kSteps = kLeafColumns / kNumChains;
constexpr int kBlockLeaves = kLanes;
constexpr int kBlockColumns = kBlockLeaves * kLeafColumns;
constexpr int kVectorsPerLeaf = kLeafColumns / kLanes;
static_assert(kPairs * kLanes == kBlockLeaves * kNumChains);

template <class T>
constexpr std::int32_t kMinusInfinity = 0;  // the bits of -Inf in each type T
template <>
constexpr std::int32_t kMinusInfinity<Fp32> = static_cast<std::int32_t>(0xff800000u);
template <>
constexpr std::int32_t kMinusInfinity<Bf16> = 0xff80;
template <>
constexpr std::int32_t kMinusInfinity<Fp16> = 0xfc00;

template <class T>
constexpr int kBytes = sizeof(typename T::Storage);

// Stands for a leaf without columns.
template <class T>
struct alignas(64) MissingLeaf {
  std::conditional_t<kBytes<T> == 4, std::int32_t, std::uint16_t> bits[kLeafColumns];
  constexpr MissingLeaf() : bits() {
    for (auto& b : bits) b = static_cast<std::remove_reference_t<decltype(b)>>(kMinusInfinity<T>);
  }
  const unsigned char* bytes() const { return reinterpret_cast<const unsigned char*>(bits); }
};
template <class T>
constexpr MissingLeaf<T> kMissingLeaf{};

template <class V>
RLK_HD V larger(V a, V b) {
  return a > b ? a : b;
}
template <class V>
RLK_HD V smaller(V a, V b) {
  return a < b ? a : b;
}

// Extremes of bit patterns, read as signed and as unsigned numbers. Patterns of positive floats ascend as the value
// ascends; patterns of negative floats descend. Three extremes therefore give the largest and the smallest value, and
// find a NaN of either sign.
struct Extremes {
  Vector<std::int32_t> most_signed;
  Vector<std::uint32_t> most, least;
};

template <class T>
RLK_HD Extremes leaf_extremes(const unsigned char* leaf) {
  using Signed = Vector<std::conditional_t<kBytes<T> == 4, std::int32_t, std::int16_t>>;
  using Unsigned = Vector<std::conditional_t<kBytes<T> == 4, std::uint32_t, std::uint16_t>>;
  Unsigned most = load_bytes<Unsigned>(leaf), least = most;
  Signed most_signed = (Signed)most;
  for (int i = sizeof(Unsigned); i < kLeafColumns * kBytes<T>; i += sizeof(Unsigned)) {
    const Unsigned v = load_bytes<Unsigned>(leaf + i);
    most_signed = larger(most_signed, (Signed)v);
    most = larger(most, v);
    least = smaller(least, v);
  }
  Extremes e = {(Vector<std::int32_t>)most_signed, (Vector<std::uint32_t>)most, (Vector<std::uint32_t>)least};
  if constexpr (kBytes<T> == 2) {
    // A lane holds two patterns, so the upper pattern is compared with the lower pattern. Bits that remain in the lower
    // half cannot change the upper half.
    e.most_signed = larger(e.most_signed, e.most_signed << 16);
    e.most = larger(e.most, e.most << 16);
    e.least = smaller(e.least, e.least << 16);
  }
  return e;
}

// The value whose bit pattern is in the upper bits of a lane.
template <class T>
RLK_HD Floats value_of_key(Ints key) {
  if constexpr (std::is_same_v<T, Fp16>) {
    const auto upper = (Vector<std::uint32_t>)key.v >> 16;
    return Fp16::widen(__builtin_convertvector(upper, Vector<std::uint16_t, 2 * kLanes>));
  } else {
    return float_of(key);
  }
}

// Loads the columns of steps `step` and `step + 1` of leaf a. With sixteen lanes, the upper lanes get the columns of
// leaf b.
template <class T>
RLK_HD void load_steps(const unsigned char* a, [[maybe_unused]] const unsigned char* b, int step, Floats z[2]) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, Bf16>) {
    // A permutation of 16-bit words that zeroes the lower halves orders and widens the columns in one instruction.
    const __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(load_bytes<__m256i>(a + 16 * step)),
                                         load_bytes<__m256i>(b + 16 * step), 1);
    const __m512i first = _mm512_set_epi16(23, 0, 22, 0, 21, 0, 20, 0, 19, 0, 18, 0, 17, 0, 16, 0,  //
                                           7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    const __m512i second = _mm512_set_epi16(31, 0, 30, 0, 29, 0, 28, 0, 27, 0, 26, 0, 25, 0, 24, 0,  //
                                            15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0);
    z[0] = {(Vector<float>)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, first, v)};
    z[1] = {(Vector<float>)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, second, v)};
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const int offset = (step + i) * kNumChains * kBytes<T>;
    if constexpr (kBytes<T> == 4) {
      z[i] = {(Vector<float>)_mm512_insertf32x8(_mm512_castps256_ps512(load_bytes<__m256>(a + offset)),
                                                load_bytes<__m256>(b + offset), 1)};
    } else {
      z[i] = Fp16::widen((Vector<std::uint16_t, 32>)_mm256_inserti128_si256(
          _mm256_castsi128_si256(load_bytes<__m128i>(a + offset)), load_bytes<__m128i>(b + offset), 1));
    }
  }
#else
  for (int i = 0; i < 2; ++i) z[i] = T::load(a + (step + i) * kNumChains * kBytes<T>);
#endif
}

// values[k] in the lanes of leaf k, values[k + 8] in the lanes of leaf k + 8.
RLK_HD Floats splat_pair(const float* values, int k) {
#if defined(__AVX512F__)
  const __m128 upper = _mm_load_ss(values + k + kPairs);
  return {(Vector<float>)_mm512_mask_broadcastss_ps(_mm512_set1_ps(values[k]), 0xff00, upper)};
#else
  return broadcast<Floats>(values[k]);
#endif
}

struct Chains {
  Floats S, E, Q;
};

// The sums of a pair of leaves. kClamp: some column is -Inf or below q. The bytes at `next` are prefetched during the
// computation.
template <class T, Exp kExp, bool kMoments, bool kClamp>
RLK_HD Chains sum_pair(const unsigned char* a, const unsigned char* b, const unsigned char* next, Floats c, Floats m,
                       [[maybe_unused]] Floats q) {
  const Floats minus_infinity = broadcast<Floats>(-infinity());
  const Floats zero = broadcast<Floats>(0.0f);
  const Floats addend = kExp == Exp::kHardware ? -m : sub_rn(broadcast<Floats>(kStatsShift), m);
  Chains chains = {zero, zero, zero};
  alignas(64) float e_hardware[kExp == Exp::kHardware ? kSteps * kLanes : 1];
  if constexpr (kExp == Exp::kHardware) {
    for (int step = 0; step < kSteps; step += 2) {
      Floats z[2];
      load_steps<T>(a, b, step, z);
      for (int i = 0; i < 2; ++i) {
        const Floats clamped = kClamp ? select(z[i] > q, z[i], q) : z[i];
        // The lanes of a leaf that contributes nothing may hold anything, but the model of ex2 needs numbers.
        const Floats least = broadcast<Floats>(-127.0f), x = fma_rn(clamped, c, addend);
        store_bytes(e_hardware + (step + i) * kLanes, select(x > least, x, least));
      }
    }
    exp2_hardware(e_hardware, kSteps * kLanes);
  }
  for (int step = 0; step < kSteps; step += 2) {
    for (int line = 0; line < 2 * kLanes * kBytes<T>; line += 64) {
      const int offset = step * kLanes * kBytes<T> + line;
      if (offset % 64 == 0) __builtin_prefetch(next + offset);
    }
    Floats z[2];
    load_steps<T>(a, b, step, z);
    for (int i = 0; i < 2; ++i) {
      const Floats clamped = kClamp ? select(z[i] > q, z[i], q) : z[i];
      const Floats e = kExp == Exp::kHardware ? load_bytes<Floats>(e_hardware + (step + i) * kLanes)
                                              : stat_exp_portable(clamped, c, addend);
      const auto contribute = [&](Floats before, Floats after) {
        return kClamp ? select(z[i] > minus_infinity, after, before) : after;
      };
      chains.S = contribute(chains.S, add_rn(chains.S, e));
      if constexpr (kMoments) {
        chains.E = contribute(chains.E, fma_rn(e, clamped, chains.E));
        chains.Q = contribute(chains.Q, fma_rn(e, e, chains.Q));
      }
    }
  }
  return chains;
}

// One node per lane.
struct Nodes {
  Floats m, S, E, Q;
};

// Applies rlk::combine() in every lane. No node may have failed.
template <bool kMoments>
RLK_HD Nodes combine_lanes(const Nodes& a, const Nodes& b) {
  const Floats identity = broadcast<Floats>(-infinity());
  const Mask only_b = a.m == identity, only_a = b.m == identity;
  const Floats m = select(a.m > b.m, a.m, b.m);
  const auto gap = [&](Floats of, Mask missing) {
    const Floats least = broadcast<Floats>(-600.0f);
    const Floats g = sub_rn(of, m);
    return to_ints(select(missing | only_a | only_b, broadcast<Floats>(0.0f), select(g > least, g, least)));
  };
  const Ints da = gap(a.m, only_b), db = gap(b.m, only_a);
  const auto sum = [&](Floats x, Floats y, int steps) {
    const Floats both = add_rn(scale_down(x, steps == 2 ? da + da : da), scale_down(y, steps == 2 ? db + db : db));
    return select(only_b, y, select(only_a, x, both));
  };
  Nodes r = {m, sum(a.S, b.S, 1), a.E, a.Q};
  if constexpr (kMoments) {
    r.E = sum(a.E, b.E, 1);
    r.Q = sum(a.Q, b.Q, 2);
  }
  return r;
}

// The lower half gets every second lane of a, from lane `first` (0 or 1) on; the upper half repeats these lanes.
RLK_HD Floats lanes_from(Floats a, int first) {
#if defined(__AVX512F__)
  const Vector<float> even = shuffle<0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14>(a.v, a.v);
  const Vector<float> odd = shuffle<1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15>(a.v, a.v);
#else
  const Vector<float> even = shuffle<0, 2, 4, 6, 0, 2, 4, 6>(a.v, a.v);
  const Vector<float> odd = shuffle<1, 3, 5, 7, 1, 3, 5, 7>(a.v, a.v);
#endif
  return {first == 0 ? even : odd};
}

template <bool kMoments>
RLK_HD SoftmaxStats tree_over_lanes(Nodes n) {
  for (int count = kLanes; count > 1; count /= 2) {
    const auto half = [&](int first) -> Nodes {
      if constexpr (kMoments) {
        return {lanes_from(n.m, first), lanes_from(n.S, first), lanes_from(n.E, first), lanes_from(n.Q, first)};
      } else {
        return {lanes_from(n.m, first), lanes_from(n.S, first), n.E, n.Q};
      }
    };
    n = combine_lanes<kMoments>(half(0), half(1));
  }
  return {n.m.v[0], n.S.v[0], n.E.v[0], n.Q.v[0]};
}

// The node of a block. Leaf l of the block lies at leaves[l]. The first `count` leaves exist; all other leaves are
// MissingLeaf. `next` is the start of the next block, or any other address. It is prefetched while the core computes
// sums. Otherwise the next block's search for extremes would wait for memory.
template <class T, Exp kExp, bool kMoments>
__attribute__((noinline)) SoftmaxStats block_stats(const unsigned char* const* leaves, int count,
                                                   const unsigned char* next, float c_of_row) {
  const Floats c = broadcast<Floats>(c_of_row);
  const Floats zero = broadcast<Floats>(0.0f);

  Vector<std::int32_t> most_signed[kBlockLeaves];
  Vector<std::uint32_t> most[kBlockLeaves], least[kBlockLeaves];
  for (int l = 0; l < kBlockLeaves; ++l) {
    if (l < count) {
      const Extremes e = leaf_extremes<T>(leaves[l]);
      most_signed[l] = e.most_signed;
      most[l] = e.most;
      least[l] = e.least;
    } else {
      constexpr std::int32_t kKey = kBytes<T> == 4 ? kMinusInfinity<T> : kMinusInfinity<T> << 16;
      most_signed[l] = splat(kKey).v;
      most[l] = least[l] = (Vector<std::uint32_t>)splat(kKey).v;
    }
  }
  using Int = Vector<std::int32_t>;
  using Unsigned = Vector<std::uint32_t>;
  constexpr std::int32_t kSign = static_cast<std::int32_t>(0x80000000u);
  constexpr std::int32_t kUpper = static_cast<std::int32_t>(kBytes<T> == 4 ? 0xffffffffu : 0xffff0000u);
  const Ints top_signed = Ints{fold_leaves(most_signed, [](Int x, Int y) { return larger(x, y); })} & kUpper;
  const Ints top = Ints{(Int)fold_leaves(most, [](Unsigned x, Unsigned y) { return larger(x, y); })} & kUpper;
  const Ints bottom = Ints{(Int)fold_leaves(least, [](Unsigned x, Unsigned y) { return smaller(x, y); })} & kUpper;
  constexpr std::int32_t kInfinityKey = (kBytes<T> == 4 ? kMinusInfinity<T> : kMinusInfinity<T> << 16) & 0x7fffffff;
  const Mask nan = Mask{top_signed > kInfinityKey} | Mask{(top + kSign) > kInfinityKey};
  const Floats largest = value_of_key<T>(select(top_signed >= 0, top_signed, bottom));
  const Floats smallest = value_of_key<T>(select(top < 0, top, bottom));

  // leaf_reference of math/softmax_stats.h, one leaf per lane.
  const Floats range = broadcast<Floats>(kStatsRange);
  const Floats scaled = mul_rn(c, largest);
  const Floats ceiling = add_rn(ceil_of(scaled), zero);
  const Mask failed = nan | ~(scaled < range) | (ceiling >= range);
  if (lanes_of(failed) != 0) {
    return failed_stats((lanes_of(nan) != 0 ? kNanLogit : 0) | (lanes_of(failed & ~nan) != 0 ? kInfLogit : 0));
  }
  const Mask usable = ceiling > -range;
  const Floats m = select(usable, ceiling, zero);
  const Floats unrounded = div_rn(sub_rn(m, broadcast<Floats>(kStatsFloor)), c);
  const Ints cut = bits_of(unrounded) & static_cast<std::int32_t>(0xffff0000u);
  const Ints toward_minus = select((bits_of(unrounded) < 0) & (cut != bits_of(unrounded)), cut + 0x10000, cut);
  const Floats q = select(abs_of(m) <= broadcast<Floats>(512.0f), float_of(toward_minus), unrounded);

  const unsigned usable_leaves = lanes_of(usable);
  const Mask whole = (smallest >= q) & (smallest > broadcast<Floats>(-infinity()));
  const unsigned clamped_leaves = usable_leaves & ~lanes_of(whole);
  alignas(64) float m_of[kLanes], q_of[kLanes];
  store_bytes(m_of, m);
  store_bytes(q_of, q);
  constexpr unsigned kPair = kLanes == 16 ? 0x101 : 1;
  Vector<float> S[kPairs], E[kPairs], Q[kPairs];
  for (int k = 0; k < kPairs; ++k) {
    Chains chains = {zero, zero, zero};
    const unsigned char *a = leaves[k], *b = leaves[kLanes == 16 ? k + kPairs : k];
    const unsigned char* soon = next + k * kSteps * kLanes * kBytes<T>;
    if ((clamped_leaves >> k & kPair) != 0) {
      chains = sum_pair<T, kExp, kMoments, true>(a, b, soon, c, splat_pair(m_of, k), splat_pair(q_of, k));
    } else if ((usable_leaves >> k & kPair) != 0) {
      chains = sum_pair<T, kExp, kMoments, false>(a, b, soon, c, splat_pair(m_of, k), zero);
    }
    S[k] = chains.S.v;
    E[k] = chains.E.v;
    Q[k] = chains.Q.v;
  }
  const auto add = [](Vector<float> x, Vector<float> y) { return x + y; };
  Nodes nodes = {select(usable, m, broadcast<Floats>(-infinity())), select(usable, Floats{fold_chains(S, add)}, zero),
                 zero, zero};
  if constexpr (kMoments) {
    nodes.E = select(usable, Floats{fold_chains(E, add)}, zero);
    nodes.Q = select(usable, Floats{fold_chains(Q, add)}, zero);
  }
  return tree_over_lanes<kMoments>(nodes);
}

// Perfect binary tree over nodes that arrive in ascending order; a missing node counts as identity_stats().
class Tree {
 public:
  RLK_HD void push(SoftmaxStats node) {
    int level = 0;
    for (; count_ >> level & 1; ++level) node = combine(nodes_[level], node);
    nodes_[level] = node;
    ++count_;
  }
  RLK_HD SoftmaxStats root() const {
    SoftmaxStats r = identity_stats();
    for (int level = 0; count_ >> level != 0; ++level) {
      if (count_ >> level & 1) r = combine(nodes_[level], r);
    }
    return r;
  }

 private:
  SoftmaxStats nodes_[48];
  std::uint64_t count_ = 0;
};

// Copies the first `columns` of a leaf and fills the rest with -Inf.
template <class T>
RLK_HD void copy_short_leaf(unsigned char* leaf, const unsigned char* from, std::int64_t columns) {
  std::memcpy(leaf, kMissingLeaf<T>.bytes(), kLeafColumns * kBytes<T>);
  std::memcpy(leaf, from, static_cast<std::size_t>(columns) * kBytes<T>);
}

template <class T, Exp kExp, bool kMoments>
SoftmaxStats plain_stats(const LogprobRow& row, std::int64_t first, std::int64_t columns) {
  Tree tree;
  alignas(64) unsigned char short_leaf[kLeafColumns * kBytes<T>];
  const unsigned char* logits = row.logits + first * kBytes<T>;
  for (std::int64_t begin = 0; begin < columns; begin += kBlockColumns) {
    const unsigned char* leaves[kBlockLeaves];
    int count = 0;
    for (int l = 0; l < kBlockLeaves; ++l) {
      const std::int64_t at = begin + l * kLeafColumns, left = columns - at;
      leaves[l] = left > 0 ? logits + at * kBytes<T> : kMissingLeaf<T>.bytes();
      if (left > 0) count = l + 1;
      if (left > 0 && left < kLeafColumns) {
        copy_short_leaf<T>(short_leaf, leaves[l], left);
        leaves[l] = short_leaf;
      }
    }
    tree.push(block_stats<T, kExp, kMoments>(leaves, count, logits + (begin + kBlockColumns) * kBytes<T>, row.c));
  }
  return tree.root();
}

// The operations between a logit and z.
struct Transform {
  Floats logit_scale, softcap, inverse_softcap;
  bool capped;
  explicit RLK_HD Transform(const LogprobRow& row)
      : logit_scale(broadcast<Floats>(row.logit_scale)),
        softcap(broadcast<Floats>(row.softcap)),
        inverse_softcap(broadcast<Floats>(row.inverse_softcap)),
        capped(row.softcap != 0.0f) {}

  // `h` is the softcap's tanh.
  RLK_HD Floats operator()(Floats x, Floats* h) const {
    const Floats z = mul_rn(x, logit_scale);
    if (!capped) return z;
    *h = tanh(mul_rn(z, inverse_softcap));
    return select(abs_of(z) == broadcast<Floats>(infinity()), z, mul_rn(softcap, *h));
  }
};

RLK_HD unsigned kept_lanes(const std::uint64_t* kept, std::int64_t column) {
  return static_cast<unsigned>(kept[column / 64] >> (column % 64)) & ((1u << kLanes) - 1u);
}

// For rows whose z differs from the logit: z is stored in a buffer, with -Inf for columns that are not kept.
template <class T, Exp kExp, bool kMoments>
SoftmaxStats transformed_stats(const LogprobRow& row, std::int64_t first, std::int64_t columns,
                               const std::uint64_t* kept) {
  Tree tree;
  const Transform transform(row);
  alignas(64) unsigned char short_leaf[kLeafColumns * kBytes<T>];
  alignas(64) float z[kBlockColumns];
  const unsigned char* logits = row.logits + first * kBytes<T>;
  for (std::int64_t begin = 0; begin < columns; begin += kBlockColumns) {
    const unsigned char* leaves[kBlockLeaves];
    int count = 0;
    for (int l = 0; l < kBlockLeaves; ++l) {
      const std::int64_t at = begin + l * kLeafColumns, left = columns - at;
      leaves[l] = kMissingLeaf<Fp32>.bytes();
      if (left <= 0 || (kept != nullptr && (kept[at / 64] | kept[at / 64 + 1]) == 0)) continue;
      count = l + 1;
      const unsigned char* from = logits + at * kBytes<T>;
      if (left < kLeafColumns) {
        copy_short_leaf<T>(short_leaf, from, left);
        from = short_leaf;
      }
      float* leaf = z + l * kLeafColumns;
      for (int i = 0; i < kVectorsPerLeaf; ++i) {
        Floats h;
        Floats v = transform(T::load(from + i * kLanes * kBytes<T>), &h);
        if (kept != nullptr) v = select(mask_of(kept_lanes(kept, at + i * kLanes)), v, broadcast<Floats>(-infinity()));
        store_bytes(leaf + i * kLanes, v);
      }
      leaves[l] = reinterpret_cast<const unsigned char*>(leaf);
    }
    const unsigned char* next = logits + (begin + kBlockColumns) * kBytes<T>;
    tree.push(count == 0 ? identity_stats() : block_stats<Fp32, kExp, kMoments>(leaves, count, next, row.c));
  }
  return tree.root();
}

// dlogits of kLanes columns.
template <Exp kExp, bool kTransformed, bool kEntropy>
struct Gradient {
  Transform transform;
  Floats c, minus_u, b, w, d;
  explicit RLK_HD Gradient(const LogprobBackwardRow& row)
      : transform(row),
        c(broadcast<Floats>(row.c)),
        minus_u(broadcast<Floats>(-row.u)),
        b(broadcast<Floats>(row.b)),
        w(broadcast<Floats>(row.w)),
        d(broadcast<Floats>(row.d)) {}

  RLK_HD Floats operator()(Floats x) const {
    const Floats zero = broadcast<Floats>(0.0f);
    Floats h = zero;
    const Floats z = kTransformed ? transform(x, &h) : x;
    const Floats t = fma_rn(z, c, minus_u);
    const Floats p = probability<kExp>(t);
    Floats slope = w;
    if constexpr (kEntropy) {
      const Floats least = broadcast<Floats>(-127.0f);
      slope = fma_rn(b, select(t < least, least, t), w);
    }
    Floats dz = fma_rn(p, slope, d);
    // Sets NaN where t is NaN, since the exponential of a NaN is arbitrary.
    dz = select(is_nan(t), broadcast<Floats>(canonical_nan()), dz);
    if constexpr (kTransformed) {
      if (transform.capped) {
        dz = mul_rn(dz, fma_rn(-h, h, broadcast<Floats>(1.0f)));
        dz = select(z == broadcast<Floats>(-infinity()), zero, dz);
      }
    }
    return dz;
  }
};

template <class T, Exp kExp, bool kTransformed, bool kEntropy>
void backward_columns(const LogprobBackwardRow& row, std::int64_t first, std::int64_t columns,
                      const std::uint64_t* kept) {
  const Gradient<kExp, kTransformed, kEntropy> gradient(row);
  const unsigned char* logits = row.logits + first * kBytes<T>;
  unsigned char* dlogits = row.dlogits + first * kBytes<T>;
  constexpr int kVectorBytes = kLanes * kBytes<T>;
  std::int64_t column = 0;
  const auto vector = [&](const unsigned char* x, unsigned char* dx) {
    if (kTransformed && kept != nullptr) {
      const unsigned lanes = kept_lanes(kept, column);
      if (lanes == 0) {
        std::memset(dx, 0, kVectorBytes);
      } else {
        T::store(dx, select(mask_of(lanes), gradient(T::load(x)), broadcast<Floats>(0.0f)));
      }
    } else {
      T::store(dx, gradient(T::load(x)));
    }
  };
  for (; column + kLanes <= columns; column += kLanes) {
    vector(logits + column * kBytes<T>, dlogits + column * kBytes<T>);
  }
  if (column < columns) {
    alignas(64) unsigned char x[kVectorBytes] = {}, dx[kVectorBytes];
    const auto bytes = static_cast<std::size_t>(columns - column) * kBytes<T>;
    std::memcpy(x, logits + column * kBytes<T>, bytes);
    vector(x, dx);
    std::memcpy(dlogits + column * kBytes<T>, dx, bytes);
  }
}

bool is_transformed(const LogprobRow& row, const std::uint64_t* kept) {
  return row.logit_scale != 1.0f || row.softcap != 0.0f || kept != nullptr;
}

template <class T, Exp kExp, bool kMoments>
SoftmaxStats stats_of(const LogprobRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept) {
  return is_transformed(row, kept) ? transformed_stats<T, kExp, kMoments>(row, first, columns, kept)
                                   : plain_stats<T, kExp, kMoments>(row, first, columns);
}

template <class T, Exp kExp>
void backward_of(const LogprobBackwardRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept) {
  const bool entropy = row.b != 0.0f;  // a NaN also gives true
  if (is_transformed(row, kept)) return backward_columns<T, kExp, true, true>(row, first, columns, kept);
  return entropy ? backward_columns<T, kExp, false, true>(row, first, columns, kept)
                 : backward_columns<T, kExp, false, false>(row, first, columns, kept);
}

template <class T>
SoftmaxStats stats_of(const LogprobRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept) {
  if (row.exp == Exp::kHardware) {
    return row.moments ? stats_of<T, Exp::kHardware, true>(row, first, columns, kept)
                       : stats_of<T, Exp::kHardware, false>(row, first, columns, kept);
  }
  return row.moments ? stats_of<T, Exp::kPortable, true>(row, first, columns, kept)
                     : stats_of<T, Exp::kPortable, false>(row, first, columns, kept);
}

template <class T>
void backward_of(const LogprobBackwardRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept) {
  return row.exp == Exp::kHardware ? backward_of<T, Exp::kHardware>(row, first, columns, kept)
                                   : backward_of<T, Exp::kPortable>(row, first, columns, kept);
}

SoftmaxStats stats(const LogprobRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept) {
  switch (row.dtype) {
    case DType::kBFloat16:
      return stats_of<Bf16>(row, first, columns, kept);
    case DType::kFloat16:
      return stats_of<Fp16>(row, first, columns, kept);
    default:
      return stats_of<Fp32>(row, first, columns, kept);
  }
}

void backward(const LogprobBackwardRow& row, std::int64_t first, std::int64_t columns, const std::uint64_t* kept) {
  switch (row.dtype) {
    case DType::kBFloat16:
      return backward_of<Bf16>(row, first, columns, kept);
    case DType::kFloat16:
      return backward_of<Fp16>(row, first, columns, kept);
    default:
      return backward_of<Fp32>(row, first, columns, kept);
  }
}

}  // namespace

const LogprobLanes logprob_simd = {stats, backward};

}  // namespace rlk::cpu::RLK_CPU_ISA
