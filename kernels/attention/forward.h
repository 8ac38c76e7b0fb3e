// The forward of attention for the kernels of CUDA and HIP. A thread block computes one tile of rows. A row is a query
// in one of the query heads that share a key head. The thread block reads the rows' keys one block of keys at a time.
// For each block of keys it computes scores in registers, probabilities in shared memory, and sums of values in
// registers. It scales a row's probabilities by 2^-m. The row's reference m is its largest scaled score so far, rounded
// up to an integer. The fp32 units bound the kernel.
#pragma once

#include "kernels/attention/multiply.h"
#include "kernels/attention/partials.h"
#include "kernels/attention/sinks.h"
#include "rlk/math/softmax_stats.h"

namespace rlk {

struct AttentionForwardState {  // the state of one row
  AttentionReference reference;
  float m = -infinity(), l = 0.0f;  // reference and sum of probabilities, merged over the splits so far
};

// What the threads must know about the rows that they are computing. This struct lies in shared memory because the sums
// fill the registers.
struct AttentionForwardScene {
  std::int64_t kv_head, sequence, begin, end;  // begin, end: range of rows
  std::int32_t first_key, last_key;
};

// The shared memory of the threads that compute a tile.
template <class Tile>
struct AttentionForwardShared {
  float *q, *stage, *weights;
  float* total;  // the sums of values over the earlier splits; a thread's sums are at [row of the thread][sum][thread]
  float *largest, *m, *clamp, *chains, *factors;
  std::int32_t *first, *last;
  AttentionForwardState* states;
  AttentionMerge* merges;
  std::int64_t *k_offsets, *v_offsets;
  std::uint32_t* flags;
  AttentionForwardScene* scene;

  static constexpr int kTotal = Tile::kRows * Tile::kColumns;
  static constexpr int kBytes = carved(Tile::kRows * Tile::kColumns, 4) + carved(Tile::kStageFloats, 4) +
                                carved(Tile::kWeights, 4) + carved(kTotal, 4) + 3 * carved(Tile::kRows, 4) +
                                carved(Tile::kRows * kAttentionChains, 4) + 3 * carved(Tile::kRows, 4) +
                                carved(Tile::kRows, sizeof(AttentionForwardState)) +
                                carved(Tile::kRows, sizeof(AttentionMerge)) + 2 * carved(Tile::kBlock, 8) + 16 +
                                carved(1, sizeof(AttentionForwardScene));

  RLK_DEVICE explicit AttentionForwardShared(void* memory) {
    Carver carver(memory);
    q = carver.take<float>(Tile::kRows * Tile::kColumns);
    stage = carver.take<float>(Tile::kStageFloats);
    weights = carver.take<float>(Tile::kWeights);
    total = carver.take<float>(kTotal);
    largest = carver.take<float>(Tile::kRows);
    m = carver.take<float>(Tile::kRows);
    clamp = carver.take<float>(Tile::kRows);
    chains = carver.take<float>(Tile::kRows * kAttentionChains);
    factors = carver.take<float>(Tile::kRows);
    first = carver.take<std::int32_t>(Tile::kRows);
    last = carver.take<std::int32_t>(Tile::kRows);
    states = carver.take<AttentionForwardState>(Tile::kRows);
    merges = carver.take<AttentionMerge>(Tile::kRows);
    k_offsets = carver.take<std::int64_t>(Tile::kBlock);
    v_offsets = carver.take<std::int64_t>(Tile::kBlock);
    flags = carver.take<std::uint32_t>(4);
    scene = carver.take<AttentionForwardScene>(1);
  }
};

// Params is AttentionParams or AttentionPartialsParams. A split is 1,024 or more consecutive keys; only
// a sequence's last split may have fewer. With AttentionPartialsParams, the class stores the sums of each split (a
// partial). With AttentionParams the class merges the splits and stores the output.
template <class Gpu, class T, class Tile, class Params = AttentionParams>
class AttentionForward {
 public:
  RLK_DEVICE AttentionForward(const Params& p, const AttentionGrid& g, void* memory) : p_(p), g_(g), s_(memory) {}

