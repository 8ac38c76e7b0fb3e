// Constants of random_bits that host and kernel share.
#pragma once

#include "kernels/sample/random_words.h"

namespace rlk::hip {

constexpr int kRandomThreads = 256;

}  // namespace rlk::hip
