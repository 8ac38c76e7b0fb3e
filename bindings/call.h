// The common parts of bindings. They define functions, allocate outputs and workspace, and call kernels.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cpu/float_environment.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::bindings {

// A lock for a call that adds its gradient to main_grad, an array of the caller. On the CPU, backwards that run in
// several threads may share main_grad, so the lock lets one call at a time change it. On a GPU the lock is empty,
// because the stream runs the backwards one after another.
std::unique_lock<std::mutex> lock_accumulation(Device device);

// Takes at least `bytes` of workspace from the caller's allocator, whose cache keeps the memory for the next call. The
// pointer *data is valid as long as the result lives; a call for 0 bytes leaves *data unchanged. workspace_stats counts
// the bytes per device.
nb::object take_workspace(const Caller& caller, std::int64_t bytes, void** data);

// The least value of `workspace_bytes`, the caller's limit of the workspace, with which a call can run.
inline std::int64_t least_bytes(const WorkspaceRange& range) {
  return range.least == 0 ? 0 : range.least + kWorkspaceAlign;
}

// Reads `workspace_bytes`. If Python passed None, there is no limit, and the result is nullopt.
inline std::optional<std::int64_t> read_workspace_bytes(nb::handle bytes) {
  if (bytes.is_none()) return std::nullopt;
  return read_integer(bytes, "workspace_bytes", "a number of bytes");
}

inline void require_bytes(std::int64_t least, std::int64_t bytes, const char* of) {
  require(bytes >= least, "workspace_bytes", "at least ", least, " for ", of, ", got ", bytes);
}

// Releases the GIL for its scope. A kernel's launch may wait until a full queue has room, and callbacks in the queue
// may need the interpreter.
//
// A daemon thread that returns while the interpreter ends gets no GIL. Before Python 3.14, PyEval_RestoreThread then
// ends the thread by unwinding its stack. A noexcept function on the stack, such as nanobind's calls, does not allow
// this, so the whole process ends with SIGABRT. Here the thread sleeps instead, as in Python 3.14, until the process
// ends.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // pthread_exit is unwinding the stack, which a return would interrupt
      for (;;) pause();
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// Collects the outputs of a call in order, then makes the call.
class Results {
 public:
  // The constructor refuses a device for which this build has no kernels of `op`. A call that does not run gets outputs
  // without memory.
  Results(const char* op, const Frame* frame, bool runs = true)
      : frame_(frame), caller_((require_backend(op, *frame->first), *frame)) {
    if (!runs) caller_.api = &kDescribed;
  }

  const Caller& caller() const { return caller_; }

  // Allocates an output and points a field of the params at it. An unwanted output is None, and its field does not
  // change.
  Results& add(void** field, Shape shape, DType dtype, bool wanted = true) {
    if (wanted) {
      Caller::Fresh fresh = caller_.empty(shape, dtype);
      *field = fresh.data;
      arrays_[count_] = std::move(fresh.array);
    }
    ++count_;
    return *this;
  }
  template <class T>
  Results& add(T** field, Shape shape, bool wanted = true) {
    constexpr bool kIsFloat = std::is_same_v<T, float>;
    constexpr DType kDtype = kIsFloat ? DType::kFloat32 : sizeof(T) == 8 ? DType::kInt64 : DType::kInt32;
    void* data = *field;
    add(&data, shape, sizeof(T) == 1 ? DType::kBool : kDtype, wanted);
    *field = static_cast<T*>(data);
    return *this;
  }
  // Adds several outputs of one shape, as add() does.
  template <class... T>
  Results& each(Shape shape, bool wanted, T**... fields) {
    return (add(fields, shape, wanted), ...);
  }
  // Adds one of the caller's arrays, which the call writes in place.
  Results& add(nb::handle array) {
    arrays_[count_++] = nb::borrow(array);
    return *this;
  }
  // Adds a matrix with contiguous columns: `given`, or a new matrix if `given` is null. `what` names its dimensions in
  // errors.
  Results& add_matrix(const Array* given, std::int64_t rows, std::int64_t columns, void** data, std::int64_t* stride,
                      DType dtype, const char* what = "out_features, in_features", bool wanted = true);

