// Finds the n best columns of a row, in the leaves that may hold these columns. Each block processes one row. CMake
// compiles this file once per architecture.
#include "../common/dependent_launch.cuh"
#include "first_columns.cuh"
#include "kernels/sample/top.h"
#include "launches.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

template <class T, bool kRaw>
class BestOfRow : RowTop<BlockTeam<kRowThreads>, T, kRaw> {
  using Base = RowTop<BlockTeam<kRowThreads>, T, kRaw>;

 public:
  using Base::is_allowed, Base::has_edits, Base::is_edited, Base::edit_at;
  __device__ __forceinline__ float logit_at(int column) const { return T::load(this->logits_[column]); }

  __device__ BestOfRow(const SampleParams& p, std::int64_t row, FinishShared* shared, std::uint32_t* mask,
                       SampleState* state, std::uint64_t* firsts, const float* nodes)
      : Base(BlockTeam<kRowThreads>(), p, row, &shared->base, mask, state, firsts, nodes),
        s_(*shared),
        slots_(static_cast<int>(sample_leaf_slots(p.vocab_size))),
        tops_(nodes + 2 * slots_),
        map_(SlotMap::make(p, shared->cuts)) {}
  __device__ void run() {
    if (this->fails()) return;
    if (!kRaw && (this->p_.status[this->row_] & kKeptOverflow) != 0) return this->write_none();
    __syncthreads();
    const auto count = static_cast<std::uint32_t>(this->p_.n_logprobs);
    const auto keys = load_keys<kRowThreads>(tops_, slots_, map_, &s_);
    const FirstColumns found = list_first_columns(keys, count, map_, &s_, *this);
    // If the bound is 0, no column was left out, so a list of fewer than n columns has all columns.
    if (found.size < 0 || (found.size < static_cast<int>(count) && found.bound > 0)) return this->run_from(false);
    this->list_size_ = found.size;
    this->listed_ = true;
    this->write_listed();
  }

 private:
  FinishShared& s_;
  const int slots_;
  const float* const tops_;
  const SlotMap map_;
};

template <class T, bool kRaw>
__global__ void __launch_bounds__(kRowThreads, 2)
    sample_best_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const ChunkRow own = row_of(p, chunk, blockIdx.x);
  wait_for_previous_kernel();
  allow_next_kernel();
  BestOfRow<T, kRaw>(p, own.row, reinterpret_cast<FinishShared*>(memory), own.mask, own.state, own.firsts, own.nodes)
      .run();
}

template <class T>
void run(const SampleParams& p, const SampleChunk& chunk, bool raw, cudaStream_t stream) {
  launch_dependent<RLK_CUDA_ARCH::kOverlap>(raw ? sample_best_kernel<T, true> : sample_best_kernel<T, false>,
                                            static_cast<int>(chunk.rows), kRowThreads, sizeof(FinishShared), stream, p,
                                            chunk);
}

}  // namespace

namespace RLK_CUDA_ARCH {

void sample_best(const SampleParams& p, const SampleChunk& chunk, bool raw, cudaStream_t stream) {
  if (p.top_ids == nullptr) return;
  by_type(p, [&]<class T>() { run<T>(p, chunk, raw, stream); });
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
