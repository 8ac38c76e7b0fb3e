// Constants and arguments of masked_whiten that host and kernels share.
#pragma once

#include "kernels/advantages/masked_whiten_token.h"

namespace rlk::hip {

constexpr int kWhitenThreads = 256;                // threads of a block, for one sequence or for the batch
constexpr int kWhitenTeams = kWhitenThreads / 32;  // teams of 32 lanes; each processes a chunk at a time
// first the count, minimum and maximum of each lane; later the sums of the teams
constexpr int kWhitenLdsBytes = kWhitenThreads * 16;

}  // namespace rlk::hip
