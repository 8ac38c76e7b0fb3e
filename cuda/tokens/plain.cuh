// The pass over tokens for calls with plain arrays: padded sequences, aligned vec4s, no required array missing
// (kernels/tokens/plain.h). A lane copies its vec4s (four tokens) of the next steps into its own slots of a ring in
// shared memory, and later reads these slots itself. So the lane needs no barrier, and copies in flight hold no
// registers.
#pragma once

#include "../common/async_copy_groups_sm80.cuh"
#include "../common/async_copy_sm80.cuh"
#include "../common/kernel_memory.h"
#include "../common/vec8.cuh"
#include "kernels/tokens/plain.h"
#include "passes.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kPlainStages = 2;  // stages of the ring
constexpr int kMaskVectors = 2;  // 16-byte vectors that hold the mask of four tokens in the widest type
// A warp keeps the sums of kKeptSteps steps in shared memory and then adds them up together. Each lane contributes four
// sums per step. Gaps between the sums of 16 lanes make the threads that add the sums read different banks.
constexpr int kKeptSteps = 4, kKeptHalf = 4 * 16 + 16, kKeptStep = 2 * kKeptHalf - 16 + 4,
              kKept = kKeptSteps * kKeptStep;
template <class Terms>
struct PlainShared {
  uint4 ring[kPlainStages][Terms::kInputs + kMaskVectors][kTokenThreads];
  float kept[kTokenWaves<TokenGpu>][kKept];
  WaveResults of_waves;
};

__device__ __forceinline__ void copy_async_16_if(bool condition, std::uint32_t shared, const void* global) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p cp.async.cg.shared.global [%0], [%1], 16;\n\t}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(condition))
      : "memory");
}
__device__ __forceinline__ void copy_async_4_if(bool condition, std::uint32_t shared, const void* global) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p cp.async.ca.shared.global [%0], [%1], 4;\n\t}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(condition))
      : "memory");
}
// Stores without a branch. With a branch, the compiler would move the computation of the value into the branch.
__device__ __forceinline__ void store_vec4_if(bool condition, float* to, const Vec4& x) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %0, 0;\n\t@p st.global.cs.v4.f32 [%1], {%2, %3, %4, %5};\n\t}" ::"r"(
          static_cast<int>(condition)),
      "l"(to), "f"(x.v[0]), "f"(x.v[1]), "f"(x.v[2]), "f"(x.v[3])
      : "memory");
}
__device__ __forceinline__ float add_if(std::int32_t condition, float sum, float value) {
  asm("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %1, 0;\n\t@p add.rn.f32 %0, %0, %2;\n\t}"
      : "+f"(sum)
      : "r"(condition), "f"(value));
  return sum;
}

// The lane's index. Each call reads the index again, so the compiler keeps no values derived from the index in
// registers across all steps.
__device__ __forceinline__ int lane_again() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Adds up the sums of `steps` steps that a warp has kept in shared memory; `steps` is at most kKeptSteps. Each lane
// returns the sum with index sum_index(lane), as `scattered` does.
__device__ __forceinline__ float sum_of_kept(const float* kept, int steps) {
  const int lane = lane_again(), step = lane / 4 % 4;
  const float* const from = kept + step * kKeptStep + lane / 16 * kKeptHalf + sum_index(lane % 4);
  __syncwarp();
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = from[4 * i];
  __syncwarp();  // every lane has read `kept`, which the next values overwrite
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 16; i += 2 * distance) x[i] = __fadd_rn(x[i], x[i + distance]);
  }
  float sum = __fadd_rn(x[0], TokenGpu::shuffle_xor(x[0], 16));
  sum = step < steps ? sum : 0.0f;
  sum = __fadd_rn(sum, TokenGpu::shuffle_xor(sum, 4));
  return __fadd_rn(sum, TokenGpu::shuffle_xor(sum, 8));
}

