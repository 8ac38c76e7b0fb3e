// The inner loop of the operator `preference_loss`, which computes one pair at a time. CMake compiles this file once
// per instruction set. So the loop uses fma instructions if the CPU has them.
#include "preference_loss_simd.h"

#include "kernels/losses/preference_pair.h"
#include "simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

void items(const PreferenceLossParams& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) preference_item<PlainMemory>(p, i);
}

}  // namespace

const PreferenceLossLanes preference_loss_simd = {items};

}  // namespace rlk::cpu::RLK_CPU_ISA
