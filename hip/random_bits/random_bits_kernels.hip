// The kernel of random_bits under the name that the host looks up. The kernel is compiled for gfx90a and gfx942, and
// for the emulation. The formulas are in kernels/sample/random_words.h, shared with the CPU and CUDA.
#include "hip/common/wave.h"
#include "hip/random_bits/launches.h"

RLK_KERNEL(rlk::hip::kRandomThreads) rlk_random_bits_words(rlk::RandomBitsParams p, std::int64_t first_block) {
  const std::int64_t i = (first_block + rlk::hip::block_id_x()) * rlk::hip::kRandomThreads + rlk::hip::thread_id();
  const std::int64_t blocks = rlk::random_blocks(p);
  if (i < p.num_rows * blocks) rlk::write_random_block(p, i / blocks, static_cast<std::int32_t>(i % blocks));
}
