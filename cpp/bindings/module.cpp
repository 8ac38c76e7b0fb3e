// The extension module `_C`.
#include "module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpp/cpu/isa.h"
#include "cpp/cpu/thread_pool.h"
#include "ndarray.h"
#include "rlk/build.h"
#include "torch_state.h"

namespace nb = nanobind;

NB_MODULE(_C, m) {
  // Nothing of ours holds Python objects past interpreter exit but the cached array type.
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
  m.def("set_num_threads", &rlk::cpu::set_num_threads);
  m.def("num_threads", &rlk::cpu::num_threads);
  m.def("cpu_isa", [] { return std::string(rlk::cpu::isa_name(rlk::cpu::isa())); });
  m.def("has_exchange_api", [](nb::handle array) { return rlk::bindings::exchange_api(array) != nullptr; });
  m.def("bfloat16_capsule", &rlk::bindings::bfloat16_capsule);
  m.def("bool_capsule", &rlk::bindings::bool_capsule);
  m.def("set_cpu_isa", [](const std::string& name) {
    for (const rlk::cpu::Isa isa : rlk::cpu::kIsas) {
      if (name == rlk::cpu::isa_name(isa)) return rlk::cpu::set_isa(isa);
    }
    throw nb::value_error(("isa: expected baseline, avx2 or avx512, got '" + name + "'").c_str());
  });
  m.def("set_torch", &rlk::bindings::set_torch);
  rlk::bindings::bind_attention(m);
  rlk::bindings::bind_covariance_mask(m);
  rlk::bindings::bind_embedding(m);
  rlk::bindings::bind_gae(m);
  rlk::bindings::bind_group_advantage(m);
  rlk::bindings::bind_importance_weights(m);
  rlk::bindings::bind_kl(m);
  rlk::bindings::bind_kv_cache_append(m);
  rlk::bindings::bind_linear(m);
  rlk::bindings::bind_linear_logprob(m);
  rlk::bindings::bind_logprob(m);
  rlk::bindings::bind_masked_whiten(m);
  rlk::bindings::bind_mismatch_metrics(m);
  rlk::bindings::bind_optimal_token_baseline(m);
  rlk::bindings::bind_random_bits(m);
  rlk::bindings::bind_rms_norm(m);
  rlk::bindings::bind_pack(m);
  rlk::bindings::bind_preference_loss(m);
  rlk::bindings::bind_policy_loss(m);
  rlk::bindings::bind_process_logits(m);
  rlk::bindings::bind_rope(m);
  rlk::bindings::bind_sample(m);
  rlk::bindings::bind_scatter_rewards(m);
  rlk::bindings::bind_sequence_logprob(m);
  rlk::bindings::bind_shift_labels_packed(m);
  rlk::bindings::bind_silu_mul(m);
  rlk::bindings::bind_value_loss(m);
  rlk::bindings::bind_workspace(m);
}
