// Tensor maps for TMA on compute capability 9.0.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

// The number of bytes that L2 reads from HBM for a request of 128 bytes. With 128 bytes, weights that are read once
// arrive sooner. With 256 bytes, operands that several blocks of threads read arrive sooner (README of linear).
enum class L2Reads { k128Bytes, k256Bytes };

// Returns the map of a matrix [rows, columns] in boxes of box_rows by 128 bytes with the 128-byte swizzle. Elements
// outside the matrix are read as +0 and are not written. The address `data` and the row stride in bytes are multiples
// of 16; `row_stride` counts elements.
CUtensorMap tensor_map(const void* data, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                       int box_rows, L2Reads reads = L2Reads::k256Bytes);

// The sizes and strides of an array [sequences, tokens, heads, columns]. Strides count elements; in bytes they are
// multiples of 16 and not 0. Columns are contiguous. A box of the map has `box_tokens` tokens of one head by 128 bytes
// with the 128-byte swizzle, or by 64 bytes with the 64-byte swizzle.
struct HeadsExtent {
  std::int64_t columns, heads, tokens, sequences;
  std::int64_t head_stride, token_stride, sequence_stride;
};
CUtensorMap heads_tensor_map(const void* data, DType dtype, const HeadsExtent& extent, int box_tokens,
                             int box_bytes = 128);

}  // namespace rlk::cuda
