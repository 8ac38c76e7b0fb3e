// The forward of attention for sequences with few queries, for SM90. Eight warps process two blocks of keys (a pair) at
// a time. Four more warps load K and V by TMA; a box is a page, or the part of a page that lies in the block of keys.
// The kernel computes calls with so few splits that each split can have a multiprocessor of its own. Latency limits the
// speed of such calls, since the steps over blocks of keys run one after another. The results are bit-identical to
// those of mma.cuh. README.md has measurements.
#pragma once

#include <algorithm>

#include "../../common/mbarrier_sm90.cuh"
#include "../../common/tma_sm90.cuh"
#include "../head_maps.h"
#include "merge.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <int kColumns_>
struct PairTile : SplitShape<kColumns_, 2> {
  using Shape = SplitShape<kColumns_, 2>;
  static constexpr int kLoaders = 4, kSlots = 3;  // loading warps; slots, each for a pair of K or of V
  static constexpr int kThreads = 32 * (Shape::kWarps + kLoaders);
  static constexpr bool kAllowsNext = true;
  static constexpr int kPanels = kColumns_ / 64, kPanelBytes = Shape::kKeys * 128;  // panels of 64 columns
  static constexpr int kSlotBytes = 2 * Shape::kOperandBytes;
  static constexpr int kQueryBytes = Shape::kRows * Shape::kRowBytes;  // queries are loaded to the place of
                                                                       // probabilities
  static constexpr int kWeightsAt = kSlots * kSlotBytes;
  static constexpr int kMaximaAt = kWeightsAt + (Shape::kWeightBytes > kQueryBytes ? Shape::kWeightBytes : kQueryBytes);
  static constexpr int kSumsAt = kMaximaAt + Shape::kMaximaBytes, kFactorsAt = kSumsAt + Shape::kSumBytes;
  static constexpr int kBarriersAt = kFactorsAt + Shape::kFactorBytes, kWholeAt = kBarriersAt + 2 * kSlots * 8;
  static constexpr int kBytes = kWholeAt + kSlots * 4 + 1024;  // 1024 bytes align the start
  // The address of a chunk of 16 bytes in a row, with TMA's swizzle.
  static __device__ __forceinline__ std::uint32_t chunk(std::uint32_t operand, int row, int chunk) {
    return operand + chunk / 8 * kPanelBytes + row * 128 + ((chunk ^ row) & 7) * 16;
  }
};

struct PairMaps {
  CUtensorMap k, v;
  std::int32_t box;  // tokens of a box: a page, or at most a block of keys
};

// Barriers at the start. One loading warp initialises the mbarriers. The loading warps then wait only for each other,
// so the multiplying warps do not delay the first loads.
__device__ __forceinline__ void begin_loading() {
  asm volatile("bar.sync 2, 128;" ::: "memory");
  asm volatile("bar.arrive 3, 384;" ::: "memory");
}
__device__ __forceinline__ void begin_multiplying() { asm volatile("bar.sync 3, 384;" ::: "memory"); }

template <class T, class Tile>
class SplitByPairs : SplitRows<T, Tile> {
 public:
  __device__ __forceinline__ SplitByPairs(const AttentionParams& p, const SplitCall& call, const PairMaps& maps,
                                          unsigned char* memory)
      : SplitRows<T, Tile>(p, call, memory, true), maps_(maps) {}

  __device__ __forceinline__ void run() {
    const bool loads = warp() >= Tile::kWarps;
    if (threadIdx.x == 32 * Tile::kWarps) {
      for (int slot = 0; slot < Tile::kSlots; ++slot) {
        mbarrier_init(full(slot), Tile::kLoaders);
        mbarrier_init(empty(slot), Tile::kWarps);
      }
      mbarrier_init_fence();
    }
    std::int64_t first_row;
    if (!this->find_tile(blockIdx.x, &first_row)) return;
    const AttentionSpan span(p_, this->sequence_);
    const bool found = this->find(span, first_row);
    this->store_unused();
    if (!found) return;
    if (loads) {
      begin_loading();
      return fetch(span);
    }
    this->template load_queries<32 * Tile::kWarps>(span, shared_ + Tile::kWeightsAt);
    begin_multiplying();
    this->begin(span);
    walk(span);
    this->store([&] { meet(); });
  }

 private:
  using Rows = SplitRows<T, Tile>;
  using Rows::has_key;
  using Rows::p_, Rows::shared_, Rows::memory_, Rows::first_key_, Rows::last_key_, Rows::lane, Rows::warp;

