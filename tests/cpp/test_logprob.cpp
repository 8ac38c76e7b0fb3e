// Tests logprob's forward on the CPU, its shards and their merge. Results equal, bit for bit, a second implementation
// written from rules 4 and 5 of the numerics page. Results are within the contract's bounds of results in double. Wrong
// arguments of a C++ caller are rejected.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "logprob_backend.h"
#include "logprob_reference.h"
#include "rlk/math/log2.h"
#include "rlk/ops/logprob.h"

namespace logprob_test {
namespace {

// Vocabularies: one column; too few columns for all parts; around vec8s and leaves; a power of two; primes; Llama 3.
constexpr std::int64_t kVocab[] = {1, 2, 7, 8, 9, 63, 64, 127, 128, 129, 1000, 1024, 4099, 32003, 128256};

TEST_F(Logprob, EveryVocabularyHasTheBitsOfTheContract) {
  for (const std::int64_t V : kVocab) {
    for (const DType dtype : kDtypes) {
      for (const Exp exp : kExps) {
        Problem p(V > 100000 ? 1 : 3, V, dtype, static_cast<unsigned>(V));
        p.exp = exp;
        ASSERT_NO_FATAL_FAILURE(check(p, "random"));
      }
    }
  }
}

TEST_F(Logprob, EveryLengthOfALeafAndOfABlockOfLeaves) {
  // Part 0 of U = 8 n + 7 columns has 8 floor((n + 1) / 8) columns. The lengths go from one vec8 to past sixteen
  // leaves.
  for (std::int64_t vec8s = 1; vec8s <= 280; vec8s += vec8s < 40 ? 1 : 23) {
    for (const DType dtype : kDtypes) {
      Problem p(1, 64 * vec8s + 13, dtype, static_cast<unsigned>(vec8s));
      ASSERT_NO_FATAL_FAILURE(check(p, "length"));
    }
  }
}

TEST_F(Logprob, RowsMayBeStridedAndUnaligned) {
  for (const DType dtype : kDtypes) {
    for (const std::size_t shift : {0, 1, 2, 4, 6, 8, 12, 31}) {
      if (kWholeElements && shift % static_cast<std::size_t>(rlk::size_of(dtype)) != 0) continue;
      Problem p(5, 1283, dtype, 3);
      p.spread_out(1283 + 17, shift);
      ASSERT_NO_FATAL_FAILURE(check(p, "shift " + std::to_string(shift)));
    }
  }
}

TEST_F(Logprob, TwoLevelRowLayout) {
  Problem p(6, 300, DType::kBFloat16, 4);
  p.spread_out(310, 0);
  // Rows 0, 1, 3, 4 of the six rows are two outer steps of two inner rows. Targets and outputs belong to these four
  // rows.
  std::vector<std::int64_t> target;
  std::vector<RowOutputs> want;
  p.temperature.assign(6, 1.0f);
  for (const std::int64_t i : {0, 1, 3, 4}) {
    target.push_back(p.target[i]);
    want.push_back(reference(p, i));
  }
  auto params = p.params<rlk::LogprobParams>();
  Result got(4);
  got.point(&params);
  params.num_rows = 4;
  params.logits_rows = {2, 3 * 310, 310};
  params.target = target.data();
  params.target_rows = {4, 0, 1};
  run(params);
  for (std::int64_t i = 0; i < 4; ++i) expect_row(want[i], got, i, "two levels");
}

TEST_F(Logprob, TargetsMayBeInt32) {
  Problem p(3, 300, DType::kFloat32, 5);
  std::vector<std::int32_t> target(5, -1);
  target[0] = static_cast<std::int32_t>(p.target[0]);
  target[2] = static_cast<std::int32_t>(p.target[1]);
  target[4] = -100;
  p.target[2] = kIgnore;
  auto params = p.params<rlk::LogprobParams>();
  Result got(3);
  got.point(&params);
  params.target = target.data();
  params.target_dtype = DType::kInt32;
  params.target_rows = {3, 0, 2};
  run(params);
  for (std::int64_t i = 0; i < 3; ++i) expect_row(reference(p, i), got, i, "int32");
}

TEST_F(Logprob, ScaleSoftcapAndTemperature) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      for (const float scale : {1.0f, 0.0625f, 3.3f}) {
        for (const float softcap : {0.0f, 30.0f, 0.5f}) {
          Problem p(4, 2500, dtype, 6, 20.0f);
          p.exp = exp;
          p.logit_scale = scale;
          p.softcap = softcap;
          p.set(0, 7, -kInf);
          p.set(1, 2400, kInf);
          p.set(2, 1, kNaN);
          ASSERT_NO_FATAL_FAILURE(check(p, "scale " + std::to_string(scale) + ", softcap " + std::to_string(softcap)));
        }
      }
    }
  }
}

