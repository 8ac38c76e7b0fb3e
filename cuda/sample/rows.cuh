// Launches of sample for any number of rows. A scan reads all logits; then one block per row computes the rest. A call
// whose rows may keep many columns scans once more, over these columns. The row's last block writes its kept set,
// whose place it finds by the counts of the rows before it. Bound by reads of the logits: one, or two for many kept
// columns. A cut by top_p adds one read, and a search for a cut that no list holds adds two to five.
#pragma once

#include "best.cuh"
#include "finish.cuh"
#include "kept_ids.cuh"
#include "leaf_scan.cuh"
#include "rlk/kernels/sample_kept.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Bytes of shared memory of every kernel that uses SampleShared alone.
constexpr int kSharedBytes = sizeof(SampleShared);
static_assert(kSharedBytes <= 48 * 1024);

__global__ void __launch_bounds__(kRowThreads)
    sample_offsets_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  wait_for_previous_kernel();
  allow_next_kernel();
  offsets_of_counts(BlockTeam<kRowThreads>(), p, chunk.first, chunk.rows, chunk.closed,
                    reinterpret_cast<SampleShared*>(memory));
}

__global__ void __launch_bounds__(kKeptThreads)
    sample_kept_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  __shared__ int cuts[kNumParts + 1];
  __shared__ std::uint32_t counts[kKeptThreads / kWarp];
  const std::int64_t row = chunk.first + blockIdx.x, words = sample_mask_words(p.vocab_size);
  const SlotMap map = SlotMap::make(p, cuts);
  wait_for_previous_kernel();
  const std::int64_t begin = p.kept_offsets[row];
  if (begin == p.kept_offsets[row + 1]) return;
  write_ids_of_mask<kKeptThreads>(map, chunk.masks + blockIdx.x * words, static_cast<int>(words), p.kept_ids + begin,
                                  counts);
}

// Launches a block for each row after this call's previous kernel.
template <class... Args>
void launch_rows(void (*kernel)(Args...), const SampleChunk& chunk, cudaStream_t stream, const Args&... args) {
  launch_dependent<RLK_CUDA_ARCH::kOverlap>(kernel, static_cast<int>(chunk.rows), kRowThreads, sizeof(FinishShared),
                                            stream, args...);
}
template <class T, bool kRaw>
void run_best(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  if (p.top_ids != nullptr) launch_rows(sample_best_kernel<T, kRaw>, chunk, stream, p, chunk);
}
// Whether the rows that wait after the first scan are an exception (ties), or may be many.
enum class Waiting { kNever, kRarely, kOften };
inline bool cuts(const RowFloats& x, float nothing) { return x.data != nullptr || x.value != nothing; }
inline Waiting waiting_of(const SampleParams& p) {
  const bool by_share = cuts(p.top_p, 1.0f), by_list = p.order != SampleOrder::kSglang || !by_share;
  if (p.top_k.data == nullptr && p.top_k.value > 0 && p.top_k.value <= kMostListedK && by_list) return Waiting::kRarely;
  const bool by_count = p.top_k.data != nullptr || p.top_k.value > 0;
  return by_share || cuts(p.min_p, 0.0f) || by_count ? Waiting::kOften : Waiting::kNever;
}
template <class T, Exp kExp>
void run_rows(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk, cudaStream_t stream) {
  const Waiting waiting = waiting_of(p);
  // Calls without a list lose up to 3 us at 256 rows if their scan begins early.
  if (waiting == Waiting::kRarely) {
    run_pass<T, kExp, ScanPass::kFirst, true>(p, grid, chunk, stream);
  } else {
    run_pass<T, kExp, ScanPass::kFirst, false>(p, grid, chunk, stream);
  }
  if (waiting == Waiting::kNever) {
    launch_rows(sample_finish_kernel<T, kExp, Finish::kOnly>, chunk, stream, p, chunk);
  } else if (waiting == Waiting::kRarely) {
    launch_rows(sample_finish_kernel<T, kExp, Finish::kWhole>, chunk, stream, p, chunk);
  } else {
    launch_rows(sample_finish_kernel<T, kExp, Finish::kFirst>, chunk, stream, p, chunk);
    const bool by_share = cuts(p.top_p, 1.0f), by_count = p.top_k.data != nullptr || p.top_k.value > 0;
    const bool by_mass = by_share && (p.top_k.data != nullptr || p.top_k.value <= 0 || p.top_k.value >= p.valid_vocab);
    if (by_mass) run_pass<T, kExp, ScanPass::kMasses, true>(p, grid, chunk, stream);
    if (by_share || by_count) launch_rows(sample_selection_kernel<T, kExp>, chunk, stream, p, chunk);
    run_pass<T, kExp, ScanPass::kKept, true>(p, grid, chunk, stream);
    launch_rows(sample_finish_kernel<T, kExp, Finish::kRest>, chunk, stream, p, chunk);
  }
  run_best<T, false>(p, chunk, stream);
}
template <class T, Exp kExp>
void run_raw(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk, cudaStream_t stream) {
  run_pass<T, kExp, ScanPass::kRaw, true>(p, grid, chunk, stream);
  launch_rows(sample_finish_kernel<T, kExp, Finish::kRaw>, chunk, stream, p, chunk);
  run_best<T, true>(p, chunk, stream);
}
// Calls fn<T, kExp>() for the params' type and exponential.
template <class F>
void by_type_and_mode(const SampleParams& p, F fn) {
  const auto by_mode = [&](auto type) {
    p.exp == Exp::kHardware ? fn.template operator()<decltype(type), Exp::kHardware>()
                            : fn.template operator()<decltype(type), Exp::kPortable>();
  };
  p.dtype == DType::kFloat32 ? by_mode(Fp32()) : p.dtype == DType::kBFloat16 ? by_mode(Bf16()) : by_mode(Fp16());
}

// Writes the kept sets of a shard's rows, which earlier launches have marked and counted.
inline void run_kept(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  if (p.kept_offsets == nullptr) return;
  launch_dependent<RLK_CUDA_ARCH::kOverlap>(sample_offsets_kernel, 1, kRowThreads, kSharedBytes, stream, p, chunk);
  launch_dependent<RLK_CUDA_ARCH::kOverlap>(sample_kept_kernel, static_cast<int>(chunk.rows), kKeptThreads, 0, stream,
                                            p, chunk);
}

inline void run(const SampleParams& p, cudaStream_t stream) {
  const SampleParams of_raw = raw_pass(p);
  const GroupGrid grid = group_grid({0, kNumParts}, p.vocab_size, p.valid_vocab);
  for (std::int64_t first = 0; first < p.num_rows; first += kSampleChunk) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    by_type_and_mode(p, [&]<class T, Exp kExp>() { run_rows<T, kExp>(p, grid, chunk, stream); });
    if (p.raw_logprob != nullptr) {
      by_type_and_mode(of_raw, [&]<class T, Exp kExp>() { run_raw<T, kExp>(of_raw, grid, chunk, stream); });
    }
  }
}

}  // namespace
}  // namespace rlk::cuda
