// Random words for SM80 and later.
#include "words.cuh"

namespace rlk::cuda {
void random_bits_sm80(const RandomBitsParams& p, cudaStream_t stream) { run(p, stream); }
}  // namespace rlk::cuda
