// The jobs of attention's wgmma backward: blocks of keys, and the tiles of queries that see each block. One warp of a
// block of threads takes jobs and loads their data. Two other warps add dq to its sums in memory, in descending order
// of the blocks of keys.
#pragma once

#include "../../common/mbarrier_sm90.cuh"
#include "../../common/tma_sm90.cuh"
#include "../kernels.h"
#include "../path_runs.cuh"

namespace rlk::cuda {

// The data that mma.sync needs to repeat a call that wgmma computed. The members are copies of members of GradientCall.
struct GradientTiles {
  std::int32_t slots, of_sequence, slack;
  const float* scalars;
  const std::uint32_t* has_nan;
};

namespace sm90 {
// Computes the gradients of a call once more, by mma.sync, if *tiles.has_nan is not 0. `paths`: the table of paths of a
// tree, or null.
void attention_repeat_backward(const AttentionBackwardParams& p, const std::uint32_t* paths, const GradientTiles& tiles,
                               cudaStream_t stream);
}  // namespace sm90

namespace {  // each architecture compiles its own copy of this code

// A tile of products: 64 queries of one head by 128 keys. kIsPadded: whether heads may have fewer columns than the
// tile.
template <int kColumns_, bool kIsPadded_ = false>
struct GradientTile {
  static constexpr int kColumns = kColumns_, kQueries = 64, kKeys = 128, kStages = 2;
  static constexpr bool kIsPadded = kIsPadded_;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kBoxes = (kColumns + 63) / 64, kValueColumns = kColumns, kValueBoxes = kBoxes;
  static constexpr int kQueryBox = kQueries * 128, kKeyBox = kKeys * 128;
  static constexpr int kQueryBytes = kBoxes * kQueryBox, kKeyBytes = kBoxes * kKeyBox;
  static constexpr int kDoutBytes = kQueryBytes, kValueBytes = kKeyBytes;
  static constexpr int kSums = kColumns / 2;                  // dk takes this many sums per thread, and so does dv
  static constexpr int kQueryColumns = kBoxes * 32;           // columns of dq that a warpgroup computes
  static constexpr int kTileBytes = kQueries * kColumns * 4;  // a tile of dq in fp32
  static constexpr int kScalarBytes = kQueries * 4;           // u = lse * log2(e), or delta, of a tile
  static constexpr int kValuesAt = kKeyBytes, kQueriesAt = 2 * kKeyBytes, kDoutAt = kQueriesAt + kStages * kQueryBytes;
  static constexpr int kScoresAt = kDoutAt + kStages * kQueryBytes;  // ds of two tiles, used alternately
  static constexpr int kDqAt = kScoresAt + 2 * kKeyBox, kScalarsAt = kDqAt + kStages * kTileBytes;
  static constexpr int kBarriersAt = kScalarsAt + kStages * 2 * kScalarBytes, kBarriers = 18;
  static constexpr int kWorkAt = kBarriersAt + kBarriers * 8;
  static constexpr int kBytes = kWorkAt + 2 * 64 + 1024;  // 1024 bytes align the start
  // Layout of a tile of dq: first the columns of warpgroup 0 (`half` 0), then the columns of warpgroup 1, up to the
  // head's last column. A warpgroup stores its columns in kFours steps, with four sums per thread in each step.
  // four_at: index of the sums of step `four`, in units of 128 float4. column_of: first column of these sums.
  static constexpr int kFours = kQueryColumns / 8;
  static __device__ __forceinline__ int four_at(int half, int four) { return half * kFours + four; }
  static __device__ __forceinline__ int column_of(int half, int four) { return half * kQueryColumns + four * 8; }
  static __device__ __forceinline__ int columns(const AttentionInput& p) {
    return kIsPadded ? static_cast<int>(p.head_dim) : kColumns;
  }
};

// The data of a call. A query's position is the number of its own token among the keys of its sequence. Tiles of
// queries begin at positions that are multiples of 64. All tiles of all sequences are numbered; these numbers are
// called slots, and some slots may have no tile.
struct GradientCall {
  CUtensorMap q, dout, k, v;
  std::int32_t section;  // this many key heads of a sequence alternate in the order of jobs
  // jobs: number of jobs. key_blocks: blocks of keys per sequence or, for packed keys, slots for all sequences.
  std::int32_t jobs, key_blocks;
  std::int32_t block_jobs;  // number of blocks of keys of all sequences and key heads
  // Query heads per job. The query heads of a key head form one or more parts. A block of keys has one job for each
  // part, and the job of the next part continues the sums of dk and dv.
  std::int32_t part_heads;
  std::int32_t slots, of_sequence;  // number of slots; slots per sequence if q is not packed
  std::int32_t slack;               // a packed sequence gets up to this many slots more than its queries fill
  struct GradientWork* works;       // the description of each job
  std::uint32_t* counter;           // number of jobs taken, without the first job of each thread block
  std::uint32_t* unordered;         // not 0 if offsets contradict the arrays; no block then waits for its turn
  std::uint32_t* turns;             // [heads, slots]: number of blocks of keys that have added dq to the tile's sum
  float* scalars;                   // [heads, slots, 2, 64]: u = lse * log2(e), and delta. u is +Inf for rows without a
                                    // query in use
  float* sums;                      // [heads, slots, 64 * the head's columns]: sums of dq
  std::uint32_t* kept_turns;        // [block_jobs]: number of warps that have stored dk and dv of the block, summed
                                    // over parts
  float* kept;                      // [block_jobs, keys * (columns of k + columns of v)]: sums of dk and dv between two
                                    // parts
  // The next three members serve heads of more than 128 columns, for which a separate kernel computes dq. Such calls do
  // not use `turns`, `sums` and `kept`.
  std::int32_t query_jobs;        // jobs of the kernel for dq; 0 with at most 128 columns
  struct QueryWork* query_works;  // [query_jobs / heads]
  std::uint32_t* query_counter;
  std::int64_t counter_words;  // number of words, from `counter` on, that must be cleared before the counters are used
  std::uint32_t* has_nan;      // not 0 if a query's dq is NaN or, in a call without dq, if a key's dk is NaN
};

// A key in a block of keys of a path of a tree. `token` is -1 if the key has no token. `turn` is twice the number of
// earlier segments that add to the token's dk and dv, plus 1 if no later segment adds to them.
struct GradientRow {
  std::int32_t token;
  std::uint32_t turn;
};
static_assert(sizeof(GradientRow) == GradientLayout::kRowBytes);
// In a call with trees, each segment of a tree counts as a sequence, and its keys are the keys of its path from the
// root. In such a call, `section` is the number of multiprocessors.
struct GradientTreeCall : GradientCall {
  std::int32_t* jobs_of_paths;
  std::int32_t* firsts;      // [segments + 1]: number of blocks of keys on the paths of all earlier segments
  GradientRow* rows;         // [blocks of keys, 128]
  std::uint32_t* row_turns;  // [k_tokens, key heads]: number of segments that have added to the row
  float* row_sums;           // [k_tokens, key heads, 2, columns]: sums of dk and dv, until the last segment has added
};
template <class Params>
using GradientCallOf = std::conditional_t<kMayBranch<Params>, GradientTreeCall, GradientCall>;
template <class Params>
__device__ __forceinline__ std::int32_t jobs_of(const GradientCallOf<Params>& call) {
  if constexpr (kMayBranch<Params>) return *call.jobs_of_paths;
  return call.jobs;
}

// The range of positions of those queries of a sequence that see keys, and the sequence's first tile.
struct GradientQueries {
  std::int32_t first, last;  // a query's position is the key number of the query's own token
  std::int32_t base;         // position of tile 0
  std::int32_t slot;         // slot of tile 0
  std::int32_t past;         // position of query 0
  __device__ __forceinline__ std::int32_t tiles() const { return first < last ? (last - base + 63) / 64 : 0; }
};
template <class Call>  // GradientCall or GradientTiles
__device__ __forceinline__ GradientQueries gradient_queries(const AttentionBackwardParams& p, const Call& call,
                                                            const AttentionSpan& span) {
  GradientQueries q;
  q.past = static_cast<std::int32_t>(span.position(0));
  q.first = p.causal ? max(q.past, 0) : q.past;
  q.last = span.num_keys > 0 ? static_cast<std::int32_t>(span.num_keys) : q.first;
  q.base = q.past & ~63;
  q.slot = p.cu_seqlens_q != nullptr ? static_cast<std::int32_t>(span.q_first / 64 + call.slack * span.sequence)
                                     : static_cast<std::int32_t>(call.of_sequence * span.sequence);
  return q;
}
// Returns the first of the blocks of kKeys keys that add dq to the tile at position `tile`. This block has the highest
// keys.
template <int kKeys>
__device__ __forceinline__ std::int32_t first_contributor(bool causal, std::int32_t num_keys, std::int32_t tile) {
  return (causal ? min(tile + 63, num_keys - 1) : num_keys - 1) / kKeys;
}
// The number of blocks of kKeys keys that add dq to the tile at position `tile`. The tile must have queries.
template <int kKeys>
__device__ __forceinline__ std::uint32_t contributors(const AttentionBackwardParams& p, const GradientQueries& q,
                                                      std::int32_t tile) {
  std::int64_t first_key = 0;
  if (p.window_size > 0) first_key = max(max(tile, q.first) - p.window_size + 1, std::int64_t{0});
  return first_contributor<kKeys>(p.causal, q.last, tile) - static_cast<std::uint32_t>(first_key / kKeys) + 1;
}
// Returns the sequence of a slot: the last sequence s with first(s) <= slot. first(s) is the first slot of s, and
// ascends with s.
template <class First>
__device__ __forceinline__ std::int64_t sequence_of_slot(std::int64_t num_sequences, std::int64_t slot,
                                                         const First& first) {
  std::int64_t low = 0, high = num_sequences;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first(middle) <= slot ? low : high) = middle;
  }
  return low;
}

