#include "call.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

namespace rlk::bindings {
namespace {

struct Taken {
  std::int64_t calls = 0, last_bytes = 0, most_bytes = 0;
};
std::mutex mutex;
std::map<std::string, Taken> taken;  // by device

}  // namespace

nb::object take_workspace(const Caller& caller, std::int64_t bytes, void** data) {
  if (bytes == 0) return nb::none();
  const std::int64_t shape[] = {(bytes + 3) / 4};
  Caller::Fresh memory = caller.empty(shape, DType::kFloat32);
  *data = memory.data;
  const std::lock_guard lock(mutex);
  Taken& of_device = taken[name_of(caller.device)];
  ++of_device.calls;
  of_device.last_bytes = shape[0] * 4;
  of_device.most_bytes = std::max(of_device.most_bytes, of_device.last_bytes);
  return memory.array;
}

std::unique_lock<std::mutex> lock_accumulation(Device device) {
  // The lock is never destroyed, since a thread may outlive the interpreter. A forked child needs a new lock, since it
  // has no thread that could unlock the old one.
  static std::mutex* const mutex = new std::mutex;
  [[maybe_unused]] static const int at_fork = pthread_atfork(nullptr, nullptr, [] { new (mutex) std::mutex; });
  return device.type == DeviceType::kCpu ? std::unique_lock(*mutex) : std::unique_lock<std::mutex>();
}

Results& Results::add_matrix(const Array* given, std::int64_t rows, std::int64_t columns, void** data,
                             std::int64_t* stride, DType dtype, const char* what, bool wanted) {
  *stride = columns;
  if (!given) return add(data, {rows, columns}, dtype, wanted);
  const Array& out = *given;
  require_shape(out->ndim == 2 && out->shape[0] == rows && out->shape[1] == columns, out, "shape [", rows, ", ",
                columns, "] (", what, ")");
  frame_->require_writable(out);
  require_columns(out);
  *stride = out->stride(0);
  *data = out->data;
  return add(out.object());
}

nb::object Results::result() {
  const auto output = [this](int i) { return (arrays_[i].is_valid() ? arrays_[i] : nb::none()).release().ptr(); };
  if (count_ == 0) return nb::none();
  if (count_ == 1) return nb::steal(output(0));
  const nb::object tuple = nb::steal(PyTuple_New(count_));
  for (int i = 0; i < count_; ++i) PyTuple_SetItem(tuple.ptr(), i, output(i));  // PyTuple_SetItem is in the stable ABI
  return tuple;
}

std::vector<void (*)(nb::module_&)>& Registered::all() {
  static std::vector<void (*)(nb::module_&)> functions;
  return functions;
}

// {device: (calls, last_bytes, most_bytes)}
RLK_PLAIN_FUNCTION(workspace_stats, bool reset) {
  nb::dict found;
  const std::lock_guard lock(mutex);
  for (const auto& [device, of] : taken) {
    found[device.c_str()] = nb::make_tuple(of.calls, of.last_bytes, of.most_bytes);
  }
  if (reset) taken.clear();
  return found;
}

// ---- state of torch -------------------------------------------------------------------------------------------------

namespace {

// These objects are never released. torch outlives every call, and at exit the interpreter may end first.
PyObject *tracing_[3], *grad_enabled_, *is_wrapped_, *is_batched_, *autocast_hint_;
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

bool truth(PyObject* predicate, nb::handle tensor) {
  PyObject* const arguments[] = {tensor.ptr()};
  return truth(PyObject_Vectorcall(predicate, arguments, 1, nullptr));
}

// Whether the memory of a torch tensor holds its numbers.
bool is_plain(nb::handle tensor) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  return (type == tensor_ || type == parameter_) && !is_negated(tensor) &&
         !truth(PyObject_GetAttr(tensor.ptr(), is_meta_)) && !truth(is_wrapped_, tensor);
}

}  // namespace

void set_torch(nb::tuple tracing, nb::object grad_enabled, nb::object compiler, nb::object forward_ad, nb::tuple plain,
               nb::tuple wrapped, nb::object autocast_hint) {
  for (std::size_t i = 0; i < std::size(tracing_); ++i) tracing_[i] = nb::object(tracing[i]).release().ptr();
  grad_enabled_ = grad_enabled.release().ptr();
  compiler_ = PyModule_GetDict(compiler.release().ptr());
  forward_ad_ = PyModule_GetDict(forward_ad.release().ptr());
  tensor_ = nb::object(plain[0]).release().ptr();
  parameter_ = nb::object(plain[1]).release().ptr();
  is_wrapped_ = nb::object(wrapped[0]).release().ptr();
  is_batched_ = nb::object(wrapped[1]).release().ptr();
  requires_grad_ = PyUnicode_InternFromString("requires_grad");
  is_meta_ = PyUnicode_InternFromString("is_meta");
  is_compiling_ = PyUnicode_InternFromString("_is_compiling_flag");
  current_level_ = PyUnicode_InternFromString("_current_level");
  autocast_hint_ = autocast_hint.release().ptr();
}

std::int64_t wanted_gradients(nb::tuple tensors) {
  if (!is_untraced()) return -1;
  std::int64_t wanted = 0, bit = 1;
  for (nb::handle tensor : tensors) {
    if (is_plain(tensor)) {
      if (truth(PyObject_GetAttr(tensor.ptr(), requires_grad_))) wanted |= bit;
    } else if (!tensor.is_none()) {
      const int is_tensor = PyObject_IsInstance(tensor.ptr(), tensor_);
      if (is_tensor < 0) throw nb::python_error();
      if (is_tensor) return -1;
    }
    bit <<= 1;
  }
  return wanted != 0 && truth(PyObject_CallNoArgs(grad_enabled_)) ? wanted : 0;
}

bool is_direct_gradient(nb::handle gradient) {
  return is_untraced() && is_plain(gradient) && !truth(is_batched_, gradient);
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
