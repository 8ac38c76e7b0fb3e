// Macros that define the kernels of passes over tokens. A Batch (kernels/tokens/terms.h) describes an operator.
//
//   RLK_TOKEN_STATISTICS(operator, Batch): the first pass, and the pass that turns its sums into values of sequences
//
//   RLK_TOKEN_TERMS(operator, name, Batch, Terms): the pass over tokens, with the class Terms for each group of sums
//
//   RLK_TOKEN_SUMS(operator, Batch): the passes that sum over the batch
#pragma once

#include "hip/tokens/gpu.h"
#include "kernels/tokens/passes.h"

#define RLK_TOKEN_KERNEL(op, name, Batch, threads) \
  RLK_KERNEL(threads) rlk_##op##_##name(Batch::Params p, std::int64_t first_block, rlk::TokenWorkspace<Batch> w
#define RLK_TOKEN_SHARED(...) rlk::hip::TokenGpu::shared<__VA_ARGS__>()

#define RLK_TOKEN_STATISTICS(op, Batch)                                                                \
  RLK_TOKEN_KERNEL(op, statistics, Batch, rlk::kTokenThreads), std::int64_t slots, int tile) {         \
    rlk::token_statistics<rlk::hip::TokenGpu>(p, w, slots, tile, first_block + rlk::hip::block_id_x(), \
                                              RLK_TOKEN_SHARED(rlk::WaveResults));                     \
  }                                                                                                    \
  RLK_TOKEN_KERNEL(op, sequences, Batch, rlk::kGatherThreads), int tile, int lanes) {                  \
    rlk::token_sequences<rlk::hip::TokenGpu>(p, w, tile, lanes, first_block + rlk::hip::block_id_x(),  \
                                             RLK_TOKEN_SHARED(rlk::GatheredSums));                     \
  }

#define RLK_TOKEN_TERMS(op, name, Batch, ...)                                                                         \
  RLK_TOKEN_KERNEL(op, name, Batch, rlk::kTokenThreads), std::int64_t slots, int tile) {                              \
    rlk::token_terms<rlk::hip::TokenGpu, Batch, __VA_ARGS__>(p, w, slots, tile, first_block + rlk::hip::block_id_x(), \
                                                             RLK_TOKEN_SHARED(rlk::WaveResults));                     \
  }

#define RLK_TOKEN_SUMS(op, Batch)                                                                                     \
  RLK_TOKEN_KERNEL(op, sums, Batch, rlk::kGatherThreads), int tile, int lanes, std::int64_t num_blocks) {             \
    auto* const shared = RLK_TOKEN_SHARED(rlk::BatchSumsShared<Batch>);                                               \
    rlk::batch_sums<rlk::hip::TokenGpu>(p, w, tile, lanes, num_blocks, first_block + rlk::hip::block_id_x(), shared); \
  }                                                                                                                   \
  RLK_TOKEN_KERNEL(op, few, Batch, rlk::kTokenThreads), int tile) {                                                   \
    static_cast<void>(first_block);                                                                                   \
    rlk::few_sums<rlk::hip::TokenGpu>(p, w, tile, RLK_TOKEN_SHARED(rlk::FewShared<Batch>));                           \
  }                                                                                                                   \
  RLK_TOKEN_KERNEL(op, results, Batch, rlk::kGatherThreads), std::int64_t num_blocks) {                               \
    static_cast<void>(first_block);                                                                                   \
    rlk::batch_results<rlk::hip::TokenGpu>(p, w, static_cast<int>(num_blocks),                                        \
                                           RLK_TOKEN_SHARED(rlk::TotalsShared<Batch>));                               \
  }
