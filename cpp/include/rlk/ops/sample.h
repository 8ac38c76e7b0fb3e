// THE CONTRACT of `sample`: one token drawn from each row of logits, its log-probability, and the kept set: the columns
// that truncation left. It is also the contract of `process_logits`, which runs before `sample` and gives logits after
// bias and penalties, in fp32. Rule numbers refer to docs/numerics.md. An integer or float parameter of the rows is a
// single number, or an array on the device, so a call never waits for the host.
//
// Row i has columns j in [0, valid_vocab), z_j = logits[i, j] in fp32 and T = temperature. Without `allowed` every
// column is present; otherwise a column is present if `allowed` has its bit. c = fl(log2e / T), and m is the m of rule
// 4 for the largest z of all present columns.
//   e_j = 2^(c z_j - m) by rule 4 and the exponential `exp`, with the ROW's m; 0 where z_j = -Inf
//   w_j = floor(2^44 e_j), an unsigned integer of 64 bits. vocab_size is at most 2^19, so no sum of w_j overflows. The
//         mass of some columns is the sum of their w_j
// Columns are ranked by z, descending, then by id, ascending; +0 and -0 are equal. T is positive, so it changes no
// rank.
// Truncation has three steps, which are exact in integers, with top_p and min_p at their fp32 value. w_max is the w of
// the column that ranks first:
//   min_p : keeps w_j >= min_p * w_max                      0 cuts nothing
//   top_k : keeps the first k of the rest                    0 cuts nothing
//   top_p : keeps j if the columns of the rest that rank before j have a mass < top_p * total     1 cuts nothing
// A step that cuts nothing keeps columns of mass 0, too.
//   kVllm  : min_p, top_k, top_p; total = the mass that min_p and top_k left
//   kHf    : top_k, top_p, min_p; total = the mass that top_k left
//   kSglang: all three on the whole row. A column is kept if each step keeps it; total = the mass of all present
//            columns.
// The statistics (m, S) of the kept columns and their tree follow rules 4 and 5. So every node of the tree, and its
// root, have the same statistics as in logprob(kept=...), and
//   logprob     = logprob's formula on that root: the same bits as logprob with `kept` (ops/logprob.h)
//   raw_logprob = logprob's formula over all columns [0, valid_vocab), forbidden ones included, at T = 1
// The draw descends the tree of these nodes. With r = word w of the token in random_stream (ops/random_bits.h), the
// draw goes to the left child where
//   r * S_both < 2^32 * S_left         exact; combine() scales S_left to the m of S_both
// Each level uses one word:
//   0, 1, 2   above the eight parts, from the root down
//   7 + h     where both children have height h above the leaves (0: two leaves)
//   3, 4, 5   in the leaf, with the leaf's m: down the sum ((0+1)+(2+3))+((4+5)+(6+7)) from its last addition
//   6         takes the chain's first kept column whose prefix sum P, this column included, has
//             r * P_last < 2^32 * P.
// The n best columns (n_logprobs is n) are the first n columns of [0, valid_vocab), ordered by z'_j descending, then id
// ascending. Their log-probabilities follow logprob's formula, with the statistics at the root of the same tree.
//   top_ids, top_logprobs         : z'_j = z_j where j is kept, else -Inf; logprob's root and T
//   raw_top_ids, raw_top_logprobs : z'_j = z_j of the raw logits; raw_logprob's root, T = 1.
// A column that is not kept has log-probability -Inf. Such columns come after all kept columns of finite z, in order of
// their ids. Any other log-probability has the bits that logprob (ops/logprob.h) gives for the id and the kept set, or
// for the raw logits. Where the row's logprob (or raw_logprob) is NaN, ids are -1 and log-probabilities NaN.
// Greedy rows take the column that ranks first. Their logprob is at temperature 1, over the present columns. For these
// rows T, top_k, top_p, min_p and the keys of the draw (seed, sample_id, position) are not read.
//
// Kept sets are stored in CSR form, with ascending ids. A row whose count is 0 keeps all of [0, valid_vocab). Rows fill
// kept_ids in their order until a row does not fit into kept_capacity. From that row on, every row whose count is not 0
// gets kKeptOverflow, count 0 and logprob NaN; its id and raw_logprob stay. A row with any other nonzero status has id
// -1, logprob and raw_logprob NaN, and count 0. It affects no other row.
// Row i has the same bits at any row index, in any batch and at any stride. With Exp::kPortable it also has the same
// bits on every backend. The call enqueues its work on `stream`; it neither allocates nor synchronises. CPU backends
// ignore `stream`.
//
// process_logits works on all columns [0, vocab_size). The row's repetition, presence and frequency penalties are R, P
// and F. Its bias for column j is b. n is how often the row's history, without the prompt, holds j. The flag s says
// whether the history, prompt included, holds j. A step whose condition fails leaves z unchanged. Each operation rounds
// to fp32:
//   repeat(z) = z > 0 ? z / R : z * R
//   kVllm, kHf:  z + b where there is a bias;  repeat(z) where s;  z - F * n, then z - P where n > 0
//   kSglang:     z - (F * n + P), then repeat(z) where n > 0;  z + b where there is a bias
// Every NaN result is the canonical NaN. A row with a nonzero status has NaN in every column. To apply bias and
// penalties, call `sample` with logits = process_logits(...), row_status = its status, and raw_logits = the original
// logits. sample_processed makes both calls.
// A shard's logits are columns [vocab_start, vocab_start + num_columns) of the vocabulary. Ids are ids of the whole
// vocabulary; an id outside the shard's columns is checked and has no other effect.
//
// In the vocabulary-parallel form, each rank (a process) has a shard of the columns. The ranks exchange payloads once,
// or in four rounds. A payload is an array of words that describe a shard. For one exchange, sample_partial makes a
// payload of each shard. From the payloads of all shards, sample_merge makes the results of `sample` on the whole row.
// Every rank runs sample_merge by itself. A shard is 1, 2, 4 or 8 parts of rule 5 that make up a subtree. The shards
// hold every part once, in any order. One exchange can draw three kinds of rows:
//   greedy        : the draw is the best of the columns that rank first in their shards
//   nothing cut   : the merge uses words 0 to 2 and 7 + h above the shards' roots; each shard draws below its root in
//                   advance
//   cut by top_k  : the row's first k columns are among the shards' first k, and so is every column that min_p and
//                   top_p then leave
// So min_p > 0 and top_p < 1 need top_k > 0, and top_k is at most the payload's capacity. kSglang allows no top_p < 1,
// since its top_p is a share of the mass of the whole row. Any other row has kBadParameter. This form does not give the
// n best columns. Merges give every row, bit for bit, the results of `sample`: id, logprob, raw_logprob, kept set and
// status, except for two statuses:
//   kBadParameter : also set for a row that one exchange cannot draw
//   kBadShards    : the row's payloads do not hold every part once, or differ from the call in vocabulary, top_k, kind
//                   of row, raw_logprob or tag, or have ids and ranks that sample_partial never writes
// A row's tag is a hash of the other values that the ranks must agree on: seed, sample_id, position, stream, T, top_p,
// min_p, order, exp. Rows that differ in one of these have the same tag with probability 2^-23. The merge cannot detect
// different penalties, masks or logits.
//   a   = philox4x32-10 of (sample_id low, sample_id high, position low, stream + 2^24 order + 2^26 exp) under the
//         seed's key; order and exp are their values as SampleOrder and Exp
//   tag = upper 23 bits of word 0 of philox4x32-10 of (a_0 ^ T, a_1 ^ top_p, a_2 ^ min_p, a_3 ^ position high) under
//         key (0, 0); floats enter by their bits; a greedy row enters with T = 1, top_p = 1, min_p = 0 and its keys.
// The payload of a row has words of 32 bits; floats are stored by their bits, every NaN canonical. Unknown values are
// 0, unknown ids -1, unknown z and m -Inf:
//   0: first part + 16 * parts + 256 * (1 if there are words about the raw logits) + 512 * tag, as 32 bits
//   1, 2: vocab_size, valid_vocab
//   3: row_status and sample's statuses of parameters     4: top_k of a row that is cut, 0 of a row that is not cut, -1
//      of a greedy row
//   5, 6: root (m, S) of the shard's present columns, where the row is not cut     7, 8: root of raw_logprob
//   9 to 11: the column that ranks first, in a greedy row or a cut row: id (-1: no column is present), z, raw z; z is
//      NaN if any z is NaN
//   12 to 14: the same values of the column drawn below the root     15: number of the entries that follow
//   16 + 3 i: id, z, raw z of rank i among the present columns of a cut row, i below min(top_k, columns present)
//
// In rounds, sample_partial makes four payloads of each shard. Each round reads the earlier rounds' payloads of all
// shards. sample_merge reads those of round 4. Every row has, bit for bit, the results of `sample`: id, logprob,
// raw_logprob and status, except for kBadShards. step = ceil(vocab_size / 1024). A column's rank is stored as the
// number of 51 bits that kernels/sample/terms.h defines. It takes two words, the lower half first. Words 0 to 3 and 15
// are as in one exchange, and so is word 4 of a row that is not cut. Word 4 of a cut row is -2 - min(top_k, 2^19). In
// rounds 1 and 4, words 5 to 14 are also as in one exchange. After these 16 words, a cut row has:
//   round 1: splitters: every step-th of the shard's present columns in the order of their ranks, from the first on.
//   round 2: 1033 bins; bin i goes from splitter i - 1 of all shards to before splitter i. Their counts, then the lower
//            and the upper words of their masses, include the present columns that survive min_p (kVllm), or all.
//   round 3: candidates: ranks of these columns, by id, in the bins that may hold the last kept column.
//   round 4: nothing; the root and the drawn column belong to the kept columns.
// Round 2 knows the row's m, since the payloads of round 1 hold the column that ranks first in each shard. The bins of
// round 2 hold at most `step` columns of each shard. The counts of the bins tell which bin has the k-th column. So the
// total in the condition of top_p is known up to the mass of that bin. The last column that top_p keeps therefore lies
// in one of few bins. Round 3 sends these bins and the bin of the k-th column. Round 4 finds both columns among the
// candidates, as `sample` does. So a rank and a mass decide for each column whether it is kept. Round 4 also gives the
// kept ids of a shard, ascending, in every row without a status bit.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/ops/logprob.h"
#include "rlk/ops/random_bits.h"

