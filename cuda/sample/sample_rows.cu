// Launches of sample for any number of rows. A scan reads all logits; then one block per row computes the rest. If rows
// may keep many columns, a further scan reads these columns once more. The last block of a row writes the row's kept
// set; the counts of earlier rows give its place. Reads of the logits limit the speed: one read, or two if many columns
// are kept. A cut by top_p adds one read. If no list can hold a row's cut, the search for the cut adds two to five
// reads. CMake compiles this file once per architecture, type of logits and exponential.

#include "finish_kernels.cuh"
#include "launches.cuh"
#include "leaf_scan.cuh"
#if RLK_CUDA_SM90
#include "cluster_run_sm90.cuh"
#endif

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// Launches a block of `threads` threads for each row, after this call's previous kernel.
template <class... Args>
void launch_rows(void (*kernel)(Args...), int threads, const SampleChunk& chunk, cudaStream_t stream,
                 const Args&... args) {
  launch_dependent<RLK_CUDA_ARCH::kOverlap>(kernel, static_cast<int>(chunk.rows), threads, sizeof(FinishShared), stream,
                                            args...);
}
// Launches a kernel that finishes rows, with the steps of kFinish.
template <class T, Exp kExp, Finish kFinish>
void launch_finish(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  launch_rows(sample_finish_kernel<T, kExp, kFinish>, kFinishThreads<kFinish>, chunk, stream, p, chunk);
}
template <class T, Exp kExp, bool kByCount>
void launch_selection(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  launch_rows(sample_selection_kernel<T, kExp, kByCount>, kSelectionThreads<T, kByCount>, chunk, stream, p, chunk);
}
// How many rows may wait for later launches after the first scan: none, only exceptions (ties), or many.
enum class Waiting { kNever, kRarely, kOften };
inline Waiting waiting_of(const SampleParams& p) {
  if (cuts_by_list(p)) return Waiting::kRarely;
  return cuts(p.top_p, 1.0f) || cuts(p.min_p, 0.0f) || cuts(p.top_k, 0) ? Waiting::kOften : Waiting::kNever;
}
inline GroupGrid grid_of(const SampleParams& p) { return group_grid({0, kNumParts}, p.vocab_size, p.valid_vocab); }

}  // namespace

namespace RLK_CUDA_ARCH {

template <class T, Exp kExp>
void sample_rows(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  const GroupGrid grid = grid_of(p);
#if RLK_CUDA_SM90
  if (run_cluster_rows<T, kExp>(p, grid, chunk, stream)) return;
#endif
  const Waiting waiting = waiting_of(p);
  // Only calls with a list gain from a scan that begins early. Other calls lose up to 3 us at 256 rows.
  if (waiting == Waiting::kRarely) {
    run_pass<T, kExp, ScanPass::kFirst, true>(p, grid, chunk, stream);
  } else {
    run_pass<T, kExp, ScanPass::kFirst, false>(p, grid, chunk, stream);
  }
  if (waiting == Waiting::kNever) {
    launch_finish<T, kExp, Finish::kOnly>(p, chunk, stream);
  } else if (waiting == Waiting::kRarely) {
    if constexpr (!T::kPacked) {
      if (p.process != nullptr) return finish_edited_rows<T, kExp>(p, chunk, stream);
    }
    launch_finish<T, kExp, Finish::kWhole>(p, chunk, stream);
  } else {
    const bool by_share = cuts(p.top_p, 1.0f), by_count = cuts(p.top_k, 0);
    if (by_count) {
      launch_finish<T, kExp, Finish::kFirst>(p, chunk, stream);
    } else {
      launch_finish<T, kExp, Finish::kShare>(p, chunk, stream);
    }
    const bool by_mass = by_share && (p.top_k.data != nullptr || p.top_k.value <= 0 || p.top_k.value >= p.valid_vocab);
    if (by_mass) run_pass<T, kExp, ScanPass::kMasses, true>(p, grid, chunk, stream);
    if (by_count) {
      launch_selection<T, kExp, true>(p, chunk, stream);
    } else if (by_share) {
      launch_selection<T, kExp, false>(p, chunk, stream);
    }
    run_pass<T, kExp, ScanPass::kKept, true>(p, grid, chunk, stream);
    launch_finish<T, kExp, Finish::kRest>(p, chunk, stream);
  }
}
template <class T, Exp kExp>
void sample_raw(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  run_pass<T, kExp, ScanPass::kRaw, true>(p, grid_of(p), chunk, stream);
  launch_finish<T, kExp, Finish::kRaw>(p, chunk, stream);
}

template void sample_rows<RLK_PART>(const SampleParams&, const SampleChunk&, cudaStream_t);
template void sample_raw<RLK_PART>(const SampleParams&, const SampleChunk&, cudaStream_t);

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
