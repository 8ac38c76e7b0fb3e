// CPU backend of the operator `random_bits`: rows are spread over threads.
#include "rlk/ops/random_bits.h"

#include <algorithm>

#include "kernels/sample/random_words.h"
#include "rlk/backends.h"
#include "thread_pool.h"

namespace rlk::cpu {

constexpr std::int64_t kTaskBlocks = 1024;  // blocks of words per task, enough to be worth waking a thread

void random_bits(const RandomBitsParams& p) {
  check_random_bits(p);
  const std::int64_t blocks = random_blocks(p);
  parallel_for(p.num_rows, std::max<std::int64_t>(kTaskBlocks / blocks, 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        write_random_block(p, row, static_cast<std::int32_t>(block));
      }
    }
  });
}

}  // namespace rlk::cpu
