// CPU backend of the operator `linear_logprob`: copies scored rows and zeroes the other rows. `linear` and `logprob`
// compute everything else.
#include <cstring>

#include "kernels/vocabulary/scored_rows.h"
#include "rlk/backends.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kRowsAtOnce = 64;

}  // namespace

void scored_rows(const ScoredRowsParams& p) {
  parallel_for(p.num_rows, kRowsAtOnce, [&](std::int64_t begin, std::int64_t end) {
    const auto bytes = static_cast<std::size_t>(p.row_bytes);
    for (std::int64_t i = begin; i < end; ++i) {
      unsigned char* const to = static_cast<unsigned char*>(p.to) + scored_to_offset(p, i);
      const std::int64_t source = scored_source(p, i);
      if (source < 0) {
        std::memset(to, 0, bytes);
      } else if (p.from != p.to) {
        std::memcpy(to, static_cast<const unsigned char*>(p.from) + scored_from_offset(p, source), bytes);
      }
    }
  });
}

}  // namespace rlk::cpu
