// State of torch that decides whether an eager call may bypass torch's dispatcher.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>

namespace rlk::bindings {

namespace nb = nanobind;

// Stores torch's own predicates: functorch transforms active, number of dispatch modes, torch.jit.trace running, grad
// enabled. It also stores torch.autograd.forward_ad, whose _current_level is not negative if tensors may carry
// tangents, and the maker of autocast_hint.
void set_torch(nb::object functorch_active, nb::object dispatch_modes, nb::object is_jit_tracing,
               nb::object grad_enabled, nb::object forward_ad, nb::object autocast_hint);

// Whether plain CUDA tensors, or None, may go straight to a kernel. Nothing may trace or transform them, and no
// gradient may be wanted. The first tensor decides the device.
bool may_bypass_dispatcher(std::initializer_list<nb::handle> tensors);

// Hint for an error about different dtypes; empty if torch's autocast is off.
std::string autocast_hint();

}  // namespace rlk::bindings
