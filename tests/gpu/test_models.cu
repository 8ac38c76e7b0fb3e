// Compares the models of sm_90 arithmetic with the hardware. ex2.approx.ftz.f32 is compared over every fp32 argument.
// One k16 step of mma.sync and wgmma is compared over distributions that reach each corner case of the rule. Formats,
// the random number generator, and the division of sigmoid and tanh are compared with the host. The file can be built
// separately:
//   nvcc -std=c++20 -O2 -gencode=arch=compute_90a,code=sm_90a -I cpp/include tests/gpu/test_models.cu -o test_models
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "rlk/math/half.h"
#include "rlk/math/ieee.h"
#include "rlk/math/mma_model.h"
#include "rlk/math/mufu_model.h"
#include "rlk/math/philox.h"
#include "rlk/math/sigmoid.h"

namespace {

using rlk::bits_of;
using rlk::DType;
using rlk::float_of;
using rlk::NvidiaMmaRule;

#define CUDA_CHECK(call)                                                                             \
  do {                                                                                               \
    const cudaError_t error = (call);                                                                \
    if (error != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(2);                                                                                  \
    }                                                                                                \
  } while (0)

using Count = unsigned long long;

constexpr std::uint64_t kFloats = std::uint64_t{1} << 32;  // number of fp32 bit patterns

int passed = 0, failed = 0;
void report(bool ok, const char* name, Count differing, Count total) {
  std::printf("%s %-44s %llu of %llu differ\n", ok ? "ok  " : "FAIL", name, differing, total);
  ++(ok ? passed : failed);
}

template <class T>
struct DeviceArray {
  T* data = nullptr;
  std::size_t size;
  explicit DeviceArray(std::size_t n) : size(n) {
    CUDA_CHECK(cudaMalloc(&data, n * sizeof(T)));
    clear();
  }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void clear() { CUDA_CHECK(cudaMemset(data, 0, size * sizeof(T))); }
  std::vector<T> host() const {
    std::vector<T> h(size);
    CUDA_CHECK(cudaMemcpy(h.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
    return h;
  }
};

void finish_launch() {
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaDeviceSynchronize());
}

// ----------------------------------------------------------------------------------------------------------------- ex2

// Classes of arguments, so that a wrong assumption about one end of the range shows in one row.
enum Ex2Class { kEx2Nan, kEx2Overflow, kEx2Underflow, kEx2Tiny, kEx2Inside, kEx2Classes };
const char* const kEx2ClassName[] = {"ex2: NaN", "ex2: x >= 128", "ex2: x < -126", "ex2: |x| < 2^-126",
                                     "ex2: the rest"};

struct Ex2Example {
  std::uint32_t x, hardware, model;
};
constexpr Count kMaxEx2Examples = 4096;

struct Ex2Result {
  Count total[kEx2Classes], differing[kEx2Classes];
  Count num_examples;
  Ex2Example examples[kMaxEx2Examples];
};

__device__ std::uint32_t ex2_hardware(std::uint32_t x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(float_of(static_cast<std::int32_t>(x))));
  return static_cast<std::uint32_t>(bits_of(y));
}

__global__ void ex2_kernel(Ex2Result* result) {
  Count total[kEx2Classes] = {}, differing[kEx2Classes] = {};
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  const std::uint64_t first = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (std::uint64_t i = first; i < kFloats; i += stride) {
    const std::uint32_t bits = static_cast<std::uint32_t>(i);
    const float x = float_of(static_cast<std::int32_t>(bits));
    const std::uint32_t hardware = ex2_hardware(bits);
    const std::uint32_t model = static_cast<std::uint32_t>(bits_of(rlk::mufu_ex2_sm90(x)));
    const int kind = rlk::is_nan(x)                       ? kEx2Nan
                     : x >= 128.0f                        ? kEx2Overflow
                     : x < -126.0f                        ? kEx2Underflow
                     : (bits & 0x7fffffffu) < 0x00800000u ? kEx2Tiny
                                                          : kEx2Inside;
#pragma unroll
    for (int c = 0; c < kEx2Classes; ++c) {
      total[c] += kind == c;
      differing[c] += kind == c && hardware != model;
    }
    if (hardware != model) {
      const Count at = atomicAdd(&result->num_examples, Count{1});
      if (at < kMaxEx2Examples) result->examples[at] = {bits, hardware, model};
    }
  }
#pragma unroll
  for (int c = 0; c < kEx2Classes; ++c) {
    if (total[c] != 0) atomicAdd(&result->total[c], total[c]);
    if (differing[c] != 0) atomicAdd(&result->differing[c], differing[c]);
  }
}

void test_ex2() {
  DeviceArray<Ex2Result> result(1);
  ex2_kernel<<<2048, 256>>>(result.data);
  finish_launch();
  std::vector<Ex2Result> host = result.host();
  Ex2Result& r = host[0];
  for (int c = 0; c < kEx2Classes; ++c) report(r.differing[c] == 0, kEx2ClassName[c], r.differing[c], r.total[c]);
  const Count kept = std::min(r.num_examples, kMaxEx2Examples);
  std::sort(r.examples, r.examples + kept, [](const Ex2Example& a, const Ex2Example& b) { return a.x < b.x; });
  for (Count i = 0; i < std::min<Count>(kept, 8); ++i)
    std::printf("     x %08x (%a): hardware %08x, model %08x\n", r.examples[i].x,
                static_cast<double>(float_of(static_cast<std::int32_t>(r.examples[i].x))), r.examples[i].hardware,
                r.examples[i].model);
}

// The form for softmax terms, without the clamps of the form above.
__global__ void ex2_bounded_kernel(Count* differing, Count* total) {
  Count here_differing = 0, here_total = 0;
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  const std::uint64_t first = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (std::uint64_t i = first; i < kFloats; i += stride) {
    const std::uint32_t bits = static_cast<std::uint32_t>(i);
    const float x = float_of(static_cast<std::int32_t>(bits));
    if (!(x >= -127.0f && x <= 1.0f)) continue;
    ++here_total;
    here_differing += ex2_hardware(bits) != static_cast<std::uint32_t>(bits_of(rlk::mufu_ex2_sm90_bounded(x)));
  }
  if (here_total != 0) atomicAdd(total, here_total);
  if (here_differing != 0) atomicAdd(differing, here_differing);
}

void test_ex2_bounded() {
  DeviceArray<Count> counts(2);
  ex2_bounded_kernel<<<2048, 256>>>(counts.data, counts.data + 1);
  finish_launch();
  const std::vector<Count> c = counts.host();
  report(c[0] == 0 && c[1] > 0, "ex2: bounded form, [-127, 1]", c[0], c[1]);
}

// ----------------------------------------------------------------------------------------------------------------- mma

enum Distribution {
  kGaussian,       // logits and activations
  kWide,           // exponents spread over 80 powers of two (bf16) or all (fp16)
  kFullRange,      // every finite exponent: partial sums and results beyond fp32
  kCancelling,     // products in pairs of opposite sign, some exactly
  kSubnormal,      // subnormal operands, products and accumulators
  kUnderflow,      // products near and below fp32's least subnormal, accumulator zero or subnormal
  kTiny,           // products below the least exponent of an alignment, accumulator mostly zero
  kVanishing,      // about one product, below fp32's least subnormal, so the sum is cut to zero
  kZeroOperands,   // half of the operands zero, their partners often larger than every product
  kNegativeZeros,  // products of -0, accumulator mostly -0
  kInfNan,         // Inf and NaN among ordinary values
  kRawBits,        // any code
  kOverflow,       // sums around 2^128
  kAlignment,      // one large product, the others at the edge of the kept bits
  kDistributions
};
const char* const kDistributionName[] = {"gaussian",  "wide exponents", "full range", "cancelling",    "subnormal",
                                         "underflow", "tiny",           "vanishing",  "zero operands", "negative zeros",
                                         "inf, nan",  "raw bits",       "overflow",   "alignment"};

struct Generator {
  DType type;
  int distribution;
  std::uint64_t tile;

