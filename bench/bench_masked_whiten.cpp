// Microbenchmark of the masked_whiten kernels on an H100 or H200: bytes per second beside the copy ceiling. The figure
// counts three reads of x and its bool mask, and one write of y.
#include "bench/sequences.h"
#include "cuda/common/kernels.h"
#include "rlk/backends.h"
#include "rlk/ops/masked_whiten.h"

namespace rlk::bench {
namespace {

void run(const Shape& shape, double ceiling, bool every_plan) {
  const std::int64_t elements = shape.sequences * shape.tokens;
  const std::size_t bytes = static_cast<std::size_t>(elements) * 4;
  const int count = buffers_for(2 * bytes);
  const Buffers x(bytes, count, DType::kFloat32, true), y(bytes, count, DType::kFloat32, false);
  const Buffers mask(static_cast<std::size_t>(elements), count, DType::kBool, false);
  for (int i = 0; i < count; ++i) cuda::check(cudaMemset(mask.at(i), 1, static_cast<std::size_t>(elements)), "memset");
  MaskedWhitenParams p;
  p.sequences.num_sequences = shape.sequences;
  p.sequences.num_tokens = shape.tokens;
  const Buffers workspace(static_cast<std::size_t>(cuda::masked_whiten_workspace_bytes(p, 0)), 1, DType::kBool, false);
  p.workspace = workspace.at(0);
  const auto params = [&](int call) {
    MaskedWhitenParams of_call = p;
    of_call.x = {static_cast<const float*>(x.at(call)), shape.tokens};
    of_call.y = {static_cast<float*>(y.at(call)), shape.tokens};
    of_call.mask = rlk::mask_of(mask.at(call), shape.tokens, DType::kBool);
    return of_call;
  };
  const double moved = 4.0 * static_cast<double>(bytes) + 3.0 * static_cast<double>(elements);
  const int chosen = cuda::choose_sequence_warps(p.sequences, cuda::multiprocessors(0));
  for (const int warps : cuda::kSequenceWarps) {
    if (!every_plan && warps != chosen) continue;
    const double us = median_us([&](cudaStream_t s, int call) { cuda::sm90::masked_whiten(params(call), warps, s); },
                                std::max(count, 4), 15);
    report("masked_whiten", shape, warps, warps == chosen, us, moved, ceiling);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  bool every_plan = false;
  if (!read_options(argc, argv, &every_plan)) return 1;
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const Shape& shape : kShapes) run(shape, ceiling, every_plan);
}
