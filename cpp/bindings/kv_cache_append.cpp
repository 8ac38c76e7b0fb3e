// Python's entry to kv_cache_append.
#include "rlk/ops/kv_cache_append.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <span>
#include <vector>

#include "call.h"

namespace rlk::bindings {
namespace {

// Reads k or v: [num_tokens, num_heads, columns].
const Array& read_tokens(Frame* frame, nb::handle object, const char* name) {
  const Array& a = frame->read(object, name, kFloats);
  require_shape(a->ndim == 3, a, "shape [num_tokens, num_heads, columns]");
  require_columns(a);
  return a;
}

// Reads k_cache or v_cache for such tokens: [num_pages, page_size, num_heads, columns], or one row per slot.
const Array& read_cache(Frame* frame, nb::handle object, const char* name, const Array& tokens) {
  const Array& a = frame->read(object, name, kFloats.names);
  check_dtype(a, tokens);
  const TensorView &v = a.view(), &t = tokens.view();
  const int ndim = v.ndim;
  const std::int64_t heads = t.shape[1], columns = t.shape[2];
  require_shape((ndim == 3 || ndim == 4) && v.shape[ndim - 2] == heads && v.shape[ndim - 1] == columns, a,
                "shape [num_pages, page_size, ", heads, ", ", columns, "] or [num_slots, ", heads, ", ", columns,
                "] (heads and columns of ", tokens, ")");
  const std::int64_t page_size = ndim == 4 ? v.shape[1] : 1;
  require(page_size > 0, a, "pages of at least one slot, got shape ", a.shape());
  require(v.shape[0] < (std::int64_t{1} << 31) / page_size, a, "fewer than 2^31 slots, got shape ", a.shape());
  require_columns(a);
  return a;
}

// A dimension of pages, slots or heads: its stride in bytes, and the largest difference between two of its indices.
struct Step {
  std::int64_t stride, most;
};

// Whether rows of two caches share a byte. Both caches have the same steps, largest first; their beginnings are `apart`
// bytes apart.
bool rows_meet(std::span<const Step> steps, std::int64_t apart, std::int64_t k_bytes, std::int64_t v_bytes) {
  if (steps.empty()) return -v_bytes < apart && apart < k_bytes;
  std::int64_t reach = std::max(k_bytes, v_bytes);
  for (const Step& step : steps.subspan(1)) reach += step.stride * step.most;
  const Step step = steps.front();
  const std::int64_t first = std::max(-step.most, (apart - reach) / step.stride - 1);
  const std::int64_t last = std::min(step.most, (apart + reach) / step.stride + 1);
  for (std::int64_t i = first; i <= last; ++i) {
    if (rows_meet(steps.subspan(1), apart - i * step.stride, k_bytes, v_bytes)) return true;
  }
  return false;
}

// For caches with different strides the test compares only their beginnings.
bool share_memory(const TensorView& k, const TensorView& v, int element_bytes) {
  if (k.num_elements() == 0 || v.num_elements() == 0) return false;
  std::vector<Step> steps;
  for (int i = 0; i + 1 < k.ndim; ++i) {
    if (k.shape[i] < 2) continue;
    if (k.stride(i) != v.stride(i)) return k.data == v.data;
    steps.push_back({std::abs(k.stride(i)) * element_bytes, k.shape[i] - 1});
  }
  std::ranges::sort(steps, std::greater{}, &Step::stride);
  const std::int64_t apart = static_cast<const char*>(v.data) - static_cast<const char*>(k.data);
  return rows_meet(steps, apart, k.shape[k.ndim - 1] * element_bytes, v.shape[v.ndim - 1] * element_bytes);
}

CacheAppendSide side_of(const Array& tokens, const Array& cache) {
  const TensorView &t = tokens.view(), &c = cache.view();
  CacheAppendSide s;
  s.tokens = t.data;
  s.token_stride = t.stride(0);
  s.head_stride = t.stride(1);
  s.columns = t.shape[2];
  s.cache = c.data;
  s.page_stride = c.stride(0);
  s.slot_stride = c.ndim == 4 ? c.stride(1) : 0;
  s.cache_head_stride = c.stride(c.ndim - 2);
  return s;
}

RLK_EAGER_FUNCTION(kv_cache_append, 5, (k_given, v_given, k_cache_given, v_cache_given, slot_mapping)) {
  const Array &k = read_tokens(frame, k_given, "k"), &v = read_tokens(frame, v_given, "v");
  check_dtype(v, k);
  const std::int64_t num_tokens = k->shape[0], num_heads = k->shape[1];
  require_shape(v->shape[0] == num_tokens && v->shape[1] == num_heads, v, "shape [", num_tokens, ", ", num_heads,
                ", columns] (tokens and heads of k)");
  const Array& k_cache = read_cache(frame, k_cache_given, "k_cache", k);
  const Array& v_cache = read_cache(frame, v_cache_given, "v_cache", v);
  const Array& slots = frame->read(slot_mapping, "slot_mapping", kIndices);
  frame->require_writable(k_cache, &v_cache);
  frame->require_writable(v_cache, &k_cache);
  const TensorView &kc = k_cache.view(), &vc = v_cache.view();
  require_shape(vc.ndim == kc.ndim && vc.shape[0] == kc.shape[0] && (kc.ndim == 3 || vc.shape[1] == kc.shape[1]),
                v_cache, "as many slots, in the same pages, as k_cache of shape ", k_cache.shape());
  require(!share_memory(kc, vc, k_cache.element_bytes()), v_cache, "memory other than k_cache's");
  require(slots->ndim == 1 && slots->shape[0] <= num_tokens && slots->is_contiguous(), slots,
          "a contiguous array of at most ", num_tokens, " slots (the tokens of k), got shape ", slots.shape());
  CacheAppendParams p;
  p.k = side_of(k, k_cache);
  p.v = side_of(v, v_cache);
  p.slots = slots->data;
  p.slot_dtype = slots->dtype;
  p.num_slots = slots->shape[0];
  p.num_heads = num_heads;
  p.num_pages = kc.shape[0];
  p.page_size = kc.ndim == 4 ? kc.shape[1] : 1;
  p.dtype = k->dtype;
  return Results("kv_cache_append", frame).run(rlk::kv_cache_append, p);
}

}  // namespace
}  // namespace rlk::bindings