TEST_F(Logprob, ExtremeTemperatures) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      // Temperatures are valid from 2^-126 on; log2e / T is subnormal for the largest T.
      const std::vector<float> temperatures = {0x1p-126f, 1e-30f, 1e-4f,     1e4f, 1e30f, 0x1.fffffep127f,
                                               0.0f,      -1.0f,  0x1p-127f, kInf, kNaN};
      Problem p(static_cast<std::int64_t>(temperatures.size()), 700, dtype, 7);
      p.exp = exp;
      p.temperature = temperatures;
      p.set(5, 3, -kInf);
      p.set(10, p.target[10], kNaN);  // a column that is not seen and does not make the target bad
      ASSERT_NO_FATAL_FAILURE(check(p, "temperature"));
    }
  }
}

TEST_F(Logprob, ColumnsFarBelowTheLargest) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      Problem p(8, 3001, dtype, 8);
      p.exp = exp;
      p.temperature = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 0.7f, 1.3f};
      std::mt19937 random(9);
      for (std::int64_t j = 0; j < p.columns; ++j) {
        p.set(0, j, std::uniform_real_distribution<float>(-300.0f, 10.0f)(random));  // z crosses the clamp
        p.set(1, j, std::uniform_real_distribution<float>(-90.0f, 0.0f)(random));    // z is close to the clamp
        p.set(2, j, std::uniform_real_distribution<float>(300.0f, 900.0f)(random));  // |m| > 512: q is not rounded
        p.set(3, j, std::uniform_real_distribution<float>(-900.0f, -300.0f)(random));
        p.set(4, j, std::uniform_real_distribution<float>(-60000.0f, 60000.0f)(random));
        p.set(5, j, j == 1500 ? 30000.0f : -60000.0f + static_cast<float>(j));  // one column has all the probability
        // The largest logit adds nothing to E. As a result, only clamped columns add to E, which shows q and its
        // rounding.
        p.set(6, j, j % 128 == 5 ? 0.0f : -1000.0f - static_cast<float>(j % 50));
        p.set(7, j, j % 128 == 5 ? 0.0f : -50.0f - static_cast<float>(j % 100));
      }
      ASSERT_NO_FATAL_FAILURE(check(p, "far below"));
    }
  }
}