// A lane's tokens in its warp's part of a tile, and the copies of the lane's next steps. `kShared`: the input with
// index `kShareable` has one value for all tokens of a sequence (shares_input()).
template <class Terms, bool kShared>
class PlainCopies {
 public:
  static constexpr int kInputs = Terms::kInputs;
  static constexpr bool is_copied(int i) { return !kShared || i != Terms::kShareable; }

  // Copies of sequence s. `first` is this lane's first token; the warp's part has `of_lane` tokens from `first` on.
  __device__ __forceinline__ PlainCopies(const typename Terms::Params& p, std::int64_t s, int first, int of_lane,
                                         PlainShared<Terms>* shared)
      : shared_(shared), of_lane_(of_lane), is_given_(Terms::input(p, kInputs - 1).data != nullptr) {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      if (!is_copied(i)) continue;
      const PolicyTokens a = Terms::input(p, i);
      input_[i] = kept(a.data + s * a.sequence_stride + first);
    }
    const TokenMask& mask = Terms::mask(p);
    mask_bytes_ = mask.bytes;  // is_plain_mask
    masks_ = kept(static_cast<const unsigned char*>(mask.data) + (s * mask.row_stride + first) * mask_bytes_);
  }

  // Prefetches the data of the warp's first copies, `tokens` tokens. The warp's first lane calls this function.
  __device__ __forceinline__ void prefetch(int tokens) const {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      if (is_copied(i) && (i < Terms::kFirstOptional || is_given_)) prefetch_to_l2(input_[i], tokens * 4);
    }
    if (mask_bytes_ >= 4) prefetch_to_l2(masks_, tokens * mask_bytes_);
  }
  // Begins to copy into `stage` the step that begins `at` tokens after the lane's first token.
  __device__ __forceinline__ void begin(unsigned at, int stage) const {
    const bool exists = static_cast<int>(at) < of_lane_;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      if (!is_copied(i)) continue;
      copy_async_16_if(exists && (i < Terms::kFirstOptional || is_given_), shared_address(slot(stage, i)),
                       input_[i] + at);
    }
    const unsigned char* const from = masks_ + at * mask_bytes_;
    copy_async_16_if(exists && mask_bytes_ >= 4, shared_address(slot(stage, kInputs)), from);
    copy_async_16_if(exists && mask_bytes_ == 8, shared_address(slot(stage, kInputs + 1)), from + 16);
    copy_async_4_if(exists && mask_bytes_ == 1, shared_address(slot(stage, kInputs)), from);
    copy_async_commit();
  }
  __device__ __forceinline__ Vec4 input(int stage, int i) const {
    const uint4 bits = *slot(stage, i);
    return {{__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)}};
  }
  __device__ __forceinline__ Vec4Mask mask(int stage, bool is_float) const {
    Vec4Mask taken = {{-1, -1, -1, -1}};
    if (mask_bytes_ == 0) return taken;
    if (is_float) {
      const Vec4 x = input(stage, kInputs);
#pragma unroll
      for (int j = 0; j < kVec4; ++j) taken.v[j] = ones_unless_zero(x.v[j]);
      return taken;
    }
    uint4 bits = *slot(stage, kInputs);
    if (mask_bytes_ == 8) {
      const uint4 more = *slot(stage, kInputs + 1);
      bits = {bits.x | bits.y, bits.z | bits.w, more.x | more.y, more.z | more.w};
    } else if (mask_bytes_ == 1) {
      bits = {bits.x & 0xff, bits.x & 0xff00, bits.x & 0xff0000, bits.x & 0xff000000};
    }
    const std::uint32_t of[kVec4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < kVec4; ++j) taken.v[j] = ones_unless_zero(static_cast<std::int32_t>(of[j]));
    return taken;
  }

 private:
  __device__ __forceinline__ uint4* slot(int stage, int i) const { return &shared_->ring[stage][i][threadIdx.x]; }
  // Makes the compiler keep a value in a register. Otherwise the compiler would compute the value again at every step.
  template <class T>
  static __device__ __forceinline__ T* kept(T* pointer) {
    asm("" : "+l"(pointer));
    return pointer;
  }

  PlainShared<Terms>* shared_;
  const float* input_[kInputs];
  const unsigned char* masks_;
  unsigned mask_bytes_;
  int of_lane_;
  bool is_given_;
};

