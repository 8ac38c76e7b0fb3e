// A libamdhip64 for tests. It has the functions that the backend calls, for devices whose memory is the host's and
// whose kernels run under the emulation. Environment variables, read at every call, set:
//   RLK_STANDIN_DEVICES  the number of devices (2)
//   RLK_STANDIN_ARCH     the architecture of all devices (gfx942); one the bundle lacks gives hipErrorNoBinaryForGpu
//   RLK_STANDIN_ORDER    forward, backward or shuffled
//   RLK_STANDIN_THREADS  host threads per launch (2)
//   RLK_STANDIN_FAIL     the name of a function that fails
//   RLK_STANDIN_VERSION  the runtime's version, as hipRuntimeGetVersion counts (60000000)
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <string_view>

#include "hip/common/wave.h"
#include "tests/hip/hip_standin_kernels.h"

namespace rlk::hip::standin {

std::map<std::string_view, Kernel>& Table::all() {
  static std::map<std::string_view, Kernel> kernels;
  return kernels;
}

}  // namespace rlk::hip::standin

namespace {

namespace emulation = rlk::hip::emulation;
using rlk::hip::standin::Kernel;
using rlk::hip::standin::Table;

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
