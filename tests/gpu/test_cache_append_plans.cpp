// Every kernel that can serve a call of kv_cache_append has the CPU's bytes: vectors and elements, as built for sm_90
// and as PTX for sm_80.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/kernels.h"
#include "kernels/attention/cache_append.h"
#include "plan_memory.h"
#include "rlk/backends.h"
#include "rlk/ops/kv_cache_append.h"

namespace rlk::cuda {
namespace {

struct Case {
  std::int64_t tokens, heads, columns, pages, page_size;
  DType dtype;
};
// Less than a token per block; several tokens per block; more columns than a block has threads; no whole vector.
constexpr Case kCases[] = {
    {1, 8, 128, 4, 16, DType::kBFloat16},    {37, 2, 64, 9, 16, DType::kFloat16}, {300, 1, 8, 40, 16, DType::kBFloat16},
    {129, 16, 256, 17, 16, DType::kFloat32}, {50, 3, 80, 64, 1, DType::kFloat16}, {50, 3, 7, 11, 5, DType::kBFloat16},
    {50, 3, 5, 11, 5, DType::kFloat32},
};

void run(const Case& c, bool is_hnd, unsigned seed) {
  std::mt19937 random(seed);
  const std::int64_t token = c.heads * c.columns, rows = c.pages * c.page_size, size = size_of(c.dtype);
  const auto bytes = [&](std::int64_t elements) {
    std::vector<unsigned char> found(static_cast<std::size_t>(elements * size));
    for (auto& b : found) b = static_cast<unsigned char>(random());
    return found;
  };
  std::vector<unsigned char> k = bytes(c.tokens * token), v = bytes(c.tokens * token), cache = bytes(2 * rows * token);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(rows));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random);
  slots.resize(static_cast<std::size_t>(c.tokens), -1);
  if (c.tokens > 2) slots[1] = -1;
  CacheAppendParams p;
  const auto place = [&](void* from_k, void* from_v, void* to, const void* at) {
    for (CacheAppendSide* side : {&p.k, &p.v}) {
      side->tokens = side == &p.k ? from_k : from_v;
      side->cache = static_cast<unsigned char*>(to) + (side == &p.k ? 0 : c.columns * size);
      side->token_stride = token;
      side->head_stride = side->columns = c.columns;
      side->page_stride = 2 * c.page_size * token;
      side->slot_stride = is_hnd ? 2 * c.columns : 2 * token;
      side->cache_head_stride = is_hnd ? 2 * c.columns * c.page_size : 2 * c.columns;
    }
    p.slots = at;
  };
  p.num_slots = c.tokens;
  p.num_heads = c.heads;
  p.num_pages = c.pages;
  p.page_size = c.page_size;
  p.dtype = c.dtype;
  std::vector<unsigned char> want = cache;
  place(k.data(), v.data(), want.data(), slots.data());
  cpu::kv_cache_append(p);
  const OnDevice on_k(k), on_v(v);
  std::vector<unsigned char> slot_bytes(slots.size() * 8);
  std::memcpy(slot_bytes.data(), slots.data(), slot_bytes.size());
  const OnDevice on_slots(slot_bytes);
  for (const bool vectors : {true, false}) {
    for (const int arch : {80, 90}) {
      const OnDevice on_cache(cache);
      place(on_k.data, on_v.data, on_cache.data, on_slots.data);
      if (vectors && !cache_append_has_vectors(p)) continue;
      arch == 90 ? sm90::kv_cache_append(p, vectors, nullptr) : sm80::kv_cache_append(p, vectors, nullptr);
      check(cudaDeviceSynchronize(), "kv_cache_append");
      expect(on_cache.host(), want,
             "case " + std::to_string(seed) + (vectors ? ", vectors" : ", elements") + ", sm_" + std::to_string(arch));
    }
  }
}

}  // namespace
}  // namespace rlk::cuda

int main() {
  using namespace rlk::cuda;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || compute_capability(0) != 90) return kSkipped;
  unsigned seed = 0;
  for (const Case& c : kCases) {
    run(c, false, ++seed);
    run(c, true, ++seed);
  }
  std::printf("%d of %d differ\n", wrong, compared);
  return wrong == 0 ? 0 : 1;
}