TEST_F(Logprob, NumbersNearTheEndsOfTheRange) {
  for (const Exp exp : kExps) {
    Problem p(13, 1100, DType::kFloat32, 10);
    p.exp = exp;
    p.temperature.assign(13, 1.0f);
    for (const int i : {8, 9, 10}) p.temperature[i] = rlk::kLog2e;  // c = 1
    p.temperature[11] = 0x1.fffffep127f;
    for (std::int64_t j = 0; j < p.columns; ++j) {
      const float sign = j % 3 == 0 ? -1.0f : 1.0f;
      p.set(0, j, sign * 0x1p-140f);                            // subnormal logits
      p.set(1, j, sign * 0.0f);                                 // zeros of both signs
      p.set(2, j, -1e6f - static_cast<float>(j));               // near -2^21 in log2
      p.set(3, j, -1.5e6f + static_cast<float>(j % 7) * 1e4f);  // leaves on both sides of -2^21
      p.set(4, j, 1.4e6f + static_cast<float>(j));              // near 2^21
      p.set(5, j, j == 900 ? 1.46e6f : 0.0f);                   // one column past 2^21
      p.set(6, j, -3e38f);                                      // every leaf is the identity
      p.set(7, j, j == 5 ? 3e38f : 1.0f);                       // c z overflows
      p.set(8, j, j == 5 ? 2097151.875f : 2097000.0f);          // its ceil is 2^21, which is too large
      p.set(9, j, j < 600 ? -2097152.0f : -2097151.875f);       // -2^21 gives the identity, its neighbour does not
      p.set(10, j, -2097152.0f);
      p.set(11, j, j < 128 ? 1e38f : j == 128 ? 2.5e38f : -kInf);  // E overflows at the smaller m
      p.set(12, j, j > 140 && j < 150 ? 0x1p-140f : -kInf);        // E of the only leaf is subnormal
    }
    ASSERT_NO_FATAL_FAILURE(check(p, "ends of the range"));
  }
}

TEST_F(Logprob, NonFiniteLogits) {
  for (const DType dtype : kDtypes) {
    Problem p(14, 2100, dtype, 11);
    for (std::int64_t j = 0; j < p.columns; ++j) {
      if (j % 2 == 0) p.set(0, j, -kInf);     // scattered columns
      if (j < 1500) p.set(1, j, -kInf);       // whole leaves and parts
      p.set(2, j, -kInf);                     // an empty row
      p.set(3, j, j == 1234 ? 1.0f : -kInf);  // one finite column
    }
    p.set(4, 0, kNaN);
    p.set(5, 2099, -kNaN);
    p.set(6, 700, kInf);
    p.set(7, 700, kInf);
    p.set(7, 701, kNaN);  // the leaf is NaN
    p.set(8, 10, kInf);
    p.set(8, 2000, kNaN);  // two leaves, so two status bits
    p.target[9] = 55;
    p.set(9, 55, -kInf);  // the label is masked
    p.target[10] = 56;
    p.set(10, 56, kNaN);  // the label is NaN
    p.target[11] = 57;
    p.set(11, 57, kInf);
    p.target[2] = 3;
    p.target[12] = 5000;  // bad targets: one in a row with a NaN, one in a row with +Inf
    p.set(12, 1, kNaN);
    p.target[13] = -1;
    p.set(13, 1, kInf);
    ASSERT_NO_FATAL_FAILURE(check(p, "non-finite"));
  }
}

TEST_F(Logprob, EveryNanIsSeenWhereverItStands) {
  for (const DType dtype : kDtypes) {
    Problem p(1, 400, dtype, 12);
    for (std::int64_t j = 0; j < p.columns; ++j) {
      for (const std::uint32_t sign : {0u, 0x80000000u}) {
        Problem q = p;
        // A NaN whose payload is one low bit: a comparison of only the upper bits would miss it.
        if (dtype == DType::kFloat32) {
          q.set(0, j, std::bit_cast<float>(0x7f800001u | sign));
        } else {
          const std::uint32_t nan = dtype == DType::kBFloat16 ? 0x7f81u : 0x7c01u;
          const auto h = static_cast<std::uint16_t>(nan | sign >> 16);
          std::memcpy(q.address(0, j), &h, 2);
        }
        auto params = q.params<rlk::LogprobParams>();
        std::int32_t status = 0;
        params.status = &status;
        set_way(static_cast<int>(j) % ways());
        run(params);
        ASSERT_EQ(status, rlk::kNanLogit) << name(dtype) << " column " << j;
      }
    }
  }
}

