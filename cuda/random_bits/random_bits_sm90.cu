// Random words for SM90.
#include "words.cuh"

namespace rlk::cuda {
void random_bits_sm90(const RandomBitsParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda
