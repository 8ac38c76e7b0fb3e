// The host side of attention on HIP checks memory safety, and chooses and launches the kernels of a call.
#include "rlk/ops/attention.h"

#include <string>

#include "hip/common/launch.h"
#include "kernels/attention/check.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {
namespace {

void check_exp(const AttentionInput& p) {
  RLK_CHECK(p.exp == Exp::kPortable, "attention: the hardware's exponential is CUDA's alone");
}

std::string kernel_name(const char* pass, const AttentionInput& p) {
  return std::string("rlk_attention_") + (p.parents != nullptr ? "tree_" : "") + pass +
         (p.head_dim <= NarrowTile::kColumns ? "_narrow" : "_wide") + type_suffix(p.dtype);
}

// Launches the kernels of one pass, such as the forward or dq. These kernels take the params, the grid and the first
// block of the launch.
template <class Params>
void launch_tiles(const char* pass, const Params& p, const AttentionGrid& g, int narrow_lds, int wide_lds, int device,
                  Stream stream) {
  const int lds = p.head_dim <= NarrowTile::kColumns ? narrow_lds : wide_lds;
  const std::string name = kernel_name(pass, p);
  for_each_launch(attention_blocks(p, g), [&](std::int64_t first, std::int64_t count) {
    Runtime::get().launch(device, name.c_str(), {count, 1, kAttentionThreads, static_cast<std::size_t>(lds)}, stream, p,
                          g, first);
  });
}

// Launches a pass of a call whose sequences may form trees. If the sequences form trees, `paths` is the table of
// ancestors.
template <class Params>
void launch_pass(const char* pass, const Params& p, const std::uint32_t* paths, const AttentionGrid& g, int narrow_lds,
                 int wide_lds, int device, Stream stream) {
  if (p.parents == nullptr) return launch_tiles(pass, p, g, narrow_lds, wide_lds, device, stream);
  launch_tiles(pass, AttentionTree<Params>{p, paths}, g, narrow_lds, wide_lds, device, stream);
}
std::uint32_t* launch_paths(const AttentionInput& p, void* workspace, int device, Stream stream) {
  auto* const paths = static_cast<std::uint32_t*>(workspace);
  if (p.parents == nullptr) return paths;
  RLK_CHECK(paths != nullptr, "attention: workspace");
  launch_blocks(device, stream, {kAttentionThreads, 0}, "rlk_attention_paths", 1, p, paths);
  return paths;
}

}  // namespace

void attention(const AttentionParams& p, int device, Stream stream) {
  check_attention(p);
  check_exp(p);
  if (attention_rows(p) * p.num_q_heads == 0) return;
  const bool vectors = attention_at_16_bytes(p);
  launch_pass("forward", p, launch_paths(p, p.workspace, device, stream),
              attention_query_grid(p, NarrowTile::kRows, vectors), kAttentionForwardLds<NarrowTile>,
              kAttentionForwardLds<WideTile>, device, stream);
}

void attention_partials(const AttentionPartialsParams& p, int device, Stream stream) {
  check_attention(p);
  check_exp(p);
  const std::int64_t blank = attention_blank_threads(p);
  if (blank == 0) return;
  launch_blocks(device, stream, {kAttentionThreads, 0}, "rlk_attention_blank", ceil_div(blank, kAttentionThreads), p,
                blank);
  const bool vectors = attention_at_16_bytes(p);
  launch_tiles("partials", p, attention_query_grid(p, NarrowTile::kRows, vectors), kAttentionForwardLds<NarrowTile>,
               kAttentionForwardLds<WideTile>, device, stream);
}

void attention_merge(const AttentionMergeParams& p, int device, Stream stream) {
  check_attention(p);
  RLK_CHECK(p.exp == Exp::kPortable, "attention_merge: the hardware's exponential is CUDA's alone");
  const std::int64_t threads = attention_merge_threads(p);
  if (threads == 0) return;
  launch_blocks(device, stream, {kAttentionThreads, 0}, std::string("rlk_attention_merge") + type_suffix(p.dtype),
                ceil_div(threads, kAttentionThreads), p, threads);
}

void attention_backward(const AttentionBackwardParams& p, int device, Stream stream) {
  check_attention(p);
  check_exp(p);
  const bool vectors = attention_at_16_bytes(p) && attention_at_16_bytes(p.dout, p.dtype);
  const std::int64_t rows = attention_rows(p) * p.num_q_heads;
  if (rows > 0) {
    const std::int64_t blocks = ceil_div(rows, kAttentionThreads / kAttentionChains);
    launch_blocks(device, stream, {kAttentionThreads, 0}, std::string("rlk_attention_delta") + type_suffix(p.dtype),
                  blocks, p, rows, blocks);
  }
  const std::uint32_t* const paths = launch_paths(p, static_cast<float*>(p.workspace) + rows, device, stream);
  if (p.dq != nullptr && rows > 0) {
    launch_pass("dq", p, paths, attention_query_grid(p, NarrowTile::kRows, vectors), kAttentionBackwardLds<NarrowTile>,
                kAttentionBackwardLds<WideTile>, device, stream);
  }
  if (p.dk != nullptr && attention_keys(p) > 0) {
    launch_pass("dkv", p, paths, attention_key_grid(p, NarrowTile::kRows, vectors), kAttentionBackwardLds<NarrowTile>,
                kAttentionBackwardLds<WideTile>, device, stream);
  }
  if (p.dsinks != nullptr) {
    constexpr std::size_t kLds = kSinkGroups * sizeof(float);
    launch_blocks(device, stream, {kAttentionThreads, kLds}, "rlk_attention_sinks", p.num_q_heads, p,
                  attention_rows(p));
  }
}

}  // namespace rlk::hip
