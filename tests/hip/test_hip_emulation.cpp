// Tests the wave64 emulation itself: data that lanes exchange, its refusals, and matrix tiles against the model.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "hip_tiles.hip"

namespace {

using namespace rlk::hip;  // NOLINT: the kernels' vocabulary
using emulation::Launch;
using emulation::Order;

constexpr Order kOrders[] = {Order::kForward, Order::kBackward, Order::kShuffled};

TEST(HipEmulation, LanesSeeEachOther) {
  for (const Order order : kOrders) {
    std::vector<int> swapped(2 * 128), votes(2 * 128);
    Launch how{.blocks_x = 2, .threads = 128, .order = order, .host_threads = 2};
    emulation::launch(how, [&] {
      const int thread = thread_id(), at = block_id_x() * 128 + thread;
      swapped[at] = shuffle_xor(thread, 5);
      const std::uint64_t odd = ballot(thread % 2 == 1);
      votes[at] = odd == 0xaaaaaaaaaaaaaaaaull && any(thread % kWave == 63) && !any(false);
    });
    for (int i = 0; i < 256; ++i) {
      EXPECT_EQ(swapped[i], (i % 128) ^ 5);
      EXPECT_EQ(votes[i], 1);
    }
  }
}

TEST(HipEmulation, BarriersOrderTheWavesOfABlock) {
  for (const Order order : kOrders) {
    std::vector<int> seen(256);
    Launch how{.threads = 256, .lds_bytes = 256 * sizeof(int), .order = order};
    emulation::launch(how, [&] {
      auto* words = reinterpret_cast<int*>(lds());
      const int thread = thread_id();
      words[thread] = thread;
      block_barrier();
      seen[thread] = words[255 - thread];
    });
    for (int i = 0; i < 256; ++i) EXPECT_EQ(seen[i], 255 - i);
  }
}

// Without a barrier, some order of waves reads the earlier contents of LDS, which are NaN.
TEST(HipEmulation, AMissingBarrierShows) {
  int wrong = 0;
  for (const Order order : kOrders) {
    std::vector<float> seen(128);
    Launch how{.threads = 128, .lds_bytes = 128 * sizeof(float), .order = order};
    emulation::launch(how, [&] {
      auto* words = reinterpret_cast<float*>(lds());
      words[thread_id()] = 1.0f;
      seen[thread_id()] = words[127 - thread_id()];
    });
    for (float x : seen) wrong += std::isnan(x);
  }
  EXPECT_GT(wrong, 0);
}

void meet_on_two_lines() {
  if (thread_id() % 2 == 0) {
    block_barrier();
  } else {
    block_barrier();  // the same call on another line counts as another barrier
  }
}

TEST(HipEmulationDeath, LanesThatPartAbortWithTheirLines) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(emulation::launch({.threads = 64},
                                 [] {
                                   if (thread_id() < 32) shuffle_xor(1, 1);
                                 }),
               "lanes part ways.*\n.*shuffle_xor at .*test_hip_emulation.cpp:[0-9]+\n.*kernel's end");
  EXPECT_DEATH(emulation::launch({.threads = 128},
                                 [] {
                                   if (thread_id() < 64) block_barrier();
                                 }),
               "lanes part ways.*\n.*block_barrier");
  EXPECT_DEATH(emulation::launch({.threads = 64}, meet_on_two_lines), "lanes part ways");
  EXPECT_DEATH(emulation::launch({.threads = 48}, [] {}), "want whole waves");
}

#if defined(__SANITIZE_ADDRESS__)
// What surrounds an array on a lane's stack stays poisoned while other lanes run.
TEST(HipEmulationDeath, AWriteBeyondAnArrayOfALaneIsSeenAfterAnOperation) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(emulation::launch({.threads = 64},
                                 [] {
                                   int own[4] = {};
                                   int* volatile words = own;  // the compiler does not know how many
                                   shuffle_xor(1, 1);
                                   words[4] = 1;
                                 }),
               "stack-buffer-overflow");
}

// Lanes of the next launch run on the same stacks.
TEST(HipEmulation, AStackIsUsedAgainWithoutTheLastLanesPoison) {
  const auto deep = [](int bytes) {
    emulation::launch({.threads = 64}, [&] {
      auto* own = static_cast<unsigned char*>(__builtin_alloca(static_cast<std::size_t>(bytes)));
      for (int i = 0; i < bytes; ++i) const_cast<volatile unsigned char*>(own)[i] = 1;
      shuffle_xor(1, 1);
    });
  };
  for (const int bytes : {8, 40, 1000, 8, 40}) deep(bytes);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// A tile against the model's dot products.
template <class Kernel>
void check_tile(Kernel kernel, rlk::DType type, int size, rlk::MmaUnit unit) {
  constexpr int kK = 80;
  const int columns = 2 * size;
  std::mt19937 random(static_cast<unsigned>(size) + static_cast<unsigned>(type));
  std::normal_distribution<float> normal(0.0f, 3.0f);
  const auto fill = [&](std::vector<std::uint16_t>& v) {
    for (auto& x : v) x = type == rlk::DType::kBFloat16 ? rlk::bf16_rn(normal(random)) : rlk::f16_rn(normal(random));
  };
  std::vector<std::uint16_t> a(size * kK), b(columns * kK);
  fill(a);
  fill(b);
  for (const Order order : kOrders) {
    std::vector<float> c(size * columns);
    Launch how{.threads = kTileThreads,
               .lds_bytes = static_cast<std::size_t>(3 * size * kTileK) * sizeof(std::uint16_t),
               .order = order,
               .unit = unit};
    emulation::launch(how, [&] { kernel(a.data(), b.data(), c.data(), kK); });
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < columns; ++j) {
        const float want = rlk::mma_dot(unit, type, &a[i * kK], &b[j * kK], kK);
        ASSERT_EQ(rlk::bits_of(want), rlk::bits_of(c[i * columns + j])) << i << ", " << j;
      }
    }
  }
}

TEST(HipEmulation, MatrixTilesHaveTheBitsOfTheModel) {
  for (const auto unit : {rlk::MmaUnit::kGfx90a, rlk::MmaUnit::kGfx942}) {
    check_tile(tile_bf16_32, rlk::DType::kBFloat16, 32, unit);
    check_tile(tile_bf16_16, rlk::DType::kBFloat16, 16, unit);
    check_tile(tile_f16_32, rlk::DType::kFloat16, 32, unit);
    check_tile(tile_f16_16, rlk::DType::kFloat16, 16, unit);
  }
}

}  // namespace
