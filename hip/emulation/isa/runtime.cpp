// Replaces libamdhip64: defines the functions that hip/common/runtime.cpp looks up. The devices of this library run the
// machine code of the embedded bundles, one instruction after another. The following environment variables are read
// when they are used:
//   RLK_STANDIN_ARCH      gfx942 (default) or gfx90a: which code object of a bundle runs
//   RLK_STANDIN_ORDER     forward, backward or shuffled: the order of blocks and of waves. With "shuffled" the running
//                         wave changes after 1 to 50 instructions, at random with the seed RLK_ISA_SEED
//   RLK_STANDIN_DEVICES, RLK_STANDIN_VERSION    as in tests/hip/hip_standin.cpp
//   RLK_STANDIN_FAIL      as in tests/hip/hip_standin.cpp, but only hipModuleLaunchKernel may fail
//   RLK_ISA_LOG           the file of reports (default: stderr)
//   RLK_ISA_STATS         the file of statistics: the number of each kernel's instructions, and how many of them ran
//   RLK_ISA_POISON        the value that registers and LDS hold at first (7fdeadbe, a NaN)
//   RLK_ISA_ULPS          0: v_rcp_f32 and similar instructions are exact
//   RLK_ISA_RACES         0: the emulator does not look for races, which is faster
//   RLK_ISA_ARGUMENT_SIZES  1: the host passes the sizes of arguments, as builds with tests do
#include "hip/common/runtime.h"

#include <cstdlib>
#include <deque>
#include <mutex>

#include "launch.h"
#include "reports.h"

