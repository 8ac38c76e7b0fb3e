// Tests sample byte for byte against a second implementation, written from the contract, which sorts. The backend is
// the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#if !RLK_TEST_HIP
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#endif
#include "kernels/sample/check.h"
#include "kernels/sample/process_logits.h"
#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "rlk/math/philox.h"
#include "rlk/ops/sample.h"

namespace {

using rlk::SampleOrder;
using Wide = unsigned __int128;

struct Case {
  std::int64_t rows, vocab, valid;
  float scale;        // scale of the logits
  double levels = 0;  // if not 0, logits are multiples of `levels`, so many are equal
  std::vector<float> temperature, top_p, min_p;
  std::vector<std::int64_t> top_k, sample_id, position;
  std::vector<std::uint8_t> greedy;
  std::vector<std::int32_t> allowed;  // or empty
  std::vector<float> logits;
  SampleOrder order = SampleOrder::kVllm;
  std::int64_t capacity = 1 << 22, best = 0, stream = 0;
};

struct Results {
  std::vector<std::int64_t> ids, offsets, top, raw_top;
  std::vector<float> logprob, raw, top_logprobs, raw_top_logprobs;
  std::vector<std::int32_t> kept, status;
};

// ---- the second implementation ----

float term(float z, float c, const rlk::LeafReference& r) {
  if (z == -rlk::infinity()) return 0.0f;
  return rlk::stat_exp_portable(z > r.q ? z : r.q, c, rlk::kStatsShift - r.m);
}

struct Tree {
  const Case& k;
  const float* z;  // -Inf for a missing column
  float c;
  int height = rlk::leaf_height(k.vocab);

  std::pair<std::int64_t, std::int64_t> columns(int depth, std::int64_t at) const {  // range of columns of a node
    (void)depth;
    const int part = static_cast<int>(at >> height);
    const std::int64_t first = rlk::part_cut(k.vocab, part) + (at & ((1 << height) - 1)) * 128;
    return {first, std::min(first + 128, rlk::part_cut(k.vocab, part + 1))};
  }
  rlk::SoftmaxStats leaf(std::int64_t at, float* chains, rlk::LeafReference* reference) const {
    const auto [first, end] = columns(0, at);
    float largest = -rlk::infinity();
    for (std::int64_t j = first; j < end; ++j) {
      if (std::isnan(z[j]) || z[j] > largest) largest = z[j];
      if (std::isnan(largest)) break;
    }
    rlk::SoftmaxStats stats;
    *reference = rlk::leaf_reference(c, largest, &stats);
    if (!reference->usable) return stats;
    for (int r = 0; r < 8; ++r) {
      chains[r] = 0.0f;
      for (std::int64_t j = first + r; j < end; j += 8) chains[r] += term(z[j], c, *reference);
    }
    return {reference->m, rlk::combine_chains(chains), 0.0f, 0.0f};
  }
  rlk::SoftmaxStats node(int depth, std::int64_t at) const {
    if (depth == height + 3) {
      float chains[8];
      rlk::LeafReference reference;
      return leaf(at, chains, &reference);
    }
    return rlk::combine(node(depth + 1, 2 * at), node(depth + 1, 2 * at + 1));
  }
  // Both products are exact in x87's 64 bits.
  static bool left(std::uint32_t r, float of_left, float both) {
    return static_cast<long double>(r) * both < 4294967296.0L * of_left;
  }
  std::int64_t draw(const std::vector<std::uint32_t>& words) const {
    std::int64_t at = 0;
    for (int depth = 0; depth < height + 3; ++depth) {
      const rlk::SoftmaxStats a = node(depth + 1, 2 * at), both = rlk::combine(a, node(depth + 1, 2 * at + 1));
      const float scaled = a.m == -rlk::infinity() ? 0.0f : std::ldexp(a.S, static_cast<int>(a.m - both.m));
      const bool normal = scaled >= 0x1p-126f;
      at = 2 * at + !left(words[depth < 3 ? depth : 7 + height + 2 - depth], normal ? scaled : 0.0f, both.S);
    }
    float s[8];
    rlk::LeafReference reference;
    leaf(at, s, &reference);
    const float quads[2] = {(s[0] + s[1]) + (s[2] + s[3]), (s[4] + s[5]) + (s[6] + s[7])};
    int chain = left(words[3], quads[0], quads[0] + quads[1]) ? 0 : 4;
    chain += left(words[4], s[chain] + s[chain + 1], quads[chain / 4]) ? 0 : 2;
    chain += left(words[5], s[chain], s[chain] + s[chain + 1]) ? 0 : 1;
    const auto [first, end] = columns(0, at);
    float prefix = 0.0f;
    for (std::int64_t j = first + chain; j < end; j += 8) {
      prefix += term(z[j], c, reference);
      if (left(words[6], prefix, s[chain])) return j;
    }
    ADD_FAILURE() << "no column";
    return -1;
  }
};

Wide ceil_share(float share,
                Wide mass) {  // share = s / 2^149; the product has up to 63 + 24 bits above bit 149
  int exponent;
  const auto significand = static_cast<std::uint64_t>(std::ldexp(std::frexp(share, &exponent), 24));
  const int shift = 24 - exponent;
  const Wide product = mass * significand;
  if (shift >= 128) return product > 0 ? 1 : 0;
  return (product >> shift) + ((product & ((Wide{1} << shift) - 1)) != 0 ? 1 : 0);
}

// The n best of z, where columns that do not count are -Inf. A stable sort keeps equal columns in id order.
void add_best(const Case& k, const std::vector<float>& z, const rlk::SoftmaxStats& root, float temperature, bool usable,
              std::vector<std::int64_t>* ids, std::vector<float>* logprobs) {
  std::vector<std::int64_t> order;
  for (std::int64_t j = 0; j < k.valid; ++j) order.push_back(j);
  usable = usable && rlk::logprob_outputs(root, 0.0f, temperature).status == 0;
  if (usable) std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return z[a] > z[b]; });
  for (std::int64_t n = 0; n < k.best; ++n) {
    ids->push_back(usable ? order[n] : -1);
    logprobs->push_back(usable ? rlk::logprob_outputs(root, z[order[n]], temperature).logprob : rlk::canonical_nan());
  }
}

