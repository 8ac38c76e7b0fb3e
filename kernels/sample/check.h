// Preconditions of a sample call on every backend, and the layout of the call's workspace.
#pragma once

#include "kernels/sample/row.h"

namespace rlk {

// Whether a parameter may cut rows: every row has its own value, or all rows have a value other than `nothing`.
template <class Values, class N>
bool cuts(const Values& x, N nothing) {
  return x.data != nullptr || x.value != nothing;
}
// on CUDA: the largest top_k for which a list of the row's columns with the lowest ranks can replace a search
constexpr int kMostListedK = 512;
// On CUDA: whether such a list cuts every row by one top_k, if top_k is below valid_vocab.
inline bool cuts_by_list(const SampleParams& p) {
  return p.top_k.data == nullptr && p.top_k.value > 0 && p.top_k.value <= kMostListedK &&
         (p.order != SampleOrder::kSglang || !cuts(p.top_p, 1.0f));
}
// On CUDA: whether the blocks that finish rows also compute the rows' penalties and biases (edits). For this, every row
// must have a top_k that a list of columns can cut, and rows must have few entries on average.
constexpr std::int64_t kFewEditSlots = 2048, kMeanEntries = 640;
inline bool finish_edits(const SampleParams& p, const ProcessLogitsParams& edits) {
  return cuts_by_list(p) && p.top_k.value < p.valid_vocab && !p.greedy && p.is_greedy == nullptr &&
         p.top_ids == nullptr && sample_leaf_slots(p.vocab_size) <= kFewEditSlots &&
         edits.history_size + edits.bias_size <= kMeanEntries * p.num_rows;
}

// Checks that whole rows and shards share. takes_edited: whether the backend reads columns that process_logits has
// changed (edited).
inline void check_rows_of_sample(const SampleParams& p, bool takes_edited = false) {
  RLK_CHECK(p.num_rows >= 0 && p.num_rows < std::int64_t{1} << 31, "sample: fewer than 2^31 rows");
  RLK_CHECK(p.vocab_size >= 1 && p.vocab_size <= kSampleVocab, "sample: 1 to 2^19 columns");
  RLK_CHECK(p.valid_vocab >= 1 && p.valid_vocab <= p.vocab_size, "sample: valid_vocab is in [1, vocab_size]");
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            "sample: logits are float32, bfloat16 or float16");
  RLK_CHECK(p.random_stream >= 0 && p.random_stream < kRandomStreams, "sample: the stream is in [0, 2^24)");
  RLK_CHECK(p.edited == nullptr || (takes_edited && p.dtype == DType::kFloat32 && p.edits != nullptr),
            "sample: CUDA alone takes edited columns, of float32");
  RLK_CHECK(p.process == nullptr || (takes_edited && p.dtype == DType::kFloat32 && p.edited == nullptr &&
                                     p.row_status == nullptr && finish_edits(p, *p.process)),
            "sample: CUDA alone computes edits, of rows of float32 that a list cuts");
}
inline void check_results_of_sample(const SampleParams& p) {
  RLK_CHECK(p.kept_capacity >= 0 && (p.kept_ids != nullptr || p.kept_capacity == 0 || p.kept_offsets == nullptr),
            "sample: kept_ids are given");
  RLK_CHECK(p.num_rows == 0 || (p.ids != nullptr && p.status != nullptr), "sample: ids and status are given");
}
inline void check_sample(const SampleParams& p, bool takes_edited = false) {
  check_rows_of_sample(p, takes_edited);
  check_results_of_sample(p);
  RLK_CHECK(p.n_logprobs >= 0 && p.n_logprobs <= kTopLogprobs && p.n_logprobs <= p.valid_vocab,
            "sample: n_logprobs is in [0, 256] and at most valid_vocab");
  RLK_CHECK((p.top_ids == nullptr) == (p.top_logprobs == nullptr) &&
                (p.raw_top_ids == nullptr) == (p.raw_top_logprobs == nullptr),
            "sample: the n best have ids and log-probabilities");
  RLK_CHECK(p.raw_top_ids == nullptr || p.raw_logprob != nullptr, "sample: raw_top_ids are wanted with raw_logprob");
  RLK_CHECK(p.num_rows == 0 || p.logits != nullptr, "sample: logits are given");
}
inline void check_sample_partial(const SamplePartialParams& p) {
  check_rows_of_sample(p);
  RLK_CHECK(p.round >= 0 && p.round <= kRounds, "sample_partial: the round is 1 to 4, or 0");
  RLK_CHECK(p.round > 0 || (p.most_top_k >= 0 && p.most_top_k <= kMostCandidates),
            "sample_partial: the capacity is in [0, 256]");
  const PartRange& own = p.parts;
  RLK_CHECK(own.count == 0 || own.count == 1 || own.count == 2 || own.count == 4 || own.count == 8,
            "sample_partial: a shard has 0, 1, 2, 4 or 8 parts");
  RLK_CHECK(own.first >= 0 && own.first + own.count <= kNumParts && (own.count == 0 || own.first % own.count == 0),
            "sample_partial: the parts make up a subtree");
  RLK_CHECK(p.num_rows == 0 || (p.payload != nullptr && (own.count == 0 || p.logits != nullptr)),
            "sample_partial: logits and payload are given");
  RLK_CHECK(p.num_shards >= 1 && p.num_shards <= kNumParts, "sample_partial: 1 to 8 shards");
  const std::int64_t columns = own.count == 0 ? 0 : columns_of_shard(p);
  RLK_CHECK(p.round == 0 || (p.widest >= columns && p.widest <= p.vocab_size),
            "sample_partial: no shard is wider than the widest");
  RLK_CHECK(p.sorted_columns == (p.round == 1 ? columns : 0), "sample_partial: round 1 sorts the shard's columns");
  for (int k = 1; k < p.round; ++k) {
    RLK_CHECK(p.num_rows == 0 || p.before[k - 1] != nullptr, "sample_partial: the rounds before are given");
  }
  RLK_CHECK(p.kept_offsets == nullptr || (p.round == kRounds && p.kept_capacity >= p.num_rows * columns &&
                                          (p.kept_ids != nullptr || p.kept_capacity == 0)),
            "sample_partial: round 4 has kept sets, with room for every column");
}
inline void check_sample_merge(const SampleMergeParams& p) {
  check_rows_of_sample(p);
  check_results_of_sample(p);
  RLK_CHECK(p.in_rounds || (p.most_top_k >= 0 && p.most_top_k <= kMostCandidates),
            "sample_merge: the capacity is in [0, 256]");
  RLK_CHECK(!p.in_rounds || p.kept_offsets == nullptr, "sample_merge: round 4 has the kept sets");
  RLK_CHECK(p.num_shards >= 1 && p.num_shards <= kNumParts, "sample_merge: 1 to 8 shards");
  RLK_CHECK(p.row_status == nullptr && p.top_ids == nullptr && p.raw_top_ids == nullptr,
            "sample_merge: no status of rows and no n best");
  RLK_CHECK(p.num_rows == 0 || p.payload != nullptr, "sample_merge: payloads are given");
}
static_assert(kNumParts * kMostCandidates <= kListColumns && kMostCandidates <= kMaxTeam);

