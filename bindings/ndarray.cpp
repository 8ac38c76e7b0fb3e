#include "ndarray.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <iterator>
#include <utility>

namespace rlk::bindings {

// The ABI of DLPack 1.3: https://dmlc.github.io/dlpack/latest/c_api.html. nanobind defines the structs that describe an
// array.
using DLDevice = nb::dlpack::device;
using DLDataType = nb::dlpack::dtype;
using DLTensor = nb::dlpack::dltensor;
struct DLPackVersion {
  std::uint32_t major, minor;
};
struct DLManagedTensor {
  static constexpr const char *kName = "dltensor", *kUsed = "used_dltensor";
  DLTensor tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};
struct DLManagedTensorVersioned {
  static constexpr const char *kName = "dltensor_versioned", *kUsed = "used_dltensor_versioned";
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor tensor;
};
struct ExchangeApi {
  DLPackVersion version;
  ExchangeApi* previous;
  int (*allocate)(DLTensor* prototype, DLManagedTensorVersioned** out, void* error_ctx,
                  void (*set_error)(void*, const char* kind, const char* message));
  int (*managed_from_object)(void* object, DLManagedTensorVersioned** out);
  int (*object_from_managed)(DLManagedTensorVersioned* tensor, void** object);
  int (*view_from_object)(void* object, DLTensor* out);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

namespace {

constexpr std::uint64_t kReadOnlyFlag = 1;
enum DLDeviceType : std::int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLROCM = 10, kDLROCMHost = 11 };
enum DLTypeCode : std::uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };

struct Format {
  DType dtype;
  DLTypeCode code;
  std::uint8_t bits;
  const char* name;
};
constexpr Format kFormats[] = {
    {DType::kFloat32, kDLFloat, 32, "float32"}, {DType::kBFloat16, kDLBfloat, 16, "bfloat16"},
    {DType::kFloat16, kDLFloat, 16, "float16"}, {DType::kInt32, kDLInt, 32, "int32"},
    {DType::kInt64, kDLInt, 64, "int64"},       {DType::kBool, kDLBool, 8, "bool"},
    {DType::kUInt8, kDLUInt, 8, "uint8"},
};

const Format* format_of(ElementType t) {
  for (const Format& f : kFormats) {
    if (t.code == f.code && t.bits == f.bits && t.lanes == 1) return &f;
  }
  return nullptr;
}

Device device_of(DLDevice d, const char* name) {
  if (d.device_type == kDLCPU || d.device_type == kDLCUDAHost || d.device_type == kDLROCMHost)
    return {DeviceType::kCpu, 0};
  if (d.device_type == kDLCUDA) return {DeviceType::kCuda, d.device_id};
  if (d.device_type == kDLROCM) return {DeviceType::kRocm, d.device_id};
  type_error(name, "an array on a CPU, CUDA or ROCm device, got DLPack device type ", d.device_type);
}
DLDevice device_of(Device device) {
  return {device.type == DeviceType::kCpu    ? kDLCPU
          : device.type == DeviceType::kCuda ? kDLCUDA
                                             : kDLROCM,
          device.index};
}

PyObject *cure_of, *number_of, *integer_of;  // never released, since errors may still be raised at exit

[[noreturn]] void refuse_object(nb::handle object, const char* name) {
  const bool foreign = PyObject_HasAttrString(object.ptr(), "__dlpack__");
  const char* const wanted =
      foreign ? "an array of the framework of the first argument" : "an array that speaks DLPack";
  cured_type_error(object, name, words("expected ", wanted, ", got ", kind_of(object)));
}

// Whether the byte offset of a view's farthest element fits 63 bits.
bool is_addressable(const DLTensor& t) {
  const std::int64_t bytes = (t.dtype.bits + 7) / 8;
  std::int64_t reach = 1, step = 0, all = bytes;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return true;
    if (__builtin_mul_overflow(all, t.shape[i], &all)) return false;
    if (!t.strides) continue;
    const std::int64_t stride = t.strides[i];
    if (stride == INT64_MIN || __builtin_mul_overflow(stride < 0 ? -stride : stride, t.shape[i] - 1, &step) ||
        __builtin_add_overflow(reach, step, &reach)) {
      return false;
    }
  }
  return !__builtin_mul_overflow(reach, bytes, &reach);
}