Results reference(const Case& k) {
  Results r;
  r.offsets = {0};
  bool closed = false;
  for (std::int64_t i = 0; i < k.rows; ++i) {
    std::vector<float> z(k.logits.begin() + i * k.vocab, k.logits.begin() + (i + 1) * k.vocab), all = z;
    std::vector<std::int64_t> order;
    for (std::int64_t j = 0; j < k.vocab; ++j) {
      const std::size_t word = i * ((k.vocab + 31) / 32) + j / 32;
      const bool present = j < k.valid && (k.allowed.empty() || (k.allowed[word] >> (j % 32) & 1) != 0);
      if (j >= k.valid) all[j] = -rlk::infinity();
      if (present) {
        order.push_back(j);
      } else {
        z[j] = -rlk::infinity();
      }
    }
    const bool greedy = k.greedy[i] != 0;
    const float t = greedy ? 1.0f : k.temperature[i], c = rlk::log2_scale(t);
    std::int32_t status = 0;
    std::int64_t id = -1;
    float logprob = rlk::canonical_nan(), raw = rlk::canonical_nan();
    std::vector<std::int64_t> kept;
    std::vector<float> of_kept(z.size(), -rlk::infinity());
    rlk::SoftmaxStats root, raw_root;
    if (!greedy) {
      if (!(t >= 0x1p-126f) || std::isinf(t)) status |= rlk::kBadTemperature;
      if (!(k.top_p[i] > 0 && k.top_p[i] <= 1 && k.min_p[i] >= 0 && k.min_p[i] <= 1) || k.top_k[i] < 0) {
        status |= rlk::kBadParameter;
      }
      if (k.position[i] < 0 || k.position[i] >> 32 != 0) status |= rlk::kBadPosition;
    }
    if (status == 0) {
      Tree whole{k, z.data(), c};
      const rlk::SoftmaxStats root = whole.node(0, 0);
      status = rlk::status_of(root) | (root.m == -rlk::infinity() ? rlk::kEmptyRow : 0);
    }
    if (status == 0) {
      std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return z[a] > z[b]; });
      kept = order;
      if (!greedy) {
        rlk::SoftmaxStats unused;
        const rlk::LeafReference top = rlk::leaf_reference(c, z[order[0]], &unused);
        const auto mass = [&](std::int64_t j) {
          return static_cast<Wide>(std::floor(std::ldexp(static_cast<double>(term(z[j], c, top)), 44)));
        };
        const auto sum = [&](const std::vector<std::int64_t>& of) {
          Wide total = 0;
          for (const std::int64_t j : of) total += mass(j);
          return total;
        };
        const auto by_min_p = [&] {
          const Wide least = ceil_share(k.min_p[i], mass(order[0]));
          std::erase_if(kept, [&](std::int64_t j) { return mass(j) < least; });
        };
        const auto by_top_k = [&] {
          if (k.top_k[i] > 0) kept.resize(std::min<std::size_t>(kept.size(), k.top_k[i]));
        };
        const auto by_top_p = [&](Wide total) {
          if (k.top_p[i] == 1.0f) return;
          const Wide bound = ceil_share(k.top_p[i], total);
          Wide before = 0;
          std::size_t n = 0;
          while (n < kept.size() && before < bound) before += mass(kept[n++]);
          kept.resize(n);
        };
        const Wide total = sum(order);
        if (k.order == SampleOrder::kVllm) by_min_p();
        if (k.order == SampleOrder::kSglang) by_top_p(total);
        by_top_k();
        if (k.order != SampleOrder::kSglang) by_top_p(sum(kept));
        if (k.order != SampleOrder::kVllm) by_min_p();
      }
      std::sort(kept.begin(), kept.end());
      for (const std::int64_t j : kept) of_kept[j] = z[j];
      Tree tree{k, of_kept.data(), c};
      id = order[0];
      if (!greedy) {
        std::vector<std::uint32_t> words;
        for (int w = 0; w < 16; ++w) {
          words.push_back(rlk::philox_bits(99, static_cast<std::uint64_t>(k.sample_id[i]),
                                           static_cast<std::uint32_t>(k.position[i]),
                                           static_cast<std::uint32_t>(1024 * k.stream + w)));
        }
        id = tree.draw(words);
        EXPECT_TRUE(std::binary_search(kept.begin(), kept.end(), id));
      }
      root = tree.node(0, 0);
      raw_root = Tree{k, all.data(), rlk::log2_scale(1.0f)}.node(0, 0);
      logprob = rlk::logprob_outputs(root, z[id], t).logprob;
      raw = rlk::logprob_outputs(raw_root, z[id], 1.0f).logprob;
    }
    add_best(k, all, raw_root, 1.0f, status == 0, &r.raw_top, &r.raw_top_logprobs);
    std::int64_t count = static_cast<std::int64_t>(kept.size());
    if (count == k.valid) count = 0;
    if (count > 0 && (closed || r.offsets.back() + count > k.capacity)) {
      closed = true;
      count = 0;
      status |= rlk::kKeptOverflow;
      logprob = rlk::canonical_nan();
    }
    add_best(k, of_kept, root, t, status == 0, &r.top, &r.top_logprobs);
    if (count > 0) r.kept.insert(r.kept.end(), kept.begin(), kept.end());
    r.offsets.push_back(r.offsets.back() + count);
    r.ids.push_back(id);
    r.status.push_back(status);
    r.logprob.push_back(logprob);
    r.raw.push_back(raw);
  }
  return r;
}

