// The one checker of arguments over sequences: masks and offsets, in the words that a user reads.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ndarray.h"
#include "rlk/kernels/sequences.h"

namespace rlk::bindings {

// A mask of any dtype whose zeros one rule tells.
void require_flags(const Array& mask);

// Flags of tokens: bool, integers or floats of a shape, padded [rows, tokens] or packed [tokens]; `whose` that is.
struct TokenFlagsArgument {
  // None: every token counts.
  TokenFlagsArgument(nb::handle object, std::span<const std::int64_t> shape, const char* whose, Device device);
  TokenFlags mask;

 private:
  std::optional<Array> array_;
};

// cu_seqlens, or None.
struct OffsetsArgument {
  OffsetsArgument(nb::handle object, Device device);
  Offsets offsets;
  std::int64_t num_sequences = 0;

 private:
  std::optional<Array> array_;
};

std::int64_t read_count(nb::handle value, const char* name);  // an integer that is not negative
// Of an array [rows, tokens]: what its rows are apart.
std::int64_t row_stride(const Array& a);

}  // namespace rlk::bindings