// What an unconsumed capsule holds, or null for a capsule of another kind.
template <class Managed>
Managed* held_by(nb::handle capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), Managed::kName)) return nullptr;
  return static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), Managed::kName));
}
// Consumes the capsule: `owner` releases what it held.
template <class Managed, class Owner>
DLTensor take(Managed* managed, nb::handle capsule, Owner* owner) {
  PyCapsule_SetName(capsule.ptr(), Managed::kUsed);
  *owner = {managed, [](void* p) {
              auto* const held = static_cast<Managed*>(p);
              if (held->deleter) held->deleter(held);
            }};
  return managed->tensor;
}

template <class... Words>
[[noreturn]] void buffer_error(const char* name, const Words&... expected) {
  throw nb::buffer_error(words(name, ": expected ", expected...).c_str());
}

// An address for an array without memory, which a call describes but never reads. Each address is far from all others,
// so no two arrays of a call overlap.
void* nowhere() {
  static std::atomic<std::uintptr_t> next{4096};
  return reinterpret_cast<void*>(next.fetch_add(std::uintptr_t{1} << 44));
}

// `layout` of the object has int64 numbers: device type and index, the dtype's code and bits, the number of dimensions,
// sizes and strides. The object keeps sizes and strides alive.
int view_description(void* object, DLTensor* out) {
  PyObject* const layout = PyObject_GetAttrString(static_cast<PyObject*>(object), "layout");
  if (!layout) return -1;
  auto* const numbers = reinterpret_cast<std::int64_t*>(PyBytes_AsString(layout));
  Py_DECREF(layout);
  out->data = nowhere();
  out->device = {static_cast<std::int32_t>(numbers[0]), static_cast<std::int32_t>(numbers[1])};
  out->dtype = {static_cast<std::uint8_t>(numbers[2]), static_cast<std::uint8_t>(numbers[3]), 1};
  out->ndim = static_cast<std::int32_t>(numbers[4]);
  out->shape = numbers + 5;
  out->strides = out->shape + out->ndim;
  return 0;
}

}  // namespace

const ExchangeApi kDescribed = {
    .version = {1, 3},
    .previous = nullptr,
    .allocate =
        [](DLTensor*, DLManagedTensorVersioned** out, void*, void (*)(void*, const char*, const char*)) {
          *out = new DLManagedTensorVersioned{};
          (*out)->tensor.data = nowhere();
          return 0;
        },
    .managed_from_object = nullptr,
    .object_from_managed =
        [](DLManagedTensorVersioned* tensor, void** object) {
          delete tensor;
          *object = nb::none().release().ptr();
          return 0;
        },
    .view_from_object = view_description,
    .current_stream = [](std::int32_t, std::int32_t, void**) { return 0; }};
nb::object described_api() { return nb::capsule(&kDescribed, "dlpack_exchange_api"); }

void value_error(const std::string& message) { throw nb::value_error(message.c_str()); }
void raise_type_error(const std::string& message) { throw nb::type_error(message.c_str()); }

void set_python(nb::object cure, nb::object number, nb::object integer64) {
  cure_of = cure.release().ptr();
  number_of = number.release().ptr();
  integer_of = integer64.release().ptr();
}
void cured_type_error(nb::handle object, const char* name, const std::string& said) {
  const nb::object cure = cure_of ? nb::handle(cure_of)(name, object, said.c_str()) : nb::str("");
  raise_type_error(words(name, ": ", said, nb::handle(cure)));
}

const char* name_of(DType dtype) {
  for (const Format& f : kFormats) {
    if (f.dtype == dtype) return f.name;
  }
  return "?";
}

std::string name_of(ElementType t) {
  if (const Format* const format = format_of(t)) return format->name;
  constexpr const char* kKinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  constexpr const char* kFloat8[] = {"_e3m4",     "_e4m3", "_e4m3b11fnuz", "_e4m3fn",
                                     "_e4m3fnuz", "_e5m2", "_e5m2fnuz",    "_e8m0fnu"};
  const char* kind =
      t.code < std::size(kKinds) ? kKinds[t.code] : "float";  // codes past kKinds are floats of 8 bits and less
  const std::size_t form = t.code - std::size(kKinds);        // index among those floats
  const char* of_float8 = t.code >= std::size(kKinds) && form < std::size(kFloat8) ? kFloat8[form] : "";
  return kind + std::to_string(t.bits) + of_float8 + (t.lanes == 1 ? "" : "x" + std::to_string(t.lanes));
}

ElementType element_of(DType dtype) {
  for (const Format& f : kFormats) {
    if (f.dtype == dtype) return {f.code, f.bits};
  }
  type_error("out", "a dtype of arrays");
}

