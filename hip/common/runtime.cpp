#include "runtime.h"

#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <type_traits>

// The code objects of all architectures in one bundle: bundle.S.in.
extern "C" const unsigned char rlk_hip_bundle[];

namespace rlk::hip {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kNoBinaryForGpu = 209;  // hipErrorNoBinaryForGpu

// Newest first; the name without a version is a development package's.
void* open_library() {
  std::string reasons;
  for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    if (const char* reason = dlerror()) reasons += std::string(reasons.empty() ? "" : "; ") + reason;
  }
  throw Unsupported("HIP: libamdhip64 of ROCm 6 or 7 cannot be opened: " + reasons);
}

class DeviceGuard {
 public:
  DeviceGuard(int (*get)(int*), int (*set)(int), int device) : set_(set) {
    if (get(&previous_) != 0) previous_ = device;
    if (device != previous_) set_(device);
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) set_(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int (*set_)(int);
  int previous_ = 0;
  bool changed_ = false;
};

// What a process loaded on one device.
struct Module {
  std::mutex mutex;
  void* handle = nullptr;
  std::map<std::string, void*> functions;
};
std::array<Module, kMaxDevices> modules;

}  // namespace

const Runtime& Runtime::get() {
  static const Runtime runtime;  // tried again where it threw
  return runtime;
}

Runtime::Runtime() {
  void* library = open_library();
  const auto find = [&](auto* to, const char* name) {
    *to = reinterpret_cast<std::remove_pointer_t<decltype(to)>>(dlsym(library, name));
    if (!*to) throw Unsupported(std::string("HIP: libamdhip64 has no ") + name);
  };
  find(&api_.hipGetDeviceCount, "hipGetDeviceCount");
  find(&api_.hipGetDevice, "hipGetDevice");
  find(&api_.hipSetDevice, "hipSetDevice");
  find(&api_.hipModuleLoadData, "hipModuleLoadData");
  find(&api_.hipModuleGetFunction, "hipModuleGetFunction");
  find(&api_.hipModuleLaunchKernel, "hipModuleLaunchKernel");
  find(&api_.hipGetErrorString, "hipGetErrorString");
}

void Runtime::check(int status, const char* what) const {
  if (status != 0) throw std::runtime_error(std::string("HIP: ") + what + ": " + api_.hipGetErrorString(status));
}

int Runtime::device_count() const {
  int count = 0;
  return api_.hipGetDeviceCount(&count) == 0 ? count : 0;
}

void* Runtime::function(int device, const char* kernel) const {
  Module& module = modules[device];
  const std::lock_guard lock(module.mutex);
  if (!module.handle) {
    const int status = api_.hipModuleLoadData(&module.handle, rlk_hip_bundle);
    if (status == kNoBinaryForGpu) {
      throw Unsupported("HIP: device " + std::to_string(device) +
                        " is neither gfx90a nor gfx942, for which this build has kernels");
    }
    check(status, "hipModuleLoadData");
  }
  void*& function = module.functions[kernel];
  if (!function) check(api_.hipModuleGetFunction(&function, module.handle, kernel), kernel);
  return function;
}

void Runtime::launch(int device, const char* kernel, const Grid& grid, Stream stream, void** arguments) const {
  const int count = device_count();
  if (device < 0 || device >= count || device >= kMaxDevices) {
    throw InvalidArgument("HIP device index " + std::to_string(device) + " of " + std::to_string(count));
  }
  const DeviceGuard guard(api_.hipGetDevice, api_.hipSetDevice, device);
  check(
      api_.hipModuleLaunchKernel(function(device, kernel), static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                                 1, static_cast<unsigned>(grid.threads), 1, 1, static_cast<unsigned>(grid.lds_bytes),
                                 reinterpret_cast<void*>(stream), arguments, nullptr),
      kernel);
}

}  // namespace rlk::hip
