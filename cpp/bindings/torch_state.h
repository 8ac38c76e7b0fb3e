// What an eager call must know of torch before it may bypass torch's dispatcher.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>

namespace rlk::bindings {

namespace nb = nanobind;

// Hands over torch's own predicates, in the order: functorch transforms active, number of dispatch modes, grad enabled;
// and torch.autograd.forward_ad, whose _current_level is not negative where tensors may carry tangents.
void set_torch(nb::object functorch_active, nb::object dispatch_modes, nb::object grad_enabled, nb::object forward_ad);

// Whether plain CUDA tensors, or None, may go straight to a kernel: nothing traces or transforms them and no gradient is
// wanted of any. The first decides on the device.
bool may_bypass_dispatcher(std::initializer_list<nb::handle> tensors);

}  // namespace rlk::bindings