bool ElementType::is_float() const { return code == kDLFloat || code == kDLBfloat; }

std::string name_of(Device device) {
  if (device.type == DeviceType::kCpu) return "cpu";
  return (device.type == DeviceType::kCuda ? "cuda:" : "rocm:") + std::to_string(device.index);
}

std::string kind_of(nb::handle object) { return nb::str(object.type().attr("__name__")).c_str(); }

std::string word(nb::handle value) {
  if (PyLong_Check(value.ptr())) {
    const auto bits = nb::cast<std::int64_t>(value.attr("bit_length")());
    if (bits > 64) return words("an integer of ", bits, " bits");  // Python would print many digits
  }
  const nb::object text = nb::steal(PyObject_Str(value.ptr()));
  const char* const utf8 = text.is_valid() ? PyUnicode_AsUTF8AndSize(text.ptr(), nullptr) : nullptr;
  if (utf8 != nullptr) return utf8;
  PyErr_Clear();  // Python refuses to print thousands of digits, even those of a Fraction
  return words("a value of type ", kind_of(value));
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

namespace {

// torch's types whose methods have no override of __torch_function__, and torch's function that calls a method without
// its override. An override would cost microseconds per call.
PyObject *plain_types[2], *without_override;

// The interface of an array type. `api` is null if the type has no exchange API; `is_neg` is the type's method of this
// name, or null. `overrides` says whether a call of `is_neg` needs `without_override`.
struct Exchange {
  PyTypeObject* type;
  const ExchangeApi* api;
  PyObject* is_neg;
  bool overrides;
};

Exchange exchange_of(nb::handle array) {
  // A process has few such types, such as torch's Tensor and Parameter. Each type is looked up by its address. The GIL
  // guards the cache.
  static Exchange cache[8] = {};
  static int next = 0;
  PyTypeObject* type = Py_TYPE(array.ptr());
  for (const Exchange& entry : cache) {
    if (type == entry.type) return entry;
  }
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_Clear();
    return {};
  }
  const ExchangeApi* api = nullptr;
  if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (api && api->version.major != 1) api = api->previous;
  }
  Py_DECREF(capsule);
  if (api && api->view_from_object && api->allocate && api->object_from_managed && api->current_stream) {
    PyObject* is_neg = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "is_neg");
    if (!is_neg) PyErr_Clear();
    Exchange& entry = cache[next++ % std::size(cache)];
    Py_INCREF(reinterpret_cast<PyObject*>(type));  // prevents that another type gets this address
    Py_XDECREF(reinterpret_cast<PyObject*>(entry.type));
    Py_XDECREF(entry.is_neg);
    const bool overrides =
        without_override && std::ranges::find(plain_types, reinterpret_cast<PyObject*>(type)) == std::end(plain_types);
    entry = {type, api, is_neg, overrides};
    return entry;
  }
  return {};
}

}  // namespace

void set_plain_types(nb::handle tensor, nb::handle parameter, nb::object function) {
  plain_types[0] = tensor.ptr();
  plain_types[1] = parameter.ptr();
  without_override = function.release().ptr();
}

const ExchangeApi* exchange_api(nb::handle array) { return exchange_of(array).api; }

static bool is_negated(nb::handle array, const Exchange& exchange) {
  if (!exchange.is_neg) return false;
  PyObject* const arguments[] = {array.ptr()};
  PyObject* const result =
      exchange.overrides
          ? nb::object(nb::handle(without_override)(nb::handle(exchange.is_neg), nb::tuple(), nb::make_tuple(array)))
                .release()
                .ptr()
          : PyObject_Vectorcall(exchange.is_neg, arguments, 1, nullptr);
  if (!result) throw nb::python_error();
  Py_DECREF(result);
  return result == Py_True;
}
bool is_negated(nb::handle array) { return is_negated(array, exchange_of(array)); }
bool has_numbers(nb::handle tensor) {
  const Exchange exchange = exchange_of(tensor);
  if (!exchange.api || is_negated(tensor, exchange)) return false;
  DLTensor view{};
  const bool has_view = exchange.api->view_from_object(tensor.ptr(), &view) == 0;
  if (!has_view) PyErr_Clear();
  return has_view && view.data;
}

