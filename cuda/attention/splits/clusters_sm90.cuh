// The forward of attention for sequences with few queries, for SM90. A cluster of four blocks of threads (ranks 0 ...
// 3) computes 16 rows of one split, eight blocks of keys at a time ("a round"). Each rank computes the scores of two
// blocks of keys and sends the probabilities to all four ranks. Then each rank sums its quarter of V's columns over all
// keys. So K and V are loaded only once. The kernel computes calls with so few splits that each split can have four
// multiprocessors. The results are bit-identical to those of mma.cuh. Latency limits the speed, since the steps over
// the keys run one after another. README.md has measurements.
#pragma once

#include <algorithm>

#include "../../common/cluster_sm90.cuh"
#include "pairs_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <int kColumns_>
struct ClusterTile : SplitShape<kColumns_, 2> {
  using Shape = SplitShape<kColumns_, 2>;
  static constexpr int kLoaders = 4, kThreads = 32 * (Shape::kWarps + kLoaders);
  static constexpr int kRanks = SplitGrid::kCluster, kRoundBlocks = 2 * kRanks,
                       kRoundKeys = kRoundBlocks * Shape::kKeys;
  static constexpr int kOwnKeys = 2 * Shape::kKeys;  // a rank computes the scores of this many keys
  static constexpr int kPanels = kColumns_ / 64, kPanelBytes = Shape::kKeys * 128;
  static constexpr int kSlice = kColumns_ / kRanks,
                       kSliceBytes = kSlice * 2;  // columns of V per rank, and their bytes; a warp has 8 columns
  static constexpr int kShare = 1;
  static constexpr bool kAllowsNext = true;
  static_assert(kSlice == 32 && Shape::kGroups == 4);
  static constexpr int kValuesAt = 2 * Shape::kOperandBytes, kWeightsAt = kValuesAt + kRoundKeys * kSliceBytes;
  static constexpr int kSumsAt = kWeightsAt + kRoundKeys / 16 * 512;  // each block's sums of probabilities
  static constexpr int kMaximaAt = kSumsAt + kRoundBlocks * Shape::kGroups * 128 * 4;
  static constexpr int kFactorsAt = kMaximaAt + kRoundBlocks * Shape::kGroups * 16 * 4;
  static constexpr int kReferencesAt = kFactorsAt + kRoundBlocks * 16 * 4;  // AttentionReference::m and q of each row
                                                                            // after each block of keys
  // The largest score of each row over all earlier rounds. Even and odd rounds have separate arrays.
  static constexpr int kLargestAt = kReferencesAt + kRoundBlocks * 16 * 8;
  static constexpr int kBarriersAt = kLargestAt + 2 * 16 * 4, kWholeAt = kBarriersAt + 8 * 8;
  static constexpr int kBytes = kWholeAt + 2 * kLoaders * 4 + 1024;  // 1024 bytes align the start
  // The address of a chunk of 16 bytes in a row. K has TMA's 128-byte swizzle, and V has the 64-byte swizzle.
  static __device__ __forceinline__ std::uint32_t chunk(std::uint32_t operand, int row, int chunk) {
    return operand + chunk / 8 * kPanelBytes + row * 128 + ((chunk ^ row) & 7) * 16;
  }
  static __device__ __forceinline__ std::uint32_t value_chunk(std::uint32_t values, int row, int chunk) {
    return values + row * kSliceBytes + ((chunk ^ row >> 1) & 3) * 16;
  }
};

template <class T, class Tile>
class SplitByClusters : SplitRows<T, Tile> {
 public:
  __device__ __forceinline__ SplitByClusters(const AttentionParams& p, const SplitCall& call, const PairMaps& maps,
                                             unsigned char* memory)
      : SplitRows<T, Tile>(p, call, memory, true), maps_(maps), rank_(static_cast<int>(cluster_rank())) {}

