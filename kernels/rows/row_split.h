// Splits the items of many rows over blocks of GPU threads, for kernels that treat every item alike. An item is a
// column, or a vector of columns. A long row is cut into chunks, and one block processes each chunk. Short rows share a
// block, and each of them has a power of two of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/divisor.h"
#include "rlk/base.h"

namespace rlk {

struct RowSplit {
  Divisor chunks;        // chunks per row
  int log2_threads = 0;  // log2 of the threads per row in a block
  int log2_rows = 0;     // log2 of the rows per block
};

// Splits rows of `items` items among threads that process `count` items each, in blocks of 2^log2_block threads.
inline RowSplit split_rows(std::int64_t items, int count, int log2_block) {
  RowSplit split;
  while (split.log2_threads < log2_block && (std::int64_t{count} << split.log2_threads) < items) ++split.log2_threads;
  const std::int64_t of_block = std::int64_t{count} << split.log2_threads;
  split.chunks = Divisor(static_cast<std::uint32_t>(std::max<std::int64_t>((items + of_block - 1) / of_block, 1)));
  split.log2_rows = log2_block - split.log2_threads;
  return split;
}
inline std::int64_t blocks_of(const RowSplit& split, std::int64_t num_rows) {
  return (num_rows + (std::int64_t{1} << split.log2_rows) - 1) / (std::int64_t{1} << split.log2_rows) *
         split.chunks.value;
}

// The items of a thread. Indices inside a row have 32 bits.
struct RowPlace {
  std::int64_t row;
  int first, step;  // the thread's items: `count` items from `first` on, at steps of `step`
};
RLK_HD RowPlace place_in_rows(const RowSplit& split, int count, std::uint32_t block, int thread) {
  const std::uint32_t of_rows = split.chunks.quotient(block);
  const std::uint32_t chunk = block - of_rows * split.chunks.value;
  const int step = 1 << split.log2_threads;
  return {(std::int64_t{of_rows} << split.log2_rows) + (thread >> split.log2_threads),
          static_cast<int>(chunk) * count * step + (thread & (step - 1)), step};
}

}  // namespace rlk
