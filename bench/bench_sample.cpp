// Microbenchmark of sample on CUDA: one row per case, with the bytes of the logits and their share of the copy ceiling
// measured in the same run.
#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "bench/sequence_lengths.h"
#include "rlk/backends.h"
#include "rlk/ops/sample.h"

namespace rlk::bench {
namespace {

struct Cut {
  const char* name;
  std::int64_t top_k;
  float top_p, min_p;
};
constexpr Cut kCuts[] = {{"temperature", 0, 1.0f, 0.0f},
                         {"top-k 50, top-p 0.9", 50, 0.9f, 0.0f},
                         {"top-p 0.95", 0, 0.95f, 0.0f},
                         {"min-p 0.05", 0, 1.0f, 0.05f}};

void run(std::int64_t rows, DType dtype, double ceiling) {
  constexpr std::int64_t kVocab = 128256;
  constexpr int kCount = 8;
  const auto bytes = static_cast<std::size_t>(rows * kVocab * size_of(dtype));
  const Buffers logits(bytes, kCount, dtype, true);
  std::int64_t* const ids = on_device(std::vector<std::int64_t>(static_cast<std::size_t>(rows)));
  std::int64_t* const offsets = on_device(std::vector<std::int64_t>(static_cast<std::size_t>(rows + 1)));
  std::int32_t* const kept = on_device(std::vector<std::int32_t>(static_cast<std::size_t>(rows * kVocab)));
  std::int32_t* const status = on_device(std::vector<std::int32_t>(static_cast<std::size_t>(rows)));
  float* const logprob = on_device(std::vector<float>(static_cast<std::size_t>(rows)));
  SampleParams p;
  p.dtype = dtype;
  p.exp = Exp::kHardware;
  p.num_rows = rows;
  p.vocab_size = p.valid_vocab = p.logits_stride = kVocab;
  p.temperature.value = 0.8f;
  p.ids = ids;
  p.status = status;
  p.logprob = logprob;
  unsigned char* const workspace = on_device(
      std::vector<unsigned char>(static_cast<std::size_t>(sample_workspace_bytes(p, {DeviceType::kCuda, 0}))));
  p.workspace = workspace;
  for (const Cut& cut : kCuts) {
    p.top_k.value = cut.top_k;
    p.top_p.value = cut.top_p;
    p.min_p.value = cut.min_p;
    const bool cuts = cut.top_k > 0 || cut.top_p < 1.0f || cut.min_p > 0.0f;
    p.kept_ids = cuts ? kept : nullptr;
    p.kept_offsets = cuts ? offsets : nullptr;
    p.kept_capacity = cuts ? rows * kVocab : 0;
    const auto call = [&](cudaStream_t stream, int i) {
      SampleParams q = p;
      q.logits = logits.at(i);
      cuda::sample(q, 0, reinterpret_cast<Stream>(stream));
    };
    print_row(std::to_string(rows) + " rows, " + std::to_string(size_of(dtype)) + " bytes, " + cut.name,
              median_us(call, kCount, 9), static_cast<double>(bytes), ceiling);
  }
  for (void* memory : {static_cast<void*>(ids), static_cast<void*>(offsets), static_cast<void*>(kept),
                       static_cast<void*>(status), static_cast<void*>(logprob), static_cast<void*>(workspace)}) {
    cudaFree(memory);
  }
}

}  // namespace
}  // namespace rlk::bench

int main() {
  using namespace rlk;
  if (!bench::has_hopper()) return 1;
  const double ceiling = bench::copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t rows : {1, 256}) bench::run(rows, dtype, ceiling);
  }
}
