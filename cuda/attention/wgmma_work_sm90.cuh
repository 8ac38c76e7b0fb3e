// The tiles of a call of attention's wgmma kernel: the queries and keys of each tile, and the warps that distribute and
// load the tiles.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/mbarrier_sm90.cuh"
#include "../common/mma_sm80.cuh"
#include "../common/tma_sm90.cuh"
#include "gpu.cuh"
#include "path_runs.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// kColumns: columns of q and k in a tile. kValueColumns: columns of v and O. kIsPadded: whether heads may have fewer
// columns than the tile. kWarpgroups: number of warpgroups; each computes 64 queries.
template <int kColumns_, int kValueColumns_ = kColumns_, bool kIsPadded_ = (kColumns_ > 128), int kWarpgroups_ = 2>
struct WgmmaTile {
  static constexpr int kColumns = kColumns_, kValueColumns = kValueColumns_, kWarpgroups = kWarpgroups_;
  static constexpr bool kIsPadded = kIsPadded_;
  static constexpr int kQueries = 64 * kWarpgroups, kKeys = attention_block(kColumns), kStages = 2;
  static constexpr int kRowThreads = 128 * kWarpgroups, kThreads = kRowThreads + 128;
  static constexpr int kBoxes = (kColumns + 63) / 64, kValueBoxes = (kValueColumns + 63) / 64;  // boxes of 64 columns
  static constexpr int kQueryBoxBytes = kQueries * 128, kBoxBytes = kKeys * 128;
  static constexpr int kQueryBytes = kBoxes * kQueryBoxBytes, kTileBytes = kBoxes * kBoxBytes;
  static constexpr int kValueBytes = kValueBoxes * kBoxBytes;
  static constexpr int kScores = kKeys / 2, kSums = kValueColumns / 2;  // per thread
  // A thread has kSums / 4 groups of four sums over V. A total is the merged sum of earlier splits. Shared memory holds
  // the totals of the first kSharedFours groups, and L2 holds the totals of the others.
  static constexpr int kSharedFours = kSums > 64 ? 8 : kWarpgroups > 2 && kColumns > 64 ? 12 : kSums / 4;
  static constexpr int kOuterFours = kSums / 4 - kSharedFours;
  static constexpr int kTotalBytes = kRowThreads * 16 * kSharedFours;
  static constexpr int kKeysAt = kQueryBytes, kValuesAt = kKeysAt + kStages * kTileBytes;
  static constexpr int kTotalAt = kValuesAt + kStages * kValueBytes, kBarriersAt = kTotalAt + kTotalBytes;
  static constexpr int kWorkBytes = 80;
  // Whether sums and scores leave a thread few other registers. If so, shared memory holds the rows' totals of m and l.
  static constexpr bool kIsLean = kOuterFours > 0 || kWarpgroups > 2;
  static constexpr int kRowBytes = kIsLean ? kQueries * 8 : 0;
  static constexpr int kBytes = kBarriersAt + 14 * 8 + 2 * kWorkBytes + kRowBytes + 1024;  // 1024 bytes align the start
  static_assert(kBytes <= 227 * 1024);
};

struct PageBoxes {
  std::int32_t box, shift;  // box: keys of a box, or 0 if there are no pages; shift: log2 of the page size
};

struct WgmmaCall {
  CUtensorMap q, k, v;
  std::int32_t tiles;
  std::int32_t blocks;  // tiles of queries per sequence and head; for packed q, at least the tiles of all sequences
  std::int32_t heads;   // query heads; if q is not packed, query heads of all sequences
  PageBoxes pages;
  std::int32_t section, in_section;  // number of heads (a section) whose keys and values together fit in L2; number of
                                     // tiles of a section
  // Counts the tiles that were taken, without the first tile of each thread block. Null: each thread block has one
  // tile.
  std::uint32_t* counter;
  float4* totals;  // [blocks of threads, kOuterFours, kRowThreads]: the totals in L2
};

