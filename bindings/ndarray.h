// All code that uses DLPack. It turns an array into a TensorView, and makes outputs in the caller's framework.
//
// An array whose type offers the DLPack C exchange API (torch 2.11 and later) is read without an owning capsule. The
// type's API gives the current stream and allocates the outputs. Any other array comes as a capsule, which Python
// requested with an explicit stream (_dispatch.py).
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <concepts>
#include <forward_list>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "rlk/tensor_view.h"

namespace rlk::bindings {

namespace nb = nanobind;

struct ExchangeApi;  // DLPackExchangeAPI of one array type

// Exchange API of the object's type, or null.
const ExchangeApi* exchange_api(nb::handle array);

// Exchange API of tensors without memory, as tracing uses them (python/rl_kernel_native/_described.py). A call with
// them makes all checks of its arguments, runs no kernel and returns None for each output.
extern const ExchangeApi kDescribed;
nb::object described_api();

// Whether a torch tensor has the negative bit. Its numbers are then the negatives of the numbers in memory. The result
// is false for an array of any other framework.
bool is_negated(nb::handle array);
// Stores torch's Tensor and Parameter, which outlive every call. Also stores torch's function that calls a function
// without overrides of __torch_function__; its arguments are (function, types, arguments).
void set_plain_types(nb::handle tensor, nb::handle parameter, nb::object function);
// Whether a torch tensor has memory that holds its numbers. False for an empty tensor.
bool has_numbers(nb::handle tensor);

// The shape of an array. A Shape object is valid only within the expression that creates it.
struct Shape : std::span<const std::int64_t> {
  using span::span;
  Shape(std::span<const std::int64_t> sizes) : span(sizes) {}
  Shape(std::initializer_list<std::int64_t> sizes) : span(sizes.begin(), sizes.size()) {}
};

// DLPack's type of an element.
struct ElementType {
  std::uint8_t code = 0, bits = 0;
  std::uint16_t lanes = 1;
  bool is_float() const;  // float16 and wider: all bits of a zero are 0, except for the sign
};
ElementType element_of(DType dtype);

// Dtypes that an argument may have, with their names for errors.
struct Dtypes {
  constexpr Dtypes(std::initializer_list<DType> dtypes, const char* text) : names(text) {
    for (const DType t : dtypes) set |= 1u << static_cast<int>(t);
  }
  // Accepts every dtype that operators know; the caller compares the dtype with that of another argument. With `any`,
  // every dtype with elements of 1, 2, 4, 8 or 16 bytes is accepted, for operators that only move bytes or test for
  // zero.
  constexpr Dtypes(const char* text, bool any = false) : set(~0u), names(text), moves(any) {}
  bool has(DType t) const { return set >> static_cast<int>(t) & 1; }

  unsigned set = 0;
  const char* names;
  bool moves = false;
};
constexpr Dtypes kFloats{{DType::kFloat32, DType::kBFloat16, DType::kFloat16}, "float32, bfloat16 or float16"};
constexpr Dtypes kFloat32{{DType::kFloat32}, "float32"};
constexpr Dtypes kIndices{{DType::kInt32, DType::kInt64}, "int32 or int64"};
constexpr Dtypes kInt32{{DType::kInt32}, "int32"};
constexpr Dtypes kInt64{{DType::kInt64}, "int64"};
constexpr Dtypes kBool{{DType::kBool}, "bool"};
constexpr Dtypes kAnyDtype{"of 1, 2, 4, 8 or 16 bytes an element", true};

// An array argument. Its view is valid as long as this object lives. The constructor raises a TypeError or BufferError
// that names `name`, also for a dtype that is not in `dtypes`. With kAnyDtype, the view's dtype may have no meaning.
class Array {
 public:
  Array(nb::handle object, const char* name, const Dtypes& dtypes);
  Array(const Array&) = delete;

  const TensorView& view() const { return view_; }
  const TensorView* operator->() const { return &view_; }
  template <class T = void>
  const T* data() const {
    return static_cast<const T*>(view_.data);
  }
  // Never null, even if the array is empty: null would tell a kernel that there is no array.
  template <class T>
  const T* elements() const {
    static constexpr T kEmpty{};
    return view_.data ? data<T>() : &kEmpty;
  }
  const char* name() const { return name_; }
  nb::handle object() const { return object_; }
  bool is_described() const { return is_described_; }
  std::span<const std::int64_t> shape() const { return {view_.shape, static_cast<std::size_t>(view_.ndim)}; }
  ElementType type() const { return type_; }
  int element_bytes() const { return type_.bits / 8; }

 private:
  TensorView view_;
  nb::handle object_;  // the object that Python passed; the object outlives the call
  const char* name_;
  ElementType type_;
  bool is_described_ = false;
  std::int64_t inline_shape_[8];  // a copy, since a borrowed view may point to the exporter's scratch
  std::int64_t inline_strides_[8];
  std::unique_ptr<void, void (*)(void*)> owner_{nullptr, nullptr};  // the managed tensor that a capsule held
};

// The last arguments of a function that allocates its outputs. `allocate` is a callable (shape, dtype name) -> (array,
// its DLPack capsule), or None for torch tensors. `stream` is the stream of arrays that come as capsules. A Frame keeps
// the arrays of the call alive. All arrays are on the device of the first array, whose framework allocates the outputs.
struct Frame {
  nb::handle allocate = Py_None;
  std::uintptr_t stream = 0;
  std::forward_list<Array> kept = {};
  const Array* first = nullptr;
  bool names_first = false;  // whether an error about a device names the first array