// ---- the backend ----

// All params except logits and results.
rlk::SampleParams params_of(const Case& k, rlk::DType dtype) {
  rlk::SampleParams p;
  p.dtype = p.raw_dtype = dtype;
  p.num_rows = k.rows;
  p.vocab_size = k.vocab;
  p.valid_vocab = k.valid;
  p.temperature = {k.temperature.data(), 0, 1};
  p.top_p = {k.top_p.data(), 0, 1};
  p.min_p = {k.min_p.data(), 0, 1};
  p.top_k = {k.top_k.data(), 0, 1, rlk::DType::kInt64};
  p.sample_id = {k.sample_id.data(), 0, 1, rlk::DType::kInt64};
  p.position = {k.position.data(), 0, 1, rlk::DType::kInt64};
  p.seed.value = 99;
  p.is_greedy = k.greedy.data();
  p.greedy_stride = 1;
  p.allowed = k.allowed.empty() ? nullptr : k.allowed.data();
  p.allowed_stride = (k.vocab + 31) / 32;
  p.order = k.order;
  p.random_stream = static_cast<std::int32_t>(k.stream);
  return p;
}

Results run(const Case& k, rlk::DType dtype, bool keeps = true) {
  const std::int64_t stride = k.vocab + 3;
  std::vector<float> wide(static_cast<std::size_t>(k.rows * stride), 1e30f);
  std::vector<std::uint16_t> narrow(static_cast<std::size_t>(k.rows * stride), 0x7f00);
  for (std::int64_t i = 0; i < k.rows; ++i) {
    for (std::int64_t j = 0; j < k.vocab; ++j) {
      const float x = k.logits[i * k.vocab + j];
      wide[i * stride + j] = x;
      narrow[i * stride + j] = dtype == rlk::DType::kBFloat16 ? rlk::bf16_rn(x) : rlk::f16_rn(x);
    }
  }
  rlk::SampleParams p = params_of(k, dtype);
  p.logits = dtype == rlk::DType::kFloat32 ? static_cast<const void*>(wide.data()) : narrow.data();
  p.logits_stride = stride;
  constexpr std::int32_t kCanary = -77;
  Results r;
  const auto rows = static_cast<std::size_t>(k.rows);
  r.ids.resize(rows);
  r.logprob.resize(rows);
  r.raw.resize(rows);
  r.status.resize(rows);
  p.ids = r.ids.data();
  p.logprob = r.logprob.data();
  p.raw_logprob = r.raw.data();
  p.status = r.status.data();
  const auto best = static_cast<std::size_t>(k.rows * k.best);
  for (auto* of : {&r.top, &r.raw_top}) of->assign(best + 1, kCanary);
  for (auto* of : {&r.top_logprobs, &r.raw_top_logprobs}) of->assign(best + 1, kCanary);
  p.n_logprobs = k.best;
  if (best > 0) {
    p.top_ids = r.top.data();
    p.top_logprobs = r.top_logprobs.data();
    p.raw_top_ids = r.raw_top.data();
    p.raw_top_logprobs = r.raw_top_logprobs.data();
  }
  const auto capacity = static_cast<std::size_t>(std::min(k.capacity, k.rows * k.vocab));
  if (keeps) {
    r.offsets.assign(rows + 1, kCanary);
    r.kept.assign(capacity + 8, kCanary);
    p.kept_capacity = static_cast<std::int64_t>(capacity);
    p.kept_ids = r.kept.data();
    p.kept_offsets = r.offsets.data();
  }
#if RLK_TEST_HIP
  std::vector<std::uint64_t> workspace(static_cast<std::size_t>(rlk::sample_workspace(p).bytes / 8 + 2),
                                       ~std::uint64_t{0});
  p.workspace = workspace.data();
  rlk::hip::sample(p, 0, 0);
#else
  rlk::cpu::sample(p);
#endif
  for (auto* of : {&r.top, &r.raw_top}) {
    EXPECT_EQ(of->back(), kCanary) << "guard";
    of->pop_back();
  }
  for (auto* of : {&r.top_logprobs, &r.raw_top_logprobs}) {
    EXPECT_EQ(of->back(), kCanary) << "guard";
    of->pop_back();
  }
  if (keeps) {
    const auto used = static_cast<std::size_t>(r.offsets.back());
    for (std::size_t i = used; i < r.kept.size(); ++i) EXPECT_EQ(r.kept[i], kCanary) << "guard";
    r.kept.resize(used);
  }
  return r;
}