static_assert(kRoundBins <= kListColumns && kRoundBins <= kDigitBins);

// A launch processes a chunk of rows. In the workspace, the chunk has the arrays
// [flag][states][firsts][masks][nodes][sorted ranks][listed ranks].
constexpr std::int64_t kSampleChunk = 1024, kSortChunk = 128, kSampleFlagBytes = 16;
inline std::int64_t sample_chunk_rows(const SampleParams& p) {
  return p.sorted_columns > 0 ? kSortChunk : kSampleChunk;
}
// On CUDA: number of ranks per row for which the workspace has room. The listed ranks are those of the columns that may
// be the last one that top_p keeps: about 3,800 of 65,536 normally distributed columns.
inline std::int64_t sample_listed_columns(const SampleParams& p) {
  if (!cuts(p.top_p, 1.0f)) return 0;
  const std::int64_t share = 8 * sample_leaf_slots(p.vocab_size), most = share < 8192 ? 8192 : share;
  return p.vocab_size < most ? p.vocab_size : most;
}
struct SampleWorkspace {
  std::int64_t states, firsts, masks, nodes, sorted, listed, bytes;
};
inline SampleWorkspace sample_workspace(const SampleParams& p) {
  const std::int64_t rows = p.num_rows < sample_chunk_rows(p) ? p.num_rows : sample_chunk_rows(p);
  const std::int64_t firsts = kSampleFlagBytes + rows * static_cast<std::int64_t>(sizeof(SampleState));
  const std::int64_t masks = firsts + rows * kMaxTeam * 8;
  const std::int64_t nodes = masks + rows * sample_mask_words(p.vocab_size) * 4;
  const std::int64_t sorted = nodes + rows * sample_node_floats(p.vocab_size) * 4;
  const std::int64_t listed = sorted + rows * p.sorted_columns * 2 * 8;
  return {kSampleFlagBytes, firsts, masks, nodes, sorted, listed, listed + rows * sample_listed_columns(p) * 8};
}

// The parts of the workspace that the rows of a launch use.
struct SampleChunk {
  std::int64_t first = 0, rows = 0;
  std::uint32_t* closed = nullptr;  // whether the kept set of an earlier row did not fit
  SampleState* states = nullptr;
  std::uint64_t* firsts = nullptr;
  std::uint32_t* masks = nullptr;
  float* nodes = nullptr;
  std::uint64_t* sorted = nullptr;
  std::uint64_t* listed = nullptr;
  std::int64_t most_listed = 0;  // per row
};
inline SampleChunk sample_chunk(const SampleParams& p, std::int64_t first, void* workspace) {
  const SampleWorkspace at = sample_workspace(p);
  auto* const base = static_cast<unsigned char*>(workspace);
  const std::int64_t left = p.num_rows - first;
  return {first,
          left < sample_chunk_rows(p) ? left : sample_chunk_rows(p),
          reinterpret_cast<std::uint32_t*>(base),
          reinterpret_cast<SampleState*>(base + at.states),
          reinterpret_cast<std::uint64_t*>(base + at.firsts),
          reinterpret_cast<std::uint32_t*>(base + at.masks),
          reinterpret_cast<float*>(base + at.nodes),
          reinterpret_cast<std::uint64_t*>(base + at.sorted),
          reinterpret_cast<std::uint64_t*>(base + at.listed),
          sample_listed_columns(p)};
}

}  // namespace rlk
