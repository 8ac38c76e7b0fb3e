// The kernels of linear_logprob under the names that the host looks up. The kernels are compiled for gfx90a and gfx942,
// and for the emulation.
#include "hip/common/wave.h"
#include "kernels/vocabulary/scored_rows.h"

namespace rlk::hip {

// a vector, because the compiler would copy a struct through scratch memory
using ScoredVector = std::uint32_t __attribute__((vector_size(16)));

}  // namespace rlk::hip

#define RLK_SCORED_ROWS(shape, Unit)                                                                        \
  RLK_KERNEL(1 << rlk::kScoredLog2Threads)                                                                  \
  rlk_linear_logprob_rows_##shape(rlk::ScoredRowsParams p, std::int64_t first_block, rlk::RowSplit split) { \
    rlk::copy_scored_rows<Unit>(p, split, static_cast<std::uint32_t>(first_block + rlk::hip::block_id_x()), \
                                rlk::hip::thread_id());                                                     \
  }

RLK_SCORED_ROWS(vectors, rlk::hip::ScoredVector)
RLK_SCORED_ROWS(halves, std::uint16_t)
