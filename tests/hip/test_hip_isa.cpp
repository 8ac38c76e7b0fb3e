// Tests the instruction emulator hip/emulation/isa: its arithmetic against the host's, waves in every order, and
// kernels with faults, each of which it must report.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

extern "C" {
int hipModuleLoadData(void** module, const void* image);
int hipModuleGetFunction(void** function, void* module, const char* name);
int hipModuleLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                          void**, void**);
}

namespace {

constexpr int kLaunchFailure = 719;

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream all;
  all << file.rdbuf();
  return all.str();
}

class IsaEmulation : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    log_ = testing::TempDir() + "rlk_isa_" + GetParam() + std::to_string(getpid()) + ".log";
    setenv("RLK_STANDIN_ARCH", GetParam(), 1);
    setenv("RLK_STANDIN_ORDER", "forward", 1);
    setenv("RLK_ISA_LOG", log_.c_str(), 1);
    static const std::string bundle = read(RLK_ISA_KERNELS);
    ASSERT_EQ(hipModuleLoadData(&module_, bundle.data()), 0);
  }
  void TearDown() override { std::remove(log_.c_str()); }

  template <class... Args>
  int launch(const char* kernel, unsigned blocks, Args... args) {
    void *function = nullptr, *pointers[] = {&args...};
    EXPECT_EQ(hipModuleGetFunction(&function, module_, kernel), 0) << kernel;
    return hipModuleLaunchKernel(function, blocks, 1, 1, 128, 1, 1, 0, nullptr, pointers, nullptr);
  }
  std::string log() const { return read(log_); }

 private:
  std::string log_;
  void* module_ = nullptr;
};

std::uint32_t bits(float x) { return std::isnan(x) ? 0x7fc00000 : __builtin_bit_cast(std::uint32_t, x); }

TEST_P(IsaEmulation, FloatsAreTheHosts) {
  constexpr int n = 20000;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> a(n), b(n), out(10 * n);
  for (int i = 0; i < n; ++i) {
    a[i] = i < 5000 ? normal(random) : __builtin_bit_cast(float, static_cast<std::uint32_t>(random()));
    b[i] = i < 5000 ? normal(random) : __builtin_bit_cast(float, static_cast<std::uint32_t>(random()));
    if (i >= 5000 && i < 9000) b[i] = a[i] * std::exp2(normal(random));  // a quotient near 1 of any exponents
    if (i >= 9000 && i < 9500) a[i] = normal(random) * 1e-39f;           // denormal
    if (i >= 9500 && i < 9600) a[i] = i % 2 ? 0.0f : -0.0f, b[i] = i % 3 ? 0.0f : -0.0f;
  }
  ASSERT_EQ(launch("isa_floats", (n + 127) / 128, a.data(), b.data(), out.data(), n), 0);
  const std::function<float(float, float)> want[] = {
      [](float x, float y) { return x / y; },
      [](float x, float) { return std::sqrt(x); },
      [](float x, float y) { return std::fma(x, y, x); },
      [](float x, float) { return static_cast<float>(static_cast<_Float16>(x)); },
      [](float x, float) { return std::nearbyint(x); },
      [](float, float y) { return std::floor(y); },
      [](float x, float y) { return x * y; },
      [](float x, float y) { return x + y; },
      [](float x, float y) { return static_cast<float>(static_cast<double>(x) * y + 1.0); },
      [](float x, float y) {
        if (std::isnan(x) || std::isnan(y)) return std::isnan(x) ? y : x;
        return x < y || (x == y && std::signbit(x)) ? x : y;
      },
  };
  for (int k = 0; k < 10; ++k) {
    for (int i = 0; i < n; ++i) {
      ASSERT_EQ(bits(out[k * n + i]), bits(want[k](a[i], b[i]))) << "operation " << k << " of " << a[i] << ", " << b[i];
    }
  }
}

