#include "row_integers.h"

#include "linear_args.h"

namespace rlk::bindings {

bool is_array(nb::handle given) {
  if (PyLong_CheckExact(given.ptr()) || PyFloat_CheckExact(given.ptr())) return false;
  return PyCapsule_CheckExact(given.ptr()) || exchange_api(given) != nullptr || nb::hasattr(given, "__dlpack__");
}

RowIntegersArgument::RowIntegersArgument(nb::handle given, const char* name, std::int64_t num_rows,
                                         const Device* device) {
  if (!is_array(given)) {
    rows_.value = read_integer(given, name, "an integer or an array of them");
    return;
  }
  const TensorView& v = array_.emplace(given, name, kIndices).view();
  if (device != nullptr) require_device(*array_, *device);
  if (v.ndim != 1 || (num_rows >= 0 && v.shape[0] != num_rows)) {
    require_shape(false, *array_, "shape [", num_rows >= 0 ? word(num_rows) : "num_rows", "]");
  }
  rows_.data = v.data;
  rows_.stride = v.stride(0);
  rows_.dtype = v.dtype;
}

}  // namespace rlk::bindings
