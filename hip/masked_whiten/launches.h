// What the host and the kernels of masked_whiten agree on.
#pragma once

#include "rlk/kernels/masked_whiten_token.h"

namespace rlk::hip {

constexpr int kWhitenThreads = 256;                   // threads of a block, which takes one sequence or the whole batch
constexpr int kWhitenTeams = kWhitenThreads / 32;     // teams of 32 lanes; each takes a chunk at a time
constexpr int kWhitenLdsBytes = kWhitenThreads * 16;  // per lane how many count, the least, the largest; sums of teams

}  // namespace rlk::hip