// Returns `out` with all bits set for tokens that do not count. Arithmetic on CUDA never gives a NaN with all bits set.
__device__ __forceinline__ Vec4 marked(const Vec4& out, const Vec4Mask& taken) {
  return vec4_of<Vec4>([&](int i) { return float_of(bits_of(out.v[i]) | ~taken.v[i]); });
}
__device__ __forceinline__ Vec4Mask not_marked(const Vec4& out) {
  Vec4Mask taken;
#pragma unroll
  for (int i = 0; i < kVec4; ++i) taken.v[i] = ones_unless_zero(~bits_of(out.v[i]));
  return taken;
}

// Processes a warp's part of a tile, `left` tokens. `output` points to the output of this lane's first token.
// `kShared`: `value` is the input `kShareable` of all tokens. `kMarks`: the function marks outputs of tokens that do
// not count.
template <class Terms, bool kShared, bool kMarks>
__device__ __forceinline__ WaveTokens plain_tokens(const typename Terms::Params& p,
                                                   const typename Terms::Factors& factors, int left,
                                                   const PlainCopies<Terms, kShared>& copies, float value,
                                                   float* output, float* of_warp) {
  constexpr int kInputs = Terms::kInputs, kCounts = Terms::kCounts, kLanes = TokenGpu::kLanes;
  constexpr int kStep = kLanes * kVec4;
  constexpr unsigned kOther = 64;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, of_lane = left - lane * kVec4;
  static_assert(kCounts < kTokenCounts && kCounts % 2 == 0 && (kVec4 << kMostSteps) < kOther);
  float counts[kCounts / 2] = {};  // each holds two counts: the first count plus kOther times the second count
  int tokens = 0;
  std::uint32_t most = 0;  // bits of the largest value so far, as in WaveSums
  const auto take_step = [&](unsigned at, int stage, float* to) {
    copy_async_wait<kPlainStages - 1>();
    Vec4 in[kInputs];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) in[i] = copies.is_copied(i) ? copies.input(stage, i) : broadcast<Vec4>(value);
    Vec4Mask taken = copies.mask(stage, Terms::mask(p).is_float);
    copies.begin(at + kPlainStages * kStep, stage);  // the copies overwrite a slot that this lane has read
    const bool exists = static_cast<int>(at) < of_lane;
    if (static_cast<int>(at) + kStep > left) {
#pragma unroll
      for (int j = 0; j < kVec4; ++j) taken.v[j] = exists ? taken.v[j] : 0;
    }
    Vec4 out;
    PlainSums<Vec4> sums;
    Terms::token(p, factors, in, taken, &out, &sums, [&](int i, const Vec4Mask& condition) {
#pragma unroll
      for (int j = 0; j < kVec4; ++j) {
        counts[(i - 1) / 2] = add_if(condition.v[j], counts[(i - 1) / 2], i % 2 == 1 ? 1.0f : float{kOther});
      }
    });
    store_vec4_if(exists, output + at, kMarks ? marked(out, taken) : out);
#pragma unroll
    for (int j = 0; j < kVec4; ++j) {
      tokens -= taken.v[j];
      most = max(most, __float_as_uint(sums.maximum.v[j]));
    }
    float of_quad[kLowerSums];
#pragma unroll
    for (int i = 0; i < kLowerSums; ++i) {
      const float* const v = sums.sum[i].v;
      of_quad[i] = __fadd_rn(__fadd_rn(v[0], v[1]), __fadd_rn(v[2], v[3]));
    }
    *reinterpret_cast<float4*>(to) = make_float4(of_quad[0], of_quad[1], of_quad[2], of_quad[3]);
  };
  static_assert(kPlainStages == 2 && kKeptSteps == 4 && kMostSteps == 3);
  float sum = 0.0f;