// Calls of trees also have tensor maps with boxes of eight keys ("parts").
struct WgmmaTreeCall : WgmmaCall {
  CUtensorMap k_parts, v_parts;
};
// Calls of mixed batches (mixed.cuh): one launch takes all tiles, or two launches share a counter of tiles.
struct WgmmaMixedCall : WgmmaCall {
  static constexpr std::uint32_t kStoringWarps = 10;  // this many warps of a block of threads store results
  // first_block: number of thread blocks of an earlier launch. all_blocks: thread blocks of all launches.
  std::int32_t first_block, all_blocks;
  // Counts the warps of the first launch that have stored their results. Null: there is no second launch.
  std::uint32_t* done;
  bool waits;  // whether this is the last launch before the merge, which waits only for the last launch
};
template <class Params>
using WgmmaCallOf = std::conditional_t<kMayBranch<Params>, WgmmaTreeCall,
                                       std::conditional_t<kMayMix<Params>, WgmmaMixedCall, WgmmaCall>>;

// A tile: 128 or 192 consecutive tokens of q of one sequence and head, and the keys that its queries see together.
// "Places" are tokens of q, whether in use or not; "queries" are those in use. The first loading warp computes this
// struct for all warps.
struct alignas(16) WgmmaWork {
  std::int32_t sequence, head;
  std::int32_t token, places, queries;  // token of the first place; numbers of places and of queries from the first
                                        // place to the sequence's end
  std::int32_t position;                // the number, among the sequence's keys, of the first place's own token
  std::int32_t k_token, num_keys;       // the sequence's first token of k; number of the sequence's keys
  std::int32_t first_key, last_key;     // the range of keys that any query of the tile sees
  std::int32_t all_first, all_last;     // the range of keys that every query sees
  std::int32_t split_end;               // one past the split that holds first_key
  std::int64_t out, lse;                // indices of the first place in the arrays out and lse
};

// Returns the number of a packed sequence's first tile (slot): floor(begin / kQueries) + s for sequence s. This formula
// needs no sum over earlier sequences, but some slots have no queries.
template <int kQueries>
__device__ __forceinline__ std::int64_t first_query_slot(const AttentionParams& p, std::int64_t sequence) {
  return clamp_to(p.cu_seqlens_q[sequence], 0, p.q_tokens) / kQueries + sequence;
}

// Sets the members of *of, except sequence and head, for the tile that begins at place `query` of a sequence with
// `places` places.
template <int kQueries, class Params>
__device__ __forceinline__ void see_keys(const Params& p, std::int64_t query, std::int64_t places, WgmmaWork* of) {
  WgmmaWork& work = *of;
  const AttentionSpan span(p, work.sequence);
  work.token = static_cast<std::int32_t>(span.q_first + query);
  work.places = static_cast<std::int32_t>(places - query);
  work.queries = static_cast<std::int32_t>(span.num_queries - query);
  work.position = static_cast<std::int32_t>(span.position(query));
  work.k_token = static_cast<std::int32_t>(span.k_first);
  work.num_keys = static_cast<std::int32_t>(span.num_keys);
  work.out = (row_of(p, work.sequence, work.token) * p.num_q_heads + work.head) * p.value_dim;
  work.lse = lse_index(p, work.sequence, work.token, work.head);
  const AttentionRange queries = {query, min(query + kQueries, span.num_queries)};
  if (queries.empty()) return;
  const AttentionRange keys = span.keys_of(queries);
  if (keys.empty()) return;
  work.first_key = static_cast<std::int32_t>(keys.first);
  work.last_key = static_cast<std::int32_t>(keys.last);
  work.split_end = static_cast<std::int32_t>(attention_split_end(keys.first));
  work.all_first = static_cast<std::int32_t>(span.keys_of(queries.last - 1).first);
  work.all_last = static_cast<std::int32_t>(span.keys_of(queries.first).last);
}

