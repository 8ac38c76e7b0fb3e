// Tests embedding and the gradient of its table bit for bit against a second implementation, written from the contract.
// The backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "embedding_reference.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/embedding.h"

namespace embedding_test {
namespace {

using linear_test::Data;
using linear_test::for_each_backend;
using linear_test::kWholeElements;
using linear_test::Matrix;
using linear_test::name;
using linear_test::Patterns;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

#if RLK_TEST_HIP
constexpr std::int64_t kMostTokens = 8257;  // one block and one group more; each token is a slow fiber
void run(const EmbeddingParams& p) { rlk::hip::embedding(p, 0, 0); }
void run(EmbeddingBackwardParams p) {
  std::vector<std::uint64_t> workspace(
      static_cast<std::size_t>(rlk::hip::embedding_backward_workspace_bytes(p, 0) + 15) / 8, 0xcdcdcdcdcdcdcdcd);
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
  p.workspace = workspace.data() + (address % 16 ? 1 : 0);
  rlk::hip::embedding_backward(p, 0, 0);
}
#else
constexpr std::int64_t kMostTokens = 24577;
void run(const EmbeddingParams& p) { rlk::cpu::embedding(p); }
void run(const EmbeddingBackwardParams& p) { rlk::cpu::embedding_backward(p); }
#endif

enum class Ids { kUniform, kZipf, kOne, kEach };  // kEach: 0, 1, 2, ... repeated

struct Case {
  std::int64_t tokens, rows, columns;
  DType dtype = DType::kBFloat16, id_dtype = DType::kInt64, dweight_dtype = DType::kBFloat16;
  Ids ids = Ids::kZipf;
  bool accumulate = false, bad_ids = false;
  std::int64_t vocab_start = 0, vocab_size = -1;  // -1: the end of the table
  std::int64_t padding_idx = -1;
  std::int64_t pad = 0;  // elements between rows
  std::int64_t inner = 0, id_step = 1;
  std::size_t shift = 0;
  Data data = Data::kNormal;
  unsigned seed = 1;

  std::string text() const {
    return std::string(name(dtype)) + " ids [" + std::to_string(tokens) + "], table [" + std::to_string(rows) + ", " +
           std::to_string(columns) + "] from " + std::to_string(vocab_start) + (accumulate ? " main_grad" : "") + ", " +
           name(data) + ", seed " + std::to_string(seed);
  }
};

// The arrays of a call and its params.
struct Call {
  explicit Call(const Case& c)
      : weight(c.rows, c.columns, c.dtype, c.columns + c.pad, c.shift),
        y(c.tokens, c.columns, c.dtype, c.columns + c.pad, c.shift),
        dy(c.tokens, c.columns, c.dtype, rows_of(c), c.shift),
        dweight(c.rows, c.columns, c.accumulate ? DType::kFloat32 : c.dweight_dtype, c.columns + c.pad, c.shift) {
    weight.fill(c.seed * 10 + 1, c.data);
    dy.fill(c.seed * 10 + 2, c.data);
    if (c.accumulate) dweight.fill(c.seed * 10 + 3, Data::kWide);
    const std::int64_t size = c.vocab_size < 0 ? c.vocab_start + c.rows : c.vocab_size;
    std::mt19937 random(c.seed);
    constexpr std::int64_t kBad[] = {-1, -100, 1 << 30, std::int64_t{1} << 40, -(std::int64_t{1} << 40)};
    wide_ids.assign(static_cast<std::size_t>((c.tokens + 1) * c.id_step), -7);
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      std::int64_t id = 0;
      if (c.ids == Ids::kUniform && size > 0) id = static_cast<std::int64_t>(random() % static_cast<unsigned>(size));
      if (c.ids == Ids::kEach && size > 0) id = t % size;
      if (c.ids == Ids::kZipf && size > 0) {  // id i with a frequency of about 1 / (i + 1)
        const double u = random() / 4294967296.0;
        id = static_cast<std::int64_t>(std::pow(static_cast<double>(size), u)) - 1;
      }
      if (c.bad_ids && random() % 5 == 0) id = random() % 6 == 5 ? size : kBad[random() % 5];
      wide_ids[static_cast<std::size_t>(t * c.id_step)] = id;
    }
    for (const std::int64_t id : wide_ids) {
      narrow_ids.push_back(static_cast<std::int32_t>(id < -100 ? -2 : id > 1 << 30 ? 1 << 30 : id));
    }
    const auto common = [&](EmbeddingTokens* p) {
      p->ids = c.id_dtype == DType::kInt64 ? static_cast<const void*>(wide_ids.data()) : narrow_ids.data();
      p->id_dtype = c.id_dtype;
      p->id_rows = {c.tokens + 1, 0, c.id_step};
      p->num_tokens = c.tokens;
      p->num_rows = c.rows;
      p->columns = c.columns;
      p->vocab_start = c.vocab_start;
      p->vocab_size = size;
    };
    common(&forward);
    forward.weight = weight.data();
    forward.weight_stride = forward.y_stride = c.columns + c.pad;
    forward.dtype = c.dtype;
    common(&backward);
    backward.dy = dy.data();
    backward.dy_rows = dy.rows();
    backward.dweight_stride = c.columns + c.pad;
    backward.padding_idx = c.padding_idx;
    backward.dtype = c.dtype;
    backward.dweight_dtype = dweight.dtype();
    backward.accumulate = c.accumulate;
  }
  static RowLayout rows_of(const Case& c) {
    const std::int64_t step = c.columns + c.pad;
    if (c.inner == 0) return {c.tokens + 1, 0, step};
    return {c.inner, c.inner * step + 8, step};
  }

