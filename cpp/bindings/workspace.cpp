#include "workspace.h"

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

void bind_workspace(nb::module_& m) {
  // {device: (calls, last_bytes, most_bytes)}
  m.def("workspace_stats", [](bool reset) {
    nb::dict found;
    const std::lock_guard lock(mutex);
    for (const auto& [device, of] : taken) {
      found[device.c_str()] = nb::make_tuple(of.calls, of.last_bytes, of.most_bytes);
    }
    if (reset) taken.clear();
    return found;
  });
}

}  // namespace rlk::bindings
