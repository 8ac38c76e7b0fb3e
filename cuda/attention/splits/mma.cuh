// The forward of attention for sequences with few queries by mma.sync, for SM80 and later: decode, and short chunks of
// queries with many keys. A block of threads computes 16 rows for one split of the keys. Rule 6 of docs/numerics.md
// fixes where splits begin. A second kernel merges the splits. Four warps share a block of keys. Shared memory holds
// one block of K and one of V, which cp.async loads. So three blocks of threads fit on a multiprocessor and hide each
// other's waits. Four blocks of threads fit if a block of V is loaded in two halves. HBM limits the speed. README.md
// has measurements.
#pragma once

#include "groups.cuh"
#include "merge.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// kParts: number of parts of a block of V, which are loaded into the same memory one after another. With two parts and
// 32-bit offsets of keys, four blocks of threads fit on a multiprocessor of compute capability 9.0.
template <int kColumns_, bool kShares_ = false, bool kMixed_ = false, int kParts_ = 1>
struct SplitTile : SplitShape<kColumns_, 1> {
  using Shape = SplitShape<kColumns_, 1>;
  using Params = std::conditional_t<kMixed_, MixedParams, AttentionParams>;
  static constexpr bool kShares = kShares_, kMixed = kMixed_;
  static constexpr int kThreads = 32 * Shape::kWarps;
  static constexpr int kParts = kParts_, kPartKeys = Shape::kKeys / kParts, kBlocksTogether = kParts > 1 ? 4 : 1;
  using Offset = std::conditional_t<(kParts > 1), std::uint32_t, std::int64_t>;
  // Places in shared memory: a block of K; a block of V; for the keys of two blocks, their offsets in the arrays of K
  // and V; probabilities, maxima, sums of probabilities and factors.
  static constexpr int kValuesAt = Shape::kOperandBytes;
  static constexpr int kOffsetsAt = kValuesAt + Shape::kOperandBytes / kParts;
  static constexpr int kOffsetBytes = (kParts > 1 ? 3 : 4) * Shape::kKeys * static_cast<int>(sizeof(Offset));
  static constexpr int kWeightsAt = kOffsetsAt + kOffsetBytes, kMaximaAt = kWeightsAt + Shape::kWeightBytes;
  static constexpr int kSumsAt = kMaximaAt + Shape::kMaximaBytes, kFactorsAt = kSumsAt + Shape::kSumBytes;
  static constexpr int kBytes = kFactorsAt + Shape::kFactorBytes;
  static_assert(Shape::kRows * Shape::kRowBytes * kParts <= Shape::kOperandBytes);  // queries are loaded to V's place
                                                                                    // first
  static_assert(kParts == 1 || (kBytes + 1024) * 4 <= 228 * 1024);
  static __device__ __forceinline__ std::uint32_t chunk(std::uint32_t operand, int row, int chunk) {
    return chunk_of<SplitTile>(operand, row, chunk);
  }
};

template <class T, class Tile>
class SplitByCopies : SplitRows<T, Tile> {
 public:
  __device__ __forceinline__ SplitByCopies(const typename Tile::Params& p, const SplitCall& call, unsigned char* memory,
                                           bool vectors)
      : SplitRows<T, Tile>(p, call, memory, vectors) {
    same_places_ = p.k.sequence_stride == p.v.sequence_stride && p.k.token_stride == p.v.token_stride;
  }
  __device__ __forceinline__ void run() {
    std::int64_t first_row;
    if constexpr (Tile::kMixed) {
      if (!this->find_sequence(blockIdx.x)) return;
    } else {
      if (!this->find_tile(blockIdx.x, &first_row)) return;
    }
    const AttentionSpan span(p_, this->sequence_);
    if constexpr (!Tile::kMixed) {
      const bool found = this->find(span, first_row);
      this->store_unused();
      if (!found) return;
    }
    k_head_ = attention_head<T>(p_.k, kv_head_);
    v_head_ = attention_head<T>(p_.v, kv_head_);
    asm volatile("" : "+l"(k_head_), "+l"(v_head_));  // so the compiler computes each address only once
    if constexpr (Tile::kMixed) {
      const auto rows = static_cast<unsigned>(this->places_of(span)) * this->call_.group;
      const unsigned step = this->call_.tiles * Tile::kRows;
#pragma unroll 1
      for (unsigned first = this->first_row_; first < rows; first += step) {
        const bool found = this->find_rows(span, first);
        this->store_unused();
        if (found) compute(span);
        __syncthreads();  // the next tile overwrites the current tile's memory
      }
    } else if constexpr (Tile::kShares) {
      do {
        compute(span);
        __syncthreads();  // the next split overwrites the current split's memory
      } while (this->find_next(span));
    } else {
      compute(span);
    }
  }