namespace rlk {

enum class SampleOrder : std::uint8_t { kVllm, kHf, kSglang };

// Bits of status[i], in addition to these bits of LogprobStatus: kNanLogit, kInfLogit, kEmptyRow (no column present, or
// only -Inf) and kBadTemperature. The status bits refer to the present columns.
enum SampleStatus : std::int32_t {
  kBadParameter = 128,  // top_k outside [0, most_top_k], top_p outside (0, 1], or min_p outside [0, 1]
  kBadPosition = 256,   // position outside [0, 2^32)
  kKeptOverflow = 512,
  kBadPenalty = 1024,  // repetition not a finite normal number > 0; presence or frequency not finite
  kBadHistory = 2048,  // an id outside [0, vocab_size), or offsets that descend or are outside the entries
  kBadBias = 4096,     // kBadHistory's faults in the bias, or ids of a row that do not ascend strictly
  kBadShards = 8192,   // a bit that sample_merge alone sets
};

// One float for each row, or a single float for all rows.
struct RowFloats {
  const float* data = nullptr;  // [num_rows], or null: `value` for every row
  float value = 0.0f;
  std::int64_t stride = 0;  // in elements

  template <class Memory = PlainMemory>
  RLK_HD float at(std::int64_t row) const {
    return data == nullptr ? value : Memory::global(data)[row * stride];
  }
};

constexpr std::int64_t kSampleVocab = std::int64_t{1} << 19;  // largest vocabulary
constexpr std::int64_t kTopLogprobs = 256;                    // largest n_logprobs

struct ProcessLogitsParams {
  const void* logits = nullptr;  // [num_rows, num_columns], dtype; columns contiguous, any alignment. The kernel does
                                 // not modify them
  RowFloats repetition{nullptr, 1.0f, 0}, presence, frequency;
  RowIntegers history_ids;                        // [history_size], row after row
  const std::int64_t* history_offsets = nullptr;  // [num_rows + 1], contiguous, or null: no history
  const std::uint8_t* is_prompt = nullptr;        // [history_size], contiguous: a nonzero byte marks an
                                                  // entry of the prompt; null: there is none
  RowIntegers bias_ids;                           // [bias_size]
  const float* bias_values = nullptr;             // [bias_size], contiguous
  const std::int64_t* bias_offsets = nullptr;     // [num_rows + 1], contiguous, or null: no bias
  std::int64_t history_size = 0, bias_size = 0;
  std::int64_t logits_stride = 0, num_rows = 0, vocab_size = 0;
  std::int64_t vocab_start = 0, num_columns = 0;  // columns of `logits`; for the whole vocabulary 0 and vocab_size
  float* out = nullptr;                           // [num_rows, num_columns], contiguous; must not overlap the logits
  // A bit per column, in the layout of `allowed`, that is set for the columns in the row's history or bias. `out` is
  // then written in these columns alone. A row with a nonzero status has no bit set. Needs CUDA and float32 logits.
  std::uint32_t* edited = nullptr;  // [num_rows, edit_words(num_columns)], contiguous
  std::int32_t* status = nullptr;   // [num_rows]
  DType dtype = DType::kFloat32;    // kFloat32, kBFloat16, kFloat16
  SampleOrder order = SampleOrder::kVllm;
};

RLK_HD std::int64_t edit_words(std::int64_t columns) { return (columns + 31) / 32; }

struct SampleParams {
  const void* logits = nullptr;      // [num_rows, vocab_size], dtype; columns contiguous, any alignment. The kernel
                                     // does not modify them
  const void* raw_logits = nullptr;  // logits for raw_logprob: raw_dtype, rows raw_stride apart; null: `logits`
  const std::int32_t* row_status = nullptr;  // [num_rows], or null: faults that earlier steps found in a row
  const std::int32_t* allowed = nullptr;     // [num_rows, allowed_words], or null; bit j % 32 of word j / 32
  const std::uint8_t* is_greedy = nullptr;   // [num_rows]: a nonzero byte marks a greedy row; null: `greedy` decides
  RowFloats temperature, top_p, min_p;
  RowIntegers top_k, seed, sample_id, position;
  std::int64_t logits_stride = 0, allowed_stride = 0, greedy_stride = 0, raw_stride = 0;  // between rows, in elements
  std::int64_t num_rows = 0, vocab_size = 0, valid_vocab = 0;
  std::int64_t most_top_k = INT64_MAX;  // largest top_k of a row
  std::int64_t kept_capacity = 0;
  std::int64_t n_logprobs = 0;  // n of the n best columns; at most valid_vocab
  std::int64_t* ids = nullptr;  // [num_rows] each, contiguous
  std::int32_t* status = nullptr;
  float* logprob = nullptr;  // null: not wanted
  float* raw_logprob = nullptr;
  std::int64_t* top_ids =
      nullptr;  // [num_rows, n_logprobs] each, contiguous; null with its log-probabilities: not wanted
  float* top_logprobs = nullptr;
  std::int64_t* raw_top_ids = nullptr;  // wanted only with raw_logprob
  float* raw_top_logprobs = nullptr;
  std::int32_t* kept_ids = nullptr;      // [kept_capacity]; null, like kept_offsets: no kept sets are wanted
  std::int64_t* kept_offsets = nullptr;  // [num_rows + 1]
  void* workspace = nullptr;             // sample_workspace_bytes(...), 16-byte aligned
  std::int64_t sorted_columns = 0;       // columns per row that the workspace sorts: a shard's in round 1, else 0
  DType dtype = DType::kFloat32;         // kFloat32, kBFloat16, kFloat16
  DType raw_dtype = DType::kFloat32;
  std::int32_t random_stream = 0;  // in [0, kRandomStreams)
  Exp exp = Exp::kPortable;
  SampleOrder order = SampleOrder::kVllm;
  bool greedy = false;
  // The columns that bias or penalties change, and their z, as process_logits gives them; or null. All other columns
  // take z from `logits`.
  const std::uint32_t* edited = nullptr;
  const float* edits = nullptr;
  // If `edited` and `edits` are null, `process` may point to host memory. Then `sample` computes the edits itself,
  // where sample_edits_rows() allows it. The outputs of `process_logits` lie in the workspace of `sample`, and its
  // status becomes part of the status of `sample`.
  const ProcessLogitsParams* process = nullptr;
};

constexpr std::int64_t kPayloadHead = 16, kCandidateWords = 3;
constexpr std::int64_t kMostCandidates = 256;  // most candidates per shard
RLK_HD std::int64_t payload_words(std::int64_t capacity) { return kPayloadHead + kCandidateWords * capacity; }

constexpr int kRounds = 4;
constexpr std::int64_t kRoundSplitters = 1024, kRoundBins = kRoundSplitters + kNumParts + 1;
RLK_HD std::int64_t splitter_step(std::int64_t vocab_size) {
  return (vocab_size + kRoundSplitters - 1) / kRoundSplitters;
}
// Most splitters, bins or candidates of a payload. `num_shards` is used in round 3 alone.
RLK_HD std::int64_t round_capacity(int round, std::int64_t vocab_size, std::int64_t widest, std::int64_t num_shards) {
  const std::int64_t step = splitter_step(vocab_size);
  if (round == 1) return (widest + step - 1) / step;
  if (round == 2) return kRoundBins;
  if (round != 3) return 0;
  const std::int64_t most = (3 + num_shards + (num_shards + 3) / 4) * step + 2;
  return most < widest ? most : widest;
}
RLK_HD std::int64_t round_words(int round, std::int64_t vocab_size, std::int64_t widest, std::int64_t num_shards) {
  return kPayloadHead + (round == 2 ? 3 : 2) * round_capacity(round, vocab_size, widest, num_shards);
}

// Parameters of `sample` for whole rows, without results. `logits` and `raw_logits` alone belong to the shard: they
// hold its columns from the first on, at least all valid columns. most_top_k is the capacity of the payload.
struct SamplePartialParams : SampleParams {
  PartRange parts;
  bool takes_raw = false;           // whether the merge gives raw_logprob
  std::int32_t* payload = nullptr;  // [num_rows, words], contiguous: payload_words(most_top_k), or those of the round
  // In rounds, kept_ids and kept_offsets are results of round 4. kept_capacity is num_rows times the shard's columns.
  std::int32_t round = 0;              // 1 to 4, or 0: the only exchange
  std::int32_t num_shards = 1;         // 1 to 8; number of shards in `before`
  std::int64_t widest = 0;             // columns of the widest shard
  const std::int32_t* before[3] = {};  // payloads of earlier rounds, [num_shards, num_rows, words], contiguous
};
// Number of valid columns of a shard.
RLK_HD std::int64_t columns_of_shard(const SamplePartialParams& p) {
  const std::int64_t first = part_cut(p.vocab_size, p.parts.first);
  const std::int64_t end = part_cut(p.vocab_size, p.parts.first + p.parts.count);
  return first >= p.valid_vocab ? 0 : (end < p.valid_vocab ? end : p.valid_vocab) - first;
}
// The parameters of `sample`, without the inputs of a shard: logits, raw_logits and row_status are null.
struct SampleMergeParams : SampleParams {
  const std::int32_t* payload = nullptr;  // [num_shards, num_rows, words], contiguous; words as for sample_partial
  std::int32_t num_shards = 1;            // 1 to 8
  bool in_rounds = false;                 // whether the payloads come from round 4
};

std::int64_t sample_workspace_bytes(const SampleParams& p, Device device);  // enough for sample_partial and
                                                                            // sample_merge, too
void sample_partial(const SamplePartialParams& p, Device device, Stream stream);
void sample_merge(const SampleMergeParams& p, Device device, Stream stream);
void sample(const SampleParams& p, Device device, Stream stream);
void process_logits(const ProcessLogitsParams& p, Device device, Stream stream);
bool sample_takes_edits(const SampleParams& p, Device device);  // whether these logits may have edited columns
// Whether `sample` computes the edits of these rows itself.
bool sample_edits_rows(const SampleParams& p, const ProcessLogitsParams& edits, Device device);

// Runs `process_logits`, then `sample` on its result. The logits are inputs of `process`. The caller leaves the outputs
// of `process` unset. `draw` has the other parameters of `sample`, with the sizes and the dtype of these logits.
struct ProcessedSampleParams {
  ProcessLogitsParams process;
  SampleParams draw;
  void* workspace = nullptr;  // processed_sample_workspace_bytes(...), 16-byte aligned
};
std::int64_t processed_sample_workspace_bytes(const ProcessedSampleParams& p, Device device);
void sample_processed(const ProcessedSampleParams& p, Device device, Stream stream);

}  // namespace rlk
