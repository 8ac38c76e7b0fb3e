// Constants and arguments of sample that host and kernels share.
#pragma once

#include <algorithm>

#include "kernels/sample/check.h"
#include "kernels/sample/process_logits.h"

namespace rlk::hip {

constexpr int kSampleThreads = kMaxTeam;
constexpr std::size_t kSampleLds =
    sizeof(SampleShared) +
    std::max({sizeof(SamplePartialParams), sizeof(SampleMergeParams), sizeof(ProcessLogitsParams)});

}  // namespace rlk::hip
