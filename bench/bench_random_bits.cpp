// Microbenchmark of random_bits on CUDA: one row per case, with the bytes it must move and their share of the copy ceiling
// measured in the same run.
#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "bench/sequence_lengths.h"
#include "rlk/backends.h"
#include "rlk/ops/random_bits.h"

int main() {
  using namespace rlk;
  using namespace rlk::bench;
  if (!has_hopper()) return 1;
  const double ceiling = copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const auto& [rows, words] : {std::pair{256, 4}, std::pair{1 << 20, 4}, std::pair{1 << 16, 256}}) {
    const int count = 8;
    const Buffers out(static_cast<std::size_t>(rows) * words * 8, count, DType::kFloat32, false);
    const auto call = [&, rows = rows, words = words](cudaStream_t stream, int i) {
      RandomBitsParams p;
      p.seed.value = 7;
      p.sample_id.value = i;
      p.num_rows = rows;
      p.num_words = words;
      p.bits = static_cast<std::int64_t*>(out.at(i));
      cuda::random_bits(p, 0, reinterpret_cast<Stream>(stream));
    };
    print_row(std::to_string(words) + " words of " + std::to_string(rows) + " rows", median_us(call, count, 15),
              8.0 * words * rows, ceiling);
  }
}
