// Every kernel that can serve a call of rope has the CPU's bits: all plans, as built for sm_90 and as PTX for sm_80. An
// id outside the tables has NaN angles, as has a row of NaN in the CPU's tables.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/rope/kernels.h"
#include "rlk/backends.h"
#include "rlk/math/half.h"
#include "rlk/ops/rope.h"
#include "tests/gpu/plan_memory.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kPositions = 60;  // the tables have one more row, of NaN

struct Case {
  std::int64_t tokens, q_heads, k_heads, head_dim, rotary_dim;
  DType dtype = DType::kBFloat16, angle_dtype = DType::kFloat32;
  bool ids = true, per_pair = true, sections = false, bad_ids = false, heads_first = false;
  std::int64_t pad = 0;    // elements between heads of the output
  std::int64_t batch = 0;  // as in Hugging Face's layout: sequences, whose outputs have heads first
};

// Numbers of tokens: one; a few; many. Numbers of heads: as in Llama; as in MLA; one. Widths: whole vec8s; a half or a
// quarter rotated; odd widths that no vector fits; a width larger than a block.
const std::vector<Case> kCases = {
    {1, 32, 8, 128, 128},
    {3, 5, 1, 64, 64, DType::kFloat32},
    {700, 32, 8, 128, 128},
    {700, 32, 8, 128, 128, DType::kBFloat16, DType::kFloat32, true, true, false, true},
    {130, 64, 1, 64, 64, DType::kFloat16, DType::kFloat16, true, false},
    {65, 7, 3, 96, 96, DType::kBFloat16, DType::kBFloat16, false, true},
    {65, 7, 3, 80, 80, DType::kFloat16, DType::kFloat32, false, false},
    {33, 16, 2, 256, 64, DType::kBFloat16, DType::kFloat32, true, true, false, true, true},
    {33, 6, 2, 136, 64, DType::kFloat32, DType::kFloat32, true, false},
    {40, 12, 4, 128, 128, DType::kBFloat16, DType::kFloat32, true, true, true, true},
    {40, 12, 4, 128, 128, DType::kBFloat16, DType::kBFloat16, false, false, true, false, true},
    {48, 9, 0, 192, 64, DType::kFloat32, DType::kFloat32, true, true, false, false, true, 8},
    {20, 0, 3, 32, 32, DType::kBFloat16},
    {17, 3, 2, 18, 18, DType::kBFloat16, DType::kFloat32, true, true, false, true},
    {17, 3, 2, 37, 30, DType::kFloat16, DType::kFloat16, false, false, false, false, true, 3},
    {11, 2, 1, 66, 64, DType::kFloat32, DType::kFloat32, true, true, true, true},
    {3, 2, 1, 4352, 4352, DType::kBFloat16},
    {3, 2, 1, 300, 298, DType::kFloat32},
    {12, 4, 2, 64, 64, DType::kBFloat16, DType::kFloat32, true, true, false, false, false, 1},
    // Rows of outputs apart, with angles in the heads' type: each lane of the streams stores one or two heads.
    {700, 32, 8, 128, 128, DType::kBFloat16, DType::kBFloat16, false, false, false, false, false, 8},
    {300, 40, 3, 64, 32, DType::kFloat16, DType::kFloat16, true, false, false, true, false, 16},
    {290, 1, 35, 64, 64, DType::kBFloat16, DType::kBFloat16, true, true, true, false, false, 8},
    // Rows that fill a power of two of lanes. Cases have numbers of heads that are multiples of four or not, queries or
    // keys alone, some columns rotated, and rows of a whole warp or of two lanes.
    {600, 32, 8, 128, 128, DType::kBFloat16, DType::kBFloat16, false, false, false, false, false, 0, 3},
    {123, 5, 2, 128, 128, DType::kFloat16, DType::kFloat16, true, true, false, true, false, 0, 3},
    {66, 0, 9, 256, 128, DType::kBFloat16, DType::kFloat32, false, false, false, false, false, 0, 2},
    {90, 7, 0, 16, 16, DType::kFloat16, DType::kFloat16, true, false, false, true, false, 8},
    {45, 3, 1, 128, 32, DType::kBFloat16, DType::kBFloat16, true, true, false, true, true},
};

