// The kernels that finish rows after a scan: a block of threads calls a FinishedRow's steps. All architectures share
// this source.
#pragma once

#include "../common/dependent_launch.cuh"
#include "finish.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Hides a number's value from the compiler. A rare path computes its addresses from the hidden number, so the compiler
// cannot compute them earlier, where they would occupy registers.
__device__ __forceinline__ std::int64_t hidden(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// kFirst: the first steps, up to where a row may wait. kOnly: all steps of a call in which no row can wait. kWhole: all
// steps, in one launch even for rows that would wait. kRest: the steps after the wait. kRaw: the steps after the raw
// scan.
enum class Finish { kFirst, kOnly, kWhole, kRest, kRaw };

// Blocks that fit on a multiprocessor. With two blocks on sm_80, the code for all steps would spill registers.
template <Finish kFinish>
constexpr int kFinishBlocks = kFinish == Finish::kWhole && !RLK_CUDA_SM90 ? 1 : 2;

template <class T, Exp kExp, Finish kFinish>
__global__ void __launch_bounds__(kRowThreads, kFinishBlocks<kFinish>)
    sample_finish_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  // The random words and the slots depend on the call's arguments alone, so the constructor may read them before it
  // waits for the previous kernel.
  FinishedRow<T, kExp> row(p, chunk, i, reinterpret_cast<FinishShared*>(memory), kFinish != Finish::kFirst);
  wait_for_previous_kernel();
  allow_next_kernel();
  if constexpr (kFinish == Finish::kFirst) {
    typename FinishedRow<T, kExp>::Waiting waiting;
    if (!row.template run<false>(&waiting)) return row.store_count();
    __syncthreads();
    MassCut<T, kExp> cut(p, chunk, i, reinterpret_cast<FinishShared*>(memory), row.map());
    row.wait(waiting, cut.find_bracket(waiting.row));
  } else if constexpr (kFinish == Finish::kOnly || kFinish == Finish::kWhole) {
    typename FinishedRow<T, kExp>::Waiting waiting;
    const bool waits = row.template run<true>(&waiting);
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

template <class T, Exp kExp>
__global__ void __launch_bounds__(kRowThreads, 2)
    sample_selection_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  auto* const shared = reinterpret_cast<FinishShared*>(memory);
  const SlotMap map = SlotMap::make(p, shared->cuts);
  __syncthreads();
  MassCut<T, kExp> of_row(p, chunk, i, shared, map);
  wait_for_previous_kernel();
  allow_next_kernel();
  of_row.cut();
  __syncthreads();
  const std::int64_t again = hidden(i);
  const std::int32_t waits = chunk.states[again].waits;
  if (waits != kForSelection && waits != kForTree) return;
  FinishedRow<T, kExp> row(p, chunk, again, shared, false);
  row.run_selection();
  __syncthreads();
  row.find_few();
}

}  // namespace
}  // namespace rlk::cuda