  // Roles 0..3 are A, B, the position of the large product, and C. Role + 4 gives a second word for the same element.
  __device__ std::uint32_t random(std::uint32_t role, std::uint32_t index) const {
    return rlk::philox_bits(static_cast<std::uint64_t>(distribution), tile, role + (bf16() ? 0 : 8), index);
  }
  __device__ bool bf16() const { return type == DType::kBFloat16; }
  __device__ std::uint16_t narrow(float x) const { return bf16() ? rlk::bf16_rn(x) : rlk::f16_rn(x); }

  // Nearly normal: the sum of four uniform bytes, standardised.
  static __device__ float gaussian(std::uint32_t w) {
    const int sum = static_cast<int>((w & 255) + ((w >> 8) & 255) + ((w >> 16) & 255) + (w >> 24));
    return static_cast<float>(sum - 510) * 0x1.bb6p-8f;  // 1 / 147.8
  }
  // A field uniform in [low, high], from the upper half of a word.
  static __device__ std::uint32_t field_of(std::uint32_t w, int low, int high) {
    return static_cast<std::uint32_t>(low) + ((w >> 16) * static_cast<std::uint32_t>(high - low + 1) >> 16);
  }
  // Random sign and fraction, exponent field uniform in [low, high].
  __device__ std::uint16_t half(std::uint32_t w, int low, int high) const {
    const std::uint32_t field = field_of(w, low, high);
    return static_cast<std::uint16_t>((w & 0x8000u) | (bf16() ? field << 7 | (w & 0x7fu) : field << 10 | (w & 0x3ffu)));
  }
  static __device__ float single(std::uint32_t w, std::uint32_t v, int low, int high) {
    return float_of(static_cast<std::int32_t>((w & 0x807fffffu) | field_of(v, low, high) << 23));
  }

