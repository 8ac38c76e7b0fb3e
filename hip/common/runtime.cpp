#include "runtime.h"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "rlk/plan_note.h"

// A bundle holds the code objects of an operator's kernels for all architectures (bundles.S.in). The kernels' names
// begin with `prefix`.
extern "C" struct RlkHipBundle {
  const char* prefix;
  const unsigned char* image;
};
extern "C" const RlkHipBundle rlk_hip_bundles[];
extern "C" const std::uint64_t rlk_hip_num_bundles;

namespace rlk::hip {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kNoBinaryForGpu = 209;        // hipErrorNoBinaryForGpu
constexpr int kOldestVersion = 60'000'000;  // ROCm 6.0, in the units of hipRuntimeGetVersion

std::string path_of(void* library) {
  link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "libamdhip64";
}

// Returns the HIP runtime that the process has already loaded, or null. A framework's wheel may have given the library
// another name. A second runtime could not use the streams and memory of the first one.
void* loaded_library() {
  std::string path;
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* found) {
        const std::string_view name = object->dlpi_name ? object->dlpi_name : "";
        if (name.substr(name.rfind('/') + 1).rfind("libamdhip64", 0) != 0) return 0;
        *static_cast<std::string*>(found) = name;
        return 1;
      },
      &path);
  return path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
}

// Tries the newest version first. The name without a version belongs to a development package.
void* open_library() {
  if (void* library = loaded_library()) return library;
  std::string reasons;
  for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    if (const char* reason = dlerror()) reasons += std::string(reasons.empty() ? "" : "; ") + reason;
  }
  throw Unsupported("HIP: libamdhip64 of ROCm 6 or 7 cannot be opened: " + reasons);
}

// The modules and functions that the process has loaded on one device. Modules are found by their bundle, functions by
// their name.
struct Loaded {
  std::mutex mutex;
  std::map<const RlkHipBundle*, void*> modules;
  std::map<std::string, void*> functions;
};
std::array<Loaded, kMaxDevices> loaded;

// Finds the bundle of a kernel's operator. A kernel's name begins with the operator's name, or is that name if the
// operator has a single kernel. The longest match is the right one: names of linear_logprob also begin with linear.
const RlkHipBundle& bundle_of(const std::string& kernel) {
  const RlkHipBundle* found = nullptr;
  std::size_t longest = 0;
  for (std::uint64_t i = 0; i < rlk_hip_num_bundles; ++i) {
    const std::string_view prefix = rlk_hip_bundles[i].prefix;
    if (prefix.size() <= longest || (kernel + '_').rfind(prefix, 0) != 0) continue;
    found = &rlk_hip_bundles[i];
    longest = prefix.size();
  }
  if (found) return *found;
  throw std::logic_error("HIP: no bundle has " + kernel);
}

}  // namespace

const Runtime& Runtime::get() {
  static const Runtime runtime;  // if the constructor throws, the next call runs it again
  return runtime;
}

Runtime::Runtime() {
  void* library = open_library();
  const auto find = [&](auto* to, const char* name) {
    *to = reinterpret_cast<std::remove_pointer_t<decltype(to)>>(dlsym(library, name));
    if (!*to) throw Unsupported("HIP: " + path_of(library) + " has no " + name);
  };
  find(&api_.hipGetDeviceCount, "hipGetDeviceCount");
  find(&api_.hipGetDevice, "hipGetDevice");
  find(&api_.hipSetDevice, "hipSetDevice");
  find(&api_.hipModuleLoadData, "hipModuleLoadData");
  find(&api_.hipModuleGetFunction, "hipModuleGetFunction");
  find(&api_.hipModuleLaunchKernel, "hipModuleLaunchKernel");
  find(&api_.hipGetErrorString, "hipGetErrorString");
  find(&api_.hipGetLastError, "hipGetLastError");
  find(&api_.hipRuntimeGetVersion, "hipRuntimeGetVersion");
  int version = 0;
  check(api_.hipRuntimeGetVersion(&version), "hipRuntimeGetVersion");
  if (version < kOldestVersion) {
    throw Unsupported("HIP: " + path_of(library) + " is of ROCm " + std::to_string(version / 10'000'000) +
                      "; ROCm 6 or 7 is needed");
  }
}

void Runtime::check(int status, const char* what) const {
  if (status == 0) return;
  api_.hipGetLastError();  // resets the last error; without this call, the process's next launch would report it
  throw std::runtime_error(std::string("HIP: ") + what + ": " + api_.hipGetErrorString(status));
}

int Runtime::device_count() const {
  int count = 0;
  if (const int status = api_.hipGetDeviceCount(&count)) {
    api_.hipGetLastError();
    throw Unsupported(std::string("HIP: no device: ") + api_.hipGetErrorString(status));
  }
  return count;
}

// Makes a device the thread's current device while this object exists.
class Runtime::DeviceGuard {
 public:
  DeviceGuard(const Runtime& runtime, int device) : set_(runtime.api_.hipSetDevice) {
    runtime.check(runtime.api_.hipGetDevice(&previous_), "hipGetDevice");
    if (device == previous_) return;
    runtime.check(set_(device), "hipSetDevice");
    changed_ = true;
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

void* Runtime::function(int device, const char* kernel) const {
  Loaded& here = loaded[device];
  const std::lock_guard lock(here.mutex);
  void*& function = here.functions[kernel];
  if (function) return function;
  const RlkHipBundle& bundle = bundle_of(kernel);
  void*& module = here.modules[&bundle];
  if (!module) {
    const int status = api_.hipModuleLoadData(&module, bundle.image);
    if (status == kNoBinaryForGpu) {
      api_.hipGetLastError();
      throw Unsupported("HIP: device " + std::to_string(device) +
                        " is neither gfx90a nor gfx942, for which this build has kernels");
    }
    check(status, "hipModuleLoadData");
  }
  check(api_.hipModuleGetFunction(&function, module, kernel), kernel);
  return function;
}

void Runtime::launch(int device, const char* kernel, const Grid& grid, Stream stream, void** arguments) const {
  const int count = device_count();
  if (device < 0 || device >= count || device >= kMaxDevices) {
    throw InvalidArgument("HIP device index " + std::to_string(device) + " of " + std::to_string(count));
  }
  const DeviceGuard guard(*this, device);
  note_plan([&] { return std::string(kernel); });
  check(
      api_.hipModuleLaunchKernel(function(device, kernel), static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                                 1, static_cast<unsigned>(grid.threads), 1, 1, static_cast<unsigned>(grid.lds_bytes),
                                 reinterpret_cast<void*>(stream), arguments, nullptr),
      kernel);
}

}  // namespace rlk::hip
