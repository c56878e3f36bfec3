/// Device and pinned memory: where it lies, which of it is given out, and which of it has been written.
#include "machine.hpp"

#include <algorithm>
#include <map>
#include <mutex>

#include <sys/mman.h>

namespace cuda_emulation {

namespace {

struct piece {
  std::size_t bytes = 0;
  bool freed = false;
  std::uint64_t number = 0;
  int order = 0; // of the stream it was freed in
};

/// Addresses of one device, or of pinned memory. What is given back is not given out again before the end is
/// reached, so that a late access meets nothing else.
struct region {
  address begin = 0, next = 0, end = 0;
  std::map<address, piece> pieces; // by address; freed ones too
  std::int64_t in_use = 0, in_use_pieces = 0, most_in_use = 0;
};

constexpr std::size_t granule = 512; // pieces begin at multiples of it, with at least as much between them

struct all_memory {
  std::mutex mutex;
  region regions[most_devices + 1];
  std::uint64_t pieces = 0;

  struct pending {
    address begin;
    std::size_t bytes;
    unsigned char bit;
  };
  std::vector<pending> pendings;

  all_memory() {
    for (int i = 0; i <= most_devices; ++i)
      regions[i].begin = regions[i].next = device_begin + static_cast<address>(i) * device_bytes + granule,
      regions[i].end = device_begin + static_cast<address>(i + 1) * device_bytes;
    reserve(device_begin, known_bytes);
    reserve(device_begin + shadow_distance, known_bytes);
    reserve(cells_begin, known_bytes / 2 * sizeof(global_cell));
  }