template <int kQueries, class Params>
__device__ __forceinline__ WgmmaWork work_of(const Params& p, const WgmmaCall& call, std::int32_t tile) {
  const std::int32_t section = tile / call.in_section, rest = tile - section * call.in_section;
  const std::int32_t heads = min(call.section, call.heads - section * call.section);
  const std::int32_t in_section = rest / heads, head = section * call.section + rest - in_section * heads;
  const std::int32_t block = call.blocks - 1 - in_section;
  const std::int32_t num_q_heads = static_cast<std::int32_t>(p.num_q_heads);
  WgmmaWork work = {};
  if (p.num_sequences == 0) return work;  // no offsets exist
  std::int64_t query = std::int64_t{block} * kQueries, places = p.q_tokens;
  if (p.cu_seqlens_q != nullptr) {
    work.head = head;
    std::int64_t low = 0, high = p.num_sequences;  // finds the last sequence that begins at or before `block`
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (first_query_slot<kQueries>(p, middle) <= block ? low : high) = middle;
    }
    work.sequence = static_cast<std::int32_t>(low);
    const std::int64_t begin = clamp_to(p.cu_seqlens_q[low], 0, p.q_tokens);
    query = (block - first_query_slot<kQueries>(p, low)) * kQueries;
    places = clamp_to(p.cu_seqlens_q[low + 1], begin, p.q_tokens) - begin;
  } else {
    work.sequence = head / num_q_heads;
    work.head = head - work.sequence * num_q_heads;
  }
  if (query < 0 || query >= places) return work;  // a slot without queries
  see_keys<kQueries>(p, query, places, &work);
  return work;
}

// Numbers the blocks of 128 queries of a mixed batch, in sequences with many queries only. Block 0 is the last block of
// the last such sequence. A warp searches 32 sequences at a time and never goes back, so calls of find() must ask for
// ascending numbers.
class LongSequences {
 public:
  __device__ __forceinline__ explicit LongSequences(const MixedParams& p)
      : end_(static_cast<std::int32_t>(p.num_sequences) + 32) {}

  // Returns whether block `number` exists. If it exists, sets *work to the tile of this block and `head`.
  __device__ __forceinline__ bool find(const MixedParams& p, std::int32_t number, std::int32_t head, WgmmaWork* work) {
    const int lane = threadIdx.x % 32;
    for (;;) {
      const unsigned behind = __ballot_sync(~0u, through_ > number - before_);
      if (behind != 0) {
        const int of = __ffs(static_cast<int>(behind)) - 1;
        const std::int64_t query = std::int64_t{before_ + __shfl_sync(~0u, through_, of) - 1 - number} * 128;
        *work = {};
        work->sequence = end_ - 1 - of;
        work->head = head;
        const AttentionRange q = attention_place(p.cu_seqlens_q, work->sequence, p.q_tokens);
        see_keys<128>(p, query, q.last - q.first, work);
        return true;
      }
      before_ += __shfl_sync(~0u, through_, 31);
      end_ -= 32;
      if (end_ <= 0) return false;
      const std::int32_t sequence = end_ - 1 - lane;
      through_ = 0;
      if (sequence >= 0) {
        const AttentionRange q = attention_place(p.cu_seqlens_q, sequence, p.q_tokens);
        const std::int64_t places = q.last - q.first;
        if (places > p.few) through_ = static_cast<std::int32_t>((places + 127) / 128);
      }
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const std::int32_t earlier = __shfl_up_sync(~0u, through_, distance);
        if (lane >= distance) through_ += earlier;
      }
    }
  }

 private:
  std::int32_t end_;          // lane i has tested sequence end_ - 1 - i
  std::int32_t before_ = 0;   // number of blocks of the sequences from end_ on
  std::int32_t through_ = 0;  // number of blocks from the lane's sequence up to sequence end_ - 1
};
struct NoSequences {
  template <class Params>
  __device__ __forceinline__ explicit NoSequences(const Params&) {}
};

// Shared memory and barriers of a block of threads.
template <class Tile>
struct WgmmaShared {
  std::uint32_t base;
  __device__ __forceinline__ std::uint32_t queries() const { return base; }
  __device__ __forceinline__ std::uint32_t keys(int stage) const {
    return base + Tile::kKeysAt + stage * Tile::kTileBytes;
  }
  __device__ __forceinline__ std::uint32_t values(int stage) const {
    return base + Tile::kValuesAt + stage * Tile::kValueBytes;
  }
  __device__ __forceinline__ std::uint32_t barrier(int i) const { return base + Tile::kBarriersAt + i * 8; }
  __device__ __forceinline__ std::uint32_t queries_full() const { return barrier(0); }
  __device__ __forceinline__ std::uint32_t queries_empty() const { return barrier(1); }
  __device__ __forceinline__ std::uint32_t keys_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ std::uint32_t keys_empty(int stage) const { return barrier(4 + stage); }
  __device__ __forceinline__ std::uint32_t values_full(int stage) const { return barrier(6 + stage); }
  __device__ __forceinline__ std::uint32_t values_empty(int stage) const { return barrier(8 + stage); }
  __device__ __forceinline__ std::uint32_t tile_full(int slot) const { return barrier(10 + slot); }
  __device__ __forceinline__ std::uint32_t tile_empty(int slot) const { return barrier(12 + slot); }
  static constexpr int kWorkAt = Tile::kBarriersAt + 14 * 8;  // work of two consecutive tiles
  static constexpr int kRowTotalsAt = kWorkAt + 2 * Tile::kWorkBytes;
  static_assert(sizeof(WgmmaWork) == Tile::kWorkBytes);

