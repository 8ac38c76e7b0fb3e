// Fields of a struct in Python's packed form: doubles in the order of the struct.
#pragma once

#include <cstring>
#include <type_traits>

#include "ndarray.h"

namespace rlk::bindings {

class PackedFields {
 public:
  PackedFields(nb::handle packed, const char* expected) : expected_(expected) {
    if (PyBytes_AsStringAndSize(packed.ptr(), &bytes_, &left_) != 0) throw nb::python_error();
  }
  template <class... Fields>
  void read(Fields*... fields) {
    ((*fields = next<Fields>()), ...);
  }
  void require_end() const { require(left_ == 0, "spec", expected_); }

 private:
  template <class Field>
  Field next() {
    double value;
    require(left_ >= static_cast<Py_ssize_t>(sizeof value), "spec", expected_);
    std::memcpy(&value, bytes_, sizeof value);
    bytes_ += sizeof value;
    left_ -= sizeof value;
    if constexpr (std::is_floating_point_v<Field> || sizeof(Field) == 8) {
      return static_cast<Field>(value);
    } else {
      return static_cast<Field>(static_cast<std::int32_t>(value));
    }
  }

  const char* expected_;
  char* bytes_ = nullptr;
  Py_ssize_t left_ = 0;
};

}  // namespace rlk::bindings