  // Row `row` of A (role 0) or column `row` of B (role 1), element k.
  __device__ std::uint16_t operand(std::uint32_t role, int row, int k) const {
    const bool is_a = role == 0;
    const int pair = distribution == kCancelling ? k % 8 : k;  // k and k + 8 share their value
    const std::uint32_t index = static_cast<std::uint32_t>(row * 16 + pair);
    const std::uint32_t w = random(role, index);
    const std::uint32_t chance = random(role + 4, static_cast<std::uint32_t>(row * 16 + k)) & 0xff;
    switch (distribution) {
      case kGaussian:
        return narrow(gaussian(w));
      case kWide:
        return bf16() ? half(w, 87, 167) : half(w, 1, 30);
      case kFullRange:
        return bf16() ? half(w, 1, 254) : half(w, 1, 30);
      case kCancelling: {
        std::uint16_t h = narrow(gaussian(w));
        if (!is_a && k >= 8) h ^= 0x8000u ^ (chance < 32 ? 1u : 0u);  // an eighth of the pairs differs in the last bit
        return h;
      }
      case kSubnormal:
        if (bf16()) return is_a ? half(w, 0, chance < 240 ? 0 : 20) : half(w, 95, 127);
        return half(w, 0, chance < 128 ? 0 : 6);
      case kUnderflow:
        return bf16() ? half(w, 38, 66) : half(w, 0, 2);
      case kTiny:
        return bf16() ? half(w, 50, 56) : half(w, 0, 0);
      case kVanishing:
        if (is_a && chance < 240) return static_cast<std::uint16_t>(w & 0x8000u);
        return bf16() ? half(w, 50, 53) : half(w, 0, 0);
      case kZeroOperands: {
        if (chance < 128) return static_cast<std::uint16_t>(w & 0x8000u);
        return bf16() ? (chance < 160 ? half(w, 200, 250) : half(w, 90, 130)) : half(w, 1, 30);
      }
      case kNegativeZeros:
        return is_a ? (chance < 128 ? 0 : narrow(1.0f)) : static_cast<std::uint16_t>(chance < 8 ? 0 : 0x8000u);
      case kInfNan: {
        const std::uint32_t inf = static_cast<std::uint32_t>(rlk::half_infinity(type));
        if (chance < 3) return static_cast<std::uint16_t>((w & 0x8000u) | inf);
        if (chance < 4) return static_cast<std::uint16_t>((w & 0x8000u) | inf | (w & 0x7fu) | 1u);
        if (chance < 12) return static_cast<std::uint16_t>(w & 0x8000u);
        return narrow(gaussian(w));
      }
      case kRawBits:
        return static_cast<std::uint16_t>(w);
      case kOverflow:
        return bf16() ? half(w, 188, 190) : half(w, 28, 30);
      default: {  // kAlignment
        const bool large = k == static_cast<int>(random(2, 0) % 16);
        const int center = bf16() ? 127 : 17;
        if (is_a) return large ? half(w, center, center) : half(w, center - 13, center - 11);
        return large ? half(w, center, center) : half(w, center - 14, center - 11);
      }
    }
  }