#pragma unroll 1
  for (int begin = 0; begin < left; begin += kKeptSteps * kStep) {
    const int kept_steps = min(kKeptSteps, (left - begin + kStep - 1) / kStep);
    const int again = lane_again();
    float* to = of_warp + again * 4 + again / 16 * (kKeptHalf - 64);
    const int end = begin + kept_steps * kStep;
    if constexpr (kMarks) {  // few steps: without unrolling, fewer instructions are fetched
#pragma unroll 1
      for (int at = begin, stage = 0; at < end; at += kStep, to += kKeptStep, stage ^= 1) take_step(at, stage, to);
    } else {
#pragma unroll 1
      for (int at = begin; at < end; at += 2 * kStep, to += 2 * kKeptStep) {
        take_step(at, 0, to);
        if (at + kStep < end) take_step(at + kStep, 1, to + kKeptStep);
      }
    }
    const float of_kept = sum_of_kept(of_warp, kept_steps);
    sum = begin == 0 ? of_kept : __fadd_rn(sum, of_kept);
  }
  WaveTokens of = {};
  of.sum[0] = sum;
  of.count[0] = TokenGpu::sum_over_wave(static_cast<std::uint32_t>(tokens));
#pragma unroll
  for (int i = 0; i < kCounts; i += 2) {  // two counts per word: a warp's counts are below 2^16
    const auto both = static_cast<std::uint32_t>(counts[i / 2]);
    const std::uint32_t of_wave = TokenGpu::sum_over_wave(both % kOther | both / kOther << 16);
    of.count[1 + i] = of_wave & 0xffff;
    of.count[2 + i] = of_wave >> 16;
  }
  of.maximum[0] = __uint_as_float(TokenGpu::max_over_wave(most));
  of.sum[1] = Terms::upper_sum(kLowerSums + sum_index(lane), of.count[0]);
  return of;
}

// The slot of the warp's tile, or of its block's tile. Each call reads the block index again, as lane_again does.
__device__ __forceinline__ unsigned slot_of_warp(bool of_wave) {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return of_wave ? block * kTokenWaves<TokenGpu> + threadIdx.x / TokenGpu::kLanes : block;
}

// `kWeights`: outputs have their weights. Without kWeights, outputs have weight 1 and are marked, for weigh_few_kernel.
template <class Batch, class Terms, int kLeastBlocks, bool kShared, bool kWeights>
__global__ void __launch_bounds__(kTokenThreads, kLeastBlocks)
    plain_tokens_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w,
                        std::int64_t slots, int tile) {
  extern __shared__ uint4 plain_memory[];
  auto* const shared = reinterpret_cast<PlainShared<Terms>*>(plain_memory);
  allow_next_kernel();  // each kernel waits for the whole previous kernel
  const auto num_tokens = static_cast<int>(Terms::sequences(p).num_tokens);
  const auto tiles = static_cast<unsigned>(tiles_of(num_tokens, tile));
  const unsigned wave = threadIdx.x / TokenGpu::kLanes;
  const bool of_wave = tile == kWaveTile<TokenGpu>;
  const unsigned slot = slot_of_warp(of_wave);  // slots are fewer than 2^31
  const unsigned s = slot / tiles;
  const int lane = static_cast<int>(threadIdx.x) % TokenGpu::kLanes;
  const int of_warp = of_wave ? 1 << tile : (1 << tile) / kTokenWaves<TokenGpu>;  // tokens
  const int first = static_cast<int>((slot - s * tiles) << tile) + (of_wave ? 0 : static_cast<int>(wave) * of_warp);
  const int left = min(num_tokens - first, of_warp), mine = first + lane * kVec4;
  const PlainCopies<Terms, kShared> copies(p, s, mine, left - lane * kVec4, shared);
  // The first blocks are resident while the previous kernel still runs. Meanwhile these blocks prefetch their first
  // inputs into L2. This kernel does not write these arrays.
  constexpr unsigned kFirstBlocks = 132 * kLeastBlocks;  // blocks resident on an H100 or H200
  if (lane == 0 && blockIdx.x < kFirstBlocks && slot < slots && left > 0) {
    copies.prefetch(min(left, kPlainStages * TokenGpu::kLanes * kVec4));
  }
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) *w.finished = 0;
  if (slot >= slots) return;
