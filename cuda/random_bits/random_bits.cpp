// CUDA backend of random_bits: what would corrupt memory, which architecture's kernel runs.
#include "rlk/ops/random_bits.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {

void random_bits(const RandomBitsParams& p, int device, Stream stream) {
  check_random_bits(p);
  if (p.num_rows == 0) return;
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("random_bits: built for compute capability 8.0 and later");
  capability == 90 ? random_bits_sm90(p, to_stream(stream)) : random_bits_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