  __device__ float accumulator(int output) const {
    const std::uint32_t index = static_cast<std::uint32_t>(output), w = random(3, index), v = random(7, index);
    const std::uint32_t chance = v & 0xff;
    const float zero = float_of(static_cast<std::int32_t>(w & 0x80000000u));
    switch (distribution) {
      case kGaussian:
        return gaussian(w) * 4.0f;
      case kWide:
        return single(w, v, 87, 167);
      case kFullRange:
        return single(w, v, 1, 254);
      case kCancelling:
        return chance < 64 ? 0.0f : single(w, v, 90, 126);
      case kSubnormal:
        return chance < 128 ? single(w, v, 0, 0) : single(w, v, 0, bf16() ? 3 : 105);
      case kUnderflow:
        return chance < 96    ? zero
               : chance < 192 ? float_of(static_cast<std::int32_t>(w & 0x8000000fu))
                              : single(w, v, 0, 2);
      case kTiny:
        return chance < 192 ? zero : float_of(static_cast<std::int32_t>(w & 0x8000000fu));
      case kVanishing:
        return zero;
      case kZeroOperands:
        return chance < 64 ? zero : single(w, v, 60, 140);
      case kNegativeZeros:
        return chance < 8 ? 0.0f : -0.0f;
      case kInfNan:
        return chance < 3   ? float_of(static_cast<std::int32_t>((w & 0x80000000u) | 0x7f800000u))
               : chance < 4 ? float_of(static_cast<std::int32_t>(w | 0x7f800001u))
                            : gaussian(w);
      case kRawBits:
        return float_of(static_cast<std::int32_t>(w));
      case kOverflow:
        return single(w, v, 252, 254);
      default:
        return chance < 128 ? single(w, v, 100, 104) : single(w, v, 126, 128);
    }
  }
};

constexpr int kTileM = 64, kTileN = 8, kTileK = 16;
constexpr int kTileOutputs = kTileM * kTileN;
constexpr int kMmaThreads = 128;  // one warpgroup; a warp owns 16 rows for both instructions
constexpr int kMaxExamples = 16;
constexpr int kMaxRules = 16;

struct MmaExample {
  std::uint16_t a[kTileK], b[kTileK];
  std::uint32_t c, mma_sync, wgmma, model;
};

struct MmaResult {
  Count mma_sync[kMaxRules], wgmma[kMaxRules];  // outputs that differ from the model under rule r
  Count instructions;                           // outputs on which the two instructions differ
  unsigned num_examples;
  MmaExample examples[kMaxExamples];
};

__constant__ NvidiaMmaRule rules[kMaxRules];

// Core matrices of 8 rows by 16 bytes, K-major, without swizzle: both instructions read this layout here.
__device__ int core_offset(int row, int k) { return (row / 8) * 128 + (k / 8) * 64 + (row % 8) * 8 + k % 8; }

__device__ std::uint64_t matrix_descriptor(const std::uint16_t* tile) {
  const auto address = static_cast<std::uint64_t>(__cvta_generic_to_shared(tile));
  constexpr std::uint64_t kLeadingBytes = 128;  // distance to the next core matrix along K
  constexpr std::uint64_t kStrideBytes = 256;   // distance from eight rows to the next eight
  return (address & 0x3ffff) >> 4 | kLeadingBytes >> 4 << 16 | kStrideBytes >> 4 << 32;
}

template <DType T>
__device__ void run_mma_sync(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  if constexpr (T == DType::kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

template <DType T>
__device__ void run_wgmma(float (&d)[4], std::uint64_t a, std::uint64_t b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  // scale-d is a predicate; it is true, so D starts as the accumulator.
  if constexpr (T == DType::kBFloat16) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b));
  }
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}

