// The copies of an operator's inner loops, one per instruction set. The header of their type declares the copies, and
// the caller selects one.
#pragma once

#include "isa.h"

#if defined(__x86_64__)
#define RLK_CPU_LANES(Type, name) \
  namespace baseline {            \
  extern const Type name;         \
  }                               \
  namespace avx2 {                \
  extern const Type name;         \
  }                               \
  namespace avx512 {              \
  extern const Type name;         \
  }
#define RLK_CPU_LANES_IN_USE(name) rlk::cpu::of_isa(baseline::name, avx2::name, avx512::name)
#else
#define RLK_CPU_LANES(Type, name) \
  namespace baseline {            \
  extern const Type name;         \
  }
#define RLK_CPU_LANES_IN_USE(name) baseline::name
#endif

namespace rlk::cpu {

template <class Lanes>
const Lanes& of_isa(const Lanes& baseline, const Lanes& avx2, const Lanes& avx512) {
  switch (isa()) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kBaseline:
      break;
  }
  return baseline;
}

}  // namespace rlk::cpu
