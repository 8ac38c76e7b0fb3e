// Integers of rows as Python gives them: an array with one for each row, or a number for all.
#pragma once

#include <optional>

#include "ndarray.h"
#include "rlk/ops/random_bits.h"

namespace rlk::bindings {

// Keeps the array alive beside the view of it. `given`: an array [num_rows] of int32 or int64, or a number, which Python
// checked. `num_rows` is -1 where this array decides on it, `device` null where it decides on that.
class RowIntegersArgument {
 public:
  RowIntegersArgument(nb::handle given, const char* name, std::int64_t num_rows, const Device* device);

  const RowIntegers& rows() const { return rows_; }
  const Array* array() const { return array_ ? &*array_ : nullptr; }

 private:
  std::optional<Array> array_;
  RowIntegers rows_;
};

// Whether Python gave an array and not a number.
bool is_array(nb::handle given);

}  // namespace rlk::bindings
