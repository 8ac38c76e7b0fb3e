// Microbenchmark of kv_cache_append on CUDA: one row per case, with the bytes it must move and their share of the copy
// ceiling measured in the same run.
#include <numeric>
#include <random>
#include <string>

#include "bench/buffers.h"
#include "bench/gpu_timer.h"
#include "bench/sequence_lengths.h"
#include "rlk/backends.h"
#include "rlk/ops/kv_cache_append.h"

namespace rlk::bench {
namespace {

// Appends tokens of 8 heads of 128 bf16 columns to pages of 16, from packed K|V.
void run(std::int64_t tokens, double ceiling) {
  constexpr std::int64_t kHeads = 8, kColumns = 128, kPage = 16;
  const std::int64_t pages = 2 * (tokens + kPage - 1) / kPage + 1, token = kHeads * kColumns;
  const int count = tokens < 4096 ? 64 : 8;
  const Buffers k(static_cast<std::size_t>(tokens * token * 2), count, DType::kBFloat16, true);
  const Buffers v(static_cast<std::size_t>(tokens * token * 2), count, DType::kBFloat16, true);
  const Buffers cache(static_cast<std::size_t>(pages * kPage * token * 4), count, DType::kBFloat16, true);
  std::vector<std::int32_t> slots(static_cast<std::size_t>(pages * kPage));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(1));
  slots.resize(static_cast<std::size_t>(tokens));
  std::int32_t* const on_gpu = on_device(slots);
  const auto append = [&](cudaStream_t stream, int call) {
    CacheAppendParams p;
    for (CacheAppendSide* side : {&p.k, &p.v}) {
      side->tokens = (side == &p.k ? k : v).at(call);
      side->cache = static_cast<char*>(cache.at(call)) + (side == &p.k ? 0 : 2 * kColumns);
      side->token_stride = token;
      side->head_stride = side->columns = kColumns;
      side->page_stride = kPage * 2 * token;
      side->slot_stride = 2 * token;
      side->cache_head_stride = 2 * kColumns;
    }
    p.slots = on_gpu;
    p.slot_dtype = DType::kInt32;
    p.num_slots = tokens;
    p.num_heads = kHeads;
    p.num_pages = pages;
    p.page_size = kPage;
    cuda::kv_cache_append(p, 0, reinterpret_cast<Stream>(stream));
  };
  print_row(std::to_string(tokens) + " tokens", median_us(append, count, 15), 8.0 * static_cast<double>(tokens * token),
            ceiling);
  cudaFree(on_gpu);
}

}  // namespace
}  // namespace rlk::bench

int main() {
  using namespace rlk;
  if (!bench::has_hopper()) return 1;
  const double ceiling = bench::copy_ceiling();
  std::printf("copy ceiling %.2f TB/s\n", ceiling / 1e12);
  for (const std::int64_t tokens : {1, 64, 256, 8192, 32768}) bench::run(tokens, ceiling);
}