  // Calls a kernel without the GIL.
  template <class Params>
  void call(void (*kernel)(const Params&, Device, Stream), const Params& p, bool accumulates = false) const {
    if (caller_.describes()) return;
    const ReleasedGil released;
    std::unique_lock<std::mutex> lock;
    if (accumulates) lock = lock_accumulation(caller_.device);
    kernel(p, caller_.device, caller_.stream);
  }
  // Calls the kernel without the GIL, and returns the output, or a tuple of several outputs.
  template <class Params>
  nb::object run(void (*kernel)(const Params&, Device, Stream), const Params& p, bool accumulates = false) {
    call(kernel, p, accumulates);
    return result();
  }
  // Like run() above, for a kernel that needs a workspace.
  template <class Params, class Bytes>
  nb::object run(void (*kernel)(const Params&, Device, Stream), Params* p, Bytes workspace_bytes,
                 bool accumulates = false) {
    if (caller_.describes()) return result();
    const nb::object workspace = take_workspace(caller_, workspace_bytes(*p, caller_.device), &p->workspace);
    return run(kernel, *p, accumulates);
  }
  // Like run(), with the largest useful workspace: at most `limit` bytes or, without a limit, the usual size. The
  // workspace begins at a multiple of kWorkspaceAlign, wherever the allocator's memory begins. `on_cpu`: whether the
  // CPU backend takes a workspace, too.
  template <class Params>
  nb::object run_within(std::optional<std::int64_t> limit, bool on_cpu,
                        WorkspaceRange (*range_of)(const Params&, Device),
                        void (*kernel)(const Params&, Device, Stream), Params* p, bool accumulates = false) {
    if (caller_.describes()) return result();
    const WorkspaceRange range = range_of(*p, caller_.device);
    if (limit) require_bytes(least_bytes(range), *limit, "this call");
    const bool takes = range.most > 0 && (on_cpu || caller_.device.type != DeviceType::kCpu);
    if (!takes) return run(kernel, *p, accumulates);
    p->workspace_bytes = std::min(range.most, limit.value_or(usual_workspace(range)) - kWorkspaceAlign);
    void* memory = nullptr;
    const nb::object workspace = take_workspace(caller_, p->workspace_bytes + kWorkspaceAlign, &memory);
    p->workspace = reinterpret_cast<void*>(aligned(reinterpret_cast<std::int64_t>(memory)));
    return run(kernel, *p, accumulates);
  }
  nb::object result();

 private:
  const Frame* frame_;
  Caller caller_;
  nb::object arrays_[10];
  int count_ = 0;
};

// ---- does the state of torch let an eager call bypass its dispatcher? -----------------------------------------------

// Stores the objects of torch that call.cpp lists, and passes `without_override` to set_plain_types().
void set_torch(nb::tuple given, nb::object without_override);

// The gradients that autograd needs from a call: bit i is set if tensor i needs a gradient. The result is negative if
// the running code is traced or transformed, or if a tensor does not have its numbers in memory. Values that are not
// tensors are ignored.
std::int64_t wanted_gradients(nb::tuple tensors);
// Whether a call of a registered operator with these arguments may go straight to its kernel. An argument may also be a
// parameter of a subclass that keeps Tensor's `__torch_dispatch__`.
bool may_skip_dispatcher(nb::tuple arguments);
// Whether a backward may pass this gradient straight to a kernel. A gradient may be of another kind than the forward's
// tensors, so each gradient is tested.
bool is_direct_gradient(nb::handle gradient);

// Whether these arguments may go straight to a kernel. The first must be a CUDA tensor of a plain type. Each other
// argument must be None or a tensor of a plain type. The result is false while autocast is active, while torch traces
// or transforms the running code, or if a tensor wants a gradient.
bool may_bypass_dispatcher(std::initializer_list<nb::handle> tensors);

// Hint for an error about different dtypes; empty if torch's autocast is off.
std::string autocast_hint();

// ---- functions of the module ----------------------------------------------------------------------------------------

// Registers a function. The module defines all registered functions when it is loaded.
struct Registered {
  explicit Registered(void (*define)(nb::module_&)) { all().push_back(define); }
  static std::vector<void (*)(nb::module_&)>& all();
};
// RLK_PLAIN_FUNCTION(name, parameters) { body } defines a function of the module. It returns an nb::object.
#define RLK_PLAIN_FUNCTION(name, ...)                                         \
  nb::object name(__VA_ARGS__);                                               \
  const Registered k_##name([](nb::module_& m) { define(m, #name, &name); }); \
  nb::object name(__VA_ARGS__)
// RLK_FUNCTION defines a function that allocates its outputs. The function's parameters are `frame`, then an nb::handle
// for each name in `objects`, then the remaining parameters, which are written with their types.
#define RLK_FUNCTION(name, objects, ...) \
  RLK_PLAIN_FUNCTION(name, Frame* frame RLK_EACH(RLK_OBJECT, , , RLK_UNPACKED objects) __VA_OPT__(, ) __VA_ARGS__)
// RLK_EAGER_FUNCTION defines a function that allocates its outputs, and <name>_eager, its eager call: a call that
// bypasses torch's dispatcher. The first `tensors` arguments of the eager call, or the entries of its first argument,
// are the tensors.
#define RLK_EAGER_FUNCTION(name, tensors, objects, ...)                                                              \
  nb::object name(Frame* frame RLK_EACH(RLK_OBJECT, , , RLK_UNPACKED objects) __VA_OPT__(, ) __VA_ARGS__);           \
  const Registered k_##name##_eager([](nb::module_& m) { define_eager<&name, tensors>(m, #name "_eager", &name); }); \
  RLK_FUNCTION(name, objects, __VA_ARGS__)
