// The host side of sample on HIP checks memory safety and launches the kernels.
#include "rlk/ops/sample.h"

#include <string>

#include "hip/common/launch.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

namespace {

const Block kBlock{kSampleThreads, kSampleLds};

void check_launch(const SampleParams& p) {
  if (p.exp != Exp::kPortable) throw Unsupported("sample: HIP kernels have the portable exponential only");
  RLK_CHECK(p.num_rows == 0 || p.workspace != nullptr, "sample: a workspace is given");
}

void launch_kept(const SampleParams& p, const SampleChunk& chunk, int device, Stream stream) {
  if (p.kept_offsets == nullptr) return;
  launch_blocks(device, stream, kBlock, "rlk_sample_offsets", 1, p, chunk);
  if (chunk.rows > 0) launch_blocks(device, stream, kBlock, "rlk_sample_kept", chunk.rows, p, chunk);
}

}  // namespace

void sample(const SampleParams& p, int device, Stream stream) {
  check_sample(p);
  check_launch(p);
  const Block& block = kBlock;
  if (p.num_rows == 0) return launch_kept(p, SampleChunk{}, device, stream);
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
    launch_kept(p, chunk, device, stream);
  }
}

void sample_partial(const SamplePartialParams& p, int device, Stream stream) {
  check_sample_partial(p);
  check_launch(p);
  const std::string suffix = type_suffix(p.dtype);
  const SamplePartialParams of_raw = raw_pass(p);
  const bool in_rounds = p.round > 0, has_tree = !in_rounds || p.round == kRounds;
  if (p.num_rows == 0) return launch_kept(p, SampleChunk{}, device, stream);
  for (std::int64_t first = 0; first < p.num_rows; first += sample_chunk_rows(p)) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    const std::string ranks = !in_rounds ? "rlk_sample_shard" + suffix
                              : has_tree ? std::string("rlk_sample_cut")
                                         : "rlk_sample_round" + suffix;
    launch_blocks(device, stream, kBlock, ranks, chunk.rows, p, chunk);
    if (!has_tree) continue;
    launch_blocks(device, stream, kBlock, "rlk_sample_shard_tree" + suffix, chunk.rows, p, chunk);
    launch_blocks(device, stream, kBlock, "rlk_sample_shard_draw" + suffix, chunk.rows, p, chunk);
    if (p.takes_raw) {
      launch_blocks(device, stream, kBlock, std::string("rlk_sample_shard_raw") + type_suffix(of_raw.dtype), chunk.rows,
                    of_raw, chunk);
    }
    launch_kept(p, chunk, device, stream);
  }
}

void sample_merge(const SampleMergeParams& p, int device, Stream stream) {
  check_sample_merge(p);
  check_launch(p);
  if (p.num_rows == 0) return launch_kept(p, SampleChunk{}, device, stream);
  for (std::int64_t first = 0; first < p.num_rows; first += kSampleChunk) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    launch_blocks(device, stream, kBlock, "rlk_sample_merge", chunk.rows, p, chunk);
    launch_blocks(device, stream, kBlock, "rlk_sample_merge_tree", chunk.rows, p, chunk);
    launch_kept(p, chunk, device, stream);
  }
}

void process_logits(const ProcessLogitsParams& p, int device, Stream stream) {
  check_process_logits(p);
  if (p.num_rows == 0) return;
  launch_blocks(device, stream, Block{kSampleThreads, kSampleLds},
                std::string("rlk_sample_process") + type_suffix(p.dtype), p.num_rows, p);
}

}  // namespace rlk::hip