// The same call in shards, where shard i has split[i] parts; payloads come in descending order.
Results run_shards(const Case& k, rlk::DType dtype, const std::vector<int>& split) {
  constexpr std::int32_t kCanary = -77;
  const std::int64_t words = rlk::payload_words(rlk::kMostCandidates);
  const auto num_shards = static_cast<std::int32_t>(split.size());
  std::vector<std::int32_t> payloads(static_cast<std::size_t>(num_shards * k.rows * words) + 1, kCanary);
  int part = 0;
  for (std::int32_t s = 0; s < num_shards; part += split[s++]) {
    const std::int64_t begin = rlk::part_cut(k.vocab, part), end = rlk::part_cut(k.vocab, part + split[s]);
    std::vector<float> wide;
    std::vector<std::uint16_t> narrow;
    for (std::int64_t i = 0; i < k.rows; ++i) {
      for (std::int64_t j = begin; j < end; ++j) {
        wide.push_back(k.logits[i * k.vocab + j]);
        narrow.push_back(rlk::bf16_rn(wide.back()));
      }
    }
    rlk::SamplePartialParams p;
    static_cast<rlk::SampleParams&>(p) = params_of(k, dtype);
    p.logits = dtype == rlk::DType::kFloat32 ? static_cast<const void*>(wide.data()) : narrow.data();
    p.logits_stride = end - begin;
    p.most_top_k = rlk::kMostCandidates;
    p.parts = begin < std::min(end, k.valid) ? rlk::PartRange{part, split[s]} : rlk::PartRange{};
    p.takes_raw = true;
    p.payload = payloads.data() + (num_shards - 1 - s) * k.rows * words;
#if RLK_TEST_HIP
    std::vector<std::uint64_t> workspace(static_cast<std::size_t>(rlk::sample_workspace(p).bytes / 8 + 2), 3);
    p.workspace = workspace.data();
    rlk::hip::sample_partial(p, 0, 0);
#else
    rlk::cpu::sample_partial(p);
#endif
  }
  EXPECT_EQ(payloads.back(), kCanary) << "guard";
  const auto rows = static_cast<std::size_t>(k.rows);
  Results r;
  r.ids.resize(rows);
  r.logprob.resize(rows);
  r.raw.resize(rows);
  r.status.resize(rows);
  r.offsets.assign(rows + 1, kCanary);
  const auto capacity = static_cast<std::size_t>(std::min(k.capacity, k.rows * k.vocab));
  r.kept.assign(capacity + 8, kCanary);
  rlk::SampleMergeParams p;
  static_cast<rlk::SampleParams&>(p) = params_of(k, dtype);
  p.payload = payloads.data();
  p.num_shards = num_shards;
  p.most_top_k = rlk::kMostCandidates;
  p.ids = r.ids.data();
  p.logprob = r.logprob.data();
  p.raw_logprob = r.raw.data();
  p.status = r.status.data();
  p.kept_capacity = static_cast<std::int64_t>(capacity);
  p.kept_ids = r.kept.data();
  p.kept_offsets = r.offsets.data();
#if RLK_TEST_HIP
  std::vector<std::uint64_t> workspace(static_cast<std::size_t>(rlk::sample_workspace(p).bytes / 8 + 2), 3);
  p.workspace = workspace.data();
  rlk::hip::sample_merge(p, 0, 0);
#else
  rlk::cpu::sample_merge(p);
#endif
  const auto used = static_cast<std::size_t>(r.offsets.back());
  for (std::size_t i = used; i < r.kept.size(); ++i) EXPECT_EQ(r.kept[i], kCanary) << "guard";
  r.kept.resize(used);
  return r;
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void expect_same(const Results& got, const Results& want, const std::string& what) {
  EXPECT_EQ(got.status, want.status) << what;
  EXPECT_EQ(got.ids, want.ids) << what;
  EXPECT_EQ(got.offsets, want.offsets) << what;
  EXPECT_EQ(got.kept, want.kept) << what;
  EXPECT_TRUE(same(got.logprob, want.logprob)) << what << " logprob";
  EXPECT_TRUE(same(got.raw, want.raw)) << what << " raw_logprob";
  EXPECT_EQ(got.top, want.top) << what;
  EXPECT_EQ(got.raw_top, want.raw_top) << what;
  EXPECT_TRUE(same(got.top_logprobs, want.top_logprobs)) << what << " top_logprobs";
  EXPECT_TRUE(same(got.raw_top_logprobs, want.raw_top_logprobs)) << what << " raw_top_logprobs";
}

float pick(std::mt19937& random, std::initializer_list<float> values) {
  return values.begin()[random() % values.size()];
}

Case random_case(std::mt19937& random, std::int64_t rows, std::int64_t vocab) {
  Case k;
  k.rows = rows;
  k.vocab = vocab;
  k.valid = random() % 3 == 0 ? 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(vocab)) : vocab;
  k.scale = pick(random, {0.1f, 1.0f, 4.0f, 10.0f});
  k.levels = random() % 4 == 0 ? 2.0 : 0.0;
  k.order = static_cast<SampleOrder>(random() % 3);
  std::normal_distribution<float> normal(0.0f, k.scale);
  for (std::int64_t i = 0; i < rows; ++i) {
    k.temperature.push_back(pick(random, {1.0f, 1.0f, 0.7f, 2.5f, 1e-3f, 0.0f, rlk::infinity()}));
    k.top_p.push_back(pick(random, {1.0f, 0.9f, 0.5f, 1e-30f, 0.999f, 0.95f, 1.5f}));
    k.min_p.push_back(pick(random, {0.0f, 0.0f, 0.02f, 0.5f, 1.0f, 1e-40f}));
    k.top_k.push_back(static_cast<std::int64_t>(pick(random, {0, 0, 1, 5, 50, 700, 3000, 1e6f})) -
                      (random() % 40 == 0));
    k.sample_id.push_back(static_cast<std::int64_t>(random()) << 20);
    k.position.push_back(random() % 30 == 0 ? -1 : static_cast<std::int64_t>(random()));
    k.greedy.push_back(random() % 8 == 0);
    for (std::int64_t j = 0; j < vocab; ++j) {
      float x = normal(random);
      if (k.levels != 0)
        x = static_cast<float>(std::round(x / k.levels) * k.levels) * (random() % 2 == 0 ? 1.0f : -1.0f);
      k.logits.push_back(rlk::float_of_bf16(rlk::bf16_rn(random() % 50 == 0 ? -rlk::infinity() : x)));
    }
    if (random() % 12 == 0) {
      k.logits[i * vocab + random() % vocab] = pick(random, {NAN, rlk::infinity(), 3e38f});
    } else if (random() % 12 == 0) {
      std::fill(k.logits.end() - vocab, k.logits.end(), -rlk::infinity());
    } else if (random() % 12 == 0) {
      std::fill(k.logits.end() - vocab, k.logits.end(), 3.0f);
    }
  }
  if (random() % 3 == 0) {
    for (std::int64_t i = 0; i < rows * ((vocab + 31) / 32); ++i) {
      k.allowed.push_back(static_cast<std::int32_t>(random() % 5 == 0 ? 0 : random() | (random() % 2 ? random() : 0)));
    }
  }
  const std::int64_t bests[] = {0, 0, 1, 5, 20, rlk::kTopLogprobs};
  k.best = std::min(bests[random() % 6], k.valid);
  k.stream = static_cast<std::int64_t>(random() % 3);
  if (random() % 3 == 0) k.capacity = static_cast<std::int64_t>(random() % static_cast<unsigned>(rows * vocab / 4 + 2));
  return k;
}