  __device__ __forceinline__ void init() const {
    mbarrier_init(queries_full(), 1);
    mbarrier_init(queries_empty(), Tile::kWarpgroups);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(keys_full(i), 1);
      mbarrier_init(keys_empty(i), Tile::kWarpgroups);
      mbarrier_init(values_full(i), 1);
      mbarrier_init(values_empty(i), Tile::kWarpgroups);
      mbarrier_init(tile_full(i), 1);
      mbarrier_init(tile_empty(i), Tile::kRowThreads + 1);  // the multiplying threads, and a lane that loads V
    }
    mbarrier_init_fence();
  }
};

template <int kBoxes, int kBoxBytes>
__device__ __forceinline__ void load_tile(std::uint32_t to, const CUtensorMap* map, int head, int token, int sequence,
                                          std::uint32_t barrier) {
  mbarrier_arrive_expect(barrier, kBoxes * kBoxBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    load_head_box(to + box * kBoxBytes, map, box * 64, head, token, sequence, barrier);
  }
}

// If keys lie in pages, each lane of a loading warp loads one box of a block of keys. page_of_lane() returns the number
// of the box's page, kNoBox or kLostPage.
constexpr std::int32_t kNoBox = -2, kLostPage = -1;  // the box lies past the last key; its page is invalid
template <class Tile>
__device__ __forceinline__ std::int32_t page_of_lane(const AttentionParams& p, const std::int32_t* table,
                                                     const PageBoxes& pages, int num_keys, int block) {
  const int row = threadIdx.x % 32 * pages.box, key = block + row;
  if (pages.box == 0 || row >= Tile::kKeys || key >= num_keys) return kNoBox;
  const std::int32_t page = table[key >> pages.shift];
  return page >= 0 && page < p.num_pages ? page : kLostPage;
}
// Loads a block of K or V; each lane passes the page of its box. Keys of a page that does not exist become NaN, and
// their values +0. Rows past the last key are not written. All lanes of a warp call this function.
template <class T, class Tile, bool kIsKey>
__device__ __forceinline__ void load_pages(std::uint32_t to, const CUtensorMap* map, const PageBoxes& pages,
                                           std::int32_t page, int kv_head, int block, std::uint32_t barrier) {
  constexpr int kBoxes = kIsKey ? Tile::kBoxes : Tile::kValueBoxes;
  const int lane = threadIdx.x % 32;
  for (unsigned lost = __ballot_sync(~0u, page == kLostPage); lost != 0; lost &= lost - 1) {
    const int first = (__ffs(static_cast<int>(lost)) - 1) * pages.box;
    for (int i = lane; i < kBoxes * pages.box * 8; i += 32) {  // 16 bytes each
      const int in_box = i % (pages.box * 8);
      store_shared_16(to + i / (pages.box * 8) * Tile::kBoxBytes + first * 128 + in_box * 16,
                      AttentionGpu::fill_vec8<T>(kIsKey).v[0].v);
    }
    fence_for_tma();
  }
  const bool loads = page >= 0;
  const int boxes = __popc(__ballot_sync(~0u, loads));
  if (lane == 0) mbarrier_arrive_expect(barrier, boxes * pages.box * kBoxes * 128);
  __syncwarp();
  if (loads) {
    const int row = lane * pages.box, token = (block + row) & ((1 << pages.shift) - 1);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      load_head_box(to + box * Tile::kBoxBytes + row * 128, map, box * 64, kv_head, token, page, barrier);
    }
  }
  __syncwarp();
}