 private:
  using Rows = SplitRows<T, Tile>;
  using Rows::first_key_, Rows::last_key_, Rows::has_key, Rows::scores_keys;
  using Rows::p_, Rows::shared_, Rows::memory_, Rows::vectors_, Rows::page_shift_, Rows::kv_head_;

  __device__ __forceinline__ void compute(const AttentionSpan& span) {
    walk(span);
    this->store([] { __syncthreads(); });
  }
  __device__ __forceinline__ std::uint32_t keys_at() const { return shared_; }
  __device__ __forceinline__ std::uint32_t values_at() const { return shared_ + Tile::kValuesAt; }
  // Offsets of the rows of K (which = 0) or V (which = 1), for even or odd blocks (parity 0 or 1). If V has parts, even
  // and odd blocks share one array for K, since a block's offsets are read before the next block's offsets are stored.
  using Offset = typename Tile::Offset;
  __device__ __forceinline__ Offset* offsets(int which, int parity) const {
    const int at = Tile::kParts > 1 ? which * (1 + parity) : which * 2 + parity;
    return reinterpret_cast<Offset*>(memory_ + Tile::kOffsetsAt) + at * Tile::kKeys;
  }
  // narrow() converts an offset to the type that shared memory holds, and widen() converts it back. A 32-bit offset
  // counts units of 16 bytes.
  static __device__ __forceinline__ Offset narrow(std::int64_t offset) {
    if constexpr (sizeof(Offset) == 8) return offset;
    return offset > kZeroRow ? static_cast<Offset>(offset / 8) : offset == kNoPage ? ~0u : ~1u;
  }
  static __device__ __forceinline__ std::int64_t widen(Offset offset) {
    if constexpr (sizeof(Offset) == 8) return offset;
    return offset < ~1u ? std::int64_t{offset} * 8 : offset == ~0u ? kNoPage : kZeroRow;
  }

