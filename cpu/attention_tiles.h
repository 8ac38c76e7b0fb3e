// Shared by the CPU's attention passes: the check of a call's lists, its tasks, and fp32 copies of its rows.
#pragma once

#include <vector>

#include "attention_simd.h"
#include "kernels/attention/span.h"
#include "rlk/math/mufu_model.h"

namespace rlk::cpu {

const AttentionLanes& attention_simd();

// Throws InvalidArgument if a list contradicts the arrays.
void check_attention_lists(const AttentionInput& p);

// A call, with the table of its paths if it has trees.
class AttentionCall {
 public:
  explicit AttentionCall(const AttentionInput& p);
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;
  const AttentionTree<AttentionInput>& params() const { return params_; }

 private:
  std::vector<std::uint32_t> paths_;
  AttentionTree<AttentionInput> params_;
};

// The tasks of a call. A task is at most `piece` queries or keys of a sequence, for one key head.
class AttentionTasks {
 public:
  struct Task {
    std::int64_t sequence, kv_head, first;
  };
  template <class Count>
  AttentionTasks(const AttentionTree<AttentionInput>& p, std::int64_t piece, const Count& count)
      : heads_(p.num_kv_heads), piece_(piece) {
    ends_.reserve(static_cast<std::size_t>(p.num_sequences));
    std::int64_t end = 0;
    for (std::int64_t b = 0; b < p.num_sequences; ++b) {
      ends_.push_back(end += (count(AttentionSpan(p, b)) + piece - 1) / piece * heads_);
    }
  }
  std::int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }
  Task operator[](std::int64_t i) const;

 private:
  std::vector<std::int64_t> ends_;  // end of each sequence's tasks
  std::int64_t heads_, piece_;
};

// Columns of a tile's rows, in floats.
inline std::int64_t padded_columns(std::int64_t dim) { return (dim + kColumns - 1) / kColumns * kColumns; }

// Reads the arrays of a tile.
class AttentionReader {
 public:
  explicit AttentionReader(const AttentionTree<AttentionInput>& p)
      : p_(p), columns(padded_columns(p.head_dim)), value_columns(padded_columns(p.value_dim)) {}

  // Whether a key lies in memory.
  bool exists(const AttentionHeads& a, const AttentionSpan& span, std::int64_t j) {
    return offset_of_key(a, span, j) != kNoPage;
  }
  // `dim` is the array's number of columns: head_dim or value_dim.
  void query(const AttentionHeads& a, std::int64_t dim, const AttentionSpan& span, std::int64_t i, std::int64_t head,
             float* to) const;
  void key(const AttentionHeads& a, std::int64_t dim, const AttentionSpan& span, std::int64_t j, std::int64_t kv_head,
           float* to);

 private:
  std::int64_t offset_of_key(const AttentionHeads& a, const AttentionSpan& span, std::int64_t j);

  const AttentionTree<AttentionInput>& p_;
  // Tokens of the keys in one block of a segment's path. The tokens are looked up together, in one pass along the path.
  std::vector<std::int64_t> tokens_;
  std::int64_t segment_ = -1, block_ = -1;

 public:
  const std::int64_t columns, value_columns;  // columns per row of q and k, and of v, out and dout
};

// The Gpu that kernels/attention/sinks.h needs: a single thread, and sm_90's exponential.
struct Sm90Exp {
  static constexpr bool kHasHardwareExp = true;
  static float ex2(float x) { return mufu_ex2_sm90(x); }
  static int thread() { return 0; }
  static int threads() { return 1; }
  static void barrier() {}
};

// The parameters that turn a call's products into exponents.
AttentionScores scores_of(const AttentionInput& p);

// The part of `range` that lies in [begin, begin + count), as columns counted from `begin`.
inline AttentionColumns within(AttentionRange range, std::int64_t begin, std::int64_t count) {
  return {static_cast<int>(clamp_to(range.first - begin, 0, count)),
          static_cast<int>(clamp_to(range.last - begin, 0, count))};
}

}  // namespace rlk::cpu
