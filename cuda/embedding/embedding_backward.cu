// embedding backward. Bound by HBM: dy is read once. dweight is written once, including rows without a token. The sum
// of a long run is also written and read, 4 bytes per column.
//
// After sort.cuh, tokens are ordered by row. Several blocks share the sum of a frequent id:
// embedding_runs_kernel: a block sums a long run, eight columns per thread. A run is the tokens of one row among 512
//   consecutive tokens; it is long if it has 16 tokens or more. A tree adds its 8 groups (the tokens among 64
//   consecutive tokens).
// embedding_rows_kernel: a block takes 16 items and sums each row whose first item is one of them, including the row's
//   later items. An item is a token or the sum of a long run. All items load at once, even if they belong to different
//   rows. Partial sums that wait for a later group lie in shared memory, separately for each thread's columns. Further
//   blocks write rows without a token.
// All architectures share this source; each has its own machine code.
#include "../common/element_dtype.cuh"
#include "../common/vec8.cuh"
#include "sort.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kSumThreads = 128, kSliceColumns = kSumThreads * kVec8;
constexpr int kWindow = 16;    // items per block; the block sums each row whose first item is one of them
constexpr int kZeroRows = 32;  // rows per block
constexpr int kRunTokens = 1 << kEmbeddingRunBits;
constexpr int kRunLevels = 3;
static_assert(kEmbeddingGroupTokens << kRunLevels == kRunTokens);

template <class T, bool kVector>
constexpr int kBatch = T::kPacked&& kVector ? 8 : 4;  // rows whose loads a thread has in flight

// For each thread's columns: partial sums that wait in the tree until a later sum is added.
template <int kLevels>
struct Waiting {
  float4 sums[kLevels][2][kSumThreads];

  __device__ __forceinline__ void put(int level, const float (&x)[kVec8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[level][i][threadIdx.x] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }
  __device__ __forceinline__ void add_to(int level, float (&x)[kVec8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 y = sums[level][i][threadIdx.x];
      x[4 * i] = __fadd_rn(y.x, x[4 * i]);
      x[4 * i + 1] = __fadd_rn(y.y, x[4 * i + 1]);
      x[4 * i + 2] = __fadd_rn(y.z, x[4 * i + 2]);
      x[4 * i + 3] = __fadd_rn(y.w, x[4 * i + 3]);
    }
  }
};

__device__ __forceinline__ void clear(float (&x)[kVec8]) {
#pragma unroll
  for (float& value : x) value = 0.0f;
}
__device__ __forceinline__ void add(float (&sum)[kVec8], const float (&x)[kVec8]) {
#pragma unroll
  for (int j = 0; j < kVec8; ++j) sum[j] = __fadd_rn(sum[j], x[j]);
}

// Eight columns of dy as they lie in memory.
template <class T, bool kVector>
struct Row {
  Vec8<T> x;
  __device__ __forceinline__ void load(const typename T::Storage* from, int) { x = load_vec8_once<T>(from); }
  __device__ __forceinline__ void to_float(float (&z)[kVec8]) const { x.to_float(z); }
};
template <class T>
struct Row<T, false> {
  float x[kVec8];
  __device__ __forceinline__ void load(const typename T::Storage* from, int count) {
    load_columns<T, false>(from, count, x);
  }
  __device__ __forceinline__ void to_float(float (&z)[kVec8]) const {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) z[j] = x[j];
  }
};

