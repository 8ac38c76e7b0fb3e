// The prototype that decided the length of attention's canonical splits. The prototype decodes one query per sequence,
// with groups of at most 8 heads of 128 columns, bf16, pages of 16. Blocks cannot share a split's chains over keys. A
// single sequence therefore has one block for each split, key head and, here, share of V's columns. The first kernel
// scores blocks of 256 keys. A block of the second kernel sums a split's keys over 128 / C columns of V. The third
// merges splits. Programmatic launches load V while K is scored. attention_splits.py builds, checks and times it beside
// FlashAttention-3.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
namespace {
struct P {
  const uint16_t *q, *k, *v;
  const int* table;
  const int* used;
  float *o, *ml;
  uint16_t* out;
  int B, Hq, Hk, max_pages, splits, keys_fixed;
  float c;
};
__device__ __forceinline__ float ex2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ float pow2i(float d) { return d < -126.f ? 0.f : __int_as_float(((int)d + 127) << 23); }
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldm4(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
__device__ __forceinline__ void ldm4t(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
__device__ __forceinline__ void cp16(uint32_t s, const void* g) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(s), "l"(g) : "memory");
}
__device__ __forceinline__ void zero16(uint32_t s) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(s), "r"(0) : "memory");
}
// Two kernels. A block of the first scores 256 keys. A block of the second kernel sums a split's keys over 128 / C
// columns of V.
__global__ void __launch_bounds__(256) scores(const P p, float* sc) {
  extern __shared__ __align__(128) unsigned char mem[];
  const uint32_t sk = (uint32_t)__cvta_generic_to_shared(mem);
  const int hk = blockIdx.y, b = blockIdx.z, group = p.Hq / p.Hk, first = blockIdx.x * 256;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, q4 = lane % 4;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int n = p.used[b] - first;
  const int* table = p.table + (size_t)b * p.max_pages + first / 16;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int key = i * 16 + tid / 16, ch = tid % 16;
    const uint32_t to = sk + key * 256 + ((ch ^ key % 8) * 16);
    if (key < n)
      cp16(to, p.k + (((size_t)table[i] * 16 + tid / 16) * p.Hk + hk) * 128 + ch * 8);
    else
      zero16(to);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  uint32_t qa[8][2];
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint16_t* q = p.q + ((size_t)b * p.Hq + hk * group + g) * 128 + s * 16 + q4 * 2;
    qa[s][0] = g < group ? *(const uint32_t*)q : 0;
    qa[s][1] = g < group ? *(const uint32_t*)(q + 8) : 0;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float d[4] = {};
    const int key = warp * 32 + t * 8 + lane % 8;
#pragma unroll
    for (int st = 0; st < 8; st += 2) {
      uint32_t r[4];
      ldm4(r, sk + key * 256 + (((st * 2 + lane / 8) ^ key % 8) * 16));
      mma(d, qa[st][0], 0, qa[st][1], 0, r[0], r[1]);
      mma(d, qa[st + 1][0], 0, qa[st + 1][1], 0, r[2], r[3]);
    }
    const int j = warp * 32 + t * 8 + q4 * 2;
    if (g < group)
      *(float2*)(sc + (((size_t)b * p.Hk + hk) * group + g) * (p.max_pages * 16) + first + j) =
          make_float2(j < n ? d[0] : -INFINITY, j + 1 < n ? d[1] : -INFINITY);
  }
}
template <int C, int kSplit>
__global__ void __launch_bounds__(256) values(const P p, const float* sc) {
  constexpr int kBlocks = kSplit / 128, kCols = 128 / C, kRow = kCols * 2, kPer = kRow / 16, kOf = kBlocks / 8;
  extern __shared__ __align__(128) unsigned char mem[];
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(mem), sv = base;
  unsigned char* sp = mem + kSplit * kRow;         // P: 256 bytes per step
  float* bmax = (float*)(sp + kSplit / 16 * 256);  // [kBlocks][8]
  float* bsum = bmax + kBlocks * 8;                // [kBlocks][8][8]
  const int rank = blockIdx.x % C, split = blockIdx.x / C, hk = blockIdx.y, b = blockIdx.z, group = p.Hq / p.Hk;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, q4 = lane % 4;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int first = split * kSplit, n = min(kSplit, p.used[b] - first);
  const int* table = p.table + (size_t)b * p.max_pages + first / 16;
#pragma unroll 8
  for (int i = tid; i < kSplit * kPer; i += 256) {
    const int j = i / kPer, ch = i % kPer;
    const uint32_t to = sv + j * kRow +
                        (kPer == 2   ? (ch ^ (j / 4 % 2))
                         : kPer == 4 ? (ch ^ (j / 2 % 4))
                                     : (ch ^ j % 8)) *
                            16;
    if (j < n)
      cp16(to, p.v + (((size_t)table[j / 16] * 16 + j % 16) * p.Hk + hk) * 128 + rank * kCols + ch * 8);
    else
      zero16(to);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int blocks = (n + 127) / 128;
  const float* row = sc + (((size_t)b * p.Hk + hk) * group + (g < group ? g : 0)) * (p.max_pages * 16) + first;
  float s[kOf][16][2];
#pragma unroll
  for (int o = 0; o < kOf; ++o) {
    const int blk = warp * kOf + o;
    float m = -INFINITY;
#pragma unroll
    for (int t = 0; t < 16; ++t) {
      float2 x = make_float2(-INFINITY, -INFINITY);
      if (blk < blocks) x = __ldcg((const float2*)(row + blk * 128 + t * 8 + q4 * 2));
      s[o][t][0] = x.x;
      s[o][t][1] = x.y;
      m = fmaxf(m, fmaxf(x.x, x.y));
    }
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    if (q4 == 0) bmax[blk * 8 + g] = m;
  }
  __syncthreads();
  float top = -INFINITY;
  int at = 0;
#pragma unroll
  for (int o = 0; o < kOf; ++o) {
    const int blk = warp * kOf + o;
    for (; at <= blk; ++at) top = fmaxf(top, bmax[at * 8 + g]);
    const float m = ceilf(p.c * top), use = m == -INFINITY ? 0.f : m;
    float part[2][4];
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& z = s[o][t][c];
        z = g < group ? ex2(__fmaf_rn(z, p.c, -use)) : 0.f;
        part[c][t / 4] = t % 4 == 0 ? z : part[c][t / 4] + z;
      }
    }
#pragma unroll
    for (int st = 0; st < 8; ++st)
      *(uint2*)(sp + (blk * 8 + st) * 256 + lane * 8) =
          make_uint2(pack(s[o][2 * st][0], s[o][2 * st][1]), pack(s[o][2 * st + 1][0], s[o][2 * st + 1][1]));
    if (rank == 0)
      *(float2*)(bsum + (blk * 8 + g) * 8 + q4 * 2) = make_float2(
          (part[0][0] + part[0][1]) + (part[0][2] + part[0][3]), (part[1][0] + part[1][1]) + (part[1][2] + part[1][3]));
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float* o = p.o + (((size_t)b * p.Hk + hk) * p.splits + split) * 8 * 128;
  if (warp < kCols / 8) {
    float d[4] = {}, top = -INFINITY, m = -INFINITY;
    for (int blk = 0; blk < blocks; ++blk) {
      top = fmaxf(top, bmax[blk * 8 + g]);
      const float up = ceilf(p.c * top);
      if (__any_sync(~0u, up > m)) {
        const float f = m == -INFINITY ? 1.f : pow2i(m - up);
        d[0] *= f;
        d[1] *= f;
      }
      m = up;
#pragma unroll
      for (int st = 0; st < 8; st += 2) {
        const int j = blk * 128 + st * 16 + lane;
        uint32_t r[4];
        ldm4t(r, sv + j * kRow +
                     (kPer == 2   ? (warp ^ (j / 4 % 2))
                      : kPer == 4 ? (warp ^ (j / 2 % 4))
                                  : (warp ^ j % 8)) *
                         16);
        const uint2 x = *(const uint2*)(sp + (blk * 8 + st) * 256 + lane * 8),
                    y = *(const uint2*)(sp + (blk * 8 + st + 1) * 256 + lane * 8);
        mma(d, x.x, 0, x.y, 0, r[0], r[1]);
        mma(d, y.x, 0, y.y, 0, r[2], r[3]);
      }
    }
    *(float2*)(o + g * 128 + rank * kCols + warp * 8 + q4 * 2) = make_float2(d[0], d[1]);
  } else if (rank == 0 && warp >= 6) {
    const int i = tid - 192, row = i / 8;
    float l = 0, top = -INFINITY, m = -INFINITY;
    for (int blk = 0; blk < blocks; ++blk) {
      top = fmaxf(top, bmax[blk * 8 + row]);
      const float up = ceilf(p.c * top);
      l = l * (m == -INFINITY ? 1.f : pow2i(m - up)) + bsum[blk * 64 + i];
      m = up;
    }
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    l += __shfl_xor_sync(~0u, l, 4);
    if (i % 8 == 0) *(float2*)(p.ml + ((((size_t)b * p.Hk + hk) * p.splits + split) * 8 + row) * 2) = make_float2(m, l);
  }
}
__global__ void combine(const P p) {
  const int head = blockIdx.x, b = blockIdx.y, group = p.Hq / p.Hk, hk = head / group, row = head % group,
            col = threadIdx.x;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const size_t at = ((size_t)b * p.Hk + hk) * p.splits;
  float m = -INFINITY, l = 0, o = 0;
  for (int s = 0; s < p.splits; ++s) {
    const float2 x = *(const float2*)(p.ml + ((at + s) * 8 + row) * 2);
    const float y = p.o[((at + s) * 8 + row) * 128 + col];
    const float M = fmaxf(m, x.x), fa = m == -INFINITY ? 0.f : pow2i(m - M), fb = pow2i(x.x - M);
    o = __fmaf_rn(o, fa, y * fb);
    l = __fmaf_rn(l, fa, x.y * fb);
    m = M;
  }
  p.out[((size_t)b * p.Hq + head) * 128 + col] = (uint16_t)(pack(o * (1.f / l), 0.f) & 0xffff);
}
template <class F, class... A>
int pdl(F f, dim3 grid, int threads, int smem, cudaStream_t st, A... args) {
  cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  cudaLaunchConfig_t c2{};
  c2.gridDim = grid;
  c2.blockDim = threads;
  c2.stream = st;
  c2.dynamicSmemBytes = smem;
  cudaLaunchAttribute d[1];
  d[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  d[0].val.programmaticStreamSerializationAllowed = 1;
  c2.attrs = d;
  c2.numAttrs = 1;
  return cudaLaunchKernelEx(&c2, f, args...);
}
template <int C, int S>
int launch2(const P& p, float* sc, cudaStream_t st) {
  cudaFuncSetAttribute(scores, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  scores<<<dim3((p.keys_fixed + 255) / 256, p.Hk, p.B), 256, 65536, st>>>(p, sc);
  if (int e = pdl(values<C, S>, dim3(p.splits * C, p.Hk, p.B), 256,
                  S * (256 / C) + S / 16 * 256 + (S / 128 * 8 + S / 128 * 64) * 4, st, p, (const float*)sc))
    return e;
  return pdl(combine, dim3(p.Hq, p.B), 128, 0, st, p);
}
}  // namespace
extern "C" int attention_splits(const void* q, const void* k, const void* v, const int* table, const int* used,
                                float* o, float* ml, float* sc, void* out, int B, int Hq, int Hk, int max_pages,
                                int keys, float scale, int C, int S, void* stream) {
  const P p{(const uint16_t*)q,
            (const uint16_t*)k,
            (const uint16_t*)v,
            table,
            used,
            o,
            ml,
            (uint16_t*)out,
            B,
            Hq,
            Hk,
            max_pages,
            (keys + S - 1) / S,
            keys,
            1.4426950408889634f * scale};
  auto s = (cudaStream_t)stream;
  if (S == 2048 && C == 8) return launch2<8, 2048>(p, sc, s);
  if (S == 2048 && C == 4) return launch2<4, 2048>(p, sc, s);
  if (S == 1024 && C == 4) return launch2<4, 1024>(p, sc, s);
  if (S == 1024 && C == 8) return launch2<8, 1024>(p, sc, s);
  return -1;
}
