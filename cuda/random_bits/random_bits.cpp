// CUDA backend of random_bits: checks memory safety, then calls the kernel for the GPU's architecture.
#include "rlk/ops/random_bits.h"

#include "../common/kernels.h"
#include "kernels/sample/random_words.h"
#include "rlk/backends.h"

namespace rlk::cuda {

void random_bits(const RandomBitsParams& p, int device, Stream stream) {
  check_random_bits(p);
  if (p.num_rows == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("random_bits", device, random_bits)(p, to_stream(stream));
}

}  // namespace rlk::cuda