  Matrix weight, y, dy, dweight;
  std::vector<std::int64_t> wide_ids;
  std::vector<std::int32_t> narrow_ids;
  EmbeddingParams forward;
  EmbeddingBackwardParams backward;
};

Patterns patterns(const Written& written, std::int64_t rows, std::int64_t columns, const Matrix& before) {
  Patterns all;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t k = 0; k < columns; ++k) {
      const auto found = written.find(i * before.stride() + k);
      all.push_back(found == written.end() ? before.at(i, k) : found->second);
    }
  }
  return all;
}

void check(const Case& c) {
  Call call(c);
  const Patterns y = patterns(reference(call.forward), c.tokens, c.columns, call.y);
  call.backward.dweight = call.dweight.data();
  const Patterns dweight = patterns(reference(call.backward), c.rows, c.columns, call.dweight);
  for_each_backend([&](const std::string& backend) {
    Matrix got = call.y, sums = call.dweight;
    EmbeddingParams p = call.forward;
    p.y = got.data();
    run(p);
    ASSERT_NO_FATAL_FAILURE(got.expect(y, c.text() + ", y, " + backend));
    EmbeddingBackwardParams b = call.backward;
    b.dweight = sums.data();
    run(b);
    ASSERT_NO_FATAL_FAILURE(sums.expect(dweight, c.text() + ", dweight, " + backend));
  });
}

class Embedding : public linear_test::Linear {};

// Widths: one column; widths that no vector of a CPU or GPU fits; every short vector of lanes; widths of slices and
// their neighbours.
constexpr std::int64_t kColumns[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 72, 100, 256, 511, 512, 520, 1032};

