// Plans of calls, for rk.trace. A plan names what computes a call: a kernel, its tile, an instruction set. A thread
// notes the plans of its own calls, while a trace is open.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace rlk {

using Plans = std::vector<std::string>;

// Whether a trace is open.
inline std::atomic<bool> plans_are_noted{false};

// The plans that this thread has noted since take_plans, each once, in the order of first use; null before the first
// plan. It is a plain pointer, because the destructor of a thread-local object needs glibc 2.18. If a thread ends
// before it takes its plans, they leak.
inline Plans*& noted_plans() {
  thread_local Plans* plans = nullptr;
  return plans;
}

inline Plans take_plans() {
  const std::unique_ptr<Plans> plans(std::exchange(noted_plans(), nullptr));
  return plans ? std::move(*plans) : Plans();
}

// Notes the plan that name() returns. While no trace is open, the call costs a load and a branch.
template <class Name>
void note_plan(Name name) {
  if (!plans_are_noted.load(std::memory_order_relaxed)) return;
  Plans*& plans = noted_plans();
  if (plans == nullptr) plans = new Plans;
  std::string plan = name();
  if (std::find(plans->begin(), plans->end(), plan) == plans->end()) plans->push_back(std::move(plan));
}

}  // namespace rlk
