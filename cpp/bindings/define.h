// Definition of functions whose every argument is positional and may be None: a keyword costs more than the work of a
// small call.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "../cpu/float_environment.h"

namespace rlk::bindings {

namespace nb = nanobind;

// Numbers are rounded to float32 to nearest even, whatever the caller's rounding mode is.
template <std::size_t... kIndex, class... Arguments>
void define(nb::module_& m, const char* name, nb::object (*function)(Arguments...), std::index_sequence<kIndex...>) {
  const auto call = [function](Arguments... arguments) -> nb::object {
    const cpu::FloatEnvironment environment;
    return function(std::forward<Arguments>(arguments)...);
  };
  m.def(name, call, ((void)kIndex, nb::arg().none())...);
}
template <class... Arguments>
void define(nb::module_& m, const char* name, nb::object (*function)(Arguments...)) {
  define(m, name, function, std::index_sequence_for<Arguments...>{});
}

}  // namespace rlk::bindings