// One block per tile: 64 x 8 outputs by both instructions, and by the model under num_rules rules. Rule 0 is the
// header's.
template <DType T>
__global__ __launch_bounds__(kMmaThreads) void mma_kernel(MmaResult* result, int distribution, int num_tiles,
                                                          int num_rules) {
  __shared__ alignas(128) std::uint16_t sA[kTileM * kTileK];
  __shared__ alignas(128) std::uint16_t sB[kTileN * kTileK];
  __shared__ float sC[kTileOutputs];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;

  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const Generator generate{T, distribution, static_cast<std::uint64_t>(tile)};
    for (int i = threadIdx.x; i < kTileM * kTileK; i += kMmaThreads)
      sA[core_offset(i / kTileK, i % kTileK)] = generate.operand(0, i / kTileK, i % kTileK);
    for (int i = threadIdx.x; i < kTileN * kTileK; i += kMmaThreads)
      sB[core_offset(i / kTileK, i % kTileK)] = generate.operand(1, i / kTileK, i % kTileK);
    for (int i = threadIdx.x; i < kTileOutputs; i += kMmaThreads) sC[i] = generate.accumulator(i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads shared memory through the async proxy
    __syncthreads();

    // Fragments: output r of a thread has row 16 warp + group + 8 (r / 2), column 2 quad + r % 2.
    const int row = 16 * warp + group;
    const auto pair = [](const std::uint16_t* tile, int r, int k) {
      return *reinterpret_cast<const std::uint32_t*>(tile + core_offset(r, k));
    };
    const std::uint32_t a[4] = {pair(sA, row, 2 * quad), pair(sA, row + 8, 2 * quad), pair(sA, row, 2 * quad + 8),
                                pair(sA, row + 8, 2 * quad + 8)};
    const std::uint32_t b[2] = {pair(sB, group, 2 * quad), pair(sB, group, 2 * quad + 8)};
    float mma_sync[4], wgmma[4];
    for (int r = 0; r < 4; ++r) mma_sync[r] = wgmma[r] = sC[(row + 8 * (r / 2)) * kTileN + 2 * quad + r % 2];
    run_mma_sync<T>(mma_sync, a, b);
    run_wgmma<T>(wgmma, matrix_descriptor(sA), matrix_descriptor(sB));

    for (int r = 0; r < 4; ++r) {
      const int m = row + 8 * (r / 2), n = 2 * quad + r % 2;
      std::uint16_t x[kTileK], y[kTileK];
      for (int k = 0; k < kTileK; ++k) {
        x[k] = sA[core_offset(m, k)];
        y[k] = sB[core_offset(n, k)];
      }
      const float c = sC[m * kTileN + n];
      if (bits_of(mma_sync[r]) != bits_of(wgmma[r])) atomicAdd(&result->instructions, Count{1});
      for (int rule = 0; rule < num_rules; ++rule) {
        const float model = rule == 0 ? rlk::mma_step<rlk::MmaUnit::kSm90>(c, x, y, T)
                                      : rlk::nvidia_mma_group<kTileK>(rules[rule], c, x, y, T);
        const bool sync_differs = bits_of(model) != bits_of(mma_sync[r]);
        const bool wgmma_differs = bits_of(model) != bits_of(wgmma[r]);
        if (sync_differs) atomicAdd(&result->mma_sync[rule], Count{1});
        if (wgmma_differs) atomicAdd(&result->wgmma[rule], Count{1});
        if (rule != 0 || !(sync_differs || wgmma_differs)) continue;
        const unsigned at = atomicAdd(&result->num_examples, 1u);
        if (at >= kMaxExamples) continue;
        MmaExample& e = result->examples[at];
        for (int k = 0; k < kTileK; ++k) {
          e.a[k] = x[k];
          e.b[k] = y[k];
        }
        e.c = static_cast<std::uint32_t>(bits_of(c));
        e.mma_sync = static_cast<std::uint32_t>(bits_of(mma_sync[r]));
        e.wgmma = static_cast<std::uint32_t>(bits_of(wgmma[r]));
        e.model = static_cast<std::uint32_t>(bits_of(model));
      }
    }
    __syncthreads();
  }
}

