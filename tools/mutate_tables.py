"""Tables of tools/mutate.py: which tests should notice the faults of a file, and the faults that no test can notice."""

from __future__ import annotations

UNDECIDED = "undecided"  # a verdict that counts neither way: the machine is busy, or cannot plant the fault alone
# Tests of files that belong to no operator.
SHARED = {
    "_arithmetic": ["test_sum_order", "test_linear", "test_linear_torch", "test_torch"],
    "_check": ["test_bad_input", "test_linear_bad_input", "test_words", "test_token_model"],
    "_call": ["test_first_calls", "test_engine", "test_torch"],
    "_composed": ["test_engine", "test_silu_mul_torch", "test_rms_norm_torch", "test_policy_loss_torch"],
    "_contract_terms": ["test_contract"],
    "_dispatch": [
        "test_pairs",
        "test_bad_export",
        "test_token_weight",
        "test_frameworks",
        "test_bad_input",
        "test_out_writes",
    ],
    "_cures": ["test_cures"],
    "_in_graph": ["test_changing_numbers", "test_engine"],
    "_jax_checks": ["test_jax"],
    "_metrics": ["test_denominators", "test_policy_loss"],
    "_penalties": ["test_process_logits", "test_sample"],
    "_rewards": ["test_group_advantage"],
    "_lost": ["test_engine_direct", "test_attention_partials"],
    "_main_grad": ["test_linear_bad_output", "test_rms_norm_engine", "test_overlaps"],
    "_engine": ["test_engine", "test_torch"],
    "_native": ["test_interface", "test_doctor"],
    "_operator": ["test_engine", "test_torch"],
    "_register": ["test_changing_numbers", "test_engine", "test_torch", "test_fake_tensors"],
    "_rejection": ["test_verify_draft"],
    "_rollout_presets": ["test_importance_weights", "test_presets", "test_verl_advantages"],
    "_run": ["test_engine", "test_torch"],
    "_described": ["test_fake_tensors", "test_engine", "test_token_model"],
    "_transforms": ["test_engine", "test_torch", "test_linear_func"],
    "_workspace": ["test_linear", "test_linear_logprob", "test_torch"],
    "attention_merge": ["test_attention_partials", "test_attention_partials_bad_input"],
    "eager_autograd": ["test_linear_engine", "test_linear_torch", "test_embedding_engine"],
    "linear_cross_entropy": [
        "test_linear_logprob_loss",
        "test_token_accuracy",
        "test_label_smoothing",
        "test_denominators",
        "test_pairs",
    ],
    "group_advantage": ["test_ranks"],
    "logprob": ["test_linear_logprob", "test_linear_logprob_engine", "test_linear_logprob_shards"],
    "masked_whiten": ["test_ranks"],
    "policy_loss": ["test_token_weight"],
    "sample": ["test_linear_sample", "test_process_logits", "test_random_bits"],
    "value_loss": ["test_token_weight"],
    "call": ["test_workspace", "test_engine", "test_linear_sample", "test_linear_logprob"],
    "ndarray": ["test_bad_export", "test_bad_input", "test_words"],
    "softmax_stats": ["test_label_smoothing"],
}
# Tests of C++ files whose names begin with no operator's name.
OF_STEM = {
    "cache_append": ["kv_cache_append"], "byte_copy": ["pack"], "covariance": ["covariance_mask"],
    "importance": ["importance_weights"], "mismatch": ["mismatch_metrics"], "mufu": ["logprob"],
    "optimal": ["optimal_token_baseline"], "policy": ["policy_loss"], "preference": ["preference_loss"],
    "process_logits": ["process_logits", "sample"], "reward": ["scatter_rewards"],
    "rejection": ["policy_loss", "importance_weights"], "sequence": ["sequence_logprob", "policy_loss"],
    "scored": ["linear_logprob"], "softmax": ["logprob"], "span_check": ["scatter_rewards"], "value": ["value_loss"],
    "team_sum": ["group_advantage", "masked_whiten"], "merge_order": ["group_advantage"],
    "central": ["value_loss", "mismatch_metrics", "importance_weights"],
    "moment": ["group_advantage", "masked_whiten"], "philox": ["random_bits", "sample"], "mma_model": ["linear"],
    "row_operators": ["embedding", "rms_norm", "silu_mul", "linear"],
    "arguments": ["linear", "logprob", "one_dimension"],
    "token_operators": [
        "covariance_mask", "gae", "group_advantage", "importance_weights", "kl", "masked_whiten", "mismatch_metrics",
        "optimal_token_baseline", "policy_loss", "scatter_rewards", "sequence_logprob", "shift_labels_packed",
        "value_loss",
    ],
    "token": ["kl", "value_loss", "sequence_logprob", "policy_loss"],
    "call": ["workspace", "torch", "frameworks", "engine"],
    "plain_tokens": ["kl", "policy_loss"], "flag_words": ["pack", "scatter_rewards"], "lora": ["linear_logprob"],
    "tree_sum": ["sequence_logprob", "linear"], "exp": ["kl", "policy_loss", "logprob"], "log": ["logprob", "kl"],
    "sigmoid": ["preference_loss", "silu_mul"], "tanh": ["logprob", "silu_mul"], "erf": ["silu_mul"],
    "half": ["linear", "rms_norm"], "row_integers": ["sample", "random_bits"],
    "isa": ["logprob", "kl"], "rows": ["rms_norm", "silu_mul"], "simd": ["logprob", "kl", "rms_norm"],
    "thread_pool": ["logprob", "gae"], "divisor": ["row_split", "kv_cache_append"], "vec4": ["policy_loss"],
    "ieee": ["kl", "logprob"], "random_words": ["random_bits"], "row_split": ["silu_mul", "embedding"],
    "elementwise": ["silu_mul"], "row_pitch": ["linear_logprob"],
}  # fmt: skip
# Tests of the other C++ files of a folder.
OF_FOLDER = {
    "kernels/attention": ["attention"],
    "kernels/sample": ["sample"],
    **dict.fromkeys(("kernels/tokens", "cpu/tokens"), OF_STEM["token"]),
}
ANY = ["test_exact_bounds", "test_option_bounds", "test_out_writes", "test_strides", "test_overlaps", "test_bad_input",
       "test_token_model", "test_other_device"]  # fmt: skip
