#include "torch_state.h"

#include <iterator>

#include "ndarray.h"

namespace rlk::bindings {
namespace {

// These are never released. torch outlives every call, and at exit the interpreter may end first.
PyObject *tracing_[3], *grad_enabled_, *is_wrapped_, *autocast_hint_;
PyObject *tensor_, *parameter_;     // the types
PyObject *compiler_, *forward_ad_;  // the modules' dicts, since an attribute's lookup takes three times as long
PyObject *requires_grad_, *is_meta_, *is_compiling_, *current_level_;

bool truth(PyObject* result) {
  if (!result) throw nb::python_error();
  const int truth = PyObject_IsTrue(result);
  Py_DECREF(result);
  if (truth < 0) throw nb::python_error();
  return truth;
}

// A torch without one of the names takes the general path.
bool is_untraced() {
  if (!autocast_hint_) return false;  // torch is not loaded
  for (PyObject* const is_active : tracing_) {
    if (truth(PyObject_CallNoArgs(is_active))) return false;
  }
  PyObject* const level = PyDict_GetItemWithError(forward_ad_, current_level_);
  return PyDict_GetItemWithError(compiler_, is_compiling_) == Py_False && level && PyLong_AsLong(level) < 0;
}

}  // namespace

void set_torch(nb::tuple tracing, nb::object grad_enabled, nb::object compiler, nb::object forward_ad, nb::tuple plain,
               nb::object is_wrapped, nb::object autocast_hint) {
  for (std::size_t i = 0; i < std::size(tracing_); ++i) tracing_[i] = nb::object(tracing[i]).release().ptr();
  grad_enabled_ = grad_enabled.release().ptr();
  compiler_ = PyModule_GetDict(compiler.release().ptr());
  forward_ad_ = PyModule_GetDict(forward_ad.release().ptr());
  tensor_ = nb::object(plain[0]).release().ptr();
  parameter_ = nb::object(plain[1]).release().ptr();
  is_wrapped_ = is_wrapped.release().ptr();
  requires_grad_ = PyUnicode_InternFromString("requires_grad");
  is_meta_ = PyUnicode_InternFromString("is_meta");
  is_compiling_ = PyUnicode_InternFromString("_is_compiling_flag");
  current_level_ = PyUnicode_InternFromString("_current_level");
  autocast_hint_ = autocast_hint.release().ptr();
}

bool is_direct(nb::tuple tensors) {
  if (!is_untraced()) return false;
  for (nb::handle tensor : tensors) {
    if (tensor.is_none()) continue;
    PyObject* const t = tensor.ptr();
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(t));
    if (type == tensor_ || type == parameter_) {
      PyObject* const arguments[] = {t};
      if (is_negated(tensor) || truth(PyObject_GetAttr(t, is_meta_)) ||
          truth(PyObject_Vectorcall(is_wrapped_, arguments, 1, nullptr))) {
        return false;
      }
      continue;
    }
    const int is_tensor = PyObject_IsInstance(t, tensor_);
    if (is_tensor < 0) throw nb::python_error();
    if (is_tensor) return false;
  }
  return true;
}

bool may_bypass_dispatcher(std::initializer_list<nb::handle> tensors) {
  if (!is_untraced()) return false;
  for (nb::handle tensor : tensors) {
    if (tensor.is_none() || !truth(PyObject_GetAttr(tensor.ptr(), requires_grad_))) continue;
    return !truth(PyObject_CallNoArgs(grad_enabled_));
  }
  return true;
}

std::string autocast_hint() { return autocast_hint_ ? nb::str(nb::handle(autocast_hint_)()).c_str() : ""; }

}  // namespace rlk::bindings
