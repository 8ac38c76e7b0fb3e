// v_cmp and v_cmpx. A comparison is described by the set of outcomes for which it is true.
#include "operands.h"

namespace rlk::hip::isa {
namespace {

enum Outcome { kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8 };

int outcomes_of(const std::string& name) {  // returns -1 if `name` is not a comparison
  static const std::map<std::string, int> all = {
      {"f", 0},
      {"lt", kLess},
      {"eq", kEqual},
      {"le", kLess | kEqual},
      {"gt", kGreater},
      {"lg", kLess | kGreater},
      {"ne", kLess | kGreater},
      {"ge", kEqual | kGreater},
      {"o", kLess | kEqual | kGreater},
      {"u", kUnordered},
      {"nge", kUnordered | kLess},
      {"nlg", kUnordered | kEqual},
      {"ngt", kUnordered | kLess | kEqual},
      {"nle", kUnordered | kGreater},
      {"neq", kUnordered | kLess | kGreater},
      {"nlt", kUnordered | kEqual | kGreater},
      {"t", 15},
      {"tru", 15},
  };
  const auto found = all.find(name);
  return found == all.end() ? -1 : found->second;
}

template <class T>
int outcome(T a, T b) {
  if (a < b) return kLess;
  if (a == b) return kEqual;
  return a > b ? kGreater : kUnordered;
}

void set_mask(Wave& w, const Instruction& i, u64 mask) {
  mask &= w.exec();
  write_mask(w, i.operands[0], mask);
  if (i.sets_exec) w.set_exec(mask);
}

template <class T>
void compare(Wave& w, const Instruction& i) {
  u64 mask = 0;
  if constexpr (sizeof(T) == 8) {
    constexpr bool kFloat = std::is_same_v<T, double>;
    const Lanes<u64> a = read_pairs(w, i.operands[1], kFloat), b = read_pairs(w, i.operands[2], kFloat);
    for (int l = 0; l < kLanes; ++l) {
      mask |= u64((outcome(std::bit_cast<T>(a[l]), std::bit_cast<T>(b[l])) & i.outcomes) != 0) << l;
    }
  } else {
    Lanes<u32> own[2];
    constexpr bool kFloat = std::is_same_v<T, float>;
    const u32* a = kFloat ? read_floats(w, i.operands[1], own[0]) : read_bits(w, i.operands[1], own[0]);
    const u32* b = kFloat ? read_floats(w, i.operands[2], own[1]) : read_bits(w, i.operands[2], own[1]);
    for (int l = 0; l < kLanes; ++l) {
      int found;
      if constexpr (kFloat)
        found = outcome(as_float(a[l]), as_float(b[l]));
      else
        found = outcome(T(a[l]), T(b[l]));
      mask |= u64((found & i.outcomes) != 0) << l;
    }
  }
  set_mask(w, i, mask);
}

// Bits of the instruction's mask stand for classes in this order: signalling NaN, quiet NaN, then the classes of
// numbers from -Inf to +Inf.
bool is_of_class(u32 x, u32 mask) {
  const bool negative = x >> 31;
  const u32 magnitude = x & 0x7fffffff;
  int bit = negative ? 5 : 6;
  if (magnitude > 0x7f800000)
    bit = magnitude & 0x400000 ? 1 : 0;
  else if (magnitude == 0x7f800000)
    bit = negative ? 2 : 9;
  else if (magnitude >= 0x800000)
    bit = negative ? 3 : 8;
  else if (magnitude)
    bit = negative ? 4 : 7;
  return mask >> bit & 1;
}
void compare_class(Wave& w, const Instruction& i) {
  Lanes<u32> own[2];
  const u32 *a = read_floats(w, i.operands[1], own[0]), *b = read_bits(w, i.operands[2], own[1]);
  u64 mask = 0;
  for (int l = 0; l < kLanes; ++l) mask |= u64(is_of_class(a[l], b[l])) << l;
  set_mask(w, i, mask);
}

}  // namespace

Function comparison(const std::string& name, Instruction& i) {
  i.sets_exec = starts(name, "v_cmpx_");
  if (!i.sets_exec && !starts(name, "v_cmp_")) return nullptr;
  const std::string rest = name.substr(i.sets_exec ? 7 : 6);
  if (rest == "class_f32") return compare_class;
  const std::size_t split = rest.find('_');
  i.outcomes = outcomes_of(rest.substr(0, split));
  if (i.outcomes < 0) return nullptr;
  static const std::map<std::string, Function> by_type = {
      {"f32", compare<float>}, {"f64", compare<double>}, {"i16", compare<i16>}, {"u16", compare<u16>},
      {"i32", compare<i32>},   {"u32", compare<u32>},    {"i64", compare<i64>}, {"u64", compare<u64>},
  };
  const auto found = by_type.find(rest.substr(split + 1));
  return found == by_type.end() ? nullptr : found->second;
}

}  // namespace rlk::hip::isa
