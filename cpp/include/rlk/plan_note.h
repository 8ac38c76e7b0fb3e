// Plans that serve a call, for rk.trace: a kernel, its tile, an instruction set. A thread notes the plans of its own
// calls, and only while a trace is open.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

namespace rlk {

// Whether a trace is open.
inline std::atomic<bool> plans_are_noted{false};
// The plans that this thread has noted since it last cleared them, each once, in the order of first use.
inline std::vector<std::string>& noted_plans() {
  thread_local std::vector<std::string> plans;
  return plans;
}

// Notes the plan that name() returns. Without a trace, the call is a load and a branch.
template <class Name>
void note_plan(Name name) {
  if (!plans_are_noted.load(std::memory_order_relaxed)) return;
  std::vector<std::string>& plans = noted_plans();
  std::string plan = name();
  if (std::find(plans.begin(), plans.end(), plan) == plans.end()) plans.push_back(std::move(plan));
}

}  // namespace rlk
