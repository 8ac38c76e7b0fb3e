#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "rlk/base.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace rlk::cpu {
namespace {

std::atomic<int> chosen{-1};

#if defined(__x86_64__)
// The name "f16c" is missing from g++ 10's __builtin_cpu_supports.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "baseline";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool isa_supported(Isa isa) {
  if (isa == Isa::kBaseline) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (isa == Isa::kAvx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

Isa isa() {
  const int set = chosen.load(std::memory_order_relaxed);
  if (set >= 0) return static_cast<Isa>(set);
  static const std::string wanted = [] {
    const char* value = std::getenv("RLK_CPU_ISA");
    return std::string(value == nullptr ? "" : value);
  }();
  Isa found = Isa::kBaseline;
  bool known = wanted.empty();
  for (const Isa candidate : kIsas) {
    if (!isa_supported(candidate) || !(wanted.empty() || wanted == isa_name(candidate))) continue;
    found = candidate;
    known = true;
  }
  RLK_CHECK(known, "RLK_CPU_ISA=" + wanted + " is not baseline, avx2 or avx512, or this CPU lacks it");
  chosen.store(static_cast<int>(found), std::memory_order_relaxed);
  return found;
}

void set_isa(Isa isa) {
  RLK_CHECK(isa_supported(isa), std::string("this CPU or build lacks ") + isa_name(isa));
  chosen.store(static_cast<int>(isa), std::memory_order_relaxed);
}

}  // namespace rlk::cpu