#define RLK_OBJECT(x, y, object) , nb::handle object
#define RLK_UNPACKED(...) __VA_ARGS__

// RLK_FILL(params, read, a, b, ...) sets the fields a, b, ... of params to read(a, "a"), read(b, "b"), ...
#define RLK_FILL(params, read, ...) RLK_EACH(RLK_FILL_FIELD, params, read, __VA_ARGS__)
#define RLK_FILL_FIELD(params, read, name) fill(&(params).name, read(name, #name));
template <class Field, class Value>
void fill(Field* field, const Value& value) {
  *field = static_cast<Field>(value);
}
// The `read` of RLK_FILL for values that Python has already checked.
template <class Value>
Value as_given(Value value, const char*) {
  return value;
}

// RLK_EACH(m, x, y, a, b, ...) is m(x, y, a) m(x, y, b) ..., up to 27 times.
#define RLK_EACH(m, x, y, ...) __VA_OPT__(RLK_SCAN_27(RLK_NEXT(m, x, y, __VA_ARGS__)))
#define RLK_NEXT(m, x, y, first, ...) m(x, y, first) __VA_OPT__(RLK_NEXT_LATER RLK_NOTHING(m, x, y, __VA_ARGS__))
#define RLK_NEXT_LATER() RLK_NEXT
#define RLK_NOTHING ()
#define RLK_SCAN_27(...) RLK_SCAN_9(RLK_SCAN_9(RLK_SCAN_9(__VA_ARGS__)))
#define RLK_SCAN_9(...) RLK_SCAN_3(RLK_SCAN_3(RLK_SCAN_3(__VA_ARGS__)))
#define RLK_SCAN_3(...) RLK_SCAN(RLK_SCAN(RLK_SCAN(__VA_ARGS__)))
#define RLK_SCAN(...) __VA_ARGS__

// Defines a function with positional arguments, each of which may be None. Keyword arguments would take longer than a
// small call itself. The call rounds numbers to float32 to nearest even, whatever rounding mode its caller has set.
template <class... Arguments, class Function>
void define_call(nb::module_& m, const char* name, Function function) {
  const auto call = [function](Arguments... arguments) -> nb::object {
    const cpu::FloatEnvironment environment;
    return function(std::forward<Arguments>(arguments)...);
  };
  m.def(name, call, ((void)sizeof(Arguments), nb::arg().none())...);
}
template <class... Arguments>
void define(nb::module_& m, const char* name, nb::object (*function)(Arguments...)) {
  define_call<Arguments...>(m, name, function);
}
// Defines a function that allocates its outputs. Python passes the function's Frame last, as `allocate` and `stream`.
template <class... Arguments>
void define(nb::module_& m, const char* name, nb::object (*function)(Frame*, Arguments...)) {
  define_call<Arguments..., nb::handle, std::uintptr_t>(
      m, name, [function](Arguments... given, nb::handle allocate, std::uintptr_t stream) {
        Frame frame{allocate, stream};
        return function(&frame, std::forward<Arguments>(given)...);
      });
}

// Defines the eager call of a function that allocates its outputs. An eager call bypasses torch's dispatcher, which
// keeps the host's cost of a decode step low. It returns NotImplemented before it starts a kernel if
// may_bypass_dispatcher() refuses the first kTensors tensors, or if an argument is invalid. Python then calls the
// operator through the dispatcher, which resolves torch's negative bit or raises the error.
template <auto kFunction, int kTensors, class... Arguments>
void define_eager(nb::module_& m, const char* name, nb::object (*)(Frame*, Arguments...)) {
  define(
      m, name, +[](Arguments... given) -> nb::object {
        const auto arguments = std::tie(given...);
        const auto tensor = [&]<std::size_t kAt>() -> nb::handle {
          const auto& first = std::get<0>(arguments);
          if constexpr (std::is_same_v<decltype(first), const nb::tuple&>)
            return entry(first, kAt);
          else
            return std::get<kAt>(arguments);
        };
        const bool direct = [&]<std::size_t... kFirst>(std::index_sequence<kFirst...>) {
          return may_bypass_dispatcher({tensor.template operator()<kFirst>()...});
        }
        (std::make_index_sequence<kTensors>{});
        if (!direct) return nb::borrow(Py_NotImplemented);
        Frame frame;
        try {
          return kFunction(&frame, given...);
        } catch (const nb::builtin_exception&) {
          return nb::borrow(Py_NotImplemented);
        } catch (const nb::python_error& error) {  // a refused number, or a failed allocation
          if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) throw;
          return nb::borrow(Py_NotImplemented);
        }
      });
}

}  // namespace rlk::bindings