  // Computes the tile's rows from `begin` on, up to the end of their sequence. Returns the row at which the next part
  // of the tile begins.
  RLK_DEVICE std::int64_t run(const AttentionPlace& place, std::int64_t begin) {
    const AttentionSegment segment(p_, g_, p_.cu_seqlens_q, place, begin);
    if (!segment.exists) {
      write_unseen(place, begin, segment.last);
      return segment.last;
    }
    const AttentionSpan span(p_, segment.sequence);
    const std::int64_t first = begin / g_.group - span.q_first, last = (segment.last - 1) / g_.group - span.q_first + 1;
    const AttentionRange queries = {first, last < span.num_queries ? last : span.num_queries};
    AttentionRange keys = queries.empty() ? AttentionRange{0, 0} : span.keys_of(queries);
    if constexpr (kPartial) keys = span.here(keys);
    if (keys.empty()) {
      write_unseen(place, begin, segment.last);
      return segment.last;
    }
    // Key indices are below 2^31.
    const int first_key = static_cast<int>(keys.first);
    if (tid() == 0)
      *s_.scene = {place.kv_head, segment.sequence, begin, segment.last, first_key, static_cast<int>(keys.last)};
    begin_rows(span, place.kv_head, begin, segment.last);
#pragma unroll 1
    for (int block = first_key / kBlock * kBlock; block < s_.scene->last_key; block += kBlock) {
      if (block > s_.scene->first_key && attention_split_begins(block)) end_split(block);
      run_block(block);
    }
    end_split(s_.scene->last_key);
    if constexpr (!kPartial) {
      if (p_.sinks != nullptr) merge_sinks();
      finish();
    }
    const std::int64_t end = s_.scene->end;
    Gpu::barrier();  // the next run() overwrites the shared memory that this run() reads
    return end;
  }

 private:
  using State = AttentionForwardState;
  static constexpr bool kPartial = std::is_same_v<Params, AttentionPartialsParams>;
  static constexpr int kOfThread = Tile::kOfThread, kRows = Tile::kRows;
  static constexpr int kBlock = Tile::kBlock, kScores = Tile::kScores;
  static_assert(kRows <= kBlock);  // the offsets of the rows of q reuse the memory of the keys' offsets
  // The number of chains that a thread sums. A chain is a sum in one accumulator: a row's probabilities are summed in
  // kAttentionChains chains. With tiles of 16 rows, only half of the threads have a chain.
  static constexpr int kChainsOfThread = kOfThread == 4 ? 2 : 1;
  static RLK_DEVICE int tid() { return Gpu::thread(); }
  static RLK_DEVICE bool has_chains() { return tid() < kRows * kAttentionChains / kChainsOfThread; }
  static RLK_DEVICE int chain_row() { return tid() % kRows; }
  static RLK_DEVICE int first_chain() { return tid() / kRows * kChainsOfThread; }

  RLK_DEVICE void begin_rows(const AttentionSpan& span, std::int64_t kv_head, std::int64_t begin, std::int64_t end) {
    if (tid() < kRows) {
      const std::int64_t row = begin + tid(), i = row / g_.group - span.q_first;
      AttentionRange sees = {0, 0};
      if (row < end && i < span.num_queries) sees = span.keys_of(i);
      const bool used = !sees.empty();
      s_.first[tid()] = used ? static_cast<std::int32_t>(sees.first) : 0;
      s_.last[tid()] = used ? static_cast<std::int32_t>(sees.last) : 0;
      s_.states[tid()] = {};
      const bool packed = p_.cu_seqlens_q != nullptr;
      s_.k_offsets[tid()] = used ? offset_of(p_.q, packed, span.sequence, span.q_first + i) +
                                       (kv_head * g_.group + row % g_.group) * p_.q.head_stride
                                 : kZeroRow;
    }
#pragma unroll
    for (float& chain : chains_) chain = 0.0f;
#pragma unroll
    for (auto& row : sums_) {
#pragma unroll
      for (float& sum : row) sum = 0.0f;
    }
    Gpu::barrier();
    const AttentionRows<Gpu, T> rows = {in_memory(static_cast<const typename T::Storage*>(p_.q.data)), s_.k_offsets,
                                        g_.vectors};
    load_transposed<Gpu, T, kRows>(rows, head_dim(), s_.q);
    Gpu::barrier();  // run_block() overwrites k_offsets
  }

  RLK_DEVICE float c() const { return attention_scale(p_); }
  RLK_DEVICE int head_dim() const { return static_cast<int>(p_.head_dim); }
  RLK_DEVICE int value_dim() const { return static_cast<int>(p_.value_dim); }
  // The index after the block's last key.
  RLK_DEVICE int end_of(int block) const {
    const int last = s_.scene->last_key;
    return last - block < kBlock ? last : block + kBlock;
  }
  RLK_DEVICE AttentionRows<Gpu, T> rows_of(const AttentionHeads& a, const std::int64_t* offsets) const {
    return {attention_head<T>(a, s_.scene->kv_head), offsets, g_.vectors};
  }