// Loads and stores columns of the sums of long runs: vec8s at multiples of 16 bytes if kVector, else single columns.
template <bool kVector>
__device__ __forceinline__ void load_sums(const float* from, int count, float (&z)[kVec8]) {
  load_columns<Fp32, kVector>(from, count, z);
}
template <bool kVector>
__device__ __forceinline__ void store_sums(float* to, int count, const float (&z)[kVec8]) {
  if constexpr (kVector) {
    reinterpret_cast<float4*>(to)[0] = make_float4(z[0], z[1], z[2], z[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(z[4], z[5], z[6], z[7]);
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      if (j < count) to[j] = z[j];
    }
  }
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kSumThreads, 6)
    embedding_runs_kernel(const __grid_constant__ EmbeddingBackwardParams p,
                          const __grid_constant__ EmbeddingWorkspace w, const EmbeddingKey* keys, unsigned slices) {
  constexpr int kRows = kBatch<T, kVector>;
  __shared__ Waiting<kRunLevels> waiting;
  __shared__ std::uint32_t tokens[kRunTokens];
  wait_for_previous_kernel();
  allow_next_kernel();
  const unsigned slot = blockIdx.x / slices, slice = blockIdx.x % slices;
  const std::int64_t place = std::int64_t{slot} * kEmbeddingLongRun;
  if (place >= p.num_tokens) return;
  const EmbeddingKey run = keys[place] >> kEmbeddingRunBits;
  if (row_of(keys[place]) >= p.num_rows) return;
  // Slots are at every kEmbeddingLongRun-th index. A run has the slot of the first of these indices that it contains.
  const std::int64_t at = place - static_cast<int>(threadIdx.x % 32);
  const unsigned equal = __ballot_sync(~0u, at >= 0 && keys[at < 0 ? 0 : at] >> kEmbeddingRunBits == run);
  const int before = __ffs(static_cast<int>(~equal)) - 2;  // tokens of the run before `place`
  if (equal == ~0u || before >= kEmbeddingLongRun) return;
  const std::int64_t first = place - before;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kRunTokens / kSumThreads; ++i) {
    const int local = static_cast<int>(threadIdx.x) + i * kSumThreads;
    const EmbeddingKey key = first + local < p.num_tokens ? keys[first + local] : ~EmbeddingKey{0};
    tokens[local] = static_cast<std::uint32_t>(key);
    count += __syncthreads_count(key >> kEmbeddingRunBits == run);
  }
  if (count < kEmbeddingLongRun) return;
  const std::int64_t column = std::int64_t{slice} * kSliceColumns + static_cast<int>(threadIdx.x) * kVec8;
  if (column >= p.columns) return;  // threads may return early, because no barrier follows
  const int columns = static_cast<int>(min(p.columns - column, std::int64_t{kVec8}));
  const typename T::Storage* const dy = static_cast<const typename T::Storage*>(p.dy) + column;
  float chain[kVec8]{}, z[kVec8];
  EmbeddingTree tree;
  const auto group_of = [&](int i) { return tokens[i] / kEmbeddingGroupTokens % (1u << kRunLevels); };
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kRows) {
    Row<T, kVector> rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // After the run's last token, the last token is loaded again. Without a branch, all loads are in flight before
      // the first wait.
      rows[i].load(dy + p.dy_rows.offset(tokens[min(begin + i, count - 1)]), columns);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int local = begin + i;
      if (local >= count) continue;
      rows[i].to_float(z);
      add(chain, z);
      const unsigned group = group_of(local), next = local + 1 < count ? group_of(local + 1) : 1u << kRunLevels;
      if (next == group) continue;
      const int level = tree.advance(group, next, [&](int below) { waiting.add_to(below, chain); });
      if (level < kRunLevels) {
        waiting.put(level, chain);
        clear(chain);
      }
    }
  }
  store_sums<kVector>(w.sums + slot * p.columns + column, columns, chain);
}

// Sums a row of dweight, item by item.
template <class T, bool kVector>
class RowSum {
 public:
  __device__ __forceinline__ RowSum(const EmbeddingBackwardParams& p, Waiting<kEmbeddingLevels>& waiting,
                                    std::int64_t column, int columns)
      : p_(p), waiting_(waiting), column_(column), columns_(columns) {}

