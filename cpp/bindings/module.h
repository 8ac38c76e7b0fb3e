#pragma once

#include <nanobind/nanobind.h>

namespace rlk::bindings {
void bind_attention(nanobind::module_& m);
void bind_covariance_mask(nanobind::module_& m);
void bind_embedding(nanobind::module_& m);
void bind_gae(nanobind::module_& m);
void bind_group_advantage(nanobind::module_& m);
void bind_importance_weights(nanobind::module_& m);
void bind_kl(nanobind::module_& m);
void bind_kv_cache_append(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_linear_logprob(nanobind::module_& m);
void bind_logprob(nanobind::module_& m);
void bind_masked_whiten(nanobind::module_& m);
void bind_mismatch_metrics(nanobind::module_& m);
void bind_optimal_token_baseline(nanobind::module_& m);
void bind_random_bits(nanobind::module_& m);
void bind_rms_norm(nanobind::module_& m);
void bind_pack(nanobind::module_& m);
void bind_preference_loss(nanobind::module_& m);
void bind_policy_loss(nanobind::module_& m);
void bind_process_logits(nanobind::module_& m);
void bind_rope(nanobind::module_& m);
void bind_sample(nanobind::module_& m);
void bind_scatter_rewards(nanobind::module_& m);
void bind_sequence_logprob(nanobind::module_& m);
void bind_shift_labels_packed(nanobind::module_& m);
void bind_silu_mul(nanobind::module_& m);
void bind_value_loss(nanobind::module_& m);
void bind_workspace(nanobind::module_& m);
}  // namespace rlk::bindings