TEST(Sample, HasTheBytesOfTheContract) {
  std::mt19937 random(7);
#if RLK_TEST_HIP
  const std::int64_t vocabularies[] = {1, 9, 130, 1025, 4100};
  constexpr int kCases = 1;
  const char* const orders[] = {"forward", "backward", "shuffled"};
#else
  const std::int64_t vocabularies[] = {1, 2, 9, 127, 130, 1000, 1025, 2500, 6000};
  constexpr int kCases = 40;
#endif
  int number = 0;
  for (const std::int64_t vocab : vocabularies) {
    for (int n = 0; n < kCases; ++n, ++number) {
      const Case k = random_case(random, 1 + static_cast<std::int64_t>(random() % 9), vocab);
      const Results want = reference(k);
      const std::string what = "vocabulary " + std::to_string(vocab) + ", case " + std::to_string(n);
#if RLK_TEST_HIP
      setenv("RLK_STANDIN_ORDER", orders[number % 3], 1);
#else
      rlk::cpu::set_num_threads(1 + number % 3);
      const rlk::cpu::Isa isa = rlk::cpu::kIsas[number % 3];
      if (rlk::cpu::isa_supported(isa)) rlk::cpu::set_isa(isa);
#endif
      expect_same(run(k, number % 2 == 0 ? rlk::DType::kFloat32 : rlk::DType::kBFloat16), want, what);
      Results alone = want;
      alone.offsets.clear();
      alone.kept.clear();
      if (k.capacity == 1 << 22) expect_same(run(k, rlk::DType::kFloat32, false), alone, what + ", no kept set");
      if (HasFailure()) return;
    }
  }
}

