// What an eager call must know of torch before it may bypass torch's dispatcher.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>

namespace rlk::bindings {

namespace nb = nanobind;

// Hands over torch's own predicates: functorch transforms active, number of dispatch modes, torch.jit.trace running, grad
// enabled. Then torch.autograd.forward_ad, whose _current_level is not negative where tensors may carry tangents, and the
// maker of autocast_hint.
void set_torch(nb::object functorch_active, nb::object dispatch_modes, nb::object is_jit_tracing,
               nb::object grad_enabled, nb::object forward_ad, nb::object autocast_hint);

// Whether plain CUDA tensors, or None, may go straight to a kernel: nothing traces or transforms them and no gradient is
// wanted of any. The first decides on the device.
bool may_bypass_dispatcher(std::initializer_list<nb::handle> tensors);

// What to add to an error about dtypes that differ: empty where torch's autocast is off.
std::string autocast_hint();

}  // namespace rlk::bindings
