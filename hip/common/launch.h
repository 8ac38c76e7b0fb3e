// The host side of kernels over rows: the test for vector loads, the names of kernels, and launches of any number of
// blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "hip/common/launch_shape.h"
#include "hip/common/runtime.h"

namespace rlk::hip {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline bool at_16_bytes(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

// Whether every row begins at a multiple of 16 bytes. A null array has no rows that could violate this.
inline bool has_vectors(const void* data, const RowLayout& rows, DType t) {
  const auto aligned = [&](std::int64_t stride) { return stride * size_of(t) % 16 == 0; };
  return data == nullptr || (at_16_bytes(data) && aligned(rows.inner_stride) && aligned(rows.outer_stride));
}

inline const char* type_suffix(DType t) {
  return t == DType::kBFloat16 ? "_bf16" : t == DType::kFloat16 ? "_f16" : "_f32";
}

struct Block {
  int threads;
  std::size_t lds_bytes;
};
// Launches a kernel that takes its params, the first block of the launch, and `args`.
template <class Params, class... Args>
void launch_blocks(int device, Stream stream, const Block& block, const std::string& name, std::int64_t blocks,
                   const Params& p, const Args&... args) {
  for_each_launch(blocks, [&](std::int64_t first, std::int64_t count) {
    Runtime::get().launch(device, name.c_str(), {count, 1, block.threads, block.lds_bytes}, stream, p, first, args...);
  });
}

}  // namespace rlk::hip
