// Declares the launches of sample's source files. Each source file compiles few kernels, and has the explicit
// instantiations of its templates.
#pragma once

#include "../common/element.cuh"
#include "../common/kernels.h"
#include "kernels/sample/check.h"
#include "kernels/sample/process_logits.h"

namespace rlk::cuda {

// by_type calls fn<T>() for the type of the logits. by_type_and_mode calls fn<T, kExp>() for their type and exponential.
template <class F>
void by_type(const SampleParams& p, F fn) {
  p.dtype == DType::kFloat32    ? fn.template operator()<Fp32>()
  : p.dtype == DType::kBFloat16 ? fn.template operator()<Bf16>()
                                : fn.template operator()<Fp16>();
}
template <class F>
void by_type_and_mode(const SampleParams& p, F fn) {
  by_type(p, [&]<class T>() {
    p.exp == Exp::kHardware ? fn.template operator()<T, Exp::kHardware>() : fn.template operator()<T, Exp::kPortable>();
  });
}

namespace {  // each architecture has its own copy of this code

// The arrays of a chunk's i-th row.
struct ChunkRow {
  std::int64_t row;  // the row's number in the call
  std::uint32_t* mask;
  SampleState* state;
  std::uint64_t* firsts;
  float* nodes;
  std::uint64_t* sorted;
};
__device__ __forceinline__ ChunkRow row_of(const SampleParams& p, const SampleChunk& chunk, std::int64_t i) {
  return {chunk.first + i,
          chunk.masks + i * sample_mask_words(p.vocab_size),
          chunk.states + i,
          chunk.firsts + i * kMaxTeam,
          chunk.nodes + i * sample_node_floats(p.vocab_size),
          chunk.sorted + i * 2 * p.sorted_columns};
}

}  // namespace

namespace RLK_CUDA_ARCH {

// sample_rows computes the results of a chunk (the rows of one launch), except the n best. sample_raw computes the raw
// log-probabilities. sample_rows.cu defines both functions.
template <class T, Exp kExp>
void sample_rows(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream);
template <class T, Exp kExp>
void sample_raw(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream);
// Computes the results of rows whose edits the finishing blocks compute, after the first scan. sample_edited.cu defines
// this function.
template <class T, Exp kExp>
void finish_edited_rows(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream);
// Computes the n best of a chunk's rows, if the call requests them.
void sample_best(const SampleParams& p, const SampleChunk& chunk, bool raw, cudaStream_t stream);
// Writes the kept sets of a shard's rows; earlier launches have marked and counted the kept columns.
void sample_kept(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream);

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