Array::Array(nb::handle object, const char* name, const Dtypes& dtypes) : object_(object), name_(name) {
  DLTensor t{};
  if (PyCapsule_CheckExact(object.ptr())) {
    if (auto* const managed = held_by<DLManagedTensorVersioned>(object)) {
      if (managed->version.major != 1) {
        buffer_error(name, "DLPack version 1.x, got ", managed->version.major, ".", managed->version.minor);
      }
      view_.read_only = managed->flags & kReadOnlyFlag;
      t = take(managed, object, &owner_);
    } else if (auto* const unversioned = held_by<DLManagedTensor>(object)) {
      t = take(unversioned, object, &owner_);
    } else {
      const char* got = PyCapsule_GetName(object.ptr());
      buffer_error(name, "an unconsumed DLPack capsule, got one named '", got ? got : "", "'");
    }
  } else if (const Exchange exchange = exchange_of(object); exchange.api) {
    if (exchange.api->view_from_object(object.ptr(), &t) != 0) {
      PyErr_Clear();  // the exporter's own message is a stack trace
      type_error(name, "a dense array in memory, got a ", kind_of(object), " that has none (sparse, meta or fake)");
    }
    is_described_ = exchange.api == &kDescribed;
    if (is_negated(object, exchange)) {
      argument_error(name, "has torch's negative bit; call .resolve_neg()");
    }
  } else {
    refuse_object(object, name);
  }
  type_ = {t.dtype.code, t.dtype.bits, t.dtype.lanes};
  const Format* format = format_of(type_);
  const bool moves = dtypes.moves && t.dtype.lanes == 1 && t.dtype.bits >= 8 && t.dtype.bits <= 128 &&
                     std::has_single_bit(t.dtype.bits);
  if (!format && !moves) {
    cured_type_error(object, name, words("expected dtype ", dtypes.names, ", got ", name_of(type_)));
  }
  if (format) view_.dtype = format->dtype;
  view_.device = device_of(t.device, name);
  require(t.ndim >= 0 && t.ndim <= 8, name, "at most 8 dimensions, got ", t.ndim);
  const std::span<const std::int64_t> shape(t.shape, static_cast<std::size_t>(t.ndim));
  std::int64_t elements = 1;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] < 0 || __builtin_mul_overflow(elements, t.shape[i], &elements)) {
      argument_error(name, "shape ", shape, " is negative or its product overflows");
    }
    inline_shape_[i] = t.shape[i];
    inline_strides_[i] = t.strides ? t.strides[i] : 0;
  }
  if (!is_addressable(t)) {
    argument_error(name, "shape ", shape, " with its strides reaches beyond 64-bit addresses");
  }
  view_.ndim = t.ndim;
  view_.shape = inline_shape_;
  view_.strides = t.strides ? inline_strides_ : nullptr;
  view_.data = static_cast<char*>(t.data) + t.byte_offset;
  if (!t.data) {
    // A torch DTensor has no memory of its own, whatever its number of elements. Its DLPack view does not show that it
    // is a DTensor.
    if (kind_of(object) == "DTensor") type_error(name, "a local tensor, got a DTensor; pass tensor.to_local()");
    if (elements > 0) argument_error(name, "has no memory (a fake, meta or freed tensor)");
  }
  const auto alignment = static_cast<unsigned>(std::min(element_bytes(), 8));
  require(elements == 0 || reinterpret_cast<std::uintptr_t>(view_.data) % alignment == 0, name,
          "an address that is a multiple of its ", alignment, "-byte elements");
  if (!dtypes.has(view_.dtype)) dtype_error(*this, dtypes.names);
}

static nb::object relabelled(nb::object capsule, int bits, int code) {
  auto* const versioned = held_by<DLManagedTensorVersioned>(capsule);
  auto* const unversioned = held_by<DLManagedTensor>(capsule);
  DLTensor* const tensor = versioned ? &versioned->tensor : unversioned ? &unversioned->tensor : nullptr;
  if (!tensor || tensor->dtype.bits != bits) {
    raise_type_error(words("expected an unconsumed DLPack capsule of ", bits, "-bit elements"));
  }
  tensor->dtype.code = static_cast<std::uint8_t>(code);
  return capsule;
}
nb::object bfloat16_capsule(nb::object capsule) { return relabelled(std::move(capsule), 16, kDLBfloat); }
nb::object bool_capsule(nb::object capsule) { return relabelled(std::move(capsule), 8, kDLBool); }

bool is_array(nb::handle given) {
  if (PyLong_CheckExact(given.ptr()) || PyFloat_CheckExact(given.ptr())) return false;
  return PyCapsule_CheckExact(given.ptr()) || exchange_api(given) != nullptr || nb::hasattr(given, "__dlpack__");
}

// The function how_to_build() in _variants.py has the same text.
constexpr const char* kHowToBuild =
    "; uninstall it, and in a clone of the repository run: pip install . --config-settings=cmake.define.RLK_VARIANT=";

