// Microbenchmark of labels and masks on CUDA: one row per case, with the bytes it must move and their share of the copy
// ceiling measured in the same run.
#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "bench/sequence_lengths.h"
#include "rlk/backends.h"
#include "rlk/ops/shift_labels_packed.h"

namespace rlk::bench {
namespace {

void run(std::int64_t rows, std::int64_t columns, double ceiling) {
  auto offsets = ragged_offsets(rows, columns / 4);
  for (auto& offset : offsets) offset *= 4;  // lengths that zigzag over two ranks can cut into four
  const std::int64_t tokens = offsets.back();
  const int count = 8;
  const Buffers ids(static_cast<std::size_t>(tokens) * 8, count, DType::kFloat32, true),
      out(static_cast<std::size_t>(tokens) * 8, count, DType::kFloat32, true);
  std::int32_t* const cu_seqlens = on_device(offsets);
  const auto stream_of = [](cudaStream_t stream) { return reinterpret_cast<Stream>(stream); };
  const std::string shape = std::to_string(rows) + " sequences of up to " + std::to_string(columns);
  for (const int cp : {1, 2}) {
    const auto labels = [&](cudaStream_t stream, int call) {
      ShiftLabelsParams p;
      p.ids = ids.at(call);
      p.cu_seqlens = {cu_seqlens, DType::kInt32};
      p.labels = out.at(call);
      p.num_sequences = rows;
      p.num_tokens = tokens;
      p.cp_size = cp;
      cuda::shift_labels_packed(p, 0, stream_of(stream));
    };
    print_row("labels, " + shape + ", cp " + std::to_string(cp), median_us(labels, count, 15),
              16.0 * static_cast<double>(tokens) / cp, ceiling);
  }
  const auto turns = [&](cudaStream_t stream, int call) {
    ToolMaskParams p;
    p.ids = ids.at(call);
    p.cu_seqlens = {cu_seqlens, DType::kInt32};
    p.mask = static_cast<std::uint8_t*>(out.at(call));
    p.num_sequences = rows;
    p.num_tokens = tokens;
    p.begin.length = 3;
    p.end.length = 1;
    cuda::tool_mask(p, 0, stream_of(stream));
  };
  print_row("tool_mask, " + shape, median_us(turns, count, 15), 9.0 * static_cast<double>(tokens), ceiling);
  cudaFree(cu_seqlens);
}

}  // namespace
}  // namespace rlk::bench

int main() {
  using namespace rlk;
  if (!bench::has_hopper()) return 1;
  const double ceiling = bench::copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  bench::run(4096, 8192, ceiling);
  bench::run(65536, 256, ceiling);
}