TEST_P(IsaEmulation, IntegersAreTheHosts) {
  using i64 = std::int64_t;
  using u64 = std::uint64_t;
  constexpr int n = 20000;
  std::mt19937_64 random(2);
  std::vector<i64> a(n), b(n), out(9 * n);
  for (int i = 0; i < n; ++i) {
    a[i] = static_cast<i64>(random()) >> (random() % 63);
    b[i] = static_cast<i64>(random()) >> (random() % 63);
  }
  ASSERT_EQ(launch("isa_integers", (n + 127) / 128, a.data(), b.data(), out.data(), n), 0);
  for (int i = 0; i < n; ++i) {
    const i64 x = a[i], y = b[i] | 1;
    const int narrow = static_cast<int>(y) | 1, by = static_cast<int>(y & 63);
    const i64 want[] = {
        x / y,
        x % y,
        static_cast<i64>(static_cast<u64>(x) * static_cast<u64>(y)),
        static_cast<i64>(static_cast<u64>(x) >> by),
        x >> by,
        __builtin_popcountll(x) + 100 * __builtin_clzll(x | 1) + 10000 * __builtin_ctzll(x | 1ll << 62),
        static_cast<int>(x) / narrow,
        static_cast<std::uint32_t>(x) % static_cast<std::uint32_t>(narrow),
        static_cast<unsigned char>(x >> 8) * static_cast<short>(y) + static_cast<signed char>(x >> 16),
    };
    for (int k = 0; k < 9; ++k) ASSERT_EQ(out[k * n + i], want[k]) << "operation " << k << " of " << x << ", " << y;
  }
}

TEST_P(IsaEmulation, WavesMeetInEveryOrder) {
  constexpr int n = 1000, blocks = 8;
  std::mt19937 random(3);
  std::vector<int> a(blocks * 128);
  for (int i = 0; i < n; ++i) a[i] = static_cast<int>(random() % 2000) - 1000;
  std::vector<int> reversed(a.size()), sums(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) reversed[i] = a[i / 64 * 64 + 63 - i % 64];
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (int k = 0; k < (reversed[i] & 31); ++k) sums[i] += k ^ reversed[i];
  }
  for (const char* order : {"forward", "backward", "shuffled"}) {
    setenv("RLK_STANDIN_ORDER", order, 1);
    std::vector<int> out(3 * n + 1);
    ASSERT_EQ(launch("isa_waves", blocks, a.data(), out.data(), n), 0);
    for (int i = 0; i < n; ++i) {
      EXPECT_EQ(out[i], sums[i / 128 * 128 + 127 - i % 128]);
      for (int half = 0; half < 2; ++half) {
        unsigned votes = 0;
        for (int l = 0; l < 32; ++l) votes |= static_cast<unsigned>(reversed[i / 64 * 64 + 32 * half + l] & 1) << l;
        EXPECT_EQ(static_cast<unsigned>(out[(1 + half) * n + i]), votes);
      }
    }
    EXPECT_EQ(out[3 * n], std::accumulate(reversed.begin(), reversed.begin() + n, 0));
  }
  EXPECT_EQ(log().find("FAULT"), std::string::npos) << log();
}

TEST_P(IsaEmulation, FaultsAreReported) {
  std::vector<int> out(4096);
  EXPECT_EQ(launch("isa_without_barrier", 1, out.data()), 0);
  EXPECT_NE(log().find("FAULT LDS RACE write-read | isa_without_barrier"), std::string::npos) << log();
  EXPECT_EQ(launch("isa_blocks_meet", 3, out.data()), 0);
  EXPECT_NE(log().find("FAULT GLOBAL RACE write-write | isa_blocks_meet"), std::string::npos) << log();
  EXPECT_NE(log().find("FAULT LANES OF ONE STORE MEET | isa_blocks_meet"), std::string::npos) << log();
  EXPECT_EQ(launch("isa_unwritten", 1, out.data()), 0);
  EXPECT_NE(log().find("note LDS read of what nobody wrote | isa_unwritten"), std::string::npos) << log();
  EXPECT_EQ(out[0], 0x7fdeadbe);  // the poison
  EXPECT_EQ(launch("isa_block_size", 1, out.data()), 0);
  EXPECT_NE(log().find("note the kernel takes hidden_group_size_x | isa_block_size"), std::string::npos) << log();
  EXPECT_EQ(out, [&] {
    auto sized = out;
    std::fill_n(sized.begin(), 128, 128);
    return sized;
  }());
  EXPECT_EQ(launch("isa_beyond", 1, static_cast<int*>(nullptr), 4), kLaunchFailure);
  EXPECT_NE(log().find("FAULT MEMORY FAULT | isa_beyond"), std::string::npos) << log();
  EXPECT_EQ(launch("isa_block_size", 1, out.data()), 0) << "what follows a fault runs";
}

INSTANTIATE_TEST_SUITE_P(OnBothArchitectures, IsaEmulation, testing::Values("gfx90a", "gfx942"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
