// Workspace whose size a caller bounds.
#pragma once

#include <algorithm>
#include <optional>

#include "call.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::bindings {

constexpr std::int64_t kAlign = 256;

inline std::int64_t least_bytes(const WorkspaceRange& range) { return range.least == 0 ? 0 : range.least + kAlign; }

// A caller's limit, or None.
inline std::optional<std::int64_t> read_workspace_bytes(nb::handle bytes) {
  if (bytes.is_none()) return std::nullopt;
  return read_integer(bytes, "workspace_bytes", "a number of bytes");
}

inline void require_bytes(std::int64_t least, std::int64_t bytes, const char* of) {
  require(bytes >= least, "workspace_bytes", "at least ", least, " for ", of, ", got ", bytes);
}

// Allocates the largest useful workspace, at most the caller's limit or, without one, the usual size. It begins at a
// multiple of kAlign, wherever the allocator's memory begins.
template <class Params>
nb::object allocate_workspace(Params* p, const WorkspaceRange& range, std::optional<std::int64_t> limit,
                              const Results& results) {
  if (limit) require_bytes(least_bytes(range), *limit, "this call");
  if (range.most == 0) return nb::none();
  const std::int64_t bytes = limit.value_or(usual_workspace(range));
  p->workspace_bytes = std::min(range.most, bytes - kAlign);
  void* memory = nullptr;
  nb::object array = take_workspace(results.caller(), p->workspace_bytes + kAlign, &memory);
  const auto first = reinterpret_cast<std::uintptr_t>(memory);
  p->workspace = static_cast<unsigned char*>(memory) + (kAlign - first % kAlign) % kAlign;
  return array;
}

}  // namespace rlk::bindings