TEST_F(Logprob, PaddedAndCanonicalVocabularies) {
  for (const DType dtype : kDtypes) {
    for (const std::int64_t V : {1, 9, 130, 1000, 4099}) {
      for (const std::int64_t U : {V, V + 1, V + 64, 2 * V + 500}) {
        for (const std::int64_t valid : {V, V - V / 3, std::int64_t{1}, std::int64_t{0}}) {
          Problem p(2, V, dtype, static_cast<unsigned>(V));
          p.vocab_size = U;
          p.valid_vocab = valid;
          for (std::int64_t j = valid; j < V; ++j) p.set(0, j, kNaN);  // padding may hold anything
          p.target[0] = 0;
          ASSERT_NO_FATAL_FAILURE(check(p, "U " + std::to_string(U) + ", valid " + std::to_string(valid)));
        }
      }
    }
  }
}

TEST_F(Logprob, IgnoredRowsAndBadTargets) {
  for (const DType dtype : kDtypes) {
    Problem p(8, 500, dtype, 13);
    p.valid_vocab = 490;
    p.target = {kIgnore, -1, 490, 499, 500, std::int64_t{1} << 40, -(std::int64_t{1} << 40), 489};
    for (std::int64_t j = 0; j < 500; ++j) p.set(0, j, kNaN);
    p.temperature[0] = kNaN;
    p.keep(0, {-5, 9999});
    ASSERT_NO_FATAL_FAILURE(check(p, "targets"));
  }
}

TEST_F(Logprob, AnIgnoredRowIsNotRead) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  const std::int64_t V = page / 4;
  void* memory =
      mmap(nullptr, static_cast<std::size_t>(3 * page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  float* logits = static_cast<float*>(memory);
  for (std::int64_t i = 0; i < 3 * V; ++i) logits[i] = static_cast<float>(i % 13);
  ASSERT_EQ(mprotect(logits + V, static_cast<std::size_t>(page), PROT_NONE), 0);
  const std::vector<std::int64_t> target = {3, kIgnore, 5};
  std::vector<float> stats(15), d(3, 1.0f), dlogits(static_cast<std::size_t>(3 * V), 9.0f);
  for_each_backend([&](const std::string& where) {
    rlk::LogprobParams p;
    p.logits = logits;
    p.target = target.data();
    p.logits_rows = {3, 0, V};
    p.target_rows = {3, 0, 1};
    p.num_rows = 3;
    p.num_columns = p.vocab_size = p.valid_vocab = V;
    Result r(3);
    r.point(&p);
    run(p);
    ASSERT_EQ(r.status[1], 0) << where;
    ASSERT_EQ(bits(r.lse[1]), 0u) << where;
    p.stats = stats.data();
    run(p);
    ASSERT_EQ(stats[5], -kInf) << where;
    ASSERT_EQ(stats[9], kInf) << where;

    rlk::LogprobBackwardParams b;
    static_cast<rlk::LogprobInput&>(b) = p;
    b.lse = r.lse.data();
    b.dlogprob = d.data();
    b.dlogprob_rows = {3, 0, 1};
    b.dlogits = dlogits.data();
    b.dlogits_rows = {3, 0, V};
    run_backward(b);
    for (std::int64_t j = 0; j < V; ++j) ASSERT_EQ(bits(dlogits[V + j]), 0u) << where;
  });
  munmap(memory, static_cast<std::size_t>(3 * page));
}

TEST_F(Logprob, KeptSets) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      Problem p(9, 5003, dtype, 14);
      p.exp = exp;
      p.valid_vocab = 5000;
      std::mt19937 random(15);
      std::vector<std::int32_t> many;
      for (int i = 0; i < 3000; ++i) many.push_back(static_cast<std::int32_t>(random() % 5000));
      p.keep(0, {17});                 // the target only
      p.keep(1, many);                 // any order, with repeats
      p.keep(3, {0, 4999, 128, 127});  // row 2 keeps all columns
      p.keep(4, {1, 5000});            // an id past valid_vocab
      p.keep(5, {-1});
      p.keep(6, {2147483647, -2147483647});
      p.keep(7, {40, 41, 42});
      p.set(7, 41, -kInf);
      p.set(7, 43, kNaN);  // not kept, so not seen
      p.keep(8, {40, 41, 42});
      p.set(8, 41, kNaN);
      p.target[8] = 6000;
      ASSERT_NO_FATAL_FAILURE(check(p, "kept"));
    }
  }
}

