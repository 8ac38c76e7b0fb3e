// The host side of rope on HIP checks memory safety, and chooses and launches the kernels of a call.
#include "rlk/ops/rope.h"

#include <algorithm>
#include <string>

#include "hip/common/runtime.h"
#include "kernels/rows/rope_check.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

void rope(const RopeParams& p, int device, Stream stream) {
  check_rope(p);
  if (p.num_tokens == 0 || p.head_dim == 0 || p.q.num_heads + p.k.num_heads == 0) return;
  const bool vec8s = rope_has_vec8s(p);
  const std::string name = std::string("rlk_rope_") +
                           (!vec8s          ? "elements"
                            : p.interleaved ? "neighbours"
                                            : "halves") +
                           (p.dtype == DType::kBFloat16  ? "_bf16"
                            : p.dtype == DType::kFloat16 ? "_f16"
                                                         : "_f32");
  for (std::int64_t first = 0; first < p.num_tokens;) {
    RopeGrid g;
    first += rope_grid(p, vec8s, vec8s ? kRopeHeadsOfThread : 1, kRopeThreads, first, &g);
    // A launch has fewer than 2^32 threads.
    constexpr std::int64_t kMostBlocks = std::int64_t{1} << 23;
    for (std::int64_t block = 0; block < rope_blocks(g); block += kMostBlocks) {
      const std::int64_t blocks = std::min(kMostBlocks, rope_blocks(g) - block);
      Runtime::get().launch(device, name.c_str(), {blocks, 1, kRopeThreads, 0}, stream, p, g, block);
    }
  }
}

}  // namespace rlk::hip
