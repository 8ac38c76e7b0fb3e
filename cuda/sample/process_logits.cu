// process_logits: a block computes a tile of a row's columns. The block keeps the columns' counts in shared memory and
// reads the row's whole history. If only edited columns are requested, a block computes a whole row. The kernels use
// kernels/sample/process_logits.h, shared with the CPU and HIP. HBM limits the speed: the logits are read once, and the
// output is written once. If only edited columns are requested, the latency of these few columns limits the speed. All
// architectures share this source.
#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kProcessColumns = 8192;
using ProcessTeam = BlockTeam<kRowThreads>;
constexpr int kEditThreads = 512;  // many threads: every entry waits for memory, so each thread takes few entries
using EditTeam = BlockTeam<kEditThreads>;

template <class T>
__global__ void __launch_bounds__(kRowThreads) process_logits_kernel(const __grid_constant__ ProcessLogitsParams p) {
  __shared__ std::uint32_t words[kProcessColumns], found;
  const std::int64_t row = blockIdx.x, begin = std::int64_t{blockIdx.y} * kProcessColumns;
  const std::int64_t end = begin + kProcessColumns < p.num_columns ? begin + kProcessColumns : p.num_columns;
  process_columns<ProcessTeam, T>(ProcessTeam(), p, row, begin, end, words, &found);
  if (begin == 0 && threadIdx.x == 0) p.status[row] = static_cast<std::int32_t>(found);
}

constexpr int kFewEntries = 1024, kTableBits = 11, kTable = 1 << kTableBits;

// The words of a row's columns (a column's count in the history and two flags), for a row of at most kFewEntries
// entries: a hash table with open addressing in shared memory.
struct EditTable {
  std::uint32_t keys[kTable], words[kTable];  // a key is the column + 1; 0: no column

  // The place of a column. If the table does not have the column, the function inserts it.
  __device__ __forceinline__ int place_of(std::uint32_t column) {
    std::uint32_t at = column * 2654435761u >> (32 - kTableBits);
    for (;; at = (at + 1) % kTable) {
      const std::uint32_t key = atomicCAS(keys + at, 0u, column + 1);
      if (key == 0 || key == column + 1) return static_cast<int>(at);
    }
  }
};

// Computes the edited columns of a row with few entries. `bits` has a bit per column.
template <class T>
__device__ __forceinline__ void edit_few(const EditTeam& team, const ProcessLogitsParams& p, std::int64_t row,
                                         const RowEdits<EditTeam>& edits, EditTable* table, std::uint32_t* bits,
                                         std::uint32_t* found) {
  const std::int64_t columns = p.num_columns;
  const auto size = static_cast<int>(edit_words(columns));
  const auto* const logits = static_cast<const typename T::Storage*>(p.logits) + row * p.logits_stride;
  float* const out = p.out + row * columns;
  for (int i = team.thread(); i < kTable; i += kEditThreads) table->keys[i] = table->words[i] = 0;
  for (int i = team.thread(); i < size; i += kEditThreads) bits[i] = 0;
  edits.find_faults(found);
  __syncthreads();
  const auto mark = [&](std::int64_t j) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(logits + j));
    atomicOr(bits + j / 32, 1u << (j % 32));
    return table->words + table->place_of(static_cast<std::uint32_t>(j));
  };
  edits.each_of_history(0, columns, found, [&](std::int64_t j, std::int64_t i) {
    const bool in_prompt = p.is_prompt != nullptr && p.is_prompt[i] != 0;
    std::uint32_t* const word = mark(j);
    in_prompt ? atomicOr(word, kInPrompt) : atomicAdd(word, 1u);
  });
  edits.each_of_bias(0, columns, found, [&](std::int64_t j, std::int64_t) { atomicOr(mark(j), kHasBias); });
  __syncthreads();
  const bool bad = *found != 0;
  if (team.thread() == 0) p.status[row] = static_cast<std::int32_t>(*found);
  constexpr int kOwn = kTable / kEditThreads;
  std::uint32_t key[kOwn];
  typename T::Storage z[kOwn] = {};
