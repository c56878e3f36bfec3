/// What one call is: the caller's words (`call`), the part of them on which ranks must agree (`signature`),
/// and one step of carrying it out as a transport sees it (`transfer`).
#ifndef TESSERA_COMM_DETAIL_CALL_HPP
#define TESSERA_COMM_DETAIL_CALL_HPP

#include <tessera/comm/communicator.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// Element types by number, so that transports need no templates and ranks can compare them.
enum class element : std::uint8_t { bytes, bf16, fp16, fp32, fp64, i8, i16, i32, i64, u8, u16, u32, u64 };

template <message_scalar T>
constexpr element element_of() noexcept {
  if constexpr (std::same_as<T, std::byte>)
    return element::bytes;
  else if constexpr (std::same_as<T, tessera::bf16>)
    return element::bf16;
  else if constexpr (std::same_as<T, tessera::fp16>)
    return element::fp16;
  else if constexpr (std::same_as<T, float>)
    return element::fp32;
  else if constexpr (std::same_as<T, double>)
    return element::fp64;
  else {
    constexpr auto first = std::signed_integral<T> ? element::i8 : element::u8;
    constexpr int power = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
    return static_cast<element>(static_cast<int>(first) + power);
  }
}
constexpr index_t bytes_of(element type) noexcept {
  constexpr index_t bytes[] = {1, 2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
  return bytes[static_cast<int>(type)];
}
constexpr char const* name_of(element type) noexcept {
  constexpr char const* names[] = {"bytes", "bf16",  "fp16",  "fp32",   "fp64",   "int8",  "int16",
                                   "int32", "int64", "uint8", "uint16", "uint32", "uint64"};
  return names[static_cast<int>(type)];
}
constexpr bool is_integer(element type) noexcept {
  return type >= element::i8;
}

/// Reduces `n` elements of `ranks` pieces, `stride` elements apart, in rank order or as a binary tree.
struct combine_step {
  void* out = nullptr;
  void const* pieces = nullptr;
  index_t n = 0, stride = 0;
  int ranks = 1;
  reduction operation = reduction::sum;
  summation order = summation::rank_order;
  site where{};
};
/// `space` is what the transport computes with: the host needs none. False: integer overflow.
using combine_function = bool (*)(void* space, combine_step const& step);

/// A call as its caller made it. Of `in` and `out` either may be absent on this rank; `count` is the part of
/// one rank in the equal forms, all of it in the others.
struct call {
  collective what = collective::barrier;
  element type = element::bytes;
  void const* in = nullptr;
  void* out = nullptr;
  index_t in_items = 0, out_items = 0;
  index_t count = 0;
  index_t const* in_counts = nullptr;  // all_to_all_v: mine; the other _v forms: the one set of counts
  index_t const* out_counts = nullptr; // all_to_all_v only
  int root = -1;                       // or the peer of send and receive
  int tag = -1;
  reduction operation = reduction::sum;
  summation order = summation::native; // another one in reductions that ask for it
  combine_function combine = nullptr;
  bool on_device = false; // both buffers are in memory that the host does not reach
  site where{};

  [[gnu::always_inline]] bool reduces() const noexcept {
    return what == collective::reduce || what == collective::all_reduce || what == collective::reduce_scatter;
  }
  /// Whether the order of its sum is the same everywhere, and the library's own reduction will not do.
  [[gnu::always_inline]] bool fixes_order() const noexcept { return order != summation::native; }
  [[gnu::always_inline]] bool is_point_to_point() const noexcept {
    return what == collective::send || what == collective::receive;
  }
  [[gnu::always_inline]] bool has_own_counts() const noexcept {
    return what == collective::all_to_all && in_counts != nullptr;
  }
};

/// On what ranks must agree, and where this rank stands. Fixed size, no pointers: it travels.
struct signature {
  std::int64_t sequence = 0;
  std::int64_t count = 0;
  std::uint64_t counts_digest = 0; // of the _v forms' counts
  std::uint64_t group = 0;
  std::int32_t root = -1;
  collective what = collective::barrier;
  element type = element::bytes;
  reduction operation = reduction::sum;
  summation order = summation::native;
  bool blocking = true;
  char place[64] = {}; // the caller's file:line

  friend bool agree(signature const& a, signature const& b) noexcept {
    return a.sequence == b.sequence && a.count == b.count && a.counts_digest == b.counts_digest &&
           a.root == b.root && a.what == b.what && a.type == b.type && a.operation == b.operation &&
           a.order == b.order && a.blocking == b.blocking;
  }
};

/// A 64-bit digest of bytes, for finding changes; not for adversaries.
inline std::uint64_t digest_of(void const* data, std::size_t bytes, std::uint64_t seed = 0) noexcept {
  auto const* at = static_cast<unsigned char const*>(data);
  auto digest = seed ^ (bytes * 0x9e3779b97f4a7c15u);
  for (; bytes > 0;) {
    std::uint64_t word = 0;
    auto const step = bytes < 8 ? bytes : std::size_t{8};
    std::memcpy(&word, at, step);
    digest = (digest ^ word) * 0xff51afd7ed558ccdu;
    digest ^= digest >> 32;
    at += step;
    bytes -= step;
  }
  return digest;
}

inline signature signature_of(call const& c, int ranks, std::int64_t sequence, std::uint64_t group,
                              bool blocking) noexcept {
  signature s;
  s.sequence = sequence;
  s.group = group;
  s.count = c.has_own_counts() ? 0 : c.count;
  if (c.in_counts != nullptr)
    s.counts_digest =
        c.has_own_counts() ? 1 : digest_of(c.in_counts, sizeof(index_t) * static_cast<std::size_t>(ranks), 2);
  s.root = c.root;
  s.what = c.what;
  s.type = c.type;
  s.operation = c.operation;
  s.order = c.order;
  s.blocking = blocking;
  char const* file = c.where.file;
  for (auto const* p = file; *p != '\0'; ++p)
    if (*p == '/') file = p + 1;
  __builtin_snprintf(s.place, sizeof s.place, "%.50s:%d", file, c.where.line);
  return s;
}

/// "all_reduce (sum, rank_order) of 12 fp32 at solver.cpp:33 (collective 7 of its communicator)".
inline std::string text_of(signature const& s) {
  auto text = std::string(s.blocking ? "" : "start_") + name_of(s.what);
  bool const reduces = s.what == collective::reduce || s.what == collective::all_reduce ||
                       s.what == collective::reduce_scatter;
  if (reduces) text += tessera::text_of(" (", name_of(s.operation), ", ", name_of(s.order), ")");
  if (s.what == collective::send || s.what == collective::receive)
    text += tessera::text_of(s.what == collective::send ? " to rank " : " from rank ", s.root);
  else if (s.root >= 0)
    text += tessera::text_of(" with root ", s.root);
  if (s.what == collective::all_to_all && s.counts_digest != 0)
    text += tessera::text_of(" of ", name_of(s.type), " with counts of each rank");
  else if (s.what != collective::barrier && s.what != collective::split)
    text += tessera::text_of(" of ", s.count, " ", name_of(s.type));
  if (s.counts_digest > 1)
    text += tessera::text_of(" (counts with digest ", static_cast<std::uint32_t>(s.counts_digest), ")");
  text += tessera::text_of(" at ", static_cast<char const*>(s.place));
  if (s.sequence > 0) text += tessera::text_of(" (collective ", s.sequence, " of its communicator)");
  return text;
}

/// One movement of data, as a transport carries it out. Reductions that appear here are native ones.
struct transfer {
  collective what = collective::barrier;
  element type = element::bytes;
  void const* in = nullptr;
  void* out = nullptr;
  index_t count = 0;                   // of one rank (equal forms), or of the whole message
  index_t const* in_counts = nullptr;  // what this rank sends to each
  index_t const* out_counts = nullptr; // what this rank receives from each
  int root = -1;
  int tag = -1;
  reduction operation = reduction::sum;
  bool on_device = false;
  /// Steps after a call's first one travel in a lane of their own: their order among first steps of other
  /// calls differs from rank to rank.
  int step = 0;
  signature const* sign = nullptr; // null where nobody will ask
  site where{};
};

[[gnu::always_inline]] inline transfer transfer_of(call const& c) noexcept {
  transfer t;
  t.what = c.what == collective::split ? collective::all_gather : c.what;
  t.type = c.type;
  t.in = c.in;
  t.out = c.out;
  t.count = c.count;
  t.in_counts = c.in_counts;
  t.out_counts = c.has_own_counts() ? c.out_counts : c.in_counts;
  t.root = c.root;
  t.tag = c.tag;
  t.operation = c.operation;
  t.on_device = c.on_device;
  t.where = c.where;
  return t;
}

inline std::byte* at(void* base, index_t offset) noexcept {
  return static_cast<std::byte*>(base) + offset;
}
inline std::byte const* at(void const* base, index_t offset) noexcept {
  return static_cast<std::byte const*>(base) + offset;
}
inline void copy(void* to, void const* from, index_t bytes) noexcept {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}
inline bool overlap(void const* a, index_t a_bytes, void const* b, index_t b_bytes) noexcept {
  auto const x = reinterpret_cast<std::uintptr_t>(a), y = reinterpret_cast<std::uintptr_t>(b);
  bool const a_begins_in_b = x - y < static_cast<std::uintptr_t>(b_bytes);
  bool const b_begins_in_a = y - x < static_cast<std::uintptr_t>(a_bytes);
  return (a_begins_in_b & (a_bytes > 0)) | (b_begins_in_a & (b_bytes > 0));
}

/// Where part `rank` begins: its number times `count`, or what the counts before it add up to.
inline index_t offset_of(int rank, index_t count, index_t const* counts) noexcept {
  if (counts == nullptr) return count * rank;
  index_t offset = 0;
  for (int r = 0; r < rank; ++r) offset += counts[r];
  return offset;
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
