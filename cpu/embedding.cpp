// CPU backend of the operator `embedding`. The forward spreads tokens over threads. The backward spreads rows of the
// gradient over threads; the columns of a row with many tokens are also split between threads.
#include "rlk/ops/embedding.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "embedding_simd.h"
#include "float_environment.h"
#include "kernels/rows/embedding_check.h"
#include "kernels/rows/embedding_rows.h"
#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "rlk/plan_note.h"
#include "rows.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kSliceColumns = 512;

const EmbeddingLanes& lanes() { return RLK_CPU_LANES_IN_USE(embedding_simd); }

void fill_nan(unsigned char* row, std::int64_t columns, DType dtype) {
  const float wide = canonical_nan();
  const std::uint16_t half = dtype == DType::kBFloat16 ? bf16_rn(wide) : f16_rn(wide);
  const void* element = dtype == DType::kFloat32 ? static_cast<const void*>(&wide) : &half;
  const std::size_t bytes = static_cast<std::size_t>(size_of(dtype));
  for (std::int64_t k = 0; k < columns; ++k) std::memcpy(row + k * size_of(dtype), element, bytes);
}

// A token of the gradient, with its row in the upper bits and its index in the lower bits. Sorting the keys orders the
// tokens by row.
using Key = std::uint64_t;
std::int64_t row_of(Key key) { return static_cast<std::int64_t>(key >> 32); }
std::int64_t token_of(Key key) { return static_cast<std::int64_t>(key & 0xffffffffu); }

std::vector<Key> sorted_tokens(const EmbeddingBackwardParams& p) {
  std::vector<Key> keys;
  keys.reserve(static_cast<std::size_t>(p.num_tokens));
  for (std::int64_t t = 0; t < p.num_tokens; ++t) {
    const std::int64_t row = embedding_grad_row(p, embedding_id(p, t));
    if (row < p.num_rows) keys.push_back(static_cast<Key>(row) << 32 | static_cast<Key>(t));
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

// Computes a slice of columns of one row of the gradient, from the row's tokens.
class Slice {
 public:
  Slice(const EmbeddingBackwardParams& p, std::int64_t row, std::int64_t column)
      : p_(p), column_(column), count_(std::min(kSliceColumns, p.columns - column)) {
    const std::int64_t bytes = size_of(p.dweight_dtype);
    to_ = static_cast<unsigned char*>(p.dweight) + (row * p.dweight_stride + column) * bytes;
  }

  void sum(const Key* first, const Key* last) {
    const std::size_t bytes = static_cast<std::size_t>(count_) * sizeof(float);
    std::memset(total_, 0, bytes);
    if (p_.accumulate) std::memcpy(total_, to_, bytes);
    EmbeddingTree tree;
    while (first != last) {
      const std::int64_t group = token_of(*first) / kEmbeddingGroupTokens;
      std::memset(sums_, 0, bytes);
      for (; first != last && token_of(*first) / kEmbeddingGroupTokens == group; ++first) {
        const unsigned char* row = row_at(p_.dy, p_.dy_rows, token_of(*first), p_.dtype);
        lanes().add_row(row + column_ * size_of(p_.dtype), p_.dtype, count_, sums_);
      }
      constexpr std::int64_t kGroups = std::int64_t{1} << kEmbeddingLevels;
      const std::int64_t block = group / kGroups;
      const std::int64_t next = first == last ? (block + 1) * kGroups : token_of(*first) / kEmbeddingGroupTokens;
      const auto in_block = [&](std::int64_t g) {
        return static_cast<unsigned>(std::min(g - block * kGroups, kGroups));
      };
      const int level = tree.advance(in_block(group), in_block(next),
                                     [&](int below) { lanes().join(waiting_[below], count_, sums_); });
      if (level < kEmbeddingLevels) {
        std::memcpy(waiting_[level], sums_, bytes);
      } else {
        lanes().join(sums_, count_, total_);
      }
    }
    lanes().store(total_, count_, to_, p_.dweight_dtype);
  }

 private:
  const EmbeddingBackwardParams& p_;
  std::int64_t column_, count_;
  unsigned char* to_;
  float sums_[kSliceColumns], total_[kSliceColumns], waiting_[kEmbeddingLevels][kSliceColumns];
};

}  // namespace

void embedding(const EmbeddingParams& p) {
  check_embedding(p);
  const std::size_t bytes = static_cast<std::size_t>(p.columns * size_of(p.dtype));
  if (bytes == 0) return;
  note_plan([] { return std::string("copies"); });
  parallel_for(p.num_tokens, rows_of_a_task(p.columns), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t id = embedding_id(p, t), row = embedding_row(p, id);
      unsigned char* y = static_cast<unsigned char*>(p.y) + t * p.y_stride * size_of(p.dtype);
      if (row < p.num_rows) {
        std::memcpy(y, static_cast<const unsigned char*>(p.weight) + row * p.weight_stride * size_of(p.dtype), bytes);
      } else if (embedding_is_bad(p, id)) {
        fill_nan(y, p.columns, p.dtype);
      } else {
        std::memset(y, 0, bytes);
      }
    }
  });
}

void embedding_backward(const EmbeddingBackwardParams& p) {
  check_embedding_backward(p);
  if (p.num_rows == 0 || p.columns == 0) return;
  const std::vector<Key> keys = sorted_tokens(p);
  std::vector<std::int64_t> starts;  // first key of each row that has tokens, and the end
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i == 0 || row_of(keys[i]) != row_of(keys[i - 1])) starts.push_back(static_cast<std::int64_t>(i));
  }
  const std::int64_t present = static_cast<std::int64_t>(starts.size());
  starts.push_back(static_cast<std::int64_t>(keys.size()));
  const std::size_t bytes = static_cast<std::size_t>(p.columns * size_of(p.dweight_dtype));
  if (!p.accumulate) {
    parallel_for(p.num_rows, rows_of_a_task(p.columns), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t v = begin; v < end; ++v) {
        std::memset(static_cast<unsigned char*>(p.dweight) + v * p.dweight_stride * size_of(p.dweight_dtype), 0, bytes);
      }
    });
  }
  const std::int64_t slices = (p.columns + kSliceColumns - 1) / kSliceColumns;
  const std::int64_t grain = std::max<std::int64_t>(kTaskElements / (8 * std::min(p.columns, kSliceColumns)), 1);
  parallel_for(present * slices, grain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t first = starts[static_cast<std::size_t>(task / slices)];
      const std::int64_t last = starts[static_cast<std::size_t>(task / slices + 1)];
      Slice slice(p, row_of(keys[static_cast<std::size_t>(first)]), task % slices * kSliceColumns);
      slice.sum(keys.data() + first, keys.data() + last);
    }
  });
}

}  // namespace rlk::cpu
