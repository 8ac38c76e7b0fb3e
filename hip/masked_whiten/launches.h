// Constants and arguments of masked_whiten that host and kernels share.
#pragma once

#include "kernels/advantages/masked_whiten_token.h"

namespace rlk::hip {

constexpr int kWhitenThreads = 256;                   // threads of a block, which takes one sequence or the whole batch
constexpr int kWhitenTeams = kWhitenThreads / 32;     // teams of 32 lanes; each takes a chunk at a time
constexpr int kWhitenLdsBytes = kWhitenThreads * 16;  // per lane the count, the minimum and the maximum; sums of teams

}  // namespace rlk::hip
