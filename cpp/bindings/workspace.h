// Memory that an operator needs while it runs.
#pragma once

#include "module.h"
#include "ndarray.h"

namespace rlk::bindings {

// At least `bytes` from the caller's allocator, which keeps them for the next call: *data, for as long as the result lives.
// Of 0 bytes nothing, and *data stays as it is. Counted by device.
nb::object take_workspace(const Caller& caller, std::int64_t bytes, void** data);

}  // namespace rlk::bindings
