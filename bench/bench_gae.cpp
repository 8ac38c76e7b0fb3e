// Microbenchmark of the gae kernels on an H100 or H200: bytes per second beside the copy ceiling. The figure counts one
// read of every input and one write of every output. Masks are bool or int64.
#include "bench/sequences.h"
#include "cuda/common/kernels.h"
#include "rlk/ops/gae.h"

namespace rlk::bench {
namespace {

// mask_bytes: bytes of a token's mask; 0 without a mask.
void run(const Shape& shape, GaeKind kind, int mask_bytes, double ceiling, bool every_plan) {
  const std::int64_t elements = shape.sequences * shape.tokens;
  const std::size_t bytes = static_cast<std::size_t>(elements) * 4;
  const int inputs = kind == GaeKind::kGae ? 2 : kind == GaeKind::kVtrace ? 4 : 1;
  const int outputs = kind == GaeKind::kDiscountedReturns ? 1 : 2;
  const double moved = static_cast<double>(bytes) * (inputs + outputs) + static_cast<double>(elements) * mask_bytes;
  const int count = buffers_for(bytes * static_cast<std::size_t>(inputs + outputs));
  const Buffers in(bytes * static_cast<std::size_t>(inputs), count, DType::kFloat32, true);
  const Buffers out(bytes * static_cast<std::size_t>(outputs), count, DType::kFloat32, false);
  const std::size_t mask_size = static_cast<std::size_t>(elements * mask_bytes);
  const Buffers mask(std::max<std::size_t>(mask_size, 1), count, DType::kBool, false);
  for (int i = 0; i < count && mask_bytes > 0; ++i) cuda::check(cudaMemset(mask.at(i), 1, mask_size), "memset");
  const auto params = [&](int call) {
    const float* x = static_cast<const float*>(in.at(call));
    float* y = static_cast<float*>(out.at(call));
    GaeParams p;
    p.kind = kind;
    p.sequences.num_sequences = shape.sequences;
    p.sequences.num_tokens = shape.tokens;
    p.rewards = {x, shape.tokens};
    if (inputs > 1) p.values = {x + elements, shape.tokens};
    if (inputs > 2) {
      p.logprob = {x + 2 * elements, shape.tokens};
      p.rollout_logprob = {x + 3 * elements, shape.tokens};
    }
    if (mask_bytes > 0)
      p.mask = rlk::mask_of(mask.at(call), shape.tokens, mask_bytes == 1 ? DType::kBool : DType::kInt64);
    p.returns = {y, shape.tokens};
    if (outputs > 1) p.advantages = {y + elements, shape.tokens};
    p.gamma = 0.99f;
    p.lam = 0.95f;
    return p;
  };
  const char* names[] = {"gae", "discounted_returns", "vtrace"};
  const std::string name = std::string(names[static_cast<int>(kind)]) + (mask_bytes == 0   ? ""
                                                                         : mask_bytes == 1 ? ", mask"
                                                                                           : ", int64");
  const int chosen = cuda::choose_sequence_warps(params(0).sequences, cuda::multiprocessors(0));
  for (const int warps : cuda::kSequenceWarps) {
    if (!every_plan && warps != chosen) continue;
    const double us =
        median_us([&](cudaStream_t s, int call) { cuda::sm90::gae(params(call), warps, s); }, std::max(count, 4), 15);
    report(name.c_str(), shape, warps, warps == chosen, us, moved, ceiling);
  }
}

}  // namespace
}  // namespace rlk::bench

int main(int argc, char** argv) {
  using namespace rlk::bench;
  using rlk::GaeKind;
  bool every_plan = false;
  if (!read_options(argc, argv, &every_plan)) return 1;
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const Shape& shape : kShapes) {
    for (const int mask_bytes : {1, 0, 8}) run(shape, GaeKind::kGae, mask_bytes, ceiling, every_plan);
    for (const int mask_bytes : {1, 8}) run(shape, GaeKind::kDiscountedReturns, mask_bytes, ceiling, every_plan);
    run(shape, GaeKind::kVtrace, 1, ceiling, every_plan);
  }
}