TEST_F(Logprob, KeptOffsetsThatDescendOrPassTheEnd) {
  Problem p(5, 300, DType::kFloat32, 16);
  p.kept_ids = {1, 2, 3};
  p.kept_offsets = {0, 2, 1, 9, -4, 3};
  ASSERT_NO_FATAL_FAILURE(check(p, "offsets"));
}

TEST_F(Logprob, ShardsMergeToTheBitsOfTheWhole) {
  for (const std::int64_t U : {1, 9, 64, 1000, 4099, 128256}) {
    for (const DType dtype : kDtypes) {
      Problem p(U > 100000 ? 2 : 8, U, dtype, static_cast<unsigned>(U));
      p.valid_vocab = U - U / 50;
      p.target.back() = kIgnore;
      if (p.rows > 2) {
        p.target[1] = U;
        p.temperature[2] = 0.0f;
        p.set(3, 0, kNaN);
        p.set(4, U / 2, kInf);
        p.set(5, p.target[5], -kInf);
        p.keep(6, {0, static_cast<std::int32_t>(p.valid_vocab / 2)});
        p.temperature[7] = kNaN;  // temperature of an ignored row
      }
      for (const int shards : {1, 2, 4, 8}) {
        Guarded<float> stats(5 * p.rows * shards);
        for (int s = 0; s < shards; ++s) {
          const std::int64_t begin = cut(U, s * 8 / shards), end = cut(U, (s + 1) * 8 / shards);
          auto params = p.params<rlk::LogprobParams>();
          params.logits = p.address(0, begin);
          params.vocab_start = begin;
          params.num_columns = end - begin;
          params.stats = stats.data() + 5 * p.rows * s;
          set_way(s % ways());
          run(params);
        }
        ASSERT_TRUE(stats.intact());
        rlk::LogprobMergeParams merge;
        Result got(p.rows);
        got.point(&merge);
        merge.stats = stats.data();
        merge.temperature = p.temperature.data();
        merge.num_rows = p.rows;
        merge.num_shards = shards;
        run_merge(merge);
        ASSERT_TRUE(got.intact());
        for (std::int64_t i = 0; i < p.rows; ++i) {
          expect_row(reference(p, i), got, i, "U " + std::to_string(U) + ", shards " + std::to_string(shards));
        }
      }
    }
  }
}

TEST_F(Logprob, LabelSmoothingHasTheTreeOfTheVocabulary) {
  constexpr bool kSlow = kWholeElements;  // true for the emulation
  for (const std::int64_t V : {1, 3, 8, 9, 65, 1024, 1100, 4099, 33000}) {
    for (const DType dtype : kDtypes) {
      for (const float softcap : {0.0f, 15.0f}) {
        if (softcap != 0.0f && (kSlow ? V != 65 : V > 10000)) continue;
        if (kSlow && (V > 10000 || (V > 1000 && dtype != DType::kBFloat16))) continue;
        Problem p(V > 10000 ? 2 : 8, V, dtype, static_cast<unsigned>(V));
        p.label_smoothing = V % 2 == 0 ? 0.1f : 0.75f;
        p.softcap = softcap;
        p.logit_scale = softcap == 0.0f ? 1.0f : 0.5f;
        p.valid_vocab = V - V / 50;
        for (auto& y : p.target) y %= p.valid_vocab;
        if (p.rows > 2) {
          p.target[0] = kIgnore;
          p.target[1] = V;
          p.temperature[2] = kNaN;
          p.set(3, 0, kNaN);
          p.set(4, p.valid_vocab / 2, kInf);
          p.set(5, p.valid_vocab - 1, -kInf);
          p.set(6, 0, -3e38f);
        }
        p.spread_out(V + 3, kWholeElements ? 4 : 3);
        ASSERT_NO_FATAL_FAILURE(check(p, "smoothed, softcap " + std::to_string(softcap)));
      }
    }
  }
}