TEST(Sample, ShardsHaveTheBytesOfTheContract) {
  std::mt19937 random(11);
  const std::vector<int> splits[] = {{8}, {4, 4}, {4, 2, 2}, {1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 2, 4}};
#if RLK_TEST_HIP
  const std::int64_t vocabularies[] = {9, 130, 1025, 4100};
  constexpr int kCases = 1;
  const char* const orders[] = {"forward", "backward", "shuffled"};
#else
  const std::int64_t vocabularies[] = {1, 9, 127, 130, 1000, 1025, 6000};
  constexpr int kCases = 40;
#endif
  int number = 0;
  for (const std::int64_t vocab : vocabularies) {
    for (int n = 0; n < kCases; ++n, ++number) {
      Case k = random_case(random, 1 + static_cast<std::int64_t>(random() % 9), vocab);
      k.best = 0;
      for (std::int64_t i = 0; i < k.rows; ++i) {  // what one exchange serves
        if (k.top_k[i] > rlk::kMostCandidates) k.top_k[i] = rlk::kMostCandidates - static_cast<int>(random() % 3);
        const bool is_cut = k.top_k[i] > 0;
        if (!is_cut || k.order == SampleOrder::kSglang) k.top_p[i] = std::max(k.top_p[i], 1.0f);
        if (!is_cut) k.min_p[i] = 0.0f;
      }
      const Results want = reference(k);
#if RLK_TEST_HIP
      setenv("RLK_STANDIN_ORDER", orders[number % 3], 1);
#else
      rlk::cpu::set_num_threads(1 + number % 3);
      const rlk::cpu::Isa isa = rlk::cpu::kIsas[number % 3];
      if (rlk::cpu::isa_supported(isa)) rlk::cpu::set_isa(isa);
#endif
      const rlk::DType dtype = number % 2 == 0 ? rlk::DType::kFloat32 : rlk::DType::kBFloat16;
      expect_same(run_shards(k, dtype, splits[number % 5]), want,
                  "vocabulary " + std::to_string(vocab) + ", case " + std::to_string(n));
      if (HasFailure()) return;
    }
  }
}