// The header's rule with one corner changed. Each changed rule must fail on some output; otherwise the distributions do
// not reach it.
struct Neighbour {
  const char* name;
  NvidiaMmaRule rule;
};
constexpr NvidiaMmaRule kRule = rlk::kSm90MmaRule;
const Neighbour neighbours[] = {
    {"24 fraction bits", {24, kRule.least_exponent, false, true, false, false}},
    {"26 fraction bits", {26, kRule.least_exponent, false, true, false, false}},
    {"least exponent 1 lower", {kRule.fraction_bits, kRule.least_exponent - 1, false, true, false, false}},
    {"least exponent 1 higher", {kRule.fraction_bits, kRule.least_exponent + 1, false, true, false, false}},
    {"no least exponent", {kRule.fraction_bits, -1024, false, true, false, false}},
    {"zero products align", {kRule.fraction_bits, kRule.least_exponent, true, true, false, false}},
    {"overflow is finite", {kRule.fraction_bits, kRule.least_exponent, false, false, false, false}},
    {"minus zero is kept", {kRule.fraction_bits, kRule.least_exponent, false, true, true, false}},
    {"underflow is signed", {kRule.fraction_bits, kRule.least_exponent, false, true, false, true}},
};
constexpr int kNeighbours = sizeof(neighbours) / sizeof(neighbours[0]);
static_assert(kNeighbours < kMaxRules);

MmaResult run_mma(DType type, int distribution, int num_tiles, int num_rules) {
  DeviceArray<MmaResult> result(1);
  const int blocks = std::min(num_tiles, 132 * 8);
  if (type == DType::kBFloat16)
    mma_kernel<DType::kBFloat16><<<blocks, kMmaThreads>>>(result.data, distribution, num_tiles, num_rules);
  else
    mma_kernel<DType::kFloat16><<<blocks, kMmaThreads>>>(result.data, distribution, num_tiles, num_rules);
  finish_launch();
  return result.host()[0];
}

void print_example(const MmaExample& e) {
  std::printf("     c %08x: mma.sync %08x, wgmma %08x, model %08x\n       a", e.c, e.mma_sync, e.wgmma, e.model);
  for (std::uint16_t h : e.a) std::printf(" %04x", h);
  std::printf("\n       b");
  for (std::uint16_t h : e.b) std::printf(" %04x", h);
  std::printf("\n");
}

void test_mma() {
  constexpr int kTiles = 16384;  // 8.4 million outputs per distribution
  constexpr int kNeighbourTiles = 2048;
  NvidiaMmaRule device_rules[kMaxRules] = {kRule};
  for (int i = 0; i < kNeighbours; ++i) device_rules[1 + i] = neighbours[i].rule;
  CUDA_CHECK(cudaMemcpyToSymbol(rules, device_rules, sizeof(device_rules)));

  char name[96];
  for (DType type : {DType::kBFloat16, DType::kFloat16})
    for (int distribution = 0; distribution < kDistributions; ++distribution) {
      const MmaResult r = run_mma(type, distribution, kTiles, 1);
      const Count total = Count{kTiles} * kTileOutputs;
      const char* type_name = type == DType::kBFloat16 ? "bf16" : "f16";
      std::snprintf(name, sizeof name, "mma.sync %s %s", type_name, kDistributionName[distribution]);
      report(r.mma_sync[0] == 0, name, r.mma_sync[0], total);
      std::snprintf(name, sizeof name, "wgmma %s %s", type_name, kDistributionName[distribution]);
      report(r.wgmma[0] == 0, name, r.wgmma[0], total);
      if (r.instructions != 0) std::printf("     mma.sync and wgmma differ on %llu outputs\n", r.instructions);
      for (unsigned i = 0; i < std::min<unsigned>(r.num_examples, kMaxExamples); ++i) print_example(r.examples[i]);
    }

  Count differing[1 + kNeighbours] = {};
  for (DType type : {DType::kBFloat16, DType::kFloat16})
    for (int distribution = 0; distribution < kDistributions; ++distribution) {
      const MmaResult r = run_mma(type, distribution, kNeighbourTiles, 1 + kNeighbours);
      for (int rule = 0; rule <= kNeighbours; ++rule) differing[rule] += r.mma_sync[rule];
    }
  for (int i = 0; i < kNeighbours; ++i) {
    std::snprintf(name, sizeof name, "mma.sync is not: %s", neighbours[i].name);
    report(differing[1 + i] != 0, name, differing[1 + i], Count{2 * kDistributions * kNeighbourTiles} * kTileOutputs);
  }
}

