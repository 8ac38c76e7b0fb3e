// What an eager call must know of torch before it may bypass torch's dispatcher.
#pragma once

#include <nanobind/nanobind.h>

namespace rlk::bindings {

namespace nb = nanobind;

// Hands over torch's own predicates, in the order: functorch transforms active, number of dispatch modes, grad enabled.
void set_torch(nb::object functorch_active, nb::object dispatch_modes, nb::object grad_enabled);

// Whether a plain CUDA tensor may go straight to a kernel: nothing traces or transforms it and no gradient is wanted.
bool may_bypass_dispatcher(nb::handle tensor);

}  // namespace rlk::bindings