  __device__ __forceinline__ void run() {
    const bool loads = warp() >= Tile::kWarps;
    if (threadIdx.x == 32 * Tile::kWarps) begin_barriers();
    if (threadIdx.x < 16) largest_of(0)[threadIdx.x] = -infinity();
    std::int64_t first_row;
    // All four ranks of the cluster find the same tile of rows.
    if (!this->find_tile(blockIdx.x / Tile::kRanks, &first_row)) return;
    const AttentionSpan span(p_, this->sequence_);
    const bool found = this->find(span, first_row);
    if (rank_ == 0) this->store_unused();
    if (!found) return;
    if (!loads) this->template load_queries<32 * Tile::kWarps>(span, shared_ + Tile::kWeightsAt);
    __syncthreads();
    cluster_arrive();  // the other ranks wait for this arrival before they send
    if (loads) return fetch(span);
    this->begin(span);
    walk();
    store();
  }

 private:
  using Rows = SplitRows<T, Tile>;
  using Rows::has_key;
  using Rows::p_, Rows::shared_, Rows::memory_, Rows::first_key_, Rows::last_key_, Rows::lane, Rows::warp;

  __device__ __forceinline__ std::uint32_t full(bool is_key) const { return shared_ + Tile::kBarriersAt + is_key * 8; }
  __device__ __forceinline__ std::uint32_t empty(bool is_key) const { return full(is_key) + 16; }
  // Each multiplying warp of the cluster sends three messages to all four ranks: its largest scores are stored, its
  // probabilities are stored, and it has read the scores and probabilities of all ranks.
  static constexpr int kMaxima = 0, kWeights = 1, kRead = 2;
  __device__ __forceinline__ std::uint32_t sent(int what) const { return full(false) + 32 + what * 8; }
  __device__ __forceinline__ void begin_barriers() const {
    for (const bool is_key : {true, false}) {
      mbarrier_init(full(is_key), Tile::kLoaders);
      mbarrier_init(empty(is_key), Tile::kWarps);
    }
    for (const int what : {kMaxima, kWeights, kRead}) mbarrier_init(sent(what), Tile::kRanks * Tile::kWarps);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void send(int what) const {
    __syncwarp();
    if (lane() < Tile::kRanks) mbarrier_arrive_cluster(map_to_rank(sent(what), lane()));
  }
  // Whether TMA loads all rows of K or of V, and every row is an existing key. Each loading warp has a flag for its own
  // rows, and the function without `loader` combines these flags.
  __device__ __forceinline__ volatile int& whole(bool is_key, int loader) const {
    return reinterpret_cast<volatile int*>(memory_ + Tile::kWholeAt)[is_key * Tile::kLoaders + loader];
  }
  __device__ __forceinline__ bool whole(bool is_key) const {
    bool all = true;
#pragma unroll
    for (int loader = 0; loader < Tile::kLoaders; ++loader) all &= whole(is_key, loader) != 0;
    return all;
  }
  __device__ __forceinline__ float* largest_of(int round) const {
    return reinterpret_cast<float*>(memory_ + Tile::kLargestAt) + round % 2 * 16;
  }
  __device__ __forceinline__ float2* references() const {
    return reinterpret_cast<float2*>(memory_ + Tile::kReferencesAt);
  }
  __device__ __forceinline__ int first_block() const { return first_key_ / Tile::kKeys * Tile::kKeys; }
  __device__ __forceinline__ std::uint32_t values() const { return shared_ + Tile::kValuesAt; }
  // A barrier of the warps that multiply.
  __device__ __forceinline__ void meet() const { asm volatile("bar.sync 1, 256;" ::: "memory"); }
  // The work of the loading warps; each lane loads one box. In each round they load K of this rank's two blocks of
  // keys, then this rank's columns of V for all keys of the round.
  __device__ __forceinline__ void fetch(const AttentionSpan& span) const {
    static_assert(Tile::kRoundKeys / 8 <= 32 * Tile::kLoaders);  // pages have at least eight keys
    const int loader = same_in_warp(warp() - Tile::kWarps), row = (lane() * Tile::kLoaders + loader) * maps_.box;
    int phase = 1;
#pragma unroll 1
    for (int begin = first_block(); begin < last_key_; begin += Tile::kRoundKeys, phase ^= 1) {
      const int key = begin + row;
      const bool exists = row < Tile::kRoundKeys && has_key(span, key), paged = p_.block_table != nullptr;
      const int page = exists && paged ? this->page_of_key(span, key) : 0;
      const bool loads = exists && (!paged || this->is_page(page));
      const bool is_whole = loads ? key + maps_.box <= span.num_keys
                                  : row >= Tile::kRoundKeys || key / Tile::kKeys * Tile::kKeys >= last_key_;
      const bool is_own = row / Tile::kOwnKeys == rank_;
      mbarrier_wait_block(empty(true), phase);
      fetch_boxes<true>(span, loads && is_own, is_whole || !is_own, page, begin, loader);
      mbarrier_wait_block(empty(false), phase);
      fetch_boxes<false>(span, loads, is_whole, page, begin, loader);
    }
  }
  template <bool kIsKey>
  __device__ __forceinline__ void fetch_boxes(const AttentionSpan& span, bool loads, bool is_whole, int page, int begin,
                                              int loader) const {
    const bool paged = p_.block_table != nullptr, packed = p_.cu_seqlens_k != nullptr;
    const unsigned loading = __ballot_sync(~0u, loads);
    is_whole = __all_sync(~0u, is_whole);
    if (lane() == 0) {
      whole(kIsKey, loader) = is_whole;
      mbarrier_arrive_expect(full(kIsKey),
                             __popc(loading) * maps_.box * (kIsKey ? Tile::kRowBytes : Tile::kSliceBytes));
    }
    __syncwarp();
#pragma unroll 1
    for (unsigned left = loading; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1, row = (i * Tile::kLoaders + loader) * maps_.box;
      const int page_of_box = __shfl_sync(~0u, page, i), key = begin + row;
      const int token = paged ? key & ((1 << this->page_shift_) - 1) : static_cast<int>(span.k_first) + key;
      const int sequence = paged ? page_of_box : packed ? 0 : static_cast<int>(span.sequence);
      if (!elect_one()) continue;
      if constexpr (kIsKey) {
        const int at = row % Tile::kOwnKeys;
        const std::uint32_t to = shared_ + at / Tile::kKeys * Tile::kOperandBytes + at % Tile::kKeys * 128;
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          load_head_box(to + panel * Tile::kPanelBytes, &maps_.k, panel * 64, this->kv_head_, token, sequence,
                        full(true));
        }
      } else {
        load_head_box(values() + row * Tile::kSliceBytes, &maps_.v, rank_ * Tile::kSlice, this->kv_head_, token,
                      sequence, full(false));
      }
    }
  }
  // Fills the rows that TMA did not load. Keys of a page that does not exist become NaN, and their values +0. Values
  // past the last key become +0, too.
  template <bool kIsKey>
  __device__ __forceinline__ void complete(int begin, int keys) const {
    const AttentionSpan span(p_, this->sequence_);  // computed again, since a copy would take registers
    for (int row = threadIdx.x; row < keys; row += 32 * Tile::kWarps) {
      const int key = begin + row;
      if (key / Tile::kKeys * Tile::kKeys >= last_key_) break;
      const bool exists = key < span.num_keys;
      const bool lost = exists && p_.block_table != nullptr && !this->is_page(this->page_of_key(span, key));
      if (!lost && (kIsKey || exists)) continue;
      if constexpr (kIsKey) {
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
          const auto x = AttentionGpu::fill_vec8<T>(chunk * 8 < p_.head_dim);
          const std::uint32_t block = shared_ + row / Tile::kKeys * Tile::kOperandBytes;
          store_shared_16(Tile::chunk(block, row % Tile::kKeys, chunk), x.v[0].v);
        }
      } else {
        for (int chunk = 0; chunk < Tile::kSliceBytes / 16; ++chunk) {
          store_shared_16(Tile::value_chunk(values(), row, chunk), make_uint4(0, 0, 0, 0));
        }
      }
    }
    fence_for_tma();  // orders these stores before TMA's next writes
    meet();
  }
  __device__ __forceinline__ void free(bool is_key) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(empty(is_key));
  }

  __device__ __forceinline__ void walk() {
    copy_async_wait<0>();
    meet();  // the queries have arrived
    this->read_queries(shared_ + Tile::kWeightsAt);
    const int own_block = rank_ * 2 + warp() / 4;
    int phase = 0;
#pragma unroll 1
    for (int begin = first_block(); begin < last_key_; begin += Tile::kRoundKeys, phase ^= 1) {
      const int own = begin + own_block * Tile::kKeys;
      mbarrier_wait_block(full(true), phase);
      if (!whole(true)) complete<true>(begin + rank_ * Tile::kOwnKeys, Tile::kOwnKeys);
      float s[4][4];
      if (own < last_key_) {
        this->multiply(shared_ + warp() / 4 * Tile::kOperandBytes, s);
        this->hide(own, s);
      }
      free(true);
      if (begin == first_block()) {
        cluster_wait();  // the other ranks have started
      } else {
        mbarrier_wait(sent(kRead), phase ^ 1);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float most = own < last_key_ ? this->largest(s, r) : -infinity();
        const int at = ((own_block * 4 + warp() % 4) * 16 + lane() / 4 + 8 * r) * 4;
        store_remote(map_to_rank(shared_ + Tile::kMaximaAt + at, lane() % 4),
                     __float_as_uint(most));  // each of a row's four lanes stores to another rank
      }
      send(kMaxima);
      mbarrier_wait(sent(kMaxima), phase);
      refer(phase);
      meet();
      if (own < last_key_) {
        p_.exp == Exp::kHardware ? weigh<Exp::kHardware>(own_block, s) : weigh<Exp::kPortable>(own_block, s);
      }
      send(kWeights);
      mbarrier_wait_block(full(false), phase);
      if (!whole(false)) complete<false>(begin, Tile::kRoundKeys);
      mbarrier_wait(sent(kWeights), phase);  // the probabilities of the round have arrived
#pragma unroll 1
      for (int block = 0; begin + block * Tile::kKeys < last_key_ && block < Tile::kRoundBlocks; ++block) {
        if (warp() < 4) {
          accumulate(block);
        } else if (has_chains()) {
          this->add_probabilities(block, threadIdx.x - 128);
        }
      }
      free(false);
      if (begin + Tile::kRoundKeys < last_key_) send(kRead);
    }
  }
  // Each warp computes the references and factors of one block of keys, with one lane per row. From the round's earlier
  // blocks it reads only the largest scores, so all warps can work at the same time.
  __device__ __forceinline__ void refer(int round) const {
    if (lane() >= 16) return;
    const float* maxima = this->maxima() + lane();
    const auto largest_of_block = [&](int block) {
      const float* of = maxima + block * 64;
      return max_nan(max_nan(of[0], of[16]), max_nan(of[32], of[48]));
    };
    const int block = warp();
    float before = largest_of(round)[lane()];
#pragma unroll
    for (int i = 0; i < Tile::kRoundBlocks - 1; ++i) {
      const float other = largest_of_block(i);
      before = i < block ? max_nan(before, other) : before;
    }
    const float c = attention_scale(p_);
    AttentionReference reference;
    reference.raise(c, before);
    this->factors()[block * 16 + lane()] = reference.raise(c, largest_of_block(block));
    references()[block * 16 + lane()] = make_float2(reference.m, reference.q);
    if (block == Tile::kRoundBlocks - 1) largest_of(round + 1)[lane()] = reference.largest;
  }
  template <Exp kExp>
  __device__ __forceinline__ void weigh(int block, float (&s)[4][4]) const {
    AttentionReference reference[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 x = references()[block * 16 + lane() / 4 + 8 * r];
      reference[r].m = x.x;
      reference[r].q = x.y;
    }
    const int group = block * 4 + warp() % 4;
    const bool is_used = this->first_row_ + lane() / 4 < this->last_row_;  // only rows in use are sent
    this->template probabilities<kExp>(
        reference, s,
        [&](int r, float2 x) {
          if (!is_used) return;
#pragma unroll
          for (int rank = 0; rank < Tile::kRanks; ++rank) {
            if (rank == 0 || !this->call_.merges)
              store_remote_8(map_to_rank(shared_ + this->sums_of(group, r), rank), x);
          }
        },
        [&](int step, uint4 x) {
          if (!is_used) return;
#pragma unroll
          for (int rank = 0; rank < Tile::kRanks; ++rank) {
            store_remote_16(map_to_rank(shared_ + this->weights_of(group, step), rank), x);
          }
        });
  }

  // Adds the values of a block of keys, weighted by their probabilities, to the sums of eight of this rank's columns.
  __device__ __forceinline__ void accumulate(int block) {
    constexpr int kSteps = Tile::kKeys / 32;  // a step has 32 keys, for two products
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = this->factors()[block * 16 + lane() / 4 + 8 * r];
    std::uint32_t b[kSteps][4];
    uint4 a[kSteps][2];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int key = block * Tile::kKeys + step * 32 + lane();
      load_matrices_4<true>(b[step], Tile::value_chunk(values(), key, warp()));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[step][half] = *reinterpret_cast<const uint4*>(memory_ + this->weights_of(block * 4 + step, half));
      }
    }
    auto& sums = this->sums_[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = mul_rn(sums[i], factor[i / 2]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t of[4] = {a[step][half].x, a[step][half].y, a[step][half].z, a[step][half].w};
        mma_m16n8k16<T>(sums, of, b[step][2 * half], b[step][2 * half + 1]);
      }
    }
  }

  // Whether this rank computes l, the sum of probabilities. Rank 0 always does. In calls without a merge every rank
  // needs l to scale its columns of the output.
  __device__ __forceinline__ bool has_chains() const { return rank_ == 0 || !this->call_.merges; }

  __device__ __forceinline__ void store_outputs() const {
    const float l = this->sum_of_chains();
    if (warp() == 0 && lane() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane() / 4 + 8 * r;
        const bool used = this->sees_[r][0] < this->sees_[r][1];
        this->maxima()[row] = used ? references()[(Tile::kRoundBlocks - 1) * 16 + row].x : infinity();
      }
    }
    meet();
    if (warp() >= 4) this->put_scales(threadIdx.x - 128, l);
    meet();
    const int column = rank_ * Tile::kSlice + warp() * 8 + lane() % 4 * 2;
    if (warp() >= 4 || column >= p_.head_dim) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned row = this->first_row_ + lane() / 4 + 8 * r;
      if (row >= this->last_row_) continue;
      this->put_output(row, column, this->scales()[lane() / 4 + 8 * r], this->sums_[0][2 * r],
                       this->sums_[0][2 * r + 1]);
    }
  }
  __device__ __forceinline__ void store() const {
    if (!this->call_.merges) return store_outputs();
    if (warp() >= 4) {
      const int thread = threadIdx.x - 128;
      const unsigned row = this->first_row_ + thread / 8;
      const float l = this->sum_of_chains();
      if (rank_ != 0 || thread % 8 != 0 || row >= this->last_row_) return;
      const float m = references()[(Tile::kRoundBlocks - 1) * 16 + thread / 8].x;
      *reinterpret_cast<float2*>(this->call_.rows + this->index(row) * 2) = make_float2(m, l);
      return;
    }
    const int column = rank_ * Tile::kSlice + warp() * 8 + lane() % 4 * 2;
    if (column >= p_.head_dim) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned row = this->first_row_ + lane() / 4 + 8 * r;
      if (row >= this->last_row_) continue;
      *reinterpret_cast<float2*>(this->call_.sums + this->index(row) * p_.head_dim + column) =
          make_float2(this->sums_[0][2 * r], this->sums_[0][2 * r + 1]);
    }
  }

  const PairMaps& maps_;
  const int rank_;
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_cluster_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call,
                             const __grid_constant__ PairMaps maps) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
  }
  SplitByClusters<T, Tile>(p, call, maps, memory).run();
}

template <class T>
void run_attention_clusters(const AttentionParams& p, cudaStream_t stream) {
  using Tile = ClusterTile<128>;
  const std::int64_t together = p.block_table != nullptr ? p.page_size : Tile::kKeys;
  const int box = static_cast<int>(std::min<std::int64_t>(together, Tile::kKeys));
  const PairMaps maps = {attention_map(p, p.k, false, box), attention_map(p, p.v, false, box, Tile::kSlice), box};
  run_splits<T, true>(p, SplitGrid(p), stream, [&](const SplitCall& call, unsigned blocks) {
    allow_shared_memory<attention_cluster_kernel<T, Tile>>();
    launch_dependent_clusters<true>(attention_cluster_kernel<T, Tile>, Tile::kRanks,
                                    static_cast<int>(checked_blocks(std::int64_t{blocks} * Tile::kRanks, "attention")),
                                    Tile::kThreads, Tile::kBytes, stream, p, call, maps);
  });
}

}  // namespace
}  // namespace rlk::cuda