// Returns how many key heads of a sequence alternate in the order of jobs. The number is so large that the blocks of
// keys of one head that run at the same time are about two tiles of queries apart.
template <class Params>
__device__ __forceinline__ std::int64_t section_size(const Params& p, const GradientCallOf<Params>& call,
                                                     std::int64_t sequence, std::int64_t blocks) {
  if constexpr (!kMayBranch<Params>) return call.section;
  const AttentionRange own = attention_place(p.cu_seqlens_q, sequence, p.q_tokens);
  const std::int64_t room = max((own.last - own.first) / 64 * (p.num_q_heads / p.num_kv_heads) / 2, std::int64_t{1});
  return blocks <= room ? 1 : clamp_to(call.section / room, 1, p.num_kv_heads);
}

// A job: a block of keys of one sequence and key head, and the tiles of queries that see any of these keys (by the
// masks).
struct alignas(16) GradientWork {
  std::int32_t sequence, kv_head;  // sequence < 0: there are no more jobs
  std::int32_t key, num_keys;      // number of the first key; number of keys of the sequence
  std::int32_t k_token;            // token of the first key; in trees -1 if the keys' tokens are not consecutive
  std::int32_t q_token;            // token of position 0
  std::int32_t first, last;        // range of positions of the sequence's queries that see keys
  std::int32_t tile, last_tile;    // range of positions of the job's tiles
  std::int32_t slot;               // slot of the first tile
  // Index of the block of keys among the `block_jobs` blocks. In a tree, GradientTreeCall::rows describes the block's
  // keys at this index.
  std::int32_t block;
  std::int32_t q_head, part;  // first query head of the job; number of the job's part
};
static_assert(sizeof(GradientWork) == GradientLayout::kWorkBytes);

