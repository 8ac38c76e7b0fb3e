// Runs a backward over each part's columns in turn. Each part gives a float32 share of dhidden. A tree adds two shares
// as soon as two shares of the same level exist. With 1, 2, 4, 8 parts at most 1, 2, 3, 4 shares exist at once. If
// dhidden is float32, the first share is stored in dhidden. The parts' products for dlora_a are added one after
// another.
#include "cpp/ops/linear_logprob_parts.h"

#include <algorithm>
#include <bit>
#include <string>
#include <type_traits>
#include <vector>

#include "cpp/ops/linear_logprob_gradients.h"
#include "cpp/ops/linear_logprob_rows.h"
#include "rlk/base.h"

namespace rlk {
namespace {

struct Columns {
  std::int64_t first, count;
};

// The columns of this shard's parts. The last part also gets the remaining columns: columns past the canonical
// vocabulary are padding.
std::vector<Columns> columns_of_parts(const LinearLogprobBackwardParams& p) {
  const PartRange parts = parts_of_columns(p.vocab_size, p.valid_vocab, p.vocab_start, p.num_columns);
  RLK_CHECK(parts.count > 0, "linear_logprob_backward: with dh_segments a shard is whole parts of the vocabulary");
  std::vector<Columns> found;
  std::int64_t first = 0;
  for (int i = 1; i <= parts.count; ++i) {
    const std::int64_t cut = part_cut(p.vocab_size, parts.first + i) - p.vocab_start;
    const std::int64_t end = i == parts.count ? p.num_columns : std::clamp(cut, first, p.num_columns);
    found.push_back({first, end - first});
    first = end;
  }
  return found;
}

template <class T>
T* moved(T* array, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const unsigned char, unsigned char>;
  return array == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<Byte*>(array) + bytes);
}

LinearLogprobBackwardParams of_columns(const LinearLogprobBackwardParams& p, const Columns& c) {
  LinearLogprobBackwardParams q = p;
  q.dh_segments = 1;
  q.wide_dhidden = true;
  q.dhidden_rows = {std::max<std::int64_t>(p.num_rows, 1), 0, p.head.in_features};
  q.vocab_start += c.first;
  q.num_columns = c.count;
  q.head.weight = moved(p.head.weight, c.first * p.head.weight_stride * size_of(p.head.dtype));
  q.head.bias = moved(p.head.bias, c.first * size_of(p.head.bias_dtype));
  q.dweight = moved(p.dweight, c.first * p.dweight_stride * size_of(p.dweight_dtype));
  q.main_grad = moved(p.main_grad, c.first * p.main_grad_stride * size_of(DType::kFloat32));
  q.dbias = moved(p.dbias, c.first * size_of(p.dbias_dtype));
  q.head.lora_b = moved(p.head.lora_b, c.first * p.head.lora_b_stride * size_of(p.head.dtype));
  q.dlora_b = moved(p.dlora_b, c.first * p.head.lora_rank * size_of(p.head.dtype));
  q.wide_dlora_a = true;
  return q;
}

int shares_in_workspace(const LinearLogprobBackwardParams& p, std::size_t parts) {
  if (p.dhidden == nullptr) return 0;
  return static_cast<int>(std::bit_width(parts)) - (p.wide_dhidden ? 1 : 0);
}

std::int64_t share_bytes(const LinearLogprobBackwardParams& p) {
  return aligned(p.num_rows * p.head.in_features * size_of(DType::kFloat32));
}
bool sums_lora_a(const LinearLogprobBackwardParams& p) { return p.dlora_a != nullptr && !p.wide_dlora_a; }
// Bytes of the parts' shares of dhidden, and of the sum of dlora_a.
std::int64_t sums_bytes(const LinearLogprobBackwardParams& p, std::size_t parts) {
  const std::int64_t of_lora_a = p.head.lora_rank * p.head.in_features * size_of(DType::kFloat32);
  return shares_in_workspace(p, parts) * share_bytes(p) + (sums_lora_a(p) ? aligned(of_lora_a) : 0);
}

}  // namespace