#pragma unroll
  for (int i = 0; i < kPlainStages; ++i) copies.begin(i * TokenGpu::kLanes * kVec4, i);
  typename Batch::Factors factors;
  if constexpr (kWeights) {
    factors = Batch::template factors<Terms>(p, w.context(), Batch::needs_pass_before(p), s);
  } else {
    static_assert(!Terms::kOfSequence);
    factors.weight = 1.0f;
  }
  float* const output = Terms::output(p) + std::int64_t{s} * num_tokens + mine;
  float value = 0.0f;
  if constexpr (kShared) {
    const PolicyTokens a = Terms::input(p, Terms::kShareable);
    value = a.data[std::int64_t{s} * a.sequence_stride];
  }
  const WaveTokens of =
      plain_tokens<Terms, kShared, !kWeights>(p, factors, left, copies, value, output, shared->kept[wave]);
  store_tile<TokenGpu>(of, of_wave, w.partials[0] + slot_of_warp(of_wave), &shared->of_waves);
}

// The number of tokens, and the number of sequences that have a token, summed over the threads of a block. `tokens`:
// the number of tokens of this thread's sequence.
__device__ __forceinline__ PolicyTotals totals_over_block(unsigned tokens, uint2 (&of_waves)[kTokenWaves<TokenGpu>]) {
  const uint2 of = {TokenGpu::sum_over_wave(tokens), TokenGpu::sum_over_wave(tokens > 0 ? 1u : 0u)};
  if (threadIdx.x % TokenGpu::kLanes == 0) of_waves[threadIdx.x / TokenGpu::kLanes] = of;
  __syncthreads();
  uint2 sum = {0, 0};
#pragma unroll
  for (const uint2& x : of_waves) sum = {sum.x + x.x, sum.y + x.y};
  return {sum.x, sum.y};
}

