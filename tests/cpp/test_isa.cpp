// Tests the instruction sets of the CPU backend: their list, their names, and the choice of an instruction set.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "cpu/isa.h"
#include "rlk/base.h"

namespace {

// This test must run first in the file, since other tests choose an instruction set.
TEST(Isa, TheWidestOfTheCpuIsTakenUnlessAnotherIsWanted) {
  const char* wanted = std::getenv("RLK_CPU_ISA");
  rlk::cpu::Isa expected = rlk::cpu::Isa::kBaseline;
  for (const auto isa : rlk::cpu::kIsas) {
    const bool taken = wanted == nullptr || *wanted == 0 || std::string(wanted) == rlk::cpu::isa_name(isa);
    if (rlk::cpu::isa_supported(isa) && taken) expected = isa;
  }
  EXPECT_EQ(rlk::cpu::isa(), expected);
}

TEST(Isa, WhatTheKernelListsIsSupported) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && line.rfind("flags", 0) != 0) {
  }
  if (line.rfind("flags", 0) != 0) GTEST_SKIP() << "no x86-64 Linux";
  const auto has = [&](const char* flag) {
    return (line + ' ').find(std::string(" ") + flag + ' ') != std::string::npos;
  };
  const bool avx2 = has("avx2") && has("fma") && has("f16c");
  EXPECT_EQ(rlk::cpu::isa_supported(rlk::cpu::Isa::kAvx2), avx2);
  const bool avx512 = avx2 && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl");
  EXPECT_EQ(rlk::cpu::isa_supported(rlk::cpu::Isa::kAvx512), avx512);
}

TEST(Isa, TheBaselineIsAlwaysThere) {
  EXPECT_TRUE(rlk::cpu::isa_supported(rlk::cpu::Isa::kBaseline));
  EXPECT_STREQ(rlk::cpu::isa_name(rlk::cpu::Isa::kAvx2), "avx2");
  for (const auto isa : rlk::cpu::kIsas) {
    if (rlk::cpu::isa_supported(isa)) {
      rlk::cpu::set_isa(isa);
      EXPECT_EQ(rlk::cpu::isa(), isa);
    } else {
      EXPECT_THROW(rlk::cpu::set_isa(isa), rlk::InvalidArgument);
    }
  }
}

}  // namespace