// Normal values; a few are large or small, zeros, infinities or NaN; the last `nans` are NaN.
std::vector<unsigned char> values(std::int64_t count, DType dtype, std::mt19937* random, std::int64_t nans = 0) {
  const int bytes = size_of(dtype);
  std::vector<unsigned char> memory(static_cast<std::size_t>(count * bytes));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < count; ++i) {
    constexpr float kValues[] = {0.0f, -0.0f, 1e-30f, -1e-6f, 3e4f, 1e20f, INFINITY, NAN};
    float x = (*random)() % 64 == 0 ? kValues[(*random)() % 8] : normal(*random);
    if (i >= count - nans) x = NAN;
    unsigned char* to = &memory[static_cast<std::size_t>(i * bytes)];
    const std::uint16_t half = dtype == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x);
    dtype == DType::kFloat32 ? std::memcpy(to, &x, 4) : std::memcpy(to, &half, 2);
  }
  return memory;
}

std::string text(const Case& c) {
  return std::string(short_name(c.dtype)) + " [" + std::to_string(c.tokens) + ", " + std::to_string(c.q_heads) + "+" +
         std::to_string(c.k_heads) + ", " + std::to_string(c.head_dim) + "]";
}

void lay_out(const Case& c, std::int64_t heads, RopeHeads* h) {
  const std::int64_t d = c.head_dim, e = d + c.pad;
  h->num_heads = heads;
  h->x_tokens = c.heads_first ? TokenStrides{0, d} : TokenStrides{0, heads * d};
  h->x_head_stride = c.heads_first ? c.tokens * d : d;
  h->y_tokens = {0, heads * e};
  h->y_head_stride = e;
  if (c.batch == 0) return;
  const std::int64_t seq = c.tokens / c.batch;
  h->x_tokens.outer = h->x_tokens.inner * seq;
  h->y_tokens = {heads * seq * e, e};
  h->y_head_stride = seq * e;
}

