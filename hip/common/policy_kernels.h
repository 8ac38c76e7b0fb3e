// The kernels of losses over tokens by name: RLK_LOSS_KERNELS(operator, Params, Statistics) has all but those of the pass
// over tokens, RLK_LOSS_TOKENS(operator, name, Terms) one of these.
#pragma once

#include "hip/common/token_gpu.h"
#include "rlk/kernels/policy_kernels.h"

#define RLK_LOSS_KERNEL(op, name, Params, threads) \
  RLK_KERNEL(threads) rlk_##op##_##name(Params p, std::int64_t first_block, rlk::PolicyWorkspace w
#define RLK_LOSS_SHARED(type) rlk::hip::TokenGpu::shared<rlk::type>()

#define RLK_LOSS_KERNELS(op, Params, Statistics)                                                                    \
  RLK_LOSS_KERNEL(op, statistics, Params, rlk::kTokenThreads), std::int64_t slots, int tile) {                      \
    rlk::policy_statistics<rlk::hip::TokenGpu, Statistics>(p, w, slots, tile, first_block + rlk::hip::block_id_x(), \
                                                           RLK_LOSS_SHARED(WaveResults));                           \
  }                                                                                                                 \
  RLK_LOSS_KERNEL(op, sequences, Params, rlk::kGatherThreads), int tile, int lanes) {                               \
    rlk::policy_sequences<rlk::hip::TokenGpu>(p, w, tile, lanes, first_block + rlk::hip::block_id_x(),              \
                                              RLK_LOSS_SHARED(GatheredSums));                                       \
  }                                                                                                                 \
  RLK_LOSS_KERNEL(op, sums, Params, rlk::kGatherThreads), int tile, int lanes, std::int64_t num_blocks) {           \
    rlk::policy_sums<rlk::hip::TokenGpu>(p, w, tile, lanes, num_blocks, first_block + rlk::hip::block_id_x(),       \
                                         RLK_LOSS_SHARED(PolicySumsShared));                                        \
  }                                                                                                                 \
  RLK_LOSS_KERNEL(op, results, Params, rlk::kGatherThreads), std::int64_t num_blocks) {                             \
    static_cast<void>(first_block);                                                                                 \
    rlk::policy_results<rlk::hip::TokenGpu>(p, w, num_blocks, RLK_LOSS_SHARED(PolicyResultsShared));                \
  }

#define RLK_LOSS_TOKENS(op, name, ...)                                                                           \
  RLK_LOSS_KERNEL(op, name, typename __VA_ARGS__::Params, rlk::kTokenThreads), std::int64_t slots, int tile) {   \
    rlk::policy_tokens<rlk::hip::TokenGpu, __VA_ARGS__>(p, w, slots, tile, first_block + rlk::hip::block_id_x(), \
                                                        RLK_LOSS_SHARED(WaveResults));                           \
  }