  static void reserve(address begin, std::size_t bytes) {
    auto* const memory = mmap(reinterpret_cast<void*>(begin), bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory == reinterpret_cast<void*>(begin)) return;
    std::fprintf(stderr, "cuda_emulation: the addresses from %p on are taken, or there is a limit on them\n",
                 reinterpret_cast<void*>(begin));
    std::abort();
  }
};

all_memory& memory() {
  static auto* const made = new all_memory; // outlives every static object of the program
  return *made;
}
// Accesses are checked before anything else is called.
[[gnu::constructor(200)]] void reserve_early() {
  (void)memory();
}

region& region_of(address a) {
  return memory().regions[(a - device_begin) / device_bytes];
}

/// The last piece that begins at or before `a`.
std::pair<address const, piece>* piece_before(address a) {
  auto& pieces = region_of(a).pieces;
  auto after = pieces.upper_bound(a);
  return after == pieces.begin() ? nullptr : &*std::prev(after);
}

/// Fills whole pages by giving them back to the system.
void clear(address begin, std::size_t bytes) {
  constexpr address page = 4096;
  auto const first = (begin + page - 1) / page * page, last = (begin + bytes) / page * page;
  if (first >= last) {
    std::memset(reinterpret_cast<void*>(begin), 0, bytes);
    return;
  }
  std::memset(reinterpret_cast<void*>(begin), 0, first - begin);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  std::memset(reinterpret_cast<void*>(last), 0, begin + bytes - last);
}

void* take(region& r, std::size_t bytes, unsigned char bits) {
  auto& all = memory();
  auto const room = (bytes + granule - 1) / granule * granule + granule;
  address begin = r.next;
  if (room > r.end - r.next) {
    begin = 0;
    for (auto it = r.pieces.begin(); it != r.pieces.end() && begin == 0; ++it) {
      if (!it->second.freed) continue;
      auto const after = std::next(it) == r.pieces.end() ? r.next : std::next(it)->first;
      if (after - it->first >= room) begin = it->first;
    }
    if (begin == 0) return nullptr;
  } else {
    r.next += room;
  }
  r.pieces[begin] = {bytes, false, ++all.pieces, 0};
  r.in_use += static_cast<std::int64_t>(bytes);
  r.most_in_use = std::max(r.most_in_use, r.in_use);
  ++r.in_use_pieces;
  std::memset(shadow_of(begin), bits, bytes);
  return reinterpret_cast<void*>(begin);
}

} // namespace

void* take_memory(int device, std::size_t bytes) {
  std::lock_guard const lock(memory().mutex);
  return take(memory().regions[device], bytes, allocated);
}
void* take_pinned(std::size_t bytes) {
  std::lock_guard const lock(memory().mutex);
  return take(memory().regions[most_devices], bytes, allocated | written);
}

bool is_piece(void const* pointer) {
  auto const a = reinterpret_cast<address>(pointer);
  if (!is_known(a)) return false;
  std::lock_guard const lock(memory().mutex);
  auto const& pieces = region_of(a).pieces;
  auto const found = pieces.find(a);
  return found != pieces.end() && !found->second.freed;
}

bool give_back(void* pointer) {
  auto const a = reinterpret_cast<address>(pointer);
  if (!is_known(a)) return false;
  std::lock_guard const lock(memory().mutex);
  auto& r = region_of(a);
  auto const found = r.pieces.find(a);
  if (found == r.pieces.end() || found->second.freed) return false;
  found->second.freed = true;
  auto const bytes = found->second.bytes;
  r.in_use -= static_cast<std::int64_t>(bytes);
  --r.in_use_pieces;
  clear(reinterpret_cast<address>(shadow_of(a)), bytes);
  clear(a, bytes);
  auto const cells = reinterpret_cast<address>(cells_of(a));
  clear(cells, reinterpret_cast<address>(cells_of(a + bytes)) - cells);
  return true;
}

bool was_freed(address a) {
  if (!is_known(a)) return false;
  std::lock_guard const lock(memory().mutex);
  auto const* const found = piece_before(a);
  return found != nullptr && found->second.freed && a < found->first + found->second.bytes;
}

std::string describe_memory(address a) {
  std::lock_guard const lock(memory().mutex);
  auto const* const found = is_known(a) ? piece_before(a) : nullptr;
  auto const where = is_pinned(a) ? std::string("pinned memory")
                                  : "memory of device " + std::to_string(is_device(a) ? device_at(a) : -1);
  if (found == nullptr) return "no " + where;
  auto const offset = a - found->first;
  auto const bytes = found->second.bytes;
  auto const piece =
      "piece " + std::to_string(found->second.number) + " (" + std::to_string(bytes) + " bytes) of " + where;
  if (offset < bytes)
    return "byte " + std::to_string(offset) + " of " + piece +
           (found->second.freed ? ", which was freed" : "");
  return std::to_string(offset - bytes) + " bytes after the end of " + piece;
}

std::int64_t bytes_in_use() noexcept {
  std::lock_guard const lock(memory().mutex);
  std::int64_t sum = 0;
  for (int d = 0; d < most_devices; ++d) sum += memory().regions[d].in_use;
  return sum;
}
std::int64_t pieces_in_use() noexcept {
  std::lock_guard const lock(memory().mutex);
  std::int64_t sum = 0;
  for (int d = 0; d < most_devices; ++d) sum += memory().regions[d].in_use_pieces;
  return sum;
}
std::int64_t bytes_in_use(int device) {
  return memory().regions[device].in_use;
}
std::int64_t most_bytes_in_use(int device) {
  return memory().regions[device].most_in_use;
}

int device_of_memory(void const* pointer) {
  auto const a = reinterpret_cast<address>(pointer);
  return is_device(a) ? device_at(a) : -1;
}

void clear_cells() {
  madvise(reinterpret_cast<void*>(cells_begin), known_bytes / 2 * sizeof(global_cell), MADV_DONTNEED);
}

void forget(void* pointer, std::size_t bytes) {
  auto const a = reinterpret_cast<address>(pointer);
  if (!is_device(a)) return;
  for (std::size_t i = 0; i < bytes; ++i) shadow_of(a)[i] &= static_cast<unsigned char>(~written);
}

// ---- host code that is entitled to it

static bool check_range(address a, std::size_t bytes, unsigned char wanted, char const* what) {
  if (bytes == 0 || !is_known(a)) return true;
  auto const* const shadow = shadow_of(a);
  if (bytes > known_bytes - (a - device_begin)) bytes = known_bytes - (a - device_begin);
  for (std::size_t i = 0; i < bytes; ++i) {
    if ((shadow[i] & wanted) == wanted) continue;
    auto const kind = (shadow[i] & allocated) != 0 ? fault_kind::unwritten_read
                      : was_freed(a + i)           ? fault_kind::use_after_free
                                                   : fault_kind::out_of_bounds;
    auto const device = is_device(a) ? device_at(a) : current_device();
    set_stuck(device, kind == fault_kind::unwritten_read ? cudaErrorLaunchFailure : cudaErrorIllegalAddress);
    record_fault(kind, device,
                 std::string(what) + " of " + std::to_string(bytes) + " bytes " +
                     ((wanted & written) != 0 ? "reads " : "writes ") + describe_memory(a + i) +
                     (kind == fault_kind::unwritten_read ? ", which nobody has written" : ""));
    return false;
  }
  return true;
}

bool read_memory(void const* pointer, std::size_t bytes, char const* what) {
  return check_range(reinterpret_cast<address>(pointer), bytes, allocated | written, what);
}
bool write_memory(void* pointer, std::size_t bytes, char const* what) {
  auto const a = reinterpret_cast<address>(pointer);
  if (!check_range(a, bytes, allocated, what)) return false;
  if (is_known(a))
    for (std::size_t i = 0; i < bytes; ++i) shadow_of(a)[i] |= written;
  return true;
}

bool copy_memory(void* to, void const* from, std::size_t bytes) {
  auto const t = reinterpret_cast<address>(to), f = reinterpret_cast<address>(from);
  bool const both = is_device(t) && is_device(f);
  if (!(both ? check_range(f, bytes, allocated, "a copy") : read_memory(from, bytes, "a copy"))) return false;
  if (!(both ? check_range(t, bytes, allocated, "a copy") : write_memory(to, bytes, "a copy"))) return false;
  std::memmove(to, from, bytes);
  if (both) std::memmove(shadow_of(t), shadow_of(f), bytes);
  return true;
}

void mark_pending(void const* pointer, std::size_t bytes, unsigned char bit) {
  auto const a = reinterpret_cast<address>(pointer);
  if (!is_pinned(a) || bytes == 0) return;
  std::lock_guard const lock(memory().mutex);
  memory().pendings.push_back({a, bytes, bit});
  for (std::size_t i = 0; i < bytes; ++i)
    if ((shadow_of(a)[i] & allocated) != 0) shadow_of(a)[i] |= bit;
}

void unmark_pending(void const* pointer, std::size_t bytes, unsigned char bit) {
  auto const a = reinterpret_cast<address>(pointer);
  if (!is_pinned(a) || bytes == 0) return;
  std::lock_guard const lock(memory().mutex);
  auto& pendings = memory().pendings;
  auto const found = std::find_if(pendings.begin(), pendings.end(), [&](auto const& p) {
    return p.begin == a && p.bytes == bytes && p.bit == bit;
  });
  if (found == pendings.end()) return;
  pendings.erase(found);
  for (std::size_t i = 0; i < bytes; ++i) shadow_of(a)[i] &= static_cast<unsigned char>(~bit);
  for (auto const& p : pendings)
    if (p.bit == bit && p.begin < a + bytes && a < p.begin + p.bytes)
      for (auto i = std::max(a, p.begin); i < std::min(a + bytes, p.begin + p.bytes); ++i)
        if ((*shadow_of(i) & allocated) != 0) *shadow_of(i) |= bit;
}

} // namespace cuda_emulation