namespace {

using namespace rlk::hip::isa;

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

thread_local int current = 0, last_error = kSuccess;
std::mutex mutex;  // one launch at a time

int returned(int status) {  // a failed call stores its error, as HIP does
  if (status != kSuccess) last_error = status;
  return status;
}
int devices() { return std::atoi(setting("RLK_STANDIN_DEVICES", "2").c_str()); }
std::string arch() { return setting("RLK_STANDIN_ARCH", "gfx942"); }

struct Module {
  int device;
  const u8* image;
};
struct KernelOfModule {
  Module* module;
  std::string name;
};

u64 word(const u8* p) {
  u64 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
constexpr std::string_view kMagic = "__CLANG_OFFLOAD_BUNDLE__";

// Returns the code object of the current architecture in a bundle, or nullptr if the bundle has none. Each code object
// is loaded only once.
Code* code_of(const u8* image) {
  static auto& loaded = *new std::map<std::pair<const u8*, std::string>, std::unique_ptr<Code>>;
  const std::string wanted = arch();
  std::unique_ptr<Code>& code = loaded[{image, wanted}];
  const u8* entry = image + kMagic.size() + sizeof(u64);
  for (u64 n = word(image + kMagic.size()); n-- && !code;) {
    const u64 offset = word(entry), size = word(entry + 8), length = word(entry + 16);
    const std::string_view target(reinterpret_cast<const char*>(entry) + 24, length);
    if (ends(target, wanted)) code = load_code(image + offset, size, wanted);
    entry += 24 + length;
  }
  return code.get();
}

void say(const std::string& what, const Kernel& kernel, u64 detail) {
  write_report(Severity::kFault, nullptr, nullptr, what + " | " + kernel.name, detail);
}

// Checks the sizes of the arguments. In `arguments`, the caller appends a mark after the arguments, and then their
// sizes.
void check_sizes(const Kernel& kernel, void** arguments) {
  std::size_t count = 0;
  for (const Kernel::Argument& a : kernel.arguments) count += !starts(a.kind, "hidden_");
  const auto number = [&](std::size_t k) { return reinterpret_cast<u64>(arguments[k]); };
  if (number(count) != rlk::hip::Runtime::kSizesFollow) {
    say("ARGUMENT COUNT differs", kernel, count);
    return;
  }
  std::size_t k = count;
  for (const Kernel::Argument& a : kernel.arguments) {
    if (!starts(a.kind, "hidden_") && number(++k) != a.size) say("ARGUMENT SIZE differs", kernel, k - count - 1);
  }
}

}  // namespace

#define RLK_API extern "C" __attribute__((visibility("default")))

RLK_API int hipRuntimeGetVersion(int* version) {
  *version = std::atoi(setting("RLK_STANDIN_VERSION", "60000000").c_str());
  return kSuccess;
}
RLK_API int hipGetLastError() {
  const int status = last_error;
  last_error = kSuccess;
  return status;
}
RLK_API int hipGetDeviceCount(int* count) {
  *count = devices();
  return returned(*count ? kSuccess : kNoDevice);
}
RLK_API int hipGetDevice(int* device) {
  *device = current;
  return kSuccess;
}
RLK_API int hipSetDevice(int device) {
  if (device < 0 || device >= devices()) return returned(kInvalidDevice);
  current = device;
  return kSuccess;
}
RLK_API const char* hipGetErrorString(int status) {
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

RLK_API int hipModuleLoadData(void** module, const void* image) {
  const std::lock_guard lock(mutex);
  if (std::memcmp(image, kMagic.data(), kMagic.size()) != 0) return returned(kInvalidValue);
  const u8* bytes = static_cast<const u8*>(image);
  if (!code_of(bytes)) return returned(kNoBinary);
  static auto& modules = *new std::deque<Module>;
  *module = &modules.emplace_back(Module{current, bytes});
  return kSuccess;
}
RLK_API int hipModuleGetFunction(void** function, void* module, const char* name) {
  const std::lock_guard lock(mutex);
  Module* in = static_cast<Module*>(module);
  Code* code = code_of(in->image);
  if (!code || !code->kernels.count(name)) return returned(kNotFound);
  static auto& functions = *new std::deque<KernelOfModule>;
  *function = &functions.emplace_back(KernelOfModule{in, name});
  return kSuccess;
}
RLK_API int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                  unsigned block_y, unsigned block_z, unsigned lds_bytes, void*, void** arguments,
                                  void**) {
  const std::lock_guard lock(mutex);
  constexpr u64 kMostThreads = 0xffffffff, kMostRows = 65535, kLdsBytes = 65536;
  const KernelOfModule& f = *static_cast<KernelOfModule*>(function);
  if (setting("RLK_STANDIN_FAIL", "") == "hipModuleLaunchKernel") return returned(kLaunchFailure);
  if (f.module->device != current) return returned(kInvalidHandle);
  Code* code = code_of(f.module->image);  // a test may have changed the architecture
  if (!code || !code->kernels.count(f.name)) return returned(kInvalidHandle);
  const Kernel& kernel = code->kernels.at(f.name);
  if (!grid_x || !grid_y || grid_y > kMostRows || grid_z != 1 || block_y != 1 || block_z != 1 ||
      u64(grid_x) * block_x > kMostThreads || kernel.lds_bytes + lds_bytes > kLdsBytes) {
    say("BAD LAUNCH", kernel, grid_x);
    return returned(kInvalidValue);
  }
  if (kernel.max_threads && block_x > kernel.max_threads)
    say("MORE THREADS than the kernel was compiled for", kernel, block_x);
  if (setting("RLK_ISA_ARGUMENT_SIZES", "0") == "1") check_sizes(kernel, arguments);
  return returned(run_launch(*code, kernel, {grid_x, grid_y, block_x, lds_bytes}, arguments) ? kSuccess
                                                                                             : kLaunchFailure);
}

// The functions that tests/hip/hip_guarded_arrays.py calls.
RLK_API void rlk_isa_register(u64 address, u64 bytes) { register_device_memory(address, bytes); }
RLK_API void rlk_isa_forget(u64 address) { forget_device_memory(address); }
RLK_API void rlk_isa_close(int close) { close_device_memory(close); }