// ------------------------------------------------------------------------------------------------- formats and philox

constexpr std::uint64_t kSweepStride = 257;  // prime: 16.7 million fp32 values
constexpr std::uint64_t kSweep = (kFloats + kSweepStride - 1) / kSweepStride;

__global__ void narrow_kernel(std::uint16_t* bf16, std::uint16_t* f16, std::uint16_t* down, std::uint32_t* packed) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= kSweep) return;
  const float x = float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(i * kSweepStride)));
  bf16[i] = rlk::bf16_rn(x);
  f16[i] = rlk::f16_rn(x);
  down[i] = rlk::bf16_rd(x);
  packed[i] = rlk::bf16_rn2(x, 1.0f) ^ rlk::f16_rn2(1.0f, x);
}

__global__ void widen_kernel(float* bf16, float* f16) {
  const std::uint32_t h = blockIdx.x * blockDim.x + threadIdx.x;
  bf16[h] = rlk::float_of_bf16(static_cast<std::uint16_t>(h));
  f16[h] = rlk::float_of_f16(static_cast<std::uint16_t>(h));
}

void test_half() {
  DeviceArray<std::uint16_t> bf16(kSweep), f16(kSweep), down(kSweep);
  DeviceArray<std::uint32_t> packed(kSweep);
  narrow_kernel<<<static_cast<unsigned>((kSweep + 255) / 256), 256>>>(bf16.data, f16.data, down.data, packed.data);
  finish_launch();
  const auto device_bf16 = bf16.host(), device_f16 = f16.host(), device_down = down.host();
  const auto device_packed = packed.host();
  Count differing[4] = {};
  for (std::uint64_t i = 0; i < kSweep; ++i) {
    const float x = float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(i * kSweepStride)));
    differing[0] += device_bf16[i] != rlk::bf16_rn(x);
    differing[1] += device_f16[i] != rlk::f16_rn(x);
    differing[2] += device_down[i] != rlk::bf16_rd(x);
    differing[3] += device_packed[i] != (rlk::bf16_rn2(x, 1.0f) ^ rlk::f16_rn2(1.0f, x));
  }
  report(differing[0] == 0, "bf16_rn, device and host", differing[0], kSweep);
  report(differing[1] == 0, "f16_rn, device and host", differing[1], kSweep);
  report(differing[2] == 0, "bf16_rd, device and host", differing[2], kSweep);
  report(differing[3] == 0, "bf16_rn2, f16_rn2, device and host", differing[3], kSweep);

  DeviceArray<float> wide_bf16(0x10000), wide_f16(0x10000);
  widen_kernel<<<256, 256>>>(wide_bf16.data, wide_f16.data);
  finish_launch();
  const auto device_wide_bf16 = wide_bf16.host(), device_wide_f16 = wide_f16.host();
  Count bf16_differing = 0, f16_differing = 0;
  for (std::uint32_t h = 0; h < 0x10000u; ++h) {
    const std::uint16_t code = static_cast<std::uint16_t>(h);
    const float x = rlk::float_of_bf16(code), y = rlk::float_of_f16(code);
    bf16_differing += bits_of(x) != bits_of(device_wide_bf16[h]);
    // A NaN's payload is unspecified.
    f16_differing += bits_of(y) != bits_of(device_wide_f16[h]) && !(rlk::is_nan(y) && rlk::is_nan(device_wide_f16[h]));
  }
  report(bf16_differing == 0, "float_of_bf16, device and host", bf16_differing, 0x10000);
  report(f16_differing == 0, "float_of_f16, device and host", f16_differing, 0x10000);
}

constexpr std::uint32_t kDraws = 1u << 20;

