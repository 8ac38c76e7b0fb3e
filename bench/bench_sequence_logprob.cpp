// Microbenchmark of sequence_logprob on CUDA. The benchmark prints one row per plan that supports a case, and one row
// for the gradient. A row shows the bytes that a call must move, and their share of the bandwidth of a copy in the same
// run.
#include <algorithm>

#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "bench/sequence_lengths.h"
#include "cuda/sequence_logprob/kernels.h"
#include "rlk/backends.h"
#include "rlk/ops/sequence_logprob.h"

namespace rlk::bench {
namespace {

struct Case {
  std::int64_t rows, columns;
  int mask_bytes;
  bool packed;
};
constexpr Case kCases[] = {{4096, 8192, 1, false}, {4096, 8192, 8, false}, {4096, 8192, 1, true},
                           {65536, 256, 1, false}, {65536, 256, 1, true},  {32, 32768, 1, false},
                           {1, 1 << 20, 1, false}};

void run(const Case& c, double ceiling) {
  const auto offsets = ragged_offsets(c.rows, c.columns);
  const std::int64_t tokens = c.packed ? offsets.back() : c.rows * c.columns;
  const std::size_t bytes = static_cast<std::size_t>(tokens * 4),
                    flags = static_cast<std::size_t>(tokens * c.mask_bytes);
  const int count = static_cast<int>(std::clamp<std::size_t>((512u << 20) / bytes, 1, 32));
  const Buffers logprob(bytes, count, DType::kFloat32, true), mask((flags + 3) / 4 * 4, count, DType::kFloat32, true);
  std::int32_t* const cu_seqlens = on_device(offsets);
  float* const sum = on_device(std::vector<float>(static_cast<std::size_t>(c.rows)));
  std::int64_t* const counts = on_device(std::vector<std::int64_t>(static_cast<std::size_t>(c.rows)));
  const auto params = [&](int call) {
    SequenceLogprobParams p;
    p.logprob = logprob.at(call);
    p.logprob_stride = c.columns;
    p.mask = {mask.at(call), c.columns, c.mask_bytes, false};
    if (c.packed) p.cu_seqlens = {cu_seqlens, DType::kInt32};
    p.sum = sum;
    p.count = counts;
    p.num_sequences = c.rows;
    p.num_tokens = c.packed ? tokens : c.columns;
    return p;
  };
  const std::string shape = "[" + std::to_string(c.rows) + ", " + std::to_string(c.columns) + "] mask " +
                            std::to_string(c.mask_bytes) + " B" + (c.packed ? ", packed" : "");
  const double moved = static_cast<double>(tokens) * (4 + c.mask_bytes);
  const cuda::SequencePlan chosen = cuda::choose_plan(params(0));
  for (const cuda::SequencePlan& plan : cuda::kSequencePlans) {
    const bool is_chosen = plan.warps == chosen.warps;
    const double us = median_us(
        [&](cudaStream_t stream, int call) { cuda::sm90::sequence_logprob(params(call), plan, stream); }, count, 15);
    print_row("sum " + shape + ", warps " + std::to_string(plan.warps) + (is_chosen ? " (chosen)" : ""), us, moved,
              ceiling);
  }
  const double us = median_us(
      [&](cudaStream_t stream, int call) {
        SequenceLogprobBackwardParams p;
        p.dsum = sum;
        p.mask = params(call).mask;
        p.cu_seqlens = params(call).cu_seqlens;
        p.d_logprob = logprob.at(call);
        p.num_sequences = c.rows;
        p.num_tokens = params(call).num_tokens;
        cuda::sequence_logprob_backward(p, 0, reinterpret_cast<Stream>(stream));
      },
      count, 15);
  print_row("gradient " + shape, us, moved, ceiling);
  cudaFree(cu_seqlens);
  cudaFree(sum);
  cudaFree(counts);
}

}  // namespace
}  // namespace rlk::bench

int main() {
  using namespace rlk;
  if (!bench::has_hopper()) return 1;
  const double ceiling = bench::copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const bench::Case& c : bench::kCases) bench::run(c, ceiling);
}
