// State of torch that decides whether an eager call may bypass torch's dispatcher.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>

namespace rlk::bindings {

namespace nb = nanobind;

// Stores torch's own predicates and modules, and the maker of autocast_hint.
//   tracing      three functions, for functorch transforms, dispatch modes and torch.jit.trace: whether any is active
//   compiler     torch.compiler, whose _is_compiling_flag is set during an export
//   forward_ad   torch.autograd.forward_ad, whose _current_level is not negative if tensors may carry tangents
//   plain        the types Tensor and Parameter
//   wrapped      two functions, for functorch's wrapper of a tensor and for its batch of gradients: whether it is one
void set_torch(nb::tuple tracing, nb::object grad_enabled, nb::object compiler, nb::object forward_ad, nb::tuple plain,
               nb::tuple wrapped, nb::object autocast_hint);

// The gradients that autograd wants of a call: bit i for tensor i. The result is negative if the running code is traced
// or transformed, or if a tensor does not have its numbers in memory. Values that are not tensors are ignored.
std::int64_t wanted_gradients(nb::tuple tensors);
// Whether a backward may go straight to a kernel: its gradients may be of another kind than the forward's tensors.
bool is_direct_gradient(nb::handle gradient);

// Whether plain CUDA tensors, or None, may go straight to a kernel. Tensors may not if they are traced or transformed,
// or if a gradient is wanted. Python has already checked the first tensor's device.
bool may_bypass_dispatcher(std::initializer_list<nb::handle> tensors);

// Hint for an error about different dtypes; empty if torch's autocast is off.
std::string autocast_hint();

}  // namespace rlk::bindings
