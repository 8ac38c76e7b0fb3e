// Offsets of packed arrays: what the CPU backends refuse before they write anything.
#pragma once

#include <string>

#include "rlk/sequences.h"

namespace rlk::cpu {

// [num + 1]: begins with 0, does not decrease, ends with `total`, which `of` names.
inline void check_offsets(const void* offsets, DType t, std::int64_t num, std::int64_t total, const char* name,
                          const char* of) {
  if (offsets == nullptr) return;
  const auto refuse = [&](const std::string& expected, std::int64_t i) {
    throw InvalidArgument(std::string(name) + ": expected " + expected + ", got " +
                          std::to_string(load_index(offsets, t, i)) + " at " + std::to_string(i));
  };
  if (load_index(offsets, t, 0) != 0) refuse("0 first", 0);
  for (std::int64_t i = 1; i <= num; ++i) {
    if (load_index(offsets, t, i) < load_index(offsets, t, i - 1)) refuse("offsets that do not decrease", i);
  }
  if (load_index(offsets, t, num) != total) refuse(std::to_string(total) + " (" + of + ") last", num);
}

}  // namespace rlk::cpu
