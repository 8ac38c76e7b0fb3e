// The backward of attention for bf16 and fp16 by wgmma, for SM90. The kernels support heads that TMA can load. A first
// kernel computes u = lse * log2(e) and delta for each tile of 64 queries. The main kernel is persistent. A thread
// block of three warpgroups takes 128 keys of a key head. The block keeps dk and dv of these keys in registers, and
// processes the query tiles that see the keys, query head by query head. A job has all query heads of the key head, or
// one of them. With one query head per job, memory holds dk and dv between the jobs of a block of keys. TMA adds each
// tile's dq to a sum in memory, in descending order of the blocks of keys. A third kernel scales and rounds the sums of
// dq. Heads of more than 128 columns have one kernel for dk and dv (wide_sm90.cuh), and another kernel for dq
// (queries_sm90.cuh). If a gradient is NaN, a last kernel repeats the call by mma.sync (attention_repeat_sm90.cu).
// wgmma and shared memory limit the speed. README.md has measurements.
#pragma once

#include <algorithm>

#include "../../common/async_copy_sm80.cuh"
#include "../../common/dependent_launch.cuh"
#include "../../common/kernel_memory.h"
#include "../../common/register_shares_sm90.cuh"
#include "../../common/vec8.cuh"
#include "../head_maps.h"
#include "plain.cuh"
#include "queries_sm90.cuh"
#include "rows_sm90.cuh"
#include "trees_sm90.cuh"
#include "wide_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <class T, class Tile, Exp kExp, class Params>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_gradient_kernel(const __grid_constant__ Params p, const __grid_constant__ GradientCallOf<Params> call) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const GradientShared<Tile> shared{shared_address(memory)};
  auto* works = reinterpret_cast<GradientWork*>(memory + Tile::kWorkAt);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  allow_next_kernel();
  const int warpgroup = same_in_warp(threadIdx.x / 128) - 1;
  if (warpgroup < 0) {
    GradientRegisters::release();
    const int warp = same_in_warp(threadIdx.x / 32);
    if (warp == 0) load_gradient_work<Tile>(p, call, shared, works);
    if (warp == 1 || warp == 2) add_gradients<Tile>(p, call, shared, works, warp - 1);
    return;
  }
  GradientRegisters::claim();
  GradientRows<T, Tile, kExp, Params> rows(p, call, shared, warpgroup);
  take_jobs(shared, works, &rows);
}

// The tile of queries of a block of threads, in kernels whose blocks of threads have one tile each.
struct GradientPlace {
  std::int64_t sequence;
  std::int32_t tile;  // the tile's position
  GradientQueries queries;
  std::int64_t q_first;
  bool exists;
};
template <class Params>
__device__ __forceinline__ GradientPlace gradient_place(const Params& p, const GradientCall& call, std::int32_t slot) {
  GradientPlace at = {};
  if (p.num_sequences == 0) return at;
  at.sequence = p.cu_seqlens_q == nullptr ? slot / call.of_sequence
                                          : sequence_of_slot(p.num_sequences, slot, [&](std::int64_t s) {
                                              return clamp_to(p.cu_seqlens_q[s], 0, p.q_tokens) / 64 + call.slack * s;
                                            });
  const AttentionSpan span(p, at.sequence);
  at.queries = gradient_queries(p, call, span);
  at.q_first = span.q_first;
  const std::int32_t number = slot - at.queries.slot;
  at.tile = at.queries.base + 64 * number;
  at.exists = number >= 0 && number < at.queries.tiles();
  return at;
}

