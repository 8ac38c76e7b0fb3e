// Kept ids from the mask of a row.
#pragma once

#include "first_columns.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kMaskAhead = 8;  // words of a mask that a thread loads at once

// A barrier for kThreads threads of a block; the other threads do not take part.
template <int kThreads>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Writes the ids of a mask's bits in ascending order. kThreads threads of a block, from thread `kFirst` on, call this
// function. Each warp takes neighbouring words, and each lane writes the id of one bit of every word. `counts`: one
// value for each warp. `ahead`: kMaskAhead values for each thread. `of_lanes`: one value for each thread. The calling
// threads pass a barrier before the function uses `map`.
template <int kThreads, int kFirst = 0>
__device__ void write_ids_of_mask(const SlotMap& map, const std::uint32_t* mask, int words, std::int32_t* out,
                                  std::uint32_t* counts, std::uint32_t* ahead, uint4* of_lanes) {
  constexpr int kWarps = kThreads / kWarp;
  const int share = (words + kThreads - 1) / kThreads * kWarp, lane = lane_of_warp();
  const int warp = warp_of_block() - kFirst / kWarp, from = warp * share, to = min(from + share, words);
  std::uint32_t mine = 0;
#pragma unroll 8
  for (int i = from + lane; i < to; i += kWarp) mine += static_cast<std::uint32_t>(set_bits_of(mask[i]));
  mine = __reduce_add_sync(kAllLanes, mine);
  if (lane == 0) counts[warp] = mine;
  meet<kThreads>();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) out += i < warp ? counts[i] : 0;
  ahead += static_cast<int>(threadIdx.x) - kFirst;
  of_lanes += warp * kWarp;
  int loaded = kMaskAhead;
#pragma unroll 1
  for (int base = from; base < to; base += kWarp) {
    const int at = base + lane;
    if (loaded == kMaskAhead) {
      std::uint32_t words[kMaskAhead];
#pragma unroll
      for (int k = 0; k < kMaskAhead; ++k) words[k] = at + k * kWarp < to ? mask[at + k * kWarp] : 0;
#pragma unroll
      for (int k = 0; k < kMaskAhead; ++k) ahead[k * kThreads] = words[k];
      loaded = 0;
    }
    const std::uint32_t word = ahead[loaded++ * kThreads];
    int columns;
    const int first = map.first(min(at, to - 1) / kMaskWords, &columns) + at % kMaskWords * 32;
    int end = set_bits_of(word);  // end of this lane's ids, relative to `out`
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, d);
      end += lane >= d ? before : 0;
    }
    constexpr int kFewBits = 4;
    if (__all_sync(kAllLanes, set_bits_of(word) <= kFewBits)) {  // each lane writes the ids of its word
      std::int32_t* own = out + end - set_bits_of(word);
#pragma unroll 1
      for (std::uint32_t left = word; left != 0; left &= left - 1) *own++ = first + lowest_bit_of(left);
      out += __shfl_sync(kAllLanes, end, kWarp - 1);
      continue;
    }
    // The lanes write the ids of a word together.
    const unsigned have = __ballot_sync(kAllLanes, word != 0);
    of_lanes[lane] = make_uint4(word, static_cast<std::uint32_t>(end), static_cast<std::uint32_t>(first), 0);
    __syncwarp();
    // Writes the ids of lane `of`'s word.
    const auto write = [&](int of) {
      const uint4 from = of_lanes[of];
      const std::uint32_t bits = from.x >> lane;
      if ((bits & 1) != 0) out[static_cast<int>(from.y) - set_bits_of(bits)] = static_cast<std::int32_t>(from.z) + lane;
    };
    if (set_bits_of(have) > kWarp / 2) {
#pragma unroll
      for (int of = 0; of < kWarp; ++of) write(of);
    } else {
      for (unsigned left = have; left != 0; left &= left - 1) write(lowest_bit_of(left));
    }
    out += __shfl_sync(kAllLanes, end, kWarp - 1);
    __syncwarp();  // the lanes have read of_lanes
  }
}

}  // namespace
}  // namespace rlk::cuda
