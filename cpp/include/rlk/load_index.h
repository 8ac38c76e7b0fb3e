// Reads elements of an array of int32 or int64.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

RLK_HD std::int64_t load_index(const void* from, DType t, std::int64_t i) {
  return t == DType::kInt64 ? static_cast<const std::int64_t*>(from)[i] : static_cast<const std::int32_t*>(from)[i];
}

}  // namespace rlk
