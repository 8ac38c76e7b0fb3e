// Turns a line of llvm-objdump's disassembly into the function that executes it. An unknown instruction is printed when
// its module is loaded. If a wave reaches an unknown instruction, the process stops.
#include <cstdio>
#include <cstdlib>

#include "reports.h"

namespace rlk::hip::isa {
namespace {

const std::map<std::string, int>& special_registers() {
  static const std::map<std::string, int> all = {
      {"vcc", kVcc},       {"vcc_lo", kVcc},   {"vcc_hi", kVcc + 1},     {"m0", kM0},
      {"exec", kExec},     {"exec_lo", kExec}, {"exec_hi", kExec + 1},   {"flat_scratch", 102},
      {"xnack_mask", 104}, {"scc", kScc},      {"flat_scratch_lo", 102}, {"flat_scratch_hi", 103},
      {"src_scc", kScc},
  };
  return all;
}

bool read_registers(const std::string& text, Operand& o) {
  if (text.size() < 2 || std::string("vsa").find(text[0]) == std::string::npos) return false;
  if (text[1] != '[' && !std::isdigit(static_cast<unsigned char>(text[1]))) return false;
  o.kind = text[0] == 's' ? Operand::kScalar : Operand::kVector;
  if (text[1] == '[') {
    int last = 0;
    if (std::sscanf(text.c_str() + 1, "[%d:%d]", &o.index, &last) != 2) return false;
    o.num_registers = last - o.index + 1;
  } else {
    o.index = std::atoi(text.c_str() + 1);
  }
  if (text[0] == 'a') o.index += kFirstAccumulator;
  return true;
}

bool read_constant(const std::string& text, Operand& o) {
  o.kind = Operand::kConstant;
  char* end = nullptr;
  if (starts(text, "0.159154")) {
    o.is_float = true;
    o.value = 0.15915494309189532;  // the exact value is 1 / (2 pi); the disassembly prints it rounded
    return true;
  }
  o.is_literal = starts(text, "0x");
  o.is_float = !o.is_literal && text.find('.') != std::string::npos;
  if (o.is_float)
    o.value = std::strtod(text.c_str(), &end);
  else
    o.bits = o.is_literal ? std::strtoull(text.c_str(), &end, 16) : u64(std::strtoll(text.c_str(), &end, 10));
  return !text.empty() && end && !*end;
}

bool read_operand(std::string text, Operand& o) {
  if (starts(text, "sext(")) {
    o.sign_extend = true;
    text = text.substr(5, text.size() - 6);
  }
  if (text.size() > 1 && text[0] == '-' && !std::isdigit(static_cast<unsigned char>(text[1]))) {
    o.negate = true;
    text = text.substr(1);
  }
  if (!text.empty() && text[0] == '|') {
    o.absolute = true;
    text = text.substr(1, text.size() - 2);
  }
  if (text == "off") {
    o.kind = Operand::kOff;
    return true;
  }
  const auto special = special_registers().find(text);
  if (special != special_registers().end()) {
    o.kind = Operand::kScalar;
    o.index = special->second;
    o.num_registers = text == "vcc" || text == "exec" ? 2 : 1;
    return true;
  }
  return read_registers(text, o) || read_constant(text, o);
}

// Returns the text from `at` to the next separator that is not in brackets. `at` then points behind this separator.
std::string next_word(const std::string& text, std::size_t& at, const char* separators) {
  while (at < text.size() && text[at] == ' ') ++at;
  const std::size_t begin = at;
  for (int depth = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (!depth && std::strchr(separators, c)) break;
    if (c == '[' || c == '(') ++depth;
    if (c == ']' || c == ')') --depth;
  }
  return text.substr(begin, at - begin);
}

u8 part(const std::string& name) {
  if (name == "DWORD") return kDword;
  return u8(starts(name, "BYTE_") ? kByte0 + name[5] - '0' : kWord0 + name[5] - '0');
}
void read_list(const std::string& text, u8* to) {
  int k = 0;
  for (const char c : text) {
    if ((c == '0' || c == '1') && k < 3) to[k++] = u8(c - '0');
  }
}

// Returns the operand to which the SDWA modifiers of source k apply. SDWA modifiers select a part of a register. A
// carry is the last operand and has no such modifiers.
Operand& sdwa_source(Instruction& i, const std::string& name, int k) {
  const bool has_carry = starts(name, "v_cndmask") || starts(name, "v_addc") || starts(name, "v_subb");
  const bool has_one = starts(name, "v_mov") || starts(name, "v_cvt") || starts(name, "v_not");
  return i.operands.at(has_one ? 1 : i.operands.size() - (has_carry ? 1 : 0) - 2 + k);
}

bool read_modifier(Instruction& i, const std::string& name, const std::string& text) {
  const std::string value = text.substr(text.find(':') + 1);
  if (starts(text, "offset:"))
    i.offset = std::strtoll(value.c_str(), nullptr, 0);
  else if (starts(text, "offset0:"))
    i.offset0 = std::atoi(value.c_str());
  else if (starts(text, "offset1:"))
    i.offset1 = std::atoi(value.c_str());
  else if (text == "clamp")
    i.clamp = true;
  else if (text == "glc" || text == "sc0")
    i.returns = true;
  else if (text == "slc" || text == "nt" || text == "sc1" || text == "scc")
    return true;
  else if (starts(text, "mul:"))
    i.output_factor = value == "2" ? 2 : 4;
  else if (starts(text, "div:"))
    i.output_factor = 0.5f;
  else if (starts(text, "op_sel:"))
    read_list(value, i.op_sel);
  else if (starts(text, "op_sel_hi:"))
    read_list(value, i.op_sel_hi);
  else if (starts(text, "neg_lo:"))
    read_list(value, i.neg_lo);
  else if (starts(text, "neg_hi:"))
    read_list(value, i.neg_hi);
  else if (starts(text, "dst_sel:"))
    i.to_part = part(value);
  else if (starts(text, "dst_unused:")) {
    i.unused = value == "UNUSED_PAD"    ? Instruction::kPad
               : value == "UNUSED_SEXT" ? Instruction::kSignExtend
                                        : Instruction::kPreserve;
  } else if (starts(text, "src0_sel:") || starts(text, "src1_sel:")) {
    sdwa_source(i, name, text[3] - '0').part = part(value);
  } else {
    return false;
  }
  return true;
}

const Table& table() {
  static const Table all = [] {
    Table t;
    add_scalar(t);
    add_floats(t);
    add_doubles(t);
    add_integers(t);
    add_lanes(t);
    return t;
  }();
  return all;
}

Function function_of(const std::string& name, Instruction& i) {
  const auto found = table().find(name);
  if (found != table().end()) return found->second;
  if (starts(name, "v_cmp")) return comparison(name, i);
  if (starts(name, "v_mfma_")) return matrix(name, i);
  if (starts(name, "global_")) return global_access(name, i);
  return lds_access(name, i);
}

}  // namespace

void not_implemented(Wave& w, const Instruction& i) {
  fault(w, i, "UNKNOWN INSTRUCTION");
  stop("unknown instruction: " + i.text);
}

void decode(Instruction& i) {
  i.function = not_implemented;
  const std::size_t split = i.text.find_first_of(" \t");
  i.name = i.text.substr(0, split);
  std::string name = i.name;
  for (const char* suffix : {"_e32", "_e64", "_sdwa", "_dpp"}) {
    if (ends(name, suffix)) name.resize(name.size() - std::strlen(suffix));
  }
  const bool has_operands = split != std::string::npos && !starts(name, "s_waitcnt") && !starts(name, "s_nop") &&
                            !starts(name, "s_endpgm") && !starts(name, "buffer_");
  if (has_operands) {
    const std::string rest = i.text.substr(split + 1);
    std::size_t at = 0;
    for (bool more = true; more;) {
      Operand o;
      if (!read_operand(next_word(rest, at, ", "), o)) return;
      i.operands.push_back(o);
      while (at < rest.size() && rest[at] == ' ') ++at;
      more = at < rest.size() && rest[at] == ',';
      at += more;
    }
    for (std::string word; !(word = next_word(rest, at, " ")).empty();) {
      if (!read_modifier(i, name, word)) return;
    }
  }
  const bool selects_halves = i.op_sel[0] || i.op_sel[1] || i.op_sel[2];
  if (ends(i.name, "_dpp") || (selects_halves && !starts(name, "v_pk_"))) return;
  if (const Function found = function_of(name, i)) i.function = found;
}

}  // namespace rlk::hip::isa
