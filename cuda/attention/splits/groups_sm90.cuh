// The forward of attention for sequences with few queries and a shared prefix, by wgmma, for SM90. This file computes
// the splits of keys that lie in the shared pages of a group of sequences. A warpgroup computes one split for 64 rows
// of the group, and a warp loads pages by TMA. The results are bit-identical to those of groups.cuh.
#pragma once

#include "../forward_sm90.cuh"
#include "mma.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <int kColumns_>
struct WgmmaGroupTile : WgmmaTile<kColumns_> {
  using Wgmma = WgmmaTile<kColumns_>;
  // A block of threads has five warps: four multiply, and one loads.
  static constexpr int kRows = 64, kWarps = 5, kThreads = 32 * kWarps, kTotalBytes = 0;
  // With so few stages, two blocks of threads fit on a multiprocessor and hide each other's waits.
  static constexpr int kStages = kColumns_ > 64 ? 1 : 2;
  static constexpr int kValuesAt = Wgmma::kKeysAt + kStages * Wgmma::kTileBytes;
  static constexpr int kBarriersAt = kValuesAt + kStages * Wgmma::kTileBytes;
  static constexpr int kRangeAt = kBarriersAt + 14 * 8, kBytes = kRangeAt + 2 * kWarps * 4 + 1024;
};

struct WgmmaGroupCall {
  CUtensorMap k, v;
  PageBoxes pages;
  unsigned splits;  // GroupGrid::splits
};

template <class T, class Tile, Exp kExp>
class WgmmaGroupRows : WgmmaRows<T, Tile, kExp> {
 public:
  __device__ __forceinline__ WgmmaGroupRows(const AttentionParams& p, const WgmmaShared<Tile>& shared)
      : WgmmaRows<T, Tile, kExp>(p, shared, 0) {}

  __device__ __forceinline__ int row_of_thread(int r) const { return this->first_row_ + 8 * r; }
  __device__ __forceinline__ void see(int r, const AttentionRange& keys) {
    this->sees_first_[r] = static_cast<int>(keys.first);
    this->sees_last_[r] = static_cast<int>(keys.last);
  }
  // Computes the split. `keys`: the split's keys that any row sees.
  __device__ __forceinline__ void run(const SplitCall& call, const GroupJob<Tile::kRows>& job, std::int64_t offset,
                                      const AttentionRange& keys) {
    load_queries(offset);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_[r] = -infinity();
      l_[r][0] = l_[r][1] = 0.0f;
    }
    WgmmaWork work = {};  // only its range of keys that both rows of this thread see is used
    work.all_first = max(this->sees_first_[0], this->sees_first_[1]);
    work.all_last = min(this->sees_last_[0], this->sees_last_[1]);
    int keeps = 0;
#pragma unroll 1
    for (int block = static_cast<int>(keys.first) / Tile::kKeys * Tile::kKeys; block < keys.last;
         block += Tile::kKeys) {
      mbarrier_wait_block(shared_.keys_full(at_.stage), at_.phase);
      this->multiply(at_.stage);
      wgmma_wait<0>();
      this->pin(this->s_);
      this->release(shared_.keys_empty(at_.stage));
      this->hide(work, block);
      this->raise();
      this->template rescale_sums<1>(this->rescale_chains(), 0);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        this->exponentiate(j);
        this->pack(j);
      }
      this->add_probabilities();
      mbarrier_wait_block(shared_.values_full(at_.stage), at_.phase);
      this->accumulate(at_.stage, keeps);
      wgmma_wait<0>();
      this->pin_sums();
      this->release(shared_.values_empty(at_.stage));
      keeps = 1;
      at_.advance(Tile::kStages);
    }
    store(call, job);
  }

 private:
  using Rows = WgmmaRows<T, Tile, kExp>;
  using Rows::p_, Rows::shared_, Rows::at_, Rows::m_, Rows::l_, Rows::o_, Rows::thread_;

  // Loads the 16 queries of this warp. Lane i < 16 passes the offset in q of the warp's row i.
  __device__ __forceinline__ void load_queries(std::int64_t offset) const {
    const auto* q = in_memory(static_cast<const typename T::Storage*>(p_.q.data));
    constexpr int kChunks = Tile::kColumns / 8;
#pragma unroll 4
    for (int i = thread_ % 32; i < 16 * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks, in_tile = thread_ / 32 * 16 + row;
      const std::int64_t from = __shfl_sync(~0u, offset, row);
      const auto x =
          from > kZeroRow ? AttentionGpu::load_vec8<T>(q + from + chunk * 8, true) : AttentionGpu::fill_vec8<T>(false);
      store_shared_16(shared_.queries() + chunk / 8 * Tile::kBoxBytes + in_tile * 128 + ((chunk ^ in_tile) & 7) * 16,
                      x.v[0].v);
    }
    fence_for_tma();
    asm volatile("bar.sync 1, 128;" ::: "memory");
  }
  // Stores the sums of the split for those rows that see any of its keys. The merge reads no sums of other rows.
  __device__ __forceinline__ void store(const SplitCall& call, const GroupJob<Tile::kRows>& job) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = add_rn(l_[r][0], l_[r][1]);
      l = add_rn(l, AttentionGpu::shuffle_xor(l, 1));
      l = add_rn(l, AttentionGpu::shuffle_xor(l, 2));
      if (this->sees_last_[r] == 0) continue;
      const std::int64_t at = job.index(p_, call, row_of_thread(r));
      if (thread_ % 4 == 0) {
        const float m = m_[r] >= kStatsRange ? canonical_nan() : m_[r];
        *reinterpret_cast<float2*>(call.rows + at * 2) = make_float2(m, l);
      }
      auto* to = reinterpret_cast<float2*>(call.sums + at * Tile::kColumns) + thread_ % 4;