// For trees: a run is keys of a path whose tokens are consecutive. If a block's keys lie in several runs, the block is
// loaded in parts of eight keys. In lane i < 16, part_of_lane() returns the first token of part i, kNoPart or
// kMixedPart.
constexpr int kPartKeys = 8;
// kNoPart: the part lies past the last key. kMixedPart: the part lies in several runs, or has a key without a token.
constexpr std::int32_t kNoPart = -2, kMixedPart = -1;
template <class Tile, class Params>
__device__ __forceinline__ std::int32_t part_of_lane(const Params& p, const WgmmaWork& work, int block) {
  const int row = threadIdx.x % 32 * kPartKeys, key = block + row;
  if (row >= Tile::kKeys || key >= work.num_keys) return kNoPart;
  const PathRun run = path_run(p, work.sequence, key);
  return run.holds(key, min(key + kPartKeys, work.num_keys)) ? run.token + key - run.first : kMixedPart;
}
// Loads a block of K or V; each lane passes the first token of its part. A key without a token becomes NaN, and its
// value +0. Rows past the last key may hold anything. All lanes of a warp call this function.
template <class T, class Tile, bool kIsKey, class Params>
__device__ __forceinline__ void load_parts(const Params& p, std::uint32_t to, const CUtensorMap* map, std::int32_t part,
                                           const WgmmaWork& work, int kv_head, int block, std::uint32_t barrier) {
  const int lane = threadIdx.x % 32;
  const AttentionHeads& a = kIsKey ? p.k : p.v;
  const auto* head = in_memory(static_cast<const typename T::Storage*>(a.data)) + kv_head * a.head_stride;
#pragma unroll 1
  for (unsigned mixed = __ballot_sync(~0u, part == kMixedPart); mixed != 0; mixed &= mixed - 1) {
    const int first = (__ffs(static_cast<int>(mixed)) - 1) * kPartKeys, key = block + first + lane;
    std::int32_t token = kNoPart;  // token of the part's key number `lane`
    if (lane < kPartKeys && key < work.num_keys) {
      token = static_cast<std::int32_t>(AttentionPath(p, work.sequence).token(p, key));
    }
    constexpr int kChunks = Tile::kColumns / 8;
#pragma unroll 1
    for (int i = lane; i < kPartKeys * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const std::int32_t from = __shfl_sync(~0u, token, row);
      if (from == kNoPart) continue;
      const auto x = from < 0 ? AttentionGpu::fill_vec8<T>(kIsKey)
                              : AttentionGpu::load_vec8<T>(head + from * a.token_stride + chunk * 8, true);
      store_shared_16(to + chunk / 8 * Tile::kBoxBytes + (first + row) * 128 + ((chunk ^ row) & 7) * 16, x.v[0].v);
    }
    fence_for_tma();
    __syncwarp();
  }
  const bool loads = part >= 0;
  const int parts = __popc(__ballot_sync(~0u, loads));
  if (lane == 0) mbarrier_arrive_expect(barrier, parts * kPartKeys * Tile::kColumns * 2);
  __syncwarp();
  if (loads) {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      load_head_box(to + box * Tile::kBoxBytes + lane * kPartKeys * 128, map, box * 64, kv_head, part, 0, barrier);
    }
  }
  __syncwarp();
}