__global__ void philox_kernel(std::uint32_t* bits, float* uniform, float* positive) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint64_t seed = 0x0123456789abcdefu + i % 7, sample = (std::uint64_t{i} << 20) + i;
  bits[i] = rlk::philox_bits(seed, sample, i * 3, i);
  uniform[i] = rlk::philox_uniform(seed, sample, i * 3, i);
  positive[i] = rlk::philox_positive_uniform(seed, sample, i * 3, i);
}

void test_philox() {
  DeviceArray<std::uint32_t> bits(kDraws);
  DeviceArray<float> uniform(kDraws), positive(kDraws);
  philox_kernel<<<kDraws / 256, 256>>>(bits.data, uniform.data, positive.data);
  finish_launch();
  const auto device_bits = bits.host();
  const auto device_uniform = uniform.host(), device_positive = positive.host();
  Count differing = 0;
  for (std::uint32_t i = 0; i < kDraws; ++i) {
    const std::uint64_t seed = 0x0123456789abcdefu + i % 7, sample = (std::uint64_t{i} << 20) + i;
    differing += device_bits[i] != rlk::philox_bits(seed, sample, i * 3, i) ||
                 bits_of(device_uniform[i]) != bits_of(rlk::philox_uniform(seed, sample, i * 3, i)) ||
                 bits_of(device_positive[i]) != bits_of(rlk::philox_positive_uniform(seed, sample, i * 3, i));
  }
  report(differing == 0, "philox, device and host", differing, kDraws);
}

}  // namespace

// Compares div_in_range with __fdiv_rn where the elementary functions use it: e / (1 + e) and 1 / (1 + e) for every e
// in (0, 1] of sigmoid, and 2 / d for every d of tanh.
__global__ void division_kernel(std::uint32_t first, std::uint32_t count, bool of_sigmoid, Count* differing) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float x = float_of(static_cast<std::int32_t>(first + i)), d = of_sigmoid ? 1.0f + x : x;
  const auto differs = [&](float n) { return bits_of(rlk::div_in_range(n, d)) != bits_of(__fdiv_rn(n, d)); };
  const bool differ = of_sigmoid ? differs(x) || differs(1.0f) : differs(2.0f);
  if (differ) atomicAdd(differing, Count{1});
}

void test_division() {
  for (const bool of_sigmoid : {true, false}) {
    const auto first = static_cast<std::uint32_t>(bits_of(of_sigmoid ? 0x1.0p-126f : 2.0f));
    const auto last = static_cast<std::uint32_t>(bits_of(of_sigmoid ? 1.0f : 0x1.0p+30f));
    DeviceArray<Count> differing(1);
    const std::uint32_t count = last - first + 1;
    division_kernel<<<(count + 255) / 256, 256>>>(first, count, of_sigmoid, differing.data);
    finish_launch();
    report(differing.host()[0] == 0, of_sigmoid ? "division in sigmoid" : "division in tanh", differing.host()[0],
           count);
  }
}

// Compares sigmoid_of_half with sigmoid over every number of the 16-bit types.
__global__ void half_sigmoid_kernel(Count* differing) {
  const auto pattern = static_cast<std::uint16_t>(blockIdx.x * blockDim.x + threadIdx.x);
  for (const float x : {rlk::float_of_bf16(pattern), rlk::float_of_f16(pattern)}) {
    if (!rlk::is_nan(x) && bits_of(rlk::sigmoid_of_half(x)) != bits_of(rlk::sigmoid(x))) atomicAdd(differing, Count{1});
  }
}

void test_half_sigmoid() {
  constexpr std::uint32_t kPatterns = 0x10000;
  DeviceArray<Count> differing(1);
  half_sigmoid_kernel<<<kPatterns / 256, 256>>>(differing.data);
  finish_launch();
  report(differing.host()[0] == 0, "sigmoid of 16-bit numbers", differing.host()[0], 2 * kPatterns);
}

int main() {
  cudaDeviceProp device;
  CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  if (device.major != 9) {
    std::printf("needs sm_90, found %s (sm_%d%d)\n", device.name, device.major, device.minor);
    return 2;
  }
  test_ex2();
  test_ex2_bounded();
  test_mma();
  test_half();
  test_philox();
  test_division();
  test_half_sigmoid();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
