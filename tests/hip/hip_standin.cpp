// A libamdhip64 for tests. It has the functions that the backend calls, for devices whose memory is the host's and
// whose kernels run under the emulation. Environment variables, read at every call, set:
//   RLK_STANDIN_DEVICES  the number of devices (2)
//   RLK_STANDIN_ARCH     the architecture of all devices (gfx942); one the bundle lacks gives hipErrorNoBinaryForGpu
//   RLK_STANDIN_ORDER    forward, backward or shuffled
//   RLK_STANDIN_THREADS  host threads per launch (2)
//   RLK_STANDIN_FAIL     the name of a function that fails
//   RLK_STANDIN_VERSION  the runtime's version, as hipRuntimeGetVersion counts (60000000)
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "hip/attention/attention_kernels.hip"
#include "hip/covariance_mask/covariance_mask_kernels.hip"
#include "hip/elementwise/elementwise_kernels.hip"
#include "hip/embedding/embedding_kernels.hip"
#include "hip/gae/gae_kernels.hip"
#include "hip/group_advantage/group_advantage_kernels.hip"
#include "hip/importance_weights/importance_weights_kernels.hip"
#include "hip/kl/kl_kernels.hip"
#include "hip/kv_cache_append/kv_cache_append_kernels.hip"
#include "hip/linear/linear_kernels.hip"
#include "hip/linear_logprob/linear_logprob_kernels.hip"
#include "hip/logprob/logprob_kernels.hip"
#include "hip/masked_whiten/masked_whiten_kernels.hip"
#include "hip/mismatch_metrics/mismatch_metrics_kernels.hip"
#include "hip/optimal_token_baseline/optimal_token_baseline_kernels.hip"
#include "hip/pack/pack_kernels.hip"
#include "hip/policy_loss/policy_loss_kernels.hip"
#include "hip/preference_loss/preference_loss_kernels.hip"
#include "hip/random_bits/random_bits_kernels.hip"
#include "hip/rms_norm/rms_norm_kernels.hip"
#include "hip/rope/rope_kernels.hip"
#include "hip/sample/sample_kernels.hip"
#include "hip/scatter_rewards/scatter_rewards_kernels.hip"
#include "hip/sequence_logprob/sequence_logprob_kernels.hip"
#include "hip/shift_labels_packed/shift_labels_packed_kernels.hip"
#include "hip/value_loss/value_loss_kernels.hip"

namespace {

namespace emulation = rlk::hip::emulation;

enum Status {
  kSuccess = 0,
  kInvalidValue = 1,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchFailure = 719
};

std::string_view setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}
int devices() { return std::atoi(setting("RLK_STANDIN_DEVICES", "2").data()); }
bool fails(const char* function) { return setting("RLK_STANDIN_FAIL", "") == function; }

thread_local int current = 0;
thread_local int last_error = kSuccess;
int returned(int status) {  // every failed call leaves its error, as HIP does
  if (status != kSuccess) last_error = status;
  return status;
}

// Calls a kernel with arguments as hipModuleLaunchKernel gets them: a pointer to each argument.
using Kernel = std::function<std::function<void()>(void**)>;
template <class... Args>
Kernel kernel_of(void (*kernel)(Args...)) {
  return [kernel](void** pointers) -> std::function<void()> {
    return [kernel, arguments = [&]<std::size_t... i>(std::index_sequence<i...>) {
      return std::tuple<Args...>(*static_cast<Args*>(pointers[i])...);
    }(std::index_sequence_for<Args...>{})] { std::apply(kernel, arguments); };
  };
}