void require_backend(const char* op, const Array& a) {
  if (a.is_described()) return;
  const Device device = a.view().device;
  try {
    rlk::require_backend(op, device);
  } catch (const Unsupported& error) {
    const std::string text = error.what();  // after ';' it recommends wheels that no package index has
    const std::string variant = device.type == DeviceType::kRocm ? "rocm6" : "cu130";
    throw Unsupported(text.substr(0, text.find(';')) + kHowToBuild + variant + " (docs/build.md)");
  }
}

const Array& Frame::read(nb::handle object, const char* name, const Dtypes& dtypes) {
  const Array& array = kept.emplace_front(object, name, dtypes);
  if (!first) first = &array;
  if (array->device == device()) return array;
  argument_error(array, "expected device ", device(), names_first ? words(" (that of ", *first, ")") : "", ", got ",
                 array->device);
}

void Frame::require_writable(const Array& out, const Array* in_place) const {
  if (out->read_only) throw nb::buffer_error(words(out, ": is read-only").c_str());
  require(!overlaps_itself(out.view()), out, "strides that do not overlap");
  for (const Array& other : kept) {
    if (&other == &out || &other == in_place || !ranges_overlap(out.view(), other.view())) continue;
    argument_error(out, "may share memory with ", other, ": their addresses overlap");
  }
}

Caller::Caller(const Frame& frame) : allocate(frame.allocate), device(frame.device()), stream(frame.stream) {
  const nb::handle first = frame.first->object();
  if (PyCapsule_CheckExact(first.ptr())) return;
  api = exchange_api(first);
  if (!api || device.type == DeviceType::kCpu) return;
  void* current = nullptr;
  if (api->current_stream(device_of(device).device_type, device.index, &current) != 0) throw nb::python_error();
  stream = reinterpret_cast<Stream>(current);
}

double read_number(nb::handle value, const char* name, const char* expected) {
  if (PyFloat_CheckExact(value.ptr())) return PyFloat_AsDouble(value.ptr());
  if (PyLong_CheckExact(value.ptr())) {
    const double x = PyLong_AsDouble(value.ptr());
    if (!PyErr_Occurred()) return x;
    PyErr_Clear();
  }
  return nb::cast<double>(nb::handle(number_of)(name, value, expected));
}

std::int64_t read_integer(nb::handle value, const char* name, const char* expected) {
  if (PyLong_CheckExact(value.ptr())) {
    int too_large = 0;
    const long long x = PyLong_AsLongLongAndOverflow(value.ptr(), &too_large);
    if (too_large == 0) return x;
  }
  return nb::cast<std::int64_t>(nb::handle(integer_of)(name, value, expected));
}

Caller::Fresh Caller::empty(Shape shape, ElementType type) const {
  if (!api) {
    nb::list sizes;
    for (std::int64_t s : shape) sizes.append(s);
    nb::tuple made = nb::cast<nb::tuple>(allocate(nb::tuple(sizes), name_of(type).c_str()));
    const Array array(made[1], "out", kAnyDtype);
    require(array.view().device == device, "out", "memory on ", device, ", the allocator gave some on ",
            array.view().device);
    return {nb::object(made[0]), array.view().data};  // the array in made[0] keeps the memory
  }
  DLTensor prototype{};
  prototype.device = device_of(device);
  prototype.ndim = static_cast<std::int32_t>(shape.size());
  prototype.shape = const_cast<std::int64_t*>(shape.data());  // DLPack says that the allocator only reads the shape
  prototype.dtype = {type.code, type.bits, type.lanes};
  DLManagedTensorVersioned* managed = nullptr;
  std::string error;
  const auto set_error = [](void* ctx, const char* kind, const char* message) {
    *static_cast<std::string*>(ctx) = std::string(kind) + ": " + message;
  };
  if (api->allocate(&prototype, &managed, &error, set_error) != 0) {
    if (PyErr_Occurred()) throw nb::python_error();
    PyErr_SetString(PyExc_MemoryError, ("out: " + error.substr(0, error.find('\n'))).c_str());  // drops the stack trace
    throw nb::python_error();
  }
  void* data = static_cast<char*>(managed->tensor.data) + managed->tensor.byte_offset;
  void* object = nullptr;
  if (api->object_from_managed(managed, &object) != 0) throw nb::python_error();
  return {nb::steal(static_cast<PyObject*>(object)), data};
}

}  // namespace rlk::bindings
