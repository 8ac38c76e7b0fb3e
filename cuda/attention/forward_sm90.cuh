// The forward of attention for bf16 and fp16 by wgmma, for SM90. The kernel computes sequences with many queries, if
// TMA can load their heads. The keys may lie in pages. A block of threads is persistent, and two of its warps load. Two
// or three warpgroups share a tile of one head, 64 queries each, and take turns on the tensor cores. Inside a
// warpgroup, the softmax of a block of keys runs beside the previous block's P V and the next block's Q K^T. wgmma
// limits the speed. README.md has measurements.
#pragma once

#include <algorithm>
#include <bit>

#include "../common/async_copy_sm80.cuh"
#include "../common/kernel_memory.h"
#include "../common/register_shares_sm90.cuh"
#include "head_maps.h"
#include "wgmma_rows_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <class T, class Tile, Exp kExp, class Params>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_wgmma_kernel(const __grid_constant__ Params p, const __grid_constant__ WgmmaCallOf<Params> call) {
  using Registers =
      std::conditional_t<Tile::kWarpgroups == 3, RegisterShares<32, 160, 3>,
                         std::conditional_t<Tile::kOuterFours == 0, RegisterShares<56, 224>, RegisterShares<40, 232>>>;
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const WgmmaShared<Tile> shared{shared_address(memory)};
  auto* slots = reinterpret_cast<WgmmaWork*>(memory + WgmmaShared<Tile>::kWorkAt);
  if constexpr (kMayMix<Params>) allow_next_kernel();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int warpgroup = same_in_warp(threadIdx.x / 128) - 1;
  if (warpgroup < 0) {
    Registers::release();
    const int warp = same_in_warp(threadIdx.x / 32);
    if (warp == 0) {
      load_tiles<T, Tile>(p, call, shared, slots);
    } else if (warp == 1) {
      load_values<T, Tile>(p, call, shared, slots);
    } else if constexpr (kMayMix<Params>) {
      if (call.first_block == 0) clear_outside<T, Tile>(p);
      say_done(call);
      if (warp == 2 && call.waits && blockIdx.x == gridDim.x - 1) wait_for_launches(call);
    } else if (p.cu_seqlens_q != nullptr) {
      clear_outside<T, Tile>(p);
    }
    return;
  }
  Registers::claim();
  WgmmaRows<T, Tile, kExp> rows(p, shared, warpgroup, &call,
                                reinterpret_cast<float2*>(memory + WgmmaShared<Tile>::kRowTotalsAt));
  if (warpgroup == Tile::kWarpgroups - 1)
    asm volatile("bar.arrive 2, 256;" ::: "memory");  // so warpgroup 0 has the first turn on the tensor cores
  RingPosition slot;
#pragma unroll 1
  for (;;) {
    mbarrier_wait_block(shared.tile_full(slot.stage), slot.phase);
    const WgmmaWork& work = slots[slot.stage];
    // After this barrier ptxas knows that warps have converged, and keeps values in uniform registers.
    asm volatile("bar.sync %0, 128;" ::"r"(2 + Tile::kWarpgroups + warpgroup) : "memory");
    if (work.places < 0) break;
    rows.run(work);
    mbarrier_arrive(shared.tile_empty(slot.stage));  // this thread no longer reads `work`
    slot.advance(2);
  }
  if constexpr (kMayMix<Params>) say_done(call);
}

inline PageBoxes page_boxes(const AttentionParams& p, int keys) {
  if (p.block_table == nullptr) return {0, 0};
  return {static_cast<std::int32_t>(std::min<std::int64_t>(p.page_size, keys)),
          std::countr_zero(static_cast<std::uint32_t>(p.page_size))};
}