#pragma unroll
  for (int k = 0; k < kOwn; ++k) key[k] = bad ? 0 : table->keys[k * kEditThreads + team.thread()];
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    if (key[k] != 0) z[k] = logits[key[k] - 1];
  }
  for (int i = team.thread(); i < size; i += kEditThreads) p.edited[row * size + i] = bad ? 0 : bits[i];
  if (bad) return;
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    const std::uint32_t word = table->words[k * kEditThreads + team.thread()];
    if (key[k] == 0 || (word & kHasBias) != 0) continue;
    out[key[k] - 1] = edits.penalties.of(T::load(z[k]), word, 0.0f, p.order);
  }
  edits.each_of_bias(0, columns, found, [&](std::int64_t j, std::int64_t i) {
    const std::uint32_t word = table->words[table->place_of(static_cast<std::uint32_t>(j))];
    out[j] = edits.penalties.of(T::load(logits[j]), word, p.bias_values[i], p.order);
  });
}

// Processes only the columns of the row's history and bias. If the row has many entries, `out` first holds the columns'
// words, and later their results.
template <class T>
__global__ void __launch_bounds__(kEditThreads) edit_columns_kernel(const __grid_constant__ ProcessLogitsParams p) {
  extern __shared__ std::uint32_t bits[];  // one bit per column, set if the column is edited
  __shared__ std::uint32_t found;
  __shared__ EditTable table;
  const EditTeam team;
  const std::int64_t row = blockIdx.x, columns = p.num_columns;
  const auto size = static_cast<int>(edit_words(columns));
  wait_for_previous_kernel();
  allow_next_kernel();
  const RowEdits<EditTeam> edits(team, p, row);
  if (edits.entries() <= kFewEntries) return edit_few<T>(team, p, row, edits, &table, bits, &found);
  const auto* const logits = static_cast<const typename T::Storage*>(p.logits) + row * p.logits_stride;
  auto* const words = reinterpret_cast<std::uint32_t*>(p.out + row * columns);
  for (int i = team.thread(); i < size; i += kEditThreads) bits[i] = 0;
  edits.find_faults(&found);
  __syncthreads();
  const auto mark = [&](std::int64_t j, std::int64_t) {
    words[j] = 0;
    atomicOr(bits + j / 32, 1u << (j % 32));
  };
  edits.each_of_history(0, columns, &found, mark);
  edits.each_of_bias(0, columns, &found, mark);
  __syncthreads();
  const bool bad = found != 0;
  if (team.thread() == 0) p.status[row] = static_cast<std::int32_t>(found);
  for (int i = team.thread(); i < size; i += kEditThreads) p.edited[row * size + i] = bad ? 0 : bits[i];
  if (bad) return;
  edits.count(0, columns, words, &found);
  __syncthreads();
  const auto write = [&](std::int64_t j, std::uint32_t word, float bias) {
    words[j] = static_cast<std::uint32_t>(bits_of(edits.penalties.of(T::load(logits[j]), word, bias, p.order)));
  };
  // A column may have several entries in the history. The entry that clears the column's bit writes the column, unless
  // the column has a bias.
  edits.each_of_history(0, columns, &found, [&](std::int64_t j, std::int64_t) {
    const std::uint32_t bit = 1u << (j % 32);
    if ((atomicAnd(bits + j / 32, ~bit) & bit) == 0) return;
    const std::uint32_t word = words[j];
    if ((word & kHasBias) == 0) write(j, word, 0.0f);
  });
  edits.each_of_bias(0, columns, &found, [&](std::int64_t j, std::int64_t i) { write(j, words[j], p.bias_values[i]); });
}

}  // namespace

namespace RLK_CUDA_ARCH {

void process_logits(const ProcessLogitsParams& p, cudaStream_t stream) {
  if (p.edited != nullptr) {
    allow_shared_memory<edit_columns_kernel<Fp32>>();
    const auto bytes = static_cast<int>(4 * edit_words(p.num_columns));
    return launch_dependent<kOverlap>(edit_columns_kernel<Fp32>, static_cast<int>(p.num_rows), kEditThreads, bytes,
                                      stream, p);
  }
  const auto tiles = static_cast<unsigned>((p.num_columns + kProcessColumns - 1) / kProcessColumns);
  const dim3 blocks(static_cast<unsigned>(p.num_rows), tiles > 0 ? tiles : 1);
  const auto launch = [&](auto type) { process_logits_kernel<decltype(type)><<<blocks, kRowThreads, 0, stream>>>(p); };
  p.dtype == DType::kFloat32 ? launch(Fp32()) : p.dtype == DType::kBFloat16 ? launch(Bf16()) : launch(Fp16());
  check(cudaGetLastError(), "launch of process_logits");
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