  __device__ __forceinline__ std::uint32_t full(int slot) const { return shared_ + Tile::kBarriersAt + slot * 8; }
  __device__ __forceinline__ std::uint32_t empty(int slot) const { return full(Tile::kSlots + slot); }
  __device__ __forceinline__ std::uint32_t operand(int slot, int which) const {
    return shared_ + slot * Tile::kSlotBytes + which * Tile::kOperandBytes;
  }
  // A flag in shared memory: TMA loads all rows of a slot's pair of blocks, and every row is an existing key.
  __device__ __forceinline__ volatile int& whole(int slot) const {
    return reinterpret_cast<volatile int*>(memory_ + Tile::kWholeAt)[slot];
  }
  __device__ __forceinline__ int first_block() const { return first_key_ / Tile::kKeys * Tile::kKeys; }
  // A barrier of the warps that multiply.
  __device__ __forceinline__ void meet() const { asm volatile("bar.sync 1, 256;" ::: "memory"); }

  // A box of a pair of blocks: its first key and its page. Each lane describes one box.
  struct Box {
    bool exists;
    int key, page;
  };
  __device__ __forceinline__ Box box_of(const AttentionSpan& span, int block) const {
    Box box = {lane() * maps_.box < 2 * Tile::kKeys, block + lane() * maps_.box, 0};
    box.exists = box.exists && has_key(span, box.key);
    if (box.exists && p_.block_table != nullptr) box.page = this->page_of_key(span, box.key);
    return box;
  }