template <class Tile, class Params>
WgmmaCallOf<Params> wgmma_call(const Params& p) {
  WgmmaCallOf<Params> call;
  call.q = attention_map(p, p.q, true, Tile::kQueries);
  call.pages = page_boxes(p, Tile::kKeys);
  const int box = call.pages.box > 0 ? call.pages.box : Tile::kKeys;
  call.k = attention_map(p, p.k, false, box);
  call.v = attention_map(p, p.v, false, box, 64, p.value_dim);
  if constexpr (kMayBranch<Params>) {
    call.k_parts = attention_map(p, p.k, false, kPartKeys);
    call.v_parts = attention_map(p, p.v, false, kPartKeys);
  }
  const bool packed = p.cu_seqlens_q != nullptr;
  const std::int64_t blocks =
      packed ? p.q_tokens / Tile::kQueries + p.num_sequences : (p.q_tokens + Tile::kQueries - 1) / Tile::kQueries;
  const std::int64_t heads = p.num_q_heads * (packed ? 1 : p.num_sequences);
  // `fit`: the number of heads whose tiles run at the same time, so that the keys and values of these heads stay in L2.
  constexpr std::int64_t kOfL2 = std::int64_t{24} << 20;
  const std::int64_t group = p.num_q_heads / p.num_kv_heads;
  const std::int64_t fit = std::max<std::int64_t>(kOfL2 / (p.k_tokens * (p.head_dim + p.value_dim) * 2), 1) * group;
  call.blocks = static_cast<std::int32_t>(blocks);
  call.heads = static_cast<std::int32_t>(heads);
  call.section = static_cast<std::int32_t>(packed ? heads : std::min(heads, fit));
  call.in_section = static_cast<std::int32_t>(call.section * blocks);
  call.tiles = static_cast<std::int32_t>(blocks * heads);
  call.counter = nullptr;
  call.totals = nullptr;
  return call;
}

// Clears the counter from which blocks of threads take tiles. The next kernel may begin as soon as the counter is 0.
__global__ void clear_tile_counter_kernel(std::uint32_t* counter) {
  atomicExch(counter, 0u);
  __threadfence();
  allow_next_kernel();
}

template <class T, class Tile, Exp kExp, class Params>
void launch_attention_wgmma(const Params& p, cudaStream_t stream) {
  WgmmaCallOf<Params> call = wgmma_call<Tile>(p);
  int grid = std::min(call.tiles, multiprocessors(current_device()));
  if constexpr (Tile::kOuterFours > 0) {
    grid = std::min(grid, kOuterTotals);
    call.totals = reinterpret_cast<float4*>(static_cast<unsigned char*>(p.workspace) + kOuterTotalsAt);
  }
  if (call.tiles > grid) {
    call.counter = static_cast<std::uint32_t*>(p.workspace) + attention_path_bytes(p) / 4;
  }
  allow_shared_memory<attention_wgmma_kernel<T, Tile, kExp, Params>>();
  if (call.counter == nullptr) {
    attention_wgmma_kernel<T, Tile, kExp, Params><<<grid, Tile::kThreads, Tile::kBytes, stream>>>(p, call);
    return;
  }
  clear_tile_counter_kernel<<<1, 1, 0, stream>>>(call.counter);
  launch_dependent<true>(attention_wgmma_kernel<T, Tile, kExp, Params>, grid, Tile::kThreads, Tile::kBytes, stream, p,
                         call);
}

template <class T, WgmmaForm kForm, class Params>
void run_attention_wgmma(const Params& p, cudaStream_t stream) {
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    p.exp == Exp::kHardware ? launch_attention_wgmma<T, Tile, Exp::kHardware>(p, stream)
                            : launch_attention_wgmma<T, Tile, Exp::kPortable>(p, stream);
  };
  const std::int64_t columns = TileColumns::of(p.head_dim, p.value_dim).keys;
  if constexpr (kForm == WgmmaForm::kTall) {
    columns == 64 ? launch_attention_wgmma<T, WgmmaTile<64, 64, false, 3>, Exp::kHardware>(p, stream)
                  : launch_attention_wgmma<T, WgmmaTile<192, 128, true, 3>, Exp::kHardware>(p, stream);
  } else if constexpr (kForm == WgmmaForm::kWide) {  // narrower heads use the next wider tile, whose other columns are
                                                     // +0
    columns == 192 ? launch(WgmmaTile<192, 128>{}) : launch(WgmmaTile<256>{});
  } else if constexpr (kForm == WgmmaForm::kPadded) {
    columns == 64   ? launch(WgmmaTile<64, 64, true>{})
    : columns == 80 ? launch(WgmmaTile<80, 80, true>{})
    : columns == 96 ? launch(WgmmaTile<96, 96, true>{})
                    : launch(WgmmaTile<128, 128, true>{});
  } else {
    columns == 64 ? launch(WgmmaTile<64>{}) : launch(WgmmaTile<128>{});
  }
}

}  // namespace
}  // namespace rlk::cuda
