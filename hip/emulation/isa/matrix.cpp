// Matrix instructions. This file has its own code for layouts, so tests find a wrong layout in a kernel. The arithmetic
// is the published rule in rlk/math/mma_model.h. The CPU backend uses the same rule, so tests do not find a wrong rule.
#include "operands.h"
#include "rlk/math/mma_model.h"

namespace rlk::hip::isa {
namespace {

constexpr int kElements = 4;  // elements of A and of B that one lane holds

void multiply(Wave& w, const Instruction& i) {
  if (w.exec() != ~0ull) fault(w, i, "MFMA with lanes off, which it ignores", w.exec());
  const int tile = i.tile, num_results = tile * tile / kLanes;
  const DType dtype = i.is_half ? DType::kFloat16 : DType::kBFloat16;
  const bool has_groups_of_8 = w.block->code->arch == "gfx942";
  static thread_local u16 a[32][kLanes], b[32][kLanes];
  static thread_local u32 d[16][kLanes];
  for (int l = 0; l < kLanes; ++l) {
    for (int e = 0; e < kElements; ++e) {
      const int k = kElements * (l / tile) + e;
      a[l % tile][k] = u16(w.v[i.operands[1].index + e / 2][l] >> (16 * (e % 2)));
      b[l % tile][k] = u16(w.v[i.operands[2].index + e / 2][l] >> (16 * (e % 2)));
    }
  }
  const Operand& c = i.operands[3];
  for (int l = 0; l < kLanes; ++l) {
    for (int r = 0; r < num_results; ++r) {
      const int row = tile == 32 ? 8 * (r / 4) + 4 * (l / 32) + r % 4 : 4 * (l / 16) + r, column = l % tile;
      float sum = as_float(c.kind == Operand::kVector ? w.v[c.index + r][l] : u32(read_scalar(w, c, 32, true)));
      if (has_groups_of_8) {
        for (int k = 0; k < i.depth; k += 8) sum = gfx942_mma_group(sum, a[row] + k, b[column] + k, dtype);
      } else {
        if (std::fabs(sum) < 0x1p-126f) sum = 0;
        for (int k = 0; k < i.depth; k += 4) sum = gfx90a_mma_group(sum, a[row] + k, b[column] + k, dtype);
      }
      d[r][l] = as_bits(sum);
    }
  }
  for (int r = 0; r < num_results; ++r) std::memcpy(w.v[i.operands[0].index + r], d[r], sizeof(d[r]));
}

}  // namespace

Function matrix(const std::string& name, Instruction& i) {
  if (!starts(name, "v_mfma_f32_")) return nullptr;
  i.tile = starts(name, "v_mfma_f32_32x32x8") ? 32 : starts(name, "v_mfma_f32_16x16x16") ? 16 : 0;
  i.depth = i.tile == 32 ? 8 : 16;
  const bool is_bfloat16 = ends(name, "_bf16") || ends(name, "bf16_1k");
  i.is_half = name.find("bf16") == std::string::npos && ends(name, "f16");
  return i.tile && (is_bfloat16 || i.is_half) ? multiply : nullptr;
}

}  // namespace rlk::hip::isa