  RLK_DEVICE void run_block(int block) {
    if (tid() < 2 * kBlock) {
      const bool is_key = tid() < kBlock;
      const int i = tid() % kBlock, j = block + i;
      std::int64_t offset = kZeroRow;
      if (j >= s_.scene->first_key && j < s_.scene->last_key) {
        offset = key_offset(p_, is_key ? p_.k : p_.v, AttentionSpan(p_, s_.scene->sequence), j);
      }
      (is_key ? s_.k_offsets : s_.v_offsets)[i] = offset;
    }
    Gpu::barrier();
    float scores[kOfThread][kScores];
    multiply<Gpu, Tile>(s_.q, rows_of(p_.k, s_.k_offsets), head_dim(), s_.stage, scores);
    if (const AttentionSoftcap softcap(p_); softcap) {
#pragma unroll
      for (auto& row : scores) {
#pragma unroll
        for (float& s : row) s = softcap.score(softcap.h(s));
      }
    }
    raise_references(scores, block);
    const bool mine = Gpu::kHasHardwareExp && p_.exp == Exp::kHardware ? probabilities<Exp::kHardware>(scores, block)
                                                                       : probabilities<Exp::kPortable>(scores, block);
    const bool holes = Gpu::any(mine, s_.flags);
    sum_probabilities();
    const AttentionRows<Gpu, T> v = rows_of(p_.v, s_.v_offsets);
    if (holes) {
      accumulate<Gpu, Tile, true>(s_.weights, v, end_of(block) - block, value_dim(), s_.stage, sums_);
    } else {
      accumulate<Gpu, Tile, false>(s_.weights, v, end_of(block) - block, value_dim(), s_.stage, sums_);
    }
    Gpu::barrier();  // the next block overwrites the weights and the offsets
  }

  // Whether a row sees column i of the block.
  RLK_DEVICE bool sees(int row, int block, int i) const {
    return block + i >= s_.first[row] && block + i < s_.last[row];
  }

