// What the host and the kernels of sample agree on.
#pragma once

#include "rlk/kernels/sample_check.h"

namespace rlk::hip {

constexpr int kSampleThreads = kMaxTeam;
constexpr std::size_t kSampleLds = sizeof(SampleShared) + sizeof(SampleParams);

}  // namespace rlk::hip
