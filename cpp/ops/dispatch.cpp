// Dispatches every operator by the device of its arguments. Each operator has a line in rlk/operators.inc. If this
// build lacks the device's backend, the call throws an error; no other backend computes it.
#include <type_traits>

#include "kernels/attention/span.h"
#include "kernels/sample/check.h"
#include "rlk/backends.h"
#include "rlk/build.h"
#include "rlk/ops/linear.h"

#if RLK_WITH_CUDA
#define RLK_CUDA(function) cuda::function
#else
#define RLK_CUDA(function) nullptr
#endif
#if RLK_WITH_HIP
#define RLK_HIP(function) hip::function
#else
#define RLK_HIP(function) nullptr
#endif

namespace rlk {
namespace {

[[noreturn]] void no_backend(const char* op, Device device) {
  const std::string build = std::string(op) + ": this build (variant " RLK_VARIANT_NAME ") has no ";
  throw Unsupported(build + (device.type == DeviceType::kRocm
                                 ? "HIP kernels; uninstall it and install rl-kernel-rocm6"
                                 : "CUDA kernels; uninstall it and install rl-kernel-cu130 or rl-kernel-cu124"));
}

// A function of a GPU's backend; null if this build lacks the backend.
template <class Result, class Params, class... Streams>
using OnGpu = std::type_identity_t<Result (*)(const Params& p, int device, Streams...)>;
template <class Result, class Params, class... Streams>
Result dispatch(const char* op, Result (*cpu)(const Params&), OnGpu<Result, Params, Streams...> cuda,
                OnGpu<Result, Params, Streams...> hip, const Params& p, Device device, Streams... stream) {
  if (device.type == DeviceType::kCpu) return cpu(p);
  if (cuda && device.type == DeviceType::kCuda) return cuda(p, device.index, stream...);
  if (hip && device.type == DeviceType::kRocm) return hip(p, device.index, stream...);
  no_backend(op, device);
}

}  // namespace

void require_backend(const char* op, Device device) {
  if (device.type == DeviceType::kCpu) return;
  if (RLK_WITH_CUDA && device.type == DeviceType::kCuda) return;
  if (RLK_WITH_HIP && device.type == DeviceType::kRocm) return;
  no_backend(op, device);
}

#define RLK_RUNS(operator, function, Params)                                                                    \
  void function(const Params& p, Device device, Stream stream) {                                                \
    dispatch<void, Params>(#operator, cpu::function, RLK_CUDA(function), RLK_HIP(function), p, device, stream); \
  }
#define RLK_WORKSPACE(operator, function, Params)                                                  \
  std::int64_t function##_workspace_bytes(const Params& p, Device device) {                        \
    constexpr auto kOnCpu = [](const Params&) -> std::int64_t { return 0; };                       \
    return dispatch<std::int64_t, Params>(#operator, kOnCpu, RLK_CUDA(function##_workspace_bytes), \
                                          RLK_HIP(function##_workspace_bytes), p, device);         \
  }
#define RLK_COMPOSED(operator, function, Params)
#include "rlk/operators.inc"

// Functions that operators.inc does not list, since their code differs between the backends.
namespace {
template <class Params>
std::int64_t bytes_on_cuda(const char* op, OnGpu<std::int64_t, Params> cuda, const Params& p, Device device) {
  require_backend(op, device);
  return cuda && device.type == DeviceType::kCuda ? cuda(p, device.index) : 0;
}
}  // namespace

std::int64_t attention_workspace_bytes(const AttentionParams& p, Device device) {
  if (device.type == DeviceType::kRocm && attention_rows(p) * p.num_q_heads > 0) return attention_path_bytes(p);
  return bytes_on_cuda<AttentionParams>("attention", RLK_CUDA(attention_workspace_bytes), p, device);
}
std::int64_t attention_backward_workspace_bytes(const AttentionBackwardParams& p, Device device) {
  const std::int64_t on_cuda =
      bytes_on_cuda<AttentionBackwardParams>("attention", RLK_CUDA(attention_backward_workspace_bytes), p, device);
  if (device.type == DeviceType::kCuda) return on_cuda;
  return 4 * attention_rows(p) * p.num_q_heads + (device.type == DeviceType::kRocm ? attention_path_bytes(p) : 0);
}
template <class Params>
std::int64_t linear_workspace_bytes(const Params& p, Device device) {
  return bytes_on_cuda<Params>("linear", RLK_CUDA(linear_workspace_bytes<Params>), p, device);
}
template std::int64_t linear_workspace_bytes(const LinearParams& p, Device device);
template std::int64_t linear_workspace_bytes(const LinearInputGradParams& p, Device device);
template std::int64_t linear_workspace_bytes(const LinearWeightGradParams& p, Device device);

std::vector<LinearProducts> linear_vendor_products(Device device) {
  require_backend("linear", device);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::linear_vendor_products(device.index);
#endif
  return {};
}

bool sample_takes_edits(const SampleParams& p, Device device) {
  return device.type == DeviceType::kCuda && p.dtype == DType::kFloat32;
}
bool sample_edits_rows(const SampleParams& p, const ProcessLogitsParams& edits, Device device) {
  return sample_takes_edits(p, device) && finish_edits(p, edits);
}
std::int64_t sample_workspace_bytes(const SampleParams& p, Device device) {
  return device.type == DeviceType::kCpu || p.num_rows == 0 ? 0 : sample_workspace(p).bytes;
}

}  // namespace rlk
