#pragma once

#include <nanobind/nanobind.h>

namespace rlk::bindings {
void bind_linear(nanobind::module_& m);
void bind_logprob(nanobind::module_& m);
void bind_rms_norm(nanobind::module_& m);
void bind_policy_loss(nanobind::module_& m);
void bind_rope(nanobind::module_& m);
void bind_silu_mul(nanobind::module_& m);
}  // namespace rlk::bindings
