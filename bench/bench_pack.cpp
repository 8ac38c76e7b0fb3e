// Microbenchmark of pack and unpack on CUDA. A row per case shows the bytes that it must move, and their share of the copy
// ceiling of the same run. The kernel reads and writes existing tokens once, and writes the rest of a result once.
#include <algorithm>

#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "bench/sequence_lengths.h"
#include "rlk/backends.h"
#include "rlk/ops/pack.h"

namespace rlk::bench {
namespace {

struct Case {
  std::int64_t rows, columns, token_bytes;
  int arrays;
};
// 32k ragged rows of ids; rows of ids, log-probabilities, flags of 8 bytes and advantages together; hidden states.
constexpr Case kCases[] = {
    {32768, 1024, 4, 1}, {32768, 256, 4, 1}, {4096, 8192, 4, 1}, {4096, 2048, 8, 4}, {64, 2048, 8192, 1}};

void run(const Case& c, double ceiling) {
  const auto offsets = ragged_offsets(c.rows, c.columns);
  const double total = offsets.back(), all = static_cast<double>(c.rows * c.columns),
               size = static_cast<double>(c.token_bytes);
  const std::size_t bytes = static_cast<std::size_t>(c.rows * c.columns * c.token_bytes);
  const int count = static_cast<int>(std::clamp<std::size_t>((512u << 20) / bytes, 1, 16)) + c.arrays;
  const Buffers padded(bytes, count, DType::kFloat32, true), packed(bytes, count, DType::kFloat32, true);
  std::int32_t* const cu_seqlens = on_device(offsets);
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) lengths.push_back(offsets[i + 1] - offsets[i]);
  std::int64_t* const of_rows = on_device(lengths);
  std::int32_t* const status = on_device(std::vector<std::int32_t>(1));
  const auto move = [&](bool unpacks, std::int64_t capacity) {
    return [&, unpacks, capacity](cudaStream_t stream, int call) {
      PackParams p;
      p.num_arrays = c.arrays;
      p.unpacks = unpacks;
      p.cu_seqlens = {cu_seqlens, DType::kInt32};
      p.num_sequences = c.rows;
      p.num_tokens = c.columns;
      p.capacity = capacity;
      for (int k = 0; k < c.arrays; ++k) {
        const int at = call * c.arrays + k;
        p.arrays[k] = {
            padded.at(at), c.columns * c.token_bytes, c.token_bytes, packed.at(at), c.token_bytes, c.token_bytes, 0};
      }
      cuda::pack(p, 0, reinterpret_cast<Stream>(stream));
    };
  };
  const std::string shape = "[" + std::to_string(c.rows) + ", " + std::to_string(c.columns) + "] x " +
                            std::to_string(c.token_bytes) + " B x " + std::to_string(c.arrays);
  const double arrays = c.arrays;
  print_row("pack   " + shape + ", bound given", median_us(move(false, offsets.back()), count, 15),
            2 * total * size * arrays, ceiling);
  print_row("pack   " + shape + ", room for all", median_us(move(false, c.rows * c.columns), count, 15),
            (total + all) * size * arrays, ceiling);
  print_row("unpack " + shape, median_us(move(true, offsets.back()), count, 15), (total + all) * size * arrays,
            ceiling);
  const auto layout = [&](cudaStream_t stream, int) {
    PackLayoutParams p;
    p.lengths = of_rows;
    p.cu_seqlens = cu_seqlens;
    p.status = status;
    p.num_sequences = c.rows;
    p.num_tokens = c.columns;
    p.capacity = c.rows * c.columns;
    cuda::pack_layout(p, 0, reinterpret_cast<Stream>(stream));
  };
  print_row("layout by lengths, " + std::to_string(c.rows) + " rows", median_us(layout, 16, 15),
            12.0 * static_cast<double>(c.rows), ceiling);
  cudaFree(cu_seqlens);
  cudaFree(of_rows);
  cudaFree(status);
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