  __device__ __forceinline__ void begin(const EmbeddingItem& item) {
    at_ = std::int64_t{item.row} * p_.dweight_stride + column_;
    if (p_.accumulate) {
      load_columns<Fp32, kVector>(static_cast<const float*>(p_.dweight) + at_, columns_, total_);
    } else {
      clear(total_);
    }
    clear(chain_);
    tree_.pending = 0;
    group_ = item.token / kEmbeddingGroupTokens;
  }
  __device__ __forceinline__ void add_value(const float (&z)[kVec8]) { add(chain_, z); }
  // Moves on to an item of the row's current group or of a later group.
  __device__ __forceinline__ void go_on(const EmbeddingItem& item) {
    const std::uint32_t next = item.token / kEmbeddingGroupTokens;
    if (next == group_) return;
    end_group(next / kGroups == group_ / kGroups ? next % kGroups : kGroups);
    group_ = next;
  }
  __device__ __forceinline__ void end() {
    end_group(kGroups);
    if (p_.dweight_dtype == DType::kFloat32) {
      store_columns<Fp32, kVector>(static_cast<float*>(p_.dweight) + at_, columns_, total_);
    } else {
      store_columns<T, kVector>(static_cast<typename T::Storage*>(p_.dweight) + at_, columns_, total_);
    }
  }

 private:
  static constexpr std::uint32_t kGroups = 1u << kEmbeddingLevels;  // groups among 8192 tokens, a block of the sum

  __device__ __forceinline__ void end_group(std::uint32_t next) {
    const int level = tree_.advance(group_ % kGroups, next, [&](int below) { waiting_.add_to(below, chain_); });
    if (level < kEmbeddingLevels) {
      waiting_.put(level, chain_);
    } else {
      add(total_, chain_);
    }
    clear(chain_);
  }

  const EmbeddingBackwardParams& p_;
  Waiting<kEmbeddingLevels>& waiting_;
  const std::int64_t column_;
  const int columns_;
  std::int64_t at_ = 0;
  std::uint32_t group_ = 0;
  EmbeddingTree tree_;
  float chain_[kVec8], total_[kVec8];
};

template <class T, bool kVector>
__device__ __forceinline__ void sum_rows(const EmbeddingBackwardParams& p, const EmbeddingWorkspace& w,
                                         std::int64_t window, unsigned slice) {
  constexpr int kRows = kBatch<T, kVector>;
  __shared__ Waiting<kEmbeddingLevels> waiting;
  __shared__ EmbeddingItem items[kWindow];
  const std::int64_t num_items = *w.num_items, first = window * kWindow;
  if (first >= num_items) return;
  constexpr std::uint32_t kNone = 0xffffffffu;  // a row index has at most 31 bits
  const std::uint32_t before = first == 0 ? kNone : w.items[first - 1].row;
  std::uint32_t current = kNone;
  const std::int64_t column = std::int64_t{slice} * kSliceColumns + static_cast<int>(threadIdx.x) * kVec8;
  const bool exists = column < p.columns;
  const int columns = exists ? static_cast<int>(min(p.columns - column, std::int64_t{kVec8})) : 0;
  const typename T::Storage* const dy = static_cast<const typename T::Storage*>(p.dy) + column;
  RowSum<T, kVector> sum(p, waiting, column, columns);
#pragma unroll 1
  for (std::int64_t from = first;; from += kWindow) {
    __syncthreads();
    if (threadIdx.x < kWindow) {
      const std::int64_t at = from + threadIdx.x;
      items[threadIdx.x] = at < num_items ? w.items[at] : EmbeddingItem{kNone, 0, 0, 0};
    }
    __syncthreads();
    // A window is kWindow items. In its first window, the block takes all items except those of a row that began before
    // the window. In later windows, it takes only items of the first window's last row.
    const auto is_mine = [&](const EmbeddingItem& item) {
      return item.row != kNone && item.row != before && (from == first || item.row == current);
    };
    if (exists) {
#pragma unroll 1
      for (int begin = 0; begin < kWindow; begin += kRows) {
        Row<T, kVector> rows[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const EmbeddingItem& item = items[begin + i];
          if (is_mine(item) && item.slot == kEmbeddingNoSlot) rows[i].load(dy + p.dy_rows.offset(item.token), columns);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const EmbeddingItem item = items[begin + i];
          if (!is_mine(item)) continue;
          float z[kVec8];
          if (item.slot == kEmbeddingNoSlot) {
            rows[i].to_float(z);
          } else {
            load_sums<kVector>(w.sums + item.slot * p.columns + column, columns, z);
          }
          if (item.row != current) {
            if (current != kNone) sum.end();
            sum.begin(item);
            current = item.row;
          } else {
            sum.go_on(item);
          }
          sum.add_value(z);
        }
      }
    }
    // If the window's last item belongs to the block's last row, that row continues in the next window.
    const std::uint32_t last = items[kWindow - 1].row;
    if (last == kNone || last == before || (from > first && last != current)) break;
    if (!exists) current = last;
  }
  if (exists && current != kNone) sum.end();
}

