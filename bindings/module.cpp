// The extension module `_C`.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "call.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#include "rlk/build.h"
#include "rlk/plan_note.h"

namespace nb = nanobind;

NB_MODULE(_C, m) {
  // Turns off nanobind's warnings about leaks, since the cache of array types (ndarray.cpp) holds Python objects past
  // the interpreter's exit.
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& e, void*) {
    try {
      std::rethrow_exception(e);
    } catch (const rlk::InvalidArgument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  m.attr("variant") = RLK_VARIANT_NAME;
  m.attr("version") = RLK_VERSION;
  m.attr("architectures") = RLK_ARCHITECTURES;
  m.def("set_num_threads", [](int n) { rlk::cpu::set_num_threads(std::min(n, rlk::cpu::kMostThreads)); });
  m.def("num_threads", &rlk::cpu::num_threads);
  m.def("cpu_isa", [] { return std::string(rlk::cpu::isa_name(rlk::cpu::isa())); });
  m.def("has_exchange_api", [](nb::handle array) { return rlk::bindings::exchange_api(array) != nullptr; });
  m.def("described_api", &rlk::bindings::described_api);
  m.def("bfloat16_capsule", &rlk::bindings::bfloat16_capsule);
  m.def("bool_capsule", &rlk::bindings::bool_capsule);
  m.def("set_cpu_isa", [](const std::string& name) {
    for (const rlk::cpu::Isa isa : rlk::cpu::kIsas) {
      if (name == rlk::cpu::isa_name(isa)) return rlk::cpu::set_isa(isa);
    }
    throw nb::value_error(("isa: expected baseline, avx2 or avx512, got '" + name + "'").c_str());
  });
  m.def("note_plans", [](bool on) { rlk::plans_are_noted.store(on, std::memory_order_relaxed); });
  m.def("take_plans", &rlk::take_plans);
  m.def("set_python", &rlk::bindings::set_python);
  m.def("wanted_gradients", &rlk::bindings::wanted_gradients);
  m.def("may_skip_dispatcher", &rlk::bindings::may_skip_dispatcher);
  m.def("is_direct_gradient", &rlk::bindings::is_direct_gradient);
  m.def("set_torch", &rlk::bindings::set_torch);
  for (const auto define : rlk::bindings::Registered::all()) define(m);
}
