// Memory that an operator needs while it runs.
#pragma once

#include "module.h"
#include "ndarray.h"

namespace rlk::bindings {

// Takes at least `bytes` from the caller's allocator, which keeps them for the next call. *data is valid as long as the
// result lives; 0 bytes leave *data as it is. Bytes are counted by device.
nb::object take_workspace(const Caller& caller, std::int64_t bytes, void** data);

}  // namespace rlk::bindings
