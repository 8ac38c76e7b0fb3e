// Tests linear_sample on the CPU, or with RLK_TEST_HIP on HIP's stand-in. The operator must equal the CPU's sample of
// the CPU's linear in the device's arithmetic, bit for bit, in any workspace.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "rlk/ops/linear_sample.h"

namespace rlk {
namespace {

#if RLK_TEST_HIP
constexpr Device kDevice{DeviceType::kRocm, 0};
constexpr Arithmetic kArithmetic = Arithmetic::kGfx942;
#else
constexpr Device kDevice{DeviceType::kCpu, 0};
constexpr Arithmetic kArithmetic = Arithmetic::kIeee;
#endif

struct Case {
  std::int64_t rows, features, columns, valid;
  DType logits = DType::kFloat32;
  bool bias = false, of_rows = true;  // of_rows: parameters per row, otherwise one for all rows
};

struct Outputs {
  std::vector<std::int64_t> ids;
  std::vector<float> logprob, raw;
  std::vector<std::int32_t> status;
  explicit Outputs(std::int64_t rows) : ids(rows, -7), logprob(rows, -7.0f), raw(rows, -7.0f), status(rows, -7) {}
  void give(SampleParams* p) {
    p->ids = ids.data();
    p->logprob = logprob.data();
    p->raw_logprob = raw.data();
    p->status = status.data();
  }
  bool operator==(const Outputs& b) const {
    const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
      return std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
    };
    return ids == b.ids && status == b.status && same(logprob, b.logprob) && same(raw, b.raw);
  }
};

// Operands and parameters all differ and have their own strides.
struct Problem {
  Case c;
  std::vector<std::uint16_t> hidden, weight, bias;
  std::vector<float> temperature, min_p;
  std::vector<std::int64_t> top_k, seed, position;
  std::vector<std::int32_t> sample_id;
  std::vector<std::uint8_t> greedy;
  std::int64_t x_stride;
  LinearSampleParams p;

  explicit Problem(const Case& given) : c(given), x_stride(c.features + 8) {
    std::mt19937 random(static_cast<unsigned>(c.rows * 31 + c.columns));
    std::normal_distribution<float> normal(0.0f, std::sqrt(3.0f / std::sqrt(static_cast<float>(c.features))));
    for (std::int64_t i = 0; i < c.rows * x_stride; ++i) hidden.push_back(bf16_rn(normal(random)));
    for (std::int64_t i = 0; i < c.columns * c.features; ++i) weight.push_back(bf16_rn(normal(random)));
    for (std::int64_t i = 0; i < c.columns; ++i) bias.push_back(bf16_rn(normal(random)));
    for (std::int64_t i = 0; i < 6 * c.rows; ++i) {
      temperature.push_back(0.5f + 0.25f * static_cast<float>(random() % 5));
      min_p.push_back(random() % 2 == 0 ? 0.0f : 0.04f);
      top_k.push_back(static_cast<std::int64_t>(random() % 66));  // 65 is rejected
      seed.push_back(static_cast<std::int64_t>(random()) - (1 << 30));
      position.push_back(static_cast<std::int64_t>(random() % 1000) - 20);  // some are rejected
      sample_id.push_back(static_cast<std::int32_t>(random() % 99));
      greedy.push_back(random() % 4 == 0);
    }
    LinearParams& l = p.product;
    l.x = hidden.data();
    l.x_rows = {c.rows, 0, x_stride};
    l.weight = weight.data();
    l.weight_stride = c.features;
    l.bias = c.bias ? bias.data() : nullptr;
    l.num_rows = c.rows;
    l.in_features = c.features;
    l.out_features = c.columns;
    l.out_dtype = c.logits;
    l.arithmetic = kArithmetic;
    SampleParams& s = p.draw;
    s.valid_vocab = c.valid;
    s.top_p.value = 1.0f;
    if (c.of_rows) {
      s.temperature = {temperature.data(), 0.0f, 2};
      s.min_p = {min_p.data(), 0.0f, 3};
      s.top_k = {top_k.data(), 0, 4, DType::kInt64};
      s.seed = {seed.data(), 0, 5, DType::kInt64};
      s.sample_id = {sample_id.data(), 0, 6, DType::kInt32};
      s.position = {position.data(), 0, 1, DType::kInt64};
      s.is_greedy = greedy.data();
      s.greedy_stride = 2;
    } else {
      s.temperature.value = 0.75f;
      s.top_k.value = 20;
      s.seed.value = 9;
    }
  }

