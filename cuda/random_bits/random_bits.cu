// Random words on CUDA. A thread computes a block of four words of one row, and neighbouring threads compute
// neighbouring blocks. Bound by the stores: 8 bytes per word. All architectures share this source; each has its own
// machine code.
#include "../common/kernels.h"
#include "kernels/sample/random_words.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) random_bits_kernel(const __grid_constant__ RandomBitsParams p) {
  const std::int64_t blocks = random_blocks(p);
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.num_rows * blocks; i += step) {
    write_random_block(p, i / blocks, static_cast<std::int32_t>(i % blocks));
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void random_bits(const RandomBitsParams& p, cudaStream_t stream) {
  const std::int64_t wanted = (p.num_rows * random_blocks(p) + kThreads - 1) / kThreads;
  constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
  const auto blocks = static_cast<unsigned>(wanted < kMostBlocks ? wanted : kMostBlocks);
  random_bits_kernel<<<blocks, kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of random_bits");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
