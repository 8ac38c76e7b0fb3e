// Tests group_advantage bit for bit against a second implementation, written from the contract. The backend is the CPU
// or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "group_advantage_reference.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/group_advantage.h"

namespace group_advantage_test {
namespace {

using linear_test::for_each_backend;
using rlk::DType;

void run(GroupAdvantageParams p) {
#if RLK_TEST_HIP
  std::vector<std::int64_t> workspace(static_cast<std::size_t>(rlk::hip::group_advantage_workspace_bytes(p, 0) / 8 + 1),
                                      -1);
  p.workspace = workspace.data();
  rlk::hip::group_advantage(p, 0, 0);
#else
  rlk::cpu::group_advantage(p);
#endif
}

#if RLK_TEST_HIP
constexpr int kVariantStep = 5;  // few variants, since the emulation is slow
#else
constexpr int kVariantStep = 1;
#endif

enum class By { kOffsets, kSize, kIds };

struct Case {
  std::vector<std::int64_t> sizes;  // sizes of the groups
  By by = By::kOffsets;
  GroupBaseline baseline = GroupBaseline::kMean;
  GroupScale scale = GroupScale::kGroup;
  GroupAlone alone = GroupAlone::kScore;
  bool leave_one_out = false, best_only = false, by_nonzero = false, exclude_nan = false;
  bool special = false, binary = false;
  float size = 1.0f;  // scale of the rewards
  DType index_dtype = DType::kInt64, length_dtype = DType::kInt64;
  unsigned seed = 1;
};

std::uint32_t bits(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

// The inputs of sequences are `stride` elements apart.
template <class T>
std::vector<T> spread(const std::vector<float>& values, std::int64_t stride) {
  std::vector<T> memory(values.size() * static_cast<std::size_t>(stride), static_cast<T>(77));
  for (std::size_t i = 0; i < values.size(); ++i)
    memory[i * static_cast<std::size_t>(stride)] = static_cast<T>(values[i]);
  return memory;
}

void expect_contract(const Case& c, const std::string& where) {
  std::mt19937 random(c.seed);
  const std::int64_t num = std::accumulate(c.sizes.begin(), c.sizes.end(), std::int64_t{0});
  const std::int64_t stride = 1 + c.seed % 3;
  Inputs in;
  std::normal_distribution<float> normal;
  constexpr float kSpecial[] = {0.0f, -0.0f, 1e-38f, 1e30f, INFINITY, -INFINITY, NAN};
  for (std::int64_t i = 0; i < num; ++i) {
    float s = c.binary ? static_cast<float>(random() % 2) * 0.1f : c.size * normal(random);
    if (c.special && random() % 8 == 0) s = kSpecial[random() % 7];
    in.rewards.push_back(s);
    in.lengths.push_back(static_cast<float>(random() % 3 == 0 ? 0 : random() % 9000));
    in.baseline.push_back(normal(random));
  }
  std::vector<std::int64_t> order(static_cast<std::size_t>(num)), ids(static_cast<std::size_t>(num)), offsets{0};
  std::iota(order.begin(), order.end(), std::int64_t{0});
  if (c.by == By::kIds) std::shuffle(order.begin(), order.end(), random);
  std::int64_t at = 0;
  for (std::size_t g = 0; g < c.sizes.size(); ++g) {
    std::vector<std::int64_t> members(order.begin() + at, order.begin() + at + c.sizes[g]);
    std::sort(members.begin(), members.end());
    for (const std::int64_t m : members) ids[static_cast<std::size_t>(m)] = 1000 - 7 * static_cast<std::int64_t>(g);
    in.groups.push_back(members);
    at += c.sizes[g];
    offsets.push_back(at);
  }
  const std::vector<std::int32_t> ids32(ids.begin(), ids.end()), offsets32(offsets.begin(), offsets.end());
  const std::vector<float> rewards = spread<float>(in.rewards, stride), baseline = spread<float>(in.baseline, stride);
  const std::vector<float> lengths = spread<float>(in.lengths, stride);
  const std::vector<std::int32_t> lengths32 = spread<std::int32_t>(in.lengths, stride);
  const std::vector<std::int64_t> lengths64 = spread<std::int64_t>(in.lengths, stride);

  GroupAdvantageParams p;
  p.rewards = rewards.data();
  p.baseline = baseline.data();
  p.lengths = c.length_dtype == DType::kFloat32 ? static_cast<const void*>(lengths.data())
              : c.length_dtype == DType::kInt32 ? static_cast<const void*>(lengths32.data())
                                                : lengths64.data();
  p.reward_stride = p.baseline_stride = p.length_stride = stride;
  p.num_sequences = num;
  p.index_dtype = c.index_dtype;
  p.length_dtype = c.length_dtype;
  const bool wide = c.index_dtype == DType::kInt64;
  if (c.by == By::kIds) {
    p.group_ids = wide ? static_cast<const void*>(ids.data()) : ids32.data();
  } else if (c.by == By::kOffsets) {
    p.group_offsets = wide ? static_cast<const void*>(offsets.data()) : offsets32.data();
    p.num_groups = static_cast<std::int64_t>(c.sizes.size());
  } else {
    p.group_size = c.sizes.empty() ? 1 : c.sizes[0];
  }
  p.baseline_kind = c.baseline;
  p.scale = c.scale;
  p.alone = c.alone;
  p.leave_one_out = c.leave_one_out;
  p.best_only = c.best_only;
  p.by_nonzero = c.by_nonzero;
  p.exclude_nan = c.exclude_nan;
  p.f_norm = 1.7f;
  constexpr float kCanary = -12345.0f;
  std::vector<float> advantage(static_cast<std::size_t>(num + 2), kCanary), mean = advantage, std = advantage;
  std::vector<std::int32_t> status(static_cast<std::size_t>(num + 2), -99);
  p.advantage = &advantage[1];
  if (c.seed % 2 == 0) {
    p.mean = &mean[1];
    p.std = &std[1];
    p.status = &status[1];
  }
  run(p);
  const Outputs want = reference(p, in);
  for (std::size_t i = 0; i < static_cast<std::size_t>(num); ++i) {
    const std::string what = where + "seed " + std::to_string(c.seed) + ", sequence " + std::to_string(i);
    ASSERT_EQ(bits(want.advantage[i]), bits(advantage[i + 1]))
        << what << ": wanted " << want.advantage[i] << ", got " << advantage[i + 1];
    if (p.mean == nullptr) continue;
    ASSERT_EQ(bits(want.mean[i]), bits(mean[i + 1])) << what << ": " << want.mean[i] << ", got " << mean[i + 1];
    ASSERT_EQ(bits(want.std[i]), bits(std[i + 1])) << what << ": " << want.std[i] << ", got " << std[i + 1];
    ASSERT_EQ(want.status[i], status[i + 1]) << what;
  }
  for (const std::vector<float>* a : {&advantage, &mean, &std}) {
    ASSERT_EQ(a->front(), kCanary);
    ASSERT_EQ(a->back(), kCanary);
  }
}

// Groups of one and two members; groups of rollouts; sizes around one chunk and several; empty groups.
const std::vector<std::vector<std::int64_t>> kSizes = {
    {1}, {2, 1, 3}, {8, 8, 8, 8}, {127, 1, 128, 129}, {0, 5, 0, 700, 0}, {16, 2, 1, 1, 40, 0, 9}, {5, 5, 5}};

TEST(GroupAdvantage, EveryOutputHasTheBitsOfTheContract) {
  for_each_backend([](const std::string& where) {
    unsigned seed = 0;
    for (const auto& sizes : kSizes) {
      for (const By by : {By::kOffsets, By::kSize, By::kIds}) {
        if (by == By::kSize && !std::equal(sizes.begin() + 1, sizes.end(), sizes.begin())) continue;
        for (int variant = 0; variant < 16; variant += kVariantStep) {
          Case c{sizes, by};
          c.seed = ++seed;
          c.baseline = static_cast<GroupBaseline>((variant + 1) % 5);
          c.scale = static_cast<GroupScale>((seed / 3) % 3);
          c.alone = variant & 2 ? GroupAlone::kZero : GroupAlone::kScore;
          c.leave_one_out = seed % 5 == 0 && c.baseline != GroupBaseline::kBatchMean;
          c.best_only = c.baseline == GroupBaseline::kMean && seed % 7 == 1;
          c.by_nonzero = seed % 11 == 0;
          c.exclude_nan = variant & 1;
          c.special = variant & 4;
          c.binary = variant & 8;
          c.index_dtype = seed % 2 ? DType::kInt32 : DType::kInt64;
          constexpr DType kLengths[] = {DType::kInt64, DType::kInt32, DType::kFloat32};
          c.length_dtype = kLengths[seed % 3];
          expect_contract(c, where);
        }
      }
    }
  });
}

TEST(GroupAdvantage, ABatchOfManyChunks) {
  for_each_backend([](const std::string& where) {
    for (const bool special : {false, true}) {
      Case c{std::vector<std::int64_t>(300, 16)};  // more chunks than a block has teams
      c.scale = GroupScale::kBatch;
      c.by_nonzero = true;
      c.special = c.exclude_nan = special;
      c.seed = 2;
      expect_contract(c, where);
    }
  });
}

TEST(GroupAdvantage, EverySizeOfRewardsHasTheBitsOfTheContract) {
  for_each_backend([](const std::string& where) {
    unsigned seed = 50;
    for (const float size : {0x1p-146f, 0x1p-126f, 1e-30f, 1e-20f, 1e10f, 1e20f, 1e30f, 0x1p+120f, 0x1p+125f}) {
      for (const GroupScale scale : {GroupScale::kNone, GroupScale::kGroup, GroupScale::kBatch}) {
        for (int baseline = 0; baseline < 5; ++baseline) {
          Case c{{8, 1, 130, 3}, By::kOffsets, static_cast<GroupBaseline>(baseline), scale};
          c.seed = ++seed;
          c.size = size;
          c.best_only = baseline == 1 && seed % 2 == 0;
          c.leave_one_out = seed % 3 == 0 && c.baseline != GroupBaseline::kBatchMean;
          c.special = c.exclude_nan = seed % 4 == 0;
          expect_contract(c, where);
        }
      }
    }
  });
}

TEST(GroupAdvantage, EqualRewardsGiveExactlyZero) {
  std::vector<float> rewards(21, 0.1f), advantage(21, -1.0f), std(21, -1.0f);
  std::vector<std::int32_t> status(21);
  for (const std::int64_t size : {3, 7, 21}) {
    GroupAdvantageParams p;
    p.rewards = rewards.data();
    p.advantage = advantage.data();
    p.std = std.data();
    p.status = status.data();
    p.num_sequences = 21;
    p.group_size = size;
    run(p);
    for (int i = 0; i < 21; ++i) {
      EXPECT_EQ(bits(advantage[i]), 0u);
      EXPECT_EQ(std[i], 0.0f);
      EXPECT_EQ(status[i], rlk::kGroupConstant);
    }
  }
}

TEST(GroupAdvantage, AnEmptyBatchTouchesNothing) { run(GroupAdvantageParams()); }

#if !RLK_TEST_HIP
TEST(GroupAdvantage, OffsetsOutOfOrderAreRefusedBeforeAnythingIsWritten) {
  const std::vector<std::vector<std::int64_t>> wrong = {{1, 2, 4}, {0, 3, 2}, {0, 2, 5}, {0, 2, 3}};
  for (const auto& offsets : wrong) {
    std::vector<float> rewards(4, 1.0f), advantage(4, -1.0f);
    GroupAdvantageParams p;
    p.rewards = rewards.data();
    p.advantage = advantage.data();
    p.num_sequences = 4;
    p.group_offsets = offsets.data();
    p.num_groups = 2;
    EXPECT_THROW(run(p), rlk::InvalidArgument);
    EXPECT_EQ(advantage, std::vector<float>(4, -1.0f));
  }
}
#endif

}  // namespace
}  // namespace group_advantage_test