  // Results of the CPU's two operators.
  Outputs composed() const {
    std::vector<unsigned char> logits(static_cast<std::size_t>(c.rows * c.columns * size_of(c.logits)));
    LinearParams l = p.product;
    l.y = logits.data();
    l.y_rows = {c.rows, 0, c.columns};
    cpu::linear(l);
    SampleParams s = p.draw;
    s.logits = logits.data();
    s.dtype = c.logits;
    s.logits_stride = s.vocab_size = c.columns;
    s.num_rows = c.rows;
    s.most_top_k = kLinearSampleTopK;
    Outputs found(c.rows);
    found.give(&s);
    cpu::sample(s);
    return found;
  }
};

class LinearSample : public testing::TestWithParam<Case> {};

TEST_P(LinearSample, IsSampleOfLinearInAnyWorkspace) {
  Problem problem(GetParam());
  const Outputs want = problem.composed();
  EXPECT_TRUE(std::ranges::count(want.status, 0) > 0);
  LinearSampleParams p = problem.p;
  Outputs got(problem.c.rows);
  got.give(&p.draw);
  const WorkspaceRange range = linear_sample_workspace(p, kDevice);
  ASSERT_LT(0, range.least);
  ASSERT_LE(range.least, range.most);
  std::vector<unsigned char> memory(static_cast<std::size_t>(range.most) + 512);
  const auto first = reinterpret_cast<std::uintptr_t>(memory.data());
  p.workspace = memory.data() + (256 - first % 256) % 256;
  for (const std::int64_t part : {0, 5, 16}) {  // sizes: least + part / 16 * (most - least)
    p.workspace_bytes = range.least + (range.most - range.least) * part / 16;
    SCOPED_TRACE(p.workspace_bytes);
    constexpr unsigned char kCanary = 0x5a;  // the bytes after the workspace must keep this value
    unsigned char* const end = static_cast<unsigned char*>(p.workspace) + p.workspace_bytes;
    std::fill(end, memory.data() + memory.size(), kCanary);
    got = Outputs(problem.c.rows);
    got.give(&p.draw);
    linear_sample(p, kDevice, 0);
    EXPECT_TRUE(got == want);
    EXPECT_TRUE(std::all_of(end, memory.data() + memory.size(), [](unsigned char c) { return c == kCanary; }));
  }
  p.workspace_bytes = range.least - 1;
  EXPECT_THROW(linear_sample(p, kDevice, 0), InvalidArgument);
}

// Cases: one column; a leaf and some columns; several leaves per part; more rows than one pass takes.
INSTANTIATE_TEST_SUITE_P(Cases, LinearSample,
                         testing::Values(Case{3, 16, 1, 1}, Case{9, 40, 130, 120, DType::kBFloat16, true},
                                         Case{9, 40, 130, 130, DType::kFloat32, true, false},
                                         Case{5, 72, 1500, 1499, DType::kBFloat16}, Case{140, 16, 200, 200}));

TEST(LinearSample, RefusesWhatItDoesNotHave) {
  Problem problem({3, 32, 20, 20});
  Outputs got(3);
  std::vector<unsigned char> memory(1 << 16);
  LinearSampleParams p = problem.p;
  got.give(&p.draw);
  p.workspace = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256) % 256;
  p.workspace_bytes = linear_sample_workspace(p, kDevice).most;
  ASSERT_LE(p.workspace_bytes, (1 << 16) - 256);
  linear_sample(p, kDevice, 0);
  const auto refused = [&](auto change) {
    LinearSampleParams q = p;
    change(&q);
    EXPECT_THROW(linear_sample(q, kDevice, 0), InvalidArgument);
  };
  std::vector<std::int64_t> offsets(4);
  refused([](LinearSampleParams* q) { q->draw.top_p.value = 0.9f; });
  refused([&](LinearSampleParams* q) { q->draw.kept_offsets = offsets.data(); });
  refused([&](LinearSampleParams* q) { q->draw.row_status = got.status.data(); });
  refused([](LinearSampleParams* q) { q->draw.n_logprobs = 1; });
  refused([](LinearSampleParams* q) { q->product.out_features = 0; });
  refused([](LinearSampleParams* q) { q->product.k_segments = 2; });
  refused([](LinearSampleParams* q) { q->product.x_rows.inner = 2; });
  refused([](LinearSampleParams* q) { q->product.out_dtype = DType::kFloat16; });
  refused([](LinearSampleParams* q) { q->workspace = static_cast<unsigned char*>(q->workspace) + 4; });
  LinearSampleParams none = p;
  none.product.num_rows = 0;
  none.workspace = nullptr;
  none.workspace_bytes = 0;
  linear_sample(none, kDevice, 0);
}

}  // namespace
}  // namespace rlk