// Clears the counters of the later kernels, except for trees, where an earlier kernel already writes to the counters.
// Fills the list of jobs. Computes u and delta of a tile's rows, for four heads per block of threads.
constexpr int kPreparedHeads = 4;
template <class T, class Tile, class Params>
__global__ void __launch_bounds__(kPreparedHeads * 64)
    attention_prepare_kernel(const __grid_constant__ Params p, const __grid_constant__ GradientCallOf<Params> call) {
  const std::int32_t slot = blockIdx.x;
  const auto threads = static_cast<std::int32_t>(gridDim.x * gridDim.y * blockDim.x);
  const auto thread = static_cast<std::int32_t>((blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x);
  constexpr int kFirstWords = GradientLayout::kTurnsAt / 4;
  if constexpr (!kMayBranch<Params>) {
    for (std::int64_t i = kFirstWords + thread; i < call.counter_words; i += threads) call.counter[i] = 0;
  }
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    if (!kMayBranch<Params> && threadIdx.x < kFirstWords) call.counter[threadIdx.x] = 0;
    __syncthreads();
    for (std::int64_t b = threadIdx.x; b < p.num_sequences; b += blockDim.x) {
      const auto contradicts = [&](const std::int32_t* offsets, std::int64_t tokens) {
        return offsets != nullptr && (offsets[b] < 0 || offsets[b + 1] < offsets[b] || offsets[b + 1] > tokens);
      };
      if (contradicts(p.cu_seqlens_q, p.q_tokens) || contradicts(p.cu_seqlens_k, p.k_tokens)) *call.unordered = 1;
    }
  }
  const std::int32_t jobs = jobs_of<Params>(call);
  for (std::int32_t job = thread; job < jobs; job += threads) {
    call.works[job] = gradient_work<Tile::kKeys>(p, call, job);
  }
  if constexpr (Tile::kColumns > 128) {
    const std::int32_t pairs = call.query_jobs / static_cast<std::int32_t>(p.num_q_heads);
    for (std::int32_t pair = thread; pair < pairs; pair += threads) {
      call.query_works[pair] = query_work<QueryGradientTile<Tile::kColumns, Tile::kValueColumns>::kKeys>(p, call, pair);
    }
  }
  // Delta of a row is the sum of out * dout, which has eight partial sums ("chains"). A warp processes 32 rows of a
  // head, four rows at a time. Eight lanes share a row, and each lane computes one of its chains. Rows are loaded in
  // chunks of 16 bytes, and read from shared memory by columns.
  constexpr int kRowBytes = Tile::kValueBoxes * 128, kStride = kRowBytes + 16, kChunks = kRowBytes / 16;
  constexpr int kLoads = 4 * kChunks / 32;
  __shared__ __align__(16) unsigned char staged[kPreparedHeads * 2][2][4 * kStride];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int64_t head = blockIdx.y * kPreparedHeads + warp / 2;
  if (head >= p.num_q_heads) return;
  const GradientPlace at = gradient_place(p, call, slot);
  const bool packed = p.cu_seqlens_q != nullptr;
  const auto exists = [&](int row) {
    const std::int32_t n = at.tile + row;
    return at.exists && n >= at.queries.first && n < at.queries.last;
  };
  float* scalars = call.scalars + (head * call.slots + slot) * 128;
  unsigned char(&rows)[2][4 * kStride] = staged[warp];
#pragma unroll 2
  for (int first = warp % 2 * 32; first < warp % 2 * 32 + 32; first += 4) {
    uint4 chunks[2][kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = first + (lane + 32 * i) / kChunks, column = (lane + 32 * i) % kChunks * 8;
      chunks[0][i] = chunks[1][i] = make_uint4(0, 0, 0, 0);
      if (!exists(row) || (Tile::kIsPadded && column >= p.value_dim)) continue;
      const std::int64_t token = at.q_first + at.tile + row - at.queries.past;
      const auto* dout = static_cast<const typename T::Storage*>(p.dout.data) + column +
                         offset_of(p.dout, packed, at.sequence, token) + head * p.dout.head_stride;
      const auto* out = static_cast<const typename T::Storage*>(p.out.data) + column +
                        offset_of(p.out, packed, at.sequence, token) + head * p.out.head_stride;
      chunks[0][i] = *reinterpret_cast<const uint4*>(dout);
      chunks[1][i] = *reinterpret_cast<const uint4*>(out);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int to = (lane + 32 * i) / kChunks * kStride + (lane + 32 * i) % kChunks * 16;
      *reinterpret_cast<uint4*>(rows[0] + to) = chunks[0][i];
      *reinterpret_cast<uint4*>(rows[1] + to) = chunks[1][i];
    }
    __syncwarp();
    float sum = 0.0f;
#pragma unroll
    for (int column = lane % 8; column < Tile::kValueColumns; column += 8) {
      const int from = lane / 8 * kStride + column * 2;
      sum = fma_rn(T::load(*reinterpret_cast<const typename T::Storage*>(rows[0] + from)),
                   T::load(*reinterpret_cast<const typename T::Storage*>(rows[1] + from)), sum);
    }
#pragma unroll
    for (int distance = 1; distance < kAttentionChains; distance *= 2) {
      sum = add_rn(sum, AttentionGpu::shuffle_xor(sum, distance));
    }
    const int row = first + lane / 8;
    if (lane % 8 != 0) continue;
    float u = infinity(), delta = 0.0f;
    if (exists(row)) {
      const std::int64_t index = lse_index(p, at.sequence, at.q_first + at.tile + row - at.queries.past, head);
      u = mul_rn(p.lse[index], kLog2e);
      delta = p.dlse == nullptr ? sum : sub_rn(sum, p.dlse[index]);
    }
    scalars[row] = u;
    scalars[64 + row] = delta;
  }
}

