// The kernels that finish rows after a scan: a block of threads calls a FinishedRow's steps. All architectures share
// this source.
#pragma once

#include "../common/dependent_launch.cuh"
#include "finish.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// kFirst: the first steps, up to the point at which a row may need later launches. kShare: the same steps for a call
// without top_k. kOnly: all steps of a call in which no row needs later launches. kWhole: all steps in one launch, even
// for rows that would otherwise wait. kRest: the steps after the wait. kRaw: the steps after the raw scan.
enum class Finish { kFirst, kShare, kOnly, kWhole, kRest, kRaw };

// Threads per block. In a block of kManyThreads, a thread has 64 registers.
template <Finish kFinish>
constexpr int kFinishThreads = kFinish == Finish::kShare || kFinish == Finish::kRest ? kManyThreads : kRowThreads;
// Blocks that fit on a multiprocessor. With two blocks on sm_80, the code for all steps would spill registers.
template <Finish kFinish>
constexpr int kFinishBlocks = kFinish == Finish::kWhole && !RLK_CUDA_SM90 ? 1 : 2;

template <class T, Exp kExp, Finish kFinish>
__global__ void __launch_bounds__(kFinishThreads<kFinish>, kFinishBlocks<kFinish>)
    sample_finish_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  // The random words and the slots depend only on the call's arguments. So the constructor may compute them before the
  // block waits for the previous kernel.
  using Row = FinishedRow<T, kExp, kFinishThreads<kFinish>>;
  Row row(p, chunk, i, reinterpret_cast<FinishShared*>(memory), kFinish != Finish::kFirst && kFinish != Finish::kShare);
  wait_for_previous_kernel();
  allow_next_kernel();
  if constexpr (kFinish == Finish::kFirst || kFinish == Finish::kShare) {
    typename Row::Waiting waiting;
    if (!row.template run<false, kFinish == Finish::kFirst>(&waiting)) return row.store_count();
    __syncthreads();
    MassCut<T, kExp, kFinishThreads<kFinish>> cut(p, chunk, i, reinterpret_cast<FinishShared*>(memory), row.map());
    row.wait(waiting, cut.find_bracket(waiting.row));
  } else if constexpr (kFinish == Finish::kOnly || kFinish == Finish::kWhole) {
    typename Row::Waiting waiting;
    const bool waits = row.template run<true, true>(&waiting);
    if (kFinish == Finish::kWhole && waits) {
      row.wait(waiting, false);
      row.run_alone();
    }
    row.write_kept();
  } else if constexpr (kFinish == Finish::kRest) {
    row.run_rest();
  } else {
    row.run_raw();
  }
}

// `kByCount`: rows may have a top_k. The code for top_k, and the code for 16-bit logits, needs more registers than a
// thread has in a block of kManyThreads.
template <class T, bool kByCount>
constexpr int kSelectionThreads = kByCount || T::kPacked ? kRowThreads : kManyThreads;

template <class T, Exp kExp, bool kByCount>
__global__ void __launch_bounds__(kSelectionThreads<T, kByCount>, 2)
    sample_selection_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  auto* const shared = reinterpret_cast<FinishShared*>(memory);
  const SlotMap map = SlotMap::make(p, shared->cuts);
  __syncthreads();
  MassCut<T, kExp, kSelectionThreads<T, kByCount>> of_row(p, chunk, i, shared, map);
  wait_for_previous_kernel();
  allow_next_kernel();
  of_row.cut();
  __syncthreads();
  const std::int64_t again = hidden(i);
  const std::int32_t waits = chunk.states[again].waits;
  if (waits != kForSelection && waits != kForTree) return;
  if (thread_of_block() >= kRowThreads) return;  // barriers do not count threads that have returned
  if (waits == kForSelection) select_row<T, kExp, kByCount>(p, chunk, again, &shared->base);
  __syncthreads();
  FinishedRow<T, kExp>(p, chunk, hidden(again), shared, false).find_few();
}

}  // namespace
}  // namespace rlk::cuda
