// CPU backend of the operator `gae`: sequences are spread over threads.
#include "rlk/ops/gae.h"

#include <algorithm>

#include "float_environment.h"
#include "gae_simd.h"
#include "kernels/advantages/gae_check.h"
#include "rlk/backends.h"
#include "rows.h"
#include "thread_pool.h"
#include "tokens/passes.h"

namespace rlk::cpu {
namespace {

const GaeLanes& lanes() { return RLK_CPU_LANES_IN_USE(gae_simd); }

}  // namespace

void gae(const GaeParams& p) {
  check_gae(p);
  const Sequences& q = p.sequences;
  check_offset_values(q);
  clear_rest(q, {p.advantages.data, p.returns.data});
  if (q.num_sequences == 0 || q.num_tokens == 0) return;
  const GaeLanes& loops = lanes();
  const std::int64_t length = q.cu_seqlens == nullptr ? q.num_tokens : q.num_tokens / q.num_sequences;
  parallel_for(q.num_sequences, rows_of_a_task(length), [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t s = begin; s < end; ++s) loops.scan_sequence(p, s);
  });
}

}  // namespace rlk::cpu