  // The work of the loading warps. Lane i of every warp finds the key and page of box i, and each warp loads every
  // fourth box.
  __device__ __forceinline__ void fetch(const AttentionSpan& span) const {
    int block = first_block();
    Box box = box_of(span, block);
    RingPosition at;
#pragma unroll 1
    for (; block < last_key_; block += 2 * Tile::kKeys) {
      fetch_pair(span, box, block, &maps_.k, at);
      const Box next = box_of(span, block + 2 * Tile::kKeys);
      fetch_pair(span, box, block, &maps_.v, at);
      box = next;
    }
  }
  __device__ __forceinline__ void fetch_pair(const AttentionSpan& span, const Box& box, int block,
                                             const CUtensorMap* map, RingPosition& at) const {
    const bool paged = p_.block_table != nullptr, packed = p_.cu_seqlens_k != nullptr;
    const bool loads = box.exists && (!paged || this->is_page(box.page));
    const bool is_whole =
        loads ? box.key + maps_.box <= span.num_keys
              : lane() * maps_.box >= 2 * Tile::kKeys || box.key / Tile::kKeys * Tile::kKeys >= last_key_;
    const unsigned loaded = __ballot_sync(~0u, loads), all = __ballot_sync(~0u, is_whole);
    const int loader = same_in_warp(warp() - Tile::kWarps);
    const unsigned mine = loaded & (~0u / ((1u << Tile::kLoaders) - 1) << loader);  // every kLoaders-th bit
    mbarrier_wait_block(empty(at.stage), at.phase ^ 1);
    if (lane() == 0) {
      if (loader == 0) whole(at.stage) = all == ~0u;
      mbarrier_arrive_expect(full(at.stage), __popc(mine) * maps_.box * Tile::kRowBytes);
    }
    __syncwarp();
#pragma unroll 1
    for (unsigned left = mine; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1, row = i * maps_.box, key = block + row;
      const int page = __shfl_sync(~0u, box.page, i);
      const int token = paged ? key & ((1 << this->page_shift_) - 1) : static_cast<int>(span.k_first) + key;
      const int sequence = paged ? page : packed ? 0 : static_cast<int>(span.sequence);
      const std::uint32_t to = operand(at.stage, row / Tile::kKeys) + row % Tile::kKeys * 128;
      if (elect_one()) {
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          load_head_box(to + panel * Tile::kPanelBytes, map, panel * 64, this->kv_head_, token, sequence,
                        full(at.stage));
        }
      }
    }
    at.advance(Tile::kSlots);
  }
  // Fills the rows that TMA did not load. Keys of a page that does not exist become NaN, and their values +0. Values
  // past the last key become +0, too.
  template <bool kIsKey>
  __device__ __forceinline__ void complete(const AttentionSpan& span, int block, int slot) const {
    const int row = threadIdx.x, key = block + row;
    if (row < 2 * Tile::kKeys && key / Tile::kKeys * Tile::kKeys < last_key_) {
      const bool exists = key < span.num_keys;
      const bool lost = exists && p_.block_table != nullptr && !this->is_page(this->page_of_key(span, key));
      if (lost || (!kIsKey && !exists)) {
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
          const auto x = AttentionGpu::fill_vec8<T>(kIsKey && chunk * 8 < p_.head_dim);
          store_shared_16(Tile::chunk(operand(slot, row / Tile::kKeys), row % Tile::kKeys, chunk), x.v[0].v);
        }
        fence_for_tma();  // orders these stores before TMA's next writes
      }
    }
    if (kIsKey) meet();
  }
  __device__ __forceinline__ void free(int slot) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(empty(slot));
  }

  template <Exp kExp>
  __device__ __forceinline__ void weigh(bool both, bool scores, float (&factor)[2][2], float (&s)[4][4]) {
    constexpr bool kClamps = kExp == Exp::kPortable;
    this->template raise<kClamps>(0, factor[0]);
    const AttentionReference first[2] = {this->reference_[0], this->reference_[1]};
    if (both) this->template raise<kClamps>(1, factor[1]);
    if (!scores) return;
    AttentionReference mine[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) mine[r] = warp() < 4 ? first[r] : this->reference_[r];
    this->template put_probabilities<kExp>(mine, s);
  }

  __device__ __forceinline__ void walk(const AttentionSpan& span) {
    copy_async_wait<0>();
    meet();
    this->read_queries(shared_ + Tile::kWeightsAt);
    RingPosition at;
    const int which = warp() / 4;
#pragma unroll 1
    for (int block = first_block(); block < last_key_; block += 2 * Tile::kKeys) {
      const bool both = block + Tile::kKeys < last_key_;
      const int own = block + which * Tile::kKeys;
      const bool scores = this->scores_keys() && own < last_key_;
      mbarrier_wait_block(full(at.stage), at.phase);
      if (!whole(at.stage)) complete<true>(span, block, at.stage);
      float s[4][4];
      if (scores) {
        this->multiply(operand(at.stage, which), s);
        this->hide(own, s);
        this->put_largest(s);
      }
      free(at.stage);
      at.advance(Tile::kSlots);
      meet();  // maxima are stored; the previous pair's probabilities and sums have been read
      float factor[2][2];
      if (p_.exp == Exp::kHardware) {
        weigh<Exp::kHardware>(both, scores, factor, s);
      } else {
        weigh<Exp::kPortable>(both, scores, factor, s);
      }
      mbarrier_wait_block(full(at.stage), at.phase);
      if (!whole(at.stage)) complete<false>(span, block, at.stage);
      meet();  // V and every warp's probabilities have arrived
      if (warp() < 4) {
        this->add_probabilities(0, threadIdx.x);
        if (both) this->add_probabilities(1, threadIdx.x);
      }
      this->rescale(factor[0]);
      this->accumulate(0, operand(at.stage, 0));
      if (both) {
        this->rescale(factor[1]);
        this->accumulate(1, operand(at.stage, 1));
      }
      free(at.stage);
      at.advance(Tile::kSlots);
    }
  }

  const PairMaps& maps_;
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_pair_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call,
                          const __grid_constant__ PairMaps maps) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
  }
  SplitByPairs<T, Tile>(p, call, maps, memory).run();
}

template <class T>
void run_attention_pairs(const AttentionParams& p, cudaStream_t stream) {
  const auto run = [&](auto tile) {
    using Tile = decltype(tile);
    const std::int64_t together = p.block_table != nullptr ? p.page_size : Tile::kKeys;
    const int box = static_cast<int>(std::min<std::int64_t>(together, Tile::kKeys));
    const PairMaps maps = {attention_map(p, p.k, false, box), attention_map(p, p.v, false, box), box};
    run_splits<T, true>(p, SplitGrid(p), stream, [&](const SplitCall& call, unsigned blocks) {
      allow_shared_memory<attention_pair_kernel<T, Tile>>();
      launch_dependent<true>(attention_pair_kernel<T, Tile>, static_cast<int>(blocks), Tile::kThreads, Tile::kBytes,
                             stream, p, call, maps);
    });
  };
  p.head_dim <= 64 ? run(PairTile<64>{}) : run(PairTile<128>{});
}

}  // namespace
}  // namespace rlk::cuda
