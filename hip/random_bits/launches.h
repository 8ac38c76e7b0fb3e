// What the host and the kernel of random_bits agree on.
#pragma once

#include "rlk/kernels/random_words.h"

namespace rlk::hip {

constexpr int kRandomThreads = 256;

}  // namespace rlk::hip