void run_case(const Case& c, int options, std::mt19937* random) {
  RopeParams p;
  p.num_tokens = p.inner_tokens = c.tokens;
  p.head_dim = c.head_dim;
  p.rotary_dim = c.rotary_dim;
  p.width = c.per_pair ? c.rotary_dim / 2 : c.rotary_dim;
  p.dtype = c.dtype;
  p.angle_dtype = c.angle_dtype;
  p.interleaved = options & 1;
  p.round_products = options & 2;
  p.transposed = options & 4;
  if (c.sections) {
    p.num_sections = 3;
    const std::int32_t first = static_cast<std::int32_t>(c.rotary_dim / 8);
    p.section_pairs[0] = first;
    p.section_pairs[1] = first + (c.rotary_dim % 16 ? 1 : 0);
    p.section_pairs[2] = static_cast<std::int32_t>(c.rotary_dim / 2) - p.section_pairs[0] - p.section_pairs[1];
  }
  if (c.batch > 0) p.inner_tokens = c.tokens / c.batch;
  lay_out(c, c.q_heads, &p.q);
  lay_out(c, c.k_heads, &p.k);
  const std::int64_t rows = c.ids ? kPositions + 1 : p.num_sections * c.tokens;
  const auto cos = values(rows * p.width, c.angle_dtype, random, c.ids ? p.width : 0);
  const auto sin = values(rows * p.width, c.angle_dtype, random, c.ids ? p.width : 0);
  p.cos.tokens = p.sin.tokens = {p.inner_tokens * p.width, p.width};
  p.cos.section_stride = p.sin.section_stride = c.tokens * p.width;
  std::vector<unsigned char> ids(static_cast<std::size_t>(p.num_sections * c.tokens) * 8), nan_ids = ids;
  if (c.ids) {
    p.id_dtype = options & 1 ? DType::kInt32 : DType::kInt64;
    p.id_tokens = {p.inner_tokens, 1};
    p.id_section_stride = c.tokens;
    constexpr std::int64_t kBad[] = {-1, kPositions, 1000, 2147483647, -2147483648};
    const int bytes = size_of(p.id_dtype);
    for (std::int64_t i = 0; i < p.num_sections * c.tokens; ++i) {
      const bool bad = c.bad_ids && (*random)() % 3 == 0;
      const std::int64_t good = static_cast<std::int64_t>((*random)() % kPositions);
      const std::int64_t id = bad ? kBad[(*random)() % 5] : good, of_cpu = bad ? kPositions : good;
      std::memcpy(&ids[static_cast<std::size_t>(i * bytes)], &id, static_cast<std::size_t>(bytes));
      std::memcpy(&nan_ids[static_cast<std::size_t>(i * bytes)], &of_cpu, static_cast<std::size_t>(bytes));
    }
  }
  const auto q = values(c.tokens * c.q_heads * c.head_dim, c.dtype, random);
  const auto k = values(c.tokens * c.k_heads * c.head_dim, c.dtype, random);
  const auto size = [&](std::int64_t heads) {
    return static_cast<std::size_t>(c.tokens * heads * (c.head_dim + c.pad) * size_of(c.dtype));
  };
  std::vector<unsigned char> q_out(size(c.q_heads), kCanary), k_out(size(c.k_heads), kCanary);
  const std::vector<unsigned char> q_clean = q_out, k_clean = k_out;
  const auto point = [&](const void* a, const void* b, const void* of_cos, const void* of_sin, const void* of_ids,
                         void* a_out, void* b_out) {
    p.q.x = a;
    p.k.x = b;
    p.cos.data = of_cos;
    p.sin.data = of_sin;
    p.position_ids = c.ids ? of_ids : nullptr;
    p.q.y = a_out;
    p.k.y = b_out;
  };
  point(q.data(), k.data(), cos.data(), sin.data(), nan_ids.data(), q_out.data(), k_out.data());
  p.max_position = kPositions + 1;
  cpu::rope(p);
  p.max_position = kPositions;
  const OnDevice q_gpu(q), k_gpu(k), cos_gpu(cos), sin_gpu(sin), ids_gpu(ids);
  for (const RopePlan& plan : kRopePlans) {
    for (const int arch : {90, 80}) {
      const OnDevice q_got(q_clean), k_got(k_clean);
      point(q_gpu.data, k_gpu.data, cos_gpu.data, sin_gpu.data, ids_gpu.data, q_got.data, k_got.data);
      if (!serves(plan, p, arch)) continue;
      arch == 90 ? sm90::rope(p, plan, nullptr) : sm80::rope(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "rope");
      const std::string what = text(c) + ", options " + std::to_string(options) + ", plan " +
                               (plan.streams ? "streams" : std::to_string(plan.heads) + (plan.lanes ? " lanes" : "")) +
                               ", sm_" + std::to_string(arch);
      expect(q_got.host(), q_out, what + ", q");
      expect(k_got.host(), k_out, what + ", k");
    }
  }
}

}  // namespace
}  // namespace rlk::cuda

int main() {
  using namespace rlk;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || cuda::compute_capability(0) != 90) {
    std::printf("skipped: no device of compute capability 9.0\n");
    return cuda::kSkipped;
  }
  std::mt19937 random(1);
  for (const cuda::Case& c : cuda::kCases) {
    for (int options = 0; options < 8; ++options) cuda::run_case(c, options, &random);
  }
  std::printf("%d of %d outputs differ\n", cuda::wrong, cuda::compared);
  return cuda::wrong > 0;
}