// If kIsKey, loads a tile's blocks of K, and the tile's queries after the first block. Otherwise loads the tile's
// blocks of V. All lanes of a warp call this function.
template <class T, class Tile, bool kIsKey, class Params>
__device__ __forceinline__ void load_blocks(const Params& p, const WgmmaCallOf<Params>& call,
                                            const WgmmaShared<Tile>& shared, const WgmmaWork& work, RingPosition& at,
                                            int queries_phase) {
  constexpr bool kBranches = kMayBranch<Params>;
  const int sequence_q = p.cu_seqlens_q != nullptr ? 0 : work.sequence;
  const int sequence_k = p.cu_seqlens_k != nullptr ? 0 : work.sequence;
  const int kv_head = work.head / static_cast<int>(p.num_q_heads / p.num_kv_heads);
  const int first_block = work.first_key / Tile::kKeys * Tile::kKeys;
  const std::int32_t* table = p.block_table + work.sequence * p.table_stride;
  const CUtensorMap* const map = kIsKey ? &call.k : &call.v;
  std::int32_t next_page = kNoBox;
  if constexpr (!kBranches) next_page = page_of_lane<Tile>(p, table, call.pages, work.num_keys, first_block);
  PathRun run = {0, 0, 0};
#pragma unroll 1
  for (int block = first_block; block < work.last_key; block += Tile::kKeys) {
    const std::int32_t page = next_page;
    std::int32_t token = 0, part = kNoPart;
    bool whole = true;  // whether the tokens of the block's keys are consecutive
    if constexpr (kBranches) {
      const int end = min(block + Tile::kKeys, work.num_keys);
      if (!run.holds(block, end)) run = path_run(p, work.sequence, block);
      whole = run.holds(block, end);
      token = run.token + block - run.first;
      if (!whole) part = part_of_lane<Tile>(p, work, block);
    } else {
      next_page = page_of_lane<Tile>(p, table, call.pages, work.num_keys, block + Tile::kKeys);
    }
    const std::uint32_t to = kIsKey ? shared.keys(at.stage) : shared.values(at.stage);
    const std::uint32_t full = kIsKey ? shared.keys_full(at.stage) : shared.values_full(at.stage);
    mbarrier_wait_block(kIsKey ? shared.keys_empty(at.stage) : shared.values_empty(at.stage), at.phase ^ 1);
    if (kBranches && !whole) {
      if constexpr (kBranches) {
        load_parts<T, Tile, kIsKey>(p, to, kIsKey ? &call.k_parts : &call.v_parts, part, work, kv_head, block, full);
      }
    } else if (!kBranches && call.pages.box > 0) {
      load_pages<T, Tile, kIsKey>(to, map, call.pages, page, kv_head, block, full);
    } else if (elect_one()) {
      constexpr int kBoxes = kIsKey ? Tile::kBoxes : Tile::kValueBoxes;
      load_tile<kBoxes, Tile::kBoxBytes>(to, map, kv_head, kBranches ? token : work.k_token + block, sequence_k, full);
    }
    if (kIsKey && block == first_block) {
      mbarrier_wait_block(shared.queries_empty(), queries_phase ^ 1);
      if (elect_one()) {
        load_tile<Tile::kBoxes, Tile::kQueryBoxBytes>(shared.queries(), &call.q, work.head, work.token, sequence_q,
                                                      shared.queries_full());
      }
    }
    at.advance(Tile::kStages);
  }
}

// Prefetches 32 offsets of each list of packed sequences, all at once. Without the prefetch, the search for a tile's
// sequence would wait for one offset after another.
template <class Params>
__device__ __forceinline__ void prefetch_offsets(const Params& p) {
  const std::int64_t at = threadIdx.x % 32 * p.num_sequences / 31;
  for (const std::int32_t* list : {p.cu_seqlens_q, p.cu_seqlens_k}) {
    if (list != nullptr) asm volatile("prefetch.global.L1 [%0];" ::"l"(list + at));
  }
}

// The first loading warp: takes tiles, announces each tile to the other warps, and loads its queries and keys.
template <class T, class Tile, class Params>
__device__ __forceinline__ void load_tiles(const Params& p, const WgmmaCallOf<Params>& call,
                                           const WgmmaShared<Tile>& shared, WgmmaWork* slots) {
  constexpr bool kKeepsWork = !kMayBranch<Params> && Tile::kOuterFours == 0;
  RingPosition at, slot;
  int queries_phase = 0;
  constexpr bool kMixes = kMayMix<Params>;
  static_assert(!kMixes || Tile::kQueries == 128);
  std::conditional_t<kMixes, LongSequences, NoSequences> sequences(p);
  std::int32_t tile = blockIdx.x;
  if constexpr (kMixes) tile += call.first_block;
  prefetch_offsets(p);
  for (;;) {
    bool more = tile < call.tiles;
    WgmmaWork found = {};
    found.places = -1;
    if constexpr (kMixes) {
      const std::int32_t block = tile / call.heads;
      more = sequences.find(p, block, tile - block * call.heads, &found);
    } else {
      if (more) found = work_of<Tile::kQueries>(p, call, tile);
    }
    std::uint32_t taken = 0;  // the code below hides the atomic's latency
    if (threadIdx.x == 0 && more && call.counter != nullptr) taken = atomicAdd(call.counter, 1u);
    const int stage = kKeepsWork ? 0 : slot.stage;
    if (!more || found.places > 0) {
      mbarrier_wait_block(shared.tile_empty(slot.stage), slot.phase ^ 1);
      if (threadIdx.x == 0) {
        slots[slot.stage] = found;
        mbarrier_arrive(shared.tile_full(slot.stage));
      }
      slot.advance(2);
    }
    if (!more) return;
    if constexpr (!kKeepsWork) __syncwarp();
    if (found.last_key > found.first_key) {
      // Kernels for trees, or with totals in L2, read the tile's description from shared memory, since registers are
      // scarce.
      load_blocks<T, Tile, true>(p, call, shared, kKeepsWork ? found : slots[stage], at, queries_phase);
      queries_phase ^= 1;
    }
    taken = __shfl_sync(0xffffffffu, taken, 0);
    if constexpr (kMixes) {
      tile = call.counter != nullptr ? static_cast<std::int32_t>(call.all_blocks + taken) : tile + call.all_blocks;
      continue;
    }
    tile = call.counter != nullptr ? static_cast<std::int32_t>(gridDim.x + taken) : call.tiles;
  }
}