// A pair of tiles of queries of one sequence, and the blocks of keys that each of the two tiles sees.
struct alignas(16) QueryWork {
  std::int32_t sequence, head;     // sequence < 0: the pair has no queries, or there are no more jobs
  std::int32_t k_token, num_keys;  // token of the first key; number of keys of the sequence
  std::int32_t q_token;            // token of position 0
  std::int32_t first, last;        // range of positions of the sequence's queries that see keys
  std::int32_t tile, slot;         // position and slot of the first tile
  std::int32_t high[2], low[2];    // for each tile, the last and the first block of keys that its queries see; -1 and
                                   // kNone without queries
  static constexpr std::int32_t kNone = 0x7fffffff;
  __device__ __forceinline__ std::int32_t first_block() const { return max(high[0], high[1]); }
  __device__ __forceinline__ std::int32_t last_block() const { return min(low[0], low[1]); }
};
static_assert(sizeof(QueryWork) == GradientLayout::kWorkBytes);

template <int kKeys>
__device__ __forceinline__ QueryWork query_work(const AttentionBackwardParams& p, const GradientCall& call,
                                                std::int32_t pair) {
  QueryWork work = {};
  work.sequence = -1;
  if (p.num_sequences == 0) return work;
  // first(s) is the first pair of sequence s; GradientLayout counts pairs in the same way.
  const std::int64_t of_sequence = (call.of_sequence + 1) / 2;
  const auto first = [&](std::int64_t s) { return clamp_to(p.cu_seqlens_q[s], 0, p.q_tokens) / 128 + 2 * s; };
  const bool packed = p.cu_seqlens_q != nullptr;
  const std::int64_t sequence = packed ? sequence_of_slot(p.num_sequences, pair, first) : pair / of_sequence;
  const auto number = static_cast<std::int32_t>(2 * (pair - (packed ? first(sequence) : sequence * of_sequence)));
  const AttentionSpan span(p, sequence);
  const GradientQueries q = gradient_queries(p, call, span);
  work.head = 0;
  work.k_token = static_cast<std::int32_t>(span.k_first);
  work.num_keys = static_cast<std::int32_t>(span.num_keys);
  work.q_token = static_cast<std::int32_t>(span.q_first) - q.past;
  work.first = q.first;
  work.last = q.last;
  work.tile = q.base + 64 * number;
  work.slot = q.slot + number;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::int32_t tile = work.tile + 64 * i;
    const bool exists = number >= 0 && number + i < q.tiles() && tile + 64 > q.first;
    work.high[i] = exists ? first_contributor<kKeys>(p.causal, q.last, tile) : -1;
    work.low[i] =
        exists ? work.high[i] + 1 - static_cast<std::int32_t>(contributors<kKeys>(p, q, tile)) : QueryWork::kNone;
    if (exists) work.sequence = static_cast<std::int32_t>(sequence);
  }
  return work;
}