// The last kernel of plain calls with few sequences, if weights depend only on the sequences' numbers of tokens
// (counts_few()). The first block does the work of few_sums_kernel. In every other block, each thread multiplies
// kWeighed vec4s of plain_tokens_kernel's marked outputs by their weights. Each block adds up the numbers of tokens
// itself.
constexpr int kWeighed = 4;
template <class Batch, class Terms>
__global__ void __launch_bounds__(kTokenThreads, 3)
    weigh_few_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w, int tile) {
  __shared__ FewShared<Batch> shared;
  __shared__ unsigned tokens_of[kFewSequences];
  __shared__ uint2 of_waves[kTokenWaves<TokenGpu>];
  static_assert(kFewSequences <= kTokenThreads && Batch::kGroups == 1);
  allow_next_kernel();
  wait_for_previous_kernel();
  const Sequences& q = Batch::sequences(p);
  const auto sequences = static_cast<unsigned>(q.num_sequences);
  const bool has_sequence = threadIdx.x < sequences;
  if (blockIdx.x == 0) {
    PolicyTotals totals;
    few_totals<TokenGpu>(p, w, tile, 0, kFewSequences, &shared, [&](const SequenceSums<8>(&of)[1]) {
      totals = totals_over_block(has_sequence ? static_cast<unsigned>(of[0].count[kCountTokens]) : 0, of_waves);
      return totals;
    });
    if (threadIdx.x < Batch::kResults) {
      Batch::store(p, totals, shared.totals.total, static_cast<int>(threadIdx.x));
    }
    return;
  }
  const auto tiles = static_cast<unsigned>(tiles_of(q.num_tokens, tile));
  const auto vectors = static_cast<unsigned>(q.num_tokens) / kVec4, all = vectors * sequences;
  const unsigned first = (blockIdx.x - 1) * (kTokenThreads * kWeighed) + threadIdx.x;
  float* const output = Terms::output(p);
  Vec4 x[kWeighed];
#pragma unroll
  for (int i = 0; i < kWeighed; ++i) {
    const unsigned at = first + i * kTokenThreads;
    if (at < all) x[i] = TokenGpu::load_vec4(output + std::int64_t{at} * kVec4);
  }
  const TilePartial<8>* const partials = w.partials[0] + threadIdx.x * tiles;
  unsigned tokens = 0;
  if (has_sequence) {
    tokens = partials[0].count[kCountTokens];
    if (tiles > 1) tokens += partials[1].count[kCountTokens];
  }
  tokens_of[threadIdx.x] = tokens;
  const PolicyTotals totals = totals_over_block(tokens, of_waves);
#pragma unroll
  for (int i = 0; i < kWeighed; ++i) {
    const unsigned at = first + i * kTokenThreads;
    if (at >= all) continue;
    typename Batch::Factors factors;
    set_weights(p, totals, tokens_of[at / vectors], &factors);
    const Vec4 out = canonical_product(where(not_marked(x[i]), mul_rn(broadcast<Vec4>(factors.weight), x[i])));
    TokenGpu::store_vec4(output + std::int64_t{at} * kVec4, either(factors.weight == 0.0f, broadcast<Vec4>(0.0f), out));
  }
}
template <class Batch>
bool counts_few(const typename Batch::Params& p, int tile) {
  return Batch::needs_pass_before(p) && Batch::counts_alone(p) && are_few(Batch::sequences(p), tile);
}

// If two blocks per multiprocessor hold the call, the kernel for two blocks runs, which has more registers. Otherwise
// the kernel for three blocks runs.
template <bool kOverlap, class Batch, class Terms>
void run_plain_tokens(const typename Batch::Params& p, const TokenPlan& plan, cudaStream_t stream) {
  constexpr auto kBytes = static_cast<int>(sizeof(PlainShared<Terms>));
  if (counts_few<Batch>(p, plan.tile)) {
    const Sequences& q = Batch::sequences(p);
    constexpr int kEach = kTokenThreads * kWeighed * kVec4;
    const auto blocks = static_cast<int>((q.num_slots() + kEach - 1) / kEach) + 1;
    const auto run_counted = [&](auto shared) {
      constexpr auto* kKernel = &plain_tokens_kernel<Batch, Terms, 2, decltype(shared)::value, false>;
      RLK_CHECK(allow_shared_memory<kKernel>() >= kBytes, "the device has shared memory for the pass over tokens");
      run_token_passes<kOverlap, Batch>(p, plan, {kKernel, kBytes, weigh_few_kernel<Batch, Terms>, blocks}, stream);
    };
    return shares_input<Terms>(p) ? run_counted(std::true_type()) : run_counted(std::false_type());
  }
  const auto run = [&](auto blocks, auto shared) {
    constexpr auto* kKernel =
        &plain_tokens_kernel<Batch, Terms, decltype(blocks)::value, decltype(shared)::value, true>;
    RLK_CHECK(allow_shared_memory<kKernel>() >= kBytes, "the device has shared memory for the pass over tokens");
    run_token_passes<kOverlap, Batch>(p, plan, {kKernel, kBytes}, stream);
  };
  const auto run_blocks = [&](auto blocks) {
    shares_input<Terms>(p) ? run(blocks, std::true_type()) : run(blocks, std::false_type());
  };
  if (token_passes(Batch::sequences(p), plan).token_blocks <= 2 * multiprocessors(current_device())) {
    run_blocks(std::integral_constant<int, 2>());
  } else {
    run_blocks(std::integral_constant<int, 3>());
  }
}

}  // namespace
}  // namespace rlk::cuda