TEST_F(Logprob, SmoothedShardsMergeToTheBitsOfTheWhole) {
  for (const std::int64_t U : {9, 64, 1000, 4099}) {
    Problem p(6, U, DType::kFloat32, static_cast<unsigned>(U));
    p.label_smoothing = 0.3f;
    p.valid_vocab = U - U / 50;
    for (auto& y : p.target) y %= p.valid_vocab;
    p.target[1] = U;
    p.set(2, p.target[2], -kInf);
    p.set(3, U / 2, kNaN);
    p.target[5] = kIgnore;
    p.temperature[5] = kNaN;
    for (const int shards : {1, 2, 4, 8}) {
      Guarded<float> stats(5 * p.rows * shards);
      for (int s = 0; s < shards; ++s) {
        const std::int64_t begin = cut(U, s * 8 / shards), end = cut(U, (s + 1) * 8 / shards);
        auto params = p.params<rlk::LogprobParams>();
        params.logits = p.address(0, begin);
        params.vocab_start = begin;
        params.num_columns = end - begin;
        params.stats = stats.data() + 5 * p.rows * s;
        set_way(s % ways());
        run(params);
      }
      ASSERT_TRUE(stats.intact());
      rlk::LogprobMergeParams merge;
      Result got(p.rows);
      got.point(&merge);
      merge.stats = stats.data();
      merge.temperature = p.temperature.data();
      merge.num_rows = p.rows;
      merge.num_shards = shards;
      merge.label_smoothing = p.label_smoothing;
      merge.valid_vocab = p.valid_vocab;
      EXPECT_THROW(run_merge(merge), rlk::InvalidArgument);  // the merge gives no moments
      merge.entropy = merge.sum_p_sq = nullptr;
      run_merge(merge);
      ASSERT_TRUE(got.intact());
      for (std::int64_t i = 0; i < p.rows; ++i) {
        const RowOutputs want = reference(p, i);
        ASSERT_EQ(bits(want.logprob), bits(got.logprob[i])) << "U " << U << ", shards " << shards << ", row " << i;
        ASSERT_EQ(bits(want.lse), bits(got.lse[i])) << "U " << U << ", shards " << shards << ", row " << i;
        ASSERT_EQ(want.status, got.status[i]) << "U " << U << ", shards " << shards << ", row " << i;
      }
    }
  }
}

