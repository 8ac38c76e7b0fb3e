// CUDA backend of embedding: checks memory safety, then picks a kernel, and its build for the GPU's architecture.
#include "rlk/ops/embedding.h"

#include "../common/alignment.h"
#include "kernels.h"
#include "kernels/rows/embedding_check.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kThreadsWanted = 2048;  // threads per multiprocessor; with fewer, a thread copies one vector

bool rows_are_vectors(const void* base, std::int64_t stride, std::int64_t rows, std::int64_t columns, DType t) {
  return columns * size_of(t) % 16 == 0 && rows_begin_at_16_bytes(base, {rows + 1, 0, stride}, rows, size_of(t));
}

}  // namespace

bool serves(const EmbeddingPlan& plan, const EmbeddingParams& p) {
  return plan.vectors == 0 || (rows_are_vectors(p.weight, p.weight_stride, p.num_rows, p.columns, p.dtype) &&
                               rows_are_vectors(p.y, p.y_stride, p.num_tokens, p.columns, p.dtype));
}

EmbeddingPlan choose_plan(const EmbeddingParams& p, int multiprocessors) {
  for (const EmbeddingPlan& plan : kEmbeddingPlans) {
    if (!serves(plan, p)) continue;
    if (plan.vectors <= 1) return plan;
    const std::int64_t vectors = p.num_tokens * (p.columns * size_of(p.dtype) / 16);
    if (vectors / plan.vectors >= kThreadsWanted * multiprocessors) return plan;
  }
  return {};
}

bool serves(const EmbeddingBackwardPlan& plan, const EmbeddingBackwardParams& p) {
  return !plan.vectors || (p.columns % 8 == 0 && at_16_bytes(p.workspace) &&
                           rows_begin_at_16_bytes(p.dy, p.dy_rows, p.num_tokens, size_of(p.dtype)) &&
                           rows_are_vectors(p.dweight, p.dweight_stride, p.num_rows, p.columns, p.dweight_dtype));
}

std::int64_t place(const EmbeddingBackwardParams& p, EmbeddingWorkspace* to) {
  std::int64_t bytes = 0;
  const auto part = [&](auto* pointer, std::int64_t count) {
    if (to != nullptr) {
      *pointer = reinterpret_cast<std::remove_reference_t<decltype(*pointer)>>(static_cast<char*>(p.workspace) + bytes);
    }
    bytes += (count * static_cast<std::int64_t>(sizeof(**pointer)) + 127) / 128 * 128;
  };
  EmbeddingWorkspace none{};
  EmbeddingWorkspace& w = to != nullptr ? *to : none;
  const auto tiles = [&](std::int64_t of) { return (p.num_tokens + of - 1) / of; };
  part(&w.keys[0], p.num_tokens);
  part(&w.keys[1], p.num_tokens);
  part(&w.items, p.num_tokens);
  part(&w.counts, kEmbeddingDigits * tiles(kEmbeddingSortTile));
  part(&w.item_counts, tiles(kEmbeddingItemTile));
  part(&w.num_items, 1);
  part(&w.present, p.num_rows);
  part(&w.sums, (p.num_tokens / kEmbeddingLongRun + 1) * p.columns);
  return bytes;
}

void embedding(const EmbeddingParams& p, int device, Stream stream) {
  check_embedding(p);
  if (p.num_tokens == 0 || p.columns == 0) return;
  const DeviceGuard guard(device);
  const EmbeddingPlan plan = choose_plan(p, multiprocessors(device));
  note_plan([&] { return plan.vectors == 0 ? "elements" : std::to_string(plan.vectors) + " vectors"; });
  RLK_CUDA_IN_USE("embedding", device, embedding)(p, plan, to_stream(stream));
}

std::int64_t embedding_backward_workspace_bytes(const EmbeddingBackwardParams& p, int) {
  return p.num_tokens == 0 || p.num_rows == 0 || p.columns == 0 ? 0 : place(p, nullptr);
}

void embedding_backward(const EmbeddingBackwardParams& p, int device, Stream stream) {
  check_embedding_backward(p);
  if (p.num_rows == 0 || p.columns == 0 || (p.num_tokens == 0 && p.accumulate)) return;
  RLK_CHECK(p.workspace || embedding_backward_workspace_bytes(p, 0) == 0, "embedding_backward: a workspace is given");
  const DeviceGuard guard(device);
  const EmbeddingBackwardPlan plan = {serves(EmbeddingBackwardPlan{true}, p)};
  RLK_CUDA_IN_USE("embedding", device, embedding_backward)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