  Device device() const { return first->view().device; }
  // Reads an array, which lives as long as the frame.
  const Array& read(nb::handle object, const char* name, const Dtypes& dtypes);
  // Reads an array, or returns null for None.
  const Array* optional(nb::handle object, const char* name, const Dtypes& dtypes) {
    return object.is_none() ? nullptr : &read(object, name, dtypes);
  }
  // Requires that the call may write `out`. No two of its elements may share memory. `in_place` is the only other array
  // of the call that may share memory with `out`.
  void require_writable(const Array& out, const Array* in_place = nullptr) const;
};

// Allocator of outputs, and stream of the work. The allocator is torch, through its exchange API, or `allocate`.
struct Caller {
  explicit Caller(const Frame& frame);

  const ExchangeApi* api = nullptr;
  nb::handle allocate;
  Device device;
  Stream stream = 0;

  bool describes() const { return api == &kDescribed; }
  struct Fresh {
    nb::object array;
    void* data;
  };
  Fresh empty(Shape shape, ElementType type) const;
  Fresh empty(Shape shape, DType dtype) const { return empty(shape, element_of(dtype)); }
};
// Refuses an array on a device for which this build has no kernels of `op`.
void require_backend(const char* op, const Array& a);

// Whether Python gave an array and not a number.
bool is_array(nb::handle given);

// An element of a tuple, valid as long as the tuple.
inline nb::handle entry(const nb::tuple& of, int i) {
  if (PyObject* const found = PyTuple_GetItem(of.ptr(), i)) return found;
  throw nb::python_error();
}
template <std::size_t kCount>
std::array<nb::handle, kCount> entries(const nb::tuple& of) {
  std::array<nb::handle, kCount> found;
  for (std::size_t i = 0; i < kCount; ++i) found[i] = entry(of, static_cast<int>(i));
  return found;
}

// Marks an unconsumed capsule of uint16 as bfloat16, since NumPy has no bfloat16; returns the capsule.
nb::object bfloat16_capsule(nb::object capsule);
nb::object bool_capsule(nb::object capsule);  // marks an unconsumed capsule of bytes as bool

const char* name_of(DType dtype);
std::string name_of(ElementType type);
std::string name_of(Device device);
std::string kind_of(nb::handle object);
std::string shape_text(std::span<const std::int64_t> shape);

// Words of an error message: text, numbers, shapes, dtypes and devices.
inline std::string word(std::string text) { return text; }
inline std::string word(std::integral auto number) { return std::to_string(number); }
inline std::string word(double number) { return nb::repr(nb::float_(number)).c_str(); }
inline std::string word(std::span<const std::int64_t> shape) { return shape_text(shape); }
inline std::string word(DType dtype) { return name_of(dtype); }
inline std::string word(Device device) { return name_of(device); }
inline std::string word(const Array& a) { return a.name(); }
std::string word(nb::handle value);
template <class... Words>
std::string words(const Words&... all) {
  return (std::string() + ... + word(all));
}

// Stores functions of Python: `of` of the module `_cures`, (name, value, message without the name) -> text, then
// `number` and `integer64` of the module `_check`.
void set_python(nb::object cure, nb::object number, nb::object integer64);

// The functions below raise a ValueError or a TypeError. `name` is the name of an argument, or the argument's Array.
[[noreturn]] void value_error(const std::string& message);
[[noreturn]] void raise_type_error(const std::string& message);
template <class Name, class... Words>
[[noreturn, gnu::cold, gnu::noinline]] void argument_error(const Name& name, const Words&... message) {
  value_error(words(name, ": ", message...));
}
template <class... Words>
[[noreturn, gnu::cold, gnu::noinline]] void type_error(const char* name, const Words&... expected) {
  raise_type_error(words(name, ": expected ", expected...));
}
// Raises a TypeError about an argument. The message ends with the remedy that `_cures.of` gives.
[[noreturn]] void cured_type_error(nb::handle object, const char* name, const std::string& said);
template <class... Words>
[[noreturn, gnu::cold, gnu::noinline]] void dtype_error(const Array& a, const Words&... expected) {
  cured_type_error(a.object(), a.name(), words("expected dtype ", expected..., ", got ", a->dtype));
}
// Raises a ValueError if the condition does not hold, and builds the message only then.
template <class Name, class... Words>
void require(bool right, const Name& name, const Words&... expected) {
  if (!right) [[unlikely]]
    argument_error(name, "expected ", expected...);
}
// Like require(), with the array's shape at the end of the message.
template <class... Words>
void require_shape(bool right, const Array& a, const Words&... expected) {
  if (!right) [[unlikely]]
    argument_error(a, "expected ", expected..., ", got ", a.shape());
}
// The error message if Python passed None.
constexpr const char* kNothing = "an array that speaks DLPack, got NoneType";
// The end of an error message about an array whose layout is invalid, where a contiguous copy would be valid.
constexpr const char* kCopyHint = "; make it contiguous: np.ascontiguousarray, or .contiguous() for torch";

// Read a number of Python, by the rules of `number` and `integer64` of the module `_check`.
double read_number(nb::handle value, const char* name, const char* expected = "a number");
std::int64_t read_integer(nb::handle value, const char* name, const char* expected);

}  // namespace rlk::bindings
