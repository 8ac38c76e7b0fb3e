// Products of operands that TMA cannot read, because their rows have two strides or do not begin at multiples of 16
// bytes. For the sm_90 kernels the operands are copied, for some rows of the product at a time. Large products also
// copy operands whose rows begin at multiples of 16 bytes, but not at lines of 128 bytes.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace rlk::cuda {

// Copies rows of 16-bit elements to rows that begin at multiples of 16 bytes. After its last element, a row of the copy
// is filled with zeros up to the pitch.
struct AlignedRowsParams {
  const void* from = nullptr;  // [rows, columns], at multiples of 2 bytes
  void* to = nullptr;          // [rows, pitch], at a multiple of 16 bytes
  RowLayout from_rows;         // in elements
  std::int64_t first_row = 0;  // the first row that is copied
  std::int64_t rows = 0, columns = 0, pitch = 0;
};
RLK_CUDA_KERNELS(void aligned_rows(const AlignedRowsParams& p, cudaStream_t stream);)

// The product is computed in parts: `rows_a` rows of A and `rows_b` rows of B are copied at a time. An operand with 0
// such rows is read in place. `bytes`: size of the workspace for the copies and counters, which must be 16-byte
// aligned. `loads_rows`: ordinary loads read B in place.
struct GemmCopies {
  std::int64_t rows_a = 0, rows_b = 0, bytes = 0;
  std::int64_t counters = 0;  // counters at the workspace's end; if above 0, the product's kernel copies
  bool loads_rows = false;
  bool serve() const { return bytes > 0 || loads_rows; }
};
// Plans the copies of a product, in a workspace of about 256 MiB at most. serve() is false if the product needs no
// copies, or if they would not help, as with few rows or columns.
GemmCopies gemm_copies(const GemmParams& p);
// Plans the copies of a product of any size, in a workspace of about `bytes`.
GemmCopies gemm_copies_within(const GemmParams& p, std::int64_t bytes);
// The same for a product of operands that TMA can read, whose copies begin rows at lines of 128 bytes.
GemmCopies gemm_copies_to_lines(const GemmParams& p, std::int64_t bytes);
void gemm_by_copies(const GemmParams& p, const GemmCopies& copies, void* workspace, int device, cudaStream_t stream);

}  // namespace rlk::cuda
