// Tensor maps for the copy engine of compute capability 9.0.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

// A matrix [rows, columns] in boxes of box_rows by 128 bytes with the 128-byte swizzle; what lies outside reads as +0, and
// is not written. data and row_stride (elements) are multiples of 16 bytes.
CUtensorMap tensor_map(const void* data, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                       int box_rows);

}  // namespace rlk::cuda