  // Returns the page of this thread's key in a block. The page number is loaded a block ahead, since its load takes as
  // long as the load of a row of K.
  __device__ __forceinline__ int fetch_page(const AttentionSpan& span, int block) const {
    const int key = block + threadIdx.x;
    const bool exists = p_.block_table != nullptr && threadIdx.x < Tile::kKeys && has_key(span, key);
    return exists ? this->page_of_key(span, key) : -1;
  }
  __device__ __forceinline__ std::int64_t offset_of_key(const AttentionSpan& span, const AttentionHeads& a, int key,
                                                        int page) const {
    if (!has_key(span, key)) return kZeroRow;
    if (p_.block_table == nullptr) return offset_of(a, p_.cu_seqlens_k != nullptr, span.sequence, span.k_first + key);
    if (!this->is_page(page)) return kNoPage;
    const int number = this->number_in_table(span, key);
    const std::int64_t place = page_shift_ >= 0 ? number & ((1 << page_shift_) - 1) : number % p_.page_size;
    return page * a.sequence_stride + place * a.token_stride;
  }
  // Stores the offsets of this thread's key and value. Returns whether the key is in memory.
  __device__ __forceinline__ bool locate(const AttentionSpan& span, int block, int page) const {
    if (threadIdx.x >= Tile::kKeys) return true;
    const int parity = block / Tile::kKeys % 2, key = block + threadIdx.x;
    const std::int64_t offset = offset_of_key(span, p_.k, key, page);
    offsets(0, parity)[threadIdx.x] = narrow(offset);
    offsets(1, parity)[threadIdx.x] = narrow(same_places_ ? offset : offset_of_key(span, p_.v, key, page));
    return offset > kZeroRow;
  }
  // Starts the copies of a block of K or of a part of V. `whole`: whether all of the block's rows are in memory.
  // `part`: the part of V.
  template <bool kIsKey>
  __device__ __forceinline__ void load(int block, bool whole, int part = 0) const {
    if (block < last_key_) {
      const auto* head = kIsKey ? k_head_ : v_head_;
      const Offset* from = offsets(kIsKey ? 0 : 1, block / Tile::kKeys % 2) + (kIsKey ? 0 : part * Tile::kPartKeys);
      const std::uint32_t to = kIsKey ? keys_at() : values_at();
      const int dim = static_cast<int>(kIsKey ? p_.head_dim : p_.value_dim);
      constexpr int kRows = kIsKey ? Tile::kKeys : Tile::kPartKeys;
      if (vectors_ && whole) {
        copy_rows<kRows>(head, dim, from, to);
      } else {
#pragma unroll 2
        for (int i = threadIdx.x; i < kRows * Tile::kChunks; i += Tile::kThreads) {
          const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
          load_operand_chunk<T, kIsKey>(head, widen(from[row]), chunk, dim, vectors_, Tile::chunk(to, row, chunk));
        }
      }
    }
    copy_async_commit();
  }
  // Starts the copies of rows that all exist in memory. From every kRowsAtOnce-th row, a thread copies the same chunk
  // of 16 bytes. The thread first reads the offsets of several rows. If reads alternated with copies, the compiler
  // would wait for each offset. Rows that do not exist need stores, which would take more instructions than the copies.
  template <int kRowsOfAll>
  __device__ __forceinline__ void copy_rows(const typename T::Storage* head, int dim, const Offset* from,
                                            std::uint32_t to) const {
    constexpr int kRowsAtOnce = Tile::kThreads / Tile::kChunks;
    constexpr int kRows = kRowsOfAll / kRowsAtOnce, kAtOnce = kRows < 8 ? kRows : 8;
    const int first = threadIdx.x / Tile::kChunks, chunk = threadIdx.x % Tile::kChunks;
    if (chunk * 8 >= dim) return;
    const auto* column = head + chunk * 8;
#pragma unroll
    for (int i = 0; i < kRows; i += kAtOnce) {
      Offset offset[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) offset[j] = from[first + (i + j) * kRowsAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        copy_async_16(Tile::chunk(to, first + (i + j) * kRowsAtOnce, chunk),
                      column + (Tile::kParts > 1 ? std::int64_t{offset[j]} * 8 : std::int64_t{offset[j]}));
      }
    }
  }
  // Clears the columns past head_dim, which no copy writes. Columns of V past value_dim may hold any values, since they
  // affect no result.
  __device__ __forceinline__ void clear_columns() const {
    const int begin = static_cast<int>(p_.head_dim) / 8;
    for (int row = threadIdx.x; row < Tile::kKeys + Tile::kPartKeys; row += Tile::kThreads) {
      for (int chunk = begin; chunk < Tile::kChunks; ++chunk) {
        store_shared_16(Tile::chunk(shared_, row, chunk), make_uint4(0, 0, 0, 0));
      }
    }
  }

