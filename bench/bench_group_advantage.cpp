// Microbenchmark of the group_advantage kernels on an H100 or H200, in microseconds a call. Launches and latency are
// the bound.
#include <cstdio>
#include <vector>

#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "cuda/common/kernels.h"
#include "rlk/backends.h"
#include "rlk/ops/group_advantage.h"

namespace rlk::bench {
namespace {

void run(std::int64_t sequences, std::int64_t group_size, bool by_ids, GroupScale scale) {
  const Buffers rewards(static_cast<std::size_t>(sequences) * 4, 1, DType::kFloat32, true);
  const Buffers advantage(static_cast<std::size_t>(sequences) * 4, 1, DType::kFloat32, false);
  const Buffers ids(static_cast<std::size_t>(sequences) * 8, 1, DType::kInt64, false);
  std::vector<std::int64_t> groups;
  for (std::int64_t i = 0; i < sequences; ++i) groups.push_back(i % (sequences / group_size));
  cuda::check(cudaMemcpy(ids.at(0), groups.data(), groups.size() * 8, cudaMemcpyHostToDevice), "copy");
  GroupAdvantageParams p;
  p.rewards = static_cast<const float*>(rewards.at(0));
  p.advantage = static_cast<float*>(advantage.at(0));
  p.num_sequences = sequences;
  p.group_size = group_size;
  p.scale = scale;
  if (by_ids) p.group_ids = ids.at(0);
  const Buffers workspace(static_cast<std::size_t>(cuda::group_advantage_workspace_bytes(p, 0)) + 8, 1, DType::kBool,
                          false);
  p.workspace = workspace.at(0);
  const double us = median_us([&](cudaStream_t s, int) { cuda::sm90::group_advantage(p, s); }, 20, 15);
  std::printf("%7lld sequences in groups of %-5lld %-8s %-14s %9.2f us\n", static_cast<long long>(sequences),
              static_cast<long long>(group_size), by_ids ? "by ids" : "by size",
              scale == GroupScale::kBatch ? "scale of batch" : "", us);
  std::fflush(stdout);
}

}  // namespace
}  // namespace rlk::bench

int main() {
  using namespace rlk::bench;
  using rlk::GroupScale;
  if (!has_hopper()) return 1;
  for (const std::int64_t sequences : {512, 4096, 65536}) {
    for (const std::int64_t group_size : {8, 16, 512}) {
      for (const bool by_ids : {false, true}) run(sequences, group_size, by_ids, GroupScale::kGroup);
      run(sequences, group_size, false, GroupScale::kBatch);
    }
  }
}
