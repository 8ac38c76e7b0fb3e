// CPU backend of linear_logprob: rows without those that are not scored. The rest is linear's and logprob's.
#include "linear_logprob.h"

#include <cstring>

#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kRowsAtOnce = 64;

}  // namespace

void scored_rows(const ScoredRowsParams& p) {
  parallel_for(p.num_rows, kRowsAtOnce, [&](std::int64_t begin, std::int64_t end) {
    const auto bytes = static_cast<std::size_t>(p.row_bytes);
    for (std::int64_t i = begin; i < end; ++i) {
      unsigned char* const to = static_cast<unsigned char*>(p.to) + i * p.row_bytes;
      if (is_scored(p, i)) {
        std::memcpy(to, static_cast<const unsigned char*>(p.from) + scored_row_offset(p, i), bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  });
}

}  // namespace rlk::cpu