template <int kKeys, class Params>
__device__ __forceinline__ GradientWork gradient_work(const Params& p, const GradientCallOf<Params>& call,
                                                      std::int32_t job_of_call) {
  const auto heads = static_cast<std::int32_t>(p.num_kv_heads);
  GradientWork work = {};
  // All jobs of a part come before the jobs of the next part. So when a job begins, the previous job of the same block
  // of keys has usually ended, except in small calls.
  std::int32_t job = job_of_call;
  if constexpr (!kMayBranch<Params>) {
    work.part = job_of_call / call.block_jobs;
    work.block = job = job_of_call - work.part * call.block_jobs;
  }
  // Jobs are numbered by sequence, and within a sequence by a few key heads at a time. So L2 still holds the operands
  // that several blocks of keys share. Blocks of higher keys come first, since they add their dq first.
  const auto first = [&](std::int64_t s) -> std::int64_t {
    if constexpr (kMayBranch<Params>) return call.firsts[s];
    if (p.cu_seqlens_k == nullptr) return s * call.key_blocks;
    return s < p.num_sequences ? clamp_to(p.cu_seqlens_k[s], 0, p.k_tokens) / kKeys + s : call.block_jobs / heads;
  };
  const std::int64_t sequence = sequence_of_slot(p.num_sequences, job / heads, first);
  const std::int64_t blocks = first(sequence + 1) - first(sequence), within = job - heads * first(sequence);
  if (blocks <= 0 || within < 0) return work;
  const std::int64_t size = section_size(p, call, sequence, blocks), of_section = size * blocks;
  const std::int64_t section = within / of_section, in_section = min(size, heads - section * size);
  if (in_section <= 0) return work;
  work.kv_head = static_cast<std::int32_t>(section * size + within % of_section % in_section);
  // If a separate kernel computes dq, blocks of lower keys come first, since most queries see them.
  const std::int64_t place = within % of_section / in_section, block = call.query_jobs > 0 ? place : blocks - 1 - place;
  const AttentionSpan span(p, sequence);
  work.sequence = static_cast<std::int32_t>(sequence);
  work.key = static_cast<std::int32_t>(block * kKeys);
  work.num_keys = static_cast<std::int32_t>(span.num_keys);
  const auto group = static_cast<std::int32_t>(p.num_q_heads / heads);
  work.q_head = work.kv_head * group + work.part * call.part_heads;
  if (work.kv_head >= heads || work.key >= work.num_keys) {
    work.num_keys = 0;
    return work;
  }
  const GradientQueries q = gradient_queries(p, call, span);
  if constexpr (kMayBranch<Params>) {
    work.block = static_cast<std::int32_t>(first(sequence) + block);
    const PathRun run = path_run(p, sequence, work.key);
    const bool follow = run.holds(work.key, min(work.key + kKeys, work.num_keys));
    work.k_token = follow ? run.token + work.key - run.first : -1;
  } else {
    work.k_token = static_cast<std::int32_t>(span.k_first) + work.key;
  }
  work.q_token = static_cast<std::int32_t>(span.q_first) - q.past;
  work.first = q.first;
  work.last = q.last;
  if (q.first >= q.last) return work;
  const std::int32_t last_key = min(work.key + kKeys - 1, work.num_keys - 1);
  const std::int32_t first_seeing = p.causal ? max(q.first, work.key) : q.first;
  std::int64_t last_seeing = q.last - 1;
  if (p.window_size > 0) last_seeing = min(last_seeing, last_key + p.window_size - 1);
  if (first_seeing > last_seeing) return work;
  const std::int32_t tile = (first_seeing - q.base) / 64;
  work.tile = q.base + 64 * tile;
  work.last_tile = q.base + 64 * (static_cast<std::int32_t>(last_seeing - q.base) / 64 + 1);
  work.slot = q.slot + tile;
  return work;
}

