// The CPU backend's threads. No result depends on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace rlk::cpu {

// Number of threads that parallel_for uses, its caller included. This number starts as the number of CPUs that this
// process may run on.
int num_threads();
constexpr int kMostThreads = 1024;
void set_num_threads(int n);  // 1 <= n <= kMostThreads; running calls keep their threads

namespace detail {
using Range = void (*)(void* context, std::int64_t begin, std::int64_t end);
void parallel_for(std::int64_t n, std::int64_t grain, Range range, void* context);
}  // namespace detail

// Calls fn(begin, end) on disjoint ranges of at most `grain` items that cover [0, n). If the caller works alone, one
// call may get all of [0, n). parallel_for returns when all ranges are done. The first exception is rethrown, and
// ranges that have not begun are then dropped. If fn itself calls parallel_for, that call runs on fn's own thread.
// Several threads may call parallel_for at once, and a forked child starts with threads of its own.
template <class F>
void parallel_for(std::int64_t n, std::int64_t grain, F&& fn) {
  using Function = std::remove_reference_t<F>;
  detail::parallel_for(
      n, grain,
      [](void* context, std::int64_t begin, std::int64_t end) { (*static_cast<Function*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
}

}  // namespace rlk::cpu