TEST_F(Logprob, WithinTheBoundsOfNumericsAgainstDouble) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      for (const float spread : {1.0f, 4.0f, 20.0f}) {
        Problem p(4, 32003, dtype, 17, spread);
        p.exp = exp;
        auto params = p.params<rlk::LogprobParams>();
        Result got(p.rows);
        got.point(&params);
        run(params);
        for (std::int64_t i = 0; i < p.rows; ++i) {
          const double T = p.temperature[i];
          double largest = -kInf, magnitude = 0;
          for (std::int64_t j = 0; j < p.columns; ++j) {
            largest = std::max(largest, p.at(i, j) / T);
            magnitude = std::max(magnitude, std::fabs(p.at(i, j) / T));
          }
          double sum = 0, weighted = 0, squares = 0;
          for (std::int64_t j = 0; j < p.columns; ++j) {
            const double e = std::exp(p.at(i, j) / T - largest);
            sum += e;
            weighted += e * (p.at(i, j) / T);
            squares += e * e;
          }
          const double lse = largest + std::log(sum);
          EXPECT_NEAR(got.lse[i], lse, 1e-5 + 4e-7 * magnitude);
          EXPECT_NEAR(got.logprob[i], p.at(i, p.target[i]) / T - lse, 1e-5 + 4e-7 * magnitude);
          EXPECT_NEAR(got.entropy[i], lse - weighted / sum, 2e-5 + 4e-7 * magnitude);
          EXPECT_NEAR(got.sum_p_sq[i], squares / (sum * sum), 1e-5 * squares / (sum * sum));
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Mistakes that a C++ caller may make.
TEST_F(Logprob, EmptyCalls) {
  rlk::LogprobParams p;
  p.vocab_size = p.valid_vocab = 100;
  p.num_columns = 100;
  run(p);  // zero rows
  rlk::LogprobBackwardParams b;
  run_backward(b);
  run_merge({});
  // A part of a tiny vocabulary has no columns.
  const std::int64_t target[] = {0, kIgnore};
  float stats[10];
  p.num_rows = 2;
  p.num_columns = 0;
  p.target = target;
  p.target_rows = {2, 0, 1};
  p.vocab_size = p.valid_vocab = 1;
  p.stats = stats;
  run(p);
  const float want[] = {-kInf, 0, 0, 0, kNaN, -kInf, 0, 0, 0, kInf};
  for (int i = 0; i < 10; ++i) EXPECT_EQ(bits(stats[i]), bits(want[i])) << i;
}

TEST_F(Logprob, ShardsThatAreNotGroupsOfPartsAreRefused) {
  Problem p(1, 1024, DType::kFloat32, 24);
  float stats[5];
  const auto call = [&](std::int64_t start, std::int64_t columns) {
    auto params = p.params<rlk::LogprobParams>();
    params.vocab_start = start;
    params.num_columns = columns;
    params.stats = stats;
    run(params);
  };
  EXPECT_NO_THROW(call(0, 1024));
  EXPECT_NO_THROW(call(256, 256));
  EXPECT_THROW(call(128, 256), rlk::InvalidArgument);  // parts 1 and 2
  EXPECT_THROW(call(0, 384), rlk::InvalidArgument);    // three parts
  EXPECT_THROW(call(0, 1000), rlk::InvalidArgument);
  EXPECT_THROW(call(8, 1016), rlk::InvalidArgument);
  EXPECT_THROW(call(512, 1024), rlk::InvalidArgument);
  EXPECT_THROW(call(-128, 128), rlk::InvalidArgument);
  p.valid_vocab = 1000;
  EXPECT_NO_THROW(call(0, 1000));  // padding need not be in memory
  EXPECT_NO_THROW(call(512, 488));
}

#if defined(__x86_64__) && !RLK_TEST_HIP  // a GPU does not see the caller's rounding modes
TEST_F(Logprob, FlushToZeroOfTheCallerDecidesNothing) {
  Problem p(3, 1500, DType::kFloat32, 25);
  for (std::int64_t j = 0; j < p.columns; ++j) p.set(0, j, static_cast<float>(j % 7) * 0x1p-140f);
  p.temperature[2] = 0x1p120f;
  for (std::int64_t j = 0; j < p.columns; ++j) p.set(2, j, static_cast<float>(j) * 0x1p-10f);
  std::vector<RowOutputs> want;
  for (std::int64_t i = 0; i < p.rows; ++i) want.push_back(reference(p, i));
  auto params = p.params<rlk::LogprobParams>();
  for (const int threads : {1, 3}) {
    rlk::cpu::set_num_threads(threads);
    Result got(p.rows);
    got.point(&params);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    run(params);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & 0xffc0u, (before | 0x8040u) & 0xffc0u);
    for (std::int64_t i = 0; i < p.rows; ++i) expect_row(want[i], got, i, "flush to zero");
  }
}
#endif

}  // namespace
}  // namespace logprob_test