// The second loading warp: loads the values of each tile. Each page needs a separate box, and one warp would be too
// slow for the boxes of both K and V.
template <class T, class Tile, class Params>
__device__ __forceinline__ void load_values(const Params& p, const WgmmaCallOf<Params>& call,
                                            const WgmmaShared<Tile>& shared, const WgmmaWork* slots) {
  RingPosition at, slot;
  for (;;) {
    mbarrier_wait_block(shared.tile_full(slot.stage), slot.phase);
    const WgmmaWork& work = slots[slot.stage];
    if (work.places < 0) return;
    if (work.last_key > work.first_key) load_blocks<T, Tile, false>(p, call, shared, work, at, 0);
    __syncwarp();
    if (elect_one()) mbarrier_arrive(shared.tile_empty(slot.stage));
    slot.advance(2);
  }
}

// Clears `out` and `lse` of tokens of packed q that belong to no sequence: tokens before the first offset or after the
// last.
template <class T, class Tile>
__device__ __forceinline__ void clear_outside(const AttentionParams& p) {
  const std::int64_t first = clamp_to(p.cu_seqlens_q[0], 0, p.q_tokens);
  const std::int64_t last = clamp_to(p.cu_seqlens_q[p.num_sequences], first, p.q_tokens);
  const std::int64_t outside = first + p.q_tokens - last, row_chunks = p.num_q_heads * p.value_dim / 8;
  const std::int64_t begin = blockIdx.x * std::int64_t{64} + threadIdx.x - 64, step = gridDim.x * std::int64_t{64};
  for (std::int64_t i = begin; i < outside * row_chunks; i += step) {
    const std::int64_t token = i / row_chunks < first ? i / row_chunks : last + i / row_chunks - first;
    static_cast<uint4*>(p.out)[token * row_chunks + i % row_chunks] = make_uint4(0, 0, 0, 0);
  }
  if (p.lse == nullptr) return;
  for (std::int64_t i = begin; i < outside * p.num_q_heads; i += step) {
    const std::int64_t at = i / p.num_q_heads, token = at < first ? at : last + at - first;
    p.lse[i % p.num_q_heads * p.q_tokens + token] = -infinity();
  }
}

// For mixed batches with two launches of tiles: a warp of the first launch signals that it has stored its results.
__device__ __forceinline__ void say_done(const WgmmaMixedCall& call) {
  if (call.done == nullptr || call.first_block > 0) return;
  __threadfence();
  __syncwarp();
  if (threadIdx.x % 32 == 0) end_turn(call.done);
}
// Makes the last launch of tiles end after the previous kernel (the splits), and after the first launch of tiles. Both
// launches take tiles from one counter, so they end at about the same time, and the second wait is short.
__device__ __forceinline__ void wait_for_launches(const WgmmaMixedCall& call) {
  wait_for_previous_kernel();
  if (call.done != nullptr) wait_for_turn(call.done, call.first_block * WgmmaMixedCall::kStoringWarps);
}

}  // namespace
}  // namespace rlk::cuda