# mutate.key_of(fault) -> why no test can notice. If a line changes, its entry leaves the table and is judged
# again.
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "python/rl_kernel_native/_register.py",
        '_NO_NUMBER: dict[str, Any] = {"SymInt": 0, "float": 0.0, "bool": True}',
    ): "the number beside an array, which no operator reads",
    (
        "python/rl_kernel_native/ops/covariance_mask.py",
        "return _KINDS[kind], share, 0.0, 0.0, 0.0, 0.0, 1",
    ): 'the seed of kind="kl", which draws nothing',
    (
        "cpu/group_advantage.cpp",
        "const std::int64_t size = p.num_sequences / std::min<std::int64_t>(groups.count(), 1);",
    ): "how many groups a thread takes at once; sequences without a group were refused above",
    (
        "cpu/importance_weights_simd.cpp",
        "for (std::int64_t k = 0; k <= count; k += kLanes) {",
    ): "a load and a store of 0 elements touch nothing",
    (
        "cpu/masked_whiten.cpp",
        "all.least = o.least <= all.least ? o.least : all.least;",
    ): "equal minima differ in the sign of zero alone, which a comparison and a magnitude do not see",
    (
        "cpu/pack.cpp",
        "while (t < p_.num_tokens && (position < 0 ? at(t) < 0 : at(t) == position + t + first)) ++t;",
    ): "runs of tokens that are copied at once end early; kept tokens have ascending positions, so none ends late",
    (
        "cpu/rope_simd.cpp",
        "if (second >= 0) store_at<T>(row.y + at_b, 0, second, b);",
    ): "a store of 0 elements writes nothing",
    (
        "cpu/policy_loss.cpp",
        "if (p.count == 0 && *p.factor == 1.0f) return;",
    ): "a gradient times 1 is the gradient, whose NaN is canonical, and no elements are no work",
    (
        "cpp/include/rlk/elementwise/silu_mul.h",
        "const F c = kSlope ? select(m >= limit, limit, m) : m;",
    ): "a gate equal to the limit is the limit either way",
    (
        "cpp/include/rlk/math/half.h",
        "const std::uint32_t normal = magnitude > 0x47800000u ? 0x7c00u : rebased;",
    ): "2^16 is Inf either way: its exponent with binary16's bias is that of Inf",
    (
        "bindings/preference_loss.cpp",
        'without require_given(policy_chosen, "policy_chosen")',
    ): "policy_chosen of None: the leading array, which the Python layer and torch's schema refuse before",
    (
        "kernels/tokens/terms.h",
        "static RLK_HD float upper_sum(int, std::uint32_t) { return 1.0f; }",
    ): "the last four sums of terms that have fewer; no result reads them",
    (
        "kernels/sample/shard.h",
        "*state_ = {kLastRank, 0, -1, 0.0f, 1.0f, 0, want.status, 0, 0};",
    ): "q counts beside a least mass alone, and the round that sets one sets q",
    (
        "cpp/include/rlk/math/softmax_stats.h",
        "if (is_nan(logprob) && is_nan(mean)) return canonical_nan();",
    ): "the mean of bounded logits is NaN in rows alone whose logprob is; a CPU's fma keeps the bits of logprob's NaN",
}
