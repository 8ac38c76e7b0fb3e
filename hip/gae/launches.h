// Constants and arguments of gae that host and kernels share.
#pragma once

#include "rlk/ops/gae.h"

namespace rlk::hip {

constexpr int kGaeThreads = 256;                     // threads of a block, which processes one sequence
constexpr int kGaeTeams = kGaeThreads / kScanLanes;  // teams of 32 lanes; each processes a chunk at a time
constexpr int kGaeLdsBytes =
    // per team: the chunk's total in two buffers used in turn; the first value of the chunk; whether there is one
    kGaeTeams * (2 * 8 + 4 + 4);

}  // namespace rlk::hip
