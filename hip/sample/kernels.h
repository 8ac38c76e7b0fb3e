// The kernels of sample. Each block computes one row, and eight lanes share a leaf (128 columns). The headers select.h
// and tree.h of kernels/sample have the code of a row. The CPU and CUDA share these headers.
#pragma once

#include "hip/common/element.h"
#include "hip/common/wave.h"
#include "hip/sample/launches.h"
#include "kernels/sample/kept.h"
#include "kernels/sample/merge.h"
#include "kernels/sample/process_logits.h"
#include "kernels/sample/round.h"
#include "kernels/sample/shard.h"
#include "kernels/sample/top.h"
#include "kernels/sample/tree.h"

namespace rlk::hip {

struct SampleTeam {
  struct Memory {
    template <class P>
    static RLK_DEVICE auto global(P* pointer) {
      return typed_global(pointer);
    }
  };
  static constexpr int kLanes = 8, kAhead = 1;
  static constexpr bool kEdits = false;
  // the code of this search would need more scalar registers than a wave has
  static constexpr bool kSearchesByZ = false;
  RLK_DEVICE int thread() const { return thread_id(); }
  static constexpr int threads() { return kSampleThreads; }
  RLK_DEVICE void barrier() const { block_barrier(); }
  RLK_DEVICE float shuffle_xor(float x, int distance) const { return hip::shuffle_xor(x, distance); }
  RLK_DEVICE std::int32_t shuffle_xor(std::int32_t x, int distance) const { return hip::shuffle_xor(x, distance); }
  template <class N>
  RLK_DEVICE void add(N* to, N x) const {
    atomic_add(to, x);
  }
  RLK_DEVICE std::uint32_t take(std::uint32_t* counter) const { return atomic_take(counter); }
  RLK_DEVICE void count(std::uint32_t* word) const { atomic_add(typed_global(word), 1u); }
  RLK_DEVICE void set_bits(std::uint32_t* word, std::uint32_t bits) const { atomic_or(typed_global(word), bits); }
  template <Exp kExp>
  RLK_DEVICE float exponential(float z, float c, float m) const {
    return stat_exp_portable(z, c, sub_rn(kStatsShift, m));
  }
  template <class P>
  RLK_DEVICE auto global(P* pointer) const {
    return typed_global(pointer);
  }
  template <class N>
  RLK_DEVICE N own(N x) const {
    return in_vector(x);
  }
};

RLK_DEVICE SampleShared* sample_shared() { return reinterpret_cast<SampleShared*>(lds()); }

// Copies the params to LDS. As kernel arguments they would take more SGPRs than there are.
template <class Params>
RLK_DEVICE const Params& params_in_lds(const Params& p) {
  auto* const copy = reinterpret_cast<Params*>(lds() + sizeof(SampleShared));
  if (thread_id() == 0) *copy = p;
  block_barrier();
  return *copy;
}

template <class T>
RLK_DEVICE void process_logits(const ProcessLogitsParams& p, std::int64_t i) {
  process_row<SampleTeam, T>(SampleTeam(), params_in_lds(p), i);
}

template <class T, bool kTruncate>
RLK_DEVICE void sample_select(const SampleParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SampleParams& q = params_in_lds(p);
  RowSelection<SampleTeam, T, Exp::kPortable> selection(SampleTeam(), q, chunk.first + i, sample_shared(),
                                                        chunk.masks + i * sample_mask_words(p.vocab_size),
                                                        chunk.states + i, chunk.firsts + i * kMaxTeam);
  kTruncate ? selection.run_truncate() : selection.run_first();
}
// Address at which a row's number of kept columns is stored.
RLK_DEVICE std::int64_t* count_of(const SampleParams& p, const SampleChunk& chunk, std::int64_t i) {
  return p.kept_offsets == nullptr ? nullptr : p.kept_offsets + chunk.first + i + 1;
}
enum class TreePass { kTree, kDraw, kRaw };

template <class T, TreePass kPass>
RLK_DEVICE void sample_tree(const SampleParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SampleParams& q = params_in_lds(p);
  RowTree<SampleTeam, T, Exp::kPortable> tree(SampleTeam(), q, chunk.first + i, sample_shared(),
                                              chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                                              chunk.nodes + i * sample_node_floats(p.vocab_size));
  if constexpr (kPass == TreePass::kTree) {
    tree.run_tree();
  } else if constexpr (kPass == TreePass::kDraw) {
    tree.run_draw(count_of(p, chunk, i));
  } else {
    tree.run_raw();
  }
}
template <class T, bool kRaw>
RLK_DEVICE void sample_top(const SampleParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SampleParams& q = params_in_lds(p);
  RowTop<SampleTeam, T, kRaw>(SampleTeam(), q, chunk.first + i, sample_shared(),
                              chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                              chunk.firsts + i * kMaxTeam, chunk.nodes + i * sample_node_floats(p.vocab_size))
      .run();
}
template <class T>
RLK_DEVICE void sample_shard(const SamplePartialParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SamplePartialParams& q = params_in_lds(p);
  RowOfShard<SampleTeam, T>(SampleTeam(), q, chunk.first + i, sample_shared(),
                            chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                            chunk.firsts + i * kMaxTeam)
      .run();
}
template <class T>
RLK_DEVICE void sample_round(const SamplePartialParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SamplePartialParams& q = params_in_lds(p);
  RowOfRound<SampleTeam, T, Exp::kPortable>(SampleTeam(), q, chunk.first + i, sample_shared(),
                                            chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                                            chunk.firsts + i * kMaxTeam, chunk.sorted + i * 2 * p.sorted_columns)
      .run();
}
RLK_DEVICE void sample_cut(const SamplePartialParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SamplePartialParams& q = params_in_lds(p);
  RowOfCut<SampleTeam, Exp::kPortable>(SampleTeam(), q, chunk.first + i, sample_shared(),
                                       chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                                       chunk.firsts + i * kMaxTeam)
      .run();
}
template <class T, TreePass kPass>
RLK_DEVICE void sample_shard_tree(const SamplePartialParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SamplePartialParams& q = params_in_lds(p);
  TreeOfShard<SampleTeam, T, Exp::kPortable> tree(SampleTeam(), q, chunk.first + i, sample_shared(),
                                                  chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                                                  chunk.nodes + i * sample_node_floats(p.vocab_size));
  if constexpr (kPass == TreePass::kTree) {
    tree.run_tree(count_of(p, chunk, i));
  } else if constexpr (kPass == TreePass::kDraw) {
    tree.run_draw();
  } else {
    tree.run_raw();
  }
}
RLK_DEVICE void sample_merge_row(const SampleMergeParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SampleMergeParams& q = params_in_lds(p);
  RowOfMerge<SampleTeam, Exp::kPortable>(SampleTeam(), q, chunk.first + i, sample_shared(),
                                         chunk.masks + i * sample_mask_words(q.vocab_size), chunk.states + i,
                                         chunk.firsts + i * kMaxTeam)
      .run(count_of(p, chunk, i));
}
RLK_DEVICE void sample_merge_tree(const SampleMergeParams& p, const SampleChunk& chunk, std::int64_t i) {
  const SampleMergeParams& q = params_in_lds(p);
  TreeOfMerge<SampleTeam, Exp::kPortable>(
      SampleTeam(), q, chunk.first + i, sample_shared(), chunk.masks + i * sample_mask_words(q.vocab_size),
      chunk.states + i, chunk.firsts + i * kMaxTeam, chunk.nodes + i * sample_node_floats(q.vocab_size))
      .run(count_of(p, chunk, i));
}
RLK_DEVICE void sample_offsets(const SampleParams& p, const SampleChunk& chunk) {
  if (p.num_rows == 0) {
    if (thread_id() == 0) global_pointer(p.kept_offsets)[0] = 0;
    return;
  }
  offsets_of_counts(SampleTeam(), p, chunk.first, chunk.rows, chunk.closed, sample_shared());
}
RLK_DEVICE void sample_kept(const SampleParams& p, const SampleChunk& chunk, std::int64_t i) {
  write_kept_ids(SampleTeam(), p, chunk.first + i, chunk.masks + i * sample_mask_words(p.vocab_size), sample_shared());
}

}  // namespace rlk::hip
