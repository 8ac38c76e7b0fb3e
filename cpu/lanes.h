// An operator's inner loops exist in several copies, one per instruction set. RLK_CPU_LANES declares the copies, and
// RLK_CPU_LANES_IN_USE selects the copy of the instruction set in use.
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
