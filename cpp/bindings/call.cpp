#include "call.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

namespace rlk::bindings {
namespace {

struct Taken {
  std::int64_t calls = 0, last_bytes = 0, most_bytes = 0;
};
std::mutex mutex;
std::map<std::string, Taken> taken;  // by device

}  // namespace

nb::object take_workspace(const Caller& caller, std::int64_t bytes, void** data) {
  if (bytes == 0) return nb::none();
  const std::int64_t shape[] = {(bytes + 3) / 4};
  Caller::Fresh memory = caller.empty(shape, DType::kFloat32);
  *data = memory.data;
  const std::lock_guard lock(mutex);
  Taken& of_device = taken[name_of(caller.device)];
  ++of_device.calls;
  of_device.last_bytes = shape[0] * 4;
  of_device.most_bytes = std::max(of_device.most_bytes, of_device.last_bytes);
  return memory.array;
}

std::unique_lock<std::mutex> lock_accumulation(Device device) {
  // The lock is never destroyed, since a thread may outlive the interpreter. A forked child needs a new lock, since it
  // has no thread that could unlock the old one.
  static std::mutex* const mutex = new std::mutex;
  [[maybe_unused]] static const int at_fork = pthread_atfork(nullptr, nullptr, [] { new (mutex) std::mutex; });
  return device.type == DeviceType::kCpu ? std::unique_lock(*mutex) : std::unique_lock<std::mutex>();
}

nb::object Results::result() {
  const auto output = [this](int i) { return (arrays_[i].is_valid() ? arrays_[i] : nb::none()).release().ptr(); };
  if (count_ == 0) return nb::none();
  if (count_ == 1) return nb::steal(output(0));
  const nb::object tuple = nb::steal(PyTuple_New(count_));
  for (int i = 0; i < count_; ++i) PyTuple_SetItem(tuple.ptr(), i, output(i));  // PyTuple_SetItem is in the stable ABI
  return tuple;
}

std::vector<void (*)(nb::module_&)>& Registered::all() {
  static std::vector<void (*)(nb::module_&)> functions;
  return functions;
}

// {device: (calls, last_bytes, most_bytes)}
RLK_PLAIN_FUNCTION(workspace_stats, bool reset) {
  nb::dict found;
  const std::lock_guard lock(mutex);
  for (const auto& [device, of] : taken) {
    found[device.c_str()] = nb::make_tuple(of.calls, of.last_bytes, of.most_bytes);
  }
  if (reset) taken.clear();
  return found;
}

}  // namespace rlk::bindings
