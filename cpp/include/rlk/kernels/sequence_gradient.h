// The gradient of sequence_logprob as a GPU's threads share it out, for CUDA and HIP: every token is written by itself.
// Padded rows are the rows of a RowSplit; a packed array is cut into rows of kGradientRow tokens.
#pragma once

#include "rlk/kernels/row_split.h"
#include "rlk/ops/sequence_logprob.h"

namespace rlk {

constexpr int kGradientLog2Threads = 8;
constexpr int kGradientThreads = 1 << kGradientLog2Threads;
constexpr int kGradientTokens = 8;  // of a thread
constexpr std::int64_t kGradientRow = std::int64_t{1} << 20;

struct GradientGrid {
  RowSplit split;
  std::int64_t rows, columns, blocks;
};
inline GradientGrid gradient_grid(const SequenceLogprobBackwardParams& p) {
  GradientGrid g;
  const bool packed = p.cu_seqlens.data != nullptr;
  g.columns = packed && p.num_tokens > kGradientRow ? kGradientRow : p.num_tokens;
  g.rows = packed ? (p.num_tokens + g.columns - 1) / g.columns : p.num_sequences;
  RLK_CHECK(g.columns < std::int64_t{1} << 30, "sequence_logprob: fewer than 2^30 tokens in a row");
  g.split = split_rows(g.columns, kGradientTokens, kGradientLog2Threads);
  g.blocks = blocks_of(g.split, g.rows);
  return g;
}

// f(index of the token in d_logprob, value) for the tokens of a thread.
template <class Memory, class F>
RLK_HD void sequence_gradient(const SequenceLogprobBackwardParams& p, const GradientGrid& g, std::uint32_t block,
                              int thread, const F& f) {
  const RowPlace at = place_in_rows(g.split, kGradientTokens, block, thread);
  if (at.row >= g.rows) return;
  const float* dsum = Memory::global(p.dsum);
  if (p.cu_seqlens.data == nullptr) {
    const float gradient = dsum[at.row * p.dsum_stride];
    bool kept[kGradientTokens];
    RLK_UNROLL
    for (int k = 0; k < kGradientTokens; ++k) {
      const std::int64_t t = at.first + k * at.step;
      kept[k] = t < g.columns && counts<Memory>(p.mask, at.row * p.mask.row_stride + t);
    }
    RLK_UNROLL
    for (int k = 0; k < kGradientTokens; ++k) {
      const std::int64_t t = at.first + k * at.step;
      if (t < g.columns) f(at.row * g.columns + t, kept[k] ? gradient : 0.0f);
    }
    return;
  }
  std::int64_t sequence = -1;
  Span span{0, 0, true};
  RLK_UNROLL_NOT
  for (int k = 0; k < kGradientTokens; ++k) {
    const std::int64_t t = at.row * g.columns + at.first + k * at.step;
    if (at.first + k * at.step >= g.columns || t >= p.num_tokens) break;
    if (sequence < 0 || t >= span.begin + span.length) {
      sequence = sequence_of<Memory>(p.cu_seqlens, p.num_sequences, p.num_tokens, t);
      if (sequence >= 0) span = span_of<Memory>(p.cu_seqlens, p.num_tokens, sequence);
    }
    const bool kept = sequence >= 0 && counts<Memory>(p.mask, t);
    f(t, kept ? dsum[sequence * p.dsum_stride] : 0.0f);
  }
}

}  // namespace rlk
