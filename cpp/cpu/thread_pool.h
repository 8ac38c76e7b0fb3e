// The CPU backend's threads. No result depends on their number.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace rlk::cpu {

// Threads that parallel_for uses, its caller included. Starts as the number of CPUs this process may run on.
int num_threads();
void set_num_threads(int n);  // >= 1; calls already running finish on the threads they have

namespace detail {
using Range = void (*)(void* context, std::int64_t begin, std::int64_t end);
void parallel_for(std::int64_t n, std::int64_t grain, Range range, void* context);
}  // namespace detail

// fn(begin, end) on disjoint ranges of at most `grain` items that cover [0, n); on the caller alone it may get all of
// [0, n) at once. Returns when all are done; the first exception is rethrown, ranges not yet begun are then dropped.
// A call from inside fn runs inline. Callers may come from any threads at once, and a forked child starts with threads
// of its own.
template <class F>
void parallel_for(std::int64_t n, std::int64_t grain, F&& fn) {
  using Function = std::remove_reference_t<F>;
  detail::parallel_for(
      n, grain,
      [](void* context, std::int64_t begin, std::int64_t end) { (*static_cast<Function*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
}

}  // namespace rlk::cpu