// Shared memory and barriers of a block of threads.
template <class Tile>
struct GradientShared {
  std::uint32_t base;
  __device__ __forceinline__ std::uint32_t keys() const { return base; }
  __device__ __forceinline__ std::uint32_t values() const { return base + Tile::kValuesAt; }
  __device__ __forceinline__ std::uint32_t queries(int stage) const {
    return base + Tile::kQueriesAt + stage * Tile::kQueryBytes;
  }
  __device__ __forceinline__ std::uint32_t dout(int stage) const {
    return base + Tile::kDoutAt + stage * Tile::kDoutBytes;
  }
  __device__ __forceinline__ std::uint32_t ds(int parity) const {
    return base + Tile::kScoresAt + parity * Tile::kKeyBox;
  }
  __device__ __forceinline__ std::uint32_t dq(int parity) const {
    return base + Tile::kDqAt + parity * Tile::kTileBytes;
  }
  __device__ __forceinline__ std::uint32_t u(int stage) const {
    return base + Tile::kScalarsAt + stage * 2 * Tile::kScalarBytes;
  }
  __device__ __forceinline__ std::uint32_t delta(int stage) const { return u(stage) + Tile::kScalarBytes; }
  __device__ __forceinline__ std::uint32_t barrier(int i) const { return base + Tile::kBarriersAt + i * 8; }
  __device__ __forceinline__ std::uint32_t keys_full() const { return barrier(0); }
  __device__ __forceinline__ std::uint32_t keys_empty() const { return barrier(1); }
  __device__ __forceinline__ std::uint32_t queries_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ std::uint32_t queries_empty(int stage) const { return barrier(4 + stage); }
  __device__ __forceinline__ std::uint32_t dout_full(int stage) const { return barrier(6 + stage); }
  __device__ __forceinline__ std::uint32_t dout_empty(int stage) const { return barrier(8 + stage); }
  __device__ __forceinline__ std::uint32_t dq_full(int parity) const { return barrier(10 + parity); }
  __device__ __forceinline__ std::uint32_t dq_empty(int parity) const { return barrier(12 + parity); }
  __device__ __forceinline__ std::uint32_t work_full(int slot) const { return barrier(14 + slot); }
  __device__ __forceinline__ std::uint32_t work_empty(int slot) const { return barrier(16 + slot); }

