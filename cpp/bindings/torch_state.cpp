#include "torch_state.h"

namespace rlk::bindings {
namespace {

// These are never released. torch outlives every call, and at exit the interpreter may end first.
PyObject *functorch_active_, *dispatch_modes_, *is_jit_tracing_, *grad_enabled_, *forward_ad_, *autocast_hint_;
PyObject *is_cuda_, *requires_grad_, *current_level_;

bool has_tangents() {
  PyObject* level = PyObject_GetAttr(forward_ad_, current_level_);
  if (!level) throw nb::python_error();
  const long value = PyLong_AsLong(level);
  Py_DECREF(level);
  return value >= 0;
}

bool truth(PyObject* result) {
  if (!result) throw nb::python_error();
  const int truth = PyObject_IsTrue(result);
  Py_DECREF(result);
  if (truth < 0) throw nb::python_error();
  return truth;
}

}  // namespace

void set_torch(nb::object functorch_active, nb::object dispatch_modes, nb::object is_jit_tracing,
               nb::object grad_enabled, nb::object forward_ad, nb::object autocast_hint) {
  functorch_active_ = functorch_active.release().ptr();
  dispatch_modes_ = dispatch_modes.release().ptr();
  is_jit_tracing_ = is_jit_tracing.release().ptr();
  grad_enabled_ = grad_enabled.release().ptr();
  forward_ad_ = forward_ad.release().ptr();
  autocast_hint_ = autocast_hint.release().ptr();
  is_cuda_ = PyUnicode_InternFromString("is_cuda");
  requires_grad_ = PyUnicode_InternFromString("requires_grad");
  current_level_ = PyUnicode_InternFromString("_current_level");
}

bool may_bypass_dispatcher(std::initializer_list<nb::handle> tensors) {
  if (!functorch_active_ || !truth(PyObject_GetAttr(tensors.begin()->ptr(), is_cuda_))) return false;
  if (truth(PyObject_CallNoArgs(functorch_active_)) || truth(PyObject_CallNoArgs(dispatch_modes_)) ||
      truth(PyObject_CallNoArgs(is_jit_tracing_)) || has_tangents()) {
    return false;
  }
  for (nb::handle tensor : tensors) {
    if (tensor.is_none() || !truth(PyObject_GetAttr(tensor.ptr(), requires_grad_))) continue;
    return !truth(PyObject_CallNoArgs(grad_enabled_));
  }
  return true;
}

std::string autocast_hint() { return autocast_hint_ ? nb::str(nb::handle(autocast_hint_)()).c_str() : ""; }

}  // namespace rlk::bindings
