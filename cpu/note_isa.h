// The plan of a CPU call, for rk.trace: the instruction set of its inner loops, and the arithmetic of its products.
#pragma once

#include <string>

#include "isa.h"
#include "rlk/ops/linear.h"
#include "rlk/plan_note.h"

namespace rlk::cpu {

constexpr const char* name_of(Arithmetic arithmetic) {
  constexpr const char* kNames[] = {"ieee", "as sm_80", "as sm_90", "as gfx90a", "as gfx942"};
  return kNames[static_cast<int>(arithmetic)];
}

inline void note_isa() {
  note_plan([] { return std::string(isa_name(isa())); });
}
inline void note_isa(Arithmetic products, const char* more = "") {
  note_plan([=] { return std::string(isa_name(isa())) + " " + name_of(products) + more; });
}

}  // namespace rlk::cpu
