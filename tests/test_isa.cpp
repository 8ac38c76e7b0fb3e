// The instruction sets of the CPU backends: which there are, their names, and the choice of one.
#include <gtest/gtest.h>

#include "cpu/isa.h"
#include "rlk/base.h"

namespace {

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
