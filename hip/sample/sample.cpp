// Host side of the HIP backend of sample: checks of memory safety, its launches.
#include "rlk/ops/sample.h"

#include <string>

#include "hip/common/launch.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

void sample(const SampleParams& p, int device, Stream stream) {
  check_sample(p);
  if (p.exp != Exp::kPortable) throw Unsupported("sample: HIP kernels have the portable exponential only");
  const Block block{kSampleThreads, kSampleLds};
  if (p.num_rows == 0) {
    if (p.kept_offsets != nullptr) launch_blocks(device, stream, block, "rlk_sample_offsets", 1, p, SampleChunk{});
    return;
  }
  RLK_CHECK(p.workspace != nullptr, "sample: a workspace is given");
  const std::string suffix = type_suffix(p.dtype);
  const SampleParams of_raw = raw_pass(p);
  for (std::int64_t first = 0; first < p.num_rows; first += kSampleChunk) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    launch_blocks(device, stream, block, "rlk_sample_first" + suffix, chunk.rows, p, chunk);
    launch_blocks(device, stream, block, "rlk_sample_truncate" + suffix, chunk.rows, p, chunk);
    launch_blocks(device, stream, block, "rlk_sample_tree" + suffix, chunk.rows, p, chunk);
    launch_blocks(device, stream, block, "rlk_sample_draw" + suffix, chunk.rows, p, chunk);
    if (p.top_ids != nullptr) {
      launch_blocks(device, stream, block, "rlk_sample_top" + suffix, chunk.rows, p, chunk);
    }
    const std::string of_raw_type = type_suffix(of_raw.dtype);
    if (p.raw_logprob != nullptr) {
      launch_blocks(device, stream, block, "rlk_sample_raw" + of_raw_type, chunk.rows, of_raw, chunk);
    }
    if (of_raw.top_ids != nullptr) {
      launch_blocks(device, stream, block, "rlk_sample_raw_top" + of_raw_type, chunk.rows, of_raw, chunk);
    }
    if (p.kept_offsets == nullptr) continue;
    launch_blocks(device, stream, block, "rlk_sample_offsets", 1, p, chunk);
    launch_blocks(device, stream, block, "rlk_sample_kept", chunk.rows, p, chunk);
  }
}

void process_logits(const ProcessLogitsParams& p, int device, Stream stream) {
  check_process_logits(p);
  if (p.num_rows == 0) return;
  launch_blocks(device, stream, Block{kSampleThreads, kSampleLds},
                std::string("rlk_sample_process") + type_suffix(p.dtype), p.num_rows, p);
}

}  // namespace rlk::hip