// The kernels of each operator by name; most exist for several element types.
struct Table {
  Table(std::initializer_list<std::pair<const std::string_view, Kernel>> kernels) { all().insert(kernels); }
  static std::map<std::string_view, Kernel>& all() {
    static std::map<std::string_view, Kernel> kernels;
    return kernels;
  }
};
#define RLK_OF(name) \
  { #name, kernel_of(&name) }
#define RLK_OF_HALVES(name) RLK_OF(name##_bf16), RLK_OF(name##_f16)
#define RLK_OF_FLOATS(name) RLK_OF_HALVES(name), RLK_OF(name##_f32)

#define RLK_OF_MOMENTS(name) \
  RLK_OF(name##_moments_tokens), RLK_OF(name##_moments_sums), RLK_OF(name##_moments_few), RLK_OF(name##_moments_results)

#define RLK_OF_COPIES(name) RLK_OF(name##_vectors), RLK_OF(name##_words), RLK_OF(name##_halves)
const Table kEmbedding = {
    RLK_OF_COPIES(rlk_embedding_forward),
    RLK_OF_COPIES(rlk_embedding_clear),
    RLK_OF(rlk_embedding_count_ids),
    RLK_OF(rlk_embedding_count_keys),
    RLK_OF(rlk_embedding_begin),
    RLK_OF(rlk_embedding_scatter_ids),
    RLK_OF(rlk_embedding_scatter_keys),
    RLK_OF_FLOATS(rlk_embedding_rows_vectors),
    RLK_OF_FLOATS(rlk_embedding_rows_elements),
};
const Table kGae = {RLK_OF(rlk_gae_scan), RLK_OF(rlk_gae_discounted_returns), RLK_OF(rlk_gae_vtrace)};
const Table kGroupAdvantage = {
    RLK_OF(rlk_group_advantage_order_ids), RLK_OF(rlk_group_advantage_merge_ids), RLK_OF(rlk_group_advantage_batch),
    RLK_OF(rlk_group_advantage_ranges),    RLK_OF(rlk_group_advantage_ids),
};
const Table kAttention = {
    RLK_OF_FLOATS(rlk_attention_forward_narrow),
    RLK_OF_FLOATS(rlk_attention_forward_wide),
    RLK_OF_FLOATS(rlk_attention_delta),
    RLK_OF_FLOATS(rlk_attention_dq_narrow),
    RLK_OF_FLOATS(rlk_attention_dq_wide),
    RLK_OF_FLOATS(rlk_attention_dkv_narrow),
    RLK_OF_FLOATS(rlk_attention_dkv_wide),
    RLK_OF(rlk_attention_sinks),
    RLK_OF_FLOATS(rlk_attention_partials_narrow),
    RLK_OF_FLOATS(rlk_attention_partials_wide),
    RLK_OF_FLOATS(rlk_attention_merge),
    RLK_OF(rlk_attention_blank),
    RLK_OF(rlk_attention_paths),
    RLK_OF_FLOATS(rlk_attention_tree_forward_narrow),
    RLK_OF_FLOATS(rlk_attention_tree_forward_wide),
    RLK_OF_FLOATS(rlk_attention_tree_dq_narrow),
    RLK_OF_FLOATS(rlk_attention_tree_dq_wide),
    RLK_OF_FLOATS(rlk_attention_tree_dkv_narrow),
    RLK_OF_FLOATS(rlk_attention_tree_dkv_wide),
};
const Table kLinearLogprob = {RLK_OF(rlk_linear_logprob_rows_vectors), RLK_OF(rlk_linear_logprob_rows_halves)};
const Table kCovarianceMask = {
    RLK_OF(rlk_covariance_mask_clear),      RLK_OF(rlk_covariance_mask_means),   RLK_OF(rlk_covariance_mask_sums),
    RLK_OF(rlk_covariance_mask_few),        RLK_OF(rlk_covariance_mask_results), RLK_OF(rlk_covariance_mask_tokens),
    RLK_OF(rlk_covariance_mask_priorities), RLK_OF(rlk_covariance_mask_digits),  RLK_OF(rlk_covariance_mask_write),
};
const Table kImportanceWeights = {
    RLK_OF(rlk_importance_weights_statistics),
    RLK_OF(rlk_importance_weights_sequences),
    RLK_OF(rlk_importance_weights_tokens),
    RLK_OF(rlk_importance_weights_tokens_normalized),
    RLK_OF(rlk_importance_weights_tokens_measured),
    RLK_OF(rlk_importance_weights_sums),
    RLK_OF(rlk_importance_weights_few),
    RLK_OF(rlk_importance_weights_results),
    RLK_OF(rlk_importance_weights_divide),
    RLK_OF_MOMENTS(rlk_importance_weights),
};
const Table kKl = {RLK_OF(rlk_kl_tokens)};
const Table kLinear = {
    RLK_OF_HALVES(rlk_linear_forward_small),
    RLK_OF_HALVES(rlk_linear_forward_large),
    RLK_OF_HALVES(rlk_linear_forward_segments_small),
    RLK_OF_HALVES(rlk_linear_forward_segments_large),
    RLK_OF_HALVES(rlk_linear_input_grad_small),
    RLK_OF_HALVES(rlk_linear_input_grad_large),
    RLK_OF_HALVES(rlk_linear_weight_grad_small),
    RLK_OF_HALVES(rlk_linear_weight_grad_large),
    RLK_OF_FLOATS(rlk_linear_bias_grad),
    RLK_OF_FLOATS(rlk_linear_tree_sum),
};
const Table kLogprob = {
    RLK_OF_FLOATS(rlk_logprob_groups),    RLK_OF_FLOATS(rlk_logprob_groups_moments), RLK_OF_FLOATS(rlk_logprob_roots),
    RLK_OF_FLOATS(rlk_logprob_smoothing), RLK_OF_FLOATS(rlk_logprob_backward),       RLK_OF(rlk_logprob_merge),
};
const Table kMaskedWhiten = {
    RLK_OF(rlk_masked_whiten_sums),     RLK_OF(rlk_masked_whiten_mean),   RLK_OF(rlk_masked_whiten_squares),
    RLK_OF(rlk_masked_whiten_variance), RLK_OF(rlk_masked_whiten_tokens),
};
const Table kMismatchMetrics = {
    RLK_OF(rlk_mismatch_metrics_tokens),  RLK_OF(rlk_mismatch_metrics_sums),    RLK_OF(rlk_mismatch_metrics_few),
    RLK_OF(rlk_mismatch_metrics_results), RLK_OF_MOMENTS(rlk_mismatch_metrics),
};
const Table kOptimalTokenBaseline = {RLK_OF(rlk_optimal_token_baseline_scan),
                                     RLK_OF(rlk_optimal_token_baseline_groups)};
const Table kPolicyLoss = {
    RLK_OF(rlk_policy_loss_statistics),
    RLK_OF(rlk_policy_loss_sequences),
    RLK_OF(rlk_policy_loss_tokens_clipped),
    RLK_OF(rlk_policy_loss_tokens_any),
    RLK_OF(rlk_policy_loss_tokens_sequences),
    RLK_OF(rlk_policy_loss_sums),
    RLK_OF(rlk_policy_loss_few),
    RLK_OF(rlk_policy_loss_results),
    RLK_OF(rlk_policy_loss_scale),
};
const Table kRmsNorm = {
    RLK_OF_FLOATS(rlk_rms_norm_forward_wave),
    RLK_OF_FLOATS(rlk_rms_norm_forward_block),
    RLK_OF_FLOATS(rlk_rms_norm_forward_wave_elements),
    RLK_OF_FLOATS(rlk_rms_norm_forward_block_elements),
    RLK_OF_FLOATS(rlk_rms_norm_dx_wave),
    RLK_OF_FLOATS(rlk_rms_norm_dx_block),
    RLK_OF_FLOATS(rlk_rms_norm_dx_wave_elements),
    RLK_OF_FLOATS(rlk_rms_norm_dx_block_elements),
    RLK_OF_FLOATS(rlk_rms_norm_chains_vectors),
    RLK_OF_FLOATS(rlk_rms_norm_chains_elements),
    RLK_OF_FLOATS(rlk_rms_norm_fold),
};
const Table kRope = {RLK_OF_FLOATS(rlk_rope_halves), RLK_OF_FLOATS(rlk_rope_neighbours),
                     RLK_OF_FLOATS(rlk_rope_elements)};
const Table kKvCacheAppend = {RLK_OF(rlk_kv_cache_append_vectors), RLK_OF(rlk_kv_cache_append_words),
                              RLK_OF(rlk_kv_cache_append_halves)};
const Table kPack = {RLK_OF(rlk_pack_copy), RLK_OF(rlk_pack_positions), RLK_OF(rlk_pack_scan)};
const Table kPreferenceLoss = {RLK_OF(rlk_preference_loss_order),   RLK_OF(rlk_preference_loss_merge),
                               RLK_OF(rlk_preference_loss_pairs),   RLK_OF(rlk_preference_loss_unpaired),
                               RLK_OF(rlk_preference_loss_metrics), RLK_OF(rlk_preference_loss_backward)};
const Table kRandomBits = {RLK_OF(rlk_random_bits_words)};
const Table kSample = {
    RLK_OF_FLOATS(rlk_sample_first),      RLK_OF_FLOATS(rlk_sample_truncate),  RLK_OF_FLOATS(rlk_sample_tree),
    RLK_OF_FLOATS(rlk_sample_draw),       RLK_OF_FLOATS(rlk_sample_raw),       RLK_OF_FLOATS(rlk_sample_top),
    RLK_OF_FLOATS(rlk_sample_raw_top),    RLK_OF(rlk_sample_offsets),          RLK_OF(rlk_sample_kept),
    RLK_OF_FLOATS(rlk_sample_process),    RLK_OF_FLOATS(rlk_sample_shard),     RLK_OF_FLOATS(rlk_sample_shard_tree),
    RLK_OF_FLOATS(rlk_sample_shard_draw), RLK_OF_FLOATS(rlk_sample_shard_raw), RLK_OF(rlk_sample_merge),
    RLK_OF(rlk_sample_merge_tree),        RLK_OF_FLOATS(rlk_sample_round),     RLK_OF(rlk_sample_cut)};
const Table kScatterRewards = {RLK_OF(rlk_scatter_rewards_tokens),        RLK_OF(rlk_scatter_rewards_blanks),
                               RLK_OF(rlk_scatter_rewards_sequences),     RLK_OF(rlk_scatter_rewards_spread),
                               RLK_OF(rlk_scatter_rewards_spread_blocks), RLK_OF(rlk_scatter_rewards_rest)};
const Table kSequenceLogprob = {RLK_OF_FLOATS(rlk_sequence_logprob_sum), RLK_OF_FLOATS(rlk_sequence_logprob_backward)};
const Table kShiftLabelsPacked = {RLK_OF(rlk_shift_labels_packed_labels), RLK_OF(rlk_shift_labels_packed_spans),
                                  RLK_OF(rlk_shift_labels_packed_rest), RLK_OF(rlk_shift_labels_packed_turns)};
#define RLK_OF_ELEMENTWISE(name, ...) RLK_OF(name),
#define RLK_ELEMENTWISE(operator, function, Params, forms) \
  RLK_ELEMENTWISE_KERNELS(RLK_OF_ELEMENTWISE, function, forms, Params)
const Table kElementwise = {
#include "rlk/elementwise.inc"
};
const Table kValueLoss = {
    RLK_OF(rlk_value_loss_statistics), RLK_OF(rlk_value_loss_sequences), RLK_OF(rlk_value_loss_tokens),
    RLK_OF(rlk_value_loss_sums),       RLK_OF(rlk_value_loss_few),       RLK_OF(rlk_value_loss_results),
    RLK_OF_MOMENTS(rlk_value_loss),
};

const Kernel* find_kernel(std::string_view name) {
  const auto found = Table::all().find(name);
  return found == Table::all().end() ? nullptr : &found->second;
}

constexpr char kBundleMagic[] = "__CLANG_OFFLOAD_BUNDLE__";

// A module and its functions belong to the device that was current when it was loaded. A module has exactly the
// functions whose symbols are in its code object.
struct Module {
  int device;
  std::string_view code;
  bool has(std::string_view kernel) const {
    const std::string symbol = '\0' + std::string(kernel) + ".kd" + '\0';
    return code.find(symbol) != std::string_view::npos;
  }
};
// The code object for `arch` in a bundle that clang-offload-bundler writes, or nothing. Each entry has its offset, its
// size and the length of the target name that follows.
std::string_view code_of(const char* bundle, std::string_view arch) {
  const char* at = bundle + sizeof kBundleMagic - 1;
  const auto next = [&] {
    std::uint64_t value;
    std::memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
  };
  for (std::uint64_t left = next(); left > 0; --left) {
    const std::uint64_t offset = next(), size = next(), length = next();
    const std::string_view target(at, length);
    at += length;
    if (target.find(arch) != std::string_view::npos) return {bundle + offset, size};
  }
  return {};
}
struct Function {
  int device;
  const Kernel* kernel;
};

}  // namespace

#define RLK_EXPORT extern "C" __attribute__((visibility("default")))

RLK_EXPORT int hipRuntimeGetVersion(int* version) {
  *version = std::atoi(setting("RLK_STANDIN_VERSION", "60000000").data());
  return returned(fails("hipRuntimeGetVersion") ? kInvalidValue : kSuccess);
}
RLK_EXPORT int hipGetLastError() {
  const int status = last_error;
  last_error = kSuccess;
  return status;
}
RLK_EXPORT int hipGetDeviceCount(int* count) {
  *count = devices();
  return returned(fails("hipGetDeviceCount") || *count == 0 ? kNoDevice : kSuccess);
}
RLK_EXPORT int hipGetDevice(int* device) {
  *device = current;
  return returned(fails("hipGetDevice") ? kNoDevice : kSuccess);
}
RLK_EXPORT int hipSetDevice(int device) {
  if (fails("hipSetDevice") || device < 0 || device >= devices()) return returned(kInvalidDevice);
  current = device;
  return kSuccess;
}
RLK_EXPORT int hipModuleLoadData(void** module, const void* image) {
  if (fails("hipModuleLoadData")) return returned(kInvalidValue);
  const std::string_view arch = setting("RLK_STANDIN_ARCH", "gfx942");
  // Requires a real bundle whose header names a code object for the device's architecture.
  if (std::memcmp(image, kBundleMagic, sizeof kBundleMagic - 1) != 0) return returned(kInvalidValue);
  const std::string_view code = code_of(static_cast<const char*>(image), arch);
  if (code.empty()) return returned(kNoBinary);
  static std::deque<Module> modules;  // kept, since their handles are kept
  *module = &modules.emplace_back(Module{current, code});
  return kSuccess;
}
RLK_EXPORT int hipModuleGetFunction(void** function, void* module, const char* name) {
  const Kernel* kernel = find_kernel(name);
  const Module& from = *static_cast<const Module*>(module);
  if (fails("hipModuleGetFunction") || !kernel || !from.has(name)) return returned(kNotFound);
  static std::deque<Function> functions;
  *function = &functions.emplace_back(Function{from.device, kernel});
  return kSuccess;
}
RLK_EXPORT int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds_bytes, void*,
                                     void** arguments, void**) {
  constexpr unsigned kMostLds = 64 << 10, kMostGridY = 65535;
  const auto& f = *static_cast<const Function*>(function);
  if (fails("hipModuleLaunchKernel")) return returned(kLaunchFailure);
  if (f.device != current) return returned(kInvalidHandle);
  constexpr std::uint64_t kMostThreads = 0xffffffff;  // most threads in a dimension
  if (grid_x == 0 || grid_y == 0 || grid_y > kMostGridY || grid_z != 1 || block_y != 1 || block_z != 1 ||
      block_x % rlk::hip::kWave != 0 || std::uint64_t{grid_x} * block_x > kMostThreads || lds_bytes > kMostLds) {
    return returned(kInvalidValue);
  }
  const std::string_view order = setting("RLK_STANDIN_ORDER", "forward");
  emulation::Launch how;
  how.blocks_x = static_cast<int>(grid_x);
  how.blocks_y = static_cast<int>(grid_y);
  how.threads = static_cast<int>(block_x);
  how.lds_bytes = lds_bytes;
  how.order = order == "backward"   ? emulation::Order::kBackward
              : order == "shuffled" ? emulation::Order::kShuffled
                                    : emulation::Order::kForward;
  how.unit = setting("RLK_STANDIN_ARCH", "gfx942") == "gfx90a" ? rlk::MmaUnit::kGfx90a : rlk::MmaUnit::kGfx942;
  how.host_threads = std::atoi(setting("RLK_STANDIN_THREADS", "2").data());
  emulation::launch(how, (*f.kernel)(arguments));
  return kSuccess;
}
RLK_EXPORT const char* hipGetErrorString(int status) {
  switch (status) {
    case kSuccess:
      return "no error";
    case kNoDevice:
      return "no ROCm-capable device is detected";
    case kInvalidDevice:
      return "invalid device ordinal";
    case kNoBinary:
      return "no kernel image is available for execution on the device";
    case kInvalidHandle:
      return "invalid resource handle";
    case kNotFound:
      return "named symbol not found";
    case kLaunchFailure:
      return "unspecified launch failure";
    default:
      return "invalid argument";
  }
}
