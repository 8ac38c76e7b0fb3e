// What the host and the kernels of sample agree on.
#pragma once

#include <algorithm>

#include "rlk/kernels/process_logits.h"
#include "rlk/kernels/sample_check.h"

namespace rlk::hip {

constexpr int kSampleThreads = kMaxTeam;
constexpr std::size_t kSampleLds =
    sizeof(SampleShared) +
    std::max({sizeof(SamplePartialParams), sizeof(SampleMergeParams), sizeof(ProcessLogitsParams)});

}  // namespace rlk::hip