  RLK_DEVICE void raise_references(const float (&scores)[kOfThread][kScores], int block) {
    const int thread = tid(), line = thread % kAttentionLines;
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const int row = thread / kAttentionLines * kOfThread + r;
      float most = -infinity();
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (sees(row, block, Tile::score_column(line, i))) most = Gpu::max_nan(most, scores[r][i]);
      }
#pragma unroll
      for (int distance = 1; distance < kAttentionLines; distance *= 2) {
        most = Gpu::max_nan(most, Gpu::shuffle_xor(most, distance));
      }
      if (line == 0) s_.largest[row] = most;
    }
    Gpu::barrier();
    if (thread < kRows) {
      AttentionReference reference = s_.states[thread].reference;
      s_.factors[thread] = reference.raise(c(), s_.largest[thread]);
      s_.m[thread] = reference.m;
      s_.clamp[thread] = reference.q;
      s_.states[thread].reference = reference;
    }
    Gpu::barrier();
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const float factor = s_.factors[thread / kAttentionLines * kOfThread + r];
      if (factor == 1.0f) continue;
#pragma unroll
      for (float& sum : sums_[r]) sum = mul_rn(sum, factor);
    }
    if (has_chains()) {
#pragma unroll
      for (float& chain : chains_) chain = mul_rn(chain, s_.factors[chain_row()]);
    }
  }

  // Turns scores into weights in shared memory. The weights are probabilities that are not yet rounded. A weight is
  // nothing() if the row does not see the key, or if the score is -Inf. Returns whether any weight is nothing() for a
  // key between the scene's first key and the block's last key.
  template <Exp kExp>
  RLK_DEVICE bool probabilities(float (&scores)[kOfThread][kScores], int block) {
    bool holes = false;
    const int thread = tid(), line = thread % kAttentionLines;
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const int row = thread / kAttentionLines * kOfThread + r;
      const float m = s_.m[row], q = s_.clamp[row];
      // The row has weights in columns [sees_first, sees_last). The products read columns [holes_first, holes_last),
      // or none if the row is unused.
      const int sees_first = s_.first[row] - block, sees_last = m > -infinity() ? s_.last[row] - block : -1;
      const int holes_first = s_.scene->first_key - block, holes_last = s_.last[row] != 0 ? end_of(block) - block : -1;
      const float addend = kExp == Exp::kHardware ? -m : sub_rn(kStatsShift, m);
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int column = Tile::score_column(line, i);
        const float z = scores[r][i];
        const float p =
            kExp == Exp::kHardware ? Gpu::ex2(fma_rn(z, c(), addend)) : stat_exp_portable(z > q ? z : q, c(), addend);
        const bool missing = column < sees_first || column >= sees_last || !(z > -infinity());
        holes |= missing && column >= holes_first && column < holes_last;
        scores[r][i] = missing ? nothing() : p;
      }
    }
    store_weights<Gpu, Tile>(s_.weights, scores);
    return holes;
  }

  // Adds the unrounded weights to the chains of the rows, and then rounds the weights in place. A missing weight is -0,
  // and adding -0 changes no sum.
  RLK_DEVICE void sum_probabilities() {
    if (!has_chains()) return;
    const int row = chain_row(), first = first_chain();
#pragma unroll
    for (int c = 0; c < kChainsOfThread; ++c) {
      float groups[kBlock / kAttentionGroup];
#pragma unroll
      for (int g = 0; g < kBlock / kAttentionGroup; ++g) {
#pragma unroll
        for (int i = 0; i < kAttentionGroup / kAttentionChains; ++i) {
          float& weight = s_.weights[Tile::weight(g * kAttentionGroup + i * kAttentionChains + first + c, row)];
          groups[g] = i == 0 ? weight : add_rn(groups[g], weight);
          weight = as_element<T>(weight);
        }
      }
      chains_[c] = add_rn(chains_[c], sum_of(groups));
    }
  }

  static RLK_DEVICE float sum_of(const float (&groups)[2]) { return add_rn(groups[0], groups[1]); }
  static RLK_DEVICE float sum_of(const float (&groups)[4]) {
    return add_rn(add_rn(groups[0], groups[1]), add_rn(groups[2], groups[3]));
  }

  // Merges a thread's sums of the current split into `total`. s_.merges holds each row's factors.
  RLK_DEVICE void merge_totals() {
    const int thread = tid();
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const AttentionMerge merge = s_.merges[thread / kAttentionLines * kOfThread + r];
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) {
        float& total = s_.total[(r * Tile::kSums + i) * kAttentionThreads + thread];
        total = merge(total, sums_[r][i]);
        sums_[r][i] = 0.0f;
      }
    }
  }

  // A sink is merged like one more split. The sum of the sink's values is +0.
  RLK_DEVICE void merge_sinks() {
    Gpu::barrier();  // merge_totals() of the last split has read the merges
    if (tid() < kRows) {
      State& state = s_.states[tid()];
      const std::int64_t head = s_.scene->kv_head * g_.group + (s_.scene->begin + tid()) % g_.group;
      s_.merges[tid()] = attention_sink<Gpu>(p_, head).into(&state.m, &state.l);
    }
    Gpu::barrier();
    merge_totals();
  }

  // Finishes the split that contains the key with index `keys` - 1.
  RLK_DEVICE void end_split(int keys) {
    if (has_chains()) {
#pragma unroll
      for (int c = 0; c < kChainsOfThread; ++c) {
        s_.chains[chain_row() * kAttentionChains + first_chain() + c] = chains_[c];
        chains_[c] = 0.0f;
      }
    }
    Gpu::barrier();
    if constexpr (kPartial) {
      store_split(attention_splits(keys) - 1);
    } else {
      merge_split();
    }
  }
  RLK_DEVICE void merge_split() {
    if (tid() < kRows) {
      State& state = s_.states[tid()];
      const AttentionMerge merge(state.m, state.reference.m);
      s_.merges[tid()] = merge;
      state = {{}, merge.m, merge(state.l, combine_chains(s_.chains + tid() * kAttentionChains))};
    }
    Gpu::barrier();
    merge_totals();
  }

  RLK_DEVICE void store_split(std::int64_t number) {
    const AttentionForwardScene scene = *s_.scene;
    const std::int64_t cells = (number - p_.first_split) * attention_rows(p_) * p_.num_q_heads;
    const auto cell = [&](int row) {
      return cells + out_offset(scene.sequence, scene.kv_head, scene.begin + row) / p_.value_dim;
    };
    if (tid() < kRows) {
      const int row = tid();
      const std::int64_t begin = attention_split_begin(number), end = attention_split_begin(number + 1);
      const bool seen = s_.first[row] < end && s_.last[row] > begin && s_.first[row] < scene.last_key;
      const AttentionPartial partial(s_.states[row].reference.m, combine_chains(s_.chains + row * kAttentionChains));
      s_.m[row] = partial.m;
      s_.factors[row] = seen ? 1.0f : 0.0f;
      if (seen) {
        in_memory(p_.stats)[2 * cell(row)] = partial.m;
        in_memory(p_.stats)[2 * cell(row) + 1] = partial.l;
      }
      s_.states[row] = {};
    }
    Gpu::barrier();
#pragma unroll
    for (int r = 0; r < kOfThread; ++r) {
      const int row = tid() / kAttentionLines * kOfThread + r;
      if (s_.factors[row] != 0.0f) {
        const AttentionPartial partial(s_.m[row], 0.0f);
        auto* to = in_memory(p_.sums) + cell(row) * p_.value_dim;
#pragma unroll
        for (int i = 0; i < Tile::kSums; ++i) {
          const int column = i / 4 * 64 + tid() % kAttentionLines * 4 + i % 4;
          if (column < value_dim()) to[column] = partial.sum(sums_[r][i]);
        }
      }
#pragma unroll
      for (float& sum : sums_[r]) sum = 0.0f;
    }
    Gpu::barrier();  // the next split overwrites m and factors
  }

  // Offset of a row in out or lse.
  RLK_DEVICE std::int64_t out_offset(std::int64_t sequence, std::int64_t kv_head, std::int64_t row) const {
    const std::int64_t token = row_of(p_, sequence, row / g_.group);
    return (token * p_.num_q_heads + kv_head * g_.group + row % g_.group) * p_.value_dim;
  }
  RLK_DEVICE void store_lse(std::int64_t sequence, std::int64_t kv_head, std::int64_t row, float lse) const {
    if (p_.lse == nullptr) return;
    in_memory(p_.lse)[lse_index(p_, sequence, row / g_.group, kv_head * g_.group + row % g_.group)] = lse;
  }

  RLK_DEVICE void finish() {
    const AttentionForwardScene scene = *s_.scene;
    if (tid() < kRows && scene.begin + tid() < scene.end) {
      const State state = s_.states[tid()];
      const bool used = s_.last[tid()] != 0;
      const float lse = attention_fails(state.m, used) ? canonical_nan()
                        : used                         ? attention_lse(state.m, state.l)
                                                       : -infinity();
      store_lse(scene.sequence, scene.kv_head, scene.begin + tid(), lse);
    }
#pragma unroll 1
    for (int r = 0; r < kOfThread; ++r) {
      const int row = tid() / kAttentionLines * kOfThread + r;
      if (scene.begin + row >= scene.end) continue;
      const bool used = s_.last[row] != 0, fails = attention_fails(s_.states[row].m, used);
      const float inverse = div_rn(1.0f, s_.states[row].l);
      auto* to = in_memory(static_cast<typename T::Storage*>(p_.out)) +
                 out_offset(scene.sequence, scene.kv_head, scene.begin + row);
#pragma unroll 1
      for (int i = 0; i < Tile::kSums; ++i) {
        const int column = i / 4 * 64 + tid() % kAttentionLines * 4 + i % 4;
        if (column >= value_dim()) continue;
        const float total = s_.total[(r * Tile::kSums + i) * kAttentionThreads + tid()];
        to[column] = T::store(fails ? canonical_nan() : used ? attention_output(total, inverse) : 0.0f);
      }
    }
  }

  // Rows that see no key get zeros. In a call for partials, the function attention_partial_blank() writes the partials
  // of these rows.
  RLK_DEVICE void write_unseen(const AttentionPlace& place, std::int64_t begin, std::int64_t end) const {
    if constexpr (!kPartial) write_zeros(place, begin, end);
  }
  RLK_DEVICE void write_zeros(const AttentionPlace& place, std::int64_t begin, std::int64_t end) const {
    for (std::int64_t row = begin + tid() / kAttentionLines; row < end; row += kAttentionLines) {
      auto* to = in_memory(static_cast<typename T::Storage*>(p_.out)) + out_offset(place.sequence, place.kv_head, row);
      for (int column = tid() % kAttentionLines; column < value_dim(); column += kAttentionLines)
        to[column] = T::store(0.0f);
      if (tid() % kAttentionLines == 0) store_lse(place.sequence, place.kv_head, row, -infinity());
    }
  }

  const Params& p_;
  const AttentionGrid& g_;
  AttentionForwardShared<Tile> s_;
  float chains_[kChainsOfThread];
  float sums_[kOfThread][Tile::kSums];  // sums of values over the current split
};

}  // namespace rlk