#pragma unroll
      for (int j = 0; j < Tile::kSums / 4; ++j) to[4 * j] = make_float2(o_[4 * j + 2 * r], o_[4 * j + 2 * r + 1]);
    }
  }
};

template <class T, class Tile, Exp kExp>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    attention_wgmma_group_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call,
                                 const __grid_constant__ WgmmaGroupCall groups) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const WgmmaShared<Tile> shared{shared_address(memory)};
  GroupJob<Tile::kRows> job;
  allow_next_kernel();
  if (!job.find(p, call, blockIdx.x, groups.splits)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      mbarrier_init(shared.keys_full(i), 1);
      mbarrier_init(shared.keys_empty(i), 1);
      mbarrier_init(shared.values_full(i), 1);
      mbarrier_init(shared.values_empty(i), 1);
    }
    mbarrier_init_fence();
  }
  const bool loads = same_in_warp(threadIdx.x / 32) == 4;
  WgmmaGroupRows<T, Tile, kExp> rows(p, shared);
  int least = INT32_MAX, most = 0;
  std::int64_t offset = kZeroRow;
  if (!loads) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::int64_t of_row;
      const AttentionRange keys = job.row(p, rows.row_of_thread(r), &of_row);
      rows.see(r, keys);
      // Gives lane i < 16 the offset of the warp's row i.
      const std::int64_t of_lane = __shfl_sync(~0u, of_row, threadIdx.x % 8 * 4);
      if (threadIdx.x % 32 / 8 == static_cast<unsigned>(r)) offset = of_lane;
      if (keys.empty()) continue;
      least = min(least, static_cast<int>(keys.first));
      most = max(most, static_cast<int>(keys.last));
    }
  }
  __syncwarp();
  const AttentionRange keys =
      keys_of_block<Tile::kWarps>(reinterpret_cast<int*>(memory + Tile::kRangeAt), job.split, least, most);
  if (keys.empty()) return;
  if (!loads) return rows.run(call, job, offset, keys);
  const std::int32_t* table = p.prefix_table + job.group * p.prefix_stride;
  RingPosition at;
  const int first_block = static_cast<int>(keys.first) / Tile::kKeys * Tile::kKeys;
  std::int32_t next_page = page_of_lane<Tile>(p, table, groups.pages, INT32_MAX, first_block);
#pragma unroll 1
  for (int block = first_block; block < keys.last; block += Tile::kKeys) {
    const std::int32_t page = next_page;
    if (block + Tile::kKeys < keys.last) {
      next_page = page_of_lane<Tile>(p, table, groups.pages, INT32_MAX, block + Tile::kKeys);
    }
    mbarrier_wait_block(shared.keys_empty(at.stage), at.phase ^ 1);
    load_pages<T, Tile, true>(shared.keys(at.stage), &groups.k, groups.pages, page, job.kv_head, block,
                              shared.keys_full(at.stage));
    mbarrier_wait_block(shared.values_empty(at.stage), at.phase ^ 1);
    load_pages<T, Tile, false>(shared.values(at.stage), &groups.v, groups.pages, page, job.kv_head, block,
                               shared.values_full(at.stage));
    at.advance(Tile::kStages);
  }
}

template <class T, class Tile, Exp kExp>
void launch_wgmma_groups(const AttentionParams& p, const SplitCall& call, cudaStream_t stream) {
  const GroupGrid<Tile> grid(p);
  if (grid.blocks == 0) return;
  WgmmaGroupCall groups;
  groups.pages = page_boxes(p, Tile::kKeys);
  groups.k = attention_map(p, p.k, false, groups.pages.box);
  groups.v = attention_map(p, p.v, false, groups.pages.box);
  groups.splits = static_cast<unsigned>(grid.splits);
  allow_shared_memory<attention_wgmma_group_kernel<T, Tile, kExp>>();
  attention_wgmma_group_kernel<T, Tile, kExp>
      <<<checked_blocks(grid.blocks, "attention"), Tile::kThreads, Tile::kBytes, stream>>>(p, call, groups);
}

template <class T, bool kOverlap>
void run_attention_groups(const AttentionParams& p, cudaStream_t stream) {
  const auto run = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    using Tile = WgmmaGroupTile<kColumns>;
    run_splits<T, kOverlap>(p, SplitGrid(p, SplitGrid::kSharedRows / 2), stream,
                            [&](const SplitCall& call, unsigned blocks) {
                              p.exp == Exp::kHardware ? launch_wgmma_groups<T, Tile, Exp::kHardware>(p, call, stream)
                                                      : launch_wgmma_groups<T, Tile, Exp::kPortable>(p, call, stream);
                              launch_splits<T, SplitTile<kColumns, true>, kOverlap>(p, call, blocks, true, stream);
                            });
  };
  p.head_dim == 64 ? run(std::integral_constant<int, 64>()) : run(std::integral_constant<int, 128>());
}

}  // namespace
}  // namespace rlk::cuda
