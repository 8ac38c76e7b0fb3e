// Loads an AMD code object: its segments, its kernels and its instructions. The kernels are found in the ELF note with
// the metadata, in the symbols and in the kernel descriptors. Instructions come from llvm-objdump's disassembly.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <set>

#include "reports.h"

namespace rlk::hip::isa {
namespace {

u64 get(const u8* p, int bytes) {
  u64 x = 0;
  std::memcpy(&x, p, bytes);
  return x;
}

// A node of MessagePack. The code object's metadata use maps, arrays, strings and integers.
struct Node {
  std::string text;
  u64 number = 0;
  std::vector<Node> items;
  std::vector<std::pair<std::string, Node>> fields;
  const Node* find(std::string_view key) const {
    for (const auto& [name, node] : fields) {
      if (name == key) return &node;
    }
    return nullptr;
  }
  const Node& at(std::string_view key) const {
    const Node* found = find(key);
    if (!found) stop("the metadata have no " + std::string(key));
    return *found;
  }
};

Node read_node(const u8*& p) {
  Node node;
  const u8 type = *p++;
  const auto integer = [&](int bytes) {
    u64 x = 0;
    while (bytes--) x = x << 8 | *p++;
    return x;
  };
  const auto text = [&](u64 n) {
    node.text.assign(reinterpret_cast<const char*>(p), n);
    p += n;
  };
  const auto items = [&](u64 n) {
    while (n--) node.items.push_back(read_node(p));
  };
  const auto fields = [&](u64 n) {
    while (n--) {
      const Node key = read_node(p);
      node.fields.emplace_back(key.text, read_node(p));
    }
  };
  if (type < 0x80)
    node.number = type;
  else if (type < 0x90)
    fields(type & 15);
  else if (type < 0xa0)
    items(type & 15);
  else if (type < 0xc0)
    text(type & 31);
  else if (type == 0xc0 || type == 0xc2)
    node.number = 0;
  else if (type == 0xc3)
    node.number = 1;
  else if (type >= 0xcc && type <= 0xcf)
    node.number = integer(1 << (type - 0xcc));
  else if (type >= 0xd0 && type <= 0xd3)
    node.number = integer(1 << (type - 0xd0));
  else if (type >= 0xd9 && type <= 0xdb)
    text(integer(1 << (type - 0xd9)));
  else if (type == 0xdc || type == 0xdd)
    items(integer(type == 0xdc ? 2 : 4));
  else if (type == 0xde || type == 0xdf)
    fields(integer(type == 0xde ? 2 : 4));
  else
    stop("metadata of an unknown type");
  return node;
}

void read_metadata(Code& code, const u8* note, u64 size) {
  constexpr u64 kAmdMetadata = 32;
  for (const u8 *p = note, *end = note + size; p < end;) {
    const u64 name = get(p, 4), bytes = get(p + 4, 4), type = get(p + 8, 4);
    const u8* data = p + 12 + ((name + 3) & ~3ull);
    p = data + ((bytes + 3) & ~3ull);
    if (type != kAmdMetadata) continue;
    const Node root = read_node(data);
    for (const Node& node : root.at("amdhsa.kernels").items) {
      Kernel kernel;
      kernel.name = node.at(".name").text;
      if (const Node* most = node.find(".max_flat_workgroup_size")) kernel.max_threads = u32(most->number);
      if (const Node* arguments = node.find(".args")) {
        for (const Node& a : arguments->items) {
          kernel.arguments.push_back(
              {u32(a.at(".offset").number), u32(a.at(".size").number), a.at(".value_kind").text});
        }
      }
      code.kernels[kernel.name] = kernel;
    }
  }
}

void load_segments(Code& code, const u8* elf) {
  constexpr u64 kLoad = 1, kNote = 4;
  const u8* headers = elf + get(elf + 32, 8);
  const int count = int(get(elf + 56, 2));
  for (const u8* h = headers; h < headers + 56 * count; h += 56) {
    if (get(h, 4) == kLoad) code.span = std::max(code.span, get(h + 16, 8) + get(h + 40, 8));
  }
  void* memory = mmap(nullptr, code.span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) stop("no memory for a code object");
  code.base = static_cast<u8*>(memory);
  for (const u8* h = headers; h < headers + 56 * count; h += 56) {
    const u8* from = elf + get(h + 8, 8);
    if (get(h, 4) == kLoad) std::memcpy(code.base + get(h + 16, 8), from, get(h + 32, 8));
    if (get(h, 4) == kNote) read_metadata(code, from, get(h + 32, 8));
  }
}

void read_descriptor(Kernel& kernel, const u8* d, u64 address) {
  kernel.lds_bytes = u32(get(d, 4));
  kernel.scratch_bytes = u32(get(d + 4, 4));
  kernel.argument_bytes = u32(get(d + 8, 4));
  kernel.entry = address + get(d + 16, 8);
  kernel.rsrc3 = u32(get(d + 44, 4));
  kernel.rsrc1 = u32(get(d + 48, 4));
  kernel.rsrc2 = u32(get(d + 52, 4));
  kernel.properties = u16(get(d + 56, 2));
  kernel.preload = u16(get(d + 58, 2));
}

void read_symbols(Code& code, const u8* elf) {
  constexpr u64 kSymbols = 2, kRelocations = 4;
  const u8* headers = elf + get(elf + 40, 8);
  const int count = int(get(elf + 60, 2));
  for (const u8* h = headers; h < headers + 64 * count; h += 64) {
    const u64 type = get(h + 4, 4), bytes = get(h + 32, 8);
    if (type == kRelocations && bytes) stop("relocations in a code object");
    if (type != kSymbols) continue;
    const u8* names = elf + get(headers + 64 * get(h + 40, 4) + 24, 8);
    for (const u8 *s = elf + get(h + 24, 8), *end = s + bytes; s < end; s += 24) {
      const std::string name = reinterpret_cast<const char*>(names + get(s, 4));
      const u64 address = get(s + 8, 8);
      if (const auto kernel = code.kernels.find(name); kernel != code.kernels.end()) {
        kernel->second.size_bytes = u32(get(s + 16, 8));
      }
      if (!ends(name, ".kd")) continue;
      const auto kernel = code.kernels.find(name.substr(0, name.size() - 3));
      if (kernel != code.kernels.end()) read_descriptor(kernel->second, code.base + address, address);
    }
  }
}

// A line consists of a tab, the instruction's text, "// ADDRESS:" and the instruction's words.
bool read_line(char* line, Instruction& i) {
  char* comment = line[0] == '\t' ? std::strstr(line, "// ") : nullptr;
  if (!comment) return false;
  char* p = nullptr;
  i.address = std::strtoull(comment + 3, &p, 16);
  i.size_bytes = 0;
  for (++p; *p; i.size_bytes += 4) {
    char* end = nullptr;
    std::strtoull(p, &end, 16);
    if (end - p < 8) break;  // this line is a label, not an instruction
    p = end;
  }
  *comment = 0;
  i.text = line + 1;
  i.text.resize(i.text.find_last_not_of(" \t") + 1);
  decode(i);
  return true;
}

void disassemble(Code& code, const u8* elf, u64 size) {
  char path[] = "/tmp/rlk_isa_XXXXXX";
  const int file = mkstemp(path);
  if (file < 0 || write(file, elf, size) != ssize_t(size)) stop("cannot write a code object for the disassembler");
  close(file);
  const std::string command = setting("RLK_ISA_OBJDUMP", RLK_ISA_OBJDUMP) + " -d " + path;
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) stop("cannot run " + command);
  char line[1024];
  std::set<std::string> missing;
  while (std::fgets(line, sizeof(line), pipe)) {
    Instruction i;
    if (!read_line(line, i)) continue;
    if (i.function == not_implemented) missing.insert(i.text);
    code.at[i.address] = int(code.instructions.size());
    code.instructions.push_back(std::move(i));
  }
  const int status = pclose(pipe);
  unlink(path);
  if (status || code.instructions.empty()) stop("no disassembly by " + command);
  for (const std::string& text : missing) std::fprintf(stderr, "hip isa: unknown instruction: %s\n", text.c_str());
  for (Instruction& i : code.instructions) {
    if (!starts(i.name, "s_branch") && !starts(i.name, "s_cbranch")) continue;
    const auto target = code.at.find(i.address + 4 + 4 * i64(i16(i.operands.at(0).bits)));
    if (target == code.at.end()) stop("a branch to nowhere: " + i.text);
    i.target = target->second;
  }
}

// Reports scratch memory, float modes that would change results, and registers beyond the number that the kernel
// requests.
void check_kernel(const Code& code, const Kernel& kernel) {
  constexpr u32 kFloatMode = 0xf0;  // float mode: rounds to nearest and keeps denormals
  const u32 split = kernel.first_accumulator(), all = kernel.num_vgprs();
  const auto say = [&](const std::string& what, u64 detail) {
    write_report(Severity::kFault, nullptr, nullptr, what + " | " + kernel.name, detail);
  };
  if (kernel.scratch_bytes) say("SCRATCH MEMORY", kernel.scratch_bytes);
  if ((kernel.rsrc1 >> 12 & 0xff) != kFloatMode) say("FLOAT MODE", kernel.rsrc1 >> 12 & 0xff);
  for (u64 at = kernel.entry; at < kernel.entry + kernel.size_bytes;) {
    const auto found = code.at.find(at);
    if (found == code.at.end()) break;
    const Instruction& i = code.instructions[found->second];
    for (const Operand& o : i.operands) {
      if (o.kind != Operand::kVector) continue;
      const bool accumulates = o.index >= kFirstAccumulator;
      const u32 end = u32(o.index % kFirstAccumulator + o.num_registers);
      if (accumulates ? split + end > all : end > std::min(split, all))
        say("REGISTER beyond those asked for: " + i.text, end);
    }
    at += i.size_bytes;
  }
}

}  // namespace

std::unique_ptr<Code> load_code(const u8* elf, u64 size_bytes, const std::string& arch) {
  auto code = std::make_unique<Code>();
  code->arch = arch;
  load_segments(*code, elf);
  read_symbols(*code, elf);
  disassemble(*code, elf, size_bytes);
  for (const auto& [name, kernel] : code->kernels) check_kernel(*code, kernel);
  return code;
}

}  // namespace rlk::hip::isa