  __device__ __forceinline__ void walk(const AttentionSpan& span) {
    int block = first_key_ / Tile::kKeys * Tile::kKeys;
    const int first_page = fetch_page(span, block);
    int page = fetch_page(span, block + Tile::kKeys);  // page of the thread's key in the next block
    if (p_.head_dim < Tile::kColumns) {
      clear_columns();
      __syncthreads();
    }
    this->template load_queries<Tile::kThreads>(span, values_at());
    bool whole = __syncthreads_and(locate(span, block, first_page));
    load<true>(block, whole);
    SplitRows<T, Tile>::begin(span);
    copy_async_wait<1>();
    __syncthreads();
    this->read_queries(values_at());
#pragma unroll 1
    for (; block < last_key_; block += Tile::kKeys) {
      copy_async_wait<0>();
      __syncthreads();  // K has arrived; the previous block's V has been read
      load<false>(block, whole);
      const bool in_memory = locate(span, block + Tile::kKeys, page);
      page = fetch_page(span, block + 2 * Tile::kKeys);
      float s[4][4];
      if (scores_keys()) {
        this->multiply(keys_at(), s);
        this->hide(block, s);
        this->put_largest(s);
      }
      const bool values_whole = whole;
      whole = __syncthreads_and(in_memory);  // all warps have read K and stored their maxima
      load<true>(block + Tile::kKeys, whole);
      float factor[2];
      if (AttentionGpu::kHasHardwareExp && p_.exp == Exp::kHardware) {
        this->template raise<false>(0, factor);
        if (scores_keys()) this->template put_probabilities<Exp::kHardware>(this->reference_, s);
      } else {
        this->template raise<true>(0, factor);
        if (scores_keys()) this->template put_probabilities<Exp::kPortable>(this->reference_, s);
      }
      copy_async_wait<1>();
      __syncthreads();  // V and all warps' probabilities have arrived
      this->add_probabilities(0, threadIdx.x);
      this->rescale(factor);
      this->template accumulate<Tile::kParts>(0, values_at());
#pragma unroll
      for (int part = 1; part < Tile::kParts; ++part) {
        __syncthreads();  // all warps have read the previous part
        load<false>(block, values_whole, part);
        copy_async_wait<0>();
        __syncthreads();
        this->template accumulate<Tile::kParts>(part, values_at());
      }
    }
  }

  bool same_places_;  // whether K and V have the same strides, so that offsets are equal
  const typename T::Storage *k_head_ = nullptr, *v_head_ = nullptr;
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksTogether)
    attention_split_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call,
                           bool vectors) {
  extern __shared__ __align__(128) unsigned char memory[];
  SplitByCopies<T, Tile>(p, call, memory, vectors).run();
  // The merge waits only for this kernel, but also needs the shared splits. So this kernel ends after their kernel.
  if (Tile::kShares && blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

// kOverlap: the kernel may begin while the kernel of the shared splits runs.
template <class T, class Tile, bool kOverlap>
void launch_splits(const AttentionParams& p, const SplitCall& call, unsigned blocks, bool vectors,
                   cudaStream_t stream) {
  allow_shared_memory<attention_split_kernel<T, Tile>>();
  launch_dependent<kOverlap>(attention_split_kernel<T, Tile>, static_cast<int>(blocks), Tile::kThreads, Tile::kBytes,
                             stream, p, call, vectors);
}

// Runs the plan kDense: calls without shared splits on SM90.
template <class T>
void run_attention_dense(const AttentionParams& p, cudaStream_t stream) {
  run_splits<T, true>(p, SplitGrid(p), stream, [&](const SplitCall& call, unsigned blocks) {
    launch_splits<T, SplitTile<128, false, false, 2>, true>(p, call, blocks, true, stream);
  });
}

template <class T, bool kOverlap>
void run_attention_splits(const AttentionParams& p, bool vectors, cudaStream_t stream) {
  const auto run = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    const SplitGrid grid(p);
    run_splits<T, kOverlap>(p, grid, stream, [&](const SplitCall& call, unsigned blocks) {
      if (!grid.shares) return launch_splits<T, SplitTile<kColumns>, kOverlap>(p, call, blocks, vectors, stream);
      launch_groups<T, GroupTile<kColumns>>(p, call, vectors, stream);
      launch_splits<T, SplitTile<kColumns, true>, kOverlap>(p, call, blocks, vectors, stream);
    });
  };
  if (p.head_dim <= 64) {
    run(std::integral_constant<int, 64>());
  } else {
    p.head_dim <= 128 ? run(std::integral_constant<int, 128>()) : run(std::integral_constant<int, 256>());
  }
}

}  // namespace
}  // namespace rlk::cuda