  __device__ __forceinline__ void init() const {
    mbarrier_init(keys_full(), 1);
    mbarrier_init(keys_empty(), 8);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(queries_full(i), 1);
      mbarrier_init(queries_empty(i), 8);  // eight warps read the queries
      mbarrier_init(dout_full(i), 1);
      mbarrier_init(dout_empty(i), 8);
      mbarrier_init(work_full(i), 1);
      mbarrier_init(dq_full(i), 256);
      mbarrier_init(dq_empty(i), 1);
      // All 256 threads of both warpgroups arrive, and the two lanes that add dq arrive, too.
      mbarrier_init(work_empty(i), 256 + (Tile::kColumns > 128 ? 0 : 2));
    }
    mbarrier_init_fence();
  }
};

// The loading warp: takes jobs, announces each job to the other warps, and loads its keys, values, queries and dout.
template <class Tile, class Params>
__device__ __forceinline__ void load_gradient_work(const Params& p, const GradientCallOf<Params>& call,
                                                   const GradientShared<Tile>& shared, GradientWork* works) {
  RingPosition at, slot;
  int keys_phase = 0;
  const auto load = [&](auto boxes, std::uint32_t to, int box_bytes, const CUtensorMap* map, int head, int token,
                        int sequence, std::uint32_t barrier) {
#pragma unroll
    for (int box = 0; box < decltype(boxes)::value; ++box) {
      load_passing_head_box(to + box * box_bytes, map, box * 64, head, token, sequence, barrier);
    }
  };
  const std::integral_constant<int, Tile::kBoxes> boxes;
  const std::integral_constant<int, Tile::kValueBoxes> value_boxes;
  std::int32_t job = blockIdx.x;
  for (;;) {
    const bool more = job < jobs_of<Params>(call);
    // The job is read from shared memory at each use, since a copy in registers would spill.
    const GradientWork& work = works[slot.stage];
    const bool exists = !more || call.works[job].num_keys > 0;
    if (exists) {
      mbarrier_wait_block(shared.work_empty(slot.stage), slot.phase ^ 1);
      if (threadIdx.x == 0) {
        if (more) {
          works[slot.stage] = call.works[job];
        } else {
          works[slot.stage].sequence = -1;
        }
        mbarrier_arrive(shared.work_full(slot.stage));
      }
      __syncwarp();
      slot.advance(2);
    }
    if (!more) return;
    if (exists && work.tile < work.last_tile) {
      const int sequence_q = p.cu_seqlens_q != nullptr ? 0 : work.sequence;
      const int sequence_k = p.cu_seqlens_k != nullptr ? 0 : work.sequence;
      mbarrier_wait_block(shared.keys_empty(), keys_phase ^ 1);
      keys_phase ^= 1;
      // If the keys' tokens are not consecutive in memory, the warpgroups copy the keys and values.
      const bool gathers = kMayBranch<Params> && work.k_token < 0;
      if (gathers) {
        if (elect_one()) mbarrier_arrive(shared.keys_full());
      } else if (elect_one()) {
        mbarrier_arrive_expect(shared.keys_full(), Tile::kKeyBytes + Tile::kValueBytes);
        load(boxes, shared.keys(), Tile::kKeyBox, &call.k, work.kv_head, work.k_token, sequence_k, shared.keys_full());
        load(value_boxes, shared.values(), Tile::kKeyBox, &call.v, work.kv_head, work.k_token, sequence_k,
             shared.keys_full());
      }
#pragma unroll 1
      for (int head = work.q_head; head < work.q_head + call.part_heads; ++head) {
        const float* scalars = call.scalars + (head * std::int64_t{call.slots} + work.slot) * 128;
#pragma unroll 1
        for (int tile = work.tile; tile < work.last_tile; tile += Tile::kQueries, scalars += 128) {
          mbarrier_wait_block(shared.queries_empty(at.stage), at.phase ^ 1);
          if (elect_one()) {
            mbarrier_arrive_expect(shared.queries_full(at.stage), Tile::kQueryBytes + Tile::kScalarBytes);
            load(boxes, shared.queries(at.stage), Tile::kQueryBox, &call.q, head, work.q_token + tile, sequence_q,
                 shared.queries_full(at.stage));
            load_bytes(shared.u(at.stage), scalars, Tile::kScalarBytes, shared.queries_full(at.stage));
          }
          mbarrier_wait_block(shared.dout_empty(at.stage), at.phase ^ 1);
          if (elect_one()) {
            mbarrier_arrive_expect(shared.dout_full(at.stage), Tile::kDoutBytes + Tile::kScalarBytes);
            load(value_boxes, shared.dout(at.stage), Tile::kQueryBox, &call.dout, head, work.q_token + tile, sequence_q,
                 shared.dout_full(at.stage));
            load_bytes(shared.delta(at.stage), scalars + 64, Tile::kScalarBytes, shared.dout_full(at.stage));
          }
          at.advance(Tile::kStages);
        }
      }
    }
    // The next job is taken only now, since other blocks of threads wait for the dq of every job that was taken.
    std::uint32_t taken = 0;
    if (threadIdx.x == 0) taken = atomicAdd(call.counter, 1u);
    taken = __shfl_sync(0xffffffffu, taken, 0);
    job = static_cast<std::int32_t>(gridDim.x + taken);
  }
}