// Each warp computes one row.
template <bool kVector>
__device__ __forceinline__ void clear_rows(const EmbeddingBackwardParams& p, const EmbeddingWorkspace& w,
                                           std::int64_t first) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t mine = first + lane;
  static_assert(kZeroRows == 32);
  const unsigned absent = __ballot_sync(~0u, mine < p.num_rows && (p.num_tokens == 0 || w.present[mine] == 0));
  const int bytes = size_of(p.dweight_dtype);
#pragma unroll 1
  for (int row = warp; row < kZeroRows; row += kSumThreads / 32) {
    if (!(absent >> row & 1u)) continue;
    char* const to = static_cast<char*>(p.dweight) + (first + row) * p.dweight_stride * bytes;
    if constexpr (kVector) {
      const int vectors = static_cast<int>(p.columns * bytes / 16);
#pragma unroll 4
      for (int i = lane; i < vectors; i += 32) __stcs(reinterpret_cast<uint4*>(to) + i, make_uint4(0, 0, 0, 0));
    } else {
      for (std::int64_t k = lane; k < p.columns; k += 32) {
        if (bytes == 4) {
          reinterpret_cast<std::uint32_t*>(to)[k] = 0;
        } else {
          reinterpret_cast<std::uint16_t*>(to)[k] = 0;
        }
      }
    }
  }
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kSumThreads, 5)
    embedding_rows_kernel(const __grid_constant__ EmbeddingBackwardParams p,
                          const __grid_constant__ EmbeddingWorkspace w, unsigned sum_blocks, unsigned slices) {
  wait_for_previous_kernel();
  if (blockIdx.x < sum_blocks) {
    sum_rows<T, kVector>(p, w, blockIdx.x / slices, blockIdx.x % slices);
  } else {
    clear_rows<kVector>(p, w, std::int64_t{blockIdx.x - sum_blocks} * kZeroRows);
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void embedding_backward(const EmbeddingBackwardParams& p, const EmbeddingBackwardPlan& plan, cudaStream_t stream) {
  EmbeddingWorkspace w{};
  const EmbeddingKey* keys = nullptr;
  const std::int64_t slices = (p.columns + kSliceColumns - 1) / kSliceColumns;
  if (p.num_tokens > 0) {
    place(p, &w);
    keys = run_sort<kOverlap>(p, w, stream);
  }
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const unsigned runs = checked_blocks(ceil_div(p.num_tokens, kEmbeddingLongRun) * slices, "embedding_backward");
  const unsigned sums = checked_blocks(ceil_div(p.num_tokens, kWindow) * slices, "embedding_backward");
  const unsigned clears =
      p.accumulate ? 0 : checked_blocks(sums + ceil_div(p.num_rows, kZeroRows), "embedding_backward") - sums;
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto* of_runs, auto* of_rows) {
      const unsigned s = static_cast<unsigned>(slices);
      if (runs > 0) launch_dependent<kOverlap>(of_runs, static_cast<int>(runs), kSumThreads, 0, stream, p, w, keys, s);
      const int blocks = static_cast<int>(sums + clears);
      launch_dependent<kOverlap>(of_rows, blocks, kSumThreads, 0, stream, p, w, sums, s);
    };
    plan.vectors ? run(embedding_runs_kernel<T, true>, embedding_rows_kernel<T, true>)
                 : run(embedding_runs_kernel<T, false>, embedding_rows_kernel<T, false>);
  });
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
