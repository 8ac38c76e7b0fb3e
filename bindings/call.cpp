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
std::map<std::string, Taken> taken;  // the key is the name of a device

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
  // This lock is never destroyed, since a thread may outlive the interpreter. A forked child needs a new lock, since it
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
  check_shape(out, {rows, columns}, " (", what, ")");
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
  for (int i = 0; i < count_; ++i) PyTuple_SetItem(tuple.ptr(), i, output(i));  // this function is in the stable ABI
  return tuple;
}

std::vector<void (*)(nb::module_&)>& Registered::all() {
  static std::vector<void (*)(nb::module_&)> functions;
  return functions;
}

// Refuses a main_grad to which a backward cannot add, before the forward runs. `operands` has the call's tensors by their
// names. Tensors without memory, or with the negative bit, are not compared with main_grad.
RLK_PLAIN_FUNCTION(check_main_grad, nb::handle main_grad, nb::dict operands) {
  Frame frame;
  const Array& total = frame.read(main_grad, "main_grad", kFloat32);
  for (const auto& [name, operand] : operands) {
    if (!has_numbers(operand)) continue;
    frame.kept.emplace_front(operand, PyUnicode_AsUTF8AndSize(name.ptr(), nullptr), kAnyDtype);
  }
  if (total->ndim > 0) require_columns(total);
  frame.require_writable(total);
  return nb::none();
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

// Indices of the objects that set_torch() keeps, in the order of its tuple. First come functions that tell whether a
// mode of torch is active, then functions of a tensor, `autocast_hint`, types, Tensor's `__torch_dispatch__`, dicts of
// modules, and names. A lookup in a module's dict takes a third of the time of an attribute access.
// clang-format off
enum Of {
  kFunctorch, kModes, kJitTracing, kFunctionModes, kProfiler, kAutocast, kGradient, kIsWrapped, kIsBatched, kAutocastHint,
  kTensor, kParameter, kDtype, kDispatch, kCompiler, kForwardAd,
  kRequiresGrad, kIsCuda, kIsMeta, kIsCompiling, kCurrentLevel, kTorchDispatch, kNumKept
};
// clang-format on
PyObject* torch_[kNumKept];  // never released: torch outlives every call, and at exit the interpreter may end first

bool truth(PyObject* result) {
  if (!result) throw nb::python_error();
  const int truth = PyObject_IsTrue(result);
  Py_DECREF(result);
  if (truth < 0) throw nb::python_error();
  return truth;
}
bool is_active(Of predicate) { return truth(PyObject_CallNoArgs(torch_[predicate])); }
bool is(Of predicate, nb::handle tensor) {
  PyObject* const arguments[] = {tensor.ptr()};
  return truth(PyObject_Vectorcall(torch_[predicate], arguments, 1, nullptr));
}
bool has(Of name, nb::handle tensor) { return truth(PyObject_GetAttr(tensor.ptr(), torch_[name])); }

// Whether torch neither traces nor transforms the running code. The result is false if torch lacks one of the names;
// the call then goes through torch's dispatcher.
bool is_untraced() {
  if (!torch_[kTensor]) return false;  // torch is not loaded
  if (is_active(kFunctorch) || is_active(kModes) || is_active(kJitTracing)) return false;
  PyObject* const level = PyDict_GetItemWithError(torch_[kForwardAd], torch_[kCurrentLevel]);
  PyObject* const compiles = PyDict_GetItemWithError(torch_[kCompiler], torch_[kIsCompiling]);
  return compiles == Py_False && level && PyLong_AsLong(level) < 0;
}

PyObject* type_of(nb::handle object) { return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())); }
bool has_plain_type(nb::handle tensor) {
  return type_of(tensor) == torch_[kTensor] || type_of(tensor) == torch_[kParameter];
}
// Whether the memory of a torch tensor holds its numbers. The tensor may be empty.
bool is_plain(nb::handle tensor) {
  if (!has_plain_type(tensor)) return false;
  return has_numbers(tensor) || !(is_negated(tensor) || has(kIsMeta, tensor) || is(kIsWrapped, tensor));
}

// Whether torch's dispatcher treats an object of a subclass, such as vLLM's parameters, as a plain parameter.
bool is_parameter(nb::handle object) {
  if (!PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(torch_[kParameter]))) return false;
  const nb::object dispatch = nb::steal(PyObject_GetAttr(type_of(object), torch_[kTorchDispatch]));
  return dispatch.ptr() == torch_[kDispatch];
}

// Whether an operator's argument may go straight to a kernel: a number, None, a dtype, or a tensor that has its numbers
// in memory and wants no gradient. A list qualifies if all its elements do.
bool is_direct(nb::handle argument, bool grad_enabled) {
  PyObject* const x = argument.ptr();
  if (argument.is_none() || PyLong_CheckExact(x) || PyFloat_CheckExact(x) || PyBool_Check(x)) return true;
  if (has_plain_type(argument) || is_parameter(argument)) {
    return !(grad_enabled && has(kRequiresGrad, argument)) && has_numbers(argument);
  }
  if (!PyList_CheckExact(x)) return type_of(argument) == torch_[kDtype];
  return std::ranges::all_of(nb::borrow<nb::list>(argument), [&](nb::handle e) { return is_direct(e, grad_enabled); });
}

}  // namespace

void set_torch(nb::tuple given, nb::object without_override) {
  for (int i = 0; i < kNumKept; ++i) torch_[i] = nb::borrow(entry(given, i)).release().ptr();
  set_plain_types(torch_[kTensor], torch_[kParameter], without_override);
}

std::int64_t wanted_gradients(nb::tuple tensors) {
  if (!is_untraced()) return -1;
  const bool grad_enabled = is_active(kGradient);
  std::int64_t wanted = 0, bit = 1;
  for (nb::handle tensor : tensors) {
    if (is_plain(tensor)) {
      if (grad_enabled && has(kRequiresGrad, tensor)) wanted |= bit;
    } else if (!tensor.is_none()) {
      const int is_tensor = PyObject_IsInstance(tensor.ptr(), torch_[kTensor]);
      if (is_tensor < 0) throw nb::python_error();
      if (is_tensor) return -1;
    }
    bit <<= 1;
  }
  return wanted;
}

bool may_skip_dispatcher(nb::tuple arguments) {
  if (!is_untraced() || is_active(kFunctionModes) || is_active(kProfiler)) return false;
  const bool grad_enabled = is_active(kGradient);
  for (nb::handle argument : arguments) {
    if (!is_direct(argument, grad_enabled)) return false;
  }
  return true;
}

bool is_direct_gradient(nb::handle gradient) {
  return is_untraced() && is_plain(gradient) && !is(kIsBatched, gradient);
}

bool may_bypass_dispatcher(std::initializer_list<nb::handle> tensors) {
  const nb::handle first = *tensors.begin();
  if (!has_plain_type(first) || !has(kIsCuda, first) || !is_untraced() || is_active(kAutocast)) return false;
  const bool grad_enabled = is_active(kGradient);
  return std::ranges::all_of(tensors, [&](nb::handle tensor) {
    return tensor.is_none() || (has_plain_type(tensor) && !(grad_enabled && has(kRequiresGrad, tensor)));
  });
}

std::string autocast_hint() {
  return torch_[kAutocastHint] ? nb::str(nb::handle(torch_[kAutocastHint])()).c_str() : "";
}

}  // namespace rlk::bindings