// The work of one of the two warps that add the tiles' dq to the sums in memory. Each warp takes every second tile. For
// each tile it waits for its turn, since blocks of keys add in descending order.
template <class Tile>
__device__ __forceinline__ void add_gradients(const AttentionBackwardParams& p, const GradientCall& call,
                                              const GradientShared<Tile>& shared, const GradientWork* works,
                                              int parity) {
  RingPosition slot;
  int tiles = 0;
  if (!elect_one()) return;
  const bool ordered = *call.unordered == 0, wanted = p.dq != nullptr;
#pragma unroll 1
  for (;;) {
    mbarrier_wait_block(shared.work_full(slot.stage), slot.phase);
    const GradientWork& work = works[slot.stage];
    if (work.sequence < 0) return;
#pragma unroll 1
    for (int head = work.q_head; head < work.q_head + call.part_heads; ++head) {
      std::int64_t at = head * std::int64_t{call.slots} + work.slot;
#pragma unroll 1
      for (int tile = work.tile; tile < work.last_tile; tile += Tile::kQueries, ++at) {
        if ((tiles & 1) != parity) {
          ++tiles;
          continue;
        }
        const int phase = tiles++ >> 1 & 1;
        const auto turn = static_cast<std::uint32_t>(first_contributor<Tile::kKeys>(p.causal, work.num_keys, tile) -
                                                     work.key / Tile::kKeys);
        float* sums = call.sums + at * (Tile::kQueries * Tile::columns(p));
        const int bytes = Tile::kQueries * 4 * Tile::columns(p);
        // The warp waits for its turn first, since the turn usually comes before the tile's dq is ready.
        if (wanted && ordered && turn > 0) wait_for_turn(call.turns + at, turn);
        mbarrier_wait_block(shared.dq_full(parity), phase);
        if (!wanted) {
          mbarrier_arrive(shared.dq_empty(parity));
          continue;
        }
        const std::uint64_t policy = tma_policy(work.key > 0);
        if (turn == 0) {
          store_bytes(sums, shared.dq(parity), bytes, policy);
        } else {
          add_floats(sums, shared.dq(parity), bytes, policy);
        }
        wait_for_stored_boxes<0>();
        mbarrier_arrive(shared.dq_empty(parity));
        wait_for_writes();
        end_turn(call.turns + at);
      }
    }
    mbarrier_arrive(shared.work_empty(slot.stage));
    slot.advance(2);
  }
}

}  // namespace
}  // namespace rlk::cuda