WorkspaceRange by_parts_workspace(const LinearLogprobBackwardParams& p, Device device) {
  WorkspaceRange range;
  const std::vector<Columns> parts = columns_of_parts(p);
  for (const Columns& c : parts) {
    if (c.count == 0) continue;
    const WorkspaceRange of_part = linear_logprob_backward_workspace(of_columns(p, c), device);
    range.least = std::max(range.least, of_part.least);
    range.most = std::max(range.most, of_part.most);
    range.more = std::max(range.more, of_part.more);
  }
  const std::int64_t sums = sums_bytes(p, parts.size());
  return {range.least + sums, range.most + sums, range.more + sums};
}

void backward_by_parts(const LinearLogprobBackwardParams& p, Device device, Stream stream) {
  RLK_CHECK(p.dhidden == nullptr || p.num_rows == 1 || p.dhidden_rows.inner_stride == p.head.in_features,
            "linear_logprob_backward: with dh_segments dhidden is contiguous");
  const std::vector<Columns> parts = columns_of_parts(p);
  const int in_workspace = shares_in_workspace(p, parts.size());
  const bool own = device.type == DeviceType::kCpu && p.workspace == nullptr;
  const std::int64_t bytes = sums_bytes(p, parts.size());
  RLK_CHECK(own || (p.workspace != nullptr && p.workspace_bytes >= by_parts_workspace(p, device).least),
            "linear_logprob: workspace_bytes: expected at least " +
                std::to_string(by_parts_workspace(p, device).least) + ", got " + std::to_string(p.workspace_bytes));
  std::vector<unsigned char> memory(static_cast<std::size_t>(own ? bytes : 0));
  unsigned char* const base = own ? memory.data() : static_cast<unsigned char*>(p.workspace);
  std::vector<float*> shares;
  if (p.wide_dhidden) shares.push_back(static_cast<float*>(p.dhidden));
  for (int i = 0; i < in_workspace; ++i) shares.push_back(reinterpret_cast<float*>(base + i * share_bytes(p)));
  void* const dlora_a = sums_lora_a(p) ? base + in_workspace * share_bytes(p) : p.dlora_a;

  const auto add = [&](int count, const float* a, const float* b, void* to, DType dtype, std::int64_t size) {
    TreeSumParams t;
    t.parts[0] = a;
    t.parts[1] = b;
    t.count = count;
    t.sum = to;
    t.size = size;
    t.out_dtype = dtype;
    tree_sum(t, device, stream);
  };
  const std::int64_t size = p.num_rows * p.head.in_features;
  int there = 0, done = 0;  // number of shares that wait for their neighbours; number of finished parts
  bool adds_dlora_a = p.adds_dlora_a;
  for (const Columns& c : parts) {
    LinearLogprobBackwardParams q = of_columns(p, c);
    if (p.dhidden != nullptr) q.dhidden = shares[there++];
    q.dlora_a = dlora_a;
    q.adds_dlora_a = adds_dlora_a;
    adds_dlora_a = adds_dlora_a || (dlora_a != nullptr && c.count > 0);
    if (!own) {
      q.workspace = base + bytes;
      q.workspace_bytes = p.workspace_bytes - bytes;
    }
    if (c.count > 0) {
      linear_logprob_backward(q, device, stream);
    } else if (p.dhidden != nullptr) {
      dhidden_of_no_columns(q, device, stream);
    }
    ++done;
    for (int k = done; p.dhidden != nullptr && k % 2 == 0; k /= 2, --there) {
      add(2, shares[there - 2], shares[there - 1], shares[there - 2], DType::kFloat32, size);
    }
  }
  if (p.dhidden != nullptr && !p.wide_dhidden) add(1, shares[0], nullptr, p.dhidden, p.head.dtype, size);
  if (sums_lora_a(p)) {
    add(1, static_cast<float*>(dlora_a), nullptr, p.dlora_a, p.head.dtype, p.head.lora_rank * p.head.in_features);
  }
}

}  // namespace rlk