TEST(ProcessLogits, HasTheBytesOfTheContract) {
  std::mt19937 random(5);
#if RLK_TEST_HIP
  constexpr int kCases = 4;
#else
  constexpr int kCases = 60;
#endif
  for (int number = 0; number < kCases; ++number) {
    const std::int64_t rows = 1 + static_cast<std::int64_t>(random() % 6), vocab = number % 3 == 0 ? 7 : 700;
    const Case k = random_case(random, rows, vocab);
    const auto size = static_cast<std::size_t>(rows * vocab);
    std::vector<float> repetition, presence, frequency, values, out(size, 7.0f), want;
    std::vector<std::int64_t> history, offsets = {0}, bias_offsets = {0};
    std::vector<std::int32_t> bias, status(rows, 99), want_status;
    std::vector<std::uint8_t> prompt;
    for (std::int64_t i = 0; i < rows; ++i) {
      repetition.push_back(pick(random, {1.0f, 1.2f, 0.7f, 1.2f, 1.2f, 0.0f, NAN}));
      presence.push_back(pick(random, {0.0f, 0.5f, -0.3f, 1.1f, 1.1f, 1.1f, rlk::infinity()}));
      frequency.push_back(pick(random, {0.0f, 0.25f, -0.1f, 2.0f}));
      const auto begin = static_cast<std::ptrdiff_t>(history.size());
      for (int n = static_cast<int>(random() % 400); n > 0; --n) {
        const bool is_bad = random() % 4000 == 0;
        history.push_back(is_bad ? vocab : static_cast<std::int64_t>(random() % static_cast<unsigned>(vocab)));
        prompt.push_back(random() % 2);
      }
      offsets.push_back(static_cast<std::int64_t>(history.size()));
      const auto first_bias = bias.size();
      for (std::int32_t j = 0; j < vocab; ++j) {
        if (random() % 3 != 0) continue;
        bias.push_back(random() % 3000 == 0 ? j - 1 : j);
        values.push_back(pick(random, {1.5f, -2.0f, 0.3f, -rlk::infinity()}));
      }
      bias_offsets.push_back(static_cast<std::int64_t>(bias.size()));

      const float r = repetition[i], p = presence[i], f = frequency[i];
      std::int32_t bits = !(r > 0) || std::isinf(p) ? rlk::kBadPenalty : 0;
      for (auto at = history.begin() + begin; at != history.end(); ++at) bits |= *at >= vocab ? rlk::kBadHistory : 0;
      for (auto e = first_bias; e < bias.size(); ++e) {
        if (bias[e] < 0 || (e > first_bias && bias[e] <= bias[e - 1])) bits |= rlk::kBadBias;
      }
      want_status.push_back(bits);
      for (std::int64_t j = 0; j < vocab; ++j) {
        float z = k.logits[i * vocab + j], n = 0;
        if (number % 2 != 0) z = rlk::float_of_bf16(rlk::bf16_rn(z));
        bool seen = false;
        for (auto at = static_cast<std::size_t>(begin); at < history.size(); ++at) {
          if (history[at] != j) continue;
          seen = true;
          n += prompt[at] == 0;
        }
        const auto at = std::find(bias.begin() + static_cast<std::ptrdiff_t>(first_bias), bias.end(), j);
        const auto add = [&] {
          if (at != bias.end()) z = z + values[at - bias.begin()];
        };
        const auto repeat = [&] { z = z > 0 ? z / r : z * r; };
        if (k.order == SampleOrder::kSglang) {
          const float step = f * n;
          if (n > 0) z = z - (step + p);
          if (n > 0) repeat();
          add();
        } else {
          add();
          if (seen) repeat();
          const float step = f * n;
          if (n > 0) z = z - step;
          if (n > 0) z = z - p;
        }
        want.push_back(bits != 0 || std::isnan(z) ? rlk::canonical_nan() : z);
      }
    }
    std::vector<std::uint16_t> narrow;
    for (const float x : k.logits) narrow.push_back(rlk::bf16_rn(x));
    rlk::ProcessLogitsParams p;
    p.logits = number % 2 == 0 ? static_cast<const void*>(k.logits.data()) : narrow.data();
    p.dtype = number % 2 == 0 ? rlk::DType::kFloat32 : rlk::DType::kBFloat16;
    p.logits_stride = p.vocab_size = p.num_columns = vocab;
    p.num_rows = rows;
    p.repetition = {repetition.data(), 0, 1};
    p.presence = {presence.data(), 0, 1};
    p.frequency = {frequency.data(), 0, 1};
    p.history_ids = {history.data(), 0, 1, rlk::DType::kInt64};
    p.history_offsets = offsets.data();
    p.is_prompt = prompt.data();
    p.history_size = static_cast<std::int64_t>(history.size());
    p.bias_ids = {bias.data(), 0, 1, rlk::DType::kInt32};
    p.bias_values = values.data();
    p.bias_offsets = bias_offsets.data();
    p.bias_size = static_cast<std::int64_t>(bias.size());
    p.out = out.data();
    p.status = status.data();
    p.order = k.order;
#if RLK_TEST_HIP
    rlk::hip::process_logits(p, 0, 0);
#else
    rlk::cpu::set_num_threads(1 + number % 3);
    rlk::cpu::process_logits(p);
#endif
    EXPECT_EQ(status, want_status) << number;
    ASSERT_TRUE(same(out, want)) << number;
  }
}

