// The emulator's model of a CDNA compute unit: decoded instructions, kernels, waves of 64 lanes, and blocks.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace rlk::hip::isa {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr int kLanes = 64;
constexpr int kFirstAccumulator = 256;  // the accumulator register a0 is Wave::v[256], and so on
constexpr int kVcc = 106;
constexpr int kM0 = 124;
constexpr int kExec = 126;
constexpr int kScc = 253;

template <class T>
using Lanes = std::array<T, kLanes>;

// A part of a 32-bit register, by SDWA's names.
enum Part : u8 { kByte0 = 0, kWord0 = 4, kDword = 6 };

struct Operand {
  enum Kind : u8 { kNone, kVector, kScalar, kConstant, kOff };
  Kind kind = kNone;
  int index = 0;          // number of the first register
  int num_registers = 1;  // registers in a scalar or vector range
  u64 bits = 0;           // the value of an integer constant
  double value = 0;       // the value of a floating constant
  bool is_float = false, is_literal = false;
  bool negate = false, absolute = false, sign_extend = false;
  u8 part = kDword;
};

struct Wave;
struct Instruction;
using Function = void (*)(Wave&, const Instruction&);

struct Instruction {
  Function function = nullptr;
  std::string text, name;
  u64 address = 0;
  int size_bytes = 4;
  std::vector<Operand> operands;
  int target = -1;  // target of a branch: an index into Code::instructions
  i64 offset = 0;
  int offset0 = 0, offset1 = 0;
  bool clamp = false, returns = false;
  u8 to_part = kDword;
  enum Unused : u8 { kPad, kSignExtend, kPreserve } unused = kPad;
  float output_factor = 1;
  u8 op_sel[3] = {0, 0, 0}, op_sel_hi[3] = {1, 1, 1}, neg_lo[3] = {0, 0, 0}, neg_hi[3] = {0, 0, 0};
  int bytes = 0;       // size of a memory access
  int pair_scale = 0;  // ds_read2 and ds_write2: elements per unit of an offset; else 0
  enum Extension : u8 { kZero, kSigned8, kSigned16, kLowHalf, kHighHalf } extension = kZero;
  int outcomes = 0;  // for a comparison: the set of outcomes for which it is true (compare.cpp)
  bool sets_exec = false;
  int tile = 0, depth = 0;  // shape of a matrix instruction
  bool is_half = false;
};

struct Kernel {
  struct Argument {
    u32 offset, size;
    std::string kind;
  };
  std::string name;
  u64 entry = 0;
  u32 size_bytes = 0, lds_bytes = 0, scratch_bytes = 0, argument_bytes = 0, rsrc1 = 0, rsrc2 = 0, rsrc3 = 0;
  u16 properties = 0, preload = 0;
  u32 max_threads = 0;
  std::vector<Argument> arguments;

  u32 num_vgprs() const { return ((rsrc1 & 63) + 1) * 8; }
  u32 first_accumulator() const { return ((rsrc3 & 63) + 1) * 4; }  // number of the VGPR that is the first accumulator
};

// A code object in memory, and its instructions in the order of their addresses.
struct Code {
  std::string arch;
  u8* base = nullptr;
  u64 span = 0;
  std::vector<Instruction> instructions;
  std::unordered_map<u64, int> at;  // maps an address to an index of `instructions`
  std::map<std::string, Kernel> kernels;
};
std::unique_ptr<Code> load_code(const u8* elf, u64 size_bytes, const std::string& arch);

struct Block {
  Code* code;
  const Kernel* kernel;
  u32 number;
  std::vector<u8> lds, written;             // the bytes, and whether any lane has written each byte
  std::vector<u64> lds_writer, lds_reader;  // the accessors (races.h) that last wrote and read each byte
};

struct Wave {
  alignas(64) u32 v[2 * kFirstAccumulator][kLanes];
  alignas(16) u32 s[132];
  bool scc, done, waiting;
  int pc;  // an index into Code::instructions
  int number;
  u32 epoch;  // number of barriers that the wave has passed
  Block* block;
  u64 num_instructions;

  u64 pair(int index) const { return u64(s[index + 1]) << 32 | s[index]; }
  void set_pair(int index, u64 x) {
    s[index] = u32(x);
    s[index + 1] = u32(x >> 32);
  }
  u64 exec() const { return pair(kExec); }
  void set_exec(u64 x) { set_pair(kExec, x); }
  u64 vcc() const { return pair(kVcc); }
  bool on(int lane) const { return exec() >> lane & 1; }
};

// Maps an instruction's name, without the suffix of its encoding, to the function that executes it.
using Table = std::unordered_map<std::string, Function>;
void add_scalar(Table& table);
void add_floats(Table& table);
void add_doubles(Table& table);
void add_integers(Table& table);
void add_lanes(Table& table);
Function comparison(const std::string& name, Instruction& i);  // nullptr if `name` is not a comparison
Function global_access(const std::string& name, Instruction& i);
Function lds_access(const std::string& name, Instruction& i);
Function matrix(const std::string& name, Instruction& i);
void decode(Instruction& i);
void not_implemented(Wave& w, const Instruction& i);

inline bool starts(std::string_view s, std::string_view prefix) { return s.substr(0, prefix.size()) == prefix; }
inline bool ends(std::string_view s, std::string_view suffix) {
  return s.size() >= suffix.size() && s.substr(s.size() - suffix.size()) == suffix;
}

}  // namespace rlk::hip::isa
