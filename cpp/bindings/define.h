// Definition of functions whose every argument is positional and may be None: a keyword costs more than the work of a
// small call.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

namespace rlk::bindings {

namespace nb = nanobind;

template <class Function, std::size_t... kIndex>
void define(nb::module_& m, const char* name, Function* function, std::index_sequence<kIndex...>) {
  m.def(name, function, ((void)kIndex, nb::arg().none())...);
}
template <class... Arguments>
void define(nb::module_& m, const char* name, nb::object (*function)(Arguments...)) {
  define(m, name, function, std::index_sequence_for<Arguments...>{});
}

}  // namespace rlk::bindings
