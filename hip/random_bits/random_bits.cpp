// The host side of random_bits on HIP checks memory safety and launches the kernels.
#include "rlk/ops/random_bits.h"

#include "hip/common/launch.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

void random_bits(const RandomBitsParams& p, int device, Stream stream) {
  check_random_bits(p);
  launch_blocks(device, stream, {kRandomThreads, 0}, "rlk_random_bits_words",
                ceil_div(p.num_rows * random_blocks(p), kRandomThreads), p);
}

}  // namespace rlk::hip