// The closed form of the height is exact for each vocabulary: the longest part fits this tree, and does not fit a lower
// tree.
TEST(Sample, TheTreeOfAPartHasTheLeastHeight) {
  for (std::int64_t vocab = 1; vocab <= rlk::kSampleVocab; ++vocab) {
    std::int64_t longest = 0;
    for (int i = 0; i < rlk::kNumParts; ++i) {
      longest = std::max(longest, rlk::part_cut(vocab, i + 1) - rlk::part_cut(vocab, i));
    }
    const int height = rlk::leaf_height(vocab);
    ASSERT_GE(std::int64_t{rlk::kLeafColumns} << height, longest) << vocab;
    if (height > 0) ASSERT_LT(std::int64_t{rlk::kLeafColumns} << (height - 1), longest) << vocab;
  }
}

TEST(Sample, SharesAndMassesAreExact) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 200000; ++i) {
    const auto bits = static_cast<std::int32_t>(random() % 0x3f800001u);
    const float share = i == 0 ? 1.0f : rlk::float_of(bits);
    const std::uint64_t mass = i == 1 ? std::uint64_t{1} << 63 : random() >> (1 + random() % 63);
    ASSERT_EQ(rlk::share_of_mass(share, mass), static_cast<std::uint64_t>(ceil_share(share, mass)))
        << share << " " << mass;
    const float e = rlk::float_of(static_cast<std::int32_t>(random() % 0x3f900000u));
    ASSERT_EQ(rlk::fixed_mass(e), static_cast<std::uint64_t>(std::floor(std::ldexp(static_cast<double>(e), 44)))) << e;
    const float left = rlk::float_of(static_cast<std::int32_t>(0x00800000u + random() % 0x50000000u));
    const float both = left * (1.0f + static_cast<float>(random() % 1000) * (i % 3 == 0 ? 1.0f : 1e-3f));
    const auto r = static_cast<std::uint32_t>(random());
    ASSERT_EQ(rlk::draws_left(r, left, both), Tree::left(r, left, both)) << r << " " << left << " " << both;
  }
  EXPECT_TRUE(rlk::draws_left(0, 1e-30f, 1.0f));
  EXPECT_FALSE(rlk::draws_left(0, 0.0f, 1.0f));
}

}  // namespace