TEST_F(Embedding, EveryWidthHasTheBitsOfTheContract) {
  unsigned seed = 0;
  for (const DType dtype : kDtypes) {
    for (const std::int64_t columns : kColumns) {
      Case c{150, 37, columns};
      ++seed;
      c.dtype = dtype;
      c.dweight_dtype = seed % 3 == 0 ? DType::kFloat32 : dtype;
      c.id_dtype = seed % 2 == 0 ? DType::kInt32 : DType::kInt64;
      c.accumulate = seed % 4 == 1;
      c.bad_ids = seed % 5 == 2;
      c.pad = seed % 3 == 1 ? 8 : seed % 7 == 0 ? 3 : 0;
      c.inner = seed % 2 == 0 ? 50 : 0;
      c.id_step = seed % 3 == 2 ? 3 : 1;
      c.shift = kWholeElements ? 0 : seed % 3;
      c.seed = seed;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

TEST_F(Embedding, EveryNumberOfTokensAroundGroupsAndBlocks) {
  for (const std::int64_t tokens :
       {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025, 4096, 8191, 8192, 8193, 8257, 16384, 24577}) {
    if (tokens > kMostTokens) continue;
    for (const Ids ids : {Ids::kZipf, Ids::kOne, Ids::kEach}) {
      Case c{tokens, 200, 8};
      c.ids = ids;
      c.dtype = tokens % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
      c.dweight_dtype = c.dtype;
      c.accumulate = ids == Ids::kZipf && tokens % 3 == 0;
      c.seed = static_cast<unsigned>(tokens);
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

TEST_F(Embedding, IdsOfEveryFrequencyTogether) {
  // In stretches of 512 tokens, some ids have fewer than 16 tokens and some have more. A GPU sums rare ids and frequent
  // ids in different ways.
  for (const std::int64_t rows : {2, 20, 40, 300, 5000}) {
    for (const bool accumulate : {false, true}) {
      Case c{std::min<std::int64_t>(20000, kMostTokens), rows, 8};
      c.ids = rows == 40 ? Ids::kUniform : Ids::kZipf;
      c.dtype = DType::kFloat32;
      c.dweight_dtype = DType::kFloat32;
      c.accumulate = accumulate;
      c.data = Data::kWide;
      c.bad_ids = rows == 300;
      c.seed = static_cast<unsigned>(rows);
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

TEST_F(Embedding, EveryExponentEveryKindOfZeroInfinitiesAndNans) {
  for (const DType dtype : kDtypes) {
    for (const Data data : {Data::kWide, Data::kTiny, Data::kSparse, Data::kEqual, Data::kSpecial}) {
      for (const bool accumulate : {false, true}) {
        Case c{700, 9, 40};
        c.dtype = dtype;
        c.dweight_dtype = accumulate ? DType::kFloat32 : dtype;
        c.accumulate = accumulate;
        c.data = data;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Embedding, BadIdsTouchNothingElse) {
  for (const DType dtype : kDtypes) {
    for (const DType ids : {DType::kInt32, DType::kInt64}) {
      for (const std::int64_t columns : {16, 37}) {
        Case c{300, 25, columns};
        c.dtype = c.dweight_dtype = dtype;
        c.id_dtype = ids;
        c.bad_ids = true;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
}

TEST_F(Embedding, ShardsOfAVocabulary) {
  // The last table is padded past the vocabulary.
  for (const std::int64_t start : {0, 25, 75}) {
    for (const std::int64_t size : {100, 90}) {
      for (const bool accumulate : {false, true}) {
        Case c{400, 25, 24};
        c.ids = Ids::kUniform;
        c.vocab_start = start;
        c.vocab_size = size;
        c.bad_ids = true;
        c.padding_idx = start + 3;
        c.accumulate = accumulate;
        ASSERT_NO_FATAL_FAILURE(check(c));
      }
    }
  }
  // Strides far beyond 32 bits.
  Case c{100, 25, 24};
  c.vocab_start = (std::int64_t{1} << 40) - 10;
  c.ids = Ids::kUniform;
  c.vocab_size = (std::int64_t{1} << 40) + 15;
  Call call(c);
  for (std::size_t i = 0; i < 50; ++i) call.wide_ids[i] = c.vocab_start - 2 + static_cast<std::int64_t>(i);
  const Patterns y = patterns(reference(call.forward), c.tokens, c.columns, call.y);
  for_each_backend([&](const std::string& backend) {
    Matrix got = call.y;
    EmbeddingParams p = call.forward;
    p.y = got.data();
    run(p);
    ASSERT_NO_FATAL_FAILURE(got.expect(y, backend));
  });
}

TEST_F(Embedding, APaddingIdHasARowAndNoGradient) {
  for (const Ids ids : {Ids::kZipf, Ids::kOne, Ids::kEach}) {
    Case c{600, 12, 16};
    c.ids = ids;
    c.padding_idx = 0;
    ASSERT_NO_FATAL_FAILURE(check(c));
    c.accumulate = true;
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

TEST_F(Embedding, AShardHasTheRowsOfTheWhole) {
  Case c{3000, 64, 16};
  c.dtype = c.dweight_dtype = DType::kFloat32;
  const Call call(c);
  const auto gradient = [&](std::int64_t start, std::int64_t rows) {
    Matrix dweight(rows, c.columns, DType::kFloat32);
    EmbeddingBackwardParams p = call.backward;
    p.vocab_start = start;
    p.num_rows = rows;
    p.dweight = dweight.data();
    run(p);
    return dweight;
  };
  const Matrix whole = gradient(0, 64);
  for (const std::int64_t start : {0, 16, 48}) {
    const Matrix part = gradient(start, 16);
    for (std::int64_t i = 0; i < 16; ++i) {
      for (std::int64_t k = 0; k < c.columns; ++k) ASSERT_EQ(part.at(i, k), whole.at(start + i, k));
    }
  }
}

TEST_F(Embedding, MicroBatchesOfWholeBlocksLeaveTheBytesOfTheBatch) {
  Case c{3 * 8192, 50, 8};
  c.dtype = DType::kFloat32;
  c.accumulate = true;
  Call call(c);
  Matrix whole = call.dweight, parts = call.dweight;
  EmbeddingBackwardParams p = call.backward;
  p.dweight = whole.data();
  run(p);
  p.dweight = parts.data();
  for (const auto& [first, tokens] : {std::pair<std::int64_t, std::int64_t>{0, 8192}, {8192, 2 * 8192}}) {
    p.num_tokens = tokens;
    p.ids = call.wide_ids.data() + first;
    p.dy = static_cast<const float*>(call.backward.dy) + first * c.columns;
    run(p);
  }
  EXPECT_EQ(whole.memory(), parts.memory());
}

TEST_F(Embedding, TablesOfModels) {
  // Qwen2.5 0.5B; Llama 3 8B's width; and a short table with more tokens than a task has.
  for (const auto& [tokens, rows, columns] :
       {std::array<std::int64_t, 3>{20, 3000, 896}, {6, 100, 4096}, {900, 4, 128}}) {
    Case c{tokens, rows, columns};
    ASSERT_NO_FATAL_FAILURE(check(c));
  }
}

TEST_F(Embedding, NothingToDo) {
  for (const auto& [tokens, rows, columns] :
       std::vector<std::array<std::int64_t, 3>>{{0, 3, 8}, {3, 0, 8}, {3, 2, 0}, {0, 0, 0}, {0, 5, 33}}) {
    for (const bool accumulate : {false, true}) {
      Case c{tokens, rows, columns};
      c.accumulate = accumulate;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

TEST_F(Embedding, WhatWouldCorruptMemoryIsRefused) {
  Call right(Case{2, 3, 16});
  const auto refuses = [&](const auto& spoil) {
    EmbeddingParams p = right.forward;
    p.y = right.y.data();
    spoil(p);
    EXPECT_THROW(run(p), rlk::InvalidArgument);
  };
  refuses([](EmbeddingParams& p) { p.num_tokens = -1; });
  refuses([](EmbeddingParams& p) { p.num_rows = std::int64_t{1} << 31; });
  refuses([](EmbeddingParams& p) { p.columns = -1; });
  refuses([](EmbeddingParams& p) { p.ids = nullptr; });
  refuses([](EmbeddingParams& p) { p.weight = nullptr; });
  refuses([](EmbeddingParams& p) { p.y = nullptr; });
  refuses([](EmbeddingParams& p) { p.id_dtype = DType::kFloat32; });
  refuses([](EmbeddingParams& p) { p.dtype = DType::kInt32; });
  refuses([](EmbeddingParams& p) { p.vocab_start = -1; });
  refuses([](EmbeddingParams& p) { p.vocab_start = INT64_MAX; });
  refuses([](EmbeddingParams& p) { p.id_rows.inner = 0; });
  const auto refuses_backward = [&](const auto& spoil) {
    EmbeddingBackwardParams p = right.backward;
    p.dweight = right.dweight.data();
    spoil(p);
    EXPECT_THROW(run(p), rlk::InvalidArgument);
  };
  refuses_backward([](EmbeddingBackwardParams& p) { p.dy = nullptr; });
  refuses_backward([](EmbeddingBackwardParams& p) { p.dweight = nullptr; });
  refuses_backward([](EmbeddingBackwardParams& p) { p.dweight_dtype = DType::kFloat16; });
  refuses_backward([](EmbeddingBackwardParams& p) { p.accumulate = true; });
  refuses_backward([](EmbeddingBackwardParams& p) { p.padding_idx = -2; });
  refuses_backward([](EmbeddingBackwardParams& p) { p.dy_rows.inner = 0; });
}

}  // namespace
}  // namespace embedding_test