// Scales and rounds the sums of dq of a tile. Blocks of threads of this kernel begin on multiprocessors that have no
// jobs left, while jobs on other multiprocessors still add to tiles. So a block of threads waits until the last block
// of keys has added to its tile. For a tree, a block of threads waits for the whole previous kernel. The kernel looks
// for NaN in only one column, since a ds of NaN makes all columns of its query's dq NaN.
template <class T, class Tile, class Params>
__global__ void __launch_bounds__(256)
    attention_round_dq_kernel(const __grid_constant__ Params p, const __grid_constant__ GradientCallOf<Params> call) {
  allow_next_kernel();
  // The next kernel waits only for this kernel, but needs the results of the previous kernel, too. So this kernel must
  // end after the previous kernel.
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
  const std::int64_t slot = blockIdx.x % call.slots, head = blockIdx.x / call.slots;
  const GradientPlace at = gradient_place(p, call, static_cast<std::int32_t>(slot));
  if (!at.exists || at.tile + Tile::kQueries <= at.queries.first) return;
  if constexpr (!kMayBranch<Params>) {
    if (*call.unordered != 0) {
      wait_for_previous_kernel();
    } else {
      if (threadIdx.x == 0) {
        const std::uint32_t* const turns = call.turns + head * call.slots + slot;
        const std::uint32_t all = contributors<Tile::kKeys>(p, at.queries, at.tile);
        // Many blocks wait here. Without pauses their reads would delay the jobs that read and raise neighbouring
        // counters.
        while (*static_cast<const volatile std::uint32_t*>(turns) < all) __nanosleep(500);
        wait_for_turn(turns, all);
      }
      __syncthreads();
    }
  }
  const int half = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int columns = Tile::columns(p);
  const auto* sums =
      reinterpret_cast<const float4*>(call.sums + (head * call.slots + slot) * (Tile::kQueries * columns)) + thread;
  const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int tile = 0; tile < Tile::kFours; tile += 4) {
    float4 found[4];
    const int column = Tile::column_of(half, tile) + thread % 4 * 8;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      found[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (Tile::kIsPadded && Tile::column_of(half, tile + k) >= columns) continue;
      found[k] = __ldcg(sums + (Tile::four_at(half, tile) + k) * 128);
    }
    if (tile == 0 && (is_nan(found[0].x) || is_nan(found[0].z))) *call.has_nan = 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float a = r == 0 ? found[k].x : found[k].z, b = r == 0 ? found[k].y : found[k].w;
        x[k] = T::pack(add_rn(mul_rn(a, p.softmax_scale), 0.0f), add_rn(mul_rn(b, p.softmax_scale), 0.0f));
      }
      exchange_in_quad(x);
      const std::int32_t n = at.tile + row + 8 * r;
      if (n >= at.queries.first && n < at.queries.last && (!Tile::kIsPadded || column < columns)) {
        const std::int64_t token = row_of(p, at.sequence, at.q_first + n - at.queries.past);
        auto* to = static_cast<typename T::Storage*>(p.dq) + (token * p.num_q_heads + head) * columns + column;
        *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

// Writes +0 to the gradients of tokens of q and of k that are not in use, and of queries that see no key. If `has_nan`
// is not null, the kernel also looks for NaN in one column of dk. One column is enough, since a ds of NaN makes all
// columns of its key's dk NaN. Each thread finds out whether its token is in use. All lanes of its warp then clear the
// token's gradients. Tokens of q come first, then tokens of k.
__global__ void __launch_bounds__(256)
    attention_clear_kernel(const __grid_constant__ AttentionBackwardParams p, std::int64_t q_tokens,
                           std::int64_t tokens, std::uint32_t* has_nan) {
  allow_next_kernel();
  const std::int64_t at = blockIdx.x * std::int64_t{256} + threadIdx.x;
  const bool is_query = at < q_tokens;
  const std::int64_t token = is_query ? at : at - q_tokens;
  bool used = true;
  if (at < tokens) {
    const std::int32_t* offsets = is_query ? p.cu_seqlens_q : p.cu_seqlens_k;
    const std::int64_t of_sequence = is_query ? p.q_tokens : p.k_tokens;
    std::int64_t sequence = 0, place = token;
    if (offsets != nullptr) {
      sequence = sequence_of(offsets, p.num_sequences, token);
      used = sequence < p.num_sequences && offsets[sequence] <= token;
    } else {
      sequence = token / of_sequence;
      place = token % of_sequence;
    }
    if (used) {
      const AttentionSpan span(p, sequence);
      const std::int64_t i = place - (is_query ? span.q_first : span.k_first);
      used = i >= 0 && i < (is_query ? span.num_queries : span.num_keys);
      if (is_query && used) used = !span.keys_of(i).empty();
    }
    if (used && has_nan != nullptr && !is_query) {
      const auto* row = static_cast<const std::uint16_t*>(p.dk) + token * p.num_kv_heads * p.head_dim;
      const int infinite = p.dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
      for (std::int64_t head = 0; head < p.num_kv_heads; ++head) {
        if ((row[head * p.head_dim] & 0x7fff) > infinite) *has_nan = 1;
      }
    }
  }
  for (unsigned left = __ballot_sync(0xffffffffu, !used); left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const std::int64_t cleared = __shfl_sync(0xffffffffu, token, lane);
    const bool of_query = __shfl_sync(0xffffffffu, static_cast<int>(is_query), lane) != 0;
    const std::int64_t heads = of_query ? p.num_q_heads : p.num_kv_heads;
    for (void* to : {of_query ? p.dq : p.dk, of_query ? nullptr : p.dv}) {
      if (to == nullptr) continue;
      const std::int64_t chunks = heads * (to == p.dv ? p.value_dim : p.head_dim) / 8;
      auto* row = static_cast<uint4*>(to) + cleared * chunks;
      for (std::int64_t i = threadIdx.x % 32; i < chunks; i += 32) row[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

template <class T, class Tile, Exp kExp, class Params>
void launch_attention_gradients(const Params& p, GradientKernel kernel, cudaStream_t stream) {
  const GradientLayout layout(p, kernel);
  GradientCallOf<Params> call;
  call.q = attention_map(p, p.q, true, Tile::kQueries);
  call.dout = attention_map(p, p.dout, true, Tile::kQueries, 64, p.value_dim);
  call.k = attention_map(p, p.k, false, Tile::kKeys);
  call.v = attention_map(p, p.v, false, Tile::kKeys, 64, p.value_dim);
  call.slots = static_cast<std::int32_t>(layout.slots);
  call.of_sequence = static_cast<std::int32_t>(layout.of_sequence);
  call.slack = static_cast<std::int32_t>(layout.slack);
  call.key_blocks = static_cast<std::int32_t>(layout.key_blocks);
  call.jobs = static_cast<std::int32_t>(layout.jobs);
  call.block_jobs = static_cast<std::int32_t>(layout.block_jobs);
  call.part_heads = static_cast<std::int32_t>(p.num_q_heads / p.num_kv_heads / layout.parts);
  // At any time, the running blocks of keys of one head should be about two tiles of queries apart, so that they rarely
  // wait to add dq to a tile. If a head has more blocks of keys than fit at this distance, the jobs alternate between
  // heads.
  const auto of_each = [&](std::int64_t tokens, const std::int32_t* offsets) {
    return offsets != nullptr ? tokens / p.num_sequences : tokens;
  };
  const std::int64_t tiles = of_each(p.q_tokens, p.cu_seqlens_q) / Tile::kQueries * call.part_heads;
  const std::int64_t room = std::max<std::int64_t>(tiles / 2, 1), blocks = multiprocessors(current_device());
  const bool has_room = of_each(p.k_tokens, p.cu_seqlens_k) / Tile::kKeys <= room;
  call.section = has_room ? 1 : static_cast<std::int32_t>(std::clamp<std::int64_t>(blocks / room, 1, p.num_kv_heads));
  auto* workspace = static_cast<unsigned char*>(p.workspace);
  call.counter = reinterpret_cast<std::uint32_t*>(workspace);
  call.unordered = call.counter + 1;
  call.has_nan = call.counter + (kMayBranch<Params> ? 3 : 2);
  call.turns = reinterpret_cast<std::uint32_t*>(workspace + GradientLayout::kTurnsAt);
  call.works = reinterpret_cast<GradientWork*>(workspace + layout.works_at);
  call.scalars = reinterpret_cast<float*>(workspace + layout.scalars_at);
  call.sums = reinterpret_cast<float*>(workspace + layout.sums_at);
  call.kept_turns = reinterpret_cast<std::uint32_t*>(workspace + layout.kept_turns_at);
  call.kept = reinterpret_cast<float*>(workspace + layout.kept_at);
  call.query_jobs = static_cast<std::int32_t>(layout.query_pairs * p.num_q_heads);
  call.query_works = reinterpret_cast<QueryWork*>(workspace + layout.query_works_at);
  call.query_counter = call.counter + 3;
  call.counter_words = layout.works_at / 4;
  if constexpr (kMayBranch<Params>) {
    check(cudaMemsetAsync(workspace, 0, static_cast<std::size_t>(layout.works_at), stream), "attention's turns");
    call.section = multiprocessors(current_device());
    call.jobs_of_paths = reinterpret_cast<std::int32_t*>(call.counter + 2);
    call.firsts = reinterpret_cast<std::int32_t*>(workspace + layout.firsts_at);
    call.rows = reinterpret_cast<GradientRow*>(workspace + layout.rows_at);
    call.row_turns = reinterpret_cast<std::uint32_t*>(workspace + layout.row_turns_at);
    call.row_sums = reinterpret_cast<float*>(workspace + layout.row_sums_at);
    launch_path_blocks(p, call, stream);
  }
  const auto slots = static_cast<unsigned>(layout.slots), heads = static_cast<unsigned>(p.num_q_heads);
  attention_prepare_kernel<T, Tile, Params>
      <<<dim3(slots, (heads + kPreparedHeads - 1) / kPreparedHeads), kPreparedHeads * 64, 0, stream>>>(p, call);
  check(cudaGetLastError(), "launch of attention's lse and delta");
  const int grid = std::min(call.jobs, multiprocessors(current_device()));
  if constexpr (Tile::kColumns > 128) {
    if (p.dk != nullptr) {
      allow_shared_memory<attention_wide_gradient_kernel<T, Tile, kExp>>();
      attention_wide_gradient_kernel<T, Tile, kExp><<<grid, Tile::kThreads, Tile::kBytes, stream>>>(p, call);
      check(cudaGetLastError(), "launch of attention's gradients");
    }
    if (p.dq != nullptr) {
      using QueryTile = QueryGradientTile<Tile::kColumns, Tile::kValueColumns>;
      GradientCall of_queries = call;
      of_queries.k = attention_map(p, p.k, false, QueryTile::kKeys);
      of_queries.v = attention_map(p, p.v, false, QueryTile::kKeys, 64, p.value_dim);
      const auto launch = [&](auto overlaps) {
        constexpr bool kBeside = decltype(overlaps)::value;
        allow_shared_memory<attention_query_gradient_kernel<T, QueryTile, kExp>>();
        launch_dependent<kBeside>(attention_query_gradient_kernel<T, QueryTile, kExp>,
                                  std::min(call.query_jobs, multiprocessors(current_device())), QueryTile::kThreads,
                                  QueryTile::kBytes, stream, p, of_queries, kBeside);
      };
      p.dk != nullptr ? launch(std::true_type{}) : launch(std::false_type{});
    }
  } else {
    allow_shared_memory<attention_gradient_kernel<T, Tile, kExp, Params>>();
    attention_gradient_kernel<T, Tile, kExp, Params><<<grid, Tile::kThreads, Tile::kBytes, stream>>>(p, call);
    check(cudaGetLastError(), "launch of attention's gradients");
    if (p.dq != nullptr) {
      launch_dependent<!kMayBranch<Params>>(attention_round_dq_kernel<T, Tile, Params>, static_cast<int>(slots * heads),
                                            256, 0, stream, p, call);
    }
  }
  // If every token is in use and every query sees a key, nothing needs clearing. In calls with dq, the kernels that
  // round dq look for NaN.
  const bool looks = p.dq == nullptr;
  const bool some_keys = p.cu_seqlens_k != nullptr || p.seqused_k != nullptr || p.leftpad_k != nullptr;
  const bool some_queries = p.cu_seqlens_q != nullptr || p.seqused_q != nullptr;
  const bool clears_queries = some_queries || some_keys || (p.causal && p.k_tokens < p.q_tokens);
  const std::int64_t q_tokens = p.dq != nullptr && clears_queries ? attention_rows(p) : 0;
  const std::int64_t tokens = q_tokens + (p.dk != nullptr && (some_keys || looks) ? attention_keys(p) : 0);
  if (tokens > 0) {
    attention_clear_kernel<<<static_cast<unsigned>((tokens + 255) / 256), 256, 0, stream>>>(
        p, q_tokens, tokens, looks ? call.has_nan : nullptr);
    check(cudaGetLastError(), "launch of attention's clearing");
  }
  const std::uint32_t* paths = nullptr;
  if constexpr (kMayBranch<Params>) paths = p.paths;
  const GradientTiles kept{call.slots, call.of_sequence, call.slack, call.scalars, call.has_nan};
  sm90::attention_repeat_backward(p, paths, kept, stream);
}

// Computes all gradients of a call.
template <WgmmaForm kForm, class Params>
void run_attention_gradients(const Params& p, GradientKernel kernel, cudaStream_t stream) {
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
      const auto launch = [&](auto tile) {
        using Tile = decltype(tile);
        p.exp == Exp::kHardware ? launch_attention_gradients<T, Tile, Exp::kHardware>(p, kernel, stream)
                                : launch_attention_gradients<T, Tile, Exp::kPortable>(p, kernel, stream);
      };
      const std::int64_t columns = TileColumns::of(p.head_dim, p.value_dim).keys;
      if constexpr (kForm == WgmmaForm::kWide) {
        columns == 192 ? launch(WideGradientTile<192, 128, 128>{}) : launch(WideGradientTile<256, 256, 64>{});
      } else if constexpr (kForm == WgmmaForm::kPadded) {
        columns == 64   ? launch(GradientTile<64, true>{})
        : columns == 80 ? launch(GradientTile<80, true>{})
        : columns == 96 ? launch(GradientTile<96, true>{})
                        : launch(GradientTile<128, true>{});
      } else {
        columns == 64 ? launch(GradientTile<64>{}) : launch(GradientTile<128>{});
      }
      if (p.dsinks == nullptr) return;
      AttentionBackwardParams of_delta = p;  // delta lies behind the rest of the workspace
      of_delta.workspace = static_cast<unsigned char*>(p.workspace) + GradientLayout(p, kernel).end;
      run_attention_delta<T>(of_delta, stream);
      run_attention_sinks(p, static_cast<const float*>(of_delta.workspace), stream);
    }
  });
}

}  // namespace
}  // namespace rlk::cuda
