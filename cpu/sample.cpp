// CPU backend of the operator `sample`: rows are spread over threads, one chunk of rows at a time.
#include "rlk/ops/sample.h"

#include <algorithm>
#include <vector>

#include "float_environment.h"
#include "kernels/sample/check.h"
#include "kernels/sample/process_logits.h"
#include "note_isa.h"
#include "rlk/backends.h"
#include "sample_simd.h"
#include "thread_pool.h"

namespace rlk::cpu {

void process_logits(const ProcessLogitsParams& p) {
  check_process_logits(p);
  const SampleLanes& lanes = RLK_CPU_LANES_IN_USE(sample_simd);
  parallel_for(p.num_rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t i = begin; i < end; ++i) lanes.process(p, i);
  });
}

namespace {

// Computes rows with their kept sets, one chunk of rows at a time. fn(row, mask, nodes, count) gives all results of a
// row except its kept ids.
template <class F>
void by_rows(const SampleParams& p, const SampleLanes& lanes, F fn) {
  const bool keeps = p.kept_offsets != nullptr;
  const std::int64_t words = sample_mask_words(p.vocab_size);
  std::vector<std::uint32_t> masks(static_cast<std::size_t>(keeps ? words * std::min(p.num_rows, kSampleChunk) : 0));
  std::uint32_t closed = 0;
  if (keeps) p.kept_offsets[0] = 0;
  for (std::int64_t first = 0; first < p.num_rows; first += kSampleChunk) {
    const std::int64_t rows = std::min(p.num_rows - first, kSampleChunk);
    parallel_for(rows, 1, [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      std::vector<float> nodes(static_cast<std::size_t>(sample_node_floats(p.vocab_size)));
      std::vector<std::uint32_t> mask(static_cast<std::size_t>(keeps ? 0 : words));
      for (std::int64_t i = begin; i < end; ++i) {
        fn(first + i, keeps ? masks.data() + i * words : mask.data(), nodes.data(),
           keeps ? p.kept_offsets + first + i + 1 : nullptr);
      }
    });
    if (!keeps) continue;
    lanes.offsets(p, first, rows, &closed);
    parallel_for(rows, 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) lanes.kept(p, first + i, masks.data() + i * words);
    });
  }
}

}  // namespace

void sample(const SampleParams& p) {
  check_sample(p);
  const SampleParams of_raw = raw_pass(p);
  const SampleLanes& lanes = RLK_CPU_LANES_IN_USE(sample_simd);
  note_isa();
  by_rows(p, lanes, [&](std::int64_t row, std::uint32_t* mask, float* nodes, std::int64_t* count) {
    lanes.row(p, row, mask, nodes, count);
    if (p.raw_logprob != nullptr) lanes.raw(of_raw, row, nodes);
  });
}

void sample_partial(const SamplePartialParams& p) {
  check_sample_partial(p);
  const SamplePartialParams of_raw = raw_pass(p);
  const SampleLanes& lanes = RLK_CPU_LANES_IN_USE(sample_simd);
  by_rows(p, lanes, [&](std::int64_t row, std::uint32_t* mask, float* nodes, std::int64_t* count) {
    std::vector<std::uint64_t> sorted(static_cast<std::size_t>(2 * p.sorted_columns));
    lanes.partial(p, row, mask, nodes, count, sorted.data());
    if (p.takes_raw && (p.round == 0 || p.round == kRounds)) lanes.partial_raw(of_raw, row, nodes);
  });
}

void sample_merge(const SampleMergeParams& p) {
  check_sample_merge(p);
  const SampleLanes& lanes = RLK_CPU_LANES_IN_USE(sample_simd);
  by_rows(p, lanes, [&](std::int64_t row, std::uint32_t* mask, float* nodes, std::int64_t* count) {
    lanes.merge(p, row, mask, nodes, count);
  });
}

}  // namespace rlk::cpu
