// The host side of embedding on HIP checks memory safety, and chooses and launches the kernels of a call.
#include "rlk/ops/embedding.h"

#include <string>
#include <type_traits>

#include "hip/common/launch.h"
#include "kernels/rows/embedding_check.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {
namespace {

RowLayout rows_apart(std::int64_t stride) { return {std::int64_t{1} << 32, 0, stride}; }

// Returns the total size of the workspace in bytes. If a workspace is given, the function also sets the pointers to its
// parts.
std::int64_t place(const EmbeddingBackwardParams& p, EmbeddingWorkspace* w) {
  std::int64_t bytes = 0;
  const auto part = [&](auto* pointer, std::int64_t count) {
    using Pointer = std::remove_reference_t<decltype(*pointer)>;
    if (p.workspace != nullptr) *pointer = reinterpret_cast<Pointer>(static_cast<char*>(p.workspace) + bytes);
    bytes += ceil_div(count * static_cast<std::int64_t>(sizeof(**pointer)), 16) * 16;
  };
  part(&w->keys[0], p.num_tokens);
  part(&w->keys[1], p.num_tokens);
  part(&w->counts, kDigits * ceil_div(p.num_tokens, kSortTile));
  part(&w->present, p.num_rows);
  return bytes;
}

// Sorts the keys and returns them.
const EmbeddingKey* sort(const EmbeddingBackwardParams& p, const EmbeddingWorkspace& w, int device, Stream stream) {
  const std::int64_t tiles = ceil_div(p.num_tokens, kSortTile);
  int bits = 1;  // bits that hold every row index and num_rows, which stands for "no row"
  while (p.num_rows >> bits != 0) ++bits;
  const int passes = static_cast<int>(ceil_div(bits, kDigitBits)), width = static_cast<int>(ceil_div(bits, passes));
  const EmbeddingKey* from = nullptr;
  for (int pass = 0; pass < passes; ++pass) {
    const EmbeddingDigit digit = {32 + pass * width, width};
    const std::string source = pass == 0 ? "_ids" : "_keys";
    EmbeddingKey* const to = w.keys[pass % 2];
    launch_blocks(device, stream, {kSortThreads, kSortLds}, "rlk_embedding_count" + source, tiles, p, w, from, digit,
                  tiles);
    Runtime::get().launch(device, "rlk_embedding_begin", {1, 1, kBeginThreads, kBeginLds}, stream, w.counts,
                          kDigits * tiles);
    launch_blocks(device, stream, {kSortThreads, kSortLds}, "rlk_embedding_scatter" + source, tiles, p, w, from, to,
                  digit, tiles, pass == passes - 1);
    from = to;
  }
  return from;
}

}  // namespace

void embedding(const EmbeddingParams& p, int device, Stream stream) {
  check_embedding(p);
  if (p.num_tokens == 0 || p.columns == 0) return;
  const bool vectors = p.columns * size_of(p.dtype) % 16 == 0 &&
                       has_vectors(p.weight, rows_apart(p.weight_stride), p.dtype) &&
                       has_vectors(p.y, rows_apart(p.y_stride), p.dtype);
  const char* shape = vectors ? "vectors" : size_of(p.dtype) == 4 ? "words" : "halves";
  const EmbeddingCopyGrid g = embedding_copy_grid(p, vectors ? 16 : size_of(p.dtype), kCopyUnits, kCopyThreads);
  launch_blocks(device, stream, {kCopyThreads, 0}, std::string("rlk_embedding_forward_") + shape, g.blocks, p, g);
}

std::int64_t embedding_backward_workspace_bytes(const EmbeddingBackwardParams& p, int) {
  EmbeddingWorkspace none;
  EmbeddingBackwardParams q = p;
  q.workspace = nullptr;
  return p.num_tokens == 0 || p.num_rows == 0 || p.columns == 0 ? 0 : place(q, &none);
}

void embedding_backward(const EmbeddingBackwardParams& p, int device, Stream stream) {
  check_embedding_backward(p);
  if (p.num_rows == 0 || p.columns == 0) return;
  RLK_CHECK(p.workspace || embedding_backward_workspace_bytes(p, 0) == 0, "embedding_backward: a workspace is given");
  const bool whole = p.columns * size_of(p.dweight_dtype) % 16 == 0 &&
                     has_vectors(p.dweight, rows_apart(p.dweight_stride), p.dweight_dtype);
  EmbeddingWorkspace w{};
  if (p.num_tokens > 0) {
    place(p, &w);
    const EmbeddingKey* keys = sort(p, w, device, stream);
    const bool vectors = whole && p.columns % kVec8 == 0 && has_vectors(p.dy, p.dy_rows, p.dtype);
    const std::int64_t slices = ceil_div(p.columns, kSliceColumns);
    launch_blocks(device, stream, {kEmbeddingThreads, kEmbeddingLds},
                  std::string("rlk_embedding_rows_") + (vectors ? "vectors" : "elements") + type_suffix(p.dtype),
                  ceil_div(p.num_tokens, kWindow) * slices, p, keys, slices);
  }
  if (p.accumulate) return;
  const char* shape = whole ? "vectors" : size_of(p.dweight_dtype) == 4 ? "words" : "halves";
  launch_blocks(device, stream, {kEmbeddingThreads, 0}, std::string("rlk_embedding_clear_") + shape,
                ceil_div(p.num_rows, kClearRows), p, w);
}

}  // namespace rlk::hip
