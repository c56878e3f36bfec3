// Tessera in one file, made by tests/house/make_single_header.py from include/tessera/. Do not edit.
//
// MIT License
//
// Copyright (c) 2026 The Tessera authors
//
// Permission is hereby granted, free of charge, to any person obtaining a copy
// of this software and associated documentation files (the "Software"), to deal
// in the Software without restriction, including without limitation the rights
// to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
// copies of the Software, and to permit persons to whom the Software is
// furnished to do so, subject to the following conditions:
//
// The above copyright notice and this permission notice shall be included in all
// copies or substantial portions of the Software.
//
// THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
// IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
// FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
// AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
// LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
// OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
// SOFTWARE.

/// All of Tessera's host side. Each header is as usable alone, and a program that needs a few of them
/// compiles faster with those. Headers that need another library are empty unless TESSERA_WITH_MPI,
/// TESSERA_WITH_JSON and their like say that it is there.
///
/// Made by tests/house/make_single_header.py.
#ifndef TESSERA_TESSERA_HPP
#define TESSERA_TESSERA_HPP

/// The namespace that every Tessera name stands in, and the few macros that the headers share.
///
/// `namespace tessera::inline TESSERA_ABI` carries the version and a tag for every compiler switch that
/// changes a function body (instruction set, OpenMP, CUDA architecture list). Two libraries of one process
/// that were built with different switches therefore hold different symbols and cannot mix. Exception types
/// stand in `TESSERA_STABLE_ABI`, which carries the version alone: they are caught across such a border.
#ifndef TESSERA_CORE_ABI_HPP
#define TESSERA_CORE_ABI_HPP

#ifndef TESSERA_CORE_VERSION_HPP
#define TESSERA_CORE_VERSION_HPP

/// The version, in one place: major * 10000 + minor * 100 + patch. CMake, the package version file and the
/// changelog test read this line.
#define TESSERA_VERSION 100

#endif

#define TESSERA_DETAIL_JOIN_(a, b, c, d) a##b##c##d
#define TESSERA_DETAIL_JOIN(a, b, c, d) TESSERA_DETAIL_JOIN_(a, b, c, d)

#define TESSERA_STABLE_ABI v0_1

#if defined(__AVX512F__)
#define TESSERA_DETAIL_ISA_TAG _avx512
#elif defined(__AVX2__)
#define TESSERA_DETAIL_ISA_TAG _avx2
#else
#define TESSERA_DETAIL_ISA_TAG
#endif

#if defined(_OPENMP)
#define TESSERA_DETAIL_OPENMP_TAG _omp
#else
#define TESSERA_DETAIL_OPENMP_TAG
#endif

/// Set by the build to a token such as `_sm90` where CUDA code is compiled; empty otherwise.
#ifndef TESSERA_CUDA_ARCH_TAG
#define TESSERA_CUDA_ARCH_TAG
#endif

#define TESSERA_ABI                                                                                          \
  TESSERA_DETAIL_JOIN(TESSERA_STABLE_ABI, TESSERA_DETAIL_ISA_TAG, TESSERA_DETAIL_OPENMP_TAG,                 \
                      TESSERA_CUDA_ARCH_TAG)

/// Marks what both host and device code may call.
#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

/// `TESSERA_SIMD(reduction(+ : sum))` before a loop: vectorise it; the clause states which reorderings are
/// allowed. Nothing without OpenMP.
#if defined(_OPENMP)
#define TESSERA_DETAIL_PRAGMA(text) _Pragma(#text)
#define TESSERA_SIMD(...) TESSERA_DETAIL_PRAGMA(omp simd __VA_ARGS__)
#else
#define TESSERA_SIMD(...)
#endif

/// Types that must be recognised across shared libraries built with -fvisibility=hidden.
#if defined(__GNUC__)
#define TESSERA_VISIBLE __attribute__((visibility("default")))
#else
#define TESSERA_VISIBLE
#endif

#endif
/// A stack of memory for activations: forward takes pieces in order, backward gives them back in reverse, and
/// nothing is allocated in the steady state of a training step. Sized once, from the plan.
///
///     arena<> memory(bytes, {&meter, memory_kind::activations});
///     auto mark = memory.mark();
///     auto hidden = memory.take<bf16, 2>({tokens, width});
///     memory.release(mark);                 // hidden and everything after it
#ifndef TESSERA_CORE_ARENA_HPP
#define TESSERA_CORE_ARENA_HPP

/// A rank-N window on memory that somebody else owns: pointer, extents, strides. Trivially copyable, 64-bit,
/// passed by value. The kind of memory is part of the type, so host and device views do not mix.
///
///     auto m = view<float, 2>(pointer, {rows, columns});
///     m(i, j) = 1.0f;
///     auto head = m.slice(1, 0, 64);           // columns 0..63, same memory
///     auto flat = m.template reshape<1>({m.size()});  // throws size_error where a copy would be needed
#ifndef TESSERA_CORE_VIEW_HPP
#define TESSERA_CORE_VIEW_HPP

#include <type_traits>

/// Sizes of a rank-N array: 64-bit, row-major (the last index runs fastest).
#ifndef TESSERA_CORE_EXTENTS_HPP
#define TESSERA_CORE_EXTENTS_HPP

#include <array>
#include <cstdint>
#include <limits>
#include <utility>

/// What Tessera throws. Every exception derives from `tessera::error`, carries a stable id (`E-comm-003`,
/// listed in docs/troubleshooting.md) and a message that says what was expected, what came, where, and what
/// to do.
///
///     throw size_error("E-ops-001", site::here(), "layer_norm: gain has ", n, " elements, rows have ",
///     width);
#ifndef TESSERA_CORE_ERROR_HPP
#define TESSERA_CORE_ERROR_HPP

#include <concepts>
#include <exception>
#include <string>
#include <string_view>

namespace tessera::inline TESSERA_STABLE_ABI {

/// A place in a source file. As a default argument, `site where = site::here()` is the caller's place.
/// (std::source_location is missing under clang 14 with libstdc++.)
struct site {
  char const* file = "";
  int line = 0;
  char const* function = "";

  static constexpr site here(char const* file = __builtin_FILE(), int line = __builtin_LINE(),
                             char const* function = __builtin_FUNCTION()) noexcept {
    return {file, line, function};
  }
};

namespace detail {

inline void append(std::string& text, std::string_view part) {
  text += part;
}
inline void append(std::string& text, char part) {
  text += part;
}
template <std::integral Integer>
void append(std::string& text, Integer part) {
  if constexpr (std::same_as<Integer, bool>)
    text += part ? "true" : "false";
  else
    text += std::to_string(part);
}
inline void append(std::string& text, double part) {
  char digits[32];
  __builtin_snprintf(digits, sizeof digits, "%.9g", part);
  text += digits;
}
inline void append(std::string& text, site part) {
  std::string_view file = part.file;
  if (auto slash = file.find_last_of('/'); slash != std::string_view::npos) file.remove_prefix(slash + 1);
  text += file;
  text += ':';
  text += std::to_string(part.line);
}

} // namespace detail

/// Joins strings, numbers and sites into one string, for messages.
template <class... Parts>
std::string text_of(Parts const&... parts) {
  std::string text;
  (detail::append(text, parts), ...);
  return text;
}

/// Base of all exceptions thrown by Tessera.
class TESSERA_VISIBLE error : public std::exception {
public:
  template <class... Parts>
  error(char const* id, site where, Parts const&... parts)
      : id_(id), text_(text_of(parts..., " [", id, " at ", where, "]")) {}

  char const* what() const noexcept override { return text_.c_str(); }

  /// The stable id, such as `E-comm-003`.
  char const* id() const noexcept { return id_; }

private:
  char const* id_;
  std::string text_;
};

/// A shape, extent, count or stride that does not fit.
class TESSERA_VISIBLE size_error : public error {
  using error::error;
};
/// A setting, or a combination of settings, that is impossible or that this build lacks.
class TESSERA_VISIBLE config_error : public error {
  using error::error;
};
/// Memory that was not to be had; the message says how much and for what.
class TESSERA_VISIBLE out_of_memory : public error {
  using error::error;
};
/// A file that is missing, cut, altered or of another format, or a disk that is full.
class TESSERA_VISIBLE io_error : public error {
  using error::error;
};
/// Another rank failed, so that this rank's collective can never finish.
class TESSERA_VISIBLE peer_failed : public error {
  using error::error;
};
/// Ranks that called different collectives, or the same one with other types, counts or roots.
class TESSERA_VISIBLE collective_mismatch : public error {
  using error::error;
};
/// A collective that did not finish within the watchdog's limit.
class TESSERA_VISIBLE stalled : public error {
  using error::error;
};
/// A call of another library (MPI, oneDNN, the operating system) that returned an error code.
class TESSERA_VISIBLE library_error : public error {
  using error::error;
};
/// A number that must be finite and is not.
class TESSERA_VISIBLE numeric_error : public error {
  using error::error;
};

} // namespace tessera::inline TESSERA_STABLE_ABI

#endif

namespace tessera::inline TESSERA_ABI {

/// All sizes, strides, counts and offsets, in elements.
using index_t = std::int64_t;

/// Sizes of a rank-N array, outermost first.
template <int Rank>
using extents = std::array<index_t, static_cast<std::size_t>(Rank)>;

/// Number of elements. Throws size_error for a negative extent or a product beyond 2^63 - 1.
template <std::size_t Rank>
constexpr index_t element_count(std::array<index_t, Rank> const& sizes, site where = site::here()) {
  index_t count = 1;
  bool empty = false;
  for (auto size : sizes) {
    if (size < 0) throw size_error("E-core-001", where, "an extent is negative: ", size);
    empty = empty || size == 0;
    if (size != 0 && count > std::numeric_limits<index_t>::max() / size)
      throw size_error("E-core-002", where, "extents multiply to more than 2^63 - 1 elements");
    if (size != 0) count *= size;
  }
  return empty ? 0 : count;
}

/// Narrows an integer, or throws size_error: the one place where 64-bit counts meet narrower interfaces.
template <std::integral To, std::integral From>
constexpr To narrow(From value, site where = site::here()) {
  if (!std::in_range<To>(value))
    throw size_error("E-core-003", where, "the value ", value, " does not fit a ", sizeof(To),
                     "-byte integer");
  return static_cast<To>(value);
}

/// "[2, 3, 5]", for messages.
template <std::size_t Rank>
std::string text_of(std::array<index_t, Rank> const& sizes) {
  std::string text = "[";
  for (std::size_t d = 0; d < Rank; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + "]";
}

} // namespace tessera::inline TESSERA_ABI

#endif
/// Kinds of memory, and a run of elements in one of them. In memory that the processor reaches, a
/// `memory_span` is a std::span; elsewhere it is a `device_span`, which knows its memory and gives no access
/// to elements. Spans of different memories do not convert into one another.
///
///     memory_span<float, typename Ex::memory> weights;      // what a template over a space writes
#ifndef TESSERA_CORE_MEMORY_SPAN_HPP
#define TESSERA_CORE_MEMORY_SPAN_HPP

#include <concepts>
#include <span>
#include <type_traits>

namespace tessera::inline TESSERA_ABI {

/// Memory that the processor reads and writes directly.
struct host_memory {
  static constexpr bool host_accessible = true;
  static constexpr char const* name = "host";
};

/// A kind of memory: host_memory here; the CUDA headers add theirs.
template <class M>
concept memory_space = requires {
  { M::host_accessible } -> std::convertible_to<bool>;
  { M::name } -> std::convertible_to<char const*>;
};

/// Adjacent elements in memory that the processor does not reach. Borrowed, trivially copyable.
template <class T, memory_space Memory>
class device_span {
public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using size_type = std::size_t;
  using memory = Memory;

  constexpr device_span() = default;
  TESSERA_HOST_DEVICE constexpr device_span(T* data, std::size_t size) noexcept : data_(data), size_(size) {}
  /// Constant elements from mutable ones.
  template <class U>
    requires(std::is_const_v<T>&& std::same_as<U, std::remove_const_t<T>>)
  TESSERA_HOST_DEVICE constexpr device_span(device_span<U, Memory> other) noexcept // NOLINT: implicit
      : device_span(other.data(), other.size()) {}

  TESSERA_HOST_DEVICE constexpr T* data() const noexcept { return data_; }
  TESSERA_HOST_DEVICE constexpr std::size_t size() const noexcept { return size_; }
  TESSERA_HOST_DEVICE constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
  TESSERA_HOST_DEVICE constexpr bool empty() const noexcept { return size_ == 0; }

  /// As std::span's: the ranges must lie inside.
  TESSERA_HOST_DEVICE constexpr device_span first(std::size_t count) const noexcept { return {data_, count}; }
  TESSERA_HOST_DEVICE constexpr device_span last(std::size_t count) const noexcept {
    return {data_ + (size_ - count), count};
  }
  TESSERA_HOST_DEVICE constexpr device_span subspan(std::size_t offset,
                                                    std::size_t count = std::dynamic_extent) const noexcept {
    return {data_ + offset, count == std::dynamic_extent ? size_ - offset : count};
  }

private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

namespace detail {
template <class T, memory_space Memory, bool HostAccessible>
struct span_in_memory {
  using type = std::span<T>;
};
template <class T, memory_space Memory>
struct span_in_memory<T, Memory, false> {
  using type = device_span<T, Memory>;
};
} // namespace detail

/// Adjacent elements of type T in memory of the given kind.
template <class T, memory_space Memory>
using memory_span = typename detail::span_in_memory<T, Memory, Memory::host_accessible>::type;

/// `Span` is `memory_span<X, Memory>` for some X: for templates that deduce X (an alias cannot be deduced
/// through).
template <class Span, class Memory>
concept span_in =
    memory_space<Memory> && std::same_as<Span, memory_span<typename Span::element_type, Memory>>;

} // namespace tessera::inline TESSERA_ABI

#endif

namespace tessera::inline TESSERA_ABI {

template <class T, int Rank, memory_space Memory = host_memory>
  requires(Rank >= 1)
class view {
public:
  using element_type = T;
  using value_type = std::remove_const_t<T>;
  using memory = Memory;
  static constexpr int rank = Rank;

  constexpr view() = default;

  /// Contiguous, row-major. `sizes` must be non-negative.
  TESSERA_HOST_DEVICE constexpr view(T* data, tessera::extents<Rank> const& sizes) : data_(data) {
    index_t stride = 1;
    for (int d = Rank - 1; d >= 0; --d) {
      extent_[d] = sizes[static_cast<std::size_t>(d)];
      stride_[d] = stride;
      stride *= extent_[d];
    }
  }

  /// With explicit strides, in elements.
  TESSERA_HOST_DEVICE constexpr view(T* data, tessera::extents<Rank> const& sizes,
                                     tessera::extents<Rank> const& strides)
      : data_(data) {
    for (int d = 0; d < Rank; ++d) {
      extent_[d] = sizes[static_cast<std::size_t>(d)];
      stride_[d] = strides[static_cast<std::size_t>(d)];
    }
  }

  /// A view of constant elements from one of mutable elements.
  template <class U>
    requires(std::is_const_v<T>&& std::same_as<U, std::remove_const_t<T>>)
  TESSERA_HOST_DEVICE constexpr view(view<U, Rank, Memory> const& other) // NOLINT: meant to be implicit
      : view(other.data(), other.extents(), other.strides()) {}

  TESSERA_HOST_DEVICE constexpr T* data() const noexcept { return data_; }
  TESSERA_HOST_DEVICE constexpr index_t extent(int d) const noexcept { return extent_[d]; }
  TESSERA_HOST_DEVICE constexpr index_t stride(int d) const noexcept { return stride_[d]; }
  TESSERA_HOST_DEVICE constexpr bool empty() const noexcept { return size() == 0; }

  constexpr tessera::extents<Rank> extents() const noexcept { return copy_of(extent_); }
  constexpr tessera::extents<Rank> strides() const noexcept { return copy_of(stride_); }

  TESSERA_HOST_DEVICE constexpr index_t size() const noexcept {
    index_t count = 1;
    for (int d = 0; d < Rank; ++d) count *= extent_[d];
    return count;
  }

  /// True when the elements lie in row-major order without gaps. Strides of extents 0 and 1 do not matter.
  TESSERA_HOST_DEVICE constexpr bool contiguous() const noexcept {
    index_t expected = 1;
    if (size() == 0) return true;
    for (int d = Rank - 1; d >= 0; --d) {
      if (extent_[d] != 1 && stride_[d] != expected) return false;
      expected *= extent_[d];
    }
    return true;
  }

  /// Where an element stands: for memory that is not reached from here, too.
  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank)
  TESSERA_HOST_DEVICE constexpr T* address(Index... index) const noexcept {
    index_t const at[] = {static_cast<index_t>(index)...};
    index_t offset = 0;
    for (int d = 0; d < Rank; ++d) offset += at[d] * stride_[d];
    return data_ + offset;
  }
  /// An element, of memory that the processor reaches. (Kernels write `*x.address(i, j)`.)
  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank && Memory::host_accessible)
  TESSERA_HOST_DEVICE constexpr T& operator()(Index... index) const noexcept { return *address(index...); }

  /// The half-open range [begin, end) of dimension `d`; the same memory.
  constexpr view slice(int d, index_t begin, index_t end, site where = site::here()) const {
    if (d < 0 || d >= Rank || begin < 0 || end < begin || end > extent_[d])
      throw size_error("E-core-004", where, "slice [", begin, ", ", end, ") of dimension ", d,
                       " is outside a view of extents ", text_of(extents()));
    auto result = *this;
    result.data_ = data_ == nullptr ? data_ : data_ + begin * stride_[d];
    result.extent_[d] = end - begin;
    return result;
  }

  /// Index `at` of the outermost dimension: a view of one rank less. (The conditional names a valid type for
  /// rank 1 too, where the member does not exist.)
  constexpr view<T, (Rank > 1 ? Rank - 1 : 1), Memory> operator[](index_t at) const requires(Rank >= 2) {
    tessera::extents<(Rank > 1 ? Rank - 1 : 1)> sizes{}, strides{};
    for (int d = 1; d < Rank; ++d) {
      sizes[static_cast<std::size_t>(d - 1)] = extent_[d];
      strides[static_cast<std::size_t>(d - 1)] = stride_[d];
    }
    return {data_ + at * stride_[0], sizes, strides};
  }

  /// The same elements under other extents. Throws size_error if the counts differ or the view has gaps.
  template <int NewRank>
  constexpr view<T, NewRank, Memory> reshape(tessera::extents<NewRank> const& sizes,
                                             site where = site::here()) const {
    if (element_count(sizes, where) != size())
      throw size_error("E-core-005", where, "cannot reshape ", text_of(extents()), " to ", text_of(sizes),
                       ": the element counts differ");
    if (!contiguous())
      throw size_error("E-core-006", where, "cannot reshape a view with gaps (extents ", text_of(extents()),
                       ", strides ", text_of(strides()), "); copy it into a contiguous tensor first");
    return {data_, sizes};
  }

  /// All elements as one span. Throws size_error if the view has gaps.
  constexpr memory_span<T, Memory> span(site where = site::here()) const {
    if (!contiguous())
      throw size_error("E-core-007", where, "a view with gaps (extents ", text_of(extents()), ", strides ",
                       text_of(strides()), ") is not a span");
    return {data_, static_cast<std::size_t>(size())};
  }

private:
  static constexpr tessera::extents<Rank> copy_of(index_t const (&values)[Rank]) noexcept {
    tessera::extents<Rank> result{};
    for (int d = 0; d < Rank; ++d) result[static_cast<std::size_t>(d)] = values[d];
    return result;
  }

  T* data_ = nullptr;
  index_t extent_[Rank] = {};
  index_t stride_[Rank] = {};
};

/// The parameter type for inputs: a view of constant elements that does not take part in deduction, so that a
/// view of mutable elements is accepted.
template <class T, int Rank, class Memory = host_memory>
using input = std::type_identity_t<view<T const, Rank, Memory>>;

} // namespace tessera::inline TESSERA_ABI

#endif
/// Aligned memory that is counted: every allocation names what it is for, and a meter keeps the bytes in use
/// and their peak by kind. The meter is an object of one rank, passed where memory is taken; there is no
/// global one.
///
///     memory_meter meter;
///     tensor<float, 1> weights({n}, {&meter, memory_kind::parameters});
///     meter.current(memory_kind::parameters);   // n * 4
#ifndef TESSERA_CORE_MEMORY_HPP
#define TESSERA_CORE_MEMORY_HPP

#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tessera::inline TESSERA_ABI {

enum class memory_kind { parameters, gradients, optimizer_state, activations, communication, data, other };
inline constexpr int memory_kind_count = 7;

constexpr char const* name_of(memory_kind kind) noexcept {
  constexpr char const* names[] = {
      "parameters", "gradients", "optimizer state", "activations", "communication", "data", "other"};
  return names[static_cast<int>(kind)];
}

/// Bytes in use by kind, their peaks, and the number of allocations. Used by one thread at a time.
class memory_meter {
public:
  void add(memory_kind kind, index_t bytes) noexcept {
    auto& entry = of(kind);
    entry.current += bytes;
    if (entry.current > entry.peak) entry.peak = entry.current;
    total_.current += bytes;
    if (total_.current > total_.peak) total_.peak = total_.current;
    if (bytes > 0) ++allocations_;
  }
  void remove(memory_kind kind, index_t bytes) noexcept {
    of(kind).current -= bytes;
    total_.current -= bytes;
  }

  index_t current(memory_kind kind) const noexcept { return kinds_[static_cast<int>(kind)].current; }
  index_t peak(memory_kind kind) const noexcept { return kinds_[static_cast<int>(kind)].peak; }
  index_t current() const noexcept { return total_.current; }
  index_t peak() const noexcept { return total_.peak; }
  /// How often memory was taken so far: unchanged over a step that allocates nothing.
  index_t allocations() const noexcept { return allocations_; }

private:
  struct entry {
    index_t current = 0, peak = 0;
  };
  entry& of(memory_kind kind) noexcept { return kinds_[static_cast<int>(kind)]; }

  entry kinds_[memory_kind_count];
  entry total_;
  index_t allocations_ = 0;
};

/// Who counts an allocation, and as what. Without a meter nothing is counted. The meter outlives the memory.
struct memory_account {
  memory_meter* meter = nullptr;
  memory_kind kind = memory_kind::other;
};

/// How memory of one space is taken and given back. `allocate` returns nullptr where there is not enough.
template <memory_space Memory>
struct memory_traits;

template <>
struct memory_traits<host_memory> {
  /// A cache line, and every vector register, begins at a boundary of this many bytes.
  static constexpr std::size_t alignment = 64;
  /// From this size on, memory is aligned to huge pages and asks for them: fewer page faults and misses.
  static constexpr std::size_t huge_page = std::size_t{2} << 20;

  static constexpr std::size_t alignment_for(std::size_t bytes) noexcept {
    return bytes >= 2 * huge_page ? huge_page : alignment;
  }
  static void* allocate(std::size_t bytes) noexcept {
    auto const align = alignment_for(bytes);
    void* memory = ::operator new (bytes, std::align_val_t{align}, std::nothrow);
#if defined(__linux__)
    // Advice only: where the kernel declines, the memory is as good, only slower.
    if (memory != nullptr && align == huge_page) (void)::madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
  }
  static void deallocate(void* memory, std::size_t bytes) noexcept {
    ::operator delete (memory, std::align_val_t{alignment_for(bytes)});
  }
  static void zero(void* memory, std::size_t bytes) noexcept {
    std::memset(memory, 0, bytes);
  }
};

/// Owns one aligned, zero-initialised piece of memory. Move-only. Throws out_of_memory.
template <memory_space Memory = host_memory>
class buffer {
public:
  buffer() = default;
  explicit buffer(index_t bytes, memory_account account = {}, site where = site::here()) : buffer() {
    if (bytes < 0) throw size_error("E-core-008", where, "a buffer of ", bytes, " bytes was asked for");
    if (bytes == 0) return;
    data_ = memory_traits<Memory>::allocate(static_cast<std::size_t>(bytes));
    if (data_ == nullptr)
      throw out_of_memory("E-core-009", where, "no ", bytes, " bytes of ", Memory::name, " memory for ",
                          name_of(account.kind));
    // Owned from here on: where zeroing throws, the destructor gives it back.
    bytes_ = bytes;
    account_ = account;
    if (account_.meter != nullptr) account_.meter->add(account_.kind, bytes_);
    memory_traits<Memory>::zero(data_, static_cast<std::size_t>(bytes));
  }
  buffer(buffer&& other) noexcept { swap(other); }
  buffer& operator=(buffer&& other) noexcept {
    buffer(static_cast<buffer&&>(other)).swap(*this);
    return *this;
  }
  ~buffer() {
    if (data_ == nullptr) return;
    memory_traits<Memory>::deallocate(data_, static_cast<std::size_t>(bytes_));
    if (account_.meter != nullptr) account_.meter->remove(account_.kind, bytes_);
  }

  void* data() const noexcept { return data_; }
  index_t bytes() const noexcept { return bytes_; }

  void swap(buffer& other) noexcept {
    auto const exchange = [](auto& a, auto& b) {
      auto const held = a;
      a = b;
      b = held;
    };
    exchange(data_, other.data_);
    exchange(bytes_, other.bytes_);
    exchange(account_, other.account_);
  }

private:
  void* data_ = nullptr;
  index_t bytes_ = 0;
  memory_account account_;
};

} // namespace tessera::inline TESSERA_ABI

#endif

namespace tessera::inline TESSERA_ABI {

template <memory_space Memory = host_memory>
class arena {
public:
  /// Every piece begins at a boundary of this many bytes.
  static constexpr index_t alignment = 64;

  arena() = default;
  explicit arena(index_t capacity, memory_account account = {}, site where = site::here())
      : memory_(capacity, account, where) {}

  /// A position to release to.
  struct position {
    index_t used = 0;
  };
  position mark() const noexcept { return {used_}; }

  /// Gives back everything taken since `to`. Throws size_error if `to` lies ahead of what is taken.
  void release(position to, site where = site::here()) {
    if (to.used < 0 || to.used > used_)
      throw size_error("E-core-010", where, "arena released to ", to.used, " bytes, only ", used_,
                       " are taken");
    used_ = to.used;
  }

  /// A contiguous, uninitialised piece. Throws out_of_memory when the planned capacity is exceeded.
  template <class T, int Rank>
    requires std::is_trivially_copyable_v<T> view<T, Rank, Memory> take(extents<Rank> const& sizes,
                                                                        site where = site::here()) {
      auto const count = element_count(sizes, where);
      // Compared before it is multiplied: a count may be anything up to 2^63 - 1.
      if (count > left() / static_cast<index_t>(sizeof(T)) || bytes_for<T>(count) > left())
        throw out_of_memory("E-core-011", where, "the activation arena of ", capacity(), " bytes has ",
                            left(), " left and ", count, " elements of ", sizeof(T),
                            " bytes were asked for: its plan and the forward pass disagree");
      auto* piece = static_cast<char*>(memory_.data()) + used_;
      used_ += bytes_for<T>(count);
      if (used_ > peak_) peak_ = used_;
      return {static_cast<T*>(static_cast<void*>(piece)), sizes};
    }

  /// Bytes that `take` uses up for a piece of `count` elements of T: what a plan adds up.
  template <class T>
  static constexpr index_t bytes_for(index_t count) noexcept {
    return (count * static_cast<index_t>(sizeof(T)) + alignment - 1) / alignment * alignment;
  }

  index_t used() const noexcept { return used_; }
  index_t peak() const noexcept { return peak_; }
  index_t capacity() const noexcept { return memory_.bytes(); }

private:
  index_t left() const noexcept { return capacity() - used_; }

  buffer<Memory> memory_;
  index_t used_ = 0;
  index_t peak_ = 0;
};

/// Releases an arena to where it stood, at the end of a scope.
template <memory_space Memory>
class arena_scope {
public:
  explicit arena_scope(arena<Memory>& memory) noexcept : memory_(memory), start_(memory.mark()) {}
  ~arena_scope() {
    if (start_.used <= memory_.used()) memory_.release(start_);
  }
  arena_scope(arena_scope const&) = delete;
  arena_scope& operator=(arena_scope const&) = delete;

private:
  arena<Memory>& memory_;
  typename arena<Memory>::position start_;
};

} // namespace tessera::inline TESSERA_ABI

#endif
/// Random numbers addressed by index instead of drawn in turn: Philox4x32-10 (Salmon, Moraes, Dror and Shaw,
/// "Parallel random numbers: as easy as 1, 2, 3", 2011). Element i of stream s under seed k is the same
/// number whoever asks, in whatever order, on whatever rank.
///
///     philox random(seed, stream);
///     float u = random.uniform(global_index);   // in [0, 1)
///     float g = random.normal(global_index);    // mean 0, variance 1
#ifndef TESSERA_CORE_PHILOX_HPP
#define TESSERA_CORE_PHILOX_HPP

#include <cmath>
#include <cstdint>

namespace tessera::inline TESSERA_ABI {

class philox {
public:
  struct block {
    std::uint32_t word[4];
  };

  TESSERA_HOST_DEVICE constexpr explicit philox(std::uint64_t seed, std::uint64_t stream = 0) noexcept
      : seed_(seed), stream_(stream) {}

  /// The bijection itself: ten rounds over a 128-bit counter under a 64-bit key.
  static TESSERA_HOST_DEVICE constexpr block rounds(block counter, std::uint32_t key0,
                                                    std::uint32_t key1) noexcept {
    for (int round = 0; round < 10; ++round) {
      auto const product0 = std::uint64_t{0xD2511F53u} * counter.word[0];
      auto const product1 = std::uint64_t{0xCD9E8D57u} * counter.word[2];
      counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                  static_cast<std::uint32_t>(product1),
                  static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                  static_cast<std::uint32_t>(product0)}};
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    return counter;
  }

  /// Four random words: counter = (index, stream), key = seed.
  TESSERA_HOST_DEVICE constexpr block words(std::uint64_t index) const noexcept {
    return rounds({{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                    static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)}},
                  static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32));
  }

  /// 32 random bits for one element. Elements 4q .. 4q + 3 share one evaluation of `words(q)`.
  TESSERA_HOST_DEVICE constexpr std::uint32_t bits(std::uint64_t index) const noexcept {
    // Chosen in two steps: an array with a computed index would not stay in a device's registers.
    auto const four = words(index / 4);
    auto const low = index % 2 == 0 ? four.word[0] : four.word[1];
    auto const high = index % 2 == 0 ? four.word[2] : four.word[3];
    return index % 4 < 2 ? low : high;
  }

  /// Uniform in [0, 1), a multiple of 2^-24.
  TESSERA_HOST_DEVICE constexpr float uniform(std::uint64_t index) const noexcept {
    return unit_interval(bits(index));
  }
  static TESSERA_HOST_DEVICE constexpr float unit_interval(std::uint32_t bits) noexcept {
    return static_cast<float>(bits >> 8) * 0x1p-24f;
  }

  /// Standard normal by Box and Muller, in double and rounded: elements 2q and 2q + 1 share a pair of
  /// uniforms. A device's double functions differ from the host's by a unit in the last place, so that a few
  /// of the rounded numbers do.
  TESSERA_HOST_DEVICE float normal(std::uint64_t index) const noexcept {
    auto const w = words(index / 2);
    auto const low = (std::uint64_t{w.word[1]} << 32 | w.word[0]) >> 11;
    auto const high = (std::uint64_t{w.word[3]} << 32 | w.word[2]) >> 11;
    auto const radius =
        std::sqrt(-2.0 * std::log((static_cast<double>(low) + 1.0) * 0x1p-53)); // log of (0, 1]
    auto const turn = static_cast<double>(high) * 0x1p-53;
#if defined(__CUDA_ARCH__)
    return static_cast<float>(radius * (index % 2 == 0 ? cospi(2 * turn) : sinpi(2 * turn)));
#else
    auto const angle = 6.283185307179586476925 * turn;
    return static_cast<float>(radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle)));
#endif
  }

private:
  std::uint64_t seed_;
  std::uint64_t stream_;
};

} // namespace tessera::inline TESSERA_ABI

#endif
/// The element types of tensors: float, and the 16-bit storage types `bf16` and `fp16`. The 16-bit types
/// store only: they convert to and from float (round to nearest, ties to even; NaN stays NaN; overflow gives
/// infinity) and all arithmetic is done in float. A device converts by its own instructions: the same
/// results, but for the payload of a NaN.
#ifndef TESSERA_CORE_SCALAR_HPP
#define TESSERA_CORE_SCALAR_HPP

#include <bit>
#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace tessera::inline TESSERA_STABLE_ABI {

namespace detail {
/// `condition ? yes : no` by a mask. A conditional expression may come back as a branch, and a loop that
/// converts storage would no longer be vectorised. (Its conditions compare as signed integers: vector units
/// have no unsigned comparison.)
[[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr std::uint32_t select(bool condition, std::uint32_t yes,
                                                                          std::uint32_t no) noexcept {
#if defined(__CUDA_ARCH__)
  return condition ? yes : no;
#else
  auto const mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
#endif
}
} // namespace detail

/// Brain floating point: 1 sign, 8 exponent and 7 mantissa bits; the upper half of a float.
struct bf16 {
  std::uint16_t bits;

  bf16() = default;
  [[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr explicit bf16(float value) noexcept {
#if defined(__CUDA_ARCH__)
    if (!std::is_constant_evaluated()) {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
      return;
    }
#endif
    auto const word = std::bit_cast<std::uint32_t>(value);
    auto const rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    auto const quiet_nan = (word >> 16) | 0x40u;
    bits = static_cast<std::uint16_t>(
        detail::select(static_cast<std::int32_t>(word & 0x7fffffffu) > 0x7f800000, quiet_nan, rounded));
  }
  [[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static TESSERA_HOST_DEVICE constexpr bf16 from_bits(std::uint16_t bits) noexcept {
    bf16 value{};
    value.bits = bits;
    return value;
  }
};

/// IEEE 754 binary16: 1 sign, 5 exponent and 10 mantissa bits, with subnormals.
struct fp16 {
  std::uint16_t bits;

  fp16() = default;
  [[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr explicit fp16(float value) noexcept {
#if defined(__CUDA_ARCH__)
    if (!std::is_constant_evaluated()) {
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
      return;
    }
#endif
    auto const word = std::bit_cast<std::uint32_t>(value);
    auto const magnitude = word & 0x7fffffffu;
    // Normal: the exponent is rebiased by 127 - 15, thirteen bits of the mantissa are rounded off.
    auto result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal: adding 1/2 makes the unit in the last place 2^-24, so the sum holds the rounded mantissa.
    auto const size = static_cast<std::int32_t>(magnitude);
    auto const is_subnormal = size < 0x38800000;
    auto const tiny = std::bit_cast<float>(detail::select(is_subnormal, magnitude, 0u));
    auto const sum = std::bit_cast<std::uint32_t>(tiny + 0.5f);
    result = detail::select(is_subnormal, sum - 0x3f000000u, result);
    result = detail::select(size >= 0x477ff000, 0x7c00u, result); // 65520 and above round to infinity
    result = detail::select(size > 0x7f800000, 0x7e00u | ((magnitude >> 13) & 0x3ffu), result);
    bits = static_cast<std::uint16_t>(result | ((word >> 16) & 0x8000u));
  }
  [[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr operator float() const noexcept {
#if defined(__CUDA_ARCH__)
    if (!std::is_constant_evaluated()) {
      float value;
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
      return value;
    }
#endif
    auto const magnitude = static_cast<std::uint32_t>(bits) & 0x7fffu;
    auto const size = static_cast<std::int32_t>(magnitude);
    auto const subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(size) * 0x1p-24f);
    auto result = detail::select(size < 0x400, subnormal, (magnitude << 13) + (112u << 23));
    result = detail::select(size >= 0x7c00, (magnitude << 13) | 0x7f800000u, result);
    return std::bit_cast<float>(result | (static_cast<std::uint32_t>(bits & 0x8000u) << 16));
  }
  static TESSERA_HOST_DEVICE constexpr fp16 from_bits(std::uint16_t bits) noexcept {
    fp16 value{};
    value.bits = bits;
    return value;
  }
};

/// What weights, activations and gradients are stored in.
template <class T>
concept storage_scalar = std::same_as<T, float> || std::same_as<T, bf16> || std::same_as<T, fp16>;

/// place = T(value), rounded. In a loop marked TESSERA_SIMD write this, not the assignment: there g++ keeps
/// the temporary of a 16-bit type in memory, one for each lane, and does not vectorise.
template <storage_scalar T>
[[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr void store(T& place, float value) noexcept {
  place = T(value);
}

/// The field's name of a scalar type: "fp32", "bf16", "fp16", "fp64", "int32", "uint16" ...
template <class T>
constexpr std::string_view scalar_name() noexcept {
  if constexpr (std::same_as<T, float>)
    return "fp32";
  else if constexpr (std::same_as<T, bf16>)
    return "bf16";
  else if constexpr (std::same_as<T, fp16>)
    return "fp16";
  else if constexpr (std::same_as<T, double>)
    return "fp64";
  else if constexpr (std::integral<T>) {
    constexpr bool is_signed = std::signed_integral<T>;
    if constexpr (sizeof(T) == 1)
      return is_signed ? "int8" : "uint8";
    else if constexpr (sizeof(T) == 2)
      return is_signed ? "int16" : "uint16";
    else if constexpr (sizeof(T) == 4)
      return is_signed ? "int32" : "uint32";
    else
      return is_signed ? "int64" : "uint64";
  } else
    return "bytes";
}

} // namespace tessera::inline TESSERA_STABLE_ABI

#endif
/// An owning, contiguous, zero-initialised rank-N array of aligned memory. Move-only; functions take its
/// `view`.
///
///     tensor<bf16, 2> x({rows, columns});
///     ops::add(ex, x.view(), a, b);
#ifndef TESSERA_CORE_TENSOR_HPP
#define TESSERA_CORE_TENSOR_HPP

namespace tessera::inline TESSERA_ABI {

template <class T, int Rank, memory_space Memory = host_memory>
  requires std::is_trivially_copyable_v<T>
class tensor {
public:
  tensor() = default;
  /// Throws size_error for impossible extents, out_of_memory where memory runs out.
  explicit tensor(tessera::extents<Rank> const& sizes, memory_account account = {}, site where = site::here())
      : extents_(sizes), memory_(bytes_of(sizes, where), account, where) {}

  tessera::view<T, Rank, Memory> view() noexcept { return {data(), extents_}; }
  tessera::view<T const, Rank, Memory> view() const noexcept { return {data(), extents_}; }
  operator tessera::view<T, Rank, Memory>() noexcept { return view(); } // NOLINT: meant to be implicit
  operator tessera::view<T const, Rank, Memory>() const noexcept { return view(); } // NOLINT
  operator tessera::view<T const, Rank, Memory>() noexcept { return view(); }       // NOLINT

  memory_span<T, Memory> span() noexcept { return {data(), static_cast<std::size_t>(size())}; }
  memory_span<T const, Memory> span() const noexcept { return {data(), static_cast<std::size_t>(size())}; }

  T* data() noexcept { return static_cast<T*>(memory_.data()); }
  T const* data() const noexcept { return static_cast<T const*>(memory_.data()); }
  index_t size() const noexcept { return memory_.bytes() / static_cast<index_t>(sizeof(T)); }
  tessera::extents<Rank> const& extents() const noexcept { return extents_; }
  index_t extent(int d) const noexcept { return extents_[static_cast<std::size_t>(d)]; }

  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank && Memory::host_accessible)
  T& operator()(Index... index) noexcept { return view()(index...); }
  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank && Memory::host_accessible)
  T const& operator()(Index... index) const noexcept { return view()(index...); }

private:
  static index_t bytes_of(tessera::extents<Rank> const& sizes, site where) {
    auto const count = element_count(sizes, where);
    if (count > std::numeric_limits<index_t>::max() / static_cast<index_t>(sizeof(T)))
      throw size_error("E-core-002", where, "extents ", text_of(sizes), " need more than 2^63 - 1 bytes");
    return count * static_cast<index_t>(sizeof(T));
  }

  tessera::extents<Rank> extents_{};
  buffer<Memory> memory_;
};

} // namespace tessera::inline TESSERA_ABI

#endif

/// Which rank counts an element. Every rank that adds something up over all parameters (the global norm, a
/// parameter count), or acts once for all (initialisation under ZeRO, writing a checkpoint), asks here and
/// nowhere else, so that no element is counted twice or forgotten.
#ifndef TESSERA_LAYOUT_OWNERSHIP_HPP
#define TESSERA_LAYOUT_OWNERSHIP_HPP

/// Where each named parameter stands in a unit's flat block.
///
///     parameter_map map;
///     auto w = map.add("attention.weight", {3 * c, c}, parameter_kind::matrix, normal_values(0.02f));
///     map[w].offset;  map.block_size();
#ifndef TESSERA_LAYOUT_PARAMETERS_HPP
#define TESSERA_LAYOUT_PARAMETERS_HPP

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// How n elements are cut into contiguous parts: uneven and empty parts are ordinary.
#ifndef TESSERA_LAYOUT_SHARD_HPP
#define TESSERA_LAYOUT_SHARD_HPP

namespace tessera::inline TESSERA_ABI::layout {

/// The half-open range [begin, end).
struct range {
  index_t begin = 0;
  index_t end = 0;

  constexpr index_t size() const noexcept { return end - begin; }
  constexpr bool empty() const noexcept { return begin == end; }
  friend constexpr bool operator==(range const&, range const&) = default;
};

/// What two ranges share; empty (at some position) where they share nothing.
constexpr range intersection(range a, range b) noexcept {
  auto const begin = a.begin > b.begin ? a.begin : b.begin;
  auto const end = a.end < b.end ? a.end : b.end;
  return {begin, end < begin ? begin : end};
}

/// Part `part` of `parts` of n elements. Postconditions: the parts are in order, disjoint and cover [0, n);
/// every inner border is a multiple of `granule`; whole granules are spread so that the parts' counts of them
/// differ by at most one, the earlier parts taking more.
constexpr range shard_of(index_t n, index_t parts, index_t part, index_t granule = 1,
                         site where = site::here()) {
  if (n < 0 || parts < 1 || part < 0 || part >= parts || granule < 1)
    throw size_error("E-layout-001", where, "shard ", part, " of ", parts, " of ", n,
                     " elements in granules of ", granule, " does not exist");
  auto const granules = n / granule + (n % granule != 0 ? 1 : 0);
  auto const border = [&](index_t p) {
    auto const before = granules / parts * p + (p < granules % parts ? p : granules % parts);
    return before <= n / granule ? before * granule : n; // compared first: the product may pass 2^63 - 1
  };
  return {border(part), border(part + 1)};
}

} // namespace tessera::inline TESSERA_ABI::layout

#endif

namespace tessera::inline TESSERA_ABI::layout {

/// What a parameter is; weight decay and learning-rate rules are chosen by it.
enum class parameter_kind { matrix, bias, norm_gain, norm_bias, token_embedding, position_embedding };

constexpr char const* name_of(parameter_kind kind) noexcept {
  constexpr char const* names[] = {
      "matrix", "bias", "norm_gain", "norm_bias", "token_embedding", "position_embedding"};
  return names[static_cast<int>(kind)];
}

/// How a parameter starts: mean + deviation * standard normal, each element by its index (core/philox.hpp).
struct initial_values {
  float mean = 0;
  float deviation = 0;
};
constexpr initial_values constant_values(float value) noexcept {
  return {value, 0};
}
constexpr initial_values normal_values(float deviation) noexcept {
  return {0, deviation};
}

struct parameter {
  std::string name;
  std::vector<index_t> shape;
  parameter_kind kind = parameter_kind::matrix;
  initial_values start;
  index_t offset = 0; ///< First element within the unit's block.
  index_t size = 0;   ///< Elements.

  constexpr range where() const noexcept { return {offset, offset + size}; }
};

/// A stable number for a name (FNV-1a): the random stream of a parameter does not depend on where it stands.
constexpr std::uint64_t stream_of(std::string_view name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

/// The parameters of one unit in the order of their offsets. Each starts at a multiple of `alignment`
/// elements, or joined to the one before; gaps hold zeros, have zero gradients, and belong to no parameter.
class parameter_map {
public:
  static constexpr index_t alignment = 32; // 64 bytes of the smallest storage type

  /// Appends a parameter and returns its number. Throws size_error for an impossible shape, config_error for
  /// a name that is already there.
  std::size_t add(std::string name, std::vector<index_t> shape, parameter_kind kind, initial_values start,
                  site where = site::here()) {
    for (auto const& known : parameters_)
      if (known.name == name) throw config_error("E-layout-002", where, "two parameters are named ", name);
    index_t size = 1;
    for (auto extent : shape) size = element_count<2>({size, extent}, where);
    if (size > std::numeric_limits<index_t>::max() - alignment - block_size_)
      throw size_error("E-layout-003", where, "the parameter ", name, " of ", size, " elements and the ",
                       block_size_, " before it make a block of more than 2^63 - 1");
    parameters_.push_back({static_cast<std::string&&>(name), static_cast<std::vector<index_t>&&>(shape), kind,
                           start, block_size_, size});
    block_size_ += (size + alignment - 1) / alignment * alignment;
    return parameters_.size() - 1;
  }

  /// As `add`, but begins where the last parameter ends, without a gap: a row block of a packed matrix that
  /// keeps a name of its own.
  std::size_t add_joined(std::string name, std::vector<index_t> shape, parameter_kind kind,
                         initial_values start, site where = site::here()) {
    auto const number =
        add(static_cast<std::string&&>(name), static_cast<std::vector<index_t>&&>(shape), kind, start, where);
    if (number == 0) return number;
    auto& p = parameters_[number];
    p.offset = parameters_[number - 1].where().end;
    block_size_ = (p.where().end + alignment - 1) / alignment * alignment;
    return number;
  }

  parameter const& operator[](std::size_t number) const { return parameters_[number]; }
  std::size_t size() const noexcept { return parameters_.size(); }
  auto begin() const noexcept { return parameters_.begin(); }
  auto end() const noexcept { return parameters_.end(); }

  /// Elements of the flat block, gaps included.
  index_t block_size() const noexcept { return block_size_; }
  /// Elements of all parameters, gaps not included.
  index_t parameter_count() const noexcept {
    index_t count = 0;
    for (auto const& p : parameters_) count += p.size;
    return count;
  }

private:
  std::vector<parameter> parameters_;
  index_t block_size_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::layout

#endif

namespace tessera::inline TESSERA_ABI::layout {

/// A rank's place among the ranks that hold, or share, the same block.
struct ownership {
  int rank = 0;
  int ranks = 1;

  /// The elements of a flat block of `block_size` that `rank` counts. Over all ranks the ranges are disjoint
  /// and cover the block, whether the ranks hold replicas of it or shards: a shard is what its rank owns. A
  /// tied parameter is owned where its block stands; the unit that borrows it owns nothing of it.
  constexpr range of(index_t block_size) const { return of(block_size, rank); }
  constexpr range of(index_t block_size, int other_rank) const {
    return shard_of(block_size, ranks, other_rank, parameter_map::alignment);
  }
};

/// A stretch of one parameter inside a range of its block.
struct segment {
  parameter const* whole = nullptr;
  range in_block;            ///< Where it stands in the block.
  index_t first_element = 0; ///< Its first element's index within the parameter.
};

/// Cuts `part` of a block into the stretches of the parameters it covers; gaps are left out.
inline std::vector<segment> segments_of(parameter_map const& map, range part) {
  std::vector<segment> found;
  for (auto const& p : map) {
    auto const shared = intersection(p.where(), part);
    if (!shared.empty()) found.push_back({&p, shared, shared.begin - p.offset});
  }
  return found;
}

} // namespace tessera::inline TESSERA_ABI::layout

#endif

/// Copies between memories, ordered with the operations of a space, and host-side arrays with a counterpart
/// in a space's memory. This header has the host's part and no CUDA header; exec/copy_cuda.hpp has the
/// device's.
///
///     exec::copy(ex, on_device.span(), std::span<float const>(values));   // every space: destination first
///     exec::zero(ex, gradients.span());
///     exec::staged<std::int32_t, 2, Ex> tokens(ex, {batch, length});
///     fill(tokens.host());
///     model.forward(ex, tokens.upload(ex));
#ifndef TESSERA_EXEC_COPY_HPP
#define TESSERA_EXEC_COPY_HPP

#include <cstring>

/// What an execution space is: where an operation runs and which memory it reaches. Operations are templates
/// over it and take it as their first argument.
#ifndef TESSERA_EXEC_SPACE_HPP
#define TESSERA_EXEC_SPACE_HPP

namespace tessera::inline TESSERA_ABI::exec {

/// `memory` is the kind of memory its views stand in; `backend` names the set of implementations
/// (`ops/host/`, `ops/cuda/`) that its operations use.
template <class Ex>
concept space = memory_space<typename Ex::memory> && requires(Ex& ex) {
  typename Ex::backend;
  ex.synchronize();
};

struct host_backend {};

/// An execution space whose operations run on the host's threads.
template <class Ex>
concept host_space = space<Ex> && std::same_as<typename Ex::backend, host_backend>;

} // namespace tessera::inline TESSERA_ABI::exec

#endif

namespace tessera::inline TESSERA_ABI::exec {

namespace detail {

/// Both sides of a copy hold the same number of elements.
inline void require_same_count(std::size_t to, std::size_t from, site where) {
  if (to != from)
    throw size_error("E-exec-105", where, "a copy of ", from, " elements into room for ", to,
                     "; both must be the same");
}

} // namespace detail

/// Copies all elements; the two do not overlap. Throws size_error where the counts differ (E-exec-105).
template <host_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void copy(Ex&, std::span<T> to, std::type_identity_t<std::span<T const>> from, site where = site::here()) {
  detail::require_same_count(to.size(), from.size(), where);
  if (!from.empty()) std::memcpy(to.data(), from.data(), from.size_bytes());
}

/// The same for views without gaps, of any host-accessible memory.
template <host_space Ex, class T, class U, int Rank, memory_space To, memory_space From>
  requires(To::host_accessible&& From::host_accessible&& std::same_as<T, std::remove_const_t<U>>)
void copy(Ex& ex, view<T, Rank, To> to, view<U, Rank, From> from, site where = site::here()) {
  copy(ex, to.span(where), std::span<T const>(from.span(where)), where);
}

/// Sets all elements to zero.
template <host_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void zero(Ex&, std::span<T> data, site = site::here()) {
  if (!data.empty()) std::memset(static_cast<void*>(data.data()), 0, data.size_bytes());
}

/// An array that the host fills or reads and the space's operations read or write.
template <class T, int Rank, space Ex>
class staged;

/// On the host both sides are one: `upload` and `download` cost nothing.
template <class T, int Rank, host_space Ex>
class staged<T, Rank, Ex> {
public:
  staged() = default;
  explicit staged(Ex&, tessera::extents<Rank> const& sizes, memory_account account = {},
                  site where = site::here())
      : memory_(sizes, account, where) {}

  /// The host's side, to be filled or read.
  view<T, Rank> host(site = site::here()) { return memory_.view(); }
  /// The space's side, not (yet) the same content.
  view<T, Rank, typename Ex::memory> device() { return memory_.view(); }
  /// Brings the host's content to the space, in order with its operations.
  view<T, Rank, typename Ex::memory> upload(Ex&, site = site::here()) { return memory_.view(); }
  /// Brings the space's content to the host, and waits for it.
  view<T, Rank> download(Ex&, site = site::here()) { return memory_.view(); }

  tessera::extents<Rank> const& extents() const noexcept { return memory_.extents(); }

private:
  tensor<T, Rank> memory_;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif
/// The CUDA runtime as the library sees it: its header, and the one function that looks at its return codes.
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_DETAIL_CUDA_API_HPP
#define TESSERA_EXEC_DETAIL_CUDA_API_HPP

#if defined(TESSERA_WITH_CUDA)

#include <cuda_runtime.h>

namespace tessera::inline TESSERA_ABI::exec {

namespace detail {

/// What to do about the errors that a user can do something about.
inline char const* advice_for(cudaError_t status) noexcept {
  switch (status) {
  case cudaErrorNoKernelImageForDevice:
    return "; the program was compiled for other GPUs: add this one's to CMAKE_CUDA_ARCHITECTURES";
  case cudaErrorInsufficientDriver:
    return "; the driver is older than the CUDA toolkit that the program was built with";
  case cudaErrorIllegalAddress:
  case cudaErrorLaunchFailure:
    return "; an earlier kernel failed: run under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1";
  case cudaErrorStreamCaptureUnsupported:
  case cudaErrorStreamCaptureImplicit:
    return "; this work cannot become part of a CUDA graph";
  default:
    return "";
  }
}

} // namespace detail

/// Throws library_error (E-exec-101) naming the call, unless it succeeded. The runtime's record of the last
/// error is cleared, so that the next call does not report it again.
inline void cuda_check(cudaError_t status, char const* call, site where = site::here()) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw library_error("E-exec-101", where, call, " failed: ", cudaGetErrorString(status), " (",
                      cudaGetErrorName(status), ")", detail::advice_for(status));
}

/// For destructors, which can tell nobody: what went wrong shows again at the next call that can. The record
/// of it is cleared here, too.
inline void cuda_let_pass(cudaError_t status) noexcept {
  if (status != cudaSuccess) (void)cudaGetLastError();
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
/// Memory of a CUDA device, from the device's stream-ordered pool, and pinned memory of the host, which a
/// device copies from and to without the processor.
///
///     tensor<bf16, 2, exec::cuda_memory> x({rows, columns});       // on the calling thread's current device
///     tensor<float, 1, exec::pinned_memory> loss({1});
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_CUDA_MEMORY_HPP
#define TESSERA_EXEC_CUDA_MEMORY_HPP

#if defined(TESSERA_WITH_CUDA)

namespace tessera::inline TESSERA_ABI {

namespace exec {

struct cuda_memory {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "CUDA";
};

struct pinned_memory {
  static constexpr bool host_accessible = true;
  static constexpr char const* name = "pinned";
};

namespace detail {

/// Makes `device` the calling thread's current one, and the former one again at the end of the scope.
class device_scope {
public:
  explicit device_scope(int device, site where = site::here()) {
    cuda_check(cudaGetDevice(&former_), "cudaGetDevice", where);
    changed_ = former_ != device;
    if (changed_) cuda_check(cudaSetDevice(device), "cudaSetDevice", where);
  }
  ~device_scope() {
    if (changed_) cuda_let_pass(cudaSetDevice(former_));
  }
  device_scope(device_scope const&) = delete;
  device_scope& operator=(device_scope const&) = delete;

private:
  int former_ = 0;
  bool changed_ = false;
};

/// nullptr where there is too little memory; other errors throw.
inline bool allocated(cudaError_t status, char const* call, site where) {
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return false;
  }
  cuda_check(status, call, where);
  return true;
}

} // namespace detail
} // namespace exec

/// Memory is taken and given back rarely (tensors, arenas and scratch live long), so both calls wait: memory
/// is ready for every stream when `allocate` returns, and nothing uses it any more when it goes back. Neither
/// can be part of a CUDA graph.
template <>
struct memory_traits<exec::cuda_memory> {
  static void* allocate(std::size_t bytes, site where = site::here()) {
    void* memory = nullptr;
    if (!exec::detail::allocated(cudaMallocAsync(&memory, bytes, nullptr), "cudaMallocAsync", where))
      return nullptr;
    exec::cuda_check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", where);
    return memory;
  }
  /// On the device it came from, whichever is current. Memory that something may still use, since waiting for
  /// the device failed, is not given back: at the end of a program the device may be gone.
  static void deallocate(void* memory, std::size_t) noexcept {
    cudaPointerAttributes from{};
    int current = 0;
    auto status = cudaPointerGetAttributes(&from, memory);
    if (status == cudaSuccess) status = cudaGetDevice(&current);
    if (status != cudaSuccess) return exec::cuda_let_pass(status);
    if (from.device != current) exec::cuda_let_pass(cudaSetDevice(from.device));
    status = cudaDeviceSynchronize();
    exec::cuda_let_pass(status);
    if (status == cudaSuccess) exec::cuda_let_pass(cudaFreeAsync(memory, nullptr));
    if (from.device != current) exec::cuda_let_pass(cudaSetDevice(current));
  }
  static void zero(void* memory, std::size_t bytes, site where = site::here()) {
    exec::cuda_check(cudaMemsetAsync(memory, 0, bytes, nullptr), "cudaMemsetAsync", where);
    exec::cuda_check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", where);
  }
};

template <>
struct memory_traits<exec::pinned_memory> {
  static void* allocate(std::size_t bytes, site where = site::here()) {
    void* memory = nullptr;
    return exec::detail::allocated(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc",
                                   where)
               ? memory
               : nullptr;
  }
  static void deallocate(void* memory, std::size_t) noexcept { exec::cuda_let_pass(cudaFreeHost(memory)); }
  static void zero(void* memory, std::size_t bytes) noexcept { std::memset(memory, 0, bytes); }
};

} // namespace tessera::inline TESSERA_ABI

#endif

#endif
/// What an execution space keeps for its operations between calls: one object of each type that they ask for.
#ifndef TESSERA_EXEC_DETAIL_HANDLES_HPP
#define TESSERA_EXEC_DETAIL_HANDLES_HPP

namespace tessera::inline TESSERA_ABI::exec::detail {

/// A handle is made from the account that counts its memory, from the space itself, or from nothing.
template <class Handle, class Space>
concept handle_of = std::constructible_from<Handle, memory_account> ||
    std::constructible_from<Handle, Space&> || std::default_initializable<Handle>;

/// Used by one thread at a time. Objects are destroyed in the reverse order of their making, so that one may
/// hold what it took from another.
class handles {
public:
  handles() = default;
  handles(handles const&) = delete;
  handles& operator=(handles const&) = delete;
  ~handles() { clear(); }

  void clear() noexcept {
    while (newest_ != nullptr) {
      auto* const older = newest_->older;
      delete newest_;
      newest_ = older;
    }
  }

  template <class Handle, class Space>
  requires handle_of<Handle, Space> Handle& get(Space& space, memory_account account) {
    for (auto* entry = newest_; entry != nullptr; entry = entry->older)
      if (entry->type == &tag_of<Handle>) return static_cast<holder<Handle>*>(entry)->object;
    holder<Handle>* made = nullptr;
    if constexpr (std::constructible_from<Handle, memory_account>)
      made = new holder<Handle>(account);
    else if constexpr (std::constructible_from<Handle, Space&>)
      made = new holder<Handle>(space);
    else
      made = new holder<Handle>();
    made->type = &tag_of<Handle>;
    made->older = newest_; // after construction, which may have asked for other handles
    newest_ = made;
    return made->object;
  }

private:
  template <class>
  static constexpr char tag_of = 0;

  struct entry_base {
    virtual ~entry_base() = default;
    void const* type = nullptr;
    entry_base* older = nullptr;
  };
  template <class Handle>
  struct holder final : entry_base {
    template <class... From>
    explicit holder(From&... from) : object(from...) {}
    Handle object;
  };

  entry_base* newest_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::exec::detail

#endif
/// The CUDA execution space: one device, one stream, and the handles that operations keep between calls.
/// Operations are put into the stream and have not finished when they return; `synchronize` waits for them.
/// The calling thread's current device becomes this space's.
///
///     exec::cuda ex({.device = 0});
///     tensor<bf16, 2, exec::cuda::memory> x({rows, columns});
///     ops::gelu(ex, y.view(), x.view());
///     ex.synchronize();
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_CUDA_HPP
#define TESSERA_EXEC_CUDA_HPP

#if defined(TESSERA_WITH_CUDA)

#include <string>
#include <vector>

#include <nvtx3/nvToolsExt.h>

namespace tessera::inline TESSERA_ABI::exec {

struct cuda_backend {};

/// An execution space whose operations run on a CUDA device.
template <class Ex>
concept cuda_space = space<Ex> && std::same_as<typename Ex::backend, cuda_backend>;

struct cuda_options {
  int device = 0;
  /// What matrix products may use beside their operands.
  index_t workspace_bytes = index_t{32} << 20;
  /// A stream of the host application to work in, borrowed; none: one of this space's own.
  cudaStream_t stream = nullptr;
};

/// What kernels found wrong and the host learns later: looked at by each `cuda::synchronize`, which throws
/// what `look` throws.
class late_check {
public:
  virtual void look(site where) = 0;

protected:
  ~late_check() = default;
};

/// Used by one thread at a time. Not copyable: operations refer to its handles.
class cuda {
public:
  using memory = cuda_memory;
  using backend = cuda_backend;

  /// Throws config_error where the machine has no CUDA device (E-exec-102) or not that one (E-exec-103).
  explicit cuda(cuda_options options = {}, site where = site::here())
      : options_(options), stream_(options.stream), owns_stream_(options.stream == nullptr) {
    int devices = 0;
    auto const counted = cudaGetDeviceCount(&devices);
    if (counted != cudaSuccess || devices == 0) {
      (void)cudaGetLastError();
      throw config_error("E-exec-102", where, "this machine has no CUDA device that can be used (",
                         counted == cudaSuccess ? "none found" : cudaGetErrorString(counted),
                         "); compute on the host, or check the driver with nvidia-smi");
    }
    if (options.device < 0 || options.device >= devices)
      throw config_error("E-exec-103", where, "device ", options.device, " of ", devices,
                         " CUDA devices was asked for; they are numbered from 0");
    if (options.workspace_bytes < 0)
      throw config_error("E-exec-104", where, "a workspace of ", options.workspace_bytes,
                         " bytes was asked for");
    cuda_check(cudaSetDevice(options.device), "cudaSetDevice", where);
    cuda_check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, options.device),
               "cudaDeviceGetAttribute", where);
    // Memory that was given back stays with the pool: taking it again costs nothing.
    cudaMemPool_t pool = nullptr;
    cuda_check(cudaDeviceGetDefaultMemPool(&pool, options.device), "cudaDeviceGetDefaultMemPool", where);
    auto keep = ~std::uint64_t{0};
    cuda_check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
               "cudaMemPoolSetAttribute", where);
    if (owns_stream_)
      cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags",
                 where);
  }
  cuda(cuda const&) = delete;
  cuda& operator=(cuda const&) = delete;
  /// Waits for what was started. Errors that nobody asked for until now are lost here.
  ~cuda() {
    cuda_let_pass(cudaSetDevice(options_.device));
    cuda_let_pass(cudaStreamSynchronize(stream_));
    handles_.clear();
    if (owns_stream_) cuda_let_pass(cudaStreamDestroy(stream_));
  }

  int device() const noexcept { return options_.device; }
  cudaStream_t stream() const noexcept { return stream_; }
  int multiprocessors() const noexcept { return multiprocessors_; }
  /// What computes, in words.
  std::string description() const {
    return tessera::text_of("CUDA device ", options_.device, ", ", multiprocessors_, " multiprocessors");
  }
  index_t workspace_bytes() const noexcept { return options_.workspace_bytes; }

  /// Waits until everything in the stream has finished, then reports what kernels found wrong.
  void synchronize(site where = site::here()) {
    cuda_check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", where);
    for (auto* check : checks_) check->look(where);
  }

  /// Adds a check to every later `synchronize`. It lives as long as this space: a part of one of its handles.
  void watch(late_check& check) { checks_.push_back(&check); }

  /// Whether work is being recorded into a CUDA graph (exec/graph.hpp) instead of being run.
  bool capturing(site where = site::here()) const {
    auto status = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing", where);
    return status != cudaStreamCaptureStatusNone;
  }

  /// An object of type `Handle` that lives as long as this space, made at the first call: from the account
  /// that counts its memory, from this space (`Handle(exec::cuda&)`), or from nothing.
  template <class Handle>
  requires detail::handle_of<Handle, cuda> Handle& handle() {
    return handles_.template get<Handle>(*this, scratch_account());
  }

  /// Memory that operations keep in handles of this space, and the account that counts it.
  memory_meter const& scratch() const noexcept { return scratch_; }
  memory_account scratch_account() noexcept { return {&scratch_, memory_kind::other}; }

  /// Records a sentence for the program to show once.
  void note(std::string text) {
    for (auto const& known : notes_)
      if (known == text) return;
    notes_.push_back(static_cast<std::string&&>(text));
  }
  std::vector<std::string> const& notes() const noexcept { return notes_; }

  /// A named stretch of the program in the profiler's time line; use exec::range (exec/range.hpp).
  void enter_range(char const* name) noexcept { (void)nvtxRangePushA(name); }
  void leave_range() noexcept { (void)nvtxRangePop(); }

private:
  cuda_options options_;
  cudaStream_t stream_;
  bool owns_stream_;
  int multiprocessors_ = 0;
  memory_meter scratch_;
  detail::handles handles_;
  std::vector<late_check*> checks_;
  std::vector<std::string> notes_;
};

static_assert(cuda_space<cuda>);

/// CUDA devices of this machine; 0 also where there is no driver. Rank r of several usually takes
/// r % cuda_devices().
inline int cuda_devices() noexcept {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess) return devices;
  (void)cudaGetLastError();
  return 0;
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
/// A point in a stream's work: other streams wait for it without the host, the host asks whether it has
/// passed.
///
///     exec::event ready(ex);
///     ready.record(ex);                       // after what ex was given so far
///     ready.wait_in(other_stream);            // what other_stream is given from here on comes after it
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_EVENT_HPP
#define TESSERA_EXEC_EVENT_HPP

#if defined(TESSERA_WITH_CUDA)

namespace tessera::inline TESSERA_ABI::exec {

struct event_options {
  /// Keep the time, for `milliseconds_since`. Costs a little at each record.
  bool timed = false;
};

/// Move-only. Belongs to the device of the space it was made for.
class event {
public:
  event() = default;
  template <cuda_space Ex>
  explicit event(Ex& ex, event_options options = {}, site where = site::here()) {
    detail::device_scope const on(ex.device(), where);
    cuda_check(cudaEventCreateWithFlags(&event_, options.timed ? cudaEventDefault : cudaEventDisableTiming),
               "cudaEventCreateWithFlags", where);
  }
  event(event&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  event& operator=(event&& other) noexcept {
    auto* const held = event_;
    event_ = other.event_;
    other.event_ = held;
    return *this;
  }
  ~event() {
    if (event_ != nullptr) cuda_let_pass(cudaEventDestroy(event_));
  }

  void record(cudaStream_t stream, site where = site::here()) {
    cuda_check(cudaEventRecord(event_, stream), "cudaEventRecord", where);
  }
  template <cuda_space Ex>
  void record(Ex& ex, site where = site::here()) {
    record(ex.stream(), where);
  }

  /// The stream waits; the host does not. An event that was never recorded has passed.
  void wait_in(cudaStream_t stream, site where = site::here()) const {
    cuda_check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent", where);
  }
  template <cuda_space Ex>
  void wait_in(Ex& ex, site where = site::here()) const {
    wait_in(ex.stream(), where);
  }

  /// The host waits.
  void wait(site where = site::here()) const {
    cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize", where);
  }
  bool passed(site where = site::here()) const {
    auto const status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    cuda_check(status, "cudaEventQuery", where);
    return true;
  }

  /// Device time between two passed events that were made with `timed`.
  double milliseconds_since(event const& start, site where = site::here()) const {
    float milliseconds = 0;
    cuda_check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "cudaEventElapsedTime", where);
    return static_cast<double>(milliseconds);
  }

  cudaEvent_t native() const noexcept { return event_; }

private:
  cudaEvent_t event_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
/// Copies from and to CUDA memory (exec/copy.hpp says what copies are). All are ordered on the space's
/// stream. One whose other side is ordinary host memory has finished when it returns; between device memory,
/// and from or to pinned memory (given as views, which carry it in their type), it goes on in the background.
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_COPY_CUDA_HPP
#define TESSERA_EXEC_COPY_CUDA_HPP

#if defined(TESSERA_WITH_CUDA)

namespace tessera::inline TESSERA_ABI::exec {

namespace detail {

/// Starts a copy; waits where `wait`.
template <cuda_space Ex>
void copy_bytes(Ex& ex, void* to, void const* from, std::size_t bytes, bool wait, site where) {
  if (bytes == 0) return;
  cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, ex.stream()), "cudaMemcpyAsync", where);
  // The runtime promises less than this for pageable memory, and how much less depends on the machine.
  if (wait) ex.synchronize(where);
}

} // namespace detail

/// Host to device, device to host, device to device.
template <cuda_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void copy(Ex& ex, device_span<T, cuda_memory> to, std::type_identity_t<std::span<T const>> from,
          site where = site::here()) {
  detail::require_same_count(to.size(), from.size(), where);
  detail::copy_bytes(ex, to.data(), from.data(), from.size_bytes(), true, where);
}
template <cuda_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void copy(Ex& ex, std::span<T> to, std::type_identity_t<device_span<T const, cuda_memory>> from,
          site where = site::here()) {
  detail::require_same_count(to.size(), from.size(), where);
  detail::copy_bytes(ex, to.data(), from.data(), from.size_bytes(), true, where);
}
template <cuda_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void copy(Ex& ex, device_span<T, cuda_memory> to,
          std::type_identity_t<device_span<T const, cuda_memory>> from, site where = site::here()) {
  detail::require_same_count(to.size(), from.size(), where);
  detail::copy_bytes(ex, to.data(), from.data(), from.size_bytes(), false, where);
}

/// Views without gaps, of any two memories of which one is the device's.
template <cuda_space Ex, class T, class U, int Rank, memory_space To, memory_space From>
  requires((std::same_as<To, cuda_memory> ||
            std::same_as<From, cuda_memory>)&&std::same_as<T, std::remove_const_t<U>>)
void copy(Ex& ex, view<T, Rank, To> to, view<U, Rank, From> from, site where = site::here()) {
  auto const source = from.span(where);
  auto const target = to.span(where);
  detail::require_same_count(target.size(), source.size(), where);
  detail::copy_bytes(ex, target.data(), source.data(), source.size_bytes(),
                     std::same_as<To, host_memory> || std::same_as<From, host_memory>, where);
}

template <cuda_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void zero(Ex& ex, device_span<T, cuda_memory> data, site where = site::here()) {
  if (data.empty()) return;
  cuda_check(cudaMemsetAsync(data.data(), 0, data.size_bytes(), ex.stream()), "cudaMemsetAsync", where);
}

/// Pinned memory on the host's side: `upload` returns at once, and `host` waits for it before the content may
/// be replaced. An upload that is captured into a graph copies anew at each launch; whoever launches sees to
/// it that the host's side is not written meanwhile.
template <class T, int Rank, cuda_space Ex>
class staged<T, Rank, Ex> {
public:
  staged() = default;
  explicit staged(Ex& ex, tessera::extents<Rank> const& sizes, memory_account account = {},
                  site where = site::here())
      : host_(sizes, account, where), device_(sizes, account, where), uploaded_(ex, {}, where) {}

  view<T, Rank> host(site where = site::here()) {
    if (uploading_) uploaded_.wait(where);
    uploading_ = false;
    return {host_.data(), host_.extents()};
  }
  view<T, Rank, typename Ex::memory> device() { return device_.view(); }

  view<T, Rank, typename Ex::memory> upload(Ex& ex, site where = site::here()) {
    copy(ex, device_.view(), host_.view(), where);
    if (host_.size() > 0 && !ex.capturing(where)) {
      uploaded_.record(ex, where);
      uploading_ = true;
    }
    return device_.view();
  }
  view<T, Rank> download(Ex& ex, site where = site::here()) {
    copy(ex, host_.view(), device_.view(), where);
    ex.synchronize(where);
    uploading_ = false;
    return {host_.data(), host_.extents()};
  }

  tessera::extents<Rank> const& extents() const noexcept { return device_.extents(); }

private:
  tensor<T, Rank, pinned_memory> host_;
  tensor<T, Rank, typename Ex::memory> device_;
  event uploaded_;
  bool uploading_ = false;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
/// A stretch of work recorded once and started again as a whole: a training step of hundreds of kernels then
/// costs the host one call.
///
///     exec::graph step;
///     step.capture(ex, [&] { model.forward_backward(ex, ...); optimizer.step(ex, ...); });   // runs nothing
///     for (...) step.launch(ex);
///
/// What is captured must neither wait, nor take memory, nor copy from or to ordinary host memory: run the
/// step once beforehand, so that scratch memory and handles stand. Pointers and sizes are those of the
/// capture.
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_GRAPH_HPP
#define TESSERA_EXEC_GRAPH_HPP

#if defined(TESSERA_WITH_CUDA)

namespace tessera::inline TESSERA_ABI::exec {

/// Move-only. Throws library_error (E-exec-101) where something cannot be captured, whatever `body` throws,
/// and config_error (E-exec-106) where there is nothing to launch.
class graph {
public:
  graph() = default;
  graph(graph&& other) noexcept : executable_(other.executable_) { other.executable_ = nullptr; }
  graph& operator=(graph&& other) noexcept {
    auto* const held = executable_;
    executable_ = other.executable_;
    other.executable_ = held;
    return *this;
  }
  ~graph() { clear(); }

  template <cuda_space Ex, std::invocable Body>
  void capture(Ex& ex, Body&& body, site where = site::here()) {
    clear();
    // Other threads (ranks) may go on with whatever they do.
    cuda_check(cudaStreamBeginCapture(ex.stream(), cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture", where);
    cudaGraph_t recorded = nullptr;
    try {
      body();
    } catch (...) {
      cuda_let_pass(cudaStreamEndCapture(ex.stream(), &recorded));
      if (recorded != nullptr) cuda_let_pass(cudaGraphDestroy(recorded));
      throw;
    }
    cuda_check(cudaStreamEndCapture(ex.stream(), &recorded), "cudaStreamEndCapture", where);
    auto const status = cudaGraphInstantiate(&executable_, recorded, 0);
    cuda_let_pass(cudaGraphDestroy(recorded));
    cuda_check(status, "cudaGraphInstantiate", where);
  }

  bool captured() const noexcept { return executable_ != nullptr; }

  template <cuda_space Ex>
  void launch(Ex& ex, site where = site::here()) {
    if (executable_ == nullptr)
      throw config_error("E-exec-106", where, "a graph was launched before anything was captured");
    cuda_check(cudaGraphLaunch(executable_, ex.stream()), "cudaGraphLaunch", where);
  }

private:
  void clear() noexcept {
    if (executable_ != nullptr) cuda_let_pass(cudaGraphExecDestroy(executable_));
    executable_ = nullptr;
  }

  cudaGraphExec_t executable_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
/// The host execution space: a number of threads, and whatever handles its operations keep between calls.
///
///     exec::host ex({.threads = 2});
///     ex.parallel_for(rows, 16, [&](index_t begin, index_t end) { ... });   // disjoint ranges, one a thread
#ifndef TESSERA_EXEC_HOST_HPP
#define TESSERA_EXEC_HOST_HPP

#include <exception>
#include <string>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace tessera::inline TESSERA_ABI::exec {

/// Matrix products by oneDNN. Exists where TESSERA_WITH_ONEDNN is defined.
struct onednn_product {
  static constexpr char const* name = "oneDNN";
};
/// Matrix products by the library's own vectorised loops. Always there.
struct portable_product {
  static constexpr char const* name = "portable";
};

struct host_options {
  /// Threads of each parallel loop; 0 takes all that OpenMP offers (one without OpenMP).
  int threads = 0;
};

/// `Product` is the policy that multiplies matrices; it is part of the type, so that programs built with and
/// without oneDNN share no function. Used by one thread at a time. Not copyable: operations refer to its
/// handles.
template <class Product>
class basic_host {
public:
  using memory = host_memory;
  using backend = host_backend;
  using product = Product;

  /// Throws config_error for a negative thread count, or for several threads in a build without OpenMP.
  explicit basic_host(host_options options = {}, site where = site::here()) : threads_(options.threads) {
#if defined(_OPENMP)
    if (threads_ == 0) threads_ = omp_get_max_threads();
#else
    if (threads_ == 0) threads_ = 1;
    if (threads_ > 1)
      throw config_error("E-exec-001", where, threads_,
                         " threads were asked for and this build has no OpenMP; "
                         "compile with -fopenmp or ask for 1");
#endif
    if (threads_ < 1)
      throw config_error("E-exec-002", where, "the thread count is ", threads_, ", need 1 or more");
  }
  basic_host(basic_host const&) = delete;
  basic_host& operator=(basic_host const&) = delete;

  int threads() const noexcept {
    return threads_;
  }
  /// What computes, in words.
  std::string description() const {
    return tessera::text_of(threads_, threads_ == 1 ? " thread, " : " threads, ", Product::name, " products");
  }

  /// Host operations have finished when they return.
  void synchronize() noexcept {}

  /// Calls `body(begin, end)` on disjoint contiguous ranges that cover [0, count), at most one a thread and
  /// none shorter than `grain` unless it is the only one. The first exception of a body is rethrown here.
  template <std::invocable<index_t, index_t> Body>
  void parallel_for(index_t count, index_t grain, Body&& body) {
    if (count <= 0) return;
    auto const useful = grain > 1 ? count / grain : count;
    auto const workers = useful < threads_ ? (useful < 1 ? index_t{1} : useful) : index_t{threads_};
    if (workers == 1) return static_cast<void>(body(index_t{0}, count));
    std::exception_ptr failure;
#if defined(_OPENMP)
#pragma omp parallel num_threads(narrow <int>(workers))
    {
      auto const team = index_t{omp_get_num_threads()}, self = index_t{omp_get_thread_num()};
      auto const begin = count / team * self + (self < count % team ? self : count % team);
      auto const end = begin + count / team + (self < count % team ? 1 : 0);
      try {
        if (begin < end) body(begin, end);
      } catch (...) {
#pragma omp critical(tessera_parallel_for)
        if (!failure) failure = std::current_exception();
      }
    }
#endif
    if (failure) std::rethrow_exception(failure);
  }

  /// An object of type `Handle` that lives as long as this space, made at the first call: where an operation
  /// keeps engines, compiled kernels and scratch memory between calls. One that takes memory is made from the
  /// account that counts it, one that needs the space from that.
  template <class Handle>
  requires detail::handle_of<Handle, basic_host> Handle& handle() {
    return handles_.template get<Handle>(*this, {&scratch_, memory_kind::other});
  }

  /// Memory that operations keep in handles of this space.
  memory_meter const& scratch() const noexcept {
    return scratch_;
  }

  /// Records a sentence for the program to show once, such as a slower path that the processor forces.
  void note(std::string text) {
    for (auto const& known : notes_)
      if (known == text) return;
    notes_.push_back(static_cast<std::string&&>(text));
  }
  std::vector<std::string> const& notes() const noexcept {
    return notes_;
  }

private:
  int threads_;
  memory_meter scratch_;
  detail::handles handles_;
  std::vector<std::string> notes_;
};

/// The host space of this build. An alias of different types in builds with and without oneDNN: their symbols
/// differ, so they can be linked together.
#if defined(TESSERA_WITH_ONEDNN)
using host = basic_host<onednn_product>;
#else
using host = basic_host<portable_product>;
#endif

} // namespace tessera::inline TESSERA_ABI::exec

#endif
/// A named stretch of a program, from here to the end of the scope. On CUDA it shows in the profiler's time
/// line (NVTX); on the host it is nothing.
///
///     exec::range const here(ex, "forward");
#ifndef TESSERA_EXEC_RANGE_HPP
#define TESSERA_EXEC_RANGE_HPP

namespace tessera::inline TESSERA_ABI::exec {

/// A space that tells a profiler.
template <class Ex>
concept ranged_space = space<Ex> && requires(Ex& ex, char const* name) {
  ex.enter_range(name);
  ex.leave_range();
};

template <space Ex>
class range {
public:
  range(Ex& ex, [[maybe_unused]] char const* name) noexcept : ex_(ex) {
    if constexpr (ranged_space<Ex>) ex_.enter_range(name);
  }
  ~range() {
    if constexpr (ranged_space<Ex>) ex_.leave_range();
  }
  range(range const&) = delete;
  range& operator=(range const&) = delete;

private:
  Ex& ex_;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif
/// Scratch memory of the operations named by `Tag`, kept in a handle of the space: it grows at first use,
/// then stays, so that nothing is allocated in the steady state.
///
///     auto* sums = ex.template handle<exec::scratch<my_operation, memory>>().template take<double>(n,
///     where);
#ifndef TESSERA_EXEC_SCRATCH_HPP
#define TESSERA_EXEC_SCRATCH_HPP

namespace tessera::inline TESSERA_ABI::exec {

/// The next `take` of the same tag hands out the same memory again. On a device that is safe as long as both
/// uses are on the space's stream.
template <class Tag, memory_space Memory = host_memory>
class scratch {
public:
  explicit scratch(memory_account account) noexcept : account_(account) {}

  /// `count` elements of whatever content.
  template <class T>
  T* take(index_t count, site where = site::here()) {
    auto const bytes = count * static_cast<index_t>(sizeof(T));
    if (bytes > memory_.bytes()) {
      memory_ = {}; // given back before more is asked for
      memory_ = buffer<Memory>(bytes, account_, where);
    }
    return static_cast<T*>(memory_.data());
  }

private:
  memory_account account_;
  buffer<Memory> memory_;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif

/// Element by element addition: out = a + b, in float, rounded once. The output may be the memory of either
/// input. Cost: two reads and a write an element.
///
///     ops::add(ex, out, a, b);
#ifndef TESSERA_OPS_ADD_HPP
#define TESSERA_OPS_ADD_HPP

/// The checks that every operation makes before it touches memory. They throw size_error with the name of the
/// operation and of the argument, what was expected and what came.
///
///     require_extents("layer_norm", "gain", gain, {width}, where);
#ifndef TESSERA_OPS_SHAPES_HPP
#define TESSERA_OPS_SHAPES_HPP

namespace tessera::inline TESSERA_ABI::ops {

/// The argument has exactly these extents.
template <class T, int Rank, memory_space M>
void require_extents(char const* operation, char const* argument, view<T, Rank, M> given,
                     std::type_identity_t<extents<Rank>> const& expected, site where) {
  if (given.extents() != expected)
    throw size_error("E-ops-001", where, operation, ": ", argument, " has extents ", text_of(given.extents()),
                     ", expected ", text_of(expected));
}

/// The same, or the argument is left out (an empty view).
template <class T, int Rank, memory_space M>
void require_extents_or_none(char const* operation, char const* argument, view<T, Rank, M> given,
                             std::type_identity_t<extents<Rank>> const& expected, site where) {
  if (given.data() != nullptr) require_extents(operation, argument, given, expected, where);
}

/// The elements of each row are adjacent. Rows may lie apart, in any order of the outer dimensions.
template <class T, int Rank, memory_space M>
void require_dense_rows(char const* operation, char const* argument, view<T, Rank, M> given, site where) {
  if (given.extent(Rank - 1) > 1 && given.stride(Rank - 1) != 1)
    throw size_error("E-ops-002", where, operation, ": the last stride of ", argument, " is ",
                     given.stride(Rank - 1), ", must be 1");
}

/// All elements are adjacent, in row-major order.
template <class T, int Rank, memory_space M>
void require_contiguous(char const* operation, char const* argument, view<T, Rank, M> given, site where) {
  if (!given.contiguous())
    throw size_error("E-ops-003", where, operation, ": ", argument, " (extents ", text_of(given.extents()),
                     ", strides ", text_of(given.strides()), ") has gaps, must be contiguous");
}

/// Exactly these extents, with dense rows.
template <class T, int Rank, memory_space M>
void require_rows(char const* operation, char const* argument, view<T, Rank, M> given,
                  std::type_identity_t<extents<Rank>> const& expected, site where) {
  require_extents(operation, argument, given, expected, where);
  require_dense_rows(operation, argument, given, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#endif

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: `run(ex, out, a, b)`.
template <class Backend>
struct add_on;

/// Throws size_error where extents differ or a view has gaps.
template <exec::space Ex, storage_scalar T>
void add(Ex& ex, view<T, 1, typename Ex::memory> out, input<T, 1, typename Ex::memory> a,
         input<T, 1, typename Ex::memory> b, site where = site::here()) {
  require_extents("add", "a", a, out.extents(), where);
  require_extents("add", "b", b, out.extents(), where);
  require_contiguous("add", "out", out, where);
  require_contiguous("add", "a", a, where);
  require_contiguous("add", "b", b, where);
  add_on<typename Ex::backend>::run(ex, out, a, b);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// add on the host: one vectorised pass.
#ifndef TESSERA_OPS_HOST_ADD_HPP
#define TESSERA_OPS_HOST_ADD_HPP

/// How the host's memory-bound operations share work: loops over elements and over rows, and sums whose order
/// is fixed. Neither the result of a loop nor that of a sum depends on the number of threads, on addresses or
/// on the width of vector registers.
#ifndef TESSERA_OPS_HOST_DETAIL_LOOPS_HPP
#define TESSERA_OPS_HOST_DETAIL_LOOPS_HPP

/// exp, log, tanh, erf and sigmoid of a float, without branches, tables or calls, so that a loop over them
/// turns into vector instructions on any compiler. Within 1.5 units in the last place of the true value
/// (sigmoid 2.5; tests/ops/elementary.cpp measures it), right at the infinities, at NaN, and where results
/// overflow or become subnormal. In device code exp, log, tanh and erf are CUDA's own, within 2 units.
/// There sigmoid stands on the hardware's exponential: within 4 units for positive numbers, and within a
/// relative 1e-5 for negative ones, whose results below 2^-126 become 0.
///
///     for (index_t i = 0; i < n; ++i) out[i] = elementary::exp(in[i]);
///
/// The polynomials are minimax fits (Remez) of this library's own making.
#ifndef TESSERA_OPS_ELEMENTARY_HPP
#define TESSERA_OPS_ELEMENTARY_HPP

#include <bit>
#include <cstdint>

namespace tessera::inline TESSERA_ABI::ops::elementary {

/// `condition ? yes : no` where both are at hand, by a mask: compilers turn a conditional expression back
/// into a branch, which ends vectorisation.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float select(bool condition, float yes, float no) noexcept {
#if defined(__CUDA_ARCH__)
  return condition ? yes : no;
#else
  auto const mask = 0u - static_cast<std::uint32_t>(condition);
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(yes) & mask) |
                              (std::bit_cast<std::uint32_t>(no) & ~mask));
#endif
}

[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float magnitude(float x) noexcept {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7fffffffu);
}

/// |x| with the sign of `sign`.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float with_sign_of(float x, float sign) noexcept {
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) & 0x7fffffffu) |
                              (std::bit_cast<std::uint32_t>(sign) & 0x80000000u));
}

/// The larger one; the first if either is NaN.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float larger(float a, float b) noexcept {
  return select(b > a, b, a);
}
/// The smaller one; the first if either is NaN.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float smaller(float a, float b) noexcept {
  return select(b < a, b, a);
}

/// e^x.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float exp(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return ::expf(x);
#else
  // Beyond these bounds the result is 0 or infinity anyway; the order of the arguments keeps NaN.
  x = smaller(larger(x, -104.0f), 89.0f);
  // x = n log 2 + r with |r| <= log(2) / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low
  // bits; log 2 is cut in two so that n times its upper part is exact.
  constexpr float shift = 12582912.0f;
  auto const shifted = x * 1.44269504f + shift;
  auto const whole = shifted - shift;
  auto const n = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(shift);
  auto const r = (x - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;
  auto p = 0x1.6a1a72p-10f;
  p = p * r + 0x1.123fc6p-7f;
  p = p * r + 0x1.555916p-5f;
  p = p * r + 0x1.55548ap-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors: n may lie outside the exponents of normal numbers, its halves do not.
  auto const half = n >> 1;
  auto const low = std::bit_cast<float>(static_cast<std::uint32_t>(half + 127) << 23);
  auto const high = std::bit_cast<float>(static_cast<std::uint32_t>(n - half + 127) << 23);
  return p * low * high;
#endif
}

/// Natural logarithm: minus infinity at 0, NaN below it.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float log(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return ::logf(x);
#else
  // x = m 2^e with m in [sqrt(1/2), sqrt(2)), subnormals scaled up first.
  auto const tiny = x < 0x1p-126f;
  auto const scaled = x * select(tiny, 0x1p25f, 1.0f);
  // Unsigned: the bits of a negative x wrap round here, and its result is NaN below.
  auto const offset = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(scaled) - 0x3f3504f3u);
  auto const e = static_cast<float>(offset >> 23) - select(tiny, 25.0f, 0.0f);
  auto const m = std::bit_cast<float>((offset & 0x7fffff) + 0x3f3504f3);
  auto const f = m - 1.0f;
  auto p = 0x1.1457bap-4f;
  p = p * f - 0x1.de3c1ap-4f;
  p = p * f + 0x1.e6f064p-4f;
  p = p * f - 0x1.fc2206p-4f;
  p = p * f + 0x1.233768p-3f;
  p = p * f - 0x1.555c4ep-3f;
  p = p * f + 0x1.99a4b6p-3f;
  p = p * f - 0x1.000006p-2f;
  p = p * f + 0x1.555548p-2f;
  auto const square = f * f;
  auto const tail = p * f * square - 0.5f * square + e * 0x1.7f7d1cp-20f;
  auto result = f + tail + e * 0x1.62e4p-1f;
  constexpr auto infinity = std::bit_cast<float>(0x7f800000u);
  constexpr auto not_a_number = std::bit_cast<float>(0x7fc00000u);
  result = select(x == 0.0f, -infinity, result);
  result = select(x == infinity, infinity, result);
  return select(x >= 0.0f, result, not_a_number);
#endif
}

/// Hyperbolic tangent.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float tanh(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return ::tanhf(x);
#else
  auto const a = magnitude(x);
  // Near zero an odd polynomial, further out 1 - 2 / (e^2|x| + 1): the latter cancels near zero.
  auto const z = a * a;
  auto p = 0x1.0e9ebep-9f;
  p = p * z - 0x1.09286p-7f;
  p = p * z + 0x1.62fb4p-6f;
  p = p * z - 0x1.b9e19p-5f;
  p = p * z + 0x1.111026p-3f;
  p = p * z - 0x1.555552p-2f;
  auto const near = a + a * (p * z);
  auto const far = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  return with_sign_of(select(a < 0.625f, near, far), x);
#endif
}

/// The error function.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float erf(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return ::erff(x);
#else
  auto const a = magnitude(x);
  // Near zero an odd polynomial, further out 1 - exp(log erfc|x|) with a polynomial for the logarithm.
  auto const z = a * a;
  auto p = 0x1.574ecep-14f;
  p = p * z - 0x1.a88d8ap-11f;
  p = p * z + 0x1.549664p-8f;
  p = p * z - 0x1.b80962p-6f;
  p = p * z + 0x1.ce2dcap-4f;
  p = p * z - 0x1.812742p-2f;
  p = p * z + 0x1.06eba8p-3f; // 2 / sqrt(pi) - 1
  auto const near = a + a * p;
  auto const b = smaller(a, 4.0f); // erf(4) rounds to 1
  auto q = -0x1.5d71d4p-16f;
  q = q * b + 0x1.c4590cp-12f;
  q = q * b - 0x1.10624ep-8f;
  q = q * b + 0x1.9aebaep-6f;
  q = q * b - 0x1.bb4548p-4f;
  q = q * b - 0x1.444d1ep-1f;
  q = q * b - 0x1.212626p+0f;
  q = q * b + 0x1.62d89ap-13f;
  auto const far = 1.0f - exp(q);
  return with_sign_of(select(a < 0.921875f, near, far), x);
#endif
}

/// 1 / (1 + e^-x), accurate down to its subnormal results.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float sigmoid(float x) noexcept {
#if defined(__CUDA_ARCH__)
  // On 16-bit storage the kernels that call this have some 25 instructions an element before memory is no
  // longer what they wait for; this takes a third of what the exact exponential does.
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(magnitude(x) * -1.44269504f));
  return __fdividef(select(x < 0.0f, e, 1.0f), 1.0f + e);
#else
  auto const e = exp(-magnitude(x));
  return select(x < 0.0f, e, 1.0f) / (1.0f + e);
#endif
}

} // namespace tessera::inline TESSERA_ABI::ops::elementary

#endif

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Elements that are worth a thread of their own: about 10 microseconds of memory traffic.
inline constexpr index_t grain = 16384;
/// Borders between threads lie at multiples of this many elements, so that which elements end up in a vector
/// loop's scalar remainder (where a compiler may round differently) is the same for any number of threads.
inline constexpr index_t block = 256;

/// Calls body(begin, end) on ranges of [0, count).
template <exec::host_space Ex, class Body>
void for_elements(Ex& ex, index_t count, Body&& body) {
  ex.parallel_for((count + block - 1) / block, grain / block, [&](index_t first, index_t last) {
    body(first * block, last * block < count ? last * block : count);
  });
}

/// Calls body(row) for each of `rows` rows of `width` elements.
template <exec::host_space Ex, class Body>
void for_rows(Ex& ex, index_t rows, index_t width, Body&& body) {
  ex.parallel_for(rows, grain / (width + 1) + 1, [&](index_t first, index_t last) {
    for (auto row = first; row < last; ++row) body(row);
  });
}

/// Sixteen running sums, added up pairwise at the end.
inline constexpr int lanes = 16;

template <std::floating_point Sum>
Sum sum_of_lanes(Sum const (&lane)[lanes]) noexcept {
  Sum sum[lanes];
  for (int l = 0; l < lanes; ++l) sum[l] = lane[l];
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  return sum[0];
}

/// Sum of term(i) over [0, n): element i goes to running sum i % lanes.
template <std::floating_point Sum = float, class Term>
[[gnu::always_inline]] inline Sum sum(index_t n, Term&& term) {
  Sum lane[lanes] = {};
  index_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; ++l) lane[l] += term(i + l);
  for (int l = 0; i < n; ++i, ++l) lane[l] += term(i);
  return sum_of_lanes(lane);
}

/// The largest value(i) of [0, n), NaN left out; minus infinity for none.
template <class Value>
[[gnu::always_inline]] inline float maximum(index_t n, Value&& value) {
  float lane[lanes];
  for (auto& l : lane) l = -std::numeric_limits<float>::infinity();
  index_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; ++l) lane[l] = elementary::larger(lane[l], value(i + l));
  for (int l = 0; i < n; ++i, ++l) lane[l] = elementary::larger(lane[l], value(i));
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lane[l] = elementary::larger(lane[l], lane[l + half]);
  return lane[0];
}

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct add_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 1> out, view<T const, 1> a, view<T const, 1> b) {
    host_detail::for_elements(ex, out.size(),
                              [o = out.data(), x = a.data(), y = b.data()](index_t begin, index_t end) {
                                TESSERA_SIMD()
                                for (auto i = begin; i < end; ++i)
                                  store(o[i], static_cast<float>(x[i]) + static_cast<float>(y[i]));
                              });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Scaled dot-product attention with causal mask and grouped heads, in blocks (Dao, Fu, Ermon, Rudra and Ré,
/// "FlashAttention", 2022): softmax(scale q k^T) v without ever holding a matrix of scores, so memory is
/// linear in the number of tokens. The backward recomputes scores from the logarithms of their sums.
///
///     ops::attention(ex, out, log_sum_exp, q, k, v);
///     ops::attention_backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp);
///
/// Views may be strided (slices of one packed [B, T, 3, H, D]); only the last stride must be 1.
/// Cost: 4 B H T S D operations forward (half of it causal), 10 B H T S D backward.
#ifndef TESSERA_OPS_ATTENTION_HPP
#define TESSERA_OPS_ATTENTION_HPP

#include <cmath>

/// The sizes of one attention call, as its backends read them.
#ifndef TESSERA_OPS_DETAIL_ATTENTION_SHAPE_HPP
#define TESSERA_OPS_DETAIL_ATTENTION_SHAPE_HPP

namespace tessera::inline TESSERA_ABI::ops::detail {

struct attention_shape {
  index_t batch, queries, keys, heads, key_heads, width;
  index_t first_query;
  float scale;
  bool causal;

  /// Keys that the query at `t` sees.
  constexpr index_t visible(index_t t) const noexcept {
    auto const last = first_query + t + 1;
    return !causal || last > keys ? keys : last < 0 ? 0 : last;
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::detail

#endif

namespace tessera::inline TESSERA_ABI::ops {

struct attention_options {
  /// Factor on q k^T; 0 stands for 1 / sqrt(D).
  float scale = 0;
  /// Query t sees keys up to position first_query + t; otherwise all keys.
  bool causal = true;
  /// Position of the first query among the keys; -1 stands for S - T: the queries are the last tokens.
  index_t first_query = -1;
};

template <class Backend>
struct attention_on;

namespace detail {

template <storage_scalar T, memory_space M>
attention_shape shape_of(view<T const, 4, M> q, view<T const, 4, M> k, view<T const, 4, M> v,
                         view<T const, 4, M> out, view<float const, 3, M> log_sum_exp,
                         attention_options options, site where) {
  attention_shape shape{q.extent(0), q.extent(1),         k.extent(1),   q.extent(2),   k.extent(2),
                        q.extent(3), options.first_query, options.scale, options.causal};
  if (shape.key_heads < 1 ? shape.heads != 0 : shape.heads % shape.key_heads != 0)
    throw size_error("E-ops-103", where, "attention: ", shape.heads, " query heads do not divide among ",
                     shape.key_heads, " key heads");
  extents<4> const query_sizes{shape.batch, shape.queries, shape.heads, shape.width};
  extents<4> const key_sizes{shape.batch, shape.keys, shape.key_heads, shape.width};
  require_dense_rows("attention", "q", q, where);
  require_rows("attention", "k", k, key_sizes, where);
  require_rows("attention", "v", v, key_sizes, where);
  require_rows("attention", "out", out, query_sizes, where);
  require_extents("attention", "log_sum_exp", log_sum_exp, {shape.batch, shape.heads, shape.queries}, where);
  require_contiguous("attention", "log_sum_exp", log_sum_exp, where);
  if (shape.first_query < 0) shape.first_query = shape.keys - shape.queries;
  if (shape.causal && shape.first_query < 0)
    throw size_error("E-ops-104", where, "attention: ", shape.queries, " causal queries and only ",
                     shape.keys, " keys; say first_query");
  if (shape.scale == 0 && shape.width > 0) shape.scale = 1 / std::sqrt(static_cast<float>(shape.width));
  return shape;
}

} // namespace detail

/// out[B, T, H, D] = softmax(scale q k^T) v for each head; query head h reads key head h / (H / K).
/// log_sum_exp[B, H, T] receives the logarithm of each query's sum of exponentials, for the backward.
/// A query that sees no key gives zeros.
template <exec::space Ex, storage_scalar T>
void attention(Ex& ex, view<T, 4, typename Ex::memory> out, view<float, 3, typename Ex::memory> log_sum_exp,
               input<T, 4, typename Ex::memory> q, input<T, 4, typename Ex::memory> k,
               input<T, 4, typename Ex::memory> v, attention_options options = {},
               site where = site::here()) {
  auto const shape = detail::shape_of<T, typename Ex::memory>(q, k, v, out, log_sum_exp, options, where);
  attention_on<typename Ex::backend>::forward(ex, out, log_sum_exp, q, k, v, shape);
}

/// The gradients dq[B, T, H, D], dk and dv[B, S, K, D] of `attention`, overwritten, given d_out[B, T, H, D]
/// and what the forward read and wrote, with the same options.
template <exec::space Ex, storage_scalar T>
void attention_backward(Ex& ex, view<T, 4, typename Ex::memory> dq, view<T, 4, typename Ex::memory> dk,
                        view<T, 4, typename Ex::memory> dv, input<T, 4, typename Ex::memory> d_out,
                        input<T, 4, typename Ex::memory> q, input<T, 4, typename Ex::memory> k,
                        input<T, 4, typename Ex::memory> v, input<T, 4, typename Ex::memory> out,
                        input<float, 3, typename Ex::memory> log_sum_exp, attention_options options = {},
                        site where = site::here()) {
  auto const shape = detail::shape_of<T, typename Ex::memory>(q, k, v, out, log_sum_exp, options, where);
  require_rows("attention_backward", "dq", dq, q.extents(), where);
  require_rows("attention_backward", "dk", dk, k.extents(), where);
  require_rows("attention_backward", "dv", dv, v.extents(), where);
  require_rows("attention_backward", "d_out", d_out, q.extents(), where);
  attention_on<typename Ex::backend>::backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, shape);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// attention on the host. A worker takes one key head of one sample at a time, packs its keys and values into
/// panels once, and runs the query heads that read them over the panels in register tiles: the scores of a
/// few queries against a block of keys stay in the first cache from product to softmax to product. Gradients
/// of keys and values are added up by that one worker, in order.
#ifndef TESSERA_OPS_HOST_ATTENTION_HPP
#define TESSERA_OPS_HOST_ATTENTION_HPP

/// Attention over one key head: what one worker does, on memory that is linear in the number of keys.
///
/// Scores S = scale q k^T are made for one register tile of queries and one block of keys at a time. Forward
/// keeps a running maximum and sum for each query (online softmax) and rescales its output row when the
/// maximum grows. Backward makes P = exp(S - log_sum_exp) again, and with delta = sum(d_out * out) of a query
///     dS = P * (d_out v^T - delta),   dq = scale dS k,   dk = dS^T (scale q),   dv = P^T d_out.
#ifndef TESSERA_OPS_HOST_DETAIL_ATTENTION_HEAD_HPP
#define TESSERA_OPS_HOST_DETAIL_ATTENTION_HEAD_HPP

#include <cmath>

/// Rows of 16-bit storage to float and back, in loops that vectorise.
#ifndef TESSERA_OPS_HOST_DETAIL_CONVERT_HPP
#define TESSERA_OPS_HOST_DETAIL_CONVERT_HPP

#include <cstring>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// float(value) without a branch: the 15 magnitude bits read as a tiny float, times 2^112; infinity and NaN
/// get the largest exponent.
inline float widened(fp16 value) noexcept {
  auto const magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu);
  auto const finite = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  auto const exponent = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(finite | exponent | static_cast<std::uint32_t>(value.bits & 0x8000u) << 16);
}
inline float widened(bf16 value) noexcept {
  return value;
}
inline float widened(float value) noexcept {
  return value;
}

template <storage_scalar T>
void to_float(float* __restrict out, T const* __restrict in, index_t count) noexcept {
  if constexpr (std::same_as<T, float>) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(float));
  } else {
    TESSERA_SIMD()
    for (index_t i = 0; i < count; ++i) out[i] = widened(in[i]);
  }
}

template <storage_scalar T>
void from_float(T* __restrict out, float const* __restrict in, index_t count) noexcept {
  if constexpr (std::same_as<T, float>) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(float));
  } else {
    TESSERA_SIMD()
    for (index_t i = 0; i < count; ++i) out[i] = T(in[i]);
  }
}

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
/// The matrix product without a library: panels of both operands are packed (and widened to float) block by
/// block, and a register tile runs over them (Goto and van de Geijn, "Anatomy of high-performance matrix
/// multiplication", 2008). Each element's sum is made in one order whatever the number of threads.
#ifndef TESSERA_OPS_HOST_DETAIL_PORTABLE_PRODUCT_HPP
#define TESSERA_OPS_HOST_DETAIL_PORTABLE_PRODUCT_HPP

#include <algorithm>
#include <vector>

/// The register tile at the heart of the portable product: a few rows by a few vectors of sums, fed from
/// packed panels. Vectors are the compiler's own (`vector_size`), so the same source serves SSE, AVX2 and
/// AVX-512.
#ifndef TESSERA_OPS_HOST_DETAIL_TILE_HPP
#define TESSERA_OPS_HOST_DETAIL_TILE_HPP

#include <cstring>
#include <utility>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Sizes of the blocks that a product is cut into; the defaults fit caches of 32 KiB, 512 KiB and up.
struct product_tuning {
#if defined(__AVX512F__)
  static constexpr int lanes = 16, tile_rows = 12;
#elif defined(__AVX2__)
  static constexpr int lanes = 8, tile_rows = 6;
#else
  static constexpr int lanes = 4, tile_rows = 6;
#endif
  static constexpr int tile_vectors = 2;
  static constexpr int tile_columns = lanes * tile_vectors;
  static constexpr index_t depth = 384;          ///< A panel of b, depth x tile_columns, stays in L1.
  static constexpr index_t block_rows = 144;     ///< A block of a, block_rows x depth, stays in L2.
  static constexpr index_t block_columns = 1024; ///< A block of b, depth x block_columns, stays in L3.
};

using lanes_t = float __attribute__((vector_size(product_tuning::lanes * sizeof(float))));

/// How the left operand of a tile lies in memory.
enum class left { rows_adjacent, depth_adjacent };

/// c[tile_rows, tile_columns] = or += a b over `depth`, with b packed as [depth][tile_columns]. Element (row,
/// k) of a is a[k * a_stride + row] where rows are adjacent, a[row * a_stride + k] where depth is. Loops over
/// constants are unrolled by hand (folds), so that the sums stay in registers at every optimisation level.
template <left Left>
[[gnu::noinline]] inline void multiply_tile(float* c, index_t c_stride, bool add, index_t depth,
                                            float const* a, index_t a_stride, float const* b) noexcept {
  constexpr int rows = product_tuning::tile_rows, lanes = product_tuning::lanes;
  static_assert(product_tuning::tile_vectors == 2);
  auto const load = [](float const* from) {
    lanes_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  auto const unrolled = [&]<int... Row>(std::integer_sequence<int, Row...>) {
    lanes_t low[rows] = {}, high[rows] = {};
    for (index_t k = 0; k < depth; ++k, b += 2 * lanes) {
      auto const b_low = load(b), b_high = load(b + lanes);
      if constexpr (Left == left::rows_adjacent) {
        ((low[Row] += a[Row] * b_low, high[Row] += a[Row] * b_high), ...);
        a += a_stride;
      } else {
        ((low[Row] += a[Row * a_stride] * b_low, high[Row] += a[Row * a_stride] * b_high), ...);
        ++a;
      }
    }
    if (add) ((low[Row] += load(c + Row * c_stride), high[Row] += load(c + Row * c_stride + lanes)), ...);
    ((std::memcpy(c + Row * c_stride, &low[Row], sizeof low[Row]),
      std::memcpy(c + Row * c_stride + lanes, &high[Row], sizeof high[Row])),
     ...);
  };
  unrolled(std::make_integer_sequence<int, rows>{});
}

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// How a policy of exec::host multiplies: `run(ex, c, a, b, accumulate)` with c's columns adjacent, and
/// either the rows or the columns of a and of b adjacent.
template <class Product>
struct product_by;

/// out[column][row] = in[row][column] for four rows of `count` elements.
inline void transpose_four(float* __restrict out, index_t out_stride, float const* const (&in)[4],
                           index_t count) noexcept {
  using four = float __attribute__((vector_size(16)));
  auto const load = [](float const* from) {
    four value;
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  index_t i = 0;
  for (; i + 4 <= count; i += 4) {
    auto const a = load(in[0] + i), b = load(in[1] + i), c = load(in[2] + i), d = load(in[3] + i);
    auto const ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    auto const ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    auto const cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    auto const cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    four const column[4] = {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
                            __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
                            __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                            __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
    for (int j = 0; j < 4; ++j) std::memcpy(out + (i + j) * out_stride, &column[j], sizeof column[j]);
  }
  for (; i < count; ++i)
    for (int j = 0; j < 4; ++j) out[i * out_stride + j] = in[j][i];
}

/// Packs `lines` x `depth` of an operand into panels of Width lines, each [depth][Width], the last one filled
/// up with zeros. A line is a row of a or a column of b; element (line, k) is from[line * line_stride + k *
/// k_stride], and one of the strides is 1.
template <int Width, storage_scalar T>
void pack_panels(float* __restrict out, T const* __restrict from, index_t line_stride, index_t k_stride,
                 index_t lines, index_t depth) noexcept {
  constexpr index_t piece = 64; // of a line, when lines are contiguous: staged as float, then transposed
  if (line_stride == 1) {
    // Row by row of the source over four panels at a time: whole cache lines, few pages.
    for (index_t first = 0; first < lines; first += 4 * Width) {
      auto const last = std::min(lines, first + 4 * Width);
      for (index_t k = 0; k < depth; ++k)
        for (index_t line = first; line < last; line += Width) {
          auto* to = out + line * depth + k * Width;
          auto const* source = from + line + k * k_stride;
          if (last - line >= Width) {
            for (int i = 0; i < Width; ++i) to[i] = widened(source[i]);
          } else {
            for (int i = 0; i < Width; ++i) to[i] = line + i < last ? widened(source[i]) : 0.0f;
          }
        }
    }
    return;
  }
  for (index_t line = 0; line < lines; line += Width) {
    auto* to = out + line * depth;
    auto const valid = std::min<index_t>(Width, lines - line);
    if (valid < Width) std::fill(to, to + Width * depth, 0.0f);
    for (index_t k = 0; k < depth; k += piece) {
      auto const count = std::min(piece, depth - k);
      index_t i = 0;
      for (; i + 4 <= valid; i += 4) {
        alignas(64) float staged[4][piece];
        float const* rows[4];
        for (int j = 0; j < 4; ++j) {
          auto const* source = from + (line + i + j) * line_stride + k;
          if constexpr (std::same_as<T, float>) {
            rows[j] = source;
          } else {
            to_float(staged[j], source, count);
            rows[j] = staged[j];
          }
        }
        transpose_four(to + k * Width + i, Width, rows, count);
      }
      for (; i < valid; ++i)
        for (index_t at = 0; at < count; ++at)
          to[(k + at) * Width + i] = widened(from[(line + i) * line_stride + k + at]);
    }
  }
}

/// The part of a tile that lies inside c, or a tile of a c that is not float: c[rows, columns] = or += a b.
template <storage_scalar C>
void multiply_edge_tile(C* c, index_t c_stride, index_t rows, index_t columns, bool add, index_t depth,
                        float const* a, float const* b) noexcept {
  constexpr int width = product_tuning::tile_columns;
  alignas(64) float sum[product_tuning::tile_rows][width];
  multiply_tile<left::rows_adjacent>(&sum[0][0], width, false, depth, a, product_tuning::tile_rows, b);
  for (index_t i = 0; i < rows; ++i)
    for (index_t j = 0; j < columns; ++j)
      c[i * c_stride + j] = C((add ? widened(c[i * c_stride + j]) : 0.0f) + sum[i][j]);
}

/// Packed panels and, where c is stored in 16 bits, fp32 sums: one piece for each worker, kept between calls.
struct product_buffers {
  static constexpr index_t panels =
      product_tuning::depth * (product_tuning::block_rows + product_tuning::block_columns);
  static constexpr index_t sum_rows = 2 * product_tuning::block_rows;
  static constexpr index_t sums = sum_rows * product_tuning::block_columns;

  explicit product_buffers(memory_account counted) noexcept : account(counted) {}

  memory_account account;
  std::vector<buffer<>> worker;

  /// At least `count` floats for each of `workers`.
  void reserve(int workers, index_t count) {
    if (std::ssize(worker) < workers) worker.resize(static_cast<std::size_t>(workers));
    auto const bytes = count * static_cast<index_t>(sizeof(float));
    for (int w = 0; w < workers; ++w)
      if (worker[static_cast<std::size_t>(w)].bytes() < bytes)
        worker[static_cast<std::size_t>(w)] = buffer<>(bytes, account);
  }
  float* of(index_t w) noexcept { return static_cast<float*>(worker[static_cast<std::size_t>(w)].data()); }
};

/// One worker's share: c (+)= a b on one thread.
template <storage_scalar C, storage_scalar A, storage_scalar B>
void multiply_block(float* memory, view<C, 2> c, view<A const, 2> a, view<B const, 2> b,
                    bool accumulate) noexcept {
  using tuning = product_tuning;
  auto const m = c.extent(0), n = c.extent(1), k = a.extent(1);
  auto* const packed_a = memory;
  auto* const packed_b = packed_a + tuning::block_rows * tuning::depth;
  auto const depth_block =
      k <= tuning::depth ? k : (k + (k - 1) / tuning::depth) / ((k - 1) / tuning::depth + 1);

  for (index_t column = 0; column < n; column += tuning::block_columns) {
    auto const columns = std::min(tuning::block_columns, n - column);
    for (index_t from = 0; from < k; from += depth_block) {
      auto const depth = std::min(depth_block, k - from);
      auto const add = accumulate || from > 0;
      pack_panels<tuning::tile_columns>(packed_b, b.data() + from * b.stride(0) + column * b.stride(1),
                                        b.stride(1), b.stride(0), columns, depth);
      for (index_t row = 0; row < m; row += tuning::block_rows) {
        auto const rows = std::min(tuning::block_rows, m - row);
        pack_panels<tuning::tile_rows>(packed_a, a.data() + row * a.stride(0) + from * a.stride(1),
                                       a.stride(0), a.stride(1), rows, depth);
        for (index_t j = 0; j < columns; j += tuning::tile_columns)
          for (index_t i = 0; i < rows; i += tuning::tile_rows) {
            auto const valid_rows = std::min<index_t>(tuning::tile_rows, rows - i);
            auto const valid_columns = std::min<index_t>(tuning::tile_columns, columns - j);
            auto* to = c.data() + (row + i) * c.stride(0) + column + j;
            auto const* left_panel = packed_a + i * depth;
            auto const* right_panel = packed_b + j * depth;
            if constexpr (std::same_as<C, float>)
              if (valid_rows == tuning::tile_rows && valid_columns == tuning::tile_columns) {
                multiply_tile<left::rows_adjacent>(to, c.stride(0), add, depth, left_panel, tuning::tile_rows,
                                                   right_panel);
                continue;
              }
            multiply_edge_tile(to, c.stride(0), valid_rows, valid_columns, add, depth, left_panel,
                               right_panel);
          }
      }
    }
  }
}

/// The same for a c of 16 bits and sums of several depth blocks: they are kept in fp32, a block of c at a
/// time, and rounded once.
template <storage_scalar C, storage_scalar A, storage_scalar B>
void multiply_in_float(float* memory, view<C, 2> c, view<A const, 2> a, view<B const, 2> b,
                       bool accumulate) noexcept {
  auto const m = c.extent(0), n = c.extent(1);
  for (index_t column = 0; column < n; column += product_tuning::block_columns)
    for (index_t row = 0; row < m; row += product_buffers::sum_rows) {
      auto const rows = std::min(product_buffers::sum_rows, m - row);
      auto const columns = std::min(product_tuning::block_columns, n - column);
      view<float, 2> const sums(memory + product_buffers::panels, {rows, columns});
      for (index_t i = 0; i < rows && accumulate; ++i) to_float(&sums(i, 0), &c(row + i, column), columns);
      multiply_block(memory, sums, a.slice(0, row, row + rows), b.slice(1, column, column + columns),
                     accumulate);
      for (index_t i = 0; i < rows; ++i) from_float(&c(row + i, column), &sums(i, 0), columns);
    }
}

template <>
struct product_by<exec::portable_product> {
  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run(Ex& ex, view<C, 2> c, view<A const, 2> a, view<B const, 2> b, bool accumulate) {
    using tuning = product_tuning;
    auto const m = c.extent(0), n = c.extent(1), k = a.extent(1);
    if (k == 0) {
      for (index_t i = 0; i < m && !accumulate; ++i) std::fill_n(&c(i, 0), n, C(0.0f));
      return;
    }
    if (m <= few_rows && a.stride(1) == 1 && b.stride(0) == 1)
      return multiply_few_rows(ex, c, a, b, accumulate);

    // Workers form a grid over c that makes each one pack as little as possible; small products stay alone.
    auto const tiles_m = (m + tuning::tile_rows - 1) / tuning::tile_rows;
    auto const tiles_n = (n + tuning::tile_columns - 1) / tuning::tile_columns;
    index_t grid_m = 1, grid_n = 1;
    if (static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) > 2e5)
      for (index_t g = 1; g <= ex.threads(); ++g)
        if (ex.threads() % g == 0 && (m / g + n / (ex.threads() / g) < m / grid_m + n / grid_n)) {
          grid_m = g;
          grid_n = ex.threads() / g;
        }
    auto const workers = grid_m * grid_n;

    auto& buffers = ex.template handle<product_buffers>();
    auto const keeps_sums = !std::same_as<C, float> && k > tuning::depth;
    buffers.reserve(narrow<int>(workers), product_buffers::panels + (keeps_sums ? product_buffers::sums : 0));
    ex.parallel_for(workers, 1, [&](index_t begin, index_t end) {
      for (auto w = begin; w < end; ++w) {
        auto const share = [](index_t tiles, index_t parts, index_t part, index_t width, index_t limit) {
          return std::min(limit, (tiles * part / parts) * width);
        };
        auto const row = share(tiles_m, grid_m, w / grid_n, tuning::tile_rows, m);
        auto const row_end = share(tiles_m, grid_m, w / grid_n + 1, tuning::tile_rows, m);
        auto const column = share(tiles_n, grid_n, w % grid_n, tuning::tile_columns, n);
        auto const column_end = share(tiles_n, grid_n, w % grid_n + 1, tuning::tile_columns, n);
        if (row == row_end || column == column_end) continue;
        auto const part = c.slice(0, row, row_end).slice(1, column, column_end);
        auto const left_part = a.slice(0, row, row_end);
        auto const right_part = b.slice(1, column, column_end);
        if constexpr (!std::same_as<C, float>)
          if (keeps_sums) {
            multiply_in_float(buffers.of(w), part, left_part, right_part, accumulate);
            continue;
          }
        multiply_block(buffers.of(w), part, left_part, right_part, accumulate);
      }
    });
  }

private:
  /// Up to here (a decoder's next token), panels of b would be used too seldom to pay for packing them.
  static constexpr index_t few_rows = 2;

  /// Dot products of rows of a with columns of b, both as they lie in memory: b is read once.
  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void multiply_few_rows(Ex& ex, view<C, 2> c, view<A const, 2> a, view<B const, 2> b,
                                bool accumulate) {
    auto const depth = a.extent(1);
    for_rows(ex, c.extent(1), depth, [&](index_t column) {
      auto const* right = b.data() + column * b.stride(1);
      for (index_t row = 0; row < c.extent(0); ++row) {
        auto const* left = a.data() + row * a.stride(0);
        auto const dot =
            sum(depth, [left, right](index_t k) { return widened(left[k]) * widened(right[k]); });
        c(row, column) = C((accumulate ? widened(c(row, column)) : 0.0f) + dot);
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Block sizes, and rounding to them. Rows of a block are whole tiles and its columns whole panels, so that
/// tiles never hang over; what lies beyond the last query or key is never read as a result.
struct attention_blocks {
  static constexpr index_t tile_rows = product_tuning::tile_rows, panel = product_tuning::tile_columns;
  static constexpr index_t queries = 96, keys = 96;
  static_assert(queries % tile_rows == 0 && keys % tile_rows == 0 && keys % panel == 0);

  static constexpr index_t up(index_t count, index_t unit) noexcept {
    return (count + unit - 1) / unit * unit;
  }
};

/// Cuts one piece of memory into arrays.
class float_pieces {
public:
  explicit float_pieces(float* memory) noexcept : next_(memory) {}
  float* take(index_t count) noexcept {
    auto* piece = next_;
    next_ += attention_blocks::up(count, 16);
    return piece;
  }

private:
  float* next_;
};

template <storage_scalar T>
class attention_forward : attention_blocks {
public:
  static index_t floats(detail::attention_shape const& s) noexcept {
    auto const width = up(s.width, panel);
    return up(s.keys, panel) * s.width + width * s.keys + queries * s.width + tile_rows * keys +
           queries * (width + 2) + 6 * 16;
  }

  attention_forward(float* memory, detail::attention_shape const& shape, view<T const, 2> k,
                    view<T const, 2> v) noexcept
      : shape_(shape), width_(up(shape.width, panel)) {
    float_pieces pieces(memory);
    k_ = pieces.take(up(shape.keys, panel) * shape.width);
    v_ = pieces.take(width_ * shape.keys);
    q_ = pieces.take(queries * shape.width);
    score_ = pieces.take(tile_rows * keys);
    out_ = pieces.take(queries * width_);
    maximum_ = pieces.take(queries);
    sum_ = pieces.take(queries);
    pack_panels<panel>(k_, k.data(), k.stride(0), 1, shape.keys, shape.width);
    pack_panels<panel>(v_, v.data(), 1, v.stride(0), shape.width, shape.keys);
  }

  /// One query head.
  void run(view<T, 2> out, float* log_sum_exp, view<T const, 2> q) noexcept {
    for (index_t first = 0; first < shape_.queries; first += queries) {
      auto const rows = std::min(queries, shape_.queries - first);
      for (index_t i = 0; i < rows; ++i) {
        auto* row = q_ + i * shape_.width;
        to_float(row, &q(first + i, 0), shape_.width);
        for (index_t d = 0; d < shape_.width; ++d) row[d] *= shape_.scale;
      }
      std::fill_n(out_, up(rows, tile_rows) * width_, 0.0f);
      std::fill_n(maximum_, rows, -std::numeric_limits<float>::infinity());
      std::fill_n(sum_, rows, 0.0f);
      auto const visible = shape_.visible(first + rows - 1);
      for (index_t key = 0; key < visible; key += keys)
        for (index_t i = 0; i < rows; i += tile_rows) tile_of(first, i, rows, key);

      for (index_t i = 0; i < rows; ++i) {
        auto* row = out_ + i * width_;
        auto const factor = sum_[i] > 0 ? 1 / sum_[i] : 0.0f;
        for (index_t d = 0; d < shape_.width; ++d) row[d] *= factor;
        from_float(&out(first + i, 0), row, shape_.width);
        log_sum_exp[first + i] = maximum_[i] + std::log(sum_[i]);
      }
    }
  }

private:
  /// Queries i .. i + tile_rows of a block against the block of keys that begins at `key`.
  void tile_of(index_t first, index_t i, index_t rows, index_t key) noexcept {
    auto const end = std::min(i + tile_rows, rows);
    auto const seen = std::min(keys, shape_.visible(first + end - 1) - key);
    if (seen <= 0) return;
    for (index_t j = 0; j < seen; j += panel)
      multiply_tile<left::depth_adjacent>(score_ + j, keys, false, shape_.width, q_ + i * shape_.width,
                                          shape_.width, k_ + (key + j) * shape_.width);
    for (auto row = i; row < end; ++row) {
      auto* p = score_ + (row - i) * keys;
      auto const count = std::clamp<index_t>(shape_.visible(first + row) - key, 0, seen);
      for (auto j = count; j < seen; ++j) p[j] = 0;
      if (count == 0) continue;
      auto const top = std::max(maximum_[row], maximum(count, [p](index_t j) { return p[j]; }));
      TESSERA_SIMD()
      for (index_t j = 0; j < count; ++j) p[j] = elementary::exp(p[j] - top);
      auto const shrink = elementary::exp(maximum_[row] - top);
      sum_[row] = sum_[row] * shrink + sum(count, [p](index_t j) { return p[j]; });
      if (top > maximum_[row] && key > 0)
        for (index_t d = 0; d < width_; ++d) out_[row * width_ + d] *= shrink;
      maximum_[row] = top;
    }
    for (index_t d = 0; d < width_; d += panel)
      multiply_tile<left::depth_adjacent>(out_ + i * width_ + d, width_, true, seen, score_, keys,
                                          v_ + d * shape_.keys + key * panel);
  }

  detail::attention_shape shape_;
  index_t width_;                      ///< Filled up to whole panels.
  float *k_, *v_, *q_, *score_, *out_; ///< k_ in panels of keys, v_ in panels of its width.
  float *maximum_, *sum_;              ///< Of each query, so far.
};

template <storage_scalar T>
class attention_backward : attention_blocks {
public:
  static index_t floats(detail::attention_shape const& s) noexcept {
    auto const width = up(s.width, panel);
    return 2 * up(s.keys, panel) * s.width + width * s.keys + 2 * up(s.keys, keys) * width +
           2 * queries * s.width + 3 * queries * width + 2 * queries * keys + queries + 14 * 16;
  }

  attention_backward(float* memory, detail::attention_shape const& shape, view<T const, 2> k,
                     view<T const, 2> v) noexcept
      : shape_(shape), width_(up(shape.width, panel)) {
    float_pieces pieces(memory);
    k_by_key_ = pieces.take(up(shape.keys, panel) * shape.width);
    v_by_key_ = pieces.take(up(shape.keys, panel) * shape.width);
    k_by_width_ = pieces.take(width_ * shape.keys);
    dk_ = pieces.take(up(shape.keys, keys) * width_);
    dv_ = pieces.take(up(shape.keys, keys) * width_);
    q_ = pieces.take(queries * shape.width);
    d_out_ = pieces.take(queries * shape.width);
    q_panels_ = pieces.take(queries * width_);
    d_out_panels_ = pieces.take(queries * width_);
    dq_ = pieces.take(queries * width_);
    p_ = pieces.take(queries * keys);
    ds_ = pieces.take(queries * keys);
    delta_ = pieces.take(queries);
    pack_panels<panel>(k_by_key_, k.data(), k.stride(0), 1, shape.keys, shape.width);
    pack_panels<panel>(v_by_key_, v.data(), v.stride(0), 1, shape.keys, shape.width);
    pack_panels<panel>(k_by_width_, k.data(), 1, k.stride(0), shape.width, shape.keys);
    std::fill_n(dk_, up(shape.keys, keys) * width_, 0.0f);
    std::fill_n(dv_, up(shape.keys, keys) * width_, 0.0f);
  }

  /// One query head: writes dq and adds to the gradients of keys and values.
  void run(view<T, 2> dq, view<T const, 2> d_out, view<T const, 2> q, view<T const, 2> out,
           float const* log_sum_exp) noexcept {
    auto const width = shape_.width;
    for (index_t first = 0; first < shape_.queries; first += queries) {
      auto const rows = std::min(queries, shape_.queries - first);
      for (index_t i = 0; i < rows; ++i) {
        auto *scaled = q_ + i * width, *dy = d_out_ + i * width;
        to_float(scaled, &q(first + i, 0), width);
        for (index_t d = 0; d < width; ++d) scaled[d] *= shape_.scale;
        to_float(dy, &d_out(first + i, 0), width);
        auto const* y = &out(first + i, 0);
        delta_[i] = sum(width, [dy, y](index_t d) { return dy[d] * widened(y[d]); });
      }
      pack_panels<panel>(q_panels_, q_, 1, width, width, rows);
      pack_panels<panel>(d_out_panels_, d_out_, 1, width, width, rows);
      std::fill_n(dq_, up(rows, tile_rows) * width_, 0.0f);

      auto const visible = shape_.visible(first + rows - 1);
      for (index_t key = 0; key < visible; key += keys) {
        for (index_t i = 0; i < rows; i += tile_rows) query_tile(first, i, rows, key, log_sum_exp + first);
        for (index_t j = 0; j < std::min(keys, visible - key); j += tile_rows) key_tile(first, j, rows, key);
      }
      for (index_t i = 0; i < rows; ++i) {
        auto* row = dq_ + i * width_;
        for (index_t d = 0; d < width; ++d) row[d] *= shape_.scale;
        from_float(&dq(first + i, 0), row, width);
      }
    }
  }

  void finish(view<T, 2> dk, view<T, 2> dv) noexcept {
    for (index_t key = 0; key < shape_.keys; ++key) {
      from_float(&dk(key, 0), dk_ + key * width_, shape_.width);
      from_float(&dv(key, 0), dv_ + key * width_, shape_.width);
    }
  }

private:
  /// P and dS of a tile of queries against a block of keys, and the tile's part of dq.
  void query_tile(index_t first, index_t i, index_t rows, index_t key, float const* log_sum_exp) noexcept {
    auto const width = shape_.width;
    auto const end = std::min(i + tile_rows, rows);
    auto const seen = std::clamp<index_t>(shape_.visible(first + end - 1) - key, 0, keys);
    for (index_t j = 0; j < seen; j += panel) {
      multiply_tile<left::depth_adjacent>(p_ + i * keys + j, keys, false, width, q_ + i * width, width,
                                          k_by_key_ + (key + j) * width);
      multiply_tile<left::depth_adjacent>(ds_ + i * keys + j, keys, false, width, d_out_ + i * width, width,
                                          v_by_key_ + (key + j) * width);
    }
    for (auto row = i; row < end; ++row) {
      auto *p = p_ + row * keys, *ds = ds_ + row * keys;
      auto const count = std::clamp<index_t>(shape_.visible(first + row) - key, 0, seen);
      auto const total = log_sum_exp[row], delta = delta_[row];
      TESSERA_SIMD()
      for (index_t j = 0; j < count; ++j) {
        p[j] = elementary::exp(p[j] - total);
        ds[j] = p[j] * (ds[j] - delta);
      }
      std::fill(p + count, p + keys, 0.0f);
      std::fill(ds + count, ds + keys, 0.0f);
    }
    if (seen > 0)
      for (index_t d = 0; d < width_; d += panel)
        multiply_tile<left::depth_adjacent>(dq_ + i * width_ + d, width_, true, seen, ds_ + i * keys, keys,
                                            k_by_width_ + d * shape_.keys + key * panel);
  }

  /// What the block of queries adds to the gradients of keys key + j .. key + j + tile_rows.
  void key_tile(index_t first, index_t j, index_t rows, index_t key) noexcept {
    auto const blind = shape_.causal ? key + j - shape_.first_query - first : 0; // queries before these keys
    auto const from = std::clamp<index_t>(blind, 0, rows);
    for (index_t d = 0; d < width_; d += panel) {
      auto const at = (key + j) * width_ + d, panel_at = d * rows + from * panel;
      multiply_tile<left::rows_adjacent>(dv_ + at, width_, true, rows - from, p_ + from * keys + j, keys,
                                         d_out_panels_ + panel_at);
      multiply_tile<left::rows_adjacent>(dk_ + at, width_, true, rows - from, ds_ + from * keys + j, keys,
                                         q_panels_ + panel_at);
    }
  }

  detail::attention_shape shape_;
  index_t width_;                                       ///< Filled up to whole panels.
  float *k_by_key_, *v_by_key_, *k_by_width_;           ///< In panels of keys, and of the width.
  float *dk_, *dv_;                                     ///< Summed over queries, [keys, width_].
  float *q_, *d_out_, *q_panels_, *d_out_panels_, *dq_; ///< Of a block of queries.
  float *p_, *ds_, *delta_;
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct attention_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 4> out, view<float, 3> log_sum_exp, view<T const, 4> q,
                      view<T const, 4> k, view<T const, 4> v, detail::attention_shape const& shape) {
    using head = host_detail::attention_forward<T>;
    for_key_heads(ex, shape, head::floats(shape), [&](float* memory, index_t sample, index_t key_head) {
      head worker(memory, shape, head_of(k, sample, key_head), head_of(v, sample, key_head));
      auto const group = shape.heads / shape.key_heads;
      for (auto h = key_head * group; h < (key_head + 1) * group; ++h)
        worker.run(head_of(out, sample, h), log_sum_exp[sample][h].data(), head_of(q, sample, h));
    });
  }

  template <exec::host_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 4> dq, view<T, 4> dk, view<T, 4> dv, view<T const, 4> d_out,
                       view<T const, 4> q, view<T const, 4> k, view<T const, 4> v, view<T const, 4> out,
                       view<float const, 3> log_sum_exp, detail::attention_shape const& shape) {
    using head = host_detail::attention_backward<T>;
    for_key_heads(ex, shape, head::floats(shape), [&](float* memory, index_t sample, index_t key_head) {
      head worker(memory, shape, head_of(k, sample, key_head), head_of(v, sample, key_head));
      auto const group = shape.heads / shape.key_heads;
      for (auto h = key_head * group; h < (key_head + 1) * group; ++h)
        worker.run(head_of(dq, sample, h), head_of(d_out, sample, h), head_of(q, sample, h),
                   head_of(out, sample, h), log_sum_exp[sample][h].data());
      worker.finish(head_of(dk, sample, key_head), head_of(dv, sample, key_head));
    });
  }

private:
  /// The [tokens, width] matrix of one head.
  template <class T>
  static view<T, 2> head_of(view<T, 4> x, index_t sample, index_t head) {
    return {
        x.data() + sample * x.stride(0) + head * x.stride(2), {x.extent(1), x.extent(3)}, {x.stride(1), 1}};
  }

  /// Calls body(memory, sample, key_head) for each key head, with `floats` of memory of the worker's own.
  template <exec::host_space Ex, std::invocable<float*, index_t, index_t> Body>
  static void for_key_heads(Ex& ex, detail::attention_shape const& shape, index_t floats, Body&& body) {
    auto const heads = shape.batch * shape.key_heads;
    if (heads == 0 || shape.width == 0) return;
    auto const workers = std::min<index_t>(ex.threads(), heads);
    auto& buffers = ex.template handle<host_detail::product_buffers>();
    buffers.reserve(narrow<int>(workers), floats);
    ex.parallel_for(workers, 1, [&](index_t begin, index_t end) {
      for (auto w = begin; w < end; ++w)
        for (auto i = heads * w / workers; i < heads * (w + 1) / workers; ++i)
          body(buffers.of(w), i / shape.key_heads, i % shape.key_heads);
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Conversion between storage types, rounded to nearest, ties to even; between equal types a copy. Cost: one
/// read and one write an element.
///
///     ops::cast(ex, rounded.view(), exact.view());   // out first
#ifndef TESSERA_OPS_CAST_HPP
#define TESSERA_OPS_CAST_HPP

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: `run(ex, out, in)`.
template <class Backend>
struct cast_on;

/// Throws size_error where sizes differ or a view has gaps. Between equal types, out may be in.
template <exec::space Ex, storage_scalar To, class From>
  requires storage_scalar<std::remove_const_t<From>>
void cast(Ex& ex, view<To, 1, typename Ex::memory> out, view<From, 1, typename Ex::memory> in,
          site where = site::here()) {
  require_extents("cast", "out", out, in.extents(), where);
  require_contiguous("cast", "out", out, where);
  require_contiguous("cast", "in", in, where);
  cast_on<typename Ex::backend>::run(ex, out,
                                     view<std::remove_const_t<From> const, 1, typename Ex::memory>(in));
}

} // namespace tessera::inline TESSERA_ABI::ops

/// cast on the host: one vectorised pass.
#ifndef TESSERA_OPS_HOST_CAST_HPP
#define TESSERA_OPS_HOST_CAST_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct cast_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar To, storage_scalar From>
  static void run(Ex& ex, view<To, 1> out, view<From const, 1> in) {
    host_detail::for_elements(ex, in.size(), [y = out.data(), x = in.data()](index_t begin, index_t end) {
      if constexpr (std::same_as<To, From>) {
        for (auto i = begin; i < end; ++i) y[i] = x[i];
      } else {
        TESSERA_SIMD()
        for (auto i = begin; i < end; ++i) store(y[i], static_cast<float>(x[i]));
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Softmax cross-entropy over a vocabulary, forward and backward in one go: each row of logits is read while
/// it sits in cache and may be replaced by its gradient. Losses are a sum and a count; nothing is averaged.
///
///     auto loss = ops::cross_entropy(ex, logits, losses, targets, {.write_gradient = true});
///     loss.sum / loss.count;   // mean negative log likelihood in nats, once all parts are added up
///     ops::cross_entropy(ex, logits, losses, targets, {.totals = totals});   // totals += {sum, count}, no
///     wait
///
/// With p = softmax(x), t the target and s the label smoothing over V classes, a row's loss is
///     log(sum exp x) - (1 - s) x_t - s mean(x) + z_loss * log(sum exp x)^2,
/// and its gradient  p (1 + 2 z_loss log(sum exp x)) - (1 - s) [i = t] - s / V,  times gradient_scale.
///
/// Cost: the logits are read from memory once, and written once where the gradient is asked for.
#ifndef TESSERA_OPS_CROSS_ENTROPY_HPP
#define TESSERA_OPS_CROSS_ENTROPY_HPP

namespace tessera::inline TESSERA_ABI::ops {

/// A target that predicts nothing: the row's loss and gradient are zero and it is not counted.
inline constexpr std::int32_t ignore_index = -100;

template <memory_space M = host_memory>
struct cross_entropy_options {
  float label_smoothing = 0; ///< In [0, 1]: share of the target's probability spread evenly over all classes.
  float z_loss = 0;          ///< Weight of the squared log partition function (keeps logits small).
  float gradient_scale = 1;  ///< Factor on the gradient, not on the loss.
  bool write_gradient = false; ///< Replace the logits by their gradient.
  /// [2]: sum and count are added here where the space runs, and the call returns zeros: nobody waits for the
  /// device. Empty: the call waits for them and returns them.
  view<double, 1, M> totals = {};
};

struct sum_and_count {
  double sum = 0;   ///< Of the losses, in nats.
  double count = 0; ///< Of the rows that are not ignored.
};

/// What one row's softmax comes to.
struct softmax_row {
  float maximum = 0;
  float exponential_sum = 0; ///< Of exp(x - maximum).
  float log_sum = 0;         ///< log(sum exp x).
  float mean = 0;            ///< Of the logits; needed for label smoothing only.
};

template <memory_space M>
TESSERA_HOST_DEVICE float cross_entropy_loss(softmax_row row, float target_logit,
                                             cross_entropy_options<M> const& options) noexcept {
  return row.log_sum - (1.0f - options.label_smoothing) * target_logit - options.label_smoothing * row.mean +
         options.z_loss * row.log_sum * row.log_sum;
}

/// The gradient of a row's loss in logit x is exp(x - maximum) * slope - even, and `target` less at the
/// target.
struct cross_entropy_slope {
  float slope, even, target;

  template <memory_space M>
  TESSERA_HOST_DEVICE cross_entropy_slope(softmax_row row, index_t classes,
                                          cross_entropy_options<M> const& options) noexcept
      : slope(options.gradient_scale * (1.0f + 2.0f * options.z_loss * row.log_sum) / row.exponential_sum),
        even(options.gradient_scale * options.label_smoothing / static_cast<float>(classes)),
        target(options.gradient_scale * (1.0f - options.label_smoothing)) {}
};

/// One implementation a backend: `run(ex, logits, losses, targets, options, where)`.
template <class Backend>
struct cross_entropy_on;

/// logits [rows, V], losses [rows], targets [rows]; rows of logits may lie apart. Leaves each row's loss in
/// `losses` (0 where ignored) and, with .write_gradient, its gradient in `logits`. Throws size_error where
/// shapes differ, or where a target is neither in [0, V) nor ignore_index; config_error for impossible
/// options. A bad target is found before anything is written on the host, and by the device while it works
/// elsewhere: there that row's loss and gradient are NaN, and the next call that waits for the space throws.
template <exec::space Ex, storage_scalar T>
sum_and_count cross_entropy(Ex& ex, view<T, 2, typename Ex::memory> logits,
                            std::type_identity_t<view<float, 1, typename Ex::memory>> losses,
                            input<std::int32_t, 1, typename Ex::memory> targets,
                            cross_entropy_options<typename Ex::memory> options = {},
                            site where = site::here()) {
  require_dense_rows("cross_entropy", "logits", logits, where);
  require_extents("cross_entropy", "losses", losses, {logits.extent(0)}, where);
  require_extents("cross_entropy", "targets", targets, {logits.extent(0)}, where);
  require_contiguous("cross_entropy", "losses", losses, where);
  require_contiguous("cross_entropy", "targets", targets, where);
  require_extents_or_none("cross_entropy", "totals", options.totals, {2}, where);
  require_contiguous("cross_entropy", "totals", options.totals, where);
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1))
    throw config_error("E-ops-005", where, "cross_entropy: label_smoothing is ", options.label_smoothing,
                       ", must lie in [0, 1]");
  if (!(options.z_loss >= 0))
    throw config_error("E-ops-006", where, "cross_entropy: z_loss is ", options.z_loss,
                       ", must not be negative");
  return cross_entropy_on<typename Ex::backend>::run(ex, logits, losses, targets, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// cross_entropy on the host: a thread takes whole rows; a row goes through in pieces that fit the
/// first-level cache, with a running maximum (online softmax, Milakov and Gimelshein, 2018), and once more
/// for its gradient.
#ifndef TESSERA_OPS_HOST_CROSS_ENTROPY_HPP
#define TESSERA_OPS_HOST_CROSS_ENTROPY_HPP

#include <cmath>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct cross_entropy_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static sum_and_count run(Ex& ex, view<T, 2> logits, view<float, 1> losses,
                           view<std::int32_t const, 1> targets, cross_entropy_options<> const& options,
                           site where) {
    auto const rows = logits.extent(0), classes = logits.extent(1);
    for (index_t row = 0; row < rows; ++row)
      if (auto const target = targets(row); target != ignore_index && (target < 0 || target >= classes))
        throw size_error("E-ops-004", where, "cross_entropy: the target of row ", row, " is ", target,
                         ", must lie in [0, ", classes, ") or be ignore_index (", ignore_index, ")");

    host_detail::for_rows(ex, rows, classes, [&](index_t row) {
      auto* x = &logits(row, 0);
      auto const target = targets(row);
      if (target == ignore_index) {
        losses(row) = 0;
        if (options.write_gradient)
          for (index_t i = 0; i < classes; ++i) x[i] = T(0.0f);
        return;
      }
      auto const softmax = softmax_of(x, classes, options.label_smoothing > 0);
      auto const target_logit = static_cast<float>(x[target]);
      losses(row) = cross_entropy_loss(softmax, target_logit, options);
      if (!options.write_gradient) return;
      auto const g = cross_entropy_slope(softmax, classes, options);
      auto const maximum = softmax.maximum;
      TESSERA_SIMD()
      for (index_t i = 0; i < classes; ++i)
        store(x[i], elementary::exp(static_cast<float>(x[i]) - maximum) * g.slope - g.even);
      x[target] = T(elementary::exp(target_logit - maximum) * g.slope - g.even - g.target);
    });

    sum_and_count total;
    for (index_t row = 0; row < rows; ++row) {
      total.sum += losses(row);
      total.count += targets(row) != ignore_index ? 1 : 0;
    }
    if (options.totals.empty()) return total;
    options.totals(0) += total.sum;
    options.totals(1) += total.count;
    return {};
  }

private:
  template <storage_scalar T>
  static softmax_row softmax_of(T const* x, index_t classes, bool with_mean) {
    constexpr index_t piece = 2048;
    auto maximum = -0x1.fffffep+127f; // the lowest finite number: rows may begin with minus infinities
    auto exponentials = 0.0, logits = 0.0;
    for (index_t begin = 0; begin < classes; begin += piece) {
      auto const count = classes - begin < piece ? classes - begin : piece;
      auto const* part = x + begin;
      auto const higher = elementary::larger(
          maximum, host_detail::maximum(count, [&](index_t i) { return static_cast<float>(part[i]); }));
      exponentials *= elementary::exp(maximum - higher);
      maximum = higher;
      exponentials += host_detail::sum(
          count, [&](index_t i) { return elementary::exp(static_cast<float>(part[i]) - maximum); });
      if (with_mean)
        logits += host_detail::sum(count, [&](index_t i) { return static_cast<float>(part[i]); });
    }
    return {maximum, static_cast<float>(exponentials), static_cast<float>(maximum + std::log(exponentials)),
            static_cast<float>(logits / static_cast<double>(classes))};
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Dropout (Srivastava et al., 2014): each element is set to zero with the given probability, the others are
/// divided by the probability of staying.
///
///     ops::dropout(ex, out, in, {.probability = 0.1f, .seed = seed, .step = step, .layer = 3,
///                                .first_sample = first_sample, .rows_per_sample = sequence_length});
///     ops::dropout(ex, d_in, d_out, the_same);         // backward: the same mask
///     ops::dropout_add(ex, out, residual, in, the_same);   // residual + dropout(in)
///
/// The mask is a function of seed, step, layer, the sample's number within the step's global batch and the
/// element within the sample; it is never stored, and does not depend on how the batch is cut into
/// micro-batches and ranks, nor on what ran before. Cost: one read and one write an element.
#ifndef TESSERA_OPS_DROPOUT_HPP
#define TESSERA_OPS_DROPOUT_HPP

namespace tessera::inline TESSERA_ABI::ops {

struct dropout_options {
  float probability = 0;       ///< Of an element to be dropped, in [0, 1].
  std::uint64_t seed = 0;      ///< Of the run.
  std::uint64_t step = 0;      ///< Optimizer step, below 2^48.
  std::uint64_t layer = 0;     ///< Which dropout of the model, below 2^16.
  index_t first_sample = 0;    ///< Number of the first row's sample within the step's global batch.
  index_t rows_per_sample = 1; ///< Rows (tokens) of one sample.
};

/// The mask of a call. Element (row, column) has the index (first_sample * rows_per_sample + row) * width +
/// column.
struct dropout_mask {
  philox random;
  std::uint64_t first_index;
  float probability, scale;

  TESSERA_HOST_DEVICE dropout_mask(dropout_options const& options, index_t width) noexcept
      : random(options.seed, (options.layer << 48 ^ options.step) ^ 0x64726f706f757421u),
        first_index(static_cast<std::uint64_t>(options.first_sample * options.rows_per_sample * width)),
        probability(options.probability), scale(1.0f / (1.0f - options.probability)) {}

  /// x scaled, or zero: `bits` are those of the element, random.bits(first_index + its place in the call).
  [[gnu::always_inline]] TESSERA_HOST_DEVICE float apply(float x, std::uint32_t bits) const noexcept {
    return elementary::select(philox::unit_interval(bits) < probability, 0.0f, x * scale);
  }
};

/// One implementation a backend: `run(ex, out, residual, in, mask)` over flat views; residual may be empty.
template <class Backend>
struct dropout_on;

namespace detail {

template <exec::space Ex, storage_scalar T>
void dropout(char const* name, Ex& ex, view<T, 2, typename Ex::memory> out,
             view<T const, 2, typename Ex::memory> residual, view<T const, 2, typename Ex::memory> in,
             dropout_options const& options, site where) {
  require_extents(name, "out", out, in.extents(), where);
  require_extents_or_none(name, "residual", residual, in.extents(), where);
  require_contiguous(name, "out", out, where);
  require_contiguous(name, "residual", residual, where);
  require_contiguous(name, "in", in, where);
  if (!(options.probability >= 0 && options.probability <= 1))
    throw config_error("E-ops-012", where, name, ": probability is ", options.probability,
                       ", must lie in [0, 1]");
  if (options.first_sample < 0 || options.rows_per_sample < 1 || options.step >> 48 != 0 ||
      options.layer >> 16 != 0)
    throw size_error("E-ops-013", where, name, ": first_sample ", options.first_sample,
                     " must not be negative, rows_per_sample ", options.rows_per_sample,
                     " must be positive, step ", options.step, " below 2^48 and layer ", options.layer,
                     " below 2^16");
  dropout_on<typename Ex::backend>::run(ex, out, residual, in, dropout_mask(options, in.extent(1)));
}

} // namespace detail

/// out = dropout(in), [rows, width], contiguous; out may be in. Throws size_error, or config_error for an
/// impossible probability.
template <exec::space Ex, storage_scalar T>
void dropout(Ex& ex, view<T, 2, typename Ex::memory> out, input<T, 2, typename Ex::memory> in,
             dropout_options const& options, site where = site::here()) {
  detail::dropout("dropout", ex, out, view<T const, 2, typename Ex::memory>{}, in, options, where);
}

/// out = residual + dropout(in); out may be either input.
template <exec::space Ex, storage_scalar T>
void dropout_add(Ex& ex, view<T, 2, typename Ex::memory> out, input<T, 2, typename Ex::memory> residual,
                 input<T, 2, typename Ex::memory> in, dropout_options const& options,
                 site where = site::here()) {
  require_extents("dropout_add", "residual", residual, in.extents(), where);
  detail::dropout("dropout_add", ex, out, residual, in, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// dropout on the host: random words for a block of elements at a time, several counters side by side in
/// vector registers, then one pass over the block.
#ifndef TESSERA_OPS_HOST_DROPOUT_HPP
#define TESSERA_OPS_HOST_DROPOUT_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct dropout_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 2> out, view<T const, 2> residual, view<T const, 2> in,
                  dropout_mask const& mask) {
    host_detail::for_elements(ex, in.size(), [&](index_t begin, index_t end) {
      for (; begin < end; begin += block) {
        auto const count = end - begin < block ? end - begin : block;
        auto const *x = in.data() + begin,
                   *r = residual.data() == nullptr ? nullptr : residual.data() + begin;
        auto* y = out.data() + begin;
        std::uint32_t words[block + 4];
        auto const index = mask.first_index + static_cast<std::uint64_t>(begin);
        if (mask.probability > 0) fill(words, mask.random, index / 4);
        auto const* bits = words + index % 4;
        if (mask.probability > 0 && r != nullptr) {
          TESSERA_SIMD()
          for (index_t i = 0; i < count; ++i)
            store(y[i], static_cast<float>(r[i]) + mask.apply(x[i], bits[i]));
        } else if (mask.probability > 0) {
          TESSERA_SIMD()
          for (index_t i = 0; i < count; ++i) store(y[i], mask.apply(x[i], bits[i]));
        } else if (r != nullptr) {
          TESSERA_SIMD()
          for (index_t i = 0; i < count; ++i)
            store(y[i], static_cast<float>(r[i]) + static_cast<float>(x[i]));
        } else {
          for (index_t i = 0; i < count; ++i) y[i] = x[i];
        }
      }
    });
  }

private:
  static constexpr index_t block = 256;

  /// The words of the counters first .. first + block / 4, the last of which only an unaligned block needs.
  static void fill(std::uint32_t (&words)[block + 4], philox random, std::uint64_t first) {
    TESSERA_SIMD()
    for (index_t q = 0; q < block / 4 + 1; ++q) {
      auto const four = random.words(first + static_cast<std::uint64_t>(q));
      for (int w = 0; w < 4; ++w) words[4 * q + w] = four.word[w];
    }
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Token embedding, with learned positions where there are any: out(b, t) = table(tokens(b, t)) +
/// positions(first_position + t).
///
///     ops::embedding(ex, out, tokens, table, positions);
///     ops::embedding_backward(ex, d_table, d_positions, d_out, tokens);
///
/// Cost: forward reads two rows and writes one for each token; backward reads each row of d_out once and
/// touches only the rows of d_table whose tokens occur (all of them where it overwrites). A token's rows are
/// added up in float, in the order of the tokens, before they are rounded to G: the same bits for any number
/// of threads.
#ifndef TESSERA_OPS_EMBEDDING_HPP
#define TESSERA_OPS_EMBEDDING_HPP

namespace tessera::inline TESSERA_ABI::ops {

struct embedding_options {
  index_t first_position = 0; ///< Position of tokens(:, 0); of the next token when decoding with a cache.
};

struct embedding_backward_options {
  bool accumulate_table = false;     ///< Add to d_table instead of overwriting it.
  bool accumulate_positions = false; ///< Add to d_positions instead of overwriting it.
  index_t first_position = 0;
};

namespace detail {

/// Positions [first, first + count) exist in a table of `rows` positions.
inline void require_positions(char const* operation, index_t first, index_t count, index_t rows, site where) {
  if (first < 0 || count > rows || first > rows - count)
    throw size_error("E-ops-010", where, operation, ": positions ", first, " to ", first, " + ", count,
                     " are asked for, there are ", rows);
}

} // namespace detail

/// One implementation a backend: `forward(ex, out, tokens, table, positions, first_position, where)`,
/// `backward(ex, d_table, d_positions, d_out, tokens, options, where)`.
template <class Backend>
struct embedding_on;

/// tokens [B, T], out [B * T, width], table [V, width], positions [P, width] or empty. Throws size_error
/// where shapes do not fit, where a position does not exist or where a token is outside [0, V).
template <exec::space Ex, storage_scalar T>
void embedding(Ex& ex, view<T, 2, typename Ex::memory> out,
               input<std::int32_t, 2, typename Ex::memory> tokens, input<T, 2, typename Ex::memory> table,
               input<T, 2, typename Ex::memory> positions, embedding_options options = {},
               site where = site::here()) {
  constexpr auto name = "embedding";
  require_rows(name, "out", out, {tokens.extent(0) * tokens.extent(1), table.extent(1)}, where);
  require_dense_rows(name, "tokens", tokens, where);
  require_dense_rows(name, "table", table, where);
  require_extents_or_none(name, "positions", positions, {positions.extent(0), table.extent(1)}, where);
  require_dense_rows(name, "positions", positions, where);
  if (positions.data() != nullptr)
    detail::require_positions(name, options.first_position, tokens.extent(1), positions.extent(0), where);
  embedding_on<typename Ex::backend>::forward(ex, out, tokens, table, positions, options.first_position,
                                              where);
}

/// d_out [B * T, width], tokens [B, T], d_table [V, width], d_positions [P, width] or empty.
template <exec::space Ex, storage_scalar G, class T>
  requires storage_scalar<std::remove_const_t<T>>
void embedding_backward(Ex& ex, view<G, 2, typename Ex::memory> d_table,
                        std::type_identity_t<view<G, 2, typename Ex::memory>> d_positions,
                        view<T, 2, typename Ex::memory> d_out,
                        input<std::int32_t, 2, typename Ex::memory> tokens,
                        embedding_backward_options options = {}, site where = site::here()) {
  constexpr auto name = "embedding_backward";
  require_rows(name, "d_out", d_out, {tokens.extent(0) * tokens.extent(1), d_table.extent(1)}, where);
  require_dense_rows(name, "tokens", tokens, where);
  require_dense_rows(name, "d_table", d_table, where);
  require_extents_or_none(name, "d_positions", d_positions, {d_positions.extent(0), d_table.extent(1)},
                          where);
  require_dense_rows(name, "d_positions", d_positions, where);
  if (d_positions.data() != nullptr)
    detail::require_positions(name, options.first_position, tokens.extent(1), d_positions.extent(0), where);
  embedding_on<typename Ex::backend>::backward(
      ex, d_table, d_positions, view<std::remove_const_t<T> const, 2, typename Ex::memory>(d_out), tokens,
      options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// embedding on the host. The backward sorts the token numbers (a counting sort), so that each row of the
/// table is summed in float and written once; the threads share the columns, which balances any distribution
/// of tokens.
#ifndef TESSERA_OPS_HOST_EMBEDDING_HPP
#define TESSERA_OPS_HOST_EMBEDDING_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct embedding_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 2> out, view<std::int32_t const, 2> tokens, view<T const, 2> table,
                      view<T const, 2> positions, index_t first_position, site where) {
    check("embedding", tokens, table.extent(0), where);
    auto const length = tokens.extent(1), width = table.extent(1);
    host_detail::for_rows(ex, out.extent(0), width, [=](index_t row) {
      auto const t = row % length;
      auto const* x = table.data() + tokens(row / length, t) * table.stride(0);
      auto* y = out.data() + row * out.stride(0);
      if (positions.data() == nullptr) {
        for (index_t i = 0; i < width; ++i) y[i] = x[i];
        return;
      }
      auto const* p = positions.data() + (first_position + t) * positions.stride(0);
      TESSERA_SIMD()
      for (index_t i = 0; i < width; ++i) store(y[i], static_cast<float>(x[i]) + static_cast<float>(p[i]));
    });
  }

  template <exec::host_space Ex, storage_scalar G, storage_scalar T>
  static void backward(Ex& ex, view<G, 2> d_table, view<G, 2> d_positions, view<T const, 2> d_out,
                       view<std::int32_t const, 2> tokens, embedding_backward_options const& options,
                       site where) {
    check("embedding_backward", tokens, d_table.extent(0), where);
    auto const rows = d_out.extent(0), length = tokens.extent(1), classes = d_table.extent(0),
               width = d_out.extent(1);

    // Rows sorted by token, in their own order within a token: those of token v are order[first[v], first[v +
    // 1]).
    auto* first = ex.template handle<exec::scratch<starts>>().template take<index_t>(classes + 2, where);
    auto* order = ex.template handle<exec::scratch<sorted>>().template take<index_t>(rows, where);
    for (index_t v = 0; v < classes + 2; ++v) first[v] = 0;
    for (index_t row = 0; row < rows; ++row) ++first[tokens(row / length, row % length) + 2];
    for (index_t v = 2; v < classes + 2; ++v) first[v] += first[v - 1];
    for (index_t row = 0; row < rows; ++row) order[first[tokens(row / length, row % length) + 1]++] = row;

    auto* sums = ex.template handle<exec::scratch<totals>>().template take<float>(width, where);
    constexpr index_t granule = 32; // columns: whole cache lines
    auto const granules = (width + granule - 1) / granule;
    ex.parallel_for(granules, host_detail::grain / (granule * (rows + 1)) + 1, [=](index_t from, index_t to) {
      auto const begin = from * granule, end = to * granule < width ? to * granule : width;
      auto const add_rows = [=](G* out, index_t count, bool accumulate, auto row_of) {
        if (count == 0 && accumulate) return;
        for (auto i = begin; i < end; ++i) sums[i] = accumulate ? static_cast<float>(out[i]) : 0.0f;
        for (index_t k = 0; k < count; ++k) {
          auto const* dy = d_out.data() + row_of(k) * d_out.stride(0);
          TESSERA_SIMD()
          for (auto i = begin; i < end; ++i) sums[i] += static_cast<float>(dy[i]);
        }
        TESSERA_SIMD()
        for (auto i = begin; i < end; ++i) store(out[i], sums[i]);
      };
      for (index_t v = 0; v < classes; ++v)
        add_rows(d_table.data() + v * d_table.stride(0), first[v + 1] - first[v], options.accumulate_table,
                 [=, start = order + first[v]](index_t k) { return start[k]; });
      if (d_positions.data() == nullptr) return;
      for (index_t p = 0; p < d_positions.extent(0); ++p) {
        auto const t = p - options.first_position;
        auto const inside = t >= 0 && t < length;
        add_rows(d_positions.data() + p * d_positions.stride(0), inside ? tokens.extent(0) : 0,
                 options.accumulate_positions, [=](index_t b) { return b * length + t; });
      }
    });
  }

private:
  struct starts {};
  struct sorted {};
  struct totals {};

  static void check(char const* operation, view<std::int32_t const, 2> tokens, index_t classes, site where) {
    for (index_t b = 0; b < tokens.extent(0); ++b)
      for (index_t t = 0; t < tokens.extent(1); ++t)
        if (auto const token = tokens(b, t); token < 0 || token >= classes)
          throw size_error("E-ops-011", where, operation, ": the token at (", b, ", ", t, ") is ", token,
                           ", must lie in [0, ", classes, ")");
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// The Gaussian error linear unit, x * P(normal <= x), exactly (erf) or by GPT-2's tanh formula (Hendrycks
/// and Gimpel, 2016).
///
///     ops::gelu(ex, out, in);
///     ops::gelu_backward(ex, d_in, d_out, in, {.form = ops::gelu_form::erf});
///
/// Element by element; the output may be the input's own memory. Cost: reads and writes each element once.
#ifndef TESSERA_OPS_GELU_HPP
#define TESSERA_OPS_GELU_HPP

namespace tessera::inline TESSERA_ABI::ops {

enum class gelu_form { tanh, erf };

struct gelu_options {
  gelu_form form = gelu_form::tanh;
};

/// gelu(x). The tanh form is written as x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3): the same
/// value, without the cancellation of 1 + tanh(u) for negative u.
template <gelu_form Form>
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float gelu_value(float x) noexcept {
  if constexpr (Form == gelu_form::tanh)
    return x * elementary::sigmoid(x * (1.59576912f + 0.0713548163f * (x * x)));
  else
    return x * (0.5f + 0.5f * elementary::erf(x * 0.707106781f));
}

/// d gelu(x) / dx.
template <gelu_form Form>
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float gelu_slope(float x) noexcept {
  // Beyond 12 the slope is 0 or 1; the bound keeps 0 * infinity out.
  x = elementary::smaller(elementary::larger(x, -12.0f), 12.0f);
  if constexpr (Form == gelu_form::tanh) {
    auto const s = elementary::sigmoid(x * (1.59576912f + 0.0713548163f * (x * x)));
    return s + x * s * (1.0f - s) * (1.59576912f + 0.214064449f * (x * x));
  } else {
    auto const density = 0.398942280f * elementary::exp(-0.5f * (x * x));
    return 0.5f + 0.5f * elementary::erf(x * 0.707106781f) + x * density;
  }
}

/// One implementation a backend: `forward(ex, out, in, form)`, `backward(ex, d_in, d_out, in, form)`.
template <class Backend>
struct gelu_on;

/// out = gelu(in). Throws size_error where extents differ or a view has gaps.
template <exec::space Ex, storage_scalar T>
void gelu(Ex& ex, view<T, 1, typename Ex::memory> out, input<T, 1, typename Ex::memory> in,
          gelu_options options = {}, site where = site::here()) {
  require_extents("gelu", "out", out, in.extents(), where);
  require_contiguous("gelu", "out", out, where);
  require_contiguous("gelu", "in", in, where);
  gelu_on<typename Ex::backend>::forward(ex, out, in, options.form);
}

/// d_in = d_out * gelu'(in); `in` is what the forward read. d_in may be d_out.
template <exec::space Ex, storage_scalar T>
void gelu_backward(Ex& ex, view<T, 1, typename Ex::memory> d_in, input<T, 1, typename Ex::memory> d_out,
                   input<T, 1, typename Ex::memory> in, gelu_options options = {},
                   site where = site::here()) {
  require_extents("gelu_backward", "d_in", d_in, in.extents(), where);
  require_extents("gelu_backward", "d_out", d_out, in.extents(), where);
  require_contiguous("gelu_backward", "d_in", d_in, where);
  require_contiguous("gelu_backward", "d_out", d_out, where);
  require_contiguous("gelu_backward", "in", in, where);
  gelu_on<typename Ex::backend>::backward(ex, d_in, d_out, in, options.form);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// gelu on the host: one vectorised pass.
#ifndef TESSERA_OPS_HOST_GELU_HPP
#define TESSERA_OPS_HOST_GELU_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct gelu_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 1> out, view<T const, 1> in, gelu_form form) {
    if (form == gelu_form::tanh)
      forward_as<gelu_form::tanh>(ex, out, in);
    else
      forward_as<gelu_form::erf>(ex, out, in);
  }

  template <exec::host_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 1> d_in, view<T const, 1> d_out, view<T const, 1> in, gelu_form form) {
    if (form == gelu_form::tanh)
      backward_as<gelu_form::tanh>(ex, d_in, d_out, in);
    else
      backward_as<gelu_form::erf>(ex, d_in, d_out, in);
  }

private:
  template <gelu_form Form, exec::host_space Ex, storage_scalar T>
  static void forward_as(Ex& ex, view<T, 1> out, view<T const, 1> in) {
    host_detail::for_elements(ex, in.size(), [y = out.data(), x = in.data()](index_t begin, index_t end) {
      TESSERA_SIMD()
      for (auto i = begin; i < end; ++i) store(y[i], gelu_value<Form>(x[i]));
    });
  }

  template <gelu_form Form, exec::host_space Ex, storage_scalar T>
  static void backward_as(Ex& ex, view<T, 1> d_in, view<T const, 1> d_out, view<T const, 1> in) {
    host_detail::for_elements(
        ex, in.size(), [dx = d_in.data(), dy = d_out.data(), x = in.data()](index_t begin, index_t end) {
          TESSERA_SIMD()
          for (auto i = begin; i < end; ++i) store(dx[i], static_cast<float>(dy[i]) * gelu_slope<Form>(x[i]));
        });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Layer normalisation (Ba, Kiros and Hinton, 2016) over the last dimension:
///     out = (x - mean(x)) / sqrt(variance(x) + epsilon) * gain + bias.
///
///     ops::layer_norm(ex, out, mean, reciprocal_deviation, in, gain, bias);
///     ops::residual_layer_norm(ex, out, sum, mean, reciprocal_deviation, a, b, gain, bias);
///     ops::layer_norm_backward(ex, d_in, d_gain, d_bias, d_out, in, mean, reciprocal_deviation, gain);
///
/// Rows may lie apart; out may be in, d_in may be d_out. Cost: forward reads and writes each element once
/// (with the residual: two reads, two writes), backward reads two and writes one. The gradients of gain and
/// bias are summed over fixed chunks of rows in order: the same bits for any number of threads.
#ifndef TESSERA_OPS_LAYER_NORM_HPP
#define TESSERA_OPS_LAYER_NORM_HPP

namespace tessera::inline TESSERA_ABI::ops {

struct norm_options {
  float epsilon = 1e-5f;
};

struct norm_backward_options {
  bool accumulate = false;       ///< Add to the gradients of the parameters instead of overwriting them.
  bool accumulate_input = false; ///< Add to d_in instead of overwriting it.
};

/// One implementation a backend: `forward(ex, out, sum, mean, reciprocal_deviation, a, b, gain, bias,
/// epsilon)` with sum and b empty where there is no residual, and `backward(ex, d_in, d_gain, d_bias, d_out,
/// in, mean, reciprocal_deviation, gain, options, where)`.
template <class Backend>
struct layer_norm_on;

/// in, out [rows, width]; mean and reciprocal_deviation [rows] are kept for the backward. Throws size_error.
template <exec::space Ex, storage_scalar T>
void layer_norm(Ex& ex, view<T, 2, typename Ex::memory> out,
                std::type_identity_t<view<float, 1, typename Ex::memory>> mean,
                std::type_identity_t<view<float, 1, typename Ex::memory>> reciprocal_deviation,
                input<T, 2, typename Ex::memory> in, input<T, 1, typename Ex::memory> gain,
                input<T, 1, typename Ex::memory> bias, norm_options options = {}, site where = site::here()) {
  constexpr auto name = "layer_norm";
  require_rows(name, "out", out, in.extents(), where);
  require_dense_rows(name, "in", in, where);
  require_rows(name, "mean", mean, {in.extent(0)}, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {in.extent(0)}, where);
  require_rows(name, "gain", gain, {in.extent(1)}, where);
  require_rows(name, "bias", bias, {in.extent(1)}, where);
  layer_norm_on<typename Ex::backend>::forward(
      ex, out, view<T, 2, typename Ex::memory>{}, mean, reciprocal_deviation, in,
      view<T const, 2, typename Ex::memory>{}, gain, bias, options.epsilon);
}

/// sum = a + b, out = layer_norm(sum), in one pass. `sum` may be the memory of a or b.
template <exec::space Ex, storage_scalar T>
void residual_layer_norm(Ex& ex, view<T, 2, typename Ex::memory> out,
                         std::type_identity_t<view<T, 2, typename Ex::memory>> sum,
                         std::type_identity_t<view<float, 1, typename Ex::memory>> mean,
                         std::type_identity_t<view<float, 1, typename Ex::memory>> reciprocal_deviation,
                         input<T, 2, typename Ex::memory> a, input<T, 2, typename Ex::memory> b,
                         input<T, 1, typename Ex::memory> gain, input<T, 1, typename Ex::memory> bias,
                         norm_options options = {}, site where = site::here()) {
  constexpr auto name = "residual_layer_norm";
  require_rows(name, "out", out, a.extents(), where);
  require_rows(name, "sum", sum, a.extents(), where);
  require_dense_rows(name, "a", a, where);
  require_rows(name, "b", b, a.extents(), where);
  require_rows(name, "mean", mean, {a.extent(0)}, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {a.extent(0)}, where);
  require_rows(name, "gain", gain, {a.extent(1)}, where);
  require_rows(name, "bias", bias, {a.extent(1)}, where);
  layer_norm_on<typename Ex::backend>::forward(ex, out, sum, mean, reciprocal_deviation, a, b, gain, bias,
                                               options.epsilon);
}

/// `in`, `mean` and `reciprocal_deviation` as the forward read and wrote them (for the residual form, in =
/// sum). d_in [rows, width], d_gain and d_bias [width].
template <exec::space Ex, storage_scalar T, storage_scalar G>
void layer_norm_backward(Ex& ex, view<T, 2, typename Ex::memory> d_in, view<G, 1, typename Ex::memory> d_gain,
                         std::type_identity_t<view<G, 1, typename Ex::memory>> d_bias,
                         input<T, 2, typename Ex::memory> d_out, input<T, 2, typename Ex::memory> in,
                         input<float, 1, typename Ex::memory> mean,
                         input<float, 1, typename Ex::memory> reciprocal_deviation,
                         input<T, 1, typename Ex::memory> gain, norm_backward_options options = {},
                         site where = site::here()) {
  constexpr auto name = "layer_norm_backward";
  require_rows(name, "d_in", d_in, in.extents(), where);
  require_rows(name, "d_gain", d_gain, {in.extent(1)}, where);
  require_rows(name, "d_bias", d_bias, {in.extent(1)}, where);
  require_rows(name, "d_out", d_out, in.extents(), where);
  require_dense_rows(name, "in", in, where);
  require_rows(name, "mean", mean, {in.extent(0)}, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {in.extent(0)}, where);
  require_rows(name, "gain", gain, {in.extent(1)}, where);
  layer_norm_on<typename Ex::backend>::backward(ex, d_in, d_gain, d_bias, d_out, in, mean,
                                                reciprocal_deviation, gain, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// layer_norm on the host: see detail/norm_rows.hpp.
#ifndef TESSERA_OPS_HOST_LAYER_NORM_HPP
#define TESSERA_OPS_HOST_LAYER_NORM_HPP

/// Layer norm and RMS norm on the host are one algorithm: a row is summed, centred (layer norm), scaled and
/// written while it sits in the first-level cache.
#ifndef TESSERA_OPS_HOST_DETAIL_NORM_ROWS_HPP
#define TESSERA_OPS_HOST_DETAIL_NORM_ROWS_HPP

#include <cmath>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Centred: subtract the mean and add a bias (layer norm). Otherwise `mean`, `bias` and `d_bias` are not
/// used.
template <bool Centred>
struct norm_rows {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 2> out, view<T, 2> sums, view<float, 1> mean, view<float, 1> deviation,
                      view<T const, 2> a, view<T const, 2> b, view<T const, 1> gain, view<T const, 1> bias,
                      float epsilon) {
    auto const width = a.extent(1);
    auto const share = 1.0f / static_cast<float>(width > 0 ? width : 1);
    auto const *g = gain.data(), *shift = bias.data();
    for_rows(ex, a.extent(0), width, [=](index_t row) {
      auto const* x = a.data() + row * a.stride(0);
      auto* y = out.data() + row * out.stride(0);
      if (sums.data() != nullptr) {
        auto const* addend = b.data() + row * b.stride(0);
        auto* s = sums.data() + row * sums.stride(0);
        TESSERA_SIMD()
        for (index_t i = 0; i < width; ++i)
          store(s[i], static_cast<float>(x[i]) + static_cast<float>(addend[i]));
        x = s;
      }
      auto centre = 0.0f;
      if constexpr (Centred) {
        centre = sum(width, [=](index_t i) { return static_cast<float>(x[i]); }) * share;
        mean(row) = centre;
      }
      auto const squares = sum(width, [=](index_t i) {
        auto const d = static_cast<float>(x[i]) - centre;
        return d * d;
      });
      auto const r = 1.0f / std::sqrt(squares * share + epsilon);
      deviation(row) = r;
      TESSERA_SIMD()
      for (index_t i = 0; i < width; ++i) {
        auto const scaled = (static_cast<float>(x[i]) - centre) * r * static_cast<float>(g[i]);
        if constexpr (Centred)
          store(y[i], scaled + static_cast<float>(shift[i]));
        else
          store(y[i], scaled);
      }
    });
  }

  /// With h = d_out * gain and n the normalised input:
  ///     d_in = (h - mean(h) - n mean(h n)) / deviation   (without mean(h) where not centred),
  ///     d_gain = sum over rows of d_out n,  d_bias = sum over rows of d_out.
  template <exec::host_space Ex, storage_scalar T, storage_scalar G>
  static void backward(Ex& ex, view<T, 2> d_in, view<G, 1> d_gain, view<G, 1> d_bias, view<T const, 2> d_out,
                       view<T const, 2> in, view<float const, 1> mean, view<float const, 1> deviation,
                       view<T const, 1> gain, bool accumulate, bool accumulate_input, site where) {
    auto const rows = in.extent(0), width = in.extent(1);
    auto const share = 1.0f / static_cast<float>(width > 0 ? width : 1);
    // Chunks depend on the row count alone; each has its own partial sums.
    auto const at_least = (rows + max_chunks - 1) / max_chunks;
    auto const chunk = at_least > min_chunk ? at_least : min_chunk;
    auto const chunks = (rows + chunk - 1) / chunk;
    constexpr index_t kinds = Centred ? 2 : 1;
    auto* partial =
        ex.template handle<exec::scratch<norm_rows>>().template take<float>(chunks * kinds * width, where);

    for_rows(ex, chunks, chunk * width, [=](index_t c) {
      auto* gains = partial + c * kinds * width;
      auto* biases = gains + (kinds - 1) * width;
      for (index_t i = 0; i < kinds * width; ++i) gains[i] = 0;
      auto const end = (c + 1) * chunk < rows ? (c + 1) * chunk : rows;
      for (auto row = c * chunk; row < end; ++row) {
        auto const* x = in.data() + row * in.stride(0);
        auto const* dy = d_out.data() + row * d_out.stride(0);
        auto const* g = gain.data();
        auto* dx = d_in.data() + row * d_in.stride(0);
        auto const r = deviation(row);
        auto centre = 0.0f;
        if constexpr (Centred) centre = mean(row);
        // Two sums one after the other: in one loop g++ 12 leaves them scalar, three times slower.
        auto const h_at = [=](index_t i) { return static_cast<float>(dy[i]) * static_cast<float>(g[i]); };
        auto h_mean = 0.0f;
        if constexpr (Centred) h_mean = sum(width, h_at) * share;
        auto const hn_mean =
            sum(width, [=](index_t i) { return h_at(i) * ((static_cast<float>(x[i]) - centre) * r); }) *
            share;
        auto const write = [=](auto old_value) {
          TESSERA_SIMD()
          for (index_t i = 0; i < width; ++i) {
            auto const d = static_cast<float>(dy[i]);
            auto const n = (static_cast<float>(x[i]) - centre) * r;
            gains[i] += d * n;
            if constexpr (Centred) biases[i] += d;
            store(dx[i], old_value(dx[i]) + (d * static_cast<float>(g[i]) - h_mean - n * hn_mean) * r);
          }
        };
        if (accumulate_input)
          write([](T old_value) { return static_cast<float>(old_value); });
        else
          write([](T) { return 0.0f; });
      }
    });

    add_partials(ex, d_gain, partial, chunks, kinds * width, accumulate);
    if constexpr (Centred) add_partials(ex, d_bias, partial + width, chunks, kinds * width, accumulate);
  }

private:
  static constexpr index_t min_chunk = 32, max_chunks = 256;

  template <exec::host_space Ex, storage_scalar G>
  static void add_partials(Ex& ex, view<G, 1> out, float const* partial, index_t chunks, index_t stride,
                           bool accumulate) {
    for_elements(ex, out.size(), [=, g = out.data()](index_t begin, index_t end) {
      float total[block];
      for (; begin < end; begin += block) {
        auto const count = end - begin < block ? end - begin : block;
        for (index_t i = 0; i < count; ++i) total[i] = accumulate ? static_cast<float>(g[begin + i]) : 0.0f;
        for (index_t c = 0; c < chunks; ++c)
          for (index_t i = 0; i < count; ++i) total[i] += partial[c * stride + begin + i];
        for (index_t i = 0; i < count; ++i) store(g[begin + i], total[i]);
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct layer_norm_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 2> out, view<T, 2> sum, view<float, 1> mean, view<float, 1> deviation,
                      view<T const, 2> a, view<T const, 2> b, view<T const, 1> gain, view<T const, 1> bias,
                      float epsilon) {
    host_detail::norm_rows<true>::forward(ex, out, sum, mean, deviation, a, b, gain, bias, epsilon);
  }

  template <exec::host_space Ex, storage_scalar T, storage_scalar G>
  static void backward(Ex& ex, view<T, 2> d_in, view<G, 1> d_gain, view<G, 1> d_bias, view<T const, 2> d_out,
                       view<T const, 2> in, view<float const, 1> mean, view<float const, 1> deviation,
                       view<T const, 1> gain, norm_backward_options options, site where) {
    host_detail::norm_rows<true>::backward(ex, d_in, d_gain, d_bias, d_out, in, mean, deviation, gain,
                                           options.accumulate, options.accumulate_input, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// A linear layer: out = activation(in weight^T + bias), with PyTorch's orientation of the weight, [out, in].
/// Bias and GELU are applied while the product's rows are still in cache.
///
///     ops::linear(ex, out, in, weight, bias);
///     ops::linear(ex, out, in, weight, bias, {.activation = activation::gelu_tanh, .pre_activation = pre});
///     ops::linear_backward(ex, linear_gradients<T, G>{d_in, d_weight, d_bias}, d_out, in, weight,
///                          {.activation = activation::gelu_tanh, .pre_activation = pre, .scratch = d_pre});
///
/// A layer whose input is the activation of another one can apply that activation's gradient too, while the
/// product's rows are at hand: d_in is then the gradient before the activation, which the other layer's
/// backward takes as the gradient of a plain output.
///
/// Cost: 2 m n k operations forward, 4 m n k backward.
#ifndef TESSERA_OPS_LINEAR_HPP
#define TESSERA_OPS_LINEAR_HPP

/// Matrix products: c = op(a) op(b), or c += op(a) op(b), where op may transpose. Sums are made in fp32
/// whatever the storage types are, and rounded once.
///
///     ops::matmul(ex, c, a, b);                            // c[m, n] = a[m, k] b[k, n]
///     ops::matmul(ex, c, a, b, {.transpose_b = true});     // c[m, n] = a[m, k] b[n, k]^T
///
/// Cost: 2 m n k operations; see exec::host for who does them there. On CUDA cuBLASLt does, one call for a
/// whole batch; operands of different types are first widened to fp32 in scratch memory.
#ifndef TESSERA_OPS_MATMUL_HPP
#define TESSERA_OPS_MATMUL_HPP

#include <utility>

namespace tessera::inline TESSERA_ABI::ops {

struct matmul_options {
  bool transpose_a = false; ///< a is given as [k, m].
  bool transpose_b = false; ///< b is given as [n, k].
  bool accumulate = false;  ///< Add to c instead of overwriting it.
};

/// What stands in an operand: a storage type, constant or not.
template <class T>
concept matrix_scalar = storage_scalar<std::remove_const_t<T>>;

/// The backends' products, over operands that are already transposed (their strides are swapped):
/// `run(ex, c, a, b, accumulate, where)` and, over views of rank 3, `run_batched` with the same arguments.
template <class Backend>
struct matmul_on;

namespace detail {

/// The matrix, or the batch of matrices, as the product reads it. Throws size_error where elements of a row
/// are not adjacent.
template <matrix_scalar T, int Rank, memory_space M>
view<T const, Rank, M> product_operand(view<T, Rank, M> given, bool transpose, char const* name, site where) {
  require_dense_rows("matmul", name, given, where);
  constexpr auto row = static_cast<std::size_t>(Rank - 2), column = row + 1;
  auto sizes = given.extents(), strides = given.strides();
  strides[column] = 1; // whatever it is where rows have one element
  if (transpose) {
    std::swap(sizes[row], sizes[column]);
    std::swap(strides[row], strides[column]);
  }
  return {given.data(), sizes, strides};
}

template <storage_scalar C, int Rank, memory_space M, matrix_scalar A, matrix_scalar B>
void check_product(view<C, Rank, M> c, view<A, Rank, M> a, view<B, Rank, M> b, site where) {
  constexpr auto row = Rank - 2, column = Rank - 1;
  require_dense_rows("matmul", "c", c, where);
  if (a.extent(row) != c.extent(row) || b.extent(column) != c.extent(column) ||
      a.extent(column) != b.extent(row))
    throw size_error("E-ops-101", where, "matmul: c is ", text_of(c.extents()), ", after transposition a is ",
                     text_of(a.extents()), " and b is ", text_of(b.extents()),
                     "; need c[m, n], a[m, k], b[k, n]");
}

} // namespace detail

/// c[m, n] (+)= op(a)[m, k] op(b)[k, n]. Rows may be further apart than their length; c overlaps neither a
/// nor b. Any mixture of storage types. Throws size_error for extents that do not fit (k = 0 gives zeros).
template <exec::space Ex, storage_scalar C, matrix_scalar A, matrix_scalar B>
void matmul(Ex& ex, view<C, 2, typename Ex::memory> c, view<A, 2, typename Ex::memory> a,
            view<B, 2, typename Ex::memory> b, matmul_options options = {}, site where = site::here()) {
  auto const left = detail::product_operand(a, options.transpose_a, "a", where);
  auto const right = detail::product_operand(b, options.transpose_b, "b", where);
  detail::check_product(c, left, right, where);
  if (!c.empty()) matmul_on<typename Ex::backend>::run(ex, c, left, right, options.accumulate, where);
}

/// The same for each index of the outermost dimension: c[i] (+)= op(a[i]) op(b[i]).
template <exec::space Ex, storage_scalar C, matrix_scalar A, matrix_scalar B>
void matmul_batched(Ex& ex, view<C, 3, typename Ex::memory> c, view<A, 3, typename Ex::memory> a,
                    view<B, 3, typename Ex::memory> b, matmul_options options = {},
                    site where = site::here()) {
  if (a.extent(0) != c.extent(0) || b.extent(0) != c.extent(0))
    throw size_error("E-ops-102", where, "matmul_batched: c has ", c.extent(0), " matrices, a ", a.extent(0),
                     ", b ", b.extent(0));
  if (c.extent(0) == 0) return;
  auto const left = detail::product_operand(a, options.transpose_a, "a", where);
  auto const right = detail::product_operand(b, options.transpose_b, "b", where);
  detail::check_product(c, left, right, where);
  if (!c.empty()) matmul_on<typename Ex::backend>::run_batched(ex, c, left, right, options.accumulate, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// The matrix product by oneDNN: the only file that includes dnnl.hpp, and where its versions 2 and 3 differ.
///
/// fp32 goes to dnnl_sgemm, which needs no compiled object and is as fast as the matmul primitive. bf16 goes
/// to matmul primitives, kept by shape, where the processor has bf16 matrix instructions; elsewhere, and for
/// fp16 and mixtures, to the portable product, which widens operands to fp32 as it packs them.
#ifndef TESSERA_OPS_HOST_DETAIL_ONEDNN_HPP
#define TESSERA_OPS_HOST_DETAIL_ONEDNN_HPP

#include <unordered_map>

#include <dnnl.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Gives oneDNN, which asks OpenMP, this many threads until the end of a scope. The setting belongs to the
/// calling thread, so that ranks that are threads do not disturb each other. (Without OpenMP on this side
/// oneDNN takes what OMP_NUM_THREADS says.)
class onednn_threads {
public:
#if defined(_OPENMP)
  explicit onednn_threads(int count) noexcept : held_(omp_get_max_threads()) {
    if (held_ != count) omp_set_num_threads(count);
  }
  ~onednn_threads() {
    omp_set_num_threads(held_);
  }

private:
  int held_;
#else
  explicit onednn_threads(int) noexcept {}
#endif
};

/// Calls f; an exception of oneDNN leaves as library_error.
template <std::invocable F>
decltype(auto) with_onednn(char const* what, F&& f) {
  try {
    return f();
  } catch (dnnl::error const& failure) {
    throw library_error("E-ops-105", site::here(), "oneDNN could not ", what, ": ", failure.message,
                        " (status ", static_cast<int>(failure.status), ")");
  }
}

/// One matrix as oneDNN sees it: element (i, j) at i * row + j * column, one of which is 1.
struct onednn_matrix {
  dnnl::memory::data_type type;
  index_t rows, columns, row, column;

  bool operator==(onednn_matrix const&) const = default;
  dnnl::memory::desc describe() const { return {{rows, columns}, type, dnnl::memory::dims{row, column}}; }
};

template <storage_scalar T>
onednn_matrix onednn_matrix_of(view<T const, 2> x) {
  auto const type = std::same_as<T, float> ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
  return {type, x.extent(0), x.extent(1), x.stride(0), x.stride(1)};
}

/// Compiled products of one execution space, by shape.
class onednn_products {
public:
  explicit onednn_products(memory_account account) : account_(account) {}

  /// Whether products of bf16 are fast: oneDNN would emulate them, or refuse, on lesser processors.
  bool native_bf16() const noexcept { return native_bf16_; }

  /// True once, for a notice to the user.
  bool first_widening() noexcept { return !std::exchange(widened_, true); }

  void run(int threads, void* c, void const* a, void const* b, onednn_matrix const& shape_c,
           onednn_matrix const& shape_a, onednn_matrix const& shape_b, bool accumulate) {
    with_onednn("multiply matrices", [&] {
      auto& product = find(threads, shape_c, shape_a, shape_b, accumulate);
      product.memory.at(DNNL_ARG_SRC).set_data_handle(const_cast<void*>(a)); // NOLINT: oneDNN only reads it
      product.memory.at(DNNL_ARG_WEIGHTS).set_data_handle(const_cast<void*>(b)); // NOLINT
      product.memory.at(DNNL_ARG_DST).set_data_handle(c);
      product.memory.at(DNNL_ARG_SCRATCHPAD).set_data_handle(scratchpad_.data());
      product.run.execute(stream_, product.memory);
      stream_.wait();
    });
  }

private:
  struct compiled {
    int threads;
    onednn_matrix c, a, b;
    bool accumulate;
    dnnl::matmul run;
    std::unordered_map<int, dnnl::memory> memory;
  };
  /// More shapes than any model has; a program that makes ever new ones starts over here.
  static constexpr std::size_t most = 512;

  compiled& find(int threads, onednn_matrix const& c, onednn_matrix const& a, onednn_matrix const& b,
                 bool accumulate) {
    for (auto& known : compiled_)
      if (known.c == c && known.a == a && known.b == b && known.accumulate == accumulate &&
          known.threads == threads)
        return known;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (accumulate) {
      dnnl::post_ops after;
      after.append_sum(1.0f);
      attributes.set_post_ops(after);
    }
#if DNNL_VERSION_MAJOR >= 3
    dnnl::matmul::primitive_desc const plan(engine_, a.describe(), b.describe(), c.describe(), attributes);
#else
    dnnl::matmul::primitive_desc const plan({a.describe(), b.describe(), c.describe()}, attributes, engine_);
#endif
    auto const without_data = [&](dnnl::memory::desc const& shape) {
      return dnnl::memory(shape, engine_, DNNL_MEMORY_NONE);
    };
    auto const scratch_bytes = static_cast<index_t>(plan.scratchpad_desc().get_size());
    if (scratchpad_.bytes() < scratch_bytes) scratchpad_ = buffer<>(scratch_bytes, account_);
    if (compiled_.size() == most) compiled_.clear();
    compiled_.push_back({threads,
                         c,
                         a,
                         b,
                         accumulate,
                         dnnl::matmul(plan),
                         {{DNNL_ARG_SRC, without_data(a.describe())},
                          {DNNL_ARG_WEIGHTS, without_data(b.describe())},
                          {DNNL_ARG_DST, without_data(c.describe())},
                          {DNNL_ARG_SCRATCHPAD, without_data(plan.scratchpad_desc())}}});
    return compiled_.back();
  }

  dnnl::engine engine_ = with_onednn("start", [] { return dnnl::engine(dnnl::engine::kind::cpu, 0); });
  dnnl::stream stream_ = with_onednn("start", [this] { return dnnl::stream(engine_); });
  bool native_bf16_ = (static_cast<unsigned>(dnnl_get_effective_cpu_isa()) & dnnl_cpu_isa_avx512_core_bf16) ==
                      dnnl_cpu_isa_avx512_core_bf16;
  bool widened_ = false;
  std::vector<compiled> compiled_;
  memory_account account_;
  buffer<> scratchpad_;
};

template <>
struct product_by<exec::onednn_product> {
  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run(Ex& ex, view<C, 2> c, view<A const, 2> a, view<B const, 2> b, bool accumulate) {
    using portable = product_by<exec::portable_product>;
    auto const regular = a.extent(1) > 0 && leading(c) > 0 && leading(a) > 0 && leading(b) > 0;
    if constexpr (std::same_as<C, float> && std::same_as<A, float> && std::same_as<B, float>) {
      if (regular && !slow_in_onednn(c, b)) return multiply(ex, c, a, b, accumulate);
    } else if constexpr (std::same_as<A, bf16> && std::same_as<B, bf16> && !std::same_as<C, fp16>) {
      auto& products = ex.template handle<onednn_products>();
      if (regular && products.native_bf16()) {
        onednn_threads const threads(ex.threads());
        return products.run(ex.threads(), c.data(), a.data(), b.data(), onednn_matrix_of<C>(c),
                            onednn_matrix_of<A>(a), onednn_matrix_of<B>(b), accumulate);
      }
      if (!products.native_bf16() && products.first_widening())
        ex.note("this processor has no bf16 matrix instructions: products of bf16 are computed in fp32");
    }
    portable::run(ex, c, a, b, accumulate);
  }

private:
  /// The distance between adjacent lines, or 0 where lines overlap, which oneDNN does not take.
  template <class T>
  static index_t leading(view<T, 2> x) {
    auto const rows_dense = x.stride(1) == 1;
    auto const lines = x.extent(rows_dense ? 0 : 1), length = x.extent(rows_dense ? 1 : 0);
    auto const stride = x.stride(rows_dense ? 0 : 1);
    if (stride >= length) return stride;
    return lines == 1 ? length : 0;
  }

  /// Rows of b that lie a multiple of 4 KiB apart fall into the same sets of the first cache, and dnnl_sgemm
  /// reads few rows of c's width from them in place: half its usual speed (measured with oneDNN 2.6 on AVX2).
  static bool slow_in_onednn(view<float, 2> c, view<float const, 2> b) {
    constexpr index_t page = 4096 / sizeof(float);
    return b.stride(1) == 1 && b.stride(0) % page == 0 && c.extent(0) < 1024;
  }

  template <exec::host_space Ex>
  static void multiply(Ex& ex, view<float, 2> c, view<float const, 2> a, view<float const, 2> b,
                       bool accumulate) {
    onednn_threads const threads(ex.threads());
    auto const transposed = [](view<float const, 2> x) { return x.stride(1) == 1 ? 'N' : 'T'; };
    auto const status =
        dnnl_sgemm(transposed(a), transposed(b), c.extent(0), c.extent(1), a.extent(1), 1.0f, a.data(),
                   leading(a), b.data(), leading(b), accumulate ? 1.0f : 0.0f, c.data(), leading(c));
    if (status != dnnl_success)
      throw library_error("E-ops-105", site::here(), "oneDNN could not multiply ", text_of(a.extents()),
                          " by ", text_of(b.extents()), " (status ", static_cast<int>(status), ")");
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
/// Matrix products on the host, by the policy of the execution space.
#ifndef TESSERA_OPS_HOST_MATMUL_HPP
#define TESSERA_OPS_HOST_MATMUL_HPP

#if defined(TESSERA_WITH_ONEDNN)
#endif

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct matmul_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run(Ex& ex, view<C, 2> c, view<A const, 2> a, view<B const, 2> b, bool accumulate,
                  site = site::here()) {
    host_detail::product_by<typename Ex::product>::run(ex, c, a, b, accumulate);
  }

  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run_batched(Ex& ex, view<C, 3> c, view<A const, 3> a, view<B const, 3> b, bool accumulate,
                          site where) {
    for (index_t i = 0; i < c.extent(0); ++i) run(ex, c[i], a[i], b[i], accumulate, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif

namespace tessera::inline TESSERA_ABI::ops {

enum class activation { none, gelu_tanh, gelu_erf };

template <storage_scalar T, memory_space M = host_memory>
struct linear_options {
  ops::activation activation = activation::none;
  /// [m, n]: receives in weight^T + bias, which the backward of an activation needs. Empty: not kept.
  view<T, 2, M> pre_activation = {};
};

/// Where the gradients go. Empty views are left out.
template <storage_scalar T, storage_scalar G, memory_space M = host_memory>
struct linear_gradients {
  view<T, 2, M> input = {};  ///< [m, k]
  view<G, 2, M> weight = {}; ///< [n, k]
  view<G, 1, M> bias = {};   ///< [n]
};

template <storage_scalar T, memory_space M = host_memory>
struct linear_backward_options {
  bool accumulate = false;       ///< Add to the gradients of weight and bias.
  bool accumulate_input = false; ///< Add to the gradient of the input.
  ops::activation activation = activation::none;
  view<T const, 2, M> pre_activation = {};             ///< [m, n]: what the forward kept.
  ops::activation input_activation = activation::none; ///< What `in` is the result of.
  view<T const, 2, M> input_pre_activation = {};       ///< [m, k]: what `in` is the activation of.
  /// [m, n]: receives the gradient before the activation. May be the memory of d_out. Without one the
  /// execution space keeps a buffer of this size from call to call.
  view<T, 2, M> scratch = {};
};

/// One implementation a backend: `forward(ex, out, in, weight, bias, options, where)`,
/// `backward(ex, gradients, d_out, in, weight, options, where)`.
template <class Backend>
struct linear_on;

namespace detail {

template <class T, memory_space M>
void require_bias(char const* argument, view<T, 1, M> bias, index_t columns, site where) {
  require_extents_or_none("linear", argument, bias, {columns}, where);
  require_contiguous("linear", argument, bias, where);
}

} // namespace detail

/// out[m, n] = activation(in[m, k] weight[n, k]^T + bias[n]); an empty bias adds nothing.
template <exec::space Ex, storage_scalar T>
void linear(Ex& ex, view<T, 2, typename Ex::memory> out, input<T, 2, typename Ex::memory> in,
            input<T, 2, typename Ex::memory> weight, input<T, 1, typename Ex::memory> bias,
            linear_options<T, typename Ex::memory> options = {}, site where = site::here()) {
  auto const m = in.extent(0), k = in.extent(1), n = weight.extent(0);
  require_rows("linear", "out", out, {m, n}, where);
  require_dense_rows("linear", "in", in, where);
  require_rows("linear", "weight", weight, {n, k}, where);
  detail::require_bias("bias", bias, n, where);
  if (options.pre_activation.data() != nullptr)
    require_rows("linear", "pre_activation", options.pre_activation, {m, n}, where);
  if (m > 0 && n > 0) linear_on<typename Ex::backend>::forward(ex, out, in, weight, bias, options, where);
}

/// The gradients of `linear`, given d_out[m, n], the gradient of its output. With an activation,
/// `pre_activation` is required and d_out is turned into the gradient before it first.
/// d_weight (+)= d_out^T in, d_bias (+)= column sums of d_out, d_in (+)= d_out weight; with an
/// input_activation d_in = d_out weight * the slope of that activation at input_pre_activation, and is not
/// added to (E-ops-106).
template <exec::space Ex, storage_scalar T, storage_scalar G>
void linear_backward(Ex& ex, linear_gradients<T, G, typename Ex::memory> gradients,
                     input<T, 2, typename Ex::memory> d_out, input<T, 2, typename Ex::memory> in,
                     input<T, 2, typename Ex::memory> weight,
                     linear_backward_options<T, typename Ex::memory> options = {},
                     site where = site::here()) {
  auto const m = in.extent(0), k = in.extent(1), n = weight.extent(0);
  require_rows("linear_backward", "d_out", d_out, {m, n}, where);
  require_dense_rows("linear_backward", "in", in, where);
  require_rows("linear_backward", "weight", weight, {n, k}, where);
  detail::require_bias("the gradient of bias", gradients.bias, n, where);
  if (gradients.input.data() != nullptr)
    require_rows("linear_backward", "the gradient of in", gradients.input, {m, k}, where);
  if (gradients.weight.data() != nullptr)
    require_rows("linear_backward", "the gradient of weight", gradients.weight, {n, k}, where);
  if (options.activation != activation::none)
    require_rows("linear_backward", "pre_activation", options.pre_activation, {m, n}, where);
  if (options.input_activation != activation::none) {
    require_rows("linear_backward", "input_pre_activation", options.input_pre_activation, {m, k}, where);
    if (options.accumulate_input)
      throw config_error("E-ops-106", where,
                         "linear_backward: accumulate_input and input_activation exclude each other: what is "
                         "added to would be gradients of different values");
  }
  if (options.scratch.data() != nullptr)
    require_rows("linear_backward", "scratch", options.scratch, {m, n}, where);
  linear_on<typename Ex::backend>::backward(ex, gradients, d_out, in, weight, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// linear on the host: the product by the space's policy over blocks of rows, and bias and activation on each
/// block while it is in cache.
#ifndef TESSERA_OPS_HOST_LINEAR_HPP
#define TESSERA_OPS_HOST_LINEAR_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct linear_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 2> out, view<T const, 2> in, view<T const, 2> weight,
                      view<T const, 1> bias, linear_options<T> const& options, site) {
    auto const m = out.extent(0), n = out.extent(1);
    auto const pre = options.pre_activation;
    view<T const, 2> const weight_t{weight.data(), {weight.extent(1), n}, {1, weight.stride(0)}};
    auto const plain = options.activation == activation::none;
    if (plain && bias.empty() && pre.empty())
      return matmul_on<exec::host_backend>::run(ex, out, in, weight_t, false);

    // Enough rows that reading the weight again for each block costs little, few enough to stay in cache.
    auto const block = block_rows(n);
    for (index_t row = 0; row < m; row += block) {
      auto const end = std::min(m, row + block);
      auto const part = out.slice(0, row, end);
      auto const sums = sums_of(ex, part);
      matmul_on<exec::host_backend>::run(ex, sums, in.slice(0, row, end), weight_t, false);
      auto const kept = pre.empty() ? pre : pre.slice(0, row, end);
      switch (options.activation) {
      case activation::none:
        finish(ex, part, kept, sums, bias, [](float x) { return x; });
        break;
      case activation::gelu_tanh:
        finish(ex, part, kept, sums, bias, [](float x) { return gelu_value<gelu_form::tanh>(x); });
        break;
      case activation::gelu_erf:
        finish(ex, part, kept, sums, bias, [](float x) { return gelu_value<gelu_form::erf>(x); });
        break;
      }
    }
  }

  template <exec::host_space Ex, storage_scalar T, storage_scalar G>
  static void backward(Ex& ex, linear_gradients<T, G> const& gradients, view<T const, 2> d_out,
                       view<T const, 2> in, view<T const, 2> weight,
                       linear_backward_options<T> const& options, site where) {
    auto const m = d_out.extent(0), n = d_out.extent(1);
    if (options.activation != activation::none) {
      auto d_pre = options.scratch;
      if (d_pre.data() == nullptr)
        d_pre = {ex.template handle<exec::scratch<linear_on>>().template take<T>(m * n, where), {m, n}};
      if (options.activation == activation::gelu_tanh)
        columns(ex, gradients.bias, options.accumulate, d_out, d_pre, options.pre_activation,
                [](float x) { return gelu_slope<gelu_form::tanh>(x); });
      else
        columns(ex, gradients.bias, options.accumulate, d_out, d_pre, options.pre_activation,
                [](float x) { return gelu_slope<gelu_form::erf>(x); });
      d_out = d_pre;
    } else if (!gradients.bias.empty()) {
      columns(ex, gradients.bias, options.accumulate, d_out, view<T, 2>{}, d_out, [](float) { return 1.0f; });
    }
    if (!gradients.weight.empty())
      matmul_on<exec::host_backend>::run(ex, gradients.weight,
                                         view<T const, 2>{d_out.data(), {n, m}, {1, d_out.stride(0)}}, in,
                                         options.accumulate);
    if (gradients.input.empty()) return;
    if (options.input_activation == activation::gelu_tanh)
      before_activation(ex, gradients.input, d_out, weight, options.input_pre_activation,
                        [](float x) { return gelu_slope<gelu_form::tanh>(x); });
    else if (options.input_activation == activation::gelu_erf)
      before_activation(ex, gradients.input, d_out, weight, options.input_pre_activation,
                        [](float x) { return gelu_slope<gelu_form::erf>(x); });
    else
      matmul_on<exec::host_backend>::run(ex, gradients.input, d_out, weight, options.accumulate_input);
  }

private:
  static constexpr index_t block_elements = index_t{1} << 20;
  struct block_sums;

  static index_t block_rows(index_t width) noexcept {
    return std::max<index_t>(256, block_elements / std::max<index_t>(1, width));
  }

  /// Where a block's fp32 sums go: the output itself, or scratch where the output has fewer bits, so that
  /// sum, bias and activation are rounded once.
  template <exec::host_space Ex, storage_scalar T>
  static view<float, 2> sums_of(Ex& ex, view<T, 2> out) {
    if constexpr (std::same_as<T, float>)
      return out;
    else
      return {ex.template handle<exec::scratch<block_sums>>().template take<float>(out.size(), site::here()),
              out.extents()};
  }

  /// kept = sums + bias, out = f(kept). `sums` may be `out`.
  template <exec::host_space Ex, storage_scalar T, class F>
  static void finish(Ex& ex, view<T, 2> out, view<T, 2> kept, view<float const, 2> sums,
                     view<T const, 1> bias, F f) {
    auto const n = out.extent(1);
    host_detail::for_rows(ex, out.extent(0), n, [&](index_t row) {
      auto const* sum = &sums(row, 0);
      auto* y = &out(row, 0);
      auto const* b = bias.data();
      auto const pass = [&](auto has_bias, auto keeps, T* pre) {
        TESSERA_SIMD()
        for (index_t i = 0; i < n; ++i) {
          auto value = sum[i];
          if constexpr (has_bias) value += host_detail::widened(b[i]);
          if constexpr (keeps) pre[i] = T(value);
          y[i] = T(f(host_detail::widened(T(value))));
        }
      };
      if (kept.empty())
        bias.empty() ? pass(std::false_type{}, std::false_type{}, nullptr)
                     : pass(std::true_type{}, std::false_type{}, nullptr);
      else
        bias.empty() ? pass(std::false_type{}, std::true_type{}, &kept(row, 0))
                     : pass(std::true_type{}, std::true_type{}, &kept(row, 0));
    });
  }

  /// d_in = d_out weight * slope(pre), block by block of rows.
  template <exec::host_space Ex, storage_scalar T, class Slope>
  static void before_activation(Ex& ex, view<T, 2> d_in, view<T const, 2> d_out, view<T const, 2> weight,
                                view<T const, 2> pre, Slope slope) {
    auto const m = d_in.extent(0), k = d_in.extent(1), block = block_rows(k);
    for (index_t row = 0; row < m; row += block) {
      auto const end = std::min(m, row + block);
      auto const part = d_in.slice(0, row, end);
      auto const sums = sums_of(ex, part);
      matmul_on<exec::host_backend>::run(ex, sums, d_out.slice(0, row, end), weight, false);
      host_detail::for_rows(ex, end - row, k, [&](index_t r) {
        auto const* sum = &sums(r, 0);
        auto const* x = &pre(row + r, 0);
        auto* dx = &part(r, 0);
        TESSERA_SIMD()
        for (index_t i = 0; i < k; ++i) dx[i] = T(sum[i] * slope(host_detail::widened(x[i])));
      });
    }
  }

  /// One pass over d_out: d_pre = d_out * slope(pre), and the sums of its columns into bias. Each column is
  /// added up by one thread, in chunks of rows.
  template <exec::host_space Ex, storage_scalar T, storage_scalar G, class Slope>
  static void columns(Ex& ex, view<G, 1> bias, bool accumulate, view<T const, 2> d_out, view<T, 2> d_pre,
                      view<T const, 2> pre, Slope slope) {
    constexpr index_t width = 256, chunk = 32;
    auto const m = d_out.extent(0), n = d_out.extent(1);
    auto const blocks = (n + width - 1) / width;
    ex.parallel_for(blocks, host_detail::grain / (m * width + 1) + 1, [&](index_t first, index_t last) {
      for (auto block = first; block < last; ++block) {
        auto const column = block * width;
        auto const count = std::min(width, n - column);
        float total[width] = {};
        for (index_t row = 0; row < m; row += chunk) {
          float part[width] = {};
          for (auto r = row; r < std::min(m, row + chunk); ++r) {
            auto const* dy = &d_out(r, column);
            if (d_pre.data() == nullptr) {
              for (index_t i = 0; i < count; ++i) part[i] += host_detail::widened(dy[i]);
            } else {
              auto const* x = &pre(r, column);
              auto* dx = &d_pre(r, column);
              TESSERA_SIMD()
              for (index_t i = 0; i < count; ++i) {
                auto const value = host_detail::widened(dy[i]) * slope(host_detail::widened(x[i]));
                dx[i] = T(value);
                part[i] += value;
              }
            }
          }
          for (index_t i = 0; i < count; ++i) total[i] += part[i];
        }
        for (index_t i = 0; i < count && !bias.empty(); ++i)
          bias(column + i) = G(total[i] + (accumulate ? float(bias(column + i)) : 0.0f));
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// The head of a language model: logits = in weight^T, softmax cross-entropy with the targets, and both
/// gradients, in one call. Logits exist for `chunk_rows` rows at a time only, and their gradient takes their
/// place, so memory does not grow with rows times vocabulary.
///
///     auto loss = ops::linear_cross_entropy(ex, {d_in, d_weight}, in, weight, targets, {}, memory);
///     auto loss = ops::linear_cross_entropy<T, T>(ex, {}, in, weight, targets, {}, memory);   // evaluation
///
/// Cost: 2 rows w V operations forward, 4 rows w V more with gradients; the weight is read once a chunk.
#ifndef TESSERA_OPS_LINEAR_CROSS_ENTROPY_HPP
#define TESSERA_OPS_LINEAR_CROSS_ENTROPY_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <memory_space M = host_memory>
struct linear_cross_entropy_options {
  float label_smoothing = 0;      ///< As in cross_entropy.
  float z_loss = 0;               ///< As in cross_entropy.
  float gradient_scale = 1;       ///< Factor on the gradient of the loss sum.
  bool accumulate = false;        ///< Add to d_weight instead of overwriting it.
  index_t chunk_rows = 0;         ///< Rows whose logits are held at once; 0 stands for 512 (device: 4096).
  view<double, 1, M> totals = {}; ///< As in cross_entropy.
};

/// Where the gradients go; both empty for an evaluation.
template <storage_scalar T, storage_scalar G, memory_space M = host_memory>
struct linear_cross_entropy_gradients {
  view<T, 2, M> input = {};  ///< [rows, w], overwritten.
  view<G, 2, M> weight = {}; ///< [V, w]
};

namespace detail {

/// A processor's caches want few rows, a device enough of them to be busy.
template <memory_space M>
constexpr index_t chunk_of(index_t rows, index_t chunk_rows) noexcept {
  auto const chunk = chunk_rows > 0 ? chunk_rows : index_t{M::host_accessible ? 512 : 4096};
  return rows < chunk ? rows : chunk;
}

/// Elements from row to row of the logits: each row begins at a boundary that products and 16-byte accesses
/// are fast on, whatever the vocabulary.
constexpr index_t padded_vocabulary(index_t vocabulary) noexcept {
  return (vocabulary + 63) / 64 * 64;
}

} // namespace detail

/// Bytes that the call below takes from the arena, and gives back.
template <storage_scalar T, memory_space M = host_memory>
constexpr index_t linear_cross_entropy_scratch_bytes(index_t rows, index_t vocabulary,
                                                     index_t chunk_rows = 0) noexcept {
  auto const chunk = detail::chunk_of<M>(rows, chunk_rows);
  return arena<M>::template bytes_for<T>(chunk * detail::padded_vocabulary(vocabulary)) +
         arena<M>::template bytes_for<float>(chunk);
}

/// The summed loss of in[rows, w] weight[V, w]^T against targets[rows] (`ignore_index`: no loss, no gradient)
/// and the number of counted rows; the gradients of the sum times gradient_scale where views are given.
/// Throws size_error for extents that do not fit or a target outside [0, V) (on a device later, as
/// cross_entropy does).
template <exec::space Ex, storage_scalar T, storage_scalar G>
sum_and_count
linear_cross_entropy(Ex& ex, linear_cross_entropy_gradients<T, G, typename Ex::memory> gradients,
                     input<T, 2, typename Ex::memory> in, input<T, 2, typename Ex::memory> weight,
                     input<std::int32_t, 1, typename Ex::memory> targets,
                     linear_cross_entropy_options<typename Ex::memory> options,
                     arena<typename Ex::memory>& memory, site where = site::here()) {
  auto const rows = in.extent(0), width = in.extent(1), vocabulary = weight.extent(0);
  auto const wants_input = gradients.input.data() != nullptr;
  auto const wants_weight = gradients.weight.data() != nullptr;
  require_rows("linear_cross_entropy", "weight", weight, {vocabulary, width}, where);
  require_extents("linear_cross_entropy", "targets", targets, {rows}, where);
  require_extents_or_none("linear_cross_entropy", "the gradient of in", gradients.input, in.extents(), where);
  require_extents_or_none("linear_cross_entropy", "the gradient of weight", gradients.weight,
                          weight.extents(), where);

  arena_scope const scope(memory);
  auto const chunk = detail::chunk_of<typename Ex::memory>(rows, options.chunk_rows);
  auto const logits = memory.template take<T, 2>({chunk, detail::padded_vocabulary(vocabulary)}, where)
                          .slice(1, 0, vocabulary);
  auto const losses = memory.template take<float, 1>({chunk}, where);
  if (rows == 0 && wants_weight && !options.accumulate)
    matmul(ex, gradients.weight, logits, in, {.transpose_a = true}, where);

  sum_and_count total{};
  for (index_t row = 0; row < rows; row += chunk) {
    auto const end = row + chunk < rows ? row + chunk : rows;
    auto const part = in.slice(0, row, end);
    auto const part_logits = logits.slice(0, 0, end - row);
    matmul(ex, part_logits, part, weight, {.transpose_b = true}, where);
    auto const loss =
        cross_entropy(ex, part_logits, losses.slice(0, 0, end - row), targets.slice(0, row, end),
                      {.label_smoothing = options.label_smoothing,
                       .z_loss = options.z_loss,
                       .gradient_scale = options.gradient_scale,
                       .write_gradient = wants_input || wants_weight,
                       .totals = options.totals},
                      where);
    total.sum += loss.sum;
    total.count += loss.count;
    if (wants_input) matmul(ex, gradients.input.slice(0, row, end), part_logits, weight, {}, where);
    if (wants_weight)
      matmul(ex, gradients.weight, part_logits, part,
             {.transpose_a = true, .accumulate = options.accumulate || row > 0}, where);
  }
  return total;
}

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// Normal random numbers by index (core/philox.hpp): out[i] = mean + deviation * normal number first + i of
/// the stream. The same whoever asks, in whatever pieces: how parameters start.
///
///     ops::random_normal(ex, out, {.deviation = 0.02f, .seed = seed, .stream = stream, .first = begin});
///
/// On a device the double-precision functions behind it may differ from the host's in the last place, so that
/// a few of the numbers do once rounded. Cost: one write an element, and some hundred operations.
#ifndef TESSERA_OPS_RANDOM_NORMAL_HPP
#define TESSERA_OPS_RANDOM_NORMAL_HPP

namespace tessera::inline TESSERA_ABI::ops {

struct random_normal_options {
  float mean = 0;
  float deviation = 1; ///< 0: every element is the mean.
  std::uint64_t seed = 0;
  std::uint64_t stream = 0; ///< Numbers of different streams have nothing to do with one another.
  index_t first = 0;        ///< The index of out[0] in the stream.
};

/// One implementation a backend: `run(ex, out, options)`.
template <class Backend>
struct random_normal_on;

/// Throws size_error where the view has gaps.
template <exec::space Ex, storage_scalar T>
void random_normal(Ex& ex, view<T, 1, typename Ex::memory> out, random_normal_options const& options,
                   site where = site::here()) {
  require_contiguous("random_normal", "out", out, where);
  random_normal_on<typename Ex::backend>::run(ex, out, options);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// random_normal on the host: shared among the threads, one number after the other.
#ifndef TESSERA_OPS_HOST_RANDOM_NORMAL_HPP
#define TESSERA_OPS_HOST_RANDOM_NORMAL_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct random_normal_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 1> out, random_normal_options const& options) {
    ex.parallel_for(out.size(), 1024, [&, y = out.data()](index_t begin, index_t end) {
      philox const random(options.seed, options.stream);
      for (auto i = begin; i < end; ++i)
        y[i] = T(options.deviation == 0
                     ? options.mean
                     : options.mean +
                           options.deviation * random.normal(static_cast<std::uint64_t>(options.first + i)));
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Sums over all elements of a flat view, in double, over fixed chunks added in order: the same bits for any
/// number of threads. Cost: each element is read once.
///
///     double norm = std::sqrt(ops::sum_of_squares(ex, gradients));
///     if (!ops::all_finite(ex, gradients)) ...
#ifndef TESSERA_OPS_REDUCE_HPP
#define TESSERA_OPS_REDUCE_HPP

namespace tessera::inline TESSERA_ABI::ops {

/// What each element adds.
struct value_term {
  [[gnu::always_inline]] TESSERA_HOST_DEVICE double operator()(float x) const noexcept { return x; }
};
struct square_term {
  [[gnu::always_inline]] TESSERA_HOST_DEVICE double operator()(float x) const noexcept {
    return static_cast<double>(x) * static_cast<double>(x);
  }
};
/// 1 for an infinity or NaN, else 0.
struct not_finite_term {
  [[gnu::always_inline]] TESSERA_HOST_DEVICE double operator()(float x) const noexcept {
    return static_cast<double>((std::bit_cast<std::uint32_t>(x) & 0x7f800000u) == 0x7f800000u);
  }
};

/// One implementation a backend: `sum(ex, in, term, where) -> double`.
template <class Backend>
struct reduce_on;

namespace detail {

template <class Term, exec::space Ex, class T>
double reduce(char const* name, Ex& ex, view<T, 1, typename Ex::memory> in, site where) {
  require_contiguous(name, "in", in, where);
  return reduce_on<typename Ex::backend>::sum(
      ex, view<std::remove_const_t<T> const, 1, typename Ex::memory>(in), Term{}, where);
}

} // namespace detail

/// Throws size_error where the view has gaps, as do the others.
template <exec::space Ex, class T>
  requires storage_scalar<std::remove_const_t<T>>
double sum(Ex& ex, view<T, 1, typename Ex::memory> in, site where = site::here()) {
  return detail::reduce<value_term>("sum", ex, in, where);
}

template <exec::space Ex, class T>
  requires storage_scalar<std::remove_const_t<T>>
double sum_of_squares(Ex& ex, view<T, 1, typename Ex::memory> in, site where = site::here()) {
  return detail::reduce<square_term>("sum_of_squares", ex, in, where);
}

/// True where no element is an infinity or NaN.
template <exec::space Ex, class T>
  requires storage_scalar<std::remove_const_t<T>>
bool all_finite(Ex& ex, view<T, 1, typename Ex::memory> in, site where = site::here()) {
  return detail::reduce<not_finite_term>("all_finite", ex, in, where) == 0;
}

} // namespace tessera::inline TESSERA_ABI::ops

/// Sums on the host: chunks in parallel, their results in order.
#ifndef TESSERA_OPS_HOST_REDUCE_HPP
#define TESSERA_OPS_HOST_REDUCE_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct reduce_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T, class Term>
  static double sum(Ex& ex, view<T const, 1> in, Term term, site where) {
    constexpr index_t chunk = 16384;
    auto const count = in.size(), chunks = (count + chunk - 1) / chunk;
    auto* partial = ex.template handle<exec::scratch<reduce_on>>().template take<double>(chunks, where);
    host_detail::for_rows(ex, chunks, chunk, [=, x = in.data()](index_t c) {
      auto const* part = x + c * chunk;
      auto const n = count - c * chunk < chunk ? count - c * chunk : chunk;
      partial[c] = host_detail::sum<double>(n, [=](index_t i) { return term(part[i]); });
    });
    auto total = 0.0;
    for (index_t c = 0; c < chunks; ++c) total += partial[c];
    return total;
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Root mean square normalisation (Zhang and Sennrich, 2019) over the last dimension:
///     out = x / sqrt(mean(x^2) + epsilon) * gain.
///
///     ops::rms_norm(ex, out, reciprocal_deviation, in, gain);
///     ops::residual_rms_norm(ex, out, sum, reciprocal_deviation, a, b, gain);
///     ops::rms_norm_backward(ex, d_in, d_gain, d_out, in, reciprocal_deviation, gain);
///
/// What holds for ops/layer_norm.hpp (rows, aliases, cost, determinism) holds here.
#ifndef TESSERA_OPS_RMS_NORM_HPP
#define TESSERA_OPS_RMS_NORM_HPP

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: as layer_norm_on, without mean and bias.
template <class Backend>
struct rms_norm_on;

/// in, out [rows, width]; reciprocal_deviation [rows] is kept for the backward. Throws size_error.
template <exec::space Ex, storage_scalar T>
void rms_norm(Ex& ex, view<T, 2, typename Ex::memory> out,
              std::type_identity_t<view<float, 1, typename Ex::memory>> reciprocal_deviation,
              input<T, 2, typename Ex::memory> in, input<T, 1, typename Ex::memory> gain,
              norm_options options = {}, site where = site::here()) {
  constexpr auto name = "rms_norm";
  require_rows(name, "out", out, in.extents(), where);
  require_dense_rows(name, "in", in, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {in.extent(0)}, where);
  require_rows(name, "gain", gain, {in.extent(1)}, where);
  rms_norm_on<typename Ex::backend>::forward(ex, out, view<T, 2, typename Ex::memory>{}, reciprocal_deviation,
                                             in, view<T const, 2, typename Ex::memory>{}, gain,
                                             options.epsilon);
}

/// sum = a + b, out = rms_norm(sum), in one pass. `sum` may be the memory of a or b.
template <exec::space Ex, storage_scalar T>
void residual_rms_norm(Ex& ex, view<T, 2, typename Ex::memory> out,
                       std::type_identity_t<view<T, 2, typename Ex::memory>> sum,
                       std::type_identity_t<view<float, 1, typename Ex::memory>> reciprocal_deviation,
                       input<T, 2, typename Ex::memory> a, input<T, 2, typename Ex::memory> b,
                       input<T, 1, typename Ex::memory> gain, norm_options options = {},
                       site where = site::here()) {
  constexpr auto name = "residual_rms_norm";
  require_rows(name, "out", out, a.extents(), where);
  require_rows(name, "sum", sum, a.extents(), where);
  require_dense_rows(name, "a", a, where);
  require_rows(name, "b", b, a.extents(), where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {a.extent(0)}, where);
  require_rows(name, "gain", gain, {a.extent(1)}, where);
  rms_norm_on<typename Ex::backend>::forward(ex, out, sum, reciprocal_deviation, a, b, gain, options.epsilon);
}

/// `in` and `reciprocal_deviation` as the forward read and wrote them (for the residual form, in = sum).
template <exec::space Ex, storage_scalar T, storage_scalar G>
void rms_norm_backward(Ex& ex, view<T, 2, typename Ex::memory> d_in, view<G, 1, typename Ex::memory> d_gain,
                       input<T, 2, typename Ex::memory> d_out, input<T, 2, typename Ex::memory> in,
                       input<float, 1, typename Ex::memory> reciprocal_deviation,
                       input<T, 1, typename Ex::memory> gain, norm_backward_options options = {},
                       site where = site::here()) {
  constexpr auto name = "rms_norm_backward";
  require_rows(name, "d_in", d_in, in.extents(), where);
  require_rows(name, "d_gain", d_gain, {in.extent(1)}, where);
  require_rows(name, "d_out", d_out, in.extents(), where);
  require_dense_rows(name, "in", in, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {in.extent(0)}, where);
  require_rows(name, "gain", gain, {in.extent(1)}, where);
  rms_norm_on<typename Ex::backend>::backward(ex, d_in, d_gain, d_out, in, reciprocal_deviation, gain,
                                              options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// rms_norm on the host: see detail/norm_rows.hpp.
#ifndef TESSERA_OPS_HOST_RMS_NORM_HPP
#define TESSERA_OPS_HOST_RMS_NORM_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct rms_norm_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 2> out, view<T, 2> sum, view<float, 1> deviation, view<T const, 2> a,
                      view<T const, 2> b, view<T const, 1> gain, float epsilon) {
    host_detail::norm_rows<false>::forward(ex, out, sum, view<float, 1>{}, deviation, a, b, gain,
                                           view<T const, 1>{}, epsilon);
  }

  template <exec::host_space Ex, storage_scalar T, storage_scalar G>
  static void backward(Ex& ex, view<T, 2> d_in, view<G, 1> d_gain, view<T const, 2> d_out,
                       view<T const, 2> in, view<float const, 1> deviation, view<T const, 1> gain,
                       norm_backward_options options, site where) {
    host_detail::norm_rows<false>::backward(ex, d_in, d_gain, view<G, 1>{}, d_out, in, view<float const, 1>{},
                                            deviation, gain, options.accumulate, options.accumulate_input,
                                            where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// Rotary position embedding (Su et al., 2021) in the half-split form of Hugging Face's Llama: in each head
/// of D elements, the pair (x_i, x_{i + D/2}) at position p is turned by the angle p * theta^(-2 i / D).
///
///     ops::rotary(ex, q);                        // q [batch, sequence, heads, D], in place
///     ops::rotary(ex, d_q, {.inverse = true});   // backward: turned back
///
/// Any strides but the last, so queries and keys inside a packed projection are turned where they stand.
/// Cost: reads and writes each element once; sines and cosines are computed at first use and kept by the
/// space.
#ifndef TESSERA_OPS_ROTARY_HPP
#define TESSERA_OPS_ROTARY_HPP

namespace tessera::inline TESSERA_ABI::ops {

struct rotary_options {
  float theta = 10000;        ///< Base of the wavelengths.
  index_t first_position = 0; ///< Position of x(:, 0, :, :); of the next token when decoding with a cache.
  bool inverse = false;       ///< Turn back: the gradient of the forward.
};

/// One implementation a backend: `run(ex, x, options, where)`.
template <class Backend>
struct rotary_on;

/// Throws size_error where D is odd, the last stride is not 1 or first_position is negative; config_error for
/// a theta that is not positive.
template <exec::space Ex, storage_scalar T>
void rotary(Ex& ex, view<T, 4, typename Ex::memory> x, rotary_options options = {},
            site where = site::here()) {
  require_dense_rows("rotary", "x", x, where);
  if (x.extent(3) % 2 != 0)
    throw size_error("E-ops-007", where, "rotary: heads have ", x.extent(3),
                     " elements, need an even number");
  if (options.first_position < 0)
    throw size_error("E-ops-008", where, "rotary: first_position is ", options.first_position,
                     ", must not be negative");
  if (!(options.theta > 0))
    throw config_error("E-ops-009", where, "rotary: theta is ", options.theta, ", must be positive");
  rotary_on<typename Ex::backend>::run(ex, x, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// rotary on the host: a table of cosines and sines for each (theta, D) that came by, then one pass.
#ifndef TESSERA_OPS_HOST_ROTARY_HPP
#define TESSERA_OPS_HOST_ROTARY_HPP

#include <vector>

/// The cosines and sines that rotary embedding turns by, the same on every space.
#ifndef TESSERA_OPS_DETAIL_ROTARY_ANGLES_HPP
#define TESSERA_OPS_DETAIL_ROTARY_ANGLES_HPP

#include <cmath>

namespace tessera::inline TESSERA_ABI::ops::detail {

/// For each position from 0 a row of D / 2 cosines and D / 2 sines (half = D / 2), computed in double.
inline void fill_rotary_table(float* row, float theta, index_t half, index_t positions) {
  for (index_t p = 0; p < positions; ++p, row += 2 * half)
    for (index_t i = 0; i < half; ++i) {
      auto const angle =
          static_cast<double>(p) *
          std::pow(static_cast<double>(theta), -static_cast<double>(i) / static_cast<double>(half));
      row[i] = static_cast<float>(std::cos(angle));
      row[half + i] = static_cast<float>(std::sin(angle));
    }
}

/// Turns the pair (first, second) by the angle of this cosine and sine.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline void rotate(float& first, float& second, float cosine,
                                                              float sine) noexcept {
  auto const a = first, b = second;
  first = a * cosine - b * sine;
  second = b * cosine + a * sine;
}

} // namespace tessera::inline TESSERA_ABI::ops::detail

#endif

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct rotary_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 4> x, rotary_options const& options, site where) {
    auto const batch = x.extent(0), sequence = x.extent(1), heads = x.extent(2), half = x.extent(3) / 2;
    if (x.empty()) return;
    auto const* angles =
        ex.template handle<tables>().of(options.theta, half, options.first_position, sequence, where);
    auto const sign = options.inverse ? -1.0f : 1.0f;
    host_detail::for_rows(ex, batch * sequence, heads * 2 * half, [=](index_t row) {
      auto const position = options.first_position + row % sequence;
      auto const* cosine = angles + position * 2 * half;
      auto const* sine = cosine + half;
      auto* token = x.data() + row / sequence * x.stride(0) + row % sequence * x.stride(1);
      for (index_t h = 0; h < heads; ++h) {
        auto* first = token + h * x.stride(2);
        auto* second = first + half;
        TESSERA_SIMD()
        for (index_t i = 0; i < half; ++i) {
          auto a = static_cast<float>(first[i]), b = static_cast<float>(second[i]);
          detail::rotate(a, b, cosine[i], sign * sine[i]);
          store(first[i], a);
          store(second[i], b);
        }
      }
    });
  }

private:
  /// For each position a row of D / 2 cosines and D / 2 sines, computed in double.
  class tables {
  public:
    explicit tables(memory_account account) noexcept : account_(account) {}

    float const* of(float theta, index_t half, index_t first, index_t count, site where) {
      auto const positions = element_count<1>({first + count}, where);
      for (auto& known : tables_)
        if (known.theta == theta && known.half == half) return known.up_to(positions, account_, where);
      tables_.push_back({theta, half, 0, {}});
      return tables_.back().up_to(positions, account_, where);
    }

  private:
    struct table {
      float theta;
      index_t half, positions;
      buffer<host_memory> memory;

      float const* up_to(index_t needed, memory_account account, site where) {
        if (needed > positions) {
          auto const size = 2 * positions > needed ? 2 * positions : needed;
          auto const count = element_count<3>({size, 2 * half, index_t{sizeof(float)}}, where);
          memory = buffer<host_memory>(count, account, where);
          positions = size;
          detail::fill_rotary_table(static_cast<float*>(memory.data()), theta, half, size);
        }
        return static_cast<float const*>(memory.data());
      }
    };
    memory_account account_;
    std::vector<table> tables_;
  };
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// out = factor * in, in float, rounded once; and filling with one value. Cost: one read and one write an
/// element, or one write.
///
///     ops::scale(ex, out, in, 0.5f);   // out may be in
///     ops::fill(ex, out, 0.0f);
#ifndef TESSERA_OPS_SCALE_HPP
#define TESSERA_OPS_SCALE_HPP

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: `scale(ex, out, in, factor)`, `fill(ex, out, value)`.
template <class Backend>
struct scale_on;

/// Throws size_error where sizes differ or a view has gaps.
template <exec::space Ex, storage_scalar T>
void scale(Ex& ex, view<T, 1, typename Ex::memory> out, input<T, 1, typename Ex::memory> in, float factor,
           site where = site::here()) {
  require_extents("scale", "out", out, in.extents(), where);
  require_contiguous("scale", "out", out, where);
  require_contiguous("scale", "in", in, where);
  scale_on<typename Ex::backend>::scale(ex, out, in, factor);
}

/// Throws size_error where the view has gaps.
template <exec::space Ex, storage_scalar T>
void fill(Ex& ex, view<T, 1, typename Ex::memory> out, float value, site where = site::here()) {
  require_contiguous("fill", "out", out, where);
  scale_on<typename Ex::backend>::fill(ex, out, value);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// scale and fill on the host: one vectorised pass.
#ifndef TESSERA_OPS_HOST_SCALE_HPP
#define TESSERA_OPS_HOST_SCALE_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct scale_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void scale(Ex& ex, view<T, 1> out, view<T const, 1> in, float factor) {
    host_detail::for_elements(ex, in.size(),
                              [factor, y = out.data(), x = in.data()](index_t begin, index_t end) {
                                TESSERA_SIMD()
                                for (auto i = begin; i < end; ++i)
                                  store(y[i], factor * static_cast<float>(x[i]));
                              });
  }

  template <exec::host_space Ex, storage_scalar T>
  static void fill(Ex& ex, view<T, 1> out, float value) {
    host_detail::for_elements(ex, out.size(),
                              [rounded = T(value), y = out.data()](index_t begin, index_t end) {
                                for (auto i = begin; i < end; ++i) y[i] = rounded;
                              });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif
/// The gated unit of Llama's feed-forward layers (Shazeer, "GLU variants improve transformer", 2020):
///     out = gate * sigmoid(gate) * up,   with the rows of gate_up = (gate, up).
///
///     ops::swiglu(ex, out, gate_up);                    // out [rows, f], gate_up [rows, 2 f]
///     ops::swiglu_backward(ex, d_gate_up, d_out, gate_up);
///
/// Rows may lie apart; d_gate_up may be gate_up. Cost: reads 2 f and writes f elements a row, backward reads
/// 3 f and writes 2 f.
#ifndef TESSERA_OPS_SWIGLU_HPP
#define TESSERA_OPS_SWIGLU_HPP

namespace tessera::inline TESSERA_ABI::ops {

/// x * sigmoid(x), the "SiLU" or "swish".
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float silu_value(float x) noexcept {
  return x * elementary::sigmoid(x);
}

struct silu_parts {
  float value, slope;
};
/// The value and its derivative, which share the sigmoid. Beyond 100 both take their limits.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline silu_parts silu_with_slope(float x) noexcept {
  auto const s = elementary::sigmoid(x);
  auto const bounded = elementary::smaller(elementary::larger(x, -100.0f), 100.0f);
  return {x * s, s + bounded * s * (1.0f - s)};
}

/// One implementation a backend: `forward(ex, out, gate_up)`, `backward(ex, d_gate_up, d_out, gate_up)`.
template <class Backend>
struct swiglu_on;

/// Throws size_error where shapes do not fit.
template <exec::space Ex, storage_scalar T>
void swiglu(Ex& ex, view<T, 2, typename Ex::memory> out, input<T, 2, typename Ex::memory> gate_up,
            site where = site::here()) {
  require_rows("swiglu", "gate_up", gate_up, {out.extent(0), 2 * out.extent(1)}, where);
  require_dense_rows("swiglu", "out", out, where);
  swiglu_on<typename Ex::backend>::forward(ex, out, gate_up);
}

/// `gate_up` is what the forward read.
template <exec::space Ex, storage_scalar T>
void swiglu_backward(Ex& ex, view<T, 2, typename Ex::memory> d_gate_up,
                     input<T, 2, typename Ex::memory> d_out, input<T, 2, typename Ex::memory> gate_up,
                     site where = site::here()) {
  require_rows("swiglu_backward", "gate_up", gate_up, {d_out.extent(0), 2 * d_out.extent(1)}, where);
  require_rows("swiglu_backward", "d_gate_up", d_gate_up, gate_up.extents(), where);
  require_dense_rows("swiglu_backward", "d_out", d_out, where);
  swiglu_on<typename Ex::backend>::backward(ex, d_gate_up, d_out, gate_up);
}

} // namespace tessera::inline TESSERA_ABI::ops

/// swiglu on the host: one vectorised pass over each row.
#ifndef TESSERA_OPS_HOST_SWIGLU_HPP
#define TESSERA_OPS_HOST_SWIGLU_HPP

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct swiglu_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 2> out, view<T const, 2> gate_up) {
    auto const width = out.extent(1);
    host_detail::for_rows(ex, out.extent(0), width, [=](index_t row) {
      auto const* gate = gate_up.data() + row * gate_up.stride(0);
      auto const* up = gate + width;
      auto* y = out.data() + row * out.stride(0);
      TESSERA_SIMD()
      for (index_t i = 0; i < width; ++i) store(y[i], silu_value(gate[i]) * static_cast<float>(up[i]));
    });
  }

  template <exec::host_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 2> d_gate_up, view<T const, 2> d_out, view<T const, 2> gate_up) {
    auto const width = d_out.extent(1);
    host_detail::for_rows(ex, d_out.extent(0), width, [=](index_t row) {
      auto const* gate = gate_up.data() + row * gate_up.stride(0);
      auto const* up = gate + width;
      auto const* dy = d_out.data() + row * d_out.stride(0);
      auto* d_gate = d_gate_up.data() + row * d_gate_up.stride(0);
      auto* d_up = d_gate + width;
      TESSERA_SIMD()
      for (index_t i = 0; i < width; ++i) {
        auto const silu = silu_with_slope(gate[i]);
        auto const d = static_cast<float>(dy[i]), u = static_cast<float>(up[i]);
        store(d_gate[i], d * u * silu.slope);
        store(d_up[i], d * silu.value);
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#endif

/// Ranks are a concept: code that communicates is a template over `communicator` and runs unchanged on one
/// rank (`comm::self`), on threads of one process (`comm::threads`), on MPI (`comm::mpi`) and between GPUs
/// (`comm::nccl`), with the same bits.
///
///     template <comm::communicator Comm>
///     void average(Comm& comm, std::span<float> values) {
///       comm.all_reduce(values);                              // every rank: the same bits
///       for (auto& v : values) v /= static_cast<float>(comm.size());
///     }
#ifndef TESSERA_COMM_COMMUNICATOR_HPP
#define TESSERA_COMM_COMMUNICATOR_HPP

#include <cstddef>
#include <span>

namespace tessera::inline TESSERA_ABI::comm {

/// What is done with the ranks' values. In rank_order a NaN of any rank makes the result NaN.
enum class reduction : std::uint8_t { sum, max, min };

/// Who adds, and in which order.
/// rank_order: values travel in their storage type; the sum is taken rank 0 first, in fp32 for the storage
/// types, in fp64 for double, exactly for integers (overflow is numeric_error on all ranks), and rounded
/// once. The same bits on every model and in every run. native: the message passing library's own reduction:
/// one call, an order and a rounding of its choice, no overflow check. `self` and `threads` have no such
/// library; there it is rank_order.
enum class summation : std::uint8_t { rank_order, native };

struct reduce_options {
  reduction operation = reduction::sum;
  summation order = summation::rank_order;
};

/// The calls that a traffic meter, a signature or an error tells apart.
enum class collective : std::uint8_t {
  barrier,
  broadcast,
  reduce,
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  gather,
  scatter,
  send,
  receive,
  split
};
inline constexpr int collective_count = 12;

constexpr char const* name_of(collective what) noexcept {
  constexpr char const* names[] = {"barrier",        "broadcast",  "reduce",     "all_reduce",
                                   "reduce_scatter", "all_gather", "all_to_all", "gather",
                                   "scatter",        "send",       "receive",    "split"};
  return names[static_cast<int>(what)];
}
constexpr char const* name_of(reduction operation) noexcept {
  constexpr char const* names[] = {"sum", "max", "min"};
  return names[static_cast<int>(operation)];
}
constexpr char const* name_of(summation order) noexcept {
  return order == summation::native ? "native" : "rank_order";
}

/// What reductions take: the storage types, double, and integers other than bool.
template <class T>
concept reducible_scalar = storage_scalar<T> || std::same_as<T, double> ||
    (std::integral<T> && !std::same_as<T, bool> && !std::is_const_v<T> && sizeof(T) <= 8);

/// What messages are made of: the above, and std::byte. Send anything else as bytes (std::as_bytes).
template <class T>
concept message_scalar = reducible_scalar<T> || std::same_as<T, std::byte>;

/// Settings of a communicator, the same on all of its ranks: they are compared when it is made.
struct communicator_options {
  /// Compare the signature of every collective over all ranks before it moves data (`threads` always does),
  /// and guard buffers lent to requests: until `wait` an output reads as NaN (all bits set), and writing to
  /// an output or input is an error.
  bool checked = false;
  /// Seconds that a call waits for other ranks before it throws `stalled`, which names the collective and the
  /// ranks that are missing. 0: for ever.
  double stall_limit = 0;
};

/// Calls, payload and time of one kind of call. Payload is the larger of the caller's two buffers: n bytes
/// for an all_reduce of n bytes, the whole length for reduce_scatter and all_gather.
struct traffic {
  index_t calls = 0;
  index_t bytes = 0;
  double seconds = 0;
};

/// What one rank's communicator was used for. Calls and bytes are always counted; seconds (spent inside
/// calls, waiting included) only after `time_calls(true)`, since reading the clock twice costs some 50 ns.
class traffic_meter {
public:
  traffic of(collective what) const noexcept { return entries_[static_cast<int>(what)]; }
  traffic total() const noexcept {
    traffic sum;
    for (auto const& entry : entries_) {
      sum.calls += entry.calls;
      sum.bytes += entry.bytes;
      sum.seconds += entry.seconds;
    }
    return sum;
  }
  void time_calls(bool on) noexcept { timed_ = on; }
  bool times_calls() const noexcept { return timed_; }
  void reset() noexcept {
    for (auto& entry : entries_) entry = {};
  }

  void count(collective what, index_t bytes) noexcept {
    auto& entry = entries_[static_cast<int>(what)];
    ++entry.calls;
    entry.bytes += bytes;
  }
  void add_time(collective what, double seconds) noexcept {
    entries_[static_cast<int>(what)].seconds += seconds;
  }

private:
  traffic entries_[collective_count];
  bool timed_ = false;
};

/// The calls of a communicator on messages in `Memory`; `communicator` below says what they mean.
template <class C, class Memory>
concept communicates_in = memory_space<Memory> &&
    requires(C& c, memory_span<float, Memory> out, memory_span<float const, Memory> in,
             std::span<index_t const> counts, reduce_options how) {
  c.broadcast(out, 0);
  c.reduce(out, in, 0, how);
  c.all_reduce(out, how);
  c.all_reduce(out, in, how);
  c.reduce_scatter(out, in, how);
  c.reduce_scatter_v(out, in, counts, how);
  c.all_gather(out, in);
  c.all_gather_v(out, in, counts);
  c.all_to_all(out, in);
  c.all_to_all_v(out, counts, in, counts);
  c.gather(out, in, 0);
  c.gather_v(out, in, counts, 0);
  c.scatter(out, in, 0);
  c.scatter_v(out, in, counts, 0);
  c.send(in, 0, 0);
  c.receive(out, 0, 0);
  { c.start_all_reduce(out, how) } -> std::same_as<typename C::request>;
  { c.start_all_reduce(out, in, how) } -> std::same_as<typename C::request>;
  { c.start_reduce_scatter_v(out, in, counts, how) } -> std::same_as<typename C::request>;
  { c.start_all_gather_v(out, in, counts) } -> std::same_as<typename C::request>;
  { c.start_broadcast(out, 0) } -> std::same_as<typename C::request>;
  { c.start_all_to_all_v(out, counts, in, counts) } -> std::same_as<typename C::request>;
  { c.start_send(in, 0, 0) } -> std::same_as<typename C::request>;
  { c.start_receive(out, 0, 0) } -> std::same_as<typename C::request>;
};

/// A group of ranks that issue the same collectives in the same order.
///
/// Semantics (checked line by line by tests/comm/conformance.hpp); n = size(), r = rank(), 0 <= r < n:
/// - Who calls: a collective is called by every rank of the group, in the same order. Each rank is one
///   thread, which makes all of its calls.
/// - Shapes: a wrong length is size_error before anything is sent. Zero-size messages are legal and are
///   messages. Counts of the `_v` forms (one a rank, equal on all ranks) place the ranks' parts one after
///   another; all_to_all_v alone has counts of each rank's own.
/// - broadcast(data, root): data becomes the root's.
/// - reduce(out, in, root), all_reduce(in_out), all_reduce(out, in): the reduction over ranks, element by
///   element. `out` may be `in`. Away from the root, reduce ignores `out`.
/// - reduce_scatter(out, in), reduce_scatter_v(out, in, counts): part r of the reduction; `out` may lie
///   inside `in`.
/// - all_gather(out, in), all_gather_v(out, in, counts): the ranks' parts in order; `in` may be its own part
///   of `out`. gather and gather_v: the same on the root alone.
/// - scatter(out, in, root), scatter_v: part r of the root's `in`; on the root `out` may be its part of `in`.
/// - all_to_all(out, in), all_to_all_v(out, out_counts, in, in_counts): part s of `out` is part r of rank s's
///   `in`; `out` and `in` must not overlap.
/// - send(data, to, tag), receive(data, from, tag): matched by ranks and tag, in order; lengths are equal.
///   `send` may wait for its `receive`. Tags are 0 to 32767. (NCCL knows no tags: comm/nccl.hpp says what
///   remains of them.)
/// - split(color, key): ranks of one color (>= 0) form a communicator, ordered by key, then by rank.
/// - start_X(...) is X as a request. Its buffers are lent until wait() returns or test() is true; the spans
///   of counts are not. A request advances inside calls on its communicator: waits for requests come before
///   anything else that other ranks need in order to go on. Requests may be waited for in any order. All
///   ranks use start_X, or all use X: the two do not meet.
/// - all_reduce(value) returns the reduction of one value: a convenience for losses, counts, decisions.
/// - Messages are lent as std::span, and as memory_span<T, C::bulk_memory>: where the communicator's large
///   messages are at home. That is host memory for all but `nccl`, whose calls on device_span are ordered
///   with the compute stream instead of with the host: data is taken as the stream leaves it, and wait()
///   makes the stream wait.
///
/// Errors: size_error, config_error (here and now, nothing sent); collective_mismatch (checked communicators:
/// on all ranks, naming both calls), peer_failed, stalled, library_error: after those the communicator is
/// lost. numeric_error (integer overflow): on all ranks; the communicator stays usable.
template <class C>
concept communicator = communicates_in<C, host_memory> && communicates_in<C, typename C::bulk_memory> &&
    requires(C& c, reduce_options how, typename C::request pending) {
  { c.rank() } -> std::same_as<int>;
  { c.size() } -> std::same_as<int>;
  { c.meter() } -> std::same_as<traffic_meter&>;
  { c.memory() } -> std::same_as<memory_meter const&>;
  { c.options() } -> std::convertible_to<communicator_options>;
  c.barrier();
  { c.all_reduce(1.0, how) } -> std::same_as<double>;
  { c.split(0, 0) } -> std::same_as<C>;
  pending.wait();
  { pending.test() } -> std::same_as<bool>;
};

/// A communicator whose messages are in the host's memory.
template <class C>
concept host_communicator = communicator<C> && std::same_as<typename C::bulk_memory, host_memory>;

} // namespace tessera::inline TESSERA_ABI::comm

#endif
/// One rank: every collective is a copy, every reduction the identity. Code written for a communicator runs
/// on it without a library, a thread or a cost.
///
///     comm::self alone;
///     alone.all_reduce(values);          // unchanged
#ifndef TESSERA_COMM_SELF_HPP
#define TESSERA_COMM_SELF_HPP

/// The typed calls of every communicator, written once: lengths checked, the call described, metered, and
/// handed to the engine. The contract of each stands at `comm::communicator`.
#ifndef TESSERA_COMM_DETAIL_INTERFACE_HPP
#define TESSERA_COMM_DETAIL_INTERFACE_HPP

#include <vector>

/// Checks what a caller gave and puts it into a `call`: lengths, counts, roots, overlaps. Nothing is sent.
#ifndef TESSERA_COMM_DETAIL_DESCRIBE_HPP
#define TESSERA_COMM_DETAIL_DESCRIBE_HPP

/// What one call is: the caller's words (`call`), the part of them on which ranks must agree (`signature`),
/// and one step of carrying it out as a transport sees it (`transfer`).
#ifndef TESSERA_COMM_DETAIL_CALL_HPP
#define TESSERA_COMM_DETAIL_CALL_HPP

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

/// Reduces `n` elements of `ranks` pieces, `stride` elements apart, in rank order.
struct combine_step {
  void* out = nullptr;
  void const* pieces = nullptr;
  index_t n = 0, stride = 0;
  int ranks = 1;
  reduction operation = reduction::sum;
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
  summation order = summation::native; // rank_order in reductions that ask for it
  combine_function combine = nullptr;
  bool on_device = false; // both buffers are in memory that the host does not reach
  site where{};

  bool reduces() const noexcept {
    return what == collective::reduce || what == collective::all_reduce || what == collective::reduce_scatter;
  }
  bool is_point_to_point() const noexcept { return what == collective::send || what == collective::receive; }
  bool has_own_counts() const noexcept { return what == collective::all_to_all && in_counts != nullptr; }
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

inline transfer transfer_of(call const& c) noexcept {
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
  return a_bytes > 0 && b_bytes > 0 && x < y + static_cast<std::uintptr_t>(b_bytes) &&
         y < x + static_cast<std::uintptr_t>(a_bytes);
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

namespace tessera::inline TESSERA_ABI::comm::detail {

/// The memory that a std::span or a device_span stands in.
template <class Span>
struct memory_of_span;
template <class S>
struct memory_of_span<std::span<S>> {
  using type = host_memory;
};
template <class S, memory_space Memory>
struct memory_of_span<device_span<S, Memory>> {
  using type = Memory;
};
template <class Span>
using memory_of = typename memory_of_span<Span>::type;

/// Inputs do not take part in deduction: spans of mutable elements and containers convert.
template <class Span>
using input_like = memory_span<typename Span::value_type const, memory_of<Span>>;
using counts_span = std::span<index_t const>;

/// A span of messages that can be lent to calls of `Engine`: to be read or, where not constant, written.
template <class Span, class Engine>
concept readable_by = requires {
  typename memory_of<Span>;
}
&&Engine::template reaches<memory_of<Span>>&& message_scalar<typename Span::value_type>;
template <class Span, class Engine>
concept message_of = readable_by<Span, Engine> && !std::is_const_v<typename Span::element_type>;
template <class Span, class Engine>
concept summand_of = message_of<Span, Engine> && reducible_scalar<typename Span::value_type>;

/// Describes calls of one rank. Every function throws size_error for what does not fit.
class describer {
public:
  describer(int my_rank, int ranks) noexcept : rank(my_rank), size(ranks) {}

  static call named(collective what, site where) noexcept {
    call c;
    c.what = what;
    c.where = where;
    return c;
  }

  template <class Span>
  [[gnu::always_inline]] call broadcast(Span data, int root, site where) const {
    check_rank(root, "root", collective::broadcast, where);
    bool const gives = rank == root;
    auto c = describe(collective::broadcast, gives ? Span() : data, gives ? data : Span(), where);
    c.count = static_cast<index_t>(data.size());
    c.root = root;
    return c;
  }
  static void reduce_with(call& c, reduce_options how) noexcept {
    c.operation = how.operation;
    c.order = how.order;
  }
  template <class Span>
  [[gnu::always_inline]] call reduce(Span out, input_like<Span> in, int root, reduce_options how,
                                     site where) const {
    check_rank(root, "root", collective::reduce, where);
    if (rank != root) out = {};
    auto c = describe(collective::reduce, out, in, where);
    if (rank == root) expect(c.out_items, c.in_items, "out", c.what, where);
    forbid_overlap(c, 0, where);
    c.count = c.in_items;
    c.root = root;
    reduce_with(c, how);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call all_reduce(Span out, input_like<Span> in, reduce_options how,
                                         site where) const {
    auto c = describe(collective::all_reduce, out, in, where);
    expect(c.out_items, c.in_items, "out", c.what, where);
    forbid_overlap(c, 0, where);
    c.count = c.in_items;
    reduce_with(c, how);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call reduce_scatter(Span out, input_like<Span> in, counts_span const* counts,
                                             reduce_options how, site where) const {
    auto c = describe(collective::reduce_scatter, out, in, where);
    if (counts != nullptr) {
      c.count = sum_of(*counts, "counts", c.what, where);
      c.in_counts = counts->data();
      expect(c.in_items, c.count, "in", c.what, where);
      expect(c.out_items, c.in_counts[rank], "out", c.what, where);
    } else {
      c.count = c.out_items;
      expect(c.in_items, times_size(c.out_items, "out", c.what, where), "in", c.what, where);
    }
    reduce_with(c, how);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call gather(collective what, Span out, input_like<Span> in,
                                     counts_span const* counts, int root, site where) const {
    bool const receives = what == collective::all_gather || rank == root;
    if (what == collective::gather) check_rank(root, "root", what, where);
    if (!receives) out = {};
    auto c = describe(what, out, in, where);
    c.root = root;
    c.count = c.in_items;
    auto all = times_size(c.in_items, "in", what, where);
    if (counts != nullptr) {
      c.count = all = sum_of(*counts, "counts", what, where);
      c.in_counts = counts->data();
      expect(c.in_items, c.in_counts[rank], "in", what, where);
    }
    if (receives) expect(c.out_items, all, "out", what, where);
    forbid_overlap(c, my_offset(c), where);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call scatter(Span out, input_like<Span> in, counts_span const* counts, int root,
                                      site where) const {
    constexpr auto what = collective::scatter;
    check_rank(root, "root", what, where);
    if (rank != root) in = {};
    auto c = describe(what, out, in, where);
    c.root = root;
    c.count = c.out_items;
    auto all = times_size(c.out_items, "out", what, where);
    if (counts != nullptr) {
      c.count = all = sum_of(*counts, "counts", what, where);
      c.in_counts = counts->data();
      expect(c.out_items, c.in_counts[rank], "out", what, where);
    }
    if (rank == root) expect(c.in_items, all, "in", what, where);
    forbid_overlap(c, -my_offset(c), where);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call all_to_all(Span out, counts_span const* out_counts, input_like<Span> in,
                                         counts_span const* in_counts, site where) const {
    constexpr auto what = collective::all_to_all;
    auto c = describe(what, out, in, where);
    if (in_counts != nullptr) {
      expect(c.out_items, sum_of(*out_counts, "out_counts", what, where), "out", what, where);
      expect(c.in_items, sum_of(*in_counts, "in_counts", what, where), "in", what, where);
      c.in_counts = in_counts->data();
      c.out_counts = out_counts->data();
    } else {
      c.count = c.in_items / size;
      expect(c.in_items, c.count * size, "in", what, where);
      expect(c.out_items, c.in_items, "out", what, where);
    }
    if (auto const item = bytes_of(c.type); overlap(c.in, c.in_items * item, c.out, c.out_items * item))
      refuse_overlap(c.what, where);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call send(Span data, int to, int tag, site where) const {
    using out = memory_span<typename Span::value_type, memory_of<Span>>;
    return message(collective::send, out(), data, to, tag, where);
  }
  template <class Span>
  [[gnu::always_inline]] call receive(Span data, int from, int tag, site where) const {
    return message(collective::receive, data, Span(), from, tag, where);
  }

private:
  template <class Span>
  call message(collective what, Span out, input_like<Span> in, int peer, int tag, site where) const {
    check_rank(peer, what == collective::send ? "to" : "from", what, where);
    if (tag < 0 || tag > 32767)
      throw size_error("E-comm-006", where, name_of(what), ": `tag` is ", tag, " on rank ", rank,
                       ", need 0 to 32767");
    auto c = describe(what, out, in, where);
    c.count = c.in_items + c.out_items;
    c.root = peer;
    c.tag = tag;
    return c;
  }
  template <class Span>
  static call describe(collective what, Span out, input_like<Span> in, site where) noexcept {
    auto c = named(what, where);
    c.type = element_of<typename Span::value_type>();
    c.on_device = !memory_of<Span>::host_accessible;
    c.in = in.data();
    c.out = out.data();
    c.in_items = static_cast<index_t>(in.size());
    c.out_items = static_cast<index_t>(out.size());
    return c;
  }
  void expect(index_t items, index_t expected, char const* which, collective what, site where) const {
    if (items != expected)
      throw size_error("E-comm-001", where, name_of(what), ": `", which, "` has ", items,
                       " elements on rank ", rank, " of ", size, ", need ", expected);
  }
  void check_rank(int root, char const* which, collective what, site where) const {
    if (root < 0 || root >= size)
      throw size_error("E-comm-002", where, name_of(what), ": `", which, "` is ", root, " on rank ", rank,
                       ", need 0 to ", size - 1);
  }
  index_t sum_of(counts_span counts, char const* which, collective what, site where) const {
    expect(static_cast<index_t>(counts.size()), size, which, what, where);
    index_t sum = 0;
    for (auto each : counts)
      if (each < 0 || __builtin_add_overflow(sum, each, &sum))
        throw size_error("E-comm-003", where, name_of(what), ": `", which, "` on rank ", rank,
                         " has an impossible count, ", each);
    return sum;
  }
  index_t times_size(index_t items, char const* which, collective what, site where) const {
    index_t product = 0;
    if (__builtin_mul_overflow(items, index_t{size}, &product))
      throw size_error("E-comm-003", where, name_of(what), ": `", which, "` of ", items, " elements on ",
                       size, " ranks is more than 2^63 - 1 elements");
    return product;
  }
  index_t my_offset(call const& c) const noexcept { return offset_of(rank, c.count, c.in_counts); }
  /// `out` may begin `offset` elements before `in` does, and not overlap it otherwise.
  void forbid_overlap(call const& c, index_t offset, site where) const {
    auto const item = bytes_of(c.type);
    auto const distance = reinterpret_cast<std::intptr_t>(c.in) - reinterpret_cast<std::intptr_t>(c.out);
    if (distance != offset * item && overlap(c.in, c.in_items * item, c.out, c.out_items * item))
      refuse_overlap(c.what, where);
  }
  [[noreturn, gnu::cold]] void refuse_overlap(collective what, site where) const {
    throw size_error("E-comm-005", where, name_of(what), ": `in` and `out` overlap on rank ", rank,
                     " in a way that this call does not allow");
  }

  int rank, size;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
/// What a non-blocking call returns, and the clock of the traffic meter.
#ifndef TESSERA_COMM_DETAIL_REQUEST_HPP
#define TESSERA_COMM_DETAIL_REQUEST_HPP

#include <ctime>

/// Drives the operations of one communicator.
///
/// A call is one step or several (signatures, then data; exchange, then collect). The first step goes out at
/// once, in program order, which is the same on all ranks. Later steps go out when those of all earlier calls
/// have: again one order on all ranks, whichever request is waited for first.
#ifndef TESSERA_COMM_DETAIL_ENGINE_HPP
#define TESSERA_COMM_DETAIL_ENGINE_HPP

/// Reads what ranks said they are doing: do they agree, and whom does a call that got stuck wait for?
#ifndef TESSERA_COMM_DETAIL_AGREEMENT_HPP
#define TESSERA_COMM_DETAIL_AGREEMENT_HPP

#include <vector>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// "rank 2 (it is in barrier at ...), rank 3 (it is in no call that waits)", seen from rank `self`, which is
/// in `sign`. A rank that answered from the same or a later collective has arrived.
inline std::string missing_ranks(signature const& sign, int self, std::vector<signature> const& theirs,
                                 std::vector<char> const& answered) {
  bool const message = sign.what == collective::send || sign.what == collective::receive;
  std::string missing;
  for (int r = 0; r < narrow<int>(theirs.size()); ++r) {
    auto const i = static_cast<std::size_t>(r);
    if (r == self || (message && r != sign.root)) continue;
    if (!message && answered[i] != 0 && (theirs[i].sequence > sign.sequence || agree(theirs[i], sign)))
      continue;
    missing += tessera::text_of(missing.empty() ? "rank " : ", rank ", r);
    missing += answered[i] != 0 ? " (it is in " + text_of(theirs[i]) + ")"
                                : std::string(" (it is in no call that waits)");
  }
  return missing.empty() ? "the transfer itself: all ranks have arrived" : missing;
}

/// `all`: the signature of each rank.
inline void compare_signatures(signature const* all, int ranks, int self, site where) {
  for (int r = 1; r < ranks; ++r)
    if (!agree(all[0], all[r]))
      throw collective_mismatch("E-comm-010", where, "ranks called different collectives: rank 0 ",
                                text_of(all[0]), ", rank ", r, " ", text_of(all[r]), "; this is rank ", self);
}

/// `all`: of each rank, what it sends to each and what it expects from each.
inline void compare_counts(index_t const* all, int ranks, signature const& sign, site where) {
  auto const p = index_t{ranks};
  for (index_t from = 0; from < p; ++from)
    for (index_t to = 0; to < p; ++to)
      if (auto sent = all[from * 2 * p + to], expected = all[to * 2 * p + p + from]; sent != expected)
        throw collective_mismatch("E-comm-011", where, text_of(sign), ": rank ", from, " sends ", sent,
                                  " elements to rank ", to, ", which expects ", expected);
}

/// A rank's options, as they travel.
struct communicator_terms {
  double checked = 0, stall_limit = 0;
  communicator_terms() = default;
  explicit communicator_terms(communicator_options options) noexcept
      : checked(options.checked ? 1 : 0), stall_limit(options.stall_limit) {}
};

/// `all`: the terms of each rank.
inline void compare_terms(std::vector<communicator_terms> const& all, int self, site where) {
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r].checked != all[0].checked || all[r].stall_limit != all[0].stall_limit)
      throw config_error("E-comm-031", where,
                         "the ranks' communicator options differ: rank 0 has checked = ", all[0].checked != 0,
                         ", stall_limit = ", all[0].stall_limit, ", rank ", r,
                         " has checked = ", all[r].checked != 0, ", stall_limit = ", all[r].stall_limit,
                         "; this is rank ", self);
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
/// How a call is carried out over a transport, written once for all models: signatures compared, buffers
/// guarded, rank_order as exchange, sum and collect, and the order in which steps of several calls may go.
#ifndef TESSERA_COMM_DETAIL_OPERATION_HPP
#define TESSERA_COMM_DETAIL_OPERATION_HPP

#include <exception>

/// A reduction in rank_order as two exchanges with a sum between them, for transports of any memory: each
/// rank adds up one slice, or, where the vector is short, all of it.
#ifndef TESSERA_COMM_DETAIL_RANK_ORDER_HPP
#define TESSERA_COMM_DETAIL_RANK_ORDER_HPP

/// The arithmetic of rank_order: element by element, rank 0 first, accumulated in fp32 or better, rounded
/// once.
#ifndef TESSERA_COMM_DETAIL_COMBINE_HPP
#define TESSERA_COMM_DETAIL_COMBINE_HPP

namespace tessera::inline TESSERA_ABI::comm::detail {

template <class T>
struct accumulator {
  using type = T;
};
template <storage_scalar T>
struct accumulator<T> {
  using type = float;
};
template <class T>
using accumulator_t = typename accumulator<T>::type;

/// The larger or smaller of two; a NaN of either is the result.
template <class A>
TESSERA_HOST_DEVICE constexpr A larger(A a, A b) noexcept {
  return (b > a || b != b) && a == a ? b : a;
}
template <class A>
TESSERA_HOST_DEVICE constexpr A smaller(A a, A b) noexcept {
  return (b < a || b != b) && a == a ? b : a;
}

/// One step of a reduction: a becomes a combined with b. False where an integer sum overflowed.
template <reduction Operation, class A>
TESSERA_HOST_DEVICE constexpr bool combine_value(A& a, A b) noexcept {
  if constexpr (Operation == reduction::max) {
    a = larger(a, b);
  } else if constexpr (Operation == reduction::min) {
    a = smaller(a, b);
  } else if constexpr (std::integral<A>) {
    using bits = std::make_unsigned_t<A>;
    auto const x = static_cast<bits>(a), y = static_cast<bits>(b), sum = static_cast<bits>(x + y);
    a = static_cast<A>(sum);
    if constexpr (std::signed_integral<A>)
      return static_cast<A>((x ^ sum) & (y ^ sum)) >= 0; // both have one sign, the sum has the other
    else
      return sum >= x;
  } else {
    a += b;
  }
  return true;
}

/// a[i] becomes a[i] combined with b[i]. False where an integer sum overflowed.
template <reduction Operation, class A, class T>
bool combine_into(A* a, T const* b, index_t n) noexcept {
  bool exact = true;
  for (index_t i = 0; i < n; ++i) exact &= combine_value<Operation>(a[i], static_cast<A>(b[i]));
  return exact;
}
template <class A, class T>
bool combine_into(A* a, T const* b, index_t n, reduction operation) noexcept {
  switch (operation) {
  case reduction::max:
    return combine_into<reduction::max>(a, b, n);
  case reduction::min:
    return combine_into<reduction::min>(a, b, n);
  case reduction::sum:
    break;
  }
  return combine_into<reduction::sum>(a, b, n);
}

/// out[i] = reduction over r of pieces[r * stride + i]. `out` may be the first piece. Works through tiles
/// that stay in the first-level cache.
template <reducible_scalar T>
bool combine(void*, combine_step const& step) {
  constexpr index_t tile = 1024;
  auto* out = static_cast<T*>(step.out);
  auto const* pieces = static_cast<T const*>(step.pieces);
  accumulator_t<T> sum[tile];
  bool exact = true;
  for (index_t begin = 0; begin < step.n; begin += tile) {
    auto const length = step.n - begin < tile ? step.n - begin : tile;
    for (index_t i = 0; i < length; ++i) sum[i] = static_cast<accumulator_t<T>>(pieces[begin + i]);
    for (int r = 1; r < step.ranks; ++r)
      exact &= combine_into(sum, pieces + r * step.stride + begin, length, step.operation);
    for (index_t i = 0; i < length; ++i) out[begin + i] = static_cast<T>(sum[i]);
  }
  return exact;
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm::detail {

/// Element at which slice `rank` of n elements over `ranks` begins.
constexpr index_t slice_begin(index_t n, int ranks, int rank) noexcept {
  auto const extra = n % ranks;
  return n / ranks * rank + (rank < extra ? rank : extra);
}

/// Up to here an all_reduce in rank_order sends whole vectors to all, one message instead of two.
inline constexpr index_t whole_vector_bytes = 2048;

/// What rank `rank` does in the call `c`.
struct rank_order_steps {
  call const& c;
  int rank, ranks;

  /// One message to all instead of two: every rank adds up everything.
  bool whole() const noexcept {
    return c.what != collective::reduce_scatter && c.in_items * bytes_of(c.type) <= whole_vector_bytes;
  }
  index_t slice(int of) const noexcept {
    return slice_begin(c.in_items, ranks, of + 1) - slice_begin(c.in_items, ranks, of);
  }
  /// How many elements this rank adds up.
  index_t items() const noexcept {
    if (whole()) return c.in_items;
    return c.what == collective::reduce_scatter ? c.out_items : slice(rank);
  }
  index_t pieces_bytes() const noexcept { return ranks * items() * bytes_of(c.type); }

  /// Brings to `pieces` what the ranks have of this rank's items. `sends` and `receives` have room for a
  /// count of each rank, and live as long as the steps.
  transfer exchange(void* pieces, index_t* sends, index_t* receives) const noexcept {
    auto step = transfer_of(c);
    step.out = pieces;
    step.root = -1;
    step.in_counts = step.out_counts = nullptr;
    step.what = whole() ? collective::all_gather : collective::all_to_all;
    if (whole() || (c.what == collective::reduce_scatter && c.in_counts == nullptr)) return step;
    for (int r = 0; r < ranks; ++r) {
      sends[r] = c.in_counts != nullptr ? c.in_counts[r] : slice(r);
      receives[r] = items();
    }
    step.in_counts = sends;
    step.out_counts = receives;
    return step;
  }
  /// Adds them up: into this rank's part of the output, or over the first piece where it has no output.
  combine_step sum(void* pieces) const noexcept {
    combine_step step{.out = c.out, .pieces = pieces, .n = items(), .stride = items(), .ranks = ranks};
    if (c.what == collective::reduce && rank != c.root)
      step.out = pieces;
    else if (c.what != collective::reduce_scatter && !whole())
      step.out = at(c.out, slice_begin(c.in_items, ranks, rank) * bytes_of(c.type));
    step.operation = c.operation;
    step.where = c.where;
    return step;
  }
  /// Whether the slices must still be brought together.
  bool collects() const noexcept { return c.what != collective::reduce_scatter && !whole(); }
  transfer collect(void* pieces, index_t const* sends) const noexcept {
    auto step = transfer_of(c);
    step.what = c.what == collective::reduce ? collective::gather : collective::all_gather;
    step.in = sum(pieces).out;
    step.out = c.what == collective::reduce && rank != c.root ? nullptr : c.out;
    step.count = items();
    step.in_counts = step.out_counts = sends;
    return step;
  }
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm::detail {

/// Moves bytes between ranks.
/// - start(t, ticket) begins a transfer, test(ticket) says whether it has ended; buffers stay in use between.
/// - pause(patience, sign, where) returns when testing again may help; throws stalled past the limit.
/// - abandon(ticket) gives a transfer up; false: the other side may still touch its buffers.
/// - withdraw(ticket) takes a receive back that has not been matched.
/// - checks_signatures: start and test compare signatures themselves; reduces: there is a native reduction.
template <class T>
concept transport = requires(T& t, T const& constant, transfer const& step, typename T::ticket& ticket,
                             typename T::patience& patience, signature const& sign) {
  { constant.rank() } -> std::same_as<int>;
  { constant.size() } -> std::same_as<int>;
  { T::checks_signatures } -> std::convertible_to<bool>;
  { T::reduces } -> std::convertible_to<bool>;
  t.start(step, ticket);
  { t.test(ticket) } -> std::same_as<bool>;
  requires std::constructible_from<typename T::patience, T&>;
  t.pause(patience, sign, step.where);
  { t.abandon(ticket) } -> std::same_as<bool>;
  { t.withdraw(ticket) } -> std::same_as<bool>;
};

/// A transport whose blocking calls are better than start and test: run(t) and wait(ticket).
template <class T>
concept direct_transport = transport<T> && requires(T& t, transfer const& step, typename T::ticket& ticket) {
  t.run(step);
  t.wait(ticket);
};

/// A transport that also takes messages in a device's memory: admit(call, wants_host) throws where it can't
/// do this call there; wants_host: the call would need the host to touch the buffers.
template <class T>
concept device_transport = transport<T> && requires(T& t, call const& c) {
  t.admit(c, true);
};

/// Memory that grows to what it is asked for and is kept: nothing is allocated once sizes repeat.
template <memory_space Memory>
void* room(buffer<Memory>& memory, index_t bytes, memory_account account, site where) {
  if (memory.bytes() < bytes) {
    memory = buffer<Memory>();
    memory = buffer<Memory>(bytes, account, where);
  }
  return memory.data();
}

/// Native reductions cannot write into what they read: such an output is delivered at the end.
inline bool needs_staging(call const& c) noexcept {
  auto const item = bytes_of(c.type);
  return c.what == collective::reduce_scatter && overlap(c.in, c.in_items * item, c.out, c.out_items * item);
}

/// All bits set: NaN in every floating-point type, -1 or the largest value in integers.
inline constexpr int poison = 0xff;

/// What the checked level does with lent memory, in the host's.
struct host_store {
  using memory = host_memory;

  static void copy(void* to, void const* from, index_t bytes) noexcept { detail::copy(to, from, bytes); }
  static void poison(void* to, index_t bytes) noexcept {
    std::memset(to, detail::poison, static_cast<std::size_t>(bytes));
  }
  /// The first byte that is no longer poison, or -1.
  static index_t first_written(void const* lent, index_t bytes) noexcept {
    auto const* at = static_cast<unsigned char const*>(lent);
    for (index_t i = 0; i < bytes; ++i)
      if (at[i] != detail::poison) return i;
    return -1;
  }
  static std::uint64_t digest(void const* data, index_t bytes) noexcept {
    return digest_of(data, static_cast<std::size_t>(bytes));
  }
};

/// At the checked level a request works on staged copies of its outputs; the caller's read as NaN until the
/// request has ended, and inputs are watched for changes.
struct loan {
  void* out = nullptr;
  void const* in = nullptr; // null: not watched
  index_t out_bytes = 0, in_bytes = 0;
  std::uint64_t digest = 0;

  bool any() const noexcept { return out != nullptr || in != nullptr; }

  /// `c` is changed to the copies, which are made in `staged`.
  template <class Store>
  void lend(Store store, call& c, buffer<typename Store::memory>& staged, memory_account account) {
    auto const given = c.in == nullptr ? 0 : c.in_items * bytes_of(c.type);
    auto const wanted = c.out == nullptr ? 0 : c.out_items * bytes_of(c.type);
    bool const shared = overlap(c.in, given, c.out, wanted);
    auto* copies = room(staged, wanted + (shared ? given : 0), account, c.where);
    if (shared) {
      store.copy(at(copies, wanted), c.in, given);
      c.in = at(copies, wanted);
    } else if (given > 0) {
      in = c.in;
      in_bytes = given;
      digest = store.digest(in, given);
    }
    if (wanted > 0) {
      out = c.out;
      out_bytes = wanted;
      c.out = copies;
      store.poison(out, wanted);
    }
  }

  /// Ends it: the outputs are delivered from `staged` if nobody touched what was lent.
  template <class Store>
  void give_back(Store store, signature const& sign, void const* staged, site where) const {
    if (auto const written = store.first_written(out, out_bytes); written >= 0)
      throw error("E-comm-014", where, "the output of ", text_of(sign), " was written to (byte ", written,
                  ") before its request was waited for; it is lent until then");
    if (in != nullptr && store.digest(in, in_bytes) != digest)
      throw error("E-comm-015", where, "the input of ", text_of(sign),
                  " changed before its request was waited for; it is lent until then");
    if (out_bytes > 0) store.copy(out, staged, out_bytes);
  }
};

/// A call under way.
template <transport T>
struct operation {
  enum class stage : std::uint8_t { signatures, counts, data, flags, collect };

  call request;
  signature sign;
  typename T::ticket ticket{};
  stage at = stage::data;
  int steps = 0;           // issued so far
  bool blocking = false;   // the caller waits at once
  bool in_transit = false; // the ticket is in use
  bool settled = false;    // all steps are issued
  bool finished = false;
  bool delivers = false; // `staged` holds the output of a native reduction
  std::exception_ptr error;
  int unwinding = 0; // exceptions in flight when it was made

  buffer<> pieces; // what the ranks sent, to be combined
  buffer<> tables; // counts and what is compared
  buffer<> staged; // stands in for the caller's buffers at the checked level
  loan lent;

  operation* next = nullptr;

  void reset(call const& c, bool is_blocking) {
    request = c;
    at = stage::data;
    steps = 0;
    blocking = is_blocking;
    in_transit = settled = finished = delivers = false;
    error = nullptr;
    unwinding = std::uncaught_exceptions();
    lent = {};
    next = nullptr;
  }
  bool in_rank_order() const noexcept {
    return request.reduces() && (request.order == summation::rank_order || !T::reduces);
  }
};

/// The tables of an operation, in elements of index_t: what each rank gets of me and I of each; the caller's
/// counts, copied; a flag of each rank; at the checked level all ranks' counts, and all ranks' signatures.
struct table_layout {
  index_t ranks;
  bool checked, own_counts;

  index_t sends() const noexcept { return 0; }
  index_t receives() const noexcept { return ranks; }
  index_t given() const noexcept { return 2 * ranks; }
  index_t flags() const noexcept { return 4 * ranks; }
  index_t all_counts() const noexcept { return 5 * ranks; }
  index_t signatures() const noexcept {
    return all_counts() + (checked && own_counts ? 2 * ranks * ranks : 0);
  }
  index_t bytes() const noexcept {
    return signatures() * static_cast<index_t>(sizeof(index_t)) +
           (checked ? ranks * static_cast<index_t>(sizeof(signature)) : 0);
  }
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm::detail {

template <transport T>
class engine {
public:
  using op = operation<T>;
  using stage = typename op::stage;
  using bulk_memory = host_memory;
  /// Memory whose spans it takes: the host's, and a device's where the transport can tell what to do with it.
  template <memory_space Memory>
  static constexpr bool reaches = Memory::host_accessible || device_transport<T>;
  /// Whether plain calls go to the transport as they are.
  static constexpr bool direct = direct_transport<T>;
  template <reducible_scalar S>
  static constexpr combine_function combiner() noexcept {
    return &detail::combine<S>;
  }

  engine(T&& moved, communicator_options options, std::uint64_t group)
      : transport(static_cast<T&&>(moved)), options(options), group(group),
        signs_(T::checks_signatures || options.checked || options.stall_limit > 0),
        plain_(!options.checked && options.stall_limit <= 0) {}
  engine(engine const&) = delete;
  engine& operator=(engine const&) = delete;
  ~engine() {
    for (auto* spare = spare_; spare != nullptr;) {
      auto* const next = spare->next;
      delete spare;
      spare = next;
    }
  }

  T transport;
  communicator_options const options;
  std::uint64_t const group;
  traffic_meter meter;
  memory_meter memory;
  std::int64_t sequence = 0;

  int rank() const noexcept { return transport.rank(); }
  int size() const noexcept { return transport.size(); }
  /// The engine of the group of `members`, which have one color.
  engine* split(std::vector<int> const& members, int color, int key, std::uint64_t id, site where) {
    return new engine(transport.split(members, color, key, id, options, where), options, id);
  }

  /// Whether a call of one step may go straight to the transport.
  bool plain() const noexcept { return plain_ && !lost_ && first_ == nullptr; }
  [[gnu::always_inline]] void run(call const& c) requires direct_transport<T> {
    if (!c.is_point_to_point()) ++sequence;
    transport.run(transfer_of(c));
  }
  op& begin(call const& c, bool blocking) {
    if (lost_)
      throw peer_failed("E-comm-016", c.where, name_of(c.what),
                        " on a communicator that an earlier failure or an abandoned request made useless");
    if constexpr (device_transport<T>)
      if (c.on_device) transport.admit(c, needs_staging(c) || (options.checked && !blocking));
    if (first_ != nullptr) progress();
    if constexpr (direct_transport<T>)
      if (blocking && plain_ && !c.is_point_to_point()) drain();
    auto& fresh = take(c, blocking);
    try {
      first_step(fresh);
    } catch (...) {
      end_with_error(fresh);
    }
    if (!fresh.finished) {
      (last_ == nullptr ? first_ : last_->next) = &fresh;
      last_ = &fresh;
      if (!fresh.in_transit) progress();
    }
    return fresh;
  }

  /// Drives everything as far as it goes now. True if anything moved.
  bool progress() {
    bool moved = false, clear = true; // all earlier operations are settled
    for (auto* each = first_; each != nullptr; each = each->next) {
      try {
        moved |= drive(*each, clear);
      } catch (...) {
        end_with_error(*each);
        moved = true;
      }
      clear = clear && each->settled;
    }
    if (moved) unlink_finished();
    return moved;
  }

  /// Whether it has ended.
  bool advance(op& one) {
    progress();
    return one.finished;
  }

  /// Waits for the end, frees the operation, and throws what it ended with.
  void complete(op& one) {
    if constexpr (direct_transport<T>)
      while (plain_ && first_ == &one && last_ == &one) {
        if (one.in_transit) {
          try {
            transport.wait(one.ticket);
            one.in_transit = false;
          } catch (...) {
            end_with_error(one);
            unlink_finished();
            break;
          }
        }
        progress();
      }
    if (!one.finished) {
      typename T::patience patience(transport);
      while (!one.finished)
        if (!progress()) {
          try {
            transport.pause(patience, one.sign, one.request.where);
          } catch (...) {
            end_with_error(one);
            lost_ = true;
            unlink_finished();
          }
        }
    }
    free(one);
  }

  /// Frees a finished operation, and throws what it ended with.
  void free(op& one) {
    if (!one.error && one.lent.any()) {
      try {
        one.lent.give_back(host_store(), one.sign, one.staged.data(), one.request.where);
      } catch (...) {
        one.error = std::current_exception();
      }
    }
    auto const error = static_cast<std::exception_ptr&&>(one.error);
    one.error = nullptr;
    if (!one.in_transit) {
      one.next = spare_;
      spare_ = &one;
    } // otherwise a transfer may still write to its memory, which is therefore never given back
    if (error) std::rethrow_exception(error);
  }

  /// Gives an operation up: its peers cannot finish, nor can this communicator go on.
  void abandon(op& one) noexcept {
    lost_ = true;
    one.lent = {};
    one.error = nullptr;
    give_up(one);
    unlink_finished();
    free(one);
  }
  void lose() noexcept { lost_ = true; }
  /// Takes a receive back: nobody waits for it.
  void withdraw(op& one) noexcept {
    one.lent = {};
    one.error = nullptr;
    one.finished = one.settled = true;
    if (one.in_transit) one.in_transit = !transport.withdraw(one.ticket);
    unlink_finished();
    free(one);
  }

private:
  memory_account account() noexcept { return {&memory, memory_kind::communication}; }
  rank_order_steps steps_of(op const& one) const noexcept { return {one.request, rank(), size()}; }

  /// Ends all collectives in flight. A blocking collective of the library goes on as one on all ranks (it
  /// would not meet a non-blocking one), and while it blocks, none of those could advance.
  void drain() {
    typename T::patience patience(transport);
    for (auto* each = first_; each != nullptr;)
      if (each->request.is_point_to_point()) {
        each = each->next;
      } else {
        if (!progress()) transport.pause(patience, each->sign, each->request.where);
        each = first_;
      }
  }
  op& take(call const& c, bool blocking) {
    auto* fresh = spare_;
    if (fresh == nullptr)
      fresh = new op();
    else
      spare_ = fresh->next;
    fresh->reset(c, blocking);
    return *fresh;
  }
  void end_with_error(op& one) noexcept {
    one.error = std::current_exception();
    give_up(one);
  }
  void give_up(op& one) noexcept {
    one.finished = one.settled = true;
    if (one.in_transit) one.in_transit = !transport.abandon(one.ticket);
  }
  void unlink_finished() noexcept {
    last_ = nullptr;
    for (auto** link = &first_; *link != nullptr;) {
      if ((*link)->finished) {
        *link = (*link)->next;
      } else {
        last_ = *link;
        link = &(*link)->next;
      }
    }
  }

  table_layout tables_of(op const& one) const noexcept {
    return {size(), options.checked && !T::checks_signatures, one.request.has_own_counts()};
  }
  index_t* table(op& one, index_t at) const noexcept { return static_cast<index_t*>(one.tables.data()) + at; }
  signature* signatures(op& one) const noexcept {
    return reinterpret_cast<signature*>(table(one, tables_of(one).signatures()));
  }

  void first_step(op& one) {
    auto& c = one.request;
    if (!c.is_point_to_point()) ++sequence;
    if (signs_) one.sign = signature_of(c, size(), c.is_point_to_point() ? 0 : sequence, group, one.blocking);
    auto const tables = tables_of(one);
    room(one.tables, tables.bytes(), account(), c.where);
    if (c.in_counts != nullptr) { // the caller may forget them
      copy(table(one, tables.given()), c.in_counts, size() * 8);
      c.in_counts = table(one, tables.given());
      if (c.out_counts != nullptr) {
        copy(table(one, tables.given() + size()), c.out_counts, size() * 8);
        c.out_counts = table(one, tables.given() + size());
      }
    }
    if (options.checked && !one.blocking) one.lent.lend(host_store(), one.request, one.staged, account());
    if (tables.checked && !c.is_point_to_point() && size() > 1) {
      one.at = stage::signatures;
      auto* all = signatures(one);
      all[rank()] = one.sign;
      gather_bytes(one, all, static_cast<index_t>(sizeof(signature)));
    } else {
      data_step(one);
    }
  }

  bool drive(op& one, bool clear) {
    bool moved = false;
    while (!one.finished) {
      if (one.in_transit) {
        if (!transport.test(one.ticket)) return moved;
        one.in_transit = false;
        moved = true;
      }
      if (!one.settled) {
        if (!clear) return moved;
        next_step(one);
        moved = true;
      } else {
        if (one.delivers)
          copy(one.request.out, one.staged.data(), one.request.out_items * bytes_of(one.request.type));
        one.finished = moved = true;
      }
    }
    return moved;
  }

  void issue(op& one, transfer step, bool last) {
    step.step = one.steps++;
    step.sign = signs_ ? &one.sign : nullptr;
    step.where = one.request.where;
    one.settled = last;
    if constexpr (direct_transport<T>)
      if (one.blocking && plain_ && (first_ == nullptr || !one.request.is_point_to_point()))
        return transport.run(step);
    one.in_transit = false; // until it has begun
    transport.start(step, one.ticket);
    one.in_transit = true;
  }
  /// Every rank's `bytes`, in place in `all`.
  void gather_bytes(op& one, void* all, index_t bytes) {
    transfer step;
    step.what = collective::all_gather;
    step.in = at(all, bytes * rank());
    step.out = all;
    step.count = bytes;
    issue(one, step, false);
  }

  void next_step(op& one) {
    switch (one.at) {
    case stage::signatures:
      compare_signatures(signatures(one), size(), rank(), one.request.where);
      if (!one.request.has_own_counts()) return data_step(one);
      return counts_step(one);
    case stage::counts:
      compare_counts(table(one, tables_of(one).all_counts()), size(), one.sign, one.request.where);
      return data_step(one);
    case stage::data:
      return add_up(one);
    case stage::flags: {
      auto const* flags = reinterpret_cast<std::byte const*>(table(one, tables_of(one).flags()));
      for (int r = 0; r < size(); ++r)
        if (flags[r] != std::byte{0}) throw_overflow(one);
      return after_sum(one);
    }
    case stage::collect:
      return;
    }
  }

  void counts_step(op& one) {
    one.at = stage::counts;
    auto const bytes = 2 * size() * static_cast<index_t>(sizeof(index_t));
    auto* all = table(one, tables_of(one).all_counts());
    copy(at(all, bytes * rank()), one.request.in_counts, bytes);
    gather_bytes(one, all, bytes);
  }
  void data_step(op& one) {
    one.at = stage::data;
    auto const& c = one.request;
    auto step = transfer_of(c);
    if (!one.in_rank_order()) {
      if (needs_staging(c)) { // a native reduction into its own input
        step.out = room(one.staged, c.out_items * bytes_of(c.type), account(), c.where);
        one.delivers = true;
      }
      return issue(one, step, true);
    }
    if (size() == 1) {
      copy(c.out, c.in, c.in_items * bytes_of(c.type));
      one.settled = true;
      return;
    }
    auto const steps = steps_of(one);
    auto* pieces = room(one.pieces, steps.pieces_bytes(), account(), c.where);
    auto const tables = tables_of(one);
    issue(one, steps.exchange(pieces, table(one, tables.sends()), table(one, tables.receives())), false);
  }

  void add_up(op& one) {
    auto const& c = one.request;
    bool const exact = c.combine(nullptr, steps_of(one).sum(one.pieces.data()));
    if (steps_of(one).whole()) { // every rank has seen everything, and agrees on an overflow
      if (!exact) throw_overflow(one);
      after_sum(one);
    } else if (is_integer(c.type) && c.operation == reduction::sum) {
      one.at = stage::flags;
      auto* flags = reinterpret_cast<std::byte*>(table(one, tables_of(one).flags()));
      flags[rank()] = std::byte{!exact};
      gather_bytes(one, flags, 1);
    } else {
      after_sum(one);
    }
  }

  void after_sum(op& one) {
    one.at = stage::collect;
    one.settled = true;
    if (steps_of(one).collects())
      issue(one, steps_of(one).collect(one.pieces.data(), table(one, tables_of(one).sends())), true);
  }

  [[noreturn]] void throw_overflow(op& one) const {
    throw numeric_error("E-comm-012", one.request.where, name_of(one.request.what),
                        ": a sum over ranks does not fit ", name_of(one.request.type),
                        "; reduce in a wider type");
  }

  bool const signs_, plain_;
  bool lost_ = false;
  op* first_ = nullptr;
  op* last_ = nullptr;
  op* spare_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm::detail {

inline double seconds_now() noexcept {
  std::timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Adds the time of a scope to a meter that wants it.
class timed_scope {
public:
  timed_scope(traffic_meter& meter, collective what) noexcept
      : meter_(meter), what_(what), start_(meter.times_calls() ? seconds_now() : 0) {}
  ~timed_scope() {
    if (meter_.times_calls()) meter_.add_time(what_, seconds_now() - start_);
  }
  timed_scope(timed_scope const&) = delete;
  timed_scope& operator=(timed_scope const&) = delete;

private:
  traffic_meter& meter_;
  collective what_;
  double start_;
};

/// A call under way; owns what was lent to it. Move-only. wait() returns when it has ended, test() says
/// whether it has; both throw what it ended with, once; afterwards, and by default, it is empty and both
/// return at once. Destroying an unfinished request waits for it; while an exception unwinds, which may be
/// the reason why it can never finish, it is abandoned instead: nobody waits, and its communicator is lost.
template <class Engine>
class request {
  using operation = typename Engine::op;

public:
  request() = default;
  request(Engine& owner, operation& one) noexcept : owner_(&owner), one_(&one) {}
  request(request&& other) noexcept : owner_(other.owner_), one_(other.one_) { other.one_ = nullptr; }
  request& operator=(request&& other) noexcept {
    if (this != &other) {
      dispose();
      owner_ = other.owner_;
      one_ = other.one_;
      other.one_ = nullptr;
    }
    return *this;
  }
  ~request() { dispose(); }

  void wait() {
    if (one_ == nullptr) return;
    timed_scope timer(owner_->meter, one_->request.what);
    auto* const one = one_;
    one_ = nullptr;
    owner_->complete(*one);
  }
  bool test() {
    if (one_ == nullptr) return true;
    timed_scope timer(owner_->meter, one_->request.what);
    if (!one_->finished && !owner_->advance(*one_)) return false;
    auto* const one = one_;
    one_ = nullptr;
    owner_->free(*one);
    return true;
  }

  /// Gives it up where it has not ended: nobody waits, and its communicator is lost.
  void abandon() noexcept {
    if (one_ == nullptr) return;
    if (one_->finished)
      finish_quietly();
    else
      owner_->abandon(*one_);
    one_ = nullptr;
  }
  /// Takes a receive that nothing has come for back, as if it had never been started.
  void withdraw() noexcept {
    if (one_ == nullptr) return;
    if (one_->finished)
      finish_quietly();
    else
      owner_->withdraw(*one_);
    one_ = nullptr;
  }

private:
  void dispose() noexcept {
    if (one_ == nullptr) return;
    if (!one_->finished && std::uncaught_exceptions() > one_->unwinding)
      owner_->abandon(*one_);
    else
      finish_quietly();
    one_ = nullptr;
  }
  void finish_quietly() noexcept {
    try {
      wait();
    } catch (...) { // a destructor can't say so; the next call on the communicator does
      owner_->lose();
    }
  }

  Engine* owner_ = nullptr;
  operation* one_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm::detail {

/// `Derived` is the communicator: constructible from an engine (what split makes).
template <class Derived, class Engine>
class interface {
public:
  using request = detail::request<Engine>;
  using bulk_memory = typename Engine::bulk_memory;

  interface(interface&& other) noexcept : engine_(other.engine_) {
    other.engine_ = nullptr;
  }
  interface& operator=(interface&& other) noexcept {
    auto* const mine = engine_;
    engine_ = other.engine_;
    other.engine_ = mine;
    return *this;
  }
  ~interface() { delete engine_; }

  int rank() const noexcept { return engine_->rank(); }
  int size() const noexcept { return engine_->size(); }
  communicator_options options() const noexcept { return engine_->options; }
  traffic_meter& meter() noexcept { return engine_->meter; }
  traffic_meter const& meter() const noexcept { return engine_->meter; }
  /// What this communicator itself holds: memory for exchanges, kept from call to call.
  memory_meter const& memory() const noexcept { return engine_->memory; }
  /// An upper bound of the memory that one all_reduce, reduce or reduce_scatter of n T in rank_order keeps at
  /// the unchecked level; calls one after another share it, requests in flight at once have one each.
  template <reducible_scalar R>
  static constexpr index_t scratch_bytes(index_t n, int ranks) noexcept {
    constexpr auto item = static_cast<index_t>(sizeof(R));
    auto const whole = n * item <= whole_vector_bytes ? ranks * n * item : 0;
    auto const slices = ranks * ((n + ranks - 1) / ranks) * item;
    return (whole > slices ? whole : slices) + table_layout{ranks, false, false}.bytes();
  }

  void barrier(site where = site::here()) { block(words().named(collective::barrier, where)); }

  template <message_of<Engine> Span>
  void broadcast(Span data, int root, site where = site::here()) {
    block(words().broadcast(data, root, where));
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_broadcast(Span data, int root, site where = site::here()) {
    return start(words().broadcast(data, root, where));
  }

  template <summand_of<Engine> Span>
  void reduce(Span out, input_like<Span> in, int root, reduce_options how = {}, site where = site::here()) {
    block(summed<Span>(words().reduce(out, in, root, how, where)));
  }

  template <summand_of<Engine> Span>
  void all_reduce(Span in_out, reduce_options how = {}, site where = site::here()) {
    block(summed<Span>(words().all_reduce(in_out, in_out, how, where)));
  }
  template <summand_of<Engine> Span>
  void all_reduce(Span out, input_like<Span> in, reduce_options how = {}, site where = site::here()) {
    block(summed<Span>(words().all_reduce(out, in, how, where)));
  }
  template <reducible_scalar R>
  [[nodiscard]] R all_reduce(R value, reduce_options how = {}, site where = site::here()) {
    all_reduce(std::span<R>(&value, 1), how, where);
    return value;
  }
  template <summand_of<Engine> Span>
  [[nodiscard]] request start_all_reduce(Span in_out, reduce_options how = {}, site where = site::here()) {
    return start(summed<Span>(words().all_reduce(in_out, in_out, how, where)));
  }
  template <summand_of<Engine> Span>
  [[nodiscard]] request start_all_reduce(Span out, input_like<Span> in, reduce_options how = {},
                                         site where = site::here()) {
    return start(summed<Span>(words().all_reduce(out, in, how, where)));
  }

  template <summand_of<Engine> Span>
  void reduce_scatter(Span out, input_like<Span> in, reduce_options how = {}, site where = site::here()) {
    block(summed<Span>(words().reduce_scatter(out, in, nullptr, how, where)));
  }
  template <summand_of<Engine> Span>
  void reduce_scatter_v(Span out, input_like<Span> in, counts_span counts, reduce_options how = {},
                        site where = site::here()) {
    block(summed<Span>(words().reduce_scatter(out, in, &counts, how, where)));
  }
  template <summand_of<Engine> Span>
  [[nodiscard]] request start_reduce_scatter(Span out, input_like<Span> in, reduce_options how = {},
                                             site where = site::here()) {
    return start(summed<Span>(words().reduce_scatter(out, in, nullptr, how, where)));
  }
  template <summand_of<Engine> Span>
  [[nodiscard]] request start_reduce_scatter_v(Span out, input_like<Span> in, counts_span counts,
                                               reduce_options how = {}, site where = site::here()) {
    return start(summed<Span>(words().reduce_scatter(out, in, &counts, how, where)));
  }

  template <message_of<Engine> Span>
  void all_gather(Span out, input_like<Span> in, site where = site::here()) {
    block(words().gather(collective::all_gather, out, in, nullptr, -1, where));
  }
  template <message_of<Engine> Span>
  void all_gather_v(Span out, input_like<Span> in, counts_span counts, site where = site::here()) {
    block(words().gather(collective::all_gather, out, in, &counts, -1, where));
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_all_gather(Span out, input_like<Span> in, site where = site::here()) {
    return start(words().gather(collective::all_gather, out, in, nullptr, -1, where));
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_all_gather_v(Span out, input_like<Span> in, counts_span counts,
                                           site where = site::here()) {
    return start(words().gather(collective::all_gather, out, in, &counts, -1, where));
  }
  template <message_of<Engine> Span>
  void gather(Span out, input_like<Span> in, int root, site where = site::here()) {
    block(words().gather(collective::gather, out, in, nullptr, root, where));
  }
  template <message_of<Engine> Span>
  void gather_v(Span out, input_like<Span> in, counts_span counts, int root, site where = site::here()) {
    block(words().gather(collective::gather, out, in, &counts, root, where));
  }

  template <message_of<Engine> Span>
  void scatter(Span out, input_like<Span> in, int root, site where = site::here()) {
    block(words().scatter(out, in, nullptr, root, where));
  }
  template <message_of<Engine> Span>
  void scatter_v(Span out, input_like<Span> in, counts_span counts, int root, site where = site::here()) {
    block(words().scatter(out, in, &counts, root, where));
  }

  template <message_of<Engine> Span>
  void all_to_all(Span out, input_like<Span> in, site where = site::here()) {
    block(words().all_to_all(out, nullptr, in, nullptr, where));
  }
  template <message_of<Engine> Span>
  void all_to_all_v(Span out, counts_span out_counts, input_like<Span> in, counts_span in_counts,
                    site where = site::here()) {
    block(words().all_to_all(out, &out_counts, in, &in_counts, where));
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_all_to_all(Span out, input_like<Span> in, site where = site::here()) {
    return start(words().all_to_all(out, nullptr, in, nullptr, where));
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_all_to_all_v(Span out, counts_span out_counts, input_like<Span> in,
                                           counts_span in_counts, site where = site::here()) {
    return start(words().all_to_all(out, &out_counts, in, &in_counts, where));
  }

  template <readable_by<Engine> Span>
  void send(Span data, int to, int tag, site where = site::here()) {
    block(words().send(data, to, tag, where));
  }
  template <message_of<Engine> Span>
  void receive(Span data, int from, int tag, site where = site::here()) {
    block(words().receive(data, from, tag, where));
  }
  template <readable_by<Engine> Span>
  [[nodiscard]] request start_send(Span data, int to, int tag, site where = site::here()) {
    return start(words().send(data, to, tag, where));
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_receive(Span data, int from, int tag, site where = site::here()) {
    return start(words().receive(data, from, tag, where));
  }

  [[nodiscard]] Derived split(int color, int key, site where = site::here()) {
    if (color < 0)
      throw config_error("E-comm-004", where, "split: color ", color, " on rank ", rank(),
                         ", need 0 or more");
    auto const ranks = static_cast<std::size_t>(size());
    std::int32_t const mine[2] = {color, key};
    std::vector<std::int32_t> all(2 * ranks);
    auto c = words().gather(collective::all_gather, std::span<std::int32_t>(all), mine, nullptr, -1, where);
    c.what = collective::split;
    block(c);
    std::vector<int> members; // ranks of my color, by key, then by rank
    for (int r = 0; r < size(); ++r) {
      if (all[2 * static_cast<std::size_t>(r)] != color) continue;
      auto place = members.end();
      while (place != members.begin() &&
             all[2 * static_cast<std::size_t>(place[-1]) + 1] > all[2 * static_cast<std::size_t>(r) + 1])
        --place;
      members.insert(place, r);
    }
    std::int64_t const parts[] = {static_cast<std::int64_t>(engine_->group), engine_->sequence, color};
    auto const group = digest_of(parts, sizeof parts);
    return Derived(engine_->split(members, color, key, group, where));
  }

protected:
  explicit interface(Engine* owned) noexcept : engine_(owned) {}

private:
  describer words() const noexcept { return {rank(), size()}; }
  template <class Span>
  [[gnu::always_inline]] static call summed(call c) noexcept {
    c.combine = Engine::template combiner<typename Span::value_type>();
    return c;
  }
  void meter_call(call const& c) noexcept {
    engine_->meter.count(c.what, (c.in_items > c.out_items ? c.in_items : c.out_items) * bytes_of(c.type));
  }
  /// Always inlined, and `c` never given away whole, so that it needs no memory: what is left of a plain call
  /// is the transport's one call.
  [[gnu::always_inline]] void block(call const& c) {
    if constexpr (Engine::direct)
      if (!c.on_device && engine_->plain() && !engine_->meter.times_calls() && !needs_staging(c) &&
          !(c.reduces() && c.order == summation::rank_order)) {
        meter_call(c);
        return engine_->run(c);
      }
    block_in_steps(call{c.what, c.type, c.in, c.out, c.in_items, c.out_items, c.count, c.in_counts,
                        c.out_counts, c.root, c.tag, c.operation, c.order, c.combine, c.on_device, c.where});
  }
  [[gnu::noinline]] void block_in_steps(call const& c) {
    timed_scope timer(engine_->meter, c.what);
    meter_call(c);
    engine_->complete(engine_->begin(c, true));
  }
  request start(call const& c) {
    timed_scope timer(engine_->meter, c.what);
    meter_call(c);
    return request(*engine_, engine_->begin(c, false));
  }

  Engine* engine_;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
/// Matches sends with receives among ranks of one process: by sender, receiver and tag, in order.
#ifndef TESSERA_COMM_DETAIL_MAILBOX_HPP
#define TESSERA_COMM_DETAIL_MAILBOX_HPP

#include <vector>

namespace tessera::inline TESSERA_ABI::comm::detail {

class mailbox {
public:
  enum class state : std::uint8_t { none, posted, done, unequal };

  /// One side of a message, owned by its ticket. Its address is what the mailbox knows: it stays in place
  /// while it is posted.
  struct letter {
    int from = 0, to = 0;
    transfer what;
    signature other; // filled in where the two sides do not fit
    state at = state::none;

    bool sends() const noexcept { return what.what == collective::send; }
  };

  /// Delivers at once if the other side is waiting; true then, and the other side has ended too.
  bool post(letter& mine) {
    for (auto place = waiting_.begin(); place != waiting_.end(); ++place) {
      auto& other = **place;
      if (other.from != mine.from || other.to != mine.to || other.what.tag != mine.what.tag ||
          other.sends() == mine.sends())
        continue;
      waiting_.erase(place);
      if (mine.what.type == other.what.type && mine.what.count == other.what.count) {
        auto const& source = mine.sends() ? mine.what : other.what;
        auto const& target = mine.sends() ? other.what : mine.what;
        copy(target.out, source.in, source.count * bytes_of(source.type));
        mine.at = other.at = state::done;
      } else {
        mine.other = *other.what.sign;
        other.other = *mine.what.sign;
        mine.at = other.at = state::unequal;
      }
      return true;
    }
    mine.at = state::posted;
    waiting_.push_back(&mine);
    return false;
  }

  void withdraw(letter& mine) noexcept {
    for (auto place = waiting_.begin(); place != waiting_.end(); ++place)
      if (*place == &mine) {
        waiting_.erase(place);
        break;
      }
    mine.at = state::none;
  }

private:
  std::vector<letter*> waiting_;
};

/// What a receive or send ends with when the two sides differ.
[[noreturn]] inline void throw_unequal(mailbox::letter const& mine) {
  throw collective_mismatch("E-comm-013", mine.what.where,
                            "the two sides of a message differ: ", text_of(*mine.what.sign), " meets ",
                            text_of(mine.other));
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm {

namespace detail {

/// Collectives end where they start; a message to oneself meets its other side among the requests in flight.
class self_transport {
public:
  static constexpr bool checks_signatures = true; // there is nobody to differ from
  static constexpr bool reduces = false;

  struct ticket {
    mailbox::letter letter;
  };
  struct patience {
    explicit patience(self_transport&) noexcept {}
  };

  int rank() const noexcept { return 0; }
  int size() const noexcept { return 1; }

  void start(transfer const& step, ticket& t) {
    t.letter = {0, 0, step, {}, mailbox::state::done};
    if (step.what == collective::send || step.what == collective::receive)
      mail_.post(t.letter);
    else if (step.what != collective::broadcast) // the root has its data
      copy(step.out, step.in,
           (step.in_counts != nullptr ? *step.in_counts : step.count) * bytes_of(step.type));
  }
  bool test(ticket& t) {
    if (t.letter.at == mailbox::state::unequal) throw_unequal(t.letter);
    return t.letter.at == mailbox::state::done;
  }
  void pause(patience&, signature const& sign, site where) {
    throw stalled("E-comm-020", where, text_of(sign),
                  " would wait for ever: on a communicator of one rank the ",
                  "other side of a message must have been started before");
  }
  bool withdraw(ticket& t) noexcept {
    mail_.withdraw(t.letter);
    return true;
  }
  bool abandon(ticket& t) noexcept { return withdraw(t); }

  self_transport split(std::vector<int> const&, int, int, std::uint64_t, communicator_options, site) {
    return {};
  }

private:
  mailbox mail_;
};

} // namespace detail

class self : public detail::interface<self, detail::engine<detail::self_transport>> {
  using base = detail::interface<self, detail::engine<detail::self_transport>>;

public:
  explicit self(communicator_options options = {})
      : base(new detail::engine<detail::self_transport>({}, options, 1)) {}

private:
  friend base;
  explicit self(detail::engine<detail::self_transport>* owned) noexcept : base(owned) {}
};

static_assert(communicator<self>);

} // namespace tessera::inline TESSERA_ABI::comm

#endif
/// Ranks that are threads of one process: for tests, for a laptop, for eight ranks on two cores. They sleep
/// while they wait. Every collective's signature is compared; a rank that throws wakes all others with
/// peer_failed.
///
///     comm::run_threads(4, [](comm::threads& ranks) {
///       std::vector<float> mine(8, 1.0f);
///       ranks.all_reduce(std::span(mine));          // 4.0f everywhere
///     });
///
/// Cost: each message is copied once, by the last rank to arrive; one wake-up a rank and step.
#ifndef TESSERA_COMM_THREADS_HPP
#define TESSERA_COMM_THREADS_HPP

#include <thread>

/// Where thread ranks meet: each collective is a round at which all ranks of a group arrive; the last one to
/// arrive copies for all. Waiting ranks sleep on a condition variable and are woken by completion, failure, a
/// mismatch or the watchdog.
#ifndef TESSERA_COMM_DETAIL_MEETING_HPP
#define TESSERA_COMM_DETAIL_MEETING_HPP

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// One collective (or one step of it) of a group, found by its number.
struct round {
  std::int64_t sequence = 0;
  int step = 0;
  int arrived = 0, left = 0;
  bool active = false, running = false, done = false;
  std::vector<transfer> transfers;
  std::vector<signature> signs;
  std::vector<char> here;

  void open(int ranks, std::int64_t at_sequence, int at_step) {
    auto const n = static_cast<std::size_t>(ranks);
    sequence = at_sequence;
    step = at_step;
    arrived = left = 0;
    active = true;
    running = done = false;
    transfers.resize(n);
    signs.resize(n);
    here.assign(n, 0);
  }
};

/// Carries out a round in which all have arrived. Signatures agree, so do the counts that they digest.
inline void perform(std::vector<transfer> const& all) noexcept {
  auto const ranks = narrow<int>(all.size());
  auto const& any = all.front();
  auto const item = bytes_of(any.type);
  // Part `part` of a buffer laid out by `counts`, or by equal counts.
  auto const offset = [&](int part, index_t const* counts) {
    return offset_of(part, any.count, counts) * item;
  };
  auto const length = [&](int part, index_t const* counts) {
    return (counts != nullptr ? counts[part] : any.count) * item;
  };
  auto const of = [&](int rank) -> transfer const& { return all[static_cast<std::size_t>(rank)]; };
  auto const gather_at = [&](int to) {
    auto const* counts = of(to).out_counts;
    for (int from = 0; from < ranks; ++from)
      copy(at(of(to).out, offset(from, counts)), of(from).in, length(from, counts));
  };
  for (int r = 0; r < ranks; ++r) {
    auto const& mine = of(r);
    switch (any.what) {
    case collective::broadcast:
      if (r != any.root) copy(mine.out, of(any.root).in, any.count * item);
      break;
    case collective::all_gather:
      gather_at(r);
      break;
    case collective::gather:
      if (r == any.root) gather_at(r);
      break;
    case collective::scatter:
      copy(mine.out, at(of(any.root).in, offset(r, mine.in_counts)), length(r, mine.in_counts));
      break;
    case collective::all_to_all:
      for (int from = 0; from < ranks; ++from)
        copy(at(mine.out, offset(from, mine.out_counts)), at(of(from).in, offset(r, of(from).in_counts)),
             length(from, mine.out_counts));
      break;
    default: // a barrier moves nothing
      break;
    }
  }
}

struct group;

/// What all rank threads of one run share. One mutex guards everything that is shared.
struct world {
  explicit world(int ranks) : gone(static_cast<std::size_t>(ranks), 0) {}

  std::mutex mutex;
  std::vector<char> gone; // ranks whose function has ended
  std::string failure;    // of the first rank that failed; empty: none
  std::vector<std::weak_ptr<group>> groups;
  std::vector<std::shared_ptr<group>>
      forming; // not yet joined by all members: what befalls it is for them too

  std::shared_ptr<group> group_of(std::uint64_t id, std::vector<int> const& members);
  /// Rank `rank` has ended, by an exception if `why` is not empty: nobody need wait for it.
  void leave(int rank, std::string const& why);
};

/// Ranks that communicate, numbered anew from 0.
struct group {
  enum class fate : std::uint8_t { fine, mismatch, stalled, given_up };

  group(world& shared, std::uint64_t number, std::vector<int> const& world_ranks)
      : owner(shared), id(number), members(world_ranks), last(world_ranks.size()) {}

  world& owner;
  std::uint64_t const id;
  std::vector<int> const members;
  std::condition_variable changed;
  std::uint64_t epoch = 0;
  int joined = 0;
  fate state = fate::fine;
  std::string why;
  std::vector<std::unique_ptr<round>> rounds;
  std::vector<signature> last; // where each rank was seen last
  mailbox mail;

  int size() const noexcept { return narrow<int>(members.size()); }
  bool gone(int rank) const noexcept {
    return owner.gone[static_cast<std::size_t>(members[static_cast<std::size_t>(rank)])] != 0;
  }

  // All below: called with the mutex held.

  void wake() {
    ++epoch;
    changed.notify_all();
  }
  void end(fate how, std::string text) {
    if (state != fate::fine) return;
    state = how;
    why = static_cast<std::string&&>(text);
    wake();
  }
  /// Throws if the group, or a rank anywhere in the world, has come to an end.
  void check(signature const& sign, site where) const {
    switch (state) {
    case fate::mismatch:
      throw collective_mismatch("E-comm-010", where, why);
    case fate::stalled:
      throw stalled("E-comm-021", where, why);
    case fate::given_up:
      throw peer_failed("E-comm-017", where, why);
    case fate::fine:
      break;
    }
    if (!owner.failure.empty())
      throw peer_failed("E-comm-017", where, text_of(sign), " cannot finish: ", owner.failure);
  }

  round& round_of(std::int64_t sequence, int step) {
    round* idle = nullptr;
    for (auto& each : rounds) {
      if (each->active && each->sequence == sequence && each->step == step) return *each;
      if (!each->active) idle = each.get();
    }
    if (idle == nullptr) idle = rounds.emplace_back(std::make_unique<round>()).get();
    idle->open(size(), sequence, step);
    return *idle;
  }

  /// Ranks that `r` waits for and that have ended without it: it will never be complete.
  void check_gone(round const& r, signature const& sign) {
    for (int rank = 0; rank < size(); ++rank)
      if (r.here[static_cast<std::size_t>(rank)] == 0 && gone(rank))
        end(fate::mismatch, tessera::text_of("ranks called different collectives: others are in ",
                                             text_of(sign), ", rank ", rank, " has ended", seen(rank)));
  }
  std::string seen(int rank) const {
    auto const& sign = last[static_cast<std::size_t>(rank)];
    return sign.sequence == 0 ? std::string(" (no collective so far)")
                              : tessera::text_of(" (its last: ", text_of(sign), ")");
  }
  /// "rank 2 (its last: barrier at ...), rank 3 ...": whom a call waits for.
  std::string missing(signature const& sign) const {
    if (sign.what == collective::send || sign.what == collective::receive)
      return tessera::text_of("rank ", sign.root);
    for (auto const& each : rounds) {
      if (!each->active || each->done || each->sequence != sign.sequence) continue;
      std::string names;
      for (int rank = 0; rank < size(); ++rank)
        if (each->here[static_cast<std::size_t>(rank)] == 0)
          names += tessera::text_of(names.empty() ? "rank " : ", rank ", rank, seen(rank));
      if (!names.empty()) return names;
    }
    return "an earlier request";
  }
};

inline std::shared_ptr<group> world::group_of(std::uint64_t id, std::vector<int> const& members) {
  std::lock_guard lock(mutex);
  std::shared_ptr<group> found;
  std::size_t kept = 0;
  for (auto& known : groups)
    if (auto held = known.lock()) {
      if (held->id == id) found = held;
      groups[kept++] = held;
    }
  groups.resize(kept);
  if (!found) {
    found = std::make_shared<group>(*this, id, members);
    groups.push_back(found);
    forming.push_back(found);
  }
  if (++found->joined == found->size())
    for (auto& each : forming)
      if (each == found) {
        each.swap(forming.back());
        forming.pop_back();
        break;
      }
  return found;
}

inline void world::leave(int rank, std::string const& why) {
  std::lock_guard lock(mutex);
  gone[static_cast<std::size_t>(rank)] = 1;
  if (failure.empty() && !why.empty()) failure = tessera::text_of("rank ", rank, " failed: ", why);
  for (auto& known : groups)
    if (auto held = known.lock()) held->wake();
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm {

namespace detail {

class threads_transport {
public:
  static constexpr bool checks_signatures = true;
  static constexpr bool reduces = false;

  struct ticket {
    round* where = nullptr;
    mailbox::letter letter;
  };
  struct patience {
    explicit patience(threads_transport& t) : start(std::chrono::steady_clock::now()) {
      std::lock_guard lock(t.group_->owner.mutex);
      epoch = t.group_->epoch;
    }
    std::uint64_t epoch = 0;
    std::chrono::steady_clock::time_point start;
  };

  threads_transport(std::shared_ptr<group> meeting, int rank, double stall_limit)
      : group_(static_cast<std::shared_ptr<group>&&>(meeting)), rank_(rank), stall_limit_(stall_limit) {}

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return group_->size(); }

  void start(transfer const& step, ticket& t) {
    std::unique_lock lock(group_->owner.mutex);
    auto const& sign = *step.sign;
    group_->check(sign, step.where);
    if (step.what == collective::send || step.what == collective::receive) {
      t.where = nullptr;
      bool const sends = step.what == collective::send;
      t.letter = {sends ? rank_ : step.root, sends ? step.root : rank_, step, {}, mailbox::state::none};
      if (group_->mail.post(t.letter)) group_->wake();
      return;
    }
    auto const self = static_cast<std::size_t>(rank_);
    group_->last[self] = sign;
    auto& meeting = group_->round_of(sign.sequence, step.step);
    for (std::size_t r = 0; r < meeting.here.size(); ++r)
      if (meeting.here[r] != 0 && !agree(meeting.signs[r], sign)) {
        group_->end(group::fate::mismatch,
                    tessera::text_of("ranks called different collectives: rank ", r, " ",
                                     text_of(meeting.signs[r]), ", rank ", rank_, " ", text_of(sign)));
        group_->check(sign, step.where);
      }
    meeting.here[self] = 1;
    meeting.transfers[self] = step;
    meeting.signs[self] = sign;
    t.where = &meeting;
    if (++meeting.arrived < size()) return;
    compare_counts(meeting, step);
    meeting.running = true; // from here on nobody leaves before it is done
    lock.unlock();
    perform(meeting.transfers);
    lock.lock();
    meeting.running = false;
    meeting.done = true;
    group_->wake();
  }

  bool test(ticket& t) {
    std::lock_guard lock(group_->owner.mutex);
    if (t.where == nullptr) return test_letter(t.letter);
    auto& meeting = *t.where;
    if (meeting.done) {
      leave(meeting);
      return true;
    }
    if (meeting.running) return false;
    auto const& mine = static_cast<std::size_t>(rank_);
    group_->check(meeting.signs[mine], meeting.transfers[mine].where);
    group_->check_gone(meeting, meeting.signs[mine]);
    group_->check(meeting.signs[mine], meeting.transfers[mine].where);
    return false;
  }

  void pause(patience& p, signature const& sign, site where) {
    std::unique_lock lock(group_->owner.mutex);
    auto const moved = [&] { return group_->epoch != p.epoch; };
    if (stall_limit_ <= 0) {
      group_->changed.wait(lock, moved);
    } else if (!group_->changed.wait_until(lock, p.start + std::chrono::duration<double>(stall_limit_),
                                           moved)) {
      group_->end(group::fate::stalled,
                  tessera::text_of("after ", stall_limit_, " s rank ", rank_, " of ", size(), " gave up ",
                                   text_of(sign), "; it waited for ", group_->missing(sign)));
      group_->check(sign, where);
    }
    p.epoch = group_->epoch;
  }

  bool abandon(ticket& t) noexcept {
    std::unique_lock lock(group_->owner.mutex);
    if (t.where == nullptr) {
      group_->mail.withdraw(t.letter);
    } else {
      group_->changed.wait(lock, [&] { return !t.where->running; });
      if (t.where->done) {
        leave(*t.where);
        return true;
      }
    }
    group_->end(group::fate::given_up,
                tessera::text_of("rank ", rank_, " gave up a request that had not ended"));
    return true;
  }

  bool withdraw(ticket& t) noexcept {
    std::lock_guard lock(group_->owner.mutex);
    group_->mail.withdraw(t.letter);
    return true;
  }

  threads_transport split(std::vector<int> const& members, int, int, std::uint64_t id, communicator_options,
                          site) {
    std::vector<int> world_ranks;
    int rank = 0;
    for (int member : members) {
      if (member == rank_) rank = narrow<int>(world_ranks.size());
      world_ranks.push_back(group_->members[static_cast<std::size_t>(member)]);
    }
    return {group_->owner.group_of(id, world_ranks), rank, stall_limit_};
  }

private:
  void leave(round& meeting) noexcept {
    if (++meeting.left == size()) meeting.active = false;
  }

  bool test_letter(mailbox::letter& letter) {
    if (letter.at == mailbox::state::done) return true;
    if (letter.at == mailbox::state::unequal) throw_unequal(letter);
    auto const peer = letter.sends() ? letter.to : letter.from;
    try {
      group_->check(*letter.what.sign, letter.what.where);
      if (group_->gone(peer))
        group_->end(group::fate::mismatch, tessera::text_of(text_of(*letter.what.sign), " on rank ", rank_,
                                                            " waits for rank ", peer, ", which has ended"));
      group_->check(*letter.what.sign, letter.what.where);
    } catch (...) {
      group_->mail.withdraw(letter);
      throw;
    }
    return false;
  }

  /// all_to_all_v: what each rank sends is what its peer expects.
  void compare_counts(round& meeting, transfer const& step) {
    if (step.what != collective::all_to_all || step.in_counts == nullptr) return;
    for (int from = 0; from < size(); ++from)
      for (int to = 0; to < size(); ++to) {
        auto const sent = meeting.transfers[static_cast<std::size_t>(from)].in_counts[to];
        auto const expected = meeting.transfers[static_cast<std::size_t>(to)].out_counts[from];
        if (sent == expected) continue;
        group_->end(group::fate::mismatch,
                    tessera::text_of(text_of(*step.sign), ": rank ", from, " sends ", sent,
                                     " elements to rank ", to, ", which expects ", expected));
        group_->check(*step.sign, step.where);
      }
  }

  std::shared_ptr<group> group_;
  int rank_;
  double stall_limit_;
};

} // namespace detail

/// One rank of `run_threads`, used by the thread that it was given to.
class threads : public detail::interface<threads, detail::engine<detail::threads_transport>> {
  using base = detail::interface<threads, detail::engine<detail::threads_transport>>;
  using engine = detail::engine<detail::threads_transport>;

public:
  /// What run_threads gives to rank `rank` of `shared`.
  threads(detail::world& shared, int rank, communicator_options options)
      : base(new engine({shared.group_of(1, everyone(shared)), rank, options.stall_limit}, options, 1)) {}

private:
  friend base;
  explicit threads(engine* owned) noexcept : base(owned) {}

  static std::vector<int> everyone(detail::world const& shared) {
    std::vector<int> members;
    for (std::size_t r = 0; r < shared.gone.size(); ++r) members.push_back(narrow<int>(r));
    return members;
  }
};

static_assert(communicator<threads>);

/// Calls body(rank) on `ranks` threads, each with its own communicator, and returns when all have ended.
/// Rethrows the first exception that was not the consequence of another rank's.
template <std::invocable<threads&> F>
void run_threads(int ranks, F&& body, communicator_options options = {}, site where = site::here()) {
  if (ranks < 1)
    throw config_error("E-comm-007", where, "run_threads: ", ranks, " ranks were asked for, need 1 or more");
  detail::world shared(ranks);
  std::exception_ptr cause, consequence;
  auto const run = [&](int rank) {
    std::string why;
    auto const fail = [&](std::exception_ptr& slot, char const* text) {
      why = text;
      std::lock_guard lock(shared.mutex);
      if (!slot) slot = std::current_exception();
    };
    try {
      threads mine(shared, rank, options);
      body(mine);
    } catch (peer_failed const& e) {
      fail(consequence, e.what());
    } catch (std::exception const& e) {
      fail(cause, e.what());
    } catch (...) {
      fail(cause, "an exception that is not a std::exception");
    }
    shared.leave(rank, why);
  };
  std::vector<std::thread> workers;
  try {
    for (int r = 0; r < ranks; ++r) workers.emplace_back(run, r);
  } catch (std::exception const& e) { // no thread to be had: those that run must not wait for the others
    for (auto r = narrow<int>(workers.size()); r < ranks; ++r) shared.leave(r, e.what());
    for (auto& worker : workers) worker.join();
    throw config_error("E-comm-008", where, "run_threads: no ", ranks, " threads to be had (", e.what(), ")");
  }
  for (auto& worker : workers) worker.join();
  if (cause) std::rethrow_exception(cause);
  if (consequence) std::rethrow_exception(consequence);
}

} // namespace tessera::inline TESSERA_ABI::comm

#endif
#if defined(TESSERA_WITH_MPI)
/// Ranks on MPI: an MPI_Comm that the host application has, or a program of our own.
///
///     comm::mpi ranks(my_comm);                       // borrowed: duplicated, never touched otherwise
///     ranks.all_reduce(std::span(values), {.order = comm::summation::native});
///
///     int main(int argc, char** argv) {               // prints and aborts all ranks if one throws
///       return comm::run_mpi(argc, argv, [](comm::mpi& world) { train(world); });
///     }
///
/// With `mpi_options{.device_buffers = true}` messages may also be device_spans: the library, which must be
/// CUDA-aware, moves them itself. Only its own calls go there (no rank_order, no reductions of 16-bit types,
/// no start_X at the checked level: the host would have to touch the data), and the caller sees to it that
/// the compute stream has finished writing (`ex.synchronize()`) before it calls.
///
/// Cost: one MPI call each, except reductions in rank_order (two; one up to 2 KiB) and communicators that are
/// checked (one more) or have a stall limit (non-blocking calls and polling). Counts are 64-bit (MPI-4).
#ifndef TESSERA_COMM_MPI_HPP
#define TESSERA_COMM_MPI_HPP

#include <cstdio>
#include <ctime>

#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h> // MPIX_Query_cuda_support, which MPICH has in mpi.h
#endif

static_assert(MPI_VERSION >= 4, "tessera/comm/mpi.hpp needs MPI-4 (64-bit counts), such as MPICH 4.0");

namespace tessera::inline TESSERA_ABI::comm {

/// MPI's thread levels. Tessera makes all MPI calls of a rank from one thread, but runs others beside it.
enum class mpi_threads : int {
  single = MPI_THREAD_SINGLE,
  funneled = MPI_THREAD_FUNNELED,
  serialized = MPI_THREAD_SERIALIZED,
  multiple = MPI_THREAD_MULTIPLE
};
constexpr char const* name_of(mpi_threads level) noexcept {
  return level == mpi_threads::single       ? "MPI_THREAD_SINGLE"
         : level == mpi_threads::funneled   ? "MPI_THREAD_FUNNELED"
         : level == mpi_threads::serialized ? "MPI_THREAD_SERIALIZED"
                                            : "MPI_THREAD_MULTIPLE";
}

struct mpi_options {
  bool checked = false;   // see communicator_options
  double stall_limit = 0; // see communicator_options
  /// What MPI must have been initialised with. `single` is enough where the process has one thread only.
  mpi_threads level = mpi_threads::funneled;
  /// Take messages in device memory. Needs an MPI that says it is CUDA-aware.
  bool device_buffers = false;
};

} // namespace tessera::inline TESSERA_ABI::comm

/// The calls of MPI: one for each transfer, every return code looked at, and the watchdog.
// Before the guard, since mpi.h is included by that header alone, which includes this one where it belongs.

#ifndef TESSERA_COMM_DETAIL_MPI_TRANSPORT_HPP
#define TESSERA_COMM_DETAIL_MPI_TRANSPORT_HPP

#include <sched.h>

namespace tessera::inline TESSERA_ABI::comm::detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void throw_mpi(int code, char const* what, site where) {
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  (void)MPI_Error_string(code, text, &length); // where even this fails, the text stands
  throw library_error("E-comm-030", where, "MPI: ", what, " failed: ", static_cast<char const*>(text));
}

inline void check_mpi(int code, char const* what, site where) {
  if (code != MPI_SUCCESS) throw_mpi(code, what, where);
}

/// MPI's own form of the reduction of 16-bit floats: pairs, each sum rounded to the storage type.
template <storage_scalar T, reduction Operation>
void reduce_pairs(void* in, void* in_out, MPI_Count* count, MPI_Datatype*) {
  auto const* a = static_cast<T const*>(in);
  auto* b = static_cast<T*>(in_out);
  for (MPI_Count i = 0; i < *count; ++i) {
    float value = a[i];
    combine_into(&value, b + i, 1, Operation);
    b[i] = T(value);
  }
}

class mpi_transport {
public:
  static constexpr bool checks_signatures = false;
  static constexpr bool reduces = true;

  struct ticket {
    MPI_Request pending = MPI_REQUEST_NULL;
    transfer what;
    buffer<> tables; // counts and offsets, which MPI reads until the end
  };
  struct patience {
    explicit patience(mpi_transport& t) : start(t.stall_limit_ > 0 ? MPI_Wtime() : 0) {}
    double start;
    int polls = 0;
  };

  /// Takes over `owned`, which must be a communicator of our own, and makes its second lane.
  mpi_transport(MPI_Comm owned, communicator_options options, bool device_buffers, site where)
      : mpi_transport(owned) {
    check_mpi(MPI_Comm_set_errhandler(held_.lanes[0], MPI_ERRORS_RETURN), "Comm_set_errhandler", where);
    check_mpi(MPI_Comm_dup(held_.lanes[0], &held_.lanes[1]), "Comm_dup", where);
    check_mpi(MPI_Comm_set_errhandler(held_.lanes[1], MPI_ERRORS_RETURN), "Comm_set_errhandler", where);
    check_mpi(MPI_Comm_rank(held_.lanes[0], &rank_), "Comm_rank", where);
    check_mpi(MPI_Comm_size(held_.lanes[0], &size_), "Comm_size", where);
    stall_limit_ = options.stall_limit;
    device_buffers_ = device_buffers;
    make_operations<tessera::bf16>(0, where);
    make_operations<tessera::fp16>(1, where);
  }
  mpi_transport(mpi_transport&& other) noexcept
      : held_(other.held_), rank_(other.rank_), size_(other.size_), stall_limit_(other.stall_limit_),
        device_buffers_(other.device_buffers_) {
    other.held_ = {};
  }
  mpi_transport& operator=(mpi_transport&&) = delete;
  ~mpi_transport() {
    int finalized = 1;
    if (held_.lanes[0] == MPI_COMM_NULL || MPI_Finalized(&finalized) != MPI_SUCCESS || finalized) return;
    for (auto& of_type : held_.operations)
      for (auto& operation : of_type)
        if (operation != MPI_OP_NULL) (void)MPI_Op_free(&operation); // a destructor can't report
    for (auto& lane : held_.lanes)
      if (lane != MPI_COMM_NULL) (void)MPI_Comm_free(&lane);
  }

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Always inlined: where the kind of call is known, this is that call and the look at its return code.
  [[gnu::always_inline]] void run(transfer const& t) {
    if (t.what == collective::receive) {
      MPI_Status status;
      check_mpi(MPI_Recv_c(t.out, t.count, type_of(t.type), t.root, t.tag, held_.lanes[0], &status),
                "receive", t.where);
      return check_length(t, status);
    }
    check_mpi(post(t, nullptr, tables_), name_of(t.what), t.where);
  }
  void start(transfer const& t, ticket& k) {
    k.what = t;
    k.pending = MPI_REQUEST_NULL;
    check_mpi(post(t, &k.pending, k.tables), name_of(t.what), t.where);
  }
  bool test(ticket& k) {
    int ended = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&k.pending, &ended, &status), name_of(k.what.what), k.what.where);
    if (ended != 0 && k.what.what == collective::receive) check_length(k.what, status);
    return ended != 0;
  }
  void wait(ticket& k) {
    MPI_Status status;
    check_mpi(MPI_Wait(&k.pending, &status), name_of(k.what.what), k.what.where);
    if (k.what.what == collective::receive) check_length(k.what, status);
  }

  void pause(patience& p, signature const& sign, site where) {
    ::sched_yield();
    if (stall_limit_ <= 0 || ++p.polls % 64 != 0) return;
    int asked = 0;
    check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, status_tag, held_.lanes[1], &asked, MPI_STATUS_IGNORE), "Iprobe",
              where);
    if (asked != 0 || MPI_Wtime() - p.start > stall_limit_) give_up(sign, where);
  }

  /// Only a receive can be cancelled; other transfers stay MPI's, buffers included.
  bool abandon(ticket& k) noexcept {
    if (k.pending == MPI_REQUEST_NULL) return true;
    return k.what.what == collective::receive && MPI_Cancel(&k.pending) == MPI_SUCCESS &&
           MPI_Wait(&k.pending, MPI_STATUS_IGNORE) == MPI_SUCCESS;
  }

  bool withdraw(ticket& k) noexcept { return abandon(k); }

  mpi_transport split(std::vector<int> const&, int color, int key, std::uint64_t,
                      communicator_options options, site where) {
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(held_.lanes[0], color, key, &part), "Comm_split", where);
    return mpi_transport(part, options, device_buffers_, where);
  }

  /// Messages in device memory: only what MPI does by itself.
  void admit(call const& c, bool wants_host) const {
    auto const refuse = [&](char const* why) {
      throw config_error("E-comm-037", c.where, name_of(c.what), " of ", name_of(c.type),
                         " in device memory: ", why, "; use comm::nccl, or host memory");
    };
    if (!device_buffers_) refuse("this communicator was made without mpi_options{.device_buffers = true}");
    if (c.reduces() && c.order == summation::rank_order)
      refuse("MPI adds in its own order there: ask for summation::native");
    if (c.reduces() && (c.type == element::bf16 || c.type == element::fp16))
      refuse("MPI cannot add 16-bit floating-point numbers there");
    if (wants_host)
      refuse("start_X at the checked level, and a reduce_scatter into its own input, need host memory");
  }

  /// Throws config_error on all ranks where their options differ.
  void agree_on(communicator_options options, site where) {
    std::vector<communicator_terms> all(static_cast<std::size_t>(size_));
    communicator_terms const mine(options);
    check_mpi(MPI_Allgather_c(&mine, 2, MPI_DOUBLE, all.data(), 2, MPI_DOUBLE, held_.lanes[0]), "Allgather",
              where);
    compare_terms(all, rank_, where);
  }

private:
  static constexpr int status_tag = 1;

  explicit mpi_transport(MPI_Comm owned) noexcept { held_.lanes[0] = owned; }

  static MPI_Datatype type_of(element type) noexcept {
    MPI_Datatype const types[] = {MPI_BYTE,     MPI_UINT16_T, MPI_UINT16_T, MPI_FLOAT,   MPI_DOUBLE,
                                  MPI_INT8_T,   MPI_INT16_T,  MPI_INT32_T,  MPI_INT64_T, MPI_UINT8_T,
                                  MPI_UINT16_T, MPI_UINT32_T, MPI_UINT64_T};
    return types[static_cast<int>(type)];
  }
  MPI_Op operation_of(transfer const& t) const noexcept {
    auto const o = static_cast<int>(t.operation);
    if (t.type == element::bf16) return held_.operations[0][o];
    if (t.type == element::fp16) return held_.operations[1][o];
    return t.operation == reduction::sum ? MPI_SUM : t.operation == reduction::max ? MPI_MAX : MPI_MIN;
  }
  template <storage_scalar T>
  void make_operations(int type, site where) {
    MPI_User_function_c* const functions[] = {
        &reduce_pairs<T, reduction::sum>, &reduce_pairs<T, reduction::max>, &reduce_pairs<T, reduction::min>};
    for (int o = 0; o < 3; ++o)
      check_mpi(MPI_Op_create_c(functions[o], 1, &held_.operations[type][o]), "Op_create", where);
  }

  /// Counts and offsets as MPI wants them, in memory that outlives the call.
  struct placement {
    MPI_Count* counts = nullptr;
    MPI_Aint* offsets = nullptr;
  };
  placement place(index_t const* counts, int side, buffer<>& tables, site where) const {
    auto* base = room(tables, 4 * size_ * 8, {}, where);
    placement p{static_cast<MPI_Count*>(base) + 2 * side * size_,
                reinterpret_cast<MPI_Aint*>(static_cast<MPI_Count*>(base) + (2 * side + 1) * size_)};
    MPI_Aint offset = 0;
    for (int r = 0; r < size_; ++r) {
      p.counts[r] = counts[r];
      p.offsets[r] = offset;
      offset += counts[r];
    }
    return p;
  }

  /// The one MPI call of a transfer: blocking without `pending`.
  [[gnu::always_inline]] int post(transfer const& t, MPI_Request* pending, buffer<>& tables) {
    auto const comm = held_.lanes[t.step > 0 ? 1 : 0];
    auto const type = type_of(t.type);
    bool const now = pending == nullptr;
    auto const n = MPI_Count{t.count};
    bool const at_root = rank_ == t.root;
    auto const my_part = [&](index_t const* counts) {
      return offset_of(rank_, t.count, counts) * bytes_of(t.type);
    };
    switch (t.what) {
    case collective::barrier:
      return now ? MPI_Barrier(comm) : MPI_Ibarrier(comm, pending);
    case collective::broadcast: {
      auto* data = at_root ? const_cast<void*>(t.in) : t.out;
      return now ? MPI_Bcast_c(data, n, type, t.root, comm)
                 : MPI_Ibcast_c(data, n, type, t.root, comm, pending);
    }
    case collective::reduce: {
      auto const* in = at_root && t.in == t.out ? MPI_IN_PLACE : t.in;
      auto const op = operation_of(t);
      return now ? MPI_Reduce_c(in, t.out, n, type, op, t.root, comm)
                 : MPI_Ireduce_c(in, t.out, n, type, op, t.root, comm, pending);
    }
    case collective::all_reduce: {
      auto const* in = t.in == t.out ? MPI_IN_PLACE : t.in;
      auto const op = operation_of(t);
      return now ? MPI_Allreduce_c(in, t.out, n, type, op, comm)
                 : MPI_Iallreduce_c(in, t.out, n, type, op, comm, pending);
    }
    case collective::reduce_scatter: {
      auto const op = operation_of(t);
      if (t.out_counts == nullptr)
        return now ? MPI_Reduce_scatter_block_c(t.in, t.out, n, type, op, comm)
                   : MPI_Ireduce_scatter_block_c(t.in, t.out, n, type, op, comm, pending);
      auto const parts = place(t.out_counts, 0, tables, t.where);
      return now ? MPI_Reduce_scatter_c(t.in, t.out, parts.counts, type, op, comm)
                 : MPI_Ireduce_scatter_c(t.in, t.out, parts.counts, type, op, comm, pending);
    }
    case collective::all_gather: {
      // In place on all ranks or on none, says MPI; ours may differ. So always, after the copy of this
      // rank's part that MPI would make.
      // (Device memory is MPI's to copy: there all ranks are to be in place, or none.)
      auto const* counts = t.out_counts;
      auto const mine = counts != nullptr ? counts[rank_] : t.count;
      auto* const place_of_mine = at(t.out, my_part(counts));
      if (!t.on_device) copy(place_of_mine, t.in, mine * bytes_of(t.type));
      auto const* in = t.on_device && t.in != place_of_mine ? t.in : MPI_IN_PLACE;
      if (counts == nullptr)
        return now ? MPI_Allgather_c(in, n, type, t.out, n, type, comm)
                   : MPI_Iallgather_c(in, n, type, t.out, n, type, comm, pending);
      auto const p = place(counts, 0, tables, t.where);
      return now ? MPI_Allgatherv_c(in, mine, type, t.out, p.counts, p.offsets, type, comm)
                 : MPI_Iallgatherv_c(in, mine, type, t.out, p.counts, p.offsets, type, comm, pending);
    }
    case collective::gather: {
      auto const* counts = t.out_counts;
      auto const* in = at_root && t.in == at(t.out, my_part(counts)) ? MPI_IN_PLACE : t.in;
      if (counts == nullptr)
        return now ? MPI_Gather_c(in, n, type, t.out, n, type, t.root, comm)
                   : MPI_Igather_c(in, n, type, t.out, n, type, t.root, comm, pending);
      auto const p = place(counts, 0, tables, t.where);
      auto const mine = p.counts[rank_];
      return now ? MPI_Gatherv_c(in, mine, type, t.out, p.counts, p.offsets, type, t.root, comm)
                 : MPI_Igatherv_c(in, mine, type, t.out, p.counts, p.offsets, type, t.root, comm, pending);
    }
    case collective::scatter: {
      auto const* counts = t.in_counts;
      auto* out = at_root && t.out == at(t.in, my_part(counts)) ? MPI_IN_PLACE : t.out;
      if (counts == nullptr)
        return now ? MPI_Scatter_c(t.in, n, type, out, n, type, t.root, comm)
                   : MPI_Iscatter_c(t.in, n, type, out, n, type, t.root, comm, pending);
      auto const p = place(counts, 0, tables, t.where);
      auto const mine = p.counts[rank_];
      return now ? MPI_Scatterv_c(t.in, p.counts, p.offsets, type, out, mine, type, t.root, comm)
                 : MPI_Iscatterv_c(t.in, p.counts, p.offsets, type, out, mine, type, t.root, comm, pending);
    }
    case collective::all_to_all: {
      if (t.in_counts == nullptr)
        return now ? MPI_Alltoall_c(t.in, n, type, t.out, n, type, comm)
                   : MPI_Ialltoall_c(t.in, n, type, t.out, n, type, comm, pending);
      auto const p = place(t.in_counts, 0, tables, t.where), q = place(t.out_counts, 1, tables, t.where);
      return now ? MPI_Alltoallv_c(t.in, p.counts, p.offsets, type, t.out, q.counts, q.offsets, type, comm)
                 : MPI_Ialltoallv_c(t.in, p.counts, p.offsets, type, t.out, q.counts, q.offsets, type, comm,
                                    pending);
    }
    case collective::send:
      return now ? MPI_Send_c(t.in, n, type, t.root, t.tag, comm)
                 : MPI_Isend_c(t.in, n, type, t.root, t.tag, comm, pending);
    case collective::receive:
      return MPI_Irecv_c(t.out, n, type, t.root, t.tag, comm, pending);
    case collective::split: // the engine sends it as all_gather
      break;
    }
    return MPI_ERR_OTHER;
  }

  static void check_length(transfer const& t, MPI_Status const& status) {
    MPI_Count length = 0;
    check_mpi(MPI_Get_count_c(&status, type_of(t.type), &length), "Get_count", t.where);
    if (length != t.count)
      throw collective_mismatch("E-comm-013", t.where, "the two sides of a message differ: receive of ",
                                t.count, " ", name_of(t.type), " from rank ", t.root, " got ", length);
  }

  /// Tells all ranks what this one waits for, hears for a short while what they do, and throws.
  [[noreturn]] void give_up(signature const& sign, site where) {
    struct exchange {
      signature mine;
      std::vector<signature> theirs;
      std::vector<MPI_Request> sent, heard;
    };
    auto const n = static_cast<std::size_t>(size_);
    auto* const e = new exchange{sign, std::vector<signature>(n), {}, {}};
    e->sent.assign(n, MPI_REQUEST_NULL);
    e->heard.assign(n, MPI_REQUEST_NULL);
    std::vector<char> answered(n, 0);
    constexpr auto bytes = MPI_Count{sizeof(signature)};
    for (int r = 0; r < size_; ++r) {
      auto const i = static_cast<std::size_t>(r);
      if (r == rank_) continue; // a call that fails here is a rank that does not answer
      if (MPI_Irecv_c(&e->theirs[i], bytes, MPI_BYTE, r, status_tag, held_.lanes[1], &e->heard[i]) !=
              MPI_SUCCESS ||
          MPI_Isend_c(&e->mine, bytes, MPI_BYTE, r, status_tag, held_.lanes[1], &e->sent[i]) != MPI_SUCCESS)
        continue;
    }
    auto const grace = stall_limit_ < 1 ? stall_limit_ : 1.0;
    auto open = n - 1;
    for (auto const start = MPI_Wtime(); open > 0 && MPI_Wtime() - start < grace; ::sched_yield())
      for (std::size_t r = 0; r < n; ++r) {
        int ended = 0;
        if (answered[r] != 0 || e->heard[r] == MPI_REQUEST_NULL) continue;
        if (MPI_Test(&e->heard[r], &ended, MPI_STATUS_IGNORE) != MPI_SUCCESS || ended == 0) continue;
        answered[r] = 1;
        --open;
      }
    bool ended = true; // whether MPI is done with the memory of the exchange
    for (std::size_t r = 0; r < n; ++r) {
      int sent = 1;
      if (e->sent[r] != MPI_REQUEST_NULL)
        ended = MPI_Test(&e->sent[r], &sent, MPI_STATUS_IGNORE) == MPI_SUCCESS && sent != 0 && ended;
      if (e->heard[r] != MPI_REQUEST_NULL)
        ended = MPI_Cancel(&e->heard[r]) == MPI_SUCCESS &&
                MPI_Wait(&e->heard[r], MPI_STATUS_IGNORE) == MPI_SUCCESS && ended;
    }
    auto const text = tessera::text_of("rank ", rank_, " of ", size_, " gave up ", text_of(sign),
                                       " (the limit is ", stall_limit_, " s); it waited for ",
                                       missing_ranks(sign, rank_, e->theirs, answered));
    if (ended) delete e;
    throw stalled("E-comm-021", where, text);
  }

  struct held {
    MPI_Comm lanes[2] = {MPI_COMM_NULL, MPI_COMM_NULL};
    MPI_Op operations[2][3] = {{MPI_OP_NULL, MPI_OP_NULL, MPI_OP_NULL},
                               {MPI_OP_NULL, MPI_OP_NULL, MPI_OP_NULL}};
  };
  held held_;
  buffer<> tables_;
  int rank_ = 0, size_ = 1;
  double stall_limit_ = 0;
  bool device_buffers_ = false;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm {

/// A communicator over the ranks of an MPI_Comm. Move-only.
class mpi : public detail::interface<mpi, detail::engine<detail::mpi_transport>> {
  using base = detail::interface<mpi, detail::engine<detail::mpi_transport>>;
  using engine = detail::engine<detail::mpi_transport>;

public:
  /// Collective over `borrowed`, of which it makes two duplicates: the caller's messages, error handler and
  /// attributes stay its own. To be destroyed before MPI_Finalize. Throws config_error if MPI is not running,
  /// was initialised below `options.level`, is
  /// not CUDA-aware where `device_buffers` are wanted, or if the ranks' options differ (on all of them).
  explicit mpi(MPI_Comm borrowed, mpi_options options = {}, site where = site::here())
      : base(make(borrowed, options, where)) {}

private:
  friend base;
  explicit mpi(engine* owned) noexcept : base(owned) {}

  static engine* make(MPI_Comm borrowed, mpi_options options, site where) {
    check_threads(options.level, where);
    if (options.device_buffers) check_cuda_aware(where);
    MPI_Comm copy = MPI_COMM_NULL;
    detail::check_mpi(MPI_Comm_dup(borrowed, &copy), "Comm_dup", where);
    communicator_options const common{options.checked, options.stall_limit};
    detail::mpi_transport transport(copy, common, options.device_buffers, where);
    transport.agree_on(common, where);
    return new engine(static_cast<detail::mpi_transport&&>(transport), common, 1);
  }

  static void check_cuda_aware(site where) {
#if defined(MPICH) || defined(MPIX_CUDA_AWARE_SUPPORT)
    if (MPIX_Query_cuda_support() == 0)
      throw config_error("E-comm-036", where,
                         "this MPI says that it is not CUDA-aware (MPIX_Query_cuda_support): it cannot take "
                         "device_buffers; use comm::nccl, or an MPI built with CUDA");
#else
    throw config_error("E-comm-036", where,
                       "this MPI cannot say whether it is CUDA-aware (it has no MPIX_Query_cuda_support), so "
                       "device_buffers are not given to it; use comm::nccl, or an MPI built with CUDA");
#endif
  }
  static void check_threads(mpi_threads level, site where) {
    int running = 0, ended = 0, given = 0, main = 1;
    detail::check_mpi(MPI_Initialized(&running), "Initialized", where);
    detail::check_mpi(MPI_Finalized(&ended), "Finalized", where);
    if (running == 0 || ended != 0)
      throw config_error("E-comm-032", where,
                         running == 0 ? "MPI is not initialised; call MPI_Init_thread or use comm::run_mpi"
                                      : "MPI has been finalised");
    detail::check_mpi(MPI_Query_thread(&given), "Query_thread", where);
    if (given < static_cast<int>(level))
      throw config_error("E-comm-033", where, "MPI was initialised with ",
                         name_of(static_cast<mpi_threads>(given)), ", need ", name_of(level),
                         ": call MPI_Init_thread with that level, or, if this process has one thread only, "
                         "pass mpi_options{.level = mpi_threads::single}");
    detail::check_mpi(MPI_Is_thread_main(&main), "Is_thread_main", where);
    if (given <= MPI_THREAD_FUNNELED && main == 0)
      throw config_error("E-comm-034", where, "with ", name_of(static_cast<mpi_threads>(given)),
                         " only the thread that initialised MPI may communicate");
  }
};

static_assert(communicator<mpi>);

/// Initialises MPI, and finalises it at the end of its scope. Throws config_error if MPI is running already
/// (wrap its communicator instead) or cannot give `level`.
class mpi_environment {
public:
  mpi_environment(int& argc, char**& argv, mpi_threads level = mpi_threads::funneled,
                  site where = site::here()) {
    int running = 0, given = 0;
    detail::check_mpi(MPI_Initialized(&running), "Initialized", where);
    if (running != 0)
      throw config_error("E-comm-035", where,
                         "MPI is initialised already: wrap its communicator with comm::mpi instead");
    detail::check_mpi(MPI_Init_thread(&argc, &argv, static_cast<int>(level), &given), "Init_thread", where);
    if (given < static_cast<int>(level)) {
      (void)MPI_Finalize(); // the error below matters more
      throw config_error("E-comm-033", where, "this MPI gives ", name_of(static_cast<mpi_threads>(given)),
                         ", need ", name_of(level));
    }
  }
  mpi_environment(mpi_environment const&) = delete;
  mpi_environment& operator=(mpi_environment const&) = delete;
  /// Does not finalise while an exception unwinds: MPI would wait for ranks that may wait for this one.
  ~mpi_environment() {
    if (std::uncaught_exceptions() == 0) (void)MPI_Finalize();
  }
};

/// Prints what went wrong, on which rank, and ends all ranks of the program.
[[noreturn]] inline void abort_mpi(char const* what) noexcept {
  int rank = -1;
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::fflush(stdout);
  std::fprintf(stderr, "rank %d: %s\n", rank, what);
  std::fflush(stderr);
  // mpiexec forwards what a process printed while that process lives: without a pause the message may be
  // lost.
  timespec const pause{0, 200'000'000};
  (void)::nanosleep(&pause, nullptr);
  (void)MPI_Abort(MPI_COMM_WORLD, 1);
  std::terminate();
}

/// The main function of an MPI program: initialises MPI, calls body(world), finalises. An exception on any
/// rank is printed and ends all ranks, so that none waits for ever. Returns what body returns, or 0; 1 if MPI
/// did not start.
template <std::invocable<mpi&> F>
int run_mpi(int& argc, char**& argv, F&& body, mpi_options options = {}, site where = site::here()) {
  try {
    mpi_environment environment(argc, argv, options.level, where);
    try {
      mpi world(MPI_COMM_WORLD, options, where);
      if constexpr (std::is_convertible_v<std::invoke_result_t<F&, mpi&>, int>) {
        return body(world);
      } else {
        body(world);
        return 0;
      }
    } catch (std::exception const& e) {
      abort_mpi(e.what());
    } catch (...) {
      abort_mpi("an exception that is not a std::exception");
    }
  } catch (std::exception const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

} // namespace tessera::inline TESSERA_ABI::comm

#endif
#endif
#if defined(TESSERA_WITH_NCCL)
/// Ranks on NCCL, one GPU each: messages go from device memory to device memory. Made over the ranks of
/// another communicator, or from an id that the host application hands over.
///
///     exec::cuda ex({.device = local_rank});
///     comm::nccl ranks(world, ex);                      // world: comm::mpi, comm::threads
///     auto sum = ranks.start_all_reduce(gradients);     // device_span<bf16, exec::cuda_memory>
///     ops::gelu(ex, y, x);                              // the stream of `ex` goes on meanwhile
///     sum.wait();                                       // the stream of `ex` waits, the host does not
///     auto loss = ranks.all_reduce(local_loss);         // host values too: staged, and blocking
///
/// Order. Calls run in a stream of their own, in the order in which they were made: each after what `ex` had
/// been given when the call was made. wait() orders the stream of `ex` after the call. The host waits where
/// it must see something: messages in host memory, barriers, sums of integers in rank_order (overflow), the
/// checked level, and, since somebody has to watch, every wait() of a communicator with a stall limit.
/// test() asks and never waits. Without checks and limit, calls on device memory can be captured in a graph.
///
/// Sums. rank_order: exchanged in the storage type and added by a kernel, rank 0 first, in fp32: the same
/// bits as on every other communicator. native: ncclAllReduce and its kin; NCCL chooses ring, tree or
/// switch by size and machine, and with it the order of additions; 16-bit floats are added pair by pair,
/// in fp32 or in the storage type, and rounded each time a partial sum is stored; a NaN may be lost in maxima
/// and minima; integers wrap. NCCL has no 16-bit integers: those are always added in rank_order.
///
/// Messages (send, receive) have no tags in NCCL. Requests for messages go out together when one of them is
/// waited for or tested, or with the next blocking message; those that go out together are matched by tag,
/// otherwise the order of a pair of ranks must be the same on both sides. Checked communicators find tags,
/// types and lengths that differ. Messages and collectives share one stream: use a split where they cross.
///
/// Cost of device calls: one NCCL call or group each; rank_order two and a kernel (one up to 2 KiB). A stall
/// limit puts NCCL in its non-blocking mode, some 10 us a call. Needs the kernels of comm/cuda/nccl.cuh,
/// compiled once in the program by nvcc for each type that is reduced.
///
/// Exists under TESSERA_WITH_NCCL.
#ifndef TESSERA_COMM_NCCL_HPP
#define TESSERA_COMM_NCCL_HPP

#if defined(TESSERA_WITH_NCCL)

/// Drives the calls of one nccl communicator. Everything that a call needs is put into the lane when the call
/// is made, exchange, sum and collection one after another; what is left is to wait for its event.
#ifndef TESSERA_COMM_DETAIL_NCCL_ENGINE_HPP
#define TESSERA_COMM_DETAIL_NCCL_ENGINE_HPP

#if defined(TESSERA_WITH_NCCL)

#include <algorithm>
/// A call of an nccl communicator under way, and what the checked level does with device memory.
#ifndef TESSERA_COMM_DETAIL_NCCL_OPERATION_HPP
#define TESSERA_COMM_DETAIL_NCCL_OPERATION_HPP

#if defined(TESSERA_WITH_NCCL)

/// The calls of NCCL: one communicator of it, the stream that they run in, every return code looked at, and
/// the watchdog.
#ifndef TESSERA_COMM_DETAIL_NCCL_LINK_HPP
#define TESSERA_COMM_DETAIL_NCCL_LINK_HPP

#if defined(TESSERA_WITH_NCCL)

#include <nccl.h>

/// What the ranks of an nccl communicator say to each other beside NCCL: where they are when one is stuck.
#ifndef TESSERA_COMM_DETAIL_NCCL_SIDE_HPP
#define TESSERA_COMM_DETAIL_NCCL_SIDE_HPP

#include <memory>

#include <sched.h>

namespace tessera::inline TESSERA_ABI::comm::detail {

class nccl_side {
public:
  struct news {
    bool asked = false;  // another rank has given up, and asks where this one is
    bool failed = false; // there is trouble, and it is a rank's failure; otherwise one has ended
    std::string trouble; // why others can't be reached; empty: nothing is known
  };

  virtual ~nccl_side() = default;
  virtual news poll() = 0;
  /// Says where this rank is, listens for `grace` seconds, and names the ranks that have not arrived there.
  virtual std::string missing(signature const& mine, double grace) = 0;
  virtual std::unique_ptr<nccl_side> split(int color, int key, site where) = 0;
};

/// Over any communicator of the host's memory, by its public calls alone: each rank has a receive open from
/// each other one from the first time that it has to wait.
template <host_communicator Host>
class nccl_side_of final : public nccl_side {
public:
  explicit nccl_side_of(Host&& host) : host_(static_cast<Host&&>(host)) {}
  nccl_side_of(nccl_side_of const&) = delete;
  nccl_side_of& operator=(nccl_side_of const&) = delete;
  ~nccl_side_of() override {
    if (!talk_) return;
    bool told = true; // whether nobody reads what this rank said any more
    for (auto& each : talk_->heard) each.withdraw();
    for (auto& each : talk_->told) {
      try {
        told = each.test() && told;
      } catch (error const&) { // a peer that has failed does not read
      }
      each.abandon();
    }
    if (!told) (void)talk_.release(); // a send can't be called back
  }

  news poll() override {
    if (!trouble_.trouble.empty()) return trouble_; // a receive that has failed is no answer
    news result;
    try {
      listen();
      for (std::size_t r = 0; r < talk_->heard.size(); ++r)
        if (talk_->answered[r] == 0 && rank_of(r) != host_.rank() && talk_->heard[r].test())
          talk_->answered[r] = 1;
      for (auto each : talk_->answered) result.asked = result.asked || each != 0;
    } catch (peer_failed const& e) {
      trouble_ = {false, true, e.what()};
      return trouble_;
    } catch (error const& e) {
      trouble_ = {false, false, e.what()};
      return trouble_;
    }
    return result;
  }

  std::string missing(signature const& mine, double grace) override {
    (void)poll();
    if (!talk_) return "ranks that cannot be asked";
    talk_->mine = mine;
    try {
      for (int r = 0; r < host_.size(); ++r)
        if (r != host_.rank())
          talk_->told.push_back(host_.start_send(bytes_of_signature(talk_->mine), r, tag));
    } catch (error const&) { // those that can't be told don't answer either
    }
    for (auto const start = seconds_now(); seconds_now() - start < grace; ::sched_yield()) {
      if (!poll().trouble.empty()) break;
      int answers = 1;
      for (auto each : talk_->answered) answers += each;
      if (answers == host_.size()) break;
    }
    return missing_ranks(mine, host_.rank(), talk_->theirs, talk_->answered);
  }

  std::unique_ptr<nccl_side> split(int color, int key, site where) override {
    return std::make_unique<nccl_side_of>(host_.split(color, key, where));
  }

private:
  static constexpr int tag = 1;
  struct talk {
    signature mine;
    std::vector<signature> theirs;
    std::vector<char> answered;
    std::vector<typename Host::request> heard, told;
  };

  static int rank_of(std::size_t i) noexcept { return narrow<int>(i); }
  static std::span<std::byte> bytes_of_signature(signature& sign) noexcept {
    return std::as_writable_bytes(std::span<signature>(&sign, 1));
  }
  void listen() {
    if (talk_) return;
    auto const ranks = static_cast<std::size_t>(host_.size());
    talk_ = std::make_unique<talk>();
    talk_->theirs.resize(ranks);
    talk_->answered.assign(ranks, 0);
    talk_->heard.resize(ranks);
    for (std::size_t r = 0; r < ranks; ++r)
      if (rank_of(r) != host_.rank())
        talk_->heard[r] = host_.start_receive(bytes_of_signature(talk_->theirs[r]), rank_of(r), tag);
  }

  Host host_;
  std::unique_ptr<talk> talk_;
  news trouble_;
};

template <host_communicator Host>
std::unique_ptr<nccl_side> side_of(Host& host, site where) {
  return std::make_unique<nccl_side_of<Host>>(host.split(0, host.rank(), where));
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

namespace tessera::inline TESSERA_ABI::comm::detail {

[[noreturn, gnu::cold]] inline void throw_nccl(ncclResult_t code, ncclComm_t comm, char const* what,
                                               site where) {
  auto const* last = ncclGetLastError(comm);
  auto const text =
      tessera::text_of("NCCL: ", what, " failed: ", ncclGetErrorString(code),
                       last != nullptr && *last != '\0' ? "; " : "", last != nullptr ? last : "");
  if (code == ncclRemoteError) throw peer_failed("E-comm-102", where, text);
  throw library_error("E-comm-101", where, text);
}
/// For calls that have ended when they return.
inline void check_nccl(ncclResult_t code, ncclComm_t comm, char const* what, site where) {
  if (code != ncclSuccess) throw_nccl(code, comm, what, where);
}

/// A call as the watchdog and error messages need it.
struct nccl_call {
  call request;
  signature sign;
  std::int64_t sequence = 0;
  std::uint64_t group = 0;
  bool blocking = false, has_sign = false;
  char const* doing = nullptr; // what to call it where it is no call of a communicator

  signature const& signed_by(int ranks) noexcept {
    if (!has_sign) sign = signature_of(request, ranks, sequence, group, blocking);
    if (doing != nullptr) __builtin_snprintf(sign.place, sizeof sign.place, "%s", doing);
    has_sign = true;
    return sign;
  }
  std::string text(int ranks) { return doing != nullptr ? doing : text_of(signed_by(ranks)); }
};

/// How NCCL names elements: its own type, or, where it has none, several of another one.
struct nccl_type {
  ncclDataType_t type;
  index_t factor = 1;
};
inline nccl_type nccl_type_of(element type) noexcept {
  constexpr nccl_type types[] = {{ncclUint8},    {ncclBfloat16}, {ncclFloat16}, {ncclFloat32}, {ncclFloat64},
                                 {ncclInt8},     {ncclUint8, 2}, {ncclInt32},   {ncclInt64},   {ncclUint8},
                                 {ncclUint8, 2}, {ncclUint32},   {ncclUint64}};
  return types[static_cast<int>(type)];
}
inline bool nccl_adds(element type) noexcept {
  return type != element::bytes && nccl_type_of(type).factor == 1;
}

class nccl_link {
public:
  nccl_link(ncclUniqueId const& id, int my_rank, int ranks, exec::cuda& space, communicator_options options,
            std::unique_ptr<nccl_side> beside, site where)
      : nccl_link(my_rank, ranks, space, options.stall_limit,
                  static_cast<std::unique_ptr<nccl_side>&&>(beside), where) {
    auto config = configuration();
    nccl_call making = making_of("the beginning of comm::nccl", where);
    settle(ncclCommInitRankConfig(&comm_, ranks, id, my_rank, &config), "ncclCommInitRankConfig", making);
  }
  /// The part of `whole` that has this color: rank `my_rank` of `ranks`. Collective over `whole`.
  nccl_link(nccl_link& whole, int color, int key, int my_rank, int ranks, site where)
      : nccl_link(my_rank, ranks, whole.compute, whole.stall_limit_,
                  whole.side_ ? whole.side_->split(color, key, where) : nullptr, where) {
    auto config = configuration();
    nccl_call making = making_of("split of comm::nccl", where);
    auto const code = ncclCommSplit(whole.comm_, color, key, &comm_, &config);
    whole.settle(code, "ncclCommSplit", making);
    if (comm_ != nullptr) settle(code, "ncclCommSplit", making);
  }
  nccl_link(nccl_link const&) = delete;
  nccl_link& operator=(nccl_link const&) = delete;
  /// Waits for what is under way; aborts where that cannot end, or while an exception unwinds.
  ~nccl_link() {
    if (comm_ == nullptr) return;
    if (std::uncaught_exceptions() > unwinding_) {
      abort();
      return;
    }
    try {
      nccl_call ending = making_of("the end of comm::nccl", site{});
      exec::event last(lane);
      last.record(lane);
      wait(last, ending);
      settle(ncclCommFinalize(comm_), "ncclCommFinalize", ending);
      (void)ncclCommDestroy(comm_); // a destructor can't report
    } catch (...) {
      abort();
    }
  }

  int const rank, size;
  exec::cuda& compute; // the caller's
  exec::cuda lane;     // what NCCL's calls, and the kernels between them, run in

  bool lost() const noexcept { return comm_ == nullptr; }
  /// Ends everything under way, here and, as far as NCCL can, on the other ranks.
  void abort() noexcept {
    if (comm_ != nullptr) (void)ncclCommAbort(comm_); // there is nobody to tell that this failed
    comm_ = nullptr;
  }

  /// Puts a collective transfer into the lane.
  void enqueue(transfer const& t, nccl_call& c) {
    auto const type = nccl_type_of(t.type).type;
    auto const items = [&](index_t count) {
      return static_cast<std::size_t>(count * nccl_type_of(t.type).factor);
    };
    auto const n = items(t.count);
    bool const at_root = rank == t.root;
    if (n == 0 && t.what != collective::barrier && t.in_counts == nullptr) return;
    switch (t.what) {
    case collective::barrier:
      return settle(ncclAllReduce(token_.data(), token_.data(), 1, ncclInt32, ncclSum, comm_, lane.stream()),
                    "ncclAllReduce", c);
    case collective::broadcast: {
      auto* data = at_root ? const_cast<void*>(t.in) : t.out;
      return settle(ncclBroadcast(data, data, n, type, t.root, comm_, lane.stream()), "ncclBroadcast", c);
    }
    case collective::reduce:
      return settle(ncclReduce(t.in, t.out, n, type, operation_of(t.operation), t.root, comm_, lane.stream()),
                    "ncclReduce", c);
    case collective::all_reduce:
      return settle(ncclAllReduce(t.in, t.out, n, type, operation_of(t.operation), comm_, lane.stream()),
                    "ncclAllReduce", c);
    case collective::reduce_scatter:
      if (t.out_counts == nullptr)
        return settle(
            ncclReduceScatter(t.in, t.out, n, type, operation_of(t.operation), comm_, lane.stream()),
            "ncclReduceScatter", c);
      return grouped(c, [&] {
        for_parts(t, t.out_counts, [&](int r, index_t count, index_t offset) {
          in_group(ncclReduce(at(t.in, offset), r == rank ? t.out : nullptr, items(count), type,
                              operation_of(t.operation), r, comm_, lane.stream()),
                   "ncclReduce", c);
        });
      });
    case collective::all_gather:
      if (t.out_counts == nullptr)
        return settle(ncclAllGather(t.in, t.out, n, type, comm_, lane.stream()), "ncclAllGather", c);
      return grouped(c, [&] {
        for_parts(t, t.out_counts, [&](int r, index_t count, index_t offset) {
          in_group(ncclBroadcast(r == rank ? t.in : at(t.out, offset), at(t.out, offset), items(count), type,
                                 r, comm_, lane.stream()),
                   "ncclBroadcast", c);
        });
      });
    case collective::gather:
    case collective::scatter:
    case collective::all_to_all:
      return exchange(t, c);
    default: // messages go in groups, split as all_gather
      return;
    }
  }

  /// What `calls` put, as one group: all of it makes progress together.
  template <std::invocable Calls>
  void grouped(nccl_call& c, Calls calls) {
    check_nccl(ncclGroupStart(), comm_, "ncclGroupStart", c.request.where);
    try {
      calls();
    } catch (...) {
      (void)ncclGroupEnd(); // the first error matters more
      abort();
      throw;
    }
    settle(ncclGroupEnd(), "ncclGroupEnd", c);
  }
  void put_send(void const* data, index_t n, element of, int peer, nccl_call& c) {
    auto const [type, factor] = nccl_type_of(of);
    if (n > 0)
      in_group(ncclSend(data, static_cast<std::size_t>(n * factor), type, peer, comm_, lane.stream()),
               "ncclSend", c);
  }
  void put_receive(void* data, index_t n, element of, int peer, nccl_call& c) {
    auto const [type, factor] = nccl_type_of(of);
    if (n > 0)
      in_group(ncclRecv(data, static_cast<std::size_t>(n * factor), type, peer, comm_, lane.stream()),
               "ncclRecv", c);
  }

  /// In the lane. Memory of the host is pinned.
  void copy(void* to, void const* from, index_t bytes, site where) {
    if (bytes > 0 && to != from)
      exec::cuda_check(
          cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, lane.stream()),
          "cudaMemcpyAsync", where);
  }

  /// Errors that came up since the last call. The communicator is aborted then.
  void check(nccl_call& c) {
    auto state = ncclSuccess;
    check_nccl(ncclCommGetAsyncError(comm_, &state), comm_, "ncclCommGetAsyncError", c.request.where);
    if (state != ncclSuccess && state != ncclInProgress) fail(state, name_of(c.request.what), c);
  }
  bool passed(exec::event const& event, nccl_call& c) {
    if (event.passed(c.request.where)) return true;
    check(c);
    return false;
  }
  /// The host waits, and watches.
  void wait(exec::event const& event, nccl_call& c) {
    for (patience p; !event.passed(c.request.where);) pause(p, c);
    check(c); // what was aborted from elsewhere has ended too
  }

private:
  struct patience {
    double start = seconds_now(), troubled = 0;
    int polls = 0;
  };

  nccl_link(int my_rank, int ranks, exec::cuda& space, double stall_limit,
            std::unique_ptr<nccl_side>&& beside, site where)
      : rank(my_rank), size(ranks), compute(space),
        lane({.device = space.device(), .workspace_bytes = 0}, where), stall_limit_(stall_limit),
        side_(static_cast<std::unique_ptr<nccl_side>&&>(beside)), token_(16, {}, where) {}

  /// With a limit no call of NCCL may block the host: it could not watch.
  ncclConfig_t configuration() const noexcept {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = stall_limit_ > 0 ? 0 : 1;
    return config;
  }
  static nccl_call making_of(char const* doing, site where) noexcept {
    nccl_call making;
    making.doing = doing;
    making.request.where = where;
    return making;
  }
  static ncclRedOp_t operation_of(reduction operation) noexcept {
    return operation == reduction::sum ? ncclSum : operation == reduction::max ? ncclMax : ncclMin;
  }

  /// Each part that is not empty: rank, elements, offset in bytes.
  template <class F>
  void for_parts(transfer const& t, index_t const* counts, F f) const {
    index_t offset = 0;
    for (int r = 0; r < size; ++r) {
      auto const count = counts != nullptr ? counts[r] : t.count;
      if (count > 0) f(r, count, offset);
      offset += count * bytes_of(t.type);
    }
  }
  /// gather, scatter, all_to_all: one group of sends and receives; a rank's own part is a copy.
  void exchange(transfer const& t, nccl_call& c) {
    auto const item = bytes_of(t.type);
    bool const to_all = t.what != collective::gather, from_all = t.what != collective::scatter;
    bool const sends = t.what != collective::scatter || rank == t.root;
    bool const receives = t.what != collective::gather || rank == t.root;
    auto const own = t.in_counts != nullptr ? t.in_counts[rank] : t.count;
    auto const offset = [&](index_t const* counts) { return offset_of(rank, t.count, counts) * item; };
    if (sends && receives && own > 0) {
      auto const* from = to_all ? at(t.in, offset(t.in_counts)) : t.in;
      auto* to = from_all ? at(t.out, offset(t.out_counts)) : t.out;
      copy(to, from, own * item, t.where);
    }
    grouped(c, [&] {
      if (sends && to_all)
        for_parts(t, t.in_counts, [&](int r, index_t n, index_t offset) {
          if (r != rank) put_send(at(t.in, offset), n, t.type, r, c);
        });
      else if (sends && rank != t.root)
        put_send(t.in, own, t.type, t.root, c);
      if (receives && from_all)
        for_parts(t, t.out_counts, [&](int r, index_t n, index_t offset) {
          if (r != rank) put_receive(at(t.out, offset), n, t.type, r, c);
        });
      else if (receives && rank != t.root)
        put_receive(t.out, own, t.type, t.root, c);
    });
  }

  void in_group(ncclResult_t code, char const* what, nccl_call& c) {
    if (code != ncclSuccess && code != ncclInProgress) throw_nccl(code, comm_, what, c.request.where);
  }
  /// Waits until NCCL has taken a call: at once where it blocks.
  void settle(ncclResult_t code, char const* what, nccl_call& c) {
    for (patience p; code == ncclInProgress;) {
      check_nccl(ncclCommGetAsyncError(comm_, &code), comm_, "ncclCommGetAsyncError", c.request.where);
      if (code == ncclInProgress) pause(p, c);
    }
    if (code != ncclSuccess) fail(code, what, c);
  }
  [[noreturn]] void fail(ncclResult_t code, char const* what, nccl_call& c) {
    try {
      throw_nccl(code, comm_, what, c.request.where);
    } catch (...) {
      abort();
      throw;
    }
  }

  /// Between two looks at something that has not ended: throws where it never will.
  void pause(patience& p, nccl_call& c) {
    if (comm_ != nullptr) check(c);
    // Half a millisecond of eagerness; then the processor is others'.
    constexpr timespec rest{0, 20'000};
    p.polls < 256 ? void(::sched_yield()) : void(::nanosleep(&rest, nullptr));
    if (++p.polls % 64 != 0) return;
    auto const now = seconds_now();
    nccl_side::news news;
    if (side_) news = side_->poll();
    // A rank that has ended well leaves too, what it sent may still be on its way, and messages between
    // others are no business of its.
    constexpr double benefit_of_doubt = 0.2;
    if (news.failed || (!news.trouble.empty() && !c.request.is_point_to_point())) {
      if (p.troubled == 0) p.troubled = now;
      if (now - p.troubled > benefit_of_doubt) {
        abort();
        throw peer_failed("E-comm-103", c.request.where, c.text(size), " cannot finish: ", news.trouble);
      }
    }
    if (stall_limit_ <= 0 || (!news.asked && now - p.start <= stall_limit_)) return;
    auto const& sign = c.signed_by(size);
    auto const missing =
        side_ ? side_->missing(sign, stall_limit_ < 1 ? stall_limit_ : 1.0)
              : std::string("ranks that cannot be asked: this communicator was made from an id alone");
    abort();
    throw stalled("E-comm-021", c.request.where, "rank ", rank, " of ", size, " gave up ", c.text(size),
                  " (the limit is ", stall_limit_, " s); it waited for ", missing);
  }

  double const stall_limit_;
  std::unique_ptr<nccl_side> side_;
  buffer<exec::cuda_memory> token_; // what a barrier sends
  ncclComm_t comm_ = nullptr;
  int const unwinding_ = std::uncaught_exceptions();
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

#endif

namespace tessera::inline TESSERA_ABI::comm::detail {

/// What the combining kernel runs in, and where it notes that a sum of integers overflowed (null: nowhere).
struct device_combine_space {
  exec::cuda& lane;
  int* overflow;
};
/// `combine` on a device (comm/cuda/nccl.cuh): the same arithmetic. True: overflow is noted, not returned.
template <reducible_scalar T>
bool combine_on_device(void* space, combine_step const& step);

struct nccl_operation : nccl_call {
  /// Of what shares one piece of memory.
  static constexpr index_t alignment = 16;
  static constexpr index_t rounded(index_t bytes) noexcept {
    return (bytes + alignment - 1) / alignment * alignment;
  }

  bool finished = false;
  bool waiting = false;   // a message that has not gone out
  bool on_device = false; // as its caller gave it
  bool adds_integers = false;
  int unwinding = 0; // exceptions in flight when it was made
  std::exception_ptr error;
  exec::event ended;

  buffer<exec::cuda_memory> pieces; // what the ranks sent, to be combined; a flag

  buffer<exec::cuda_memory> device_stage; // for messages in host memory
  buffer<exec::pinned_memory> host_stage; // the same; the flag first
  void* host_out = nullptr;               // where the output goes
  index_t host_out_bytes = 0, host_out_offset = 0;

  loan lent; // at the checked level
  buffer<exec::cuda_memory> device_copies;
  buffer<> host_copies;
  buffer<exec::cuda_memory> device_headers; // of messages: mine, my peer's
  buffer<exec::pinned_memory> host_headers;

  nccl_operation* next = nullptr;

  void reset(call const& c, std::uint64_t of_group, bool is_blocking) noexcept {
    static_cast<nccl_call&>(*this) = {};
    request = c;
    group = of_group;
    blocking = is_blocking;
    finished = waiting = adds_integers = false;
    on_device = c.on_device;
    unwinding = std::uncaught_exceptions();
    error = nullptr;
    host_out = nullptr;
    lent = {};
  }
  /// A checked message that has come: is it the one that was asked for? The tag travels as its number.
  void compare_headers() const {
    signature theirs;
    std::memcpy(&theirs, at(host_headers.data(), static_cast<index_t>(sizeof theirs)), sizeof theirs);
    auto const tag = theirs.sequence;
    theirs.sequence = 0;
    if (theirs.what == collective::send && tag == request.tag && theirs.type == sign.type &&
        theirs.count == sign.count)
      return;
    throw collective_mismatch("E-comm-013", request.where,
                              "the two sides of a message differ: ", text_of(sign), " with tag ", request.tag,
                              " meets ", text_of(theirs), " with tag ", tag);
  }
  int* overflow() const noexcept { return static_cast<int*>(host_stage.data()); }
};

/// Pinned memory grows, and is not given back before the end: that may wait for the device, which may wait
/// for other ranks.
class outgrown_memory {
public:
  void* room(buffer<exec::pinned_memory>& memory, index_t bytes, memory_account account, site where) {
    if (memory.bytes() < bytes) {
      auto const grown = 2 * memory.bytes();
      if (memory.bytes() > 0) kept_.push_back(static_cast<buffer<exec::pinned_memory>&&>(memory));
      memory = buffer<exec::pinned_memory>(grown < bytes ? bytes : grown, account, where);
    }
    return memory.data();
  }

private:
  std::vector<buffer<exec::pinned_memory>> kept_;
};

/// Lent device memory: filled in the lane, read by way of the host.
struct device_store {
  using memory = exec::cuda_memory;

  nccl_link& link;
  exec::event& arrived;
  void* host; // pinned, large enough
  nccl_operation& one;

  void copy(void* to, void const* from, index_t bytes) const {
    link.copy(to, from, bytes, one.request.where);
  }
  void poison(void* to, index_t bytes) const {
    exec::cuda_check(cudaMemsetAsync(to, detail::poison, static_cast<std::size_t>(bytes), link.lane.stream()),
                     "cudaMemsetAsync", one.request.where);
  }
  index_t first_written(void const* lent, index_t bytes) const {
    return bytes == 0 ? -1 : host_store::first_written(read(lent, bytes), bytes);
  }
  std::uint64_t digest(void const* data, index_t bytes) const {
    return host_store::digest(read(data, bytes), bytes);
  }

private:
  void const* read(void const* data, index_t bytes) const {
    copy(host, data, bytes);
    arrived.record(link.lane, one.request.where);
    link.wait(arrived, one);
    return host;
  }
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

#endif

namespace tessera::inline TESSERA_ABI::comm::detail {

class nccl_engine {
public:
  using bulk_memory = exec::cuda_memory;
  template <memory_space Memory>
  static constexpr bool reaches = Memory::host_accessible || std::same_as<Memory, exec::cuda_memory>;
  static constexpr bool direct = false;
  template <reducible_scalar S>
  static constexpr combine_function combiner() noexcept {
    return &combine_on_device<S>;
  }

  using op = nccl_operation;

  nccl_engine(std::unique_ptr<nccl_link> link, communicator_options options, std::uint64_t group)
      : options(options), group(group), link_(static_cast<std::unique_ptr<nccl_link>&&>(link)),
        signs_(options.checked || options.stall_limit > 0), ready_(link_->lane), exchanged_(link_->lane),
        sends_(static_cast<std::size_t>(size())), receives_(static_cast<std::size_t>(size())) {}
  nccl_engine(nccl_engine const&) = delete;
  nccl_engine& operator=(nccl_engine const&) = delete;
  ~nccl_engine() {
    link_.reset(); // first: what is under way still uses the memory of operations
    for (auto* spare = spare_; spare != nullptr;) {
      auto* const next = spare->next;
      delete spare;
      spare = next;
    }
  }

  communicator_options const options;
  std::uint64_t const group;
  traffic_meter meter;
  memory_meter memory;
  std::int64_t sequence = 0;

  int rank() const noexcept { return link_->rank; }
  int size() const noexcept { return link_->size; }
  nccl_engine* split(std::vector<int> const& members, int color, int key, std::uint64_t id, site where) {
    exec::detail::device_scope const on(link_->compute.device(), where);
    auto const mine = std::find(members.begin(), members.end(), rank()) - members.begin();
    return new nccl_engine(std::make_unique<nccl_link>(*link_, color, key, narrow<int>(mine),
                                                       narrow<int>(members.size()), where),
                           options, id);
  }
  /// Throws config_error on all ranks where their options differ.
  void agree_on_options(site where) {
    auto& one = take({}, true);
    one.request.where = where;
    one.doing = "the beginning of comm::nccl";
    std::vector<communicator_terms> all(static_cast<std::size_t>(size()));
    communicator_terms const mine(options);
    gather_bytes(one, &mine, static_cast<index_t>(sizeof mine), all.data());
    recycle(one);
    compare_terms(all, rank(), where);
  }

  op& begin(call const& c, bool blocking) {
    exec::detail::device_scope const on(link_->compute.device(), c.where);
    if (lost()) throw_lost(c);
    auto& one = take(c, blocking);
    try {
      link_->check(one);
      put(one);
    } catch (...) {
      end_with_error(one);
    }
    return one;
  }
  /// Whether it has ended. Never waits; never in a graph.
  bool advance(op& one) {
    if (one.finished) return true;
    exec::detail::device_scope const on(link_->compute.device(), one.request.where);
    try {
      if (lost()) throw_lost(one.request);
      if (one.waiting) send_messages(one);
      if (link_->compute.capturing(one.request.where) || !link_->passed(one.ended, one)) return false;
      finish(one);
    } catch (...) {
      end_with_error(one);
    }
    return true;
  }
  /// Orders the compute stream after it, and the host where it must see the end; frees it; throws what it
  /// ended with.
  void complete(op& one) {
    exec::detail::device_scope const on(link_->compute.device(), one.request.where);
    if (!one.finished) {
      try {
        if (lost()) throw_lost(one.request);
        if (one.waiting) send_messages(one);
        if (!one.on_device || one.adds_integers || options.checked || options.stall_limit > 0)
          link_->wait(one.ended, one);
        else
          one.ended.wait_in(link_->compute, one.request.where);
        finish(one);
      } catch (...) {
        end_with_error(one);
      }
    }
    free(one);
  }
  /// Frees a finished operation, and throws what it ended with.
  void free(op& one) {
    if (!one.error && one.lent.any()) {
      try {
        give_back(one);
      } catch (...) {
        one.error = std::current_exception();
      }
    }
    auto const error = static_cast<std::exception_ptr&&>(one.error);
    one.error = nullptr;
    recycle(one);
    if (error) std::rethrow_exception(error);
  }
  /// Gives an operation up: its peers cannot finish, nor can this communicator go on.
  void abandon(op& one) noexcept {
    lose();
    std::erase(messages_, &one);
    recycle(one);
  }
  void lose() noexcept { link_->abort(); }

private:
  memory_account account() noexcept { return {&memory, memory_kind::communication}; }
  /// What is not the payload of a call on device memory.
  memory_account staging() noexcept { return {&memory, memory_kind::other}; }
  void* pinned_room(buffer<exec::pinned_memory>& memory, index_t bytes, site where) {
    return outgrown_.room(memory, bytes, staging(), where);
  }
  bool lost() const noexcept { return link_->lost(); }
  [[noreturn]] static void throw_lost(call const& c) {
    throw peer_failed("E-comm-016", c.where, name_of(c.what),
                      " on a communicator that an earlier failure or an abandoned request made useless");
  }

  op& take(call const& c, bool blocking) {
    auto* one = spare_;
    if (one == nullptr) {
      auto made = std::make_unique<op>();
      made->ended = exec::event(link_->lane, {}, c.where);
      one = made.release();
    } else {
      spare_ = one->next;
    }
    one->reset(c, group, blocking);
    return *one;
  }
  void recycle(op& one) noexcept {
    one.next = spare_;
    spare_ = &one;
  }
  void end_with_error(op& one) noexcept {
    one.error = std::current_exception();
    one.finished = true;
    std::erase(messages_, &one);
  }

  /// Puts all of a call into the lane; a message waits for others.
  void put(op& one) {
    auto& c = one.request;
    bool const message = c.is_point_to_point();
    if (!message) one.sequence = ++sequence;
    if (signs_) (void)one.signed_by(size());
    if (c.has_own_counts() && c.in_counts[rank()] != c.out_counts[rank()])
      throw collective_mismatch("E-comm-011", c.where, one.text(size()), ": rank ", rank(), " sends ",
                                c.in_counts[rank()], " elements to itself and expects ",
                                c.out_counts[rank()]);
    ready_.record(link_->compute, c.where);
    ready_.wait_in(link_->lane, c.where);
    if (options.checked && !message && size() > 1) compare(one);
    if (options.checked && !one.blocking) lend(one);
    if (!c.on_device) stage(one);
    if (message) {
      one.waiting = true;
      messages_.push_back(&one);
      return;
    }
    if (c.reduces() && (c.order == summation::rank_order || !nccl_adds(c.type)))
      put_in_rank_order(one);
    else
      put_natively(one);
    c.in_counts = c.out_counts = nullptr; // the caller's no longer
    seal(one);
  }
  /// Its last step is in the lane.
  void seal(op& one) {
    auto const& c = one.request;
    if (one.host_out != nullptr)
      link_->copy(at(one.host_stage.data(), one.host_out_offset), c.out, one.host_out_bytes, c.where);
    one.ended.record(link_->lane, c.where);
  }
  /// It has ended on the device, or, where nobody looks at it here, will.
  void finish(op& one) {
    auto const& c = one.request;
    one.finished = true;
    if (one.adds_integers && *one.overflow() != 0)
      throw numeric_error("E-comm-012", c.where, name_of(c.what), ": a sum over ranks does not fit ",
                          name_of(c.type), "; reduce in a wider type");
    if (one.host_out != nullptr)
      copy(one.host_out, at(one.host_stage.data(), one.host_out_offset), one.host_out_bytes);
    if (options.checked && c.what == collective::receive) one.compare_headers();
  }

  void put_natively(op& one) {
    auto const& c = one.request;
    auto step = transfer_of(c);
    auto const item = bytes_of(c.type);
    bool const in_place = c.what == collective::reduce_scatter &&
                          c.out == at(c.in, offset_of(rank(), c.count, c.in_counts) * item);
    if (!needs_staging(c) || in_place) return link_->enqueue(step, one);
    step.out = room(one.pieces, c.out_items * item, account(), c.where);
    link_->enqueue(step, one);
    link_->copy(c.out, step.out, c.out_items * item, c.where);
  }

  void put_in_rank_order(op& one) {
    auto const& c = one.request;
    if (size() == 1) return link_->copy(c.out, c.in, c.in_items * bytes_of(c.type), c.where);
    rank_order_steps const steps{c, rank(), size()};
    auto const flag_at = op::rounded(steps.pieces_bytes());
    auto* pieces = room(one.pieces, flag_at + static_cast<index_t>(sizeof(int)), account(), c.where);
    link_->enqueue(steps.exchange(pieces, sends_.data(), receives_.data()), one);
    one.adds_integers = is_integer(c.type) && c.operation == reduction::sum;
    device_combine_space space{link_->lane, nullptr};
    if (one.adds_integers) {
      space.overflow = reinterpret_cast<int*>(at(pieces, flag_at));
      exec::cuda_check(cudaMemsetAsync(space.overflow, 0, sizeof(int), link_->lane.stream()),
                       "cudaMemsetAsync", c.where);
    }
    (void)c.combine(&space, steps.sum(pieces));
    if (steps.collects()) link_->enqueue(steps.collect(pieces, sends_.data()), one);
    if (!one.adds_integers) return;
    transfer agree; // one overflow is everybody's
    agree.what = collective::all_reduce;
    agree.type = element::i32;
    agree.operation = reduction::max;
    agree.in = agree.out = space.overflow;
    agree.count = 1;
    link_->enqueue(agree, one);
    if (one.on_device) (void)pinned_room(one.host_stage, op::alignment, c.where);
    link_->copy(one.overflow(), space.overflow, sizeof(int), c.where);
  }

  /// Lets a call on host memory work on device memory. The first bytes of the host's side are the flag's.
  void stage(op& one) {
    auto& c = one.request;
    constexpr auto alignment = op::alignment;
    constexpr auto rounded = &op::rounded;
    auto const given = c.in == nullptr ? 0 : c.in_items * bytes_of(c.type);
    auto const wanted = c.out == nullptr ? 0 : c.out_items * bytes_of(c.type);
    auto const bytes = rounded(given) + rounded(wanted);
    auto* device = room(one.device_stage, bytes, staging(), c.where);
    auto* host = at(pinned_room(one.host_stage, alignment + bytes, c.where), alignment);
    if (given > 0) {
      copy(host, c.in, given);
      link_->copy(device, host, given, c.where);
    }
    if (wanted > 0) {
      one.host_out = c.out;
      one.host_out_bytes = wanted;
      one.host_out_offset = alignment + rounded(given);
    }
    c.in = device;
    c.out = at(device, rounded(given));
  }

  // --- the checked level

  /// `bytes` of every rank, over NCCL; the host waits.
  void gather_bytes(op& one, void const* mine, index_t bytes, void* all) {
    auto const where = one.request.where;
    auto const total = bytes * size();
    auto* host = pinned_room(exchanged_host_, total, where);
    auto* device = room(exchanged_device_, total, staging(), where);
    copy(at(host, bytes * rank()), mine, bytes);
    link_->copy(at(device, bytes * rank()), at(host, bytes * rank()), bytes, where);
    transfer step;
    step.what = collective::all_gather;
    step.in = at(device, bytes * rank());
    step.out = device;
    step.count = bytes;
    link_->enqueue(step, one);
    link_->copy(host, device, total, where);
    exchanged_.record(link_->lane, where);
    link_->wait(exchanged_, one);
    copy(all, host, total);
  }
  void compare(op& one) {
    auto const& c = one.request;
    auto const ranks = static_cast<std::size_t>(size());
    std::vector<signature> signs(ranks);
    gather_bytes(one, &one.sign, static_cast<index_t>(sizeof(signature)), signs.data());
    compare_signatures(signs.data(), size(), rank(), c.where);
    if (!c.has_own_counts()) return;
    std::vector<index_t> mine(c.in_counts, c.in_counts + size()), all(2 * ranks * ranks);
    mine.insert(mine.end(), c.out_counts, c.out_counts + size());
    gather_bytes(one, mine.data(), 2 * size() * static_cast<index_t>(sizeof(index_t)), all.data());
    compare_counts(all.data(), size(), one.sign, c.where);
  }

  /// Bytes by way of the host need room there.
  device_store store_of(op& one) {
    auto const& c = one.request;
    auto const items = c.in_items > c.out_items ? c.in_items : c.out_items;
    return {*link_, exchanged_, pinned_room(exchanged_host_, items * bytes_of(c.type), c.where), one};
  }
  void lend(op& one) {
    if (!one.on_device) return one.lent.lend(host_store(), one.request, one.host_copies, account());
    one.lent.lend(store_of(one), one.request, one.device_copies, account());
    exchanged_.record(link_->lane, one.request.where); // whoever reads it from here on reads poison
    exchanged_.wait_in(link_->compute, one.request.where);
  }
  void give_back(op& one) {
    auto const where = one.request.where;
    if (!one.on_device) return one.lent.give_back(host_store(), one.sign, one.host_copies.data(), where);
    ready_.record(link_->compute, where);
    ready_.wait_in(link_->lane, where);
    one.lent.give_back(store_of(one), one.sign, one.device_copies.data(), where);
    exchanged_.record(link_->lane, where);
    exchanged_.wait_in(link_->compute, where);
  }

  // --- messages

  /// Sends all that wait, as one group. A checked message is preceded by its signature, with the tag as its
  /// number.
  void send_messages(nccl_call& asking) {
    auto const going = static_cast<std::vector<op*>&&>(messages_);
    messages_.clear();
    auto sorted = going;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](op* a, op* b) { return a->request.tag < b->request.tag; });
    constexpr auto header = static_cast<index_t>(sizeof(signature));
    if (options.checked)
      for (auto* one : sorted) {
        auto* host = pinned_room(one->host_headers, 2 * header, one->request.where);
        auto tagged = one->sign;
        tagged.sequence = one->request.tag;
        std::memcpy(host, &tagged, sizeof tagged);
        link_->copy(room(one->device_headers, 2 * header, staging(), one->request.where), host, header,
                    one->request.where);
      }
    link_->grouped(asking, [&] {
      for (auto* one : sorted) {
        auto const& c = one->request;
        bool const sends = c.what == collective::send;
        if (options.checked) {
          auto* headers = one->device_headers.data();
          sends ? link_->put_send(headers, header, element::bytes, c.root, *one)
                : link_->put_receive(at(headers, header), header, element::bytes, c.root, *one);
        }
        sends ? link_->put_send(c.in, c.count, c.type, c.root, *one)
              : link_->put_receive(c.out, c.count, c.type, c.root, *one);
      }
    });
    for (auto* one : going) {
      one->waiting = false;
      if (options.checked && one->request.what == collective::receive)
        link_->copy(at(one->host_headers.data(), header), at(one->device_headers.data(), header), header,
                    one->request.where);
      seal(*one);
    }
  }

  std::unique_ptr<nccl_link> link_;
  bool const signs_;
  exec::event ready_;                     // what the compute stream had been given
  exec::event exchanged_;                 // bytes are there for the host to read
  std::vector<index_t> sends_, receives_; // counts of one step
  buffer<exec::cuda_memory> exchanged_device_;
  buffer<exec::pinned_memory> exchanged_host_;
  outgrown_memory outgrown_;
  std::vector<op*> messages_; // that wait to go out
  op* spare_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

#endif

namespace tessera::inline TESSERA_ABI::comm {

/// The same on all ranks; see communicator_options.
struct nccl_options {
  bool checked = false;
  double stall_limit = 0;
};

/// What the ranks of one communicator have in common before they know each other: made on one of them, and
/// brought to the others by the host application, byte by byte.
struct nccl_id {
  ncclUniqueId value{};

  /// Throws library_error (E-comm-101).
  static nccl_id make(site where = site::here()) {
    nccl_id id;
    detail::check_nccl(ncclGetUniqueId(&id.value), nullptr, "ncclGetUniqueId", where);
    return id;
  }
  std::span<std::byte> bytes() noexcept { return std::as_writable_bytes(std::span<char>(value.internal)); }
};

namespace detail {

/// Rank 0's new id, on all ranks; so is its failure.
template <host_communicator Host>
nccl_id shared_id(Host& host, site where) {
  nccl_id id;
  auto made = std::int32_t{ncclSuccess};
  if (host.rank() == 0) made = ncclGetUniqueId(&id.value);
  host.broadcast(std::span<std::int32_t>(&made, 1), 0, where);
  check_nccl(static_cast<ncclResult_t>(made), nullptr, "ncclGetUniqueId on rank 0", where);
  host.broadcast(id.bytes(), 0, where);
  return id;
}

} // namespace detail

/// A communicator over GPUs, one a rank. Move-only. `ex` outlives it. Destroyed on all ranks; while an
/// exception unwinds it is aborted, which ends what others wait for.
class nccl : public detail::interface<nccl, detail::nccl_engine> {
  using base = detail::interface<nccl, detail::nccl_engine>;

public:
  /// Over the ranks of `host`, of which it keeps a split: to bring the id, and to ask the others when
  /// something is stuck. A thread rank that fails wakes the others, as in comm::threads. Collective. Throws
  /// config_error if the ranks' options differ, library_error, or peer_failed, stalled.
  template <host_communicator Host>
  nccl(Host& host, exec::cuda& ex, nccl_options options = {}, site where = site::here())
      : nccl{detail::shared_id(host, where), host.rank(), host.size(), ex, options,
             detail::side_of(host, where),   where} {} // braces: from left to right

  /// From an id that all `size` ranks were given. Without another communicator to ask, a stall can only name
  /// what this rank waits in.
  nccl(nccl_id const& id, int rank, int size, exec::cuda& ex, nccl_options options = {},
       site where = site::here())
      : nccl(id, rank, size, ex, options, std::unique_ptr<detail::nccl_side>(), where) {}

private:
  friend base;
  explicit nccl(detail::nccl_engine* owned) noexcept : base(owned) {}
  nccl(nccl_id const& id, int rank, int size, exec::cuda& ex, nccl_options options,
       std::unique_ptr<detail::nccl_side> side, site where)
      : base(make(id, rank, size, ex, {options.checked, options.stall_limit},
                  static_cast<std::unique_ptr<detail::nccl_side>&&>(side), where)) {}

  static detail::nccl_engine* make(nccl_id const& id, int rank, int size, exec::cuda& ex,
                                   communicator_options options, std::unique_ptr<detail::nccl_side> side,
                                   site where) {
    if (size < 1 || rank < 0 || rank >= size)
      throw config_error("E-comm-104", where, "comm::nccl: rank ", rank, " of ", size,
                         " ranks; ranks are numbered from 0");
    auto link = std::make_unique<detail::nccl_link>(
        id.value, rank, size, ex, options, static_cast<std::unique_ptr<detail::nccl_side>&&>(side), where);
    auto engine = std::make_unique<detail::nccl_engine>(
        static_cast<std::unique_ptr<detail::nccl_link>&&>(link), options, 1);
    engine->agree_on_options(where);
    return engine.release();
  }
};

static_assert(communicator<nccl>);

} // namespace tessera::inline TESSERA_ABI::comm

#endif

#endif
#endif

/// A file that is either complete or not there: bytes go to a temporary name beside the target, and `commit`
/// brings them to the disk and renames. A crash, an exception or a full disk before that leaves the old file
/// as it was.
///
///     io::atomic_file file("run/metrics.json");
///     file.write(text);
///     file.commit();
///
/// Cost: the bytes once, two syncs. Leftovers of a killed program are called `.NAME.partial-K`;
/// `remove_leftovers(folder)` removes them when nobody else is writing there.
#ifndef TESSERA_IO_ATOMIC_FILE_HPP
#define TESSERA_IO_ATOMIC_FILE_HPP

#include <string_view>
#include <utility>
#include <vector>

/// Folders: make, list, remove. Paths are strings; a std::filesystem::path converts by itself (and its
/// header, which costs more than all of ours, stays out of here).
///
///     io::make_folders("runs/first/checkpoints");
///     for (auto const& name : io::names_in("runs/first")) ...
#ifndef TESSERA_IO_FOLDER_HPP
#define TESSERA_IO_FOLDER_HPP

#include <algorithm>
#include <string>
#include <vector>

#include <dirent.h>

/// What the files of this room share: a descriptor that closes itself, and calls of the operating system
/// whose failures become io_error with the path, the system's reason and, for a full disk, the remedy.
#ifndef TESSERA_IO_DETAIL_POSIX_HPP
#define TESSERA_IO_DETAIL_POSIX_HPP

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tessera::inline TESSERA_ABI::io::detail {

/// Throws io_error "cannot ACTION PATH: REASON". Every place that a full disk can be met ends here.
[[noreturn]] inline void fail(char const* id, site where, std::string_view action, std::string const& path,
                              int cause) {
  auto const reason = std::generic_category().message(cause);
  auto const full = cause == ENOSPC || cause == EDQUOT || cause == EFBIG;
  throw io_error(id, where, "cannot ", action, " ", path, ": ", reason,
                 full ? " (no room for it: free some space or raise the quota; what was complete before is "
                        "still there)"
                      : "");
}

/// The folder that a path's last name stands in.
inline std::string folder_of(std::string const& path) {
  auto const slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// The last name of a path.
inline std::string name_of(std::string const& path) {
  auto const slash = path.find_last_of('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

/// Owns an open file descriptor. Move-only.
class descriptor {
public:
  descriptor() = default;
  explicit descriptor(int number) noexcept : number_(number) {}
  descriptor(descriptor&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  descriptor& operator=(descriptor&& other) noexcept {
    if (this != &other) {
      close_quietly();
      number_ = other.number_;
      other.number_ = -1;
    }
    return *this;
  }
  ~descriptor() { close_quietly(); }

  int number() const noexcept { return number_; }
  bool open() const noexcept { return number_ >= 0; }

  /// Closes and reports: some file systems tell of a failed write only here.
  void close(std::string const& path, site where) {
    auto const number = number_;
    number_ = -1;
    if (number >= 0 && ::close(number) != 0 && errno != EINTR) fail("E-io-004", where, "write", path, errno);
  }

private:
  void close_quietly() noexcept {
    if (number_ >= 0) ::close(number_);
    number_ = -1;
  }

  int number_ = -1;
};

/// Writes all bytes, however few the system takes at a time.
inline void write_all(descriptor const& file, std::span<std::byte const> bytes, std::string const& path,
                      site where) {
  constexpr std::size_t at_most = std::size_t{1} << 30;
  while (!bytes.empty()) {
    auto const written =
        ::write(file.number(), bytes.data(), bytes.size() < at_most ? bytes.size() : at_most);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("E-io-004", where, "write", path, written < 0 ? errno : ENOSPC);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

/// Waits until a file's bytes, or a folder's names, are on the disk.
inline void sync(descriptor const& file, std::string const& path, site where) {
  while (::fsync(file.number()) != 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL || errno == ENOTSUP) return; // a file system that has no notion of it
    fail("E-io-005", where, "bring to the disk", path, errno);
  }
}

inline void sync_path(std::string const& path, site where) {
  descriptor const file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.open()) fail("E-io-005", where, "open for syncing", path, errno);
  sync(file, path, where);
}

} // namespace tessera::inline TESSERA_ABI::io::detail

#endif

namespace tessera::inline TESSERA_ABI::io {

inline bool file_exists(std::string const& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

inline bool folder_exists(std::string const& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

/// Makes the folder and those above it; one that is there already is fine.
inline void make_folders(std::string const& path, site where = site::here()) {
  if (path.empty() || folder_exists(path)) return;
  if (auto const above = detail::folder_of(path); above != path) make_folders(above, where);
  if (::mkdir(path.c_str(), 0777) != 0 && !(errno == EEXIST && folder_exists(path)))
    detail::fail("E-io-006", where, "make the folder", path, errno);
}

/// The names in a folder, sorted; without "." and "..".
inline std::vector<std::string> names_in(std::string const& path, site where = site::here()) {
  auto* const folder = ::opendir(path.c_str());
  if (folder == nullptr) detail::fail("E-io-001", where, "open the folder", path, errno);
  std::vector<std::string> names;
  int cause = 0;
  try {
    while (true) {
      errno = 0;
      auto const* const entry = ::readdir(folder);
      if (entry == nullptr) {
        cause = errno;
        break;
      }
      std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(std::move(name));
    }
  } catch (...) {
    ::closedir(folder);
    throw;
  }
  ::closedir(folder);
  if (cause != 0) detail::fail("E-io-001", where, "read the folder", path, cause);
  std::sort(names.begin(), names.end());
  return names;
}

/// Removes a file, or a folder with all that is in it (links are removed, not followed). What is not there
/// counts as removed.
inline void remove_all(std::string const& path, site where = site::here()) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;
    detail::fail("E-io-007", where, "remove", path, errno);
  }
  if (S_ISDIR(status.st_mode)) {
    for (auto const& name : names_in(path, where)) remove_all(path + "/" + name, where);
    if (::rmdir(path.c_str()) != 0 && errno != ENOENT) detail::fail("E-io-007", where, "remove", path, errno);
  } else if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    detail::fail("E-io-007", where, "remove", path, errno);
  }
}

} // namespace tessera::inline TESSERA_ABI::io

#endif

namespace tessera::inline TESSERA_ABI::io {

class atomic_file {
public:
  /// Opens the temporary file. Its folder must exist. Throws io_error.
  explicit atomic_file(std::string path, site where = site::here()) : path_(std::move(path)) {
    auto const folder = detail::folder_of(path_);
    auto const name = detail::name_of(path_);
    if (name.empty() || folder_exists(path_))
      throw io_error("E-io-002", where, "cannot write the file ", path_, ": it names a folder");
    // O_EXCL gives each of several writers, and each leftover of a dead one, a name of its own.
    for (int attempt = 0; !file_.open(); ++attempt) {
      temporary_ = tessera::text_of(folder, "/.", name, ".partial-", attempt);
      file_ = detail::descriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (!file_.open() && (errno != EEXIST || attempt > 9999)) {
        auto const cause = errno;
        temporary_.clear();
        detail::fail("E-io-004", where, "write", path_, cause);
      }
    }
    buffer_.reserve(buffer_bytes);
  }
  atomic_file(atomic_file&& other) noexcept
      : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, {})),
        file_(std::move(other.file_)), buffer_(std::move(other.buffer_)), bytes_(other.bytes_) {}
  atomic_file& operator=(atomic_file&&) = delete;
  /// Without a commit, nothing of the file remains.
  ~atomic_file() {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }

  /// Appends. Throws io_error when the disk is full.
  void write(std::span<std::byte const> bytes, site where = site::here()) {
    must_be_open(where);
    bytes_ += static_cast<index_t>(bytes.size());
    if (buffer_.size() + bytes.size() > buffer_bytes) flush(where);
    if (bytes.size() >= buffer_bytes)
      detail::write_all(file_, bytes, path_, where);
    else
      buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
  void write(std::string_view text, site where = site::here()) {
    write(std::as_bytes(std::span(text.data(), text.size())), where);
  }

  /// Overwrites bytes that were written before, for a header that counts what follows it.
  void rewrite(index_t offset, std::span<std::byte const> bytes, site where = site::here()) {
    must_be_open(where);
    if (offset < 0 || offset > bytes_ - static_cast<index_t>(bytes.size()))
      throw size_error("E-io-008", where, "rewriting ", bytes.size(), " bytes at ", offset, " of ", path_,
                       ", which has ", bytes_);
    flush(where);
    if (::lseek(file_.number(), offset, SEEK_SET) < 0) detail::fail("E-io-004", where, "write", path_, errno);
    detail::write_all(file_, bytes, path_, where);
    if (::lseek(file_.number(), 0, SEEK_END) < 0) detail::fail("E-io-004", where, "write", path_, errno);
  }

  /// Puts the file in its place, replacing an older one. Afterwards it survives a crash of the machine.
  void commit(site where = site::here()) {
    must_be_open(where);
    flush(where);
    detail::sync(file_, path_, where);
    file_.close(path_, where);
    if (::rename(temporary_.c_str(), path_.c_str()) != 0)
      detail::fail("E-io-005", where, "put in place", path_, errno);
    temporary_.clear();
    detail::sync_path(detail::folder_of(path_), where);
  }

  std::string const& path() const noexcept { return path_; }
  /// Bytes written so far.
  index_t bytes() const noexcept { return bytes_; }

private:
  static constexpr std::size_t buffer_bytes = std::size_t{1} << 16;

  void must_be_open(site where) const {
    if (!file_.open())
      throw config_error("E-io-009", where, path_, " was committed, or failed, before; nothing can be added");
  }
  void flush(site where) {
    detail::write_all(file_, buffer_, path_, where);
    buffer_.clear();
  }

  std::string path_;
  std::string temporary_;
  detail::descriptor file_;
  std::vector<std::byte> buffer_;
  index_t bytes_ = 0;
};

/// Writes a whole file at once.
inline void write_file(std::string const& path, std::string_view text, site where = site::here()) {
  atomic_file file(path, where);
  file.write(text, where);
  file.commit(where);
}

/// Removes the temporary files that killed programs left in a folder.
inline void remove_leftovers(std::string const& folder, site where = site::here()) {
  for (auto const& name : names_in(folder, where))
    if (name.front() == '.' && name.find(".partial-") != std::string::npos)
      remove_all(folder + "/" + name, where);
}

} // namespace tessera::inline TESSERA_ABI::io

#endif
/// Checksums of bytes: XXH3 with 64 bits (https://xxhash.com), through libxxhash. They find damage, not
/// malice. The same bytes give the same checksum in one piece or in many, on every machine.
///
///     io::checksum_of(bytes);                  // a number
///     io::checksum_stream stream;              // or piece by piece
///     stream.update(first); stream.update(second);
///     io::hexadecimal(stream.value());         // "2d06800538d394c2" for no bytes
///
/// Exists under TESSERA_WITH_XXHASH (link libxxhash). Cost: the bytes read once, at memory speed.
#ifndef TESSERA_IO_CHECKSUM_HPP
#define TESSERA_IO_CHECKSUM_HPP

#if defined(TESSERA_WITH_XXHASH)

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <xxhash.h>

namespace tessera::inline TESSERA_ABI::io {

inline std::uint64_t checksum_of(std::span<std::byte const> bytes) noexcept {
  return XXH3_64bits(bytes.data(), bytes.size());
}
inline std::uint64_t checksum_of(std::string_view text) noexcept {
  return XXH3_64bits(text.data(), text.size());
}

class checksum_stream {
public:
  explicit checksum_stream(site where = site::here()) : state_(XXH3_createState()) {
    if (state_ == nullptr) throw out_of_memory("E-io-010", where, "no memory for the state of a checksum");
    reset();
  }
  checksum_stream(checksum_stream&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  checksum_stream& operator=(checksum_stream&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~checksum_stream() { XXH3_freeState(state_); }

  void update(std::span<std::byte const> bytes) noexcept {
    XXH3_64bits_update(state_, bytes.data(), bytes.size());
  }
  /// Of all bytes since the construction or the last reset.
  std::uint64_t value() const noexcept { return XXH3_64bits_digest(state_); }
  void reset() noexcept { XXH3_64bits_reset(state_); }

private:
  XXH3_state_t* state_;
};

/// Sixteen hexadecimal digits: how checksums stand in manifests.
inline std::string hexadecimal(std::uint64_t value) {
  std::string text(16, '0');
  for (auto digit = text.rbegin(); digit != text.rend(); ++digit, value >>= 4)
    *digit = "0123456789abcdef"[value & 15u];
  return text;
}

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
/// The names of checkpoint folders, and how one takes another's place.
#ifndef TESSERA_IO_DETAIL_STEP_NAMES_HPP
#define TESSERA_IO_DETAIL_STEP_NAMES_HPP

#include <string>
#include <string_view>
#include <utility>

namespace tessera::inline TESSERA_ABI::io::detail {

/// "step-00000100": names sort like steps.
inline std::string step_name(index_t step) {
  auto digits = std::to_string(step);
  if (digits.size() < 8) digits.insert(0, 8 - digits.size(), '0');
  return "step-" + digits;
}

/// The step of a folder's name; -1 if it is not exactly such a name.
inline index_t step_of(std::string_view name) {
  if (name.substr(0, 5) != "step-" || name.size() < 13 || name.size() > 5 + 18) return -1;
  index_t step = 0;
  for (char digit : name.substr(5)) {
    if (digit < '0' || digit > '9') return -1;
    step = step * 10 + (digit - '0');
  }
  return step_name(step) == name ? step : -1;
}

/// The step and the ending of a hidden name such as ".step-00000100.pending"; -1 for other names.
inline std::pair<index_t, std::string_view> hidden_step_of(std::string_view name) {
  auto const dot = name.rfind('.');
  if (name.empty() || name.front() != '.' || dot == 0) return {-1, {}};
  return {step_of(name.substr(1, dot - 1)), name.substr(dot + 1)};
}

/// Renames a folder onto `target`. If one is there, the two change places in one step where the file system
/// can; elsewhere the old one is set aside as ".NAME.replaced" in between, from where recovery brings it
/// back.
inline void put_in_place(std::string const& pending, std::string const& target, site where) {
  if (::rename(pending.c_str(), target.c_str()) == 0) return; // also onto an empty folder
  if (errno != ENOTEMPTY && errno != EEXIST) fail("E-io-005", where, "put in place", target, errno);
#if defined(RENAME_EXCHANGE)
  if (::renameat2(AT_FDCWD, pending.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) return;
#endif
  auto const aside = folder_of(target) + "/." + name_of(target) + ".replaced";
  remove_all(aside, where);
  if (::rename(target.c_str(), aside.c_str()) != 0 || ::rename(pending.c_str(), target.c_str()) != 0)
    fail("E-io-005", where, "put in place", target, errno);
  sync_path(folder_of(target), where);
  remove_all(aside, where);
}

} // namespace tessera::inline TESSERA_ABI::io::detail

#endif
/// Which of some names a mistyped one was probably meant to be.
#ifndef TESSERA_IO_DETAIL_NEAREST_HPP
#define TESSERA_IO_DETAIL_NEAREST_HPP

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::inline TESSERA_ABI::io::detail {

/// How many letters must be put in, taken out or exchanged to make `a` into `b` (Levenshtein's distance).
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    auto diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      auto const above = row[j];
      row[j] = (std::min)({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0u : 1u)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

/// The nearest of `names`, the first of equally near ones; "" if there are none.
inline std::string nearest(std::string_view typed, std::vector<std::string> const& names) {
  std::string best;
  auto least = static_cast<std::size_t>(-1);
  for (auto const& name : names) {
    auto const distance = edit_distance(typed, name);
    if (distance < least) {
      least = distance;
      best = name;
    }
  }
  return best;
}

} // namespace tessera::inline TESSERA_ABI::io::detail

#endif
/// A file's bytes as a span, mapped read-only: nothing is copied, and pages are read when they are touched.
///
///     io::mapped_file file("tokens.bin");
///     file.bytes();
///
/// The file must not be cut while it is mapped (the writers of this library never do: they rename).
#ifndef TESSERA_IO_MAPPED_FILE_HPP
#define TESSERA_IO_MAPPED_FILE_HPP

#include <string>
#include <string_view>
#include <utility>

#include <sys/mman.h>

namespace tessera::inline TESSERA_ABI::io {

class mapped_file {
public:
  mapped_file() = default;
  /// Throws io_error if the path is missing, unreadable, not a regular file, or empty.
  explicit mapped_file(std::string path, site where = site::here()) : path_(std::move(path)) {
    // O_NONBLOCK: a named pipe is refused below instead of being waited for.
    detail::descriptor const file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!file.open()) detail::fail("E-io-001", where, "open", path_, errno);
    struct stat status {};
    if (::fstat(file.number(), &status) != 0) detail::fail("E-io-001", where, "read", path_, errno);
    if (!S_ISREG(status.st_mode))
      throw io_error("E-io-002", where, "cannot read ", path_, ": it is ",
                     S_ISDIR(status.st_mode) ? "a folder" : "not a regular file");
    if (status.st_size == 0) throw io_error("E-io-003", where, "the file ", path_, " is empty");
    size_ = static_cast<std::size_t>(status.st_size);
    auto* const memory = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.number(), 0);
    if (memory == MAP_FAILED) detail::fail("E-io-001", where, "map", path_, errno);
    data_ = static_cast<std::byte const*>(memory);
  }
  mapped_file(mapped_file&& other) noexcept { swap(other); }
  mapped_file& operator=(mapped_file&& other) noexcept {
    mapped_file(std::move(other)).swap(*this);
    return *this;
  }
  ~mapped_file() {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  }

  std::span<std::byte const> bytes() const noexcept { return {data_, size_}; }
  std::string_view text() const noexcept { return {reinterpret_cast<char const*>(data_), size_}; }
  index_t size() const noexcept { return static_cast<index_t>(size_); }
  std::string const& path() const noexcept { return path_; }

  void swap(mapped_file& other) noexcept {
    path_.swap(other.path_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

private:
  std::string path_;
  std::byte const* data_ = nullptr;
  std::size_t size_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
/// JSON (RFC 8259) that is read strictly and written the same way every time: keys keep their order, numbers
/// are the shortest that read back to the same value, and a key that nobody asked for is an error that names
/// the nearest one.
///
///     auto const text = io::read_json("config.json");
///     io::json_reader read(text, "config.json");
///     auto const width = read.required<index_t>("width");
///     auto const rate = read.optional<float>("learning_rate", 3e-4f);
///     read.finish();            // config_error: unknown key "learning_rte"; did you mean "learning_rate"?
///
/// Exists under TESSERA_WITH_JSON; the one file that includes nlohmann/json.
#ifndef TESSERA_IO_JSON_HPP
#define TESSERA_IO_JSON_HPP

#if defined(TESSERA_WITH_JSON)

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::inline TESSERA_ABI::io {

/// A JSON value whose objects keep the order in which keys were added.
using json = nlohmann::ordered_json;

/// Parses one JSON document. `source` is what messages call it. Refuses two equal keys in one object, text
/// after the end, comments, and byte-order marks. Throws io_error.
inline json parse_json(std::string_view text, std::string const& source, site where = site::here()) {
  // The parser would take a zero byte for the end, and skip a byte-order mark.
  if (text.find('\0') != std::string_view::npos || text.substr(0, 3) == "\xEF\xBB\xBF")
    throw io_error("E-io-011", where, source, " is not JSON: it holds a zero byte or a byte-order mark");
  std::vector<std::set<std::string>> keys;
  std::string twice;
  auto const watch_keys = [&](int, json::parse_event_t event, json& parsed) {
    using kind = json::parse_event_t;
    if (event == kind::object_start) keys.emplace_back();
    if (event == kind::object_end && !keys.empty()) keys.pop_back();
    if (event == kind::key && !keys.empty() && !keys.back().insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  json value;
  try {
    value = json::parse(text, watch_keys);
  } catch (json::exception const& cause) {
    throw io_error("E-io-011", where, source, " is not JSON: ", cause.what());
  }
  if (!twice.empty())
    throw io_error("E-io-012", where, source, ": the key \"", twice, "\" stands there twice");
  return value;
}

/// Reads a JSON file. Throws io_error.
inline json read_json(std::string const& path, site where = site::here()) {
  return parse_json(mapped_file(path, where).text(), path, where);
}

/// The text of a value, indented for people. Throws config_error for strings that are not UTF-8 and for
/// numbers that JSON does not have.
inline std::string text_of_json(json const& value, site where = site::here()) {
  try {
    return value.dump(2) + "\n";
  } catch (json::exception const& cause) {
    throw config_error("E-io-013", where, "cannot be written as JSON: ", cause.what());
  }
}

/// Writes a JSON file: complete, or not at all.
inline void write_json(std::string const& path, json const& value, site where = site::here()) {
  write_file(path, text_of_json(value, where), where);
}

namespace detail {

/// A value for a message: short, whatever came.
inline std::string brief(json const& value) {
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  auto text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

} // namespace detail

/// What `json_reader` can read: booleans, integers (range-checked), floating-point numbers, strings, and
/// lists of these.
template <class T>
concept json_value = std::same_as<T, bool> || std::integral<T> || std::floating_point<T> ||
    std::same_as<T, std::string> || requires {
  typename T::value_type;
  requires std::same_as<T, std::vector<typename T::value_type>>;
};

/// Reads one JSON object key by key and remembers what was asked for. Errors name the full path of the key
/// ("config.json: optimizer.beta1"). The object outlives the reader.
class json_reader {
public:
  json_reader(json const& object, std::string name, site where = site::here())
      : object_(&object), name_(std::move(name)) {
    if (!object.is_object())
      throw config_error("E-io-014", where, name_, " must be a JSON object { ... }, it is ",
                         object.type_name());
  }

  bool has(std::string const& key) {
    known_.insert(key);
    return object_->contains(key);
  }

  /// Throws config_error if the key is missing or holds another type.
  template <json_value T>
  T required(std::string const& key, site where = site::here()) {
    if (!has(key)) {
      auto const meant = detail::nearest(key, keys_not_known());
      throw config_error("E-io-015", where, name_, " lacks the key \"", key, "\"",
                         meant.empty() ? "" : "; it has \"" + meant + "\"");
    }
    return convert<T>((*object_)[key], path_of(key), where);
  }

  /// The value, or `otherwise` where the key is missing.
  template <json_value T>
  T optional(std::string const& key, T otherwise, site where = site::here()) {
    return has(key) ? convert<T>((*object_)[key], path_of(key), where) : otherwise;
  }

  /// A string that must be one of `names`; gives its place among them.
  std::size_t choice(std::string const& key, std::vector<std::string> const& names, std::size_t otherwise,
                     site where = site::here()) {
    if (!has(key)) return otherwise;
    auto const value = required<std::string>(key, where);
    for (std::size_t n = 0; n < names.size(); ++n)
      if (names[n] == value) return n;
    std::string all;
    for (auto const& name : names) all += (all.empty() ? "" : ", ") + name;
    throw config_error("E-io-017", where, path_of(key), " is \"", value, "\"; it can be: ", all);
  }

  /// A reader of the object under `key`, which must be there.
  json_reader section(std::string const& key, site where = site::here()) {
    if (!has(key)) throw config_error("E-io-015", where, name_, " lacks the section \"", key, "\"");
    return {(*object_)[key], path_of(key), where};
  }

  /// Refuses the object if it has a key that was never asked for.
  void finish(site where = site::here()) const {
    for (auto const& item : object_->items()) {
      if (known_.count(item.key()) != 0) continue;
      auto const meant = detail::nearest(item.key(), {known_.begin(), known_.end()});
      throw config_error("E-io-016", where, name_, ": unknown key \"", item.key(), "\"",
                         meant.empty() ? "" : "; did you mean \"" + meant + "\"?");
    }
  }

private:
  std::string path_of(std::string const& key) const {
    return name_ + (name_.find(": ") == std::string::npos ? ": " : ".") + key;
  }
  std::vector<std::string> keys_not_known() const {
    std::vector<std::string> found;
    for (auto const& item : object_->items())
      if (known_.count(item.key()) == 0) found.push_back(item.key());
    return found;
  }

  template <json_value T>
  static T convert(json const& value, std::string const& path, site where) {
    auto const refuse = [&](auto const&... expected) {
      throw config_error("E-io-017", where, path, " must be ", expected..., ", it is ", detail::brief(value));
    };
    if constexpr (std::same_as<T, bool>) {
      if (!value.is_boolean()) refuse("true or false");
      return value.template get<bool>();
    } else if constexpr (std::integral<T>) {
      using limits = std::numeric_limits<T>;
      auto const fits = value.is_number_unsigned() ? std::in_range<T>(value.template get<std::uint64_t>())
                                                   : value.is_number_integer() &&
                                                         std::in_range<T>(value.template get<std::int64_t>());
      if (!fits) refuse("an integer from ", (limits::min)(), " to ", (limits::max)());
      return value.template get<T>();
    } else if constexpr (std::floating_point<T>) {
      if (!value.is_number()) refuse("a number");
      auto const number = value.template get<T>();
      if (!std::isfinite(number)) refuse("a number within the range of its type");
      return number;
    } else if constexpr (std::same_as<T, std::string>) {
      if (!value.is_string()) refuse("a string");
      return value.template get<std::string>();
    } else {
      if (!value.is_array()) refuse("a list");
      T list;
      for (auto const& element : value)
        list.push_back(
            convert<typename T::value_type>(element, path + "[" + std::to_string(list.size()) + "]", where));
      return list;
    }
  }

  json const* object_;
  std::string name_;
  std::set<std::string> known_;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
/// Tensors as files know them: element types, an entry of a safetensors file, and the record of a written
/// tensor that goes into a checkpoint's manifest.
#ifndef TESSERA_IO_TENSOR_ENTRY_HPP
#define TESSERA_IO_TENSOR_ENTRY_HPP

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::io {

/// Element types in the format's order: larger ones come first in a file.
enum class dtype {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};
inline constexpr int dtype_count = 22;

constexpr char const* name_of(dtype type) noexcept {
  constexpr char const* names[] = {"BOOL",    "F4",      "F6_E2M3", "F6_E3M2",     "U8",          "I8",
                                   "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",
                                   "U16",     "F16",     "BF16",    "I32",         "U32",         "F32",
                                   "C64",     "F64",     "I64",     "U64"};
  return names[static_cast<std::size_t>(type)];
}

constexpr int bits_of(dtype type) noexcept {
  constexpr int bits[] = {8, 4, 6, 6, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64};
  return bits[static_cast<std::size_t>(type)];
}

/// One tensor of a file: [begin, end) are its bytes, counted from the start of the data.
struct tensor_entry {
  std::string name;
  dtype type = dtype::f32;
  std::vector<index_t> shape;
  index_t begin = 0;
  index_t end = 0;

  /// Elements; 1 for a scalar (no dimensions).
  index_t elements() const noexcept {
    index_t count = 1;
    for (auto extent : shape) count *= extent;
    return count;
  }
  /// Bytes that the shape takes, or -1 if a product overflows or the last byte is not full.
  index_t byte_count() const noexcept {
    index_t count = 1;
    auto const times = [&count](index_t factor) {
      return factor >= 0 && !__builtin_mul_overflow(count, factor, &count);
    };
    for (auto extent : shape)
      if (!times(extent)) return -1;
    return times(bits_of(type)) && count % 8 == 0 ? count / 8 : -1;
  }
  /// "[2, 3]", for messages.
  std::string shape_text() const {
    std::string text = "[";
    for (auto extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
    return text + "]";
  }
};

/// The element type of a C++ type in a file.
template <class T>
constexpr dtype
dtype_of() noexcept requires storage_scalar<T> || std::integral<T> || std::same_as<T, double> {
  if constexpr (std::same_as<T, float>)
    return dtype::f32;
  else if constexpr (std::same_as<T, double>)
    return dtype::f64;
  else if constexpr (std::same_as<T, bf16>)
    return dtype::bf16;
  else if constexpr (std::same_as<T, fp16>)
    return dtype::f16;
  else if constexpr (std::same_as<T, bool>)
    return dtype::boolean;
  else {
    constexpr dtype with_sign[] = {dtype::i8, dtype::i16, dtype::i32, dtype::i64};
    constexpr dtype without[] = {dtype::u8, dtype::u16, dtype::u32, dtype::u64};
    constexpr auto power = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
    return std::signed_integral<T> ? with_sign[power] : without[power];
  }
}

/// A C++ type that safetensors files can hold.
template <class T>
concept safetensors_scalar = requires {
  dtype_of<T>();
};

/// Where a written tensor stands in its file, and the checksum of its bytes (io/checksum.hpp).
struct tensor_record {
  std::string name;
  index_t offset = 0; ///< First byte, counted from the start of the file.
  index_t bytes = 0;
  std::uint64_t checksum = 0;
  friend bool operator==(tensor_record const&, tensor_record const&) = default;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
/// The manifest of a checkpoint: which files belong to it, how large they are, and what their bytes, and
/// those of each tensor in them, sum up to. It is the commit record: written last, and itself protected by a
/// checksum, so that whoever reads it knows that everything else was complete.
///
///     auto const record = io::read_manifest("step-00000100/manifest.json");
///     io::check_files(record, "step-00000100");     // io_error that names the damaged file and tensor
///
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH. Checking reads every byte once.
#ifndef TESSERA_IO_MANIFEST_HPP
#define TESSERA_IO_MANIFEST_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::io {

struct file_record {
  std::string name;
  index_t bytes = 0;
  std::uint64_t checksum = 0;
  std::vector<tensor_record> tensors; ///< Those whose checksums are known; they lie within the file.
  friend bool operator==(file_record const&, file_record const&) = default;
};

struct manifest {
  index_t step = 0;
  std::vector<file_record> files;
  friend bool operator==(manifest const&, manifest const&) = default;
};

/// The manifest as text; the same manifest gives the same bytes.
inline std::string manifest_text(manifest const& record, site where = site::here()) {
  json files = json::array();
  for (auto const& file : record.files) {
    json tensors = json::array();
    for (auto const& tensor : file.tensors)
      tensors.push_back({{"name", tensor.name},
                         {"offset", tensor.offset},
                         {"bytes", tensor.bytes},
                         {"xxh3", hexadecimal(tensor.checksum)}});
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"xxh3", hexadecimal(file.checksum)},
                     {"tensors", std::move(tensors)}});
  }
  json whole{{"format", "tessera checkpoint 1"}, {"step", record.step}, {"files", std::move(files)}};
  auto const checksum = checksum_of(text_of_json(whole, where));
  whole["xxh3"] = hexadecimal(checksum);
  return text_of_json(whole, where);
}

/// Reads a manifest. Throws io_error if it is missing, cut or altered by as much as one bit.
inline manifest read_manifest(std::string const& path, site where = site::here()) {
  mapped_file const file(path, where);
  manifest record;
  try {
    auto const whole = parse_json(file.text(), path, where);
    record.step = whole.at("step").get<index_t>();
    auto const number = [](json const& digits) {
      return static_cast<std::uint64_t>(std::stoull(digits.get<std::string>(), nullptr, 16));
    };
    for (auto const& entry : whole.at("files")) {
      file_record known{entry.at("name").get<std::string>(),
                        entry.at("bytes").get<index_t>(),
                        number(entry.at("xxh3")),
                        {}};
      for (auto const& tensor : entry.at("tensors"))
        known.tensors.push_back({tensor.at("name").get<std::string>(), tensor.at("offset").get<index_t>(),
                                 tensor.at("bytes").get<index_t>(), number(tensor.at("xxh3"))});
      record.files.push_back(std::move(known));
    }
  } catch (error const&) {
    throw;
  } catch (std::exception const& cause) {
    throw io_error("E-io-030", where, path, " is not a manifest: ", cause.what());
  }
  // The text follows from the content, checksum included: any other text was not written by us.
  if (manifest_text(record, where) != file.text())
    throw io_error("E-io-030", where, path,
                   " was altered: its content and its checksum do not belong together");
  return record;
}

namespace detail {

/// Which tensors of a damaged file are hit, for the message.
inline std::string damaged_tensors(file_record const& known, std::span<std::byte const> bytes) {
  std::string names;
  int others = 0;
  for (auto const& tensor : known.tensors) {
    auto const part =
        bytes.subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.bytes));
    if (checksum_of(part) == tensor.checksum) continue;
    if (names.empty())
      names = "tensor " + tensor.name;
    else
      ++others;
  }
  if (names.empty()) return "its header, or what lies between tensors";
  return others == 0 ? names : tessera::text_of(names, " and ", others, " more");
}

} // namespace detail

/// Compares one file with its record: there, and of the right size. Throws io_error.
inline void check_size(file_record const& known, std::string const& folder, site where = site::here()) {
  auto const path = folder + "/" + known.name;
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    throw io_error("E-io-031", where, "the checkpoint ", folder, " lacks its file ", known.name);
  if (status.st_size != known.bytes)
    throw io_error("E-io-032", where, path, " has ", status.st_size, " bytes, its manifest says ",
                   known.bytes, ": it was ", status.st_size < known.bytes ? "cut" : "altered");
}

/// Compares one file with its record, size and bytes. Throws io_error.
inline void check_file(file_record const& known, std::string const& folder, site where = site::here()) {
  check_size(known, folder, where);
  if (known.bytes == 0) return;
  auto const path = folder + "/" + known.name;
  mapped_file const file(path, where);
  if (checksum_of(file.bytes()) != known.checksum)
    throw io_error("E-io-033", where, path, " was altered: the checksum of its bytes is ",
                   hexadecimal(checksum_of(file.bytes())), ", its manifest says ",
                   hexadecimal(known.checksum), "; damaged: ", detail::damaged_tensors(known, file.bytes()));
}

/// Compares every file of a manifest. Throws io_error for the first that differs.
inline void check_files(manifest const& record, std::string const& folder, site where = site::here()) {
  for (auto const& file : record.files) check_file(file, folder, where);
}

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
/// Checkpoints as folders that are either complete or not there. Files are written into a hidden folder; the
/// manifest goes last; one rename makes `step-00000100/` appear. A run that is killed at any moment leaves
/// the checkpoints before it as they were.
///
///     io::recover_commits("run/checkpoints");                   // once, at the start of a program
///     io::commit_writer next("run/checkpoints", 100);
///     io::safetensors_writer weights(next.path("model.safetensors"), entries);
///     ...                                                        // any files, by any rank
///     next.add("model.safetensors", weights.commit());           // checksums of its tensors
///     next.commit();
///     io::prune_commits("run/checkpoints", 3);                   // keep the newest three
///     auto const latest = io::latest_commit("run/checkpoints");  // the newest whose every byte is right
///
/// One process (rank 0) makes, commits and prunes; others only write files into `pending_folder`.
/// Cost of a commit: the bytes read back once for their checksums, one sync a file and two of folders.
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_IO_COMMIT_HPP
#define TESSERA_IO_COMMIT_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::io {

/// A checkpoint that was committed.
struct committed {
  index_t step = 0;
  std::string path; ///< Its folder.
};

/// Where the files of step `step` are written before they are committed.
inline std::string pending_folder(std::string const& folder, index_t step) {
  return folder + "/." + detail::step_name(step) + ".pending";
}

/// A checkpoint being written. Unless it is committed, nothing of it remains.
class commit_writer {
public:
  /// Makes the hidden folder, and `folder` if need be. Throws size_error for a negative step, io_error.
  commit_writer(std::string folder, index_t step, site where = site::here())
      : folder_(std::move(folder)), step_(step), pending_(pending_folder(folder_, step)) {
    if (step < 0) throw size_error("E-io-034", where, "a checkpoint of step ", step, " was asked for");
    make_folders(folder_, where);
    remove_all(pending_, where); // a killed program's
    make_folders(pending_, where);
  }
  commit_writer(commit_writer&& other) noexcept
      : folder_(std::move(other.folder_)), step_(other.step_), pending_(std::exchange(other.pending_, {})),
        tensors_(std::move(other.tensors_)) {}
  commit_writer& operator=(commit_writer&&) = delete;
  ~commit_writer() {
    try {
      if (!pending_.empty()) remove_all(pending_);
    } catch (error const&) { // recover_commits removes it next time
    }
  }

  /// Where to write the file `name` of this checkpoint.
  std::string path(std::string const& name) const { return pending_ + "/" + name; }

  /// Adds the checksums of the tensors of a file to the manifest.
  void add(std::string name, std::vector<tensor_record> tensors) {
    tensors_.push_back({std::move(name), 0, 0, std::move(tensors)});
  }

  /// Makes the checkpoint appear, complete and on the disk, replacing one of the same step.
  committed commit(site where = site::here()) {
    manifest record{step_, {}};
    for (auto const& name : names_in(pending_, where)) record.files.push_back(record_of(name, where));
    for (auto& known : tensors_) add_tensors(record, known, where);
    write_file(path("manifest.json"), manifest_text(record, where), where);
    auto const target = folder_ + "/" + detail::step_name(step_);
    detail::put_in_place(pending_, target, where);
    detail::sync_path(folder_, where);
    if (folder_exists(pending_)) remove_all(pending_, where); // what was replaced
    pending_.clear();
    return {step_, target};
  }

private:
  file_record record_of(std::string const& name, site where) const {
    if (!file_exists(path(name)) || name.front() == '.' || name == "manifest.json")
      throw config_error("E-io-035", where, "the checkpoint of step ", step_, " cannot hold ", path(name),
                         ": a folder, a file that is still being written, or a name that is reserved");
    detail::sync_path(path(name), where);
    struct stat status {};
    if (::stat(path(name).c_str(), &status) != 0) detail::fail("E-io-001", where, "read", path(name), errno);
    if (status.st_size == 0) return {name, 0, checksum_of(std::string_view{}), {}};
    mapped_file const file(path(name), where);
    return {name, file.size(), checksum_of(file.bytes()), {}};
  }

  void add_tensors(manifest& record, file_record& known, site where) const {
    for (auto& file : record.files) {
      if (file.name != known.name) continue;
      for (auto const& tensor : known.tensors)
        if (tensor.offset < 0 || tensor.bytes < 0 || tensor.offset > file.bytes - tensor.bytes)
          throw size_error("E-io-038", where, "tensor ", tensor.name, " lies outside ", path(file.name));
      file.tensors = known.tensors;
      return;
    }
    throw config_error("E-io-036", where, "tensors of ", known.name, " were added to the checkpoint of step ",
                       step_, ", which holds no such file");
  }

  std::string folder_;
  index_t step_;
  std::string pending_;
  std::vector<file_record> tensors_;
};

/// All checkpoints of a folder by step, oldest first; none if there is no such folder. Only their names and
/// the presence of a manifest are looked at.
inline std::vector<committed> commits_in(std::string const& folder, site where = site::here()) {
  std::vector<committed> found;
  if (!folder_exists(folder)) return found;
  for (auto const& name : names_in(folder, where))
    if (auto const step = detail::step_of(name);
        step >= 0 && file_exists(folder + "/" + name + "/manifest.json"))
      found.push_back({step, folder + "/" + name});
  std::sort(found.begin(), found.end(), [](auto const& a, auto const& b) { return a.step < b.step; });
  return found;
}

/// Reads a checkpoint's manifest, which must be of its step. Throws io_error.
inline manifest manifest_of(committed const& checkpoint, site where = site::here()) {
  auto record = read_manifest(checkpoint.path + "/manifest.json", where);
  if (record.step != checkpoint.step)
    throw io_error("E-io-030", where, checkpoint.path, " holds the manifest of step ", record.step);
  return record;
}

/// Checks every byte of a checkpoint. Throws io_error that names the file, and the tensor, that was cut or
/// altered.
inline void verify(committed const& checkpoint, site where = site::here()) {
  check_files(manifest_of(checkpoint, where), checkpoint.path, where);
}

namespace detail {

/// Whether a checkpoint is whole: every byte, or only its manifest and the sizes of its files.
inline bool holds(committed const& checkpoint, bool every_byte, site where) {
  try {
    auto const record = manifest_of(checkpoint, where);
    for (auto const& file : record.files)
      every_byte ? check_file(file, checkpoint.path, where) : check_size(file, checkpoint.path, where);
    return true;
  } catch (io_error const&) {
    return false;
  }
}

} // namespace detail

struct latest_found {
  std::optional<committed> checkpoint; ///< The newest whose every byte is right.
  std::vector<std::string> refused;    ///< Why each newer one is not it: to be shown to the user.
};

/// Looks for the newest checkpoint that verifies.
inline latest_found latest_commit(std::string const& folder, site where = site::here()) {
  latest_found result;
  auto const all = commits_in(folder, where);
  for (auto checkpoint = all.rbegin(); checkpoint != all.rend() && !result.checkpoint; ++checkpoint) {
    try {
      verify(*checkpoint, where);
      result.checkpoint = *checkpoint;
    } catch (io_error const& cause) {
      result.refused.emplace_back(cause.what());
    }
  }
  return result;
}

/// Removes all but the newest `keep` checkpoints and gives the removed ones. A damaged one does not count:
/// the newest counted one is checked byte for byte, the others by manifest and sizes; while none is whole,
/// nothing is removed.
inline std::vector<committed> prune_commits(std::string const& folder, index_t keep,
                                            site where = site::here()) {
  if (keep < 1) throw config_error("E-io-037", where, "at least one checkpoint must be kept, not ", keep);
  std::vector<committed> removed;
  index_t whole = 0;
  auto const all = commits_in(folder, where);
  for (auto checkpoint = all.rbegin(); checkpoint != all.rend(); ++checkpoint) {
    if (whole < keep) {
      whole += detail::holds(*checkpoint, whole == 0, where) ? 1 : 0;
      continue;
    }
    // Renamed first: half a folder must not look like a checkpoint.
    auto const doomed = folder + "/." + detail::step_name(checkpoint->step) + ".removed";
    remove_all(doomed, where);
    if (::rename(checkpoint->path.c_str(), doomed.c_str()) != 0)
      detail::fail("E-io-007", where, "remove", checkpoint->path, errno);
    remove_all(doomed, where);
    removed.push_back(*checkpoint);
  }
  return removed;
}

/// Undoes what a killed program left half done: removes what it had not committed or was removing, and puts
/// back what it was about to replace. Nobody else may be writing there.
inline void recover_commits(std::string const& folder, site where = site::here()) {
  if (!folder_exists(folder)) return;
  for (auto const& name : names_in(folder, where)) {
    auto const [step, ending] = detail::hidden_step_of(name);
    if (step < 0) continue;
    auto const target = folder + "/" + detail::step_name(step);
    if (ending == "replaced" && !folder_exists(target)) {
      if (::rename((folder + "/" + name).c_str(), target.c_str()) != 0)
        detail::fail("E-io-005", where, "put back", target, errno);
    } else {
      remove_all(folder + "/" + name, where);
    }
  }
}

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
/// One program at a time in a folder: a lock that ends with the program, however that ends.
///
///     io::folder_lock const lock("run");      // io_error if another program works there
///
/// The lock is on the empty file `run/.lock`, which stays. Taken by one process of a job (rank 0).
#ifndef TESSERA_IO_FOLDER_LOCK_HPP
#define TESSERA_IO_FOLDER_LOCK_HPP

#include <string>

#include <sys/file.h>

namespace tessera::inline TESSERA_ABI::io {

class folder_lock {
public:
  /// Throws io_error: E-io-039 while another program holds the lock, E-io-040 where the file system has no
  /// locks (whoever knows that no other program works there may go on without).
  explicit folder_lock(std::string const& folder, site where = site::here()) {
    auto const path = folder + "/.lock";
    file_ = detail::descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!file_.open()) detail::fail("E-io-004", where, "write", path, errno);
    while (::flock(file_.number(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno == EWOULDBLOCK)
        throw io_error("E-io-039", where, "another program is working in ", folder,
                       ": wait for it, end it, or choose another folder");
      detail::fail("E-io-040", where, "lock", path, errno);
    }
  }

private:
  detail::descriptor file_;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
/// The header of a safetensors file, and the checks of every claim it makes.
#ifndef TESSERA_IO_DETAIL_SAFETENSORS_HEADER_HPP
#define TESSERA_IO_DETAIL_SAFETENSORS_HEADER_HPP

#if defined(TESSERA_WITH_JSON)

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::io::detail {

/// Larger headers are refused: a length that was damaged must not ask for all memory.
inline constexpr std::uint64_t largest_safetensors_header = 100'000'000;

struct safetensors_header {
  std::vector<tensor_entry> entries; ///< By their place in the data.
  std::map<std::string, std::string> metadata;
  std::size_t data_start = 0;
};

/// The checks of one file's header; every failure names the file.
class safetensors_parser {
public:
  safetensors_parser(std::span<std::byte const> file, std::string const& path, site where)
      : file_(file), path_(path), where_(where) {}

  safetensors_header parse() {
    auto const header_json = parse_json(header_text(), path_ + ": the header", where_);
    if (!header_json.is_object()) refuse("the header is not a JSON object");
    for (auto const& item : header_json.items())
      if (item.key() == "__metadata__")
        read_metadata(item.value());
      else
        header_.entries.push_back(entry_of(item.key(), item.value()));
    check_that_data_is_covered();
    return std::move(header_);
  }

private:
  template <class... Parts>
  [[noreturn]] void refuse(Parts const&... parts) const {
    throw io_error("E-io-020", where_, path_, " is not a valid safetensors file: ", parts...);
  }

  std::string_view header_text() {
    if (file_.size() < 8) refuse("it has ", file_.size(), " bytes, fewer than the 8 of the header's length");
    std::uint64_t length = 0;
    for (int byte = 7; byte >= 0; --byte)
      length = length << 8 | std::to_integer<std::uint64_t>(file_[static_cast<std::size_t>(byte)]);
    if (length > largest_safetensors_header)
      refuse("the header claims ", length, " bytes, at most ", largest_safetensors_header, " are allowed");
    if (length > file_.size() - 8)
      refuse("the header claims ", length, " bytes, the file has ", file_.size() - 8,
             " after its length: it was cut or is of another format");
    header_.data_start = 8 + static_cast<std::size_t>(length);
    return {reinterpret_cast<char const*>(file_.data()) + 8, static_cast<std::size_t>(length)};
  }

  void read_metadata(json const& value) {
    if (!value.is_object()) refuse("__metadata__ is not an object");
    for (auto const& item : value.items()) {
      if (!item.value().is_string()) refuse("__metadata__: \"", item.key(), "\" is not a string");
      header_.metadata.emplace(item.key(), item.value().get<std::string>());
    }
  }

  index_t count_of(std::string const& name, json const& number) const {
    if (!number.is_number_unsigned() || !std::in_range<index_t>(number.get<std::uint64_t>()))
      refuse("tensor ", name, ": ", brief(number), " is not a size");
    return number.get<index_t>();
  }

  tensor_entry entry_of(std::string const& name, json const& value) const {
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets"))
      refuse("tensor ", name, " is not described by dtype, shape and data_offsets");
    tensor_entry entry;
    entry.name = name;
    entry.type = type_of(name, value["dtype"]);
    auto const& shape = value["shape"];
    auto const& offsets = value["data_offsets"];
    if (!shape.is_array() || !offsets.is_array() || offsets.size() != 2)
      refuse("tensor ", name, ": shape must be a list and data_offsets a list of two");
    for (auto const& extent : shape) entry.shape.push_back(count_of(name, extent));
    entry.begin = count_of(name, offsets[0]);
    entry.end = count_of(name, offsets[1]);
    auto const bytes = entry.byte_count();
    if (bytes < 0)
      refuse("tensor ", name, ": shape ", entry.shape_text(), " of ", name_of(entry.type),
             " overflows or does not fill whole bytes");
    if (entry.end < entry.begin || entry.end - entry.begin != bytes)
      refuse("tensor ", name, ": shape ", entry.shape_text(), " of ", name_of(entry.type), " takes ", bytes,
             " bytes, its offsets are [", entry.begin, ", ", entry.end, ")");
    return entry;
  }

  dtype type_of(std::string const& name, json const& value) const {
    for (int n = 0; n < dtype_count; ++n)
      if (value == name_of(static_cast<dtype>(n))) return static_cast<dtype>(n);
    refuse("tensor ", name, " has the unknown dtype ", brief(value));
  }

  void check_that_data_is_covered() {
    std::sort(header_.entries.begin(), header_.entries.end(), [](auto const& a, auto const& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    index_t covered = 0;
    for (auto const& entry : header_.entries) {
      if (entry.begin != covered)
        refuse("tensor ", entry.name, " begins at byte ", entry.begin,
               " of the data, the one before it ends at ", covered);
      covered = entry.end;
    }
    if (auto const have = static_cast<index_t>(file_.size() - header_.data_start); have != covered)
      refuse("its tensors take ", covered, " bytes, it has ", have, have < covered ? ": it was cut" : "");
  }

  std::span<std::byte const> file_;
  std::string const& path_;
  site where_;
  safetensors_header header_;
};

inline safetensors_header parse_safetensors_header(std::span<std::byte const> file, std::string const& path,
                                                   site where) {
  return safetensors_parser(file, path, where).parse();
}

} // namespace tessera::inline TESSERA_ABI::io::detail

#endif

#endif
/// The safetensors format (github.com/huggingface/safetensors): named arrays in one file. A u64 length, a
/// JSON header (name -> dtype, shape, data_offsets), then the data, packed. This header describes and reads;
/// io/safetensors_writer.hpp writes.
///
///     io::safetensors_file file("model.safetensors");
///     file.read<float>("wte.weight", weights);         // type and size are checked
///     for (auto const& entry : file.entries()) ...      // name, type, shape
///
/// The file is mapped: opening reads the header only. Nothing of it is believed before every offset, shape
/// and size has been checked; what does not fit exactly is an io_error that names the file and the tensor.
/// Exists under TESSERA_WITH_JSON.
#ifndef TESSERA_IO_SAFETENSORS_HPP
#define TESSERA_IO_SAFETENSORS_HPP

#if defined(TESSERA_WITH_JSON)

#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::io {

class safetensors_file {
public:
  /// Maps the file and checks its header. Throws io_error.
  explicit safetensors_file(std::string path, site where = site::here())
      : file_(std::move(path), where),
        header_(detail::parse_safetensors_header(file_.bytes(), file_.path(), where)) {
    for (std::size_t n = 0; n < header_.entries.size(); ++n) numbers_.emplace(header_.entries[n].name, n);
  }

  /// All tensors, in the order of their data.
  std::vector<tensor_entry> const& entries() const noexcept { return header_.entries; }
  std::map<std::string, std::string> const& metadata() const noexcept { return header_.metadata; }
  std::string const& path() const noexcept { return file_.path(); }

  /// The entry of a name, or nullptr.
  tensor_entry const* find(std::string const& name) const noexcept {
    auto const found = numbers_.find(name);
    return found == numbers_.end() ? nullptr : &header_.entries[found->second];
  }
  /// The entry of a name. Throws io_error if there is none.
  tensor_entry const& at(std::string const& name, site where = site::here()) const {
    if (auto const* entry = find(name)) return *entry;
    throw io_error("E-io-023", where, path(), " holds no tensor ", name);
  }

  /// The bytes of a tensor, as they stand in the file.
  std::span<std::byte const> bytes(tensor_entry const& entry) const noexcept {
    return file_.bytes().subspan(header_.data_start + static_cast<std::size_t>(entry.begin),
                                 static_cast<std::size_t>(entry.end - entry.begin));
  }

  /// Copies elements [first, first + out.size()) of a tensor. Throws io_error if there is no such tensor or
  /// it holds another type, size_error if it has fewer elements.
  template <safetensors_scalar T>
  void read_part(std::string const& name, index_t first, std::span<T> out, site where = site::here()) const {
    auto const& entry = at(name, where);
    if (entry.type != dtype_of<T>())
      throw io_error("E-io-024", where, path(), ": tensor ", name, " is of type ", name_of(entry.type), ", ",
                     name_of(dtype_of<T>()), " was asked for");
    auto const wanted = static_cast<index_t>(out.size());
    if (first < 0 || first > entry.elements() - wanted)
      throw size_error("E-io-025", where, path(), ": tensor ", name, " has ", entry.elements(),
                       " elements; elements ", first, " to ", first + wanted, " were asked for");
    auto const* const from = bytes(entry).data() + first * static_cast<index_t>(sizeof(T));
    if (!out.empty()) std::memcpy(static_cast<void*>(out.data()), from, out.size_bytes());
  }

  /// Copies a whole tensor; `out` has exactly its size.
  template <safetensors_scalar T>
  void read(std::string const& name, std::span<T> out, site where = site::here()) const {
    if (auto const have = at(name, where).elements(); have != static_cast<index_t>(out.size()))
      throw size_error("E-io-025", where, path(), ": tensor ", name, " has ", have, " elements, ", out.size(),
                       " were asked for");
    read_part(name, 0, out, where);
  }

private:
  mapped_file file_;
  detail::safetensors_header header_;
  std::map<std::string, std::size_t> numbers_;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
/// Writes a safetensors file tensor by tensor: the header is known in advance, so that no tensor needs to be
/// held in memory beside the others, and a tensor may come in pieces (the shards of several ranks).
///
///     io::safetensors_writer file("model.safetensors", {{"w", io::dtype::f32, {2, 3}}, {"b", io::dtype::f32,
///     {3}}}); for (auto const& entry : file.entries())      // the order of the data: by type, then by name
///       file.write(entry.name, bytes_of(entry.name));
///     auto const records = file.commit();            // name, place and checksum of every tensor
///
/// The file appears under its name, complete and on the disk, at `commit`; before, or after a failure,
/// whatever stood there is untouched. The same content gives the same bytes. Cost: the bytes once.
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_IO_SAFETENSORS_WRITER_HPP
#define TESSERA_IO_SAFETENSORS_WRITER_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <map>
#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::io {

class safetensors_writer {
public:
  /// Writes the header. `begin` and `end` of the entries are set here. Throws config_error for two equal
  /// names or a name that is not UTF-8, size_error for an impossible shape, io_error.
  safetensors_writer(std::string path, std::vector<tensor_entry> entries,
                     std::map<std::string, std::string> const& metadata = {}, site where = site::here())
      : entries_(std::move(entries)), file_(std::move(path), where) {
    place_entries(where);
    auto const text = header_text(metadata, where);
    std::byte length[8];
    for (std::size_t byte = 0; byte < 8; ++byte)
      length[byte] = static_cast<std::byte>(text.size() >> (8 * byte) & 255u);
    file_.write(length, where);
    file_.write(text, where);
  }

  /// All tensors in the order in which they are to be written.
  std::vector<tensor_entry> const& entries() const noexcept { return entries_; }

  /// Appends bytes to the tensor `name`: the one begun before, or, when that one is complete, the next.
  /// Throws config_error for any other, size_error for more bytes than its shape has.
  void write(std::string const& name, std::span<std::byte const> bytes, site where = site::here()) {
    finish_complete_ones(name);
    if (at_ == entries_.size() || entries_[at_].name != name)
      throw config_error("E-io-028", where, file_.path(), ": tensor ", name, " was written where ",
                         at_ == entries_.size() ? "nothing more" : entries_[at_].name, " belongs");
    auto const left = entries_[at_].end - entries_[at_].begin - written_;
    if (static_cast<index_t>(bytes.size()) > left)
      throw size_error("E-io-029", where, file_.path(), ": tensor ", name, " was given ", bytes.size(),
                       " bytes more, ", left, " are left of its shape ", entries_[at_].shape_text());
    file_.write(bytes, where);
    stream_.update(bytes);
    written_ += static_cast<index_t>(bytes.size());
  }

  /// Ends the file and puts it in place. Throws size_error, naming the tensor, if bytes are missing.
  std::vector<tensor_record> commit(site where = site::here()) {
    finish_complete_ones({});
    if (at_ != entries_.size())
      throw size_error("E-io-029", where, file_.path(), ": tensor ", entries_[at_].name, " has ", written_,
                       " of its ", entries_[at_].end - entries_[at_].begin, " bytes");
    file_.commit(where);
    return std::move(records_);
  }

private:
  /// Larger types first: every tensor is aligned to its type if the start of the data is.
  void place_entries(site where) {
    std::sort(entries_.begin(), entries_.end(), [](auto const& a, auto const& b) {
      return a.type != b.type ? a.type > b.type : a.name < b.name;
    });
    std::set<std::string> names{"__metadata__"};
    index_t at = 0;
    for (auto& entry : entries_) {
      if (!names.insert(entry.name).second)
        throw config_error("E-io-026", where, file_.path(), ": the name ", entry.name,
                           " is reserved, or two tensors have it");
      auto const bytes = entry.byte_count();
      if (bytes < 0 || bytes > (std::numeric_limits<index_t>::max)() - at)
        throw size_error("E-io-027", where, file_.path(), ": tensor ", entry.name, ": shape ",
                         entry.shape_text(), " of ", name_of(entry.type), " is impossible");
      entry.begin = at;
      entry.end = at += bytes;
    }
  }

  std::string header_text(std::map<std::string, std::string> const& metadata, site where) {
    auto header = json::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    for (auto const& entry : entries_) {
      auto& described = header[entry.name];
      described["dtype"] = name_of(entry.type);
      described["shape"] = entry.shape;
      described["data_offsets"] = {entry.begin, entry.end};
    }
    std::string text;
    try {
      text = header.dump();
    } catch (json::exception const& cause) {
      throw config_error("E-io-013", where, file_.path(),
                         ": a name cannot be written as JSON: ", cause.what());
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    if (text.size() > detail::largest_safetensors_header)
      throw size_error("E-io-027", where, file_.path(), ": a header of ", text.size(), " bytes is too large");
    data_start_ = 8 + static_cast<index_t>(text.size());
    return text;
  }

  /// Records the tensors that have all their bytes, up to the one called `wanted`.
  void finish_complete_ones(std::string const& wanted) {
    while (at_ < entries_.size() && written_ == entries_[at_].end - entries_[at_].begin &&
           entries_[at_].name != wanted) {
      auto const& entry = entries_[at_++];
      records_.push_back({entry.name, data_start_ + entry.begin, entry.end - entry.begin, stream_.value()});
      stream_.reset();
      written_ = 0;
    }
  }

  std::vector<tensor_entry> entries_;
  std::vector<tensor_record> records_;
  atomic_file file_;
  checksum_stream stream_;
  std::size_t at_ = 0;     ///< The tensor being written.
  index_t written_ = 0;    ///< Its bytes so far.
  index_t data_start_ = 0; ///< Where the data begins in the file.
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif

/// The tokenizer without a vocabulary file: every byte of the text is a token, 0 to 255.
///
///     data::byte_tokenizer tokenizer;
///     tokenizer.decode(tokenizer.encode("In the beginning"));
#ifndef TESSERA_DATA_BYTES_HPP
#define TESSERA_DATA_BYTES_HPP

/// What turns text into tokens and back. Models: data/bytes.hpp, data/sentencepiece.hpp.
#ifndef TESSERA_DATA_TOKENIZER_HPP
#define TESSERA_DATA_TOKENIZER_HPP

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::inline TESSERA_ABI::data {

/// Semantics (tests/data/tokenizer.cpp): encode gives tokens in [0, vocabulary_size()); decode(encode(text))
/// == text for every text, bytes that are no UTF-8 included; decode of two lists joined is the two texts
/// joined; equal fingerprints mean equal encodings. decode throws size_error for a token out of range.
template <class T>
concept tokenizer = requires(T const& t, std::string_view text, std::span<std::int32_t const> tokens) {
  { t.vocabulary_size() } -> std::same_as<index_t>;
  { t.encode(text) } -> std::same_as<std::vector<std::int32_t>>;
  { t.decode(tokens) } -> std::same_as<std::string>;
  { t.name() } -> std::convertible_to<std::string_view>;
  { t.fingerprint() } -> std::same_as<std::uint64_t>;
};

} // namespace tessera::inline TESSERA_ABI::data

#endif

namespace tessera::inline TESSERA_ABI::data {

class byte_tokenizer {
public:
  constexpr index_t vocabulary_size() const noexcept { return 256; }
  constexpr std::string_view name() const noexcept { return "bytes"; }
  constexpr std::uint64_t fingerprint() const noexcept { return 256; }

  std::vector<std::int32_t> encode(std::string_view text) const {
    std::vector<std::int32_t> tokens(text.size());
    for (std::size_t n = 0; n < text.size(); ++n) tokens[n] = static_cast<unsigned char>(text[n]);
    return tokens;
  }

  std::string decode(std::span<std::int32_t const> tokens, site where = site::here()) const {
    std::string text(tokens.size(), '\0');
    for (std::size_t n = 0; n < tokens.size(); ++n) {
      if (tokens[n] < 0 || tokens[n] > 255)
        throw size_error("E-data-001", where, "token ", n, " is ", tokens[n], ", not a byte");
      text[n] = static_cast<char>(tokens[n]);
    }
    return text;
  }
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
/// Tokens that stand somewhere else, in two or four bytes each: a mapped file or a vector. Trivially
/// copyable; the memory outlives it.
///
///     data::token_view tokens = vector_of_int32;      // or token_file::tokens()
///     tokens.copy(first, out, vocabulary_size);       // size_error for a token out of range
#ifndef TESSERA_DATA_TOKEN_VIEW_HPP
#define TESSERA_DATA_TOKEN_VIEW_HPP

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::inline TESSERA_ABI::data {

/// Bytes of one stored token.
enum class token_width { two = 2, four = 4 };

class token_view {
public:
  token_view() = default;
  token_view(std::span<std::uint16_t const> tokens) noexcept // NOLINT: meant to be implicit
      : data_(tokens.data()), size_(static_cast<index_t>(tokens.size())), width_(token_width::two) {}
  token_view(std::span<std::uint32_t const> tokens) noexcept // NOLINT
      : data_(tokens.data()), size_(static_cast<index_t>(tokens.size())) {}
  token_view(std::span<std::int32_t const> tokens) noexcept // NOLINT
      : data_(tokens.data()), size_(static_cast<index_t>(tokens.size())) {}
  token_view(std::vector<std::int32_t> const& tokens) noexcept // NOLINT
      : token_view(std::span<std::int32_t const>(tokens)) {}
  token_view(std::vector<std::int32_t>&&) = delete; // it would be gone before the view

  index_t size() const noexcept { return size_; }
  token_width width() const noexcept { return width_; }

  /// The number stored at `at`; what was a negative one is beyond every vocabulary.
  std::uint32_t operator[](index_t at) const noexcept {
    return width_ == token_width::two ? static_cast<std::uint16_t const*>(data_)[at]
                                      : static_cast<std::uint32_t const*>(data_)[at];
  }

  /// Tokens [first, first + count).
  token_view slice(index_t first, index_t count, site where = site::here()) const {
    must_hold(first, count, where);
    auto part = *this;
    part.data_ = static_cast<std::byte const*>(data_) + first * static_cast<index_t>(width_);
    part.size_ = count;
    return part;
  }

  /// Copies tokens [first, first + out.size()). Throws size_error for one outside [0, vocabulary_size).
  void copy(index_t first, std::span<std::int32_t> out, index_t vocabulary_size,
            site where = site::here()) const {
    auto const count = static_cast<index_t>(out.size());
    must_hold(first, count, where);
    std::uint32_t largest = 0;
    for (index_t n = 0; n < count; ++n) {
      auto const token = (*this)[first + n];
      largest = token > largest ? token : largest;
      out[static_cast<std::size_t>(n)] = static_cast<std::int32_t>(token);
    }
    if (count > 0 && largest >= vocabulary_size) refuse_first_beyond(first, count, vocabulary_size, where);
  }

  /// Looks at all tokens. Throws size_error for the first outside [0, vocabulary_size). Reads everything
  /// once.
  void check(index_t vocabulary_size, site where = site::here()) const {
    std::uint32_t largest = 0;
    for (index_t n = 0; n < size_; ++n) largest = (*this)[n] > largest ? (*this)[n] : largest;
    if (size_ > 0 && largest >= vocabulary_size) refuse_first_beyond(0, size_, vocabulary_size, where);
  }

private:
  void must_hold(index_t first, index_t count, site where) const {
    if (first < 0 || count < 0 || first > size_ - count)
      throw size_error("E-data-002", where, "tokens ", first, " to ", first + count,
                       " were asked for, there are ", size_);
  }
  [[noreturn]] void refuse_first_beyond(index_t first, index_t count, index_t vocabulary_size,
                                        site where) const {
    auto at = first;
    while (at < first + count - 1 && (*this)[at] < vocabulary_size) ++at;
    throw size_error("E-data-003", where, "token ", at, " is ", (*this)[at], ", the vocabulary has ",
                     vocabulary_size, ": the data was made with another tokenizer, or is damaged");
  }

  void const* data_ = nullptr;
  index_t size_ = 0;
  token_width width_ = token_width::four;
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
/// One number for a list of tokens: the same for the same tokens, however they are stored. A run's state
/// holds it, so that a run is not resumed on other data unnoticed.
///
/// Exists under TESSERA_WITH_XXHASH. Cost: every token read once.
#ifndef TESSERA_DATA_FINGERPRINT_HPP
#define TESSERA_DATA_FINGERPRINT_HPP

#if defined(TESSERA_WITH_XXHASH)

#include <cstdint>

namespace tessera::inline TESSERA_ABI::data {

/// XXH3 of the tokens as four little-endian bytes each.
inline std::uint64_t fingerprint_of(token_view tokens) {
  constexpr index_t at_a_time = 1 << 14;
  io::checksum_stream stream;
  std::vector<std::uint32_t> block(static_cast<std::size_t>(at_a_time));
  for (index_t first = 0; first < tokens.size(); first += at_a_time) {
    auto const left = tokens.size() - first;
    auto const count = left < at_a_time ? left : at_a_time;
    for (index_t n = 0; n < count; ++n) block[static_cast<std::size_t>(n)] = tokens[first + n];
    stream.update(std::as_bytes(std::span(block).first(static_cast<std::size_t>(count))));
  }
  return stream.value();
}

} // namespace tessera::inline TESSERA_ABI::data

#endif
#endif
/// Token shards in the layout of llm.c (github.com/karpathy/llm.c): a header of 256 int32 (magic, version,
/// token count, zeros), then the tokens. Magic 20240520, version 1: two bytes a token; magic 20240801,
/// version 7: four.
///
///     data::token_file file("tinyshakespeare_train.bin");
///     file.tokens();                                     // a token_view on the mapped file
///
///     data::token_writer writer("mine.bin", data::token_width::two);
///     writer.append(tokens);
///     writer.commit();                                   // complete, or not there
///
/// Reading maps: cost is a page read when a token on it is touched.
#ifndef TESSERA_DATA_TOKEN_FILE_HPP
#define TESSERA_DATA_TOKEN_FILE_HPP

#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::data {

static_assert(std::endian::native == std::endian::little, "token shards are little-endian");

namespace detail {

inline constexpr std::size_t token_header_words = 256;
inline constexpr std::size_t token_header_bytes = 4 * token_header_words;

constexpr std::int32_t token_magic(token_width width) noexcept {
  return width == token_width::two ? 20240520 : 20240801;
}
constexpr std::int32_t token_version(token_width width) noexcept {
  return width == token_width::two ? 1 : 7;
}

} // namespace detail

class token_file {
public:
  /// Throws io_error unless the file is exactly a header and the tokens it claims.
  explicit token_file(std::string path, site where = site::here()) : file_(std::move(path), where) {
    auto const bytes = file_.bytes();
    if (bytes.size() < detail::token_header_bytes)
      refuse(where, "it has ", bytes.size(), " bytes, the header alone has ", detail::token_header_bytes);
    std::int32_t header[detail::token_header_words];
    std::memcpy(header, bytes.data(), sizeof header);
    for (auto width : {token_width::two, token_width::four})
      if (header[0] == detail::token_magic(width)) {
        if (header[1] != detail::token_version(width))
          refuse(where, "it is of version ", header[1], ", known is ", detail::token_version(width));
        width_ = width;
      }
    if (header[0] != detail::token_magic(width_))
      refuse(where, "it begins with ", header[0], " in place of 20240520 or 20240801");
    for (std::size_t word = 3; word < detail::token_header_words; ++word)
      if (header[word] != 0) refuse(where, "word ", word, " of its header is ", header[word], ", not 0");
    auto const have = file_.size() - static_cast<index_t>(detail::token_header_bytes);
    if (header[2] < 0 || have != index_t{header[2]} * static_cast<index_t>(width_))
      refuse(where, "its header claims ", header[2], " tokens of ", static_cast<index_t>(width_), " bytes, ",
             have, " bytes follow: it was cut, or added to");
    size_ = header[2];
  }

  index_t size() const noexcept { return size_; }
  std::string const& path() const noexcept { return file_.path(); }

  token_view tokens() const noexcept {
    auto const* const first = file_.bytes().data() + detail::token_header_bytes;
    auto const count = static_cast<std::size_t>(size_);
    if (width_ == token_width::two) return std::span(reinterpret_cast<std::uint16_t const*>(first), count);
    return std::span(reinterpret_cast<std::uint32_t const*>(first), count);
  }

private:
  template <class... Parts>
  [[noreturn]] void refuse(site where, Parts const&... parts) const {
    throw io_error("E-data-004", where, file_.path(), " is not a token shard: ", parts...);
  }

  io::mapped_file file_;
  token_width width_ = token_width::two;
  index_t size_ = 0;
};

class token_writer {
public:
  token_writer(std::string path, token_width width, site where = site::here())
      : file_(std::move(path), where), width_(width) {
    write_header(where);
  }

  /// Throws size_error for a token that does not fit the width, or more than 2^31 - 1 tokens.
  void append(std::span<std::int32_t const> tokens, site where = site::here()) {
    if (static_cast<index_t>(tokens.size()) > (std::numeric_limits<std::int32_t>::max)() - count_)
      throw size_error("E-data-005", where, file_.path(), ": a shard holds at most 2^31 - 1 tokens");
    auto const largest = width_ == token_width::two ? 0xffff : (std::numeric_limits<std::int32_t>::max)();
    for (std::size_t n = 0; n < tokens.size(); ++n)
      if (tokens[n] < 0 || tokens[n] > largest)
        throw size_error("E-data-005", where, file_.path(), ": token ", count_ + static_cast<index_t>(n),
                         " is ", tokens[n], ", it must be in [0, ", largest, "]");
    if (width_ == token_width::four) {
      file_.write(std::as_bytes(tokens), where);
    } else {
      std::vector<std::uint16_t> const narrowed(tokens.begin(), tokens.end());
      file_.write(std::as_bytes(std::span(narrowed)), where);
    }
    count_ += static_cast<index_t>(tokens.size());
  }

  /// Completes the header and puts the file in place.
  void commit(site where = site::here()) {
    write_header(where);
    file_.commit(where);
  }

  index_t size() const noexcept { return count_; }

private:
  void write_header(site where) {
    std::int32_t const header[detail::token_header_words] = {
        detail::token_magic(width_), detail::token_version(width_), narrow<std::int32_t>(count_)};
    auto const bytes = std::as_bytes(std::span(header));
    file_.bytes() == 0 ? file_.write(bytes, where) : file_.rewrite(0, bytes, where);
  }

  io::atomic_file file_;
  token_width width_;
  index_t count_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
/// Files that are made from other files and kept: beside FILE stands FILE.json, which says what FILE was made
/// from and what its bytes sum up to. It is written last, so a FILE without it, or with another one, is
/// stale.
#ifndef TESSERA_DATA_DETAIL_MADE_FROM_HPP
#define TESSERA_DATA_DETAIL_MADE_FROM_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <string>

namespace tessera::inline TESSERA_ABI::data::detail {

inline io::json with_checksum_of(std::string const& path, io::json made_from, site where) {
  made_from["bytes_xxh3"] = io::hexadecimal(io::checksum_of(io::mapped_file(path, where).bytes()));
  return made_from;
}

/// Whether `path` is there, undamaged, and made from just this.
inline bool is_current(std::string const& path, io::json const& made_from, site where) {
  try {
    if (!io::file_exists(path) || !io::file_exists(path + ".json")) return false;
    return io::read_json(path + ".json", where) == with_checksum_of(path, made_from, where);
  } catch (io_error const&) {
    return false;
  }
}

/// Says of a complete `path` what it was made from.
inline void record(std::string const& path, io::json const& made_from, site where) {
  io::write_json(path + ".json", with_checksum_of(path, made_from, where), where);
}

/// What identifies a text: its length and checksum, not where it stands.
inline io::json identity_of(io::mapped_file const& text) {
  return {{"text_bytes", text.size()}, {"text_xxh3", io::hexadecimal(io::checksum_of(text.bytes()))}};
}

} // namespace tessera::inline TESSERA_ABI::data::detail

#endif
#endif
/// From a text file to tokens, once: the tokens are kept in a shard beside the run and used again as long as
/// the text and the tokenizer are the same.
///
///     auto const prepared = data::prepare_text("bible.txt", "run/tokens.bin", data::byte_tokenizer{});
///     prepared.tokens.tokens();       // a token_view
///     prepared.reused;                // false the first time
///
/// One process prepares; others open the shard afterwards. Exists under TESSERA_WITH_JSON and
/// TESSERA_WITH_XXHASH. Cost: the text read once for its checksum, and, if it must, once more for its tokens.
#ifndef TESSERA_DATA_PREPARE_HPP
#define TESSERA_DATA_PREPARE_HPP

#include <string>
#include <vector>

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)
#endif

namespace tessera::inline TESSERA_ABI::data {

namespace detail {

/// Hands the text over in stretches that end with a line, so that memory stays bounded.
template <tokenizer Tokenizer, std::invocable<std::vector<std::int32_t> const&> Take>
void encode_in_stretches(std::string_view text, Tokenizer const& tokenizer, Take take) {
  constexpr std::size_t at_least = std::size_t{8} << 20;
  while (!text.empty()) {
    auto const newline = text.size() > at_least ? text.find('\n', at_least) : std::string_view::npos;
    auto const length = newline == std::string_view::npos ? text.size() : newline + 1;
    take(tokenizer.encode(text.substr(0, length)));
    text.remove_prefix(length);
  }
}

} // namespace detail

/// The tokens of a text file, in memory. Throws io_error if it is missing or empty.
template <tokenizer Tokenizer>
std::vector<std::int32_t> tokens_of_file(std::string const& path, Tokenizer const& tokenizer,
                                         site where = site::here()) {
  io::mapped_file const text(path, where);
  std::vector<std::int32_t> tokens;
  detail::encode_in_stretches(text.text(), tokenizer, [&](std::vector<std::int32_t> const& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
  });
  return tokens;
}

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

struct prepared_text {
  token_file tokens;
  index_t text_bytes = 0;
  bool reused = false; ///< The shard was there already, whole and of this text and tokenizer.
};

/// Makes, or finds again, the shard `cache` of a text file; `cache`.json says what it was made from. Throws
/// io_error if the text is missing or empty, or the disk is full.
template <tokenizer Tokenizer>
prepared_text prepare_text(std::string const& text_path, std::string const& cache, Tokenizer const& tokenizer,
                           site where = site::here()) {
  io::mapped_file const text(text_path, where);
  auto made_from = detail::identity_of(text);
  made_from["tokenizer"] = std::string(tokenizer.name());
  made_from["tokenizer_fingerprint"] = io::hexadecimal(tokenizer.fingerprint());
  auto const reused = detail::is_current(cache, made_from, where);
  if (!reused) {
    token_writer writer(cache, tokenizer.vocabulary_size() <= 65536 ? token_width::two : token_width::four,
                        where);
    detail::encode_in_stretches(text.text(), tokenizer, [&](std::vector<std::int32_t> const& tokens) {
      writer.append(tokens, where);
    });
    writer.commit(where);
    detail::record(cache, made_from, where);
  }
  return {token_file(cache, where), text.size(), reused};
}

#endif

} // namespace tessera::inline TESSERA_ABI::data

#endif
/// Pieces of text as sentencepiece sees them: lines, well-formed UTF-8, its mark for a space, byte tokens.
#ifndef TESSERA_DATA_DETAIL_TEXT_PIECES_HPP
#define TESSERA_DATA_DETAIL_TEXT_PIECES_HPP

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::inline TESSERA_ABI::data::detail {

/// U+2581: how sentencepiece writes a space inside a piece.
inline constexpr std::string_view space_mark = "\xE2\x96\x81";

/// Bytes of the well-formed UTF-8 character that the text begins with; 0 if it begins with none.
constexpr std::size_t utf8_length(std::string_view text) noexcept {
  if (text.empty()) return 0;
  auto const byte = [&](std::size_t n) { return n < text.size() ? static_cast<unsigned char>(text[n]) : 0u; };
  auto const follows = [&](std::size_t n) { return (byte(n) & 0xC0u) == 0x80u; };
  auto const lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return follows(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    // No overlong forms, no surrogates.
    if ((lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) > 0x9F)) return 0;
    return follows(1) && follows(2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if ((lead == 0xF0 && byte(1) < 0x90) || (lead == 0xF4 && byte(1) > 0x8F)) return 0;
    return follows(1) && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

/// How many bytes from the start sentencepiece keeps as they are: well-formed, without its mark, up to a
/// line's end (a newline, when the text begins with it, is not among them: it is a byte token).
constexpr std::size_t plain_prefix(std::string_view text) noexcept {
  std::size_t length = 0;
  while (length < text.size()) {
    auto const rest = text.substr(length);
    auto const character = utf8_length(rest);
    if (character == 0 || rest.front() == '\n' || rest.front() == '\0' || rest.substr(0, 3) == space_mark)
      break;
    length += character;
  }
  return length;
}

/// Takes the first line off a text, at most about 4096 bytes of it; without the newline.
inline std::string take_line(std::string_view& text) {
  constexpr std::size_t most = 4096;
  auto const newline = text.find('\n');
  auto length = newline < text.size() ? newline : text.size();
  auto const whole = length <= most;
  if (!whole) {
    auto const space = text.rfind(' ', most);
    length = space != std::string_view::npos && space > 0 ? space : most;
    // Not through the middle of a character (at most three bytes follow the first).
    for (int back = 0; back < 3 && (static_cast<unsigned char>(text[length]) & 0xC0u) == 0x80u; ++back)
      --length;
  }
  std::string line(text.substr(0, length));
  text.remove_prefix(length + (whole && newline < text.size() ? 1 : 0));
  return line;
}

/// The name of a byte's token: "<0x0A>".
inline std::string byte_piece(int byte) {
  constexpr char const* digits = "0123456789ABCDEF";
  return {'<', '0', 'x', digits[byte / 16], digits[byte % 16], '>'};
}

/// The byte that such a name means.
inline std::string byte_of_piece(std::string_view piece) {
  for (int byte = 0; byte < 256; ++byte)
    if (byte_piece(byte) == piece) return {static_cast<char>(byte)};
  return {};
}

/// A piece with its marks turned back into spaces.
inline std::string with_spaces(std::string_view piece) {
  std::string text;
  while (!piece.empty()) {
    auto const marked = piece.substr(0, 3) == space_mark;
    text += marked ? ' ' : piece.front();
    piece.remove_prefix(marked ? 3 : 1);
  }
  return text;
}

} // namespace tessera::inline TESSERA_ABI::data::detail

#endif
/// A tokenizer that learns its pieces from a text: byte-pair merges through sentencepiece
/// (github.com/google/sentencepiece; Sennrich, Haddow and Birch, "Neural machine translation of rare words
/// with subword units", 2016). Bytes that no piece covers are tokens of their own, so every text comes back
/// exactly, whatever bytes it holds.
///
///     auto const tokenizer = data::train_sentencepiece(text, {.vocabulary_size = 4096});
///     tokenizer.save("run/tokenizer.model");
///     auto const same = data::load_sentencepiece("run/tokenizer.model");
///     same.decode(same.encode("In the beginning"));
///
/// Training is single-threaded, silent and deterministic: the same text gives the same model, byte for byte.
/// Exists under TESSERA_WITH_SENTENCEPIECE; the one file that includes sentencepiece's headers. Link
/// sentencepiece and sentencepiece_train.
#ifndef TESSERA_DATA_SENTENCEPIECE_HPP
#define TESSERA_DATA_SENTENCEPIECE_HPP

#if defined(TESSERA_WITH_SENTENCEPIECE)

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

namespace tessera::inline TESSERA_ABI::data {

class sentencepiece_tokenizer {
public:
  /// From a model's bytes; `source` is what messages call it. Throws io_error if they are no model, or a
  /// model that cannot give every text back.
  explicit sentencepiece_tokenizer(std::string model, std::string const& source = "the model",
                                   site where = site::here())
      : model_(std::move(model)), processor_(std::make_unique<::sentencepiece::SentencePieceProcessor>()) {
    auto const status = processor_->LoadFromSerializedProto(model_);
    if (!status.ok() || processor_->GetPieceSize() < 1)
      throw io_error("E-data-012", where, source, " is not a sentencepiece model: ", status.ToString());
    pieces_.reserve(static_cast<std::size_t>(processor_->GetPieceSize()));
    for (int id = 0; id < processor_->GetPieceSize(); ++id) pieces_.push_back(text_of_piece(id));
    for (int byte = 0; byte < 256; ++byte) {
      byte_tokens_[byte] = processor_->PieceToId(detail::byte_piece(byte));
      if (!processor_->IsByte(byte_tokens_[byte]))
        throw io_error("E-data-012", where, source,
                       " has no tokens for single bytes; train it with byte_fallback");
    }
    // Spaces at the ends and doubled, and characters that Unicode's normal forms would replace.
    std::string_view const probe = "  two  spaces e\u0301 \ufb01 \u00bd \uff21  ";
    if (decode(encode(probe)) != probe)
      throw io_error("E-data-012", where, source,
                     " changes text (spaces or Unicode forms); train it with normalization identity, "
                     "add_dummy_prefix and remove_extra_whitespaces off");
  }

  index_t vocabulary_size() const noexcept { return static_cast<index_t>(pieces_.size()); }
  std::string_view name() const noexcept { return "sentencepiece"; }
  std::uint64_t fingerprint() const noexcept { return layout::stream_of(model_); }
  /// The serialized model.
  std::string const& model() const noexcept { return model_; }

  /// Writes the model to a file: complete, or not at all.
  void save(std::string const& path, site where = site::here()) const { io::write_file(path, model_, where); }

  std::vector<std::int32_t> encode(std::string_view text, site where = site::here()) const {
    std::vector<std::int32_t> tokens;
    tokens.reserve(text.size() / 3);
    std::vector<int> found;
    while (!text.empty()) {
      // Sentencepiece would normalise what is not UTF-8 or looks like its own mark for a space.
      auto const length = detail::plain_prefix(text);
      if (length == 0) {
        tokens.push_back(byte_tokens_[static_cast<unsigned char>(text.front())]);
        text.remove_prefix(1);
        continue;
      }
      auto const status = processor_->Encode({text.data(), length}, &found);
      if (!status.ok())
        throw library_error("E-data-013", where, "sentencepiece could not encode: ", status.ToString());
      tokens.insert(tokens.end(), found.begin(), found.end());
      text.remove_prefix(length);
    }
    return tokens;
  }

  std::string decode(std::span<std::int32_t const> tokens, site where = site::here()) const {
    std::string text;
    for (auto token : tokens) {
      if (token < 0 || token >= vocabulary_size())
        throw size_error("E-data-001", where, "token ", token, " is outside the vocabulary of ",
                         vocabulary_size());
      text += pieces_[static_cast<std::size_t>(token)];
    }
    return text;
  }

private:
  std::string text_of_piece(int id) const {
    if (processor_->IsControl(id) || processor_->IsUnknown(id)) return {};
    auto const& piece = processor_->IdToPiece(id);
    return processor_->IsByte(id) ? detail::byte_of_piece(piece) : detail::with_spaces(piece);
  }

  std::string model_;
  std::unique_ptr<::sentencepiece::SentencePieceProcessor> processor_;
  std::vector<std::string> pieces_; ///< The text of every token.
  std::int32_t byte_tokens_[256] = {};
};

struct sentencepiece_options {
  index_t vocabulary_size = 4096;
  /// Longer texts are trained on every n-th line, so that about this many bytes are read.
  index_t training_bytes = index_t{16} << 20;
};

namespace detail {

/// Hands a text to the trainer line by line, long lines in pieces, nothing empty.
class line_iterator final : public ::sentencepiece::SentenceIterator {
public:
  line_iterator(std::string_view text, index_t training_bytes)
      : rest_(text), every_((static_cast<index_t>(text.size()) + training_bytes - 1) / training_bytes) {
    advance();
  }
  bool done() const override { return done_; }
  void Next() override { advance(); }
  std::string const& value() const override { return line_; }
  ::sentencepiece::util::Status status() const override { return {}; }

private:
  void advance() {
    for (done_ = true; done_ && !rest_.empty(); ++seen_) {
      line_ = take_line(rest_);
      done_ = line_.empty() || seen_ % every_ != 0;
    }
  }

  std::string_view rest_;
  index_t every_;
  index_t seen_ = 0;
  std::string line_;
  bool done_ = false;
};

} // namespace detail

/// Learns a vocabulary of exactly the given size from a text. Throws config_error if the size is impossible
/// for this text, size_error if the text is empty.
inline sentencepiece_tokenizer train_sentencepiece(std::string_view text, sentencepiece_options options,
                                                   site where = site::here()) {
  if (options.vocabulary_size < 258 || options.vocabulary_size > (1 << 24) || options.training_bytes < 1)
    throw config_error("E-data-014", where, "a vocabulary of ", options.vocabulary_size,
                       " pieces: 256 single bytes, the unknown piece and at least one more are needed");
  detail::line_iterator lines(text, options.training_bytes);
  if (lines.done()) throw size_error("E-data-009", where, "there is no text to learn a vocabulary from");
  std::unordered_map<std::string, std::string> const settings{
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(options.vocabulary_size)},
      {"byte_fallback", "true"},
      {"character_coverage", "0.9995"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"unk_id", "0"},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"pad_id", "-1"},
      {"num_threads", "1"},
      {"max_sentence_length", "65536"},
      {"minloglevel", "3"},
  };
  std::string model;
  auto const status = ::sentencepiece::SentencePieceTrainer::Train(settings, &lines, &model);
  if (!status.ok())
    throw config_error(
        "E-data-014", where, "no vocabulary of ", options.vocabulary_size, " pieces can be learnt from ",
        text.size(),
        " bytes of text; ask for another number, or give more text (sentencepiece: ", status.ToString(), ")");
  return sentencepiece_tokenizer(std::move(model), "the model just trained", where);
}

/// Reads a model file. Throws io_error.
inline sentencepiece_tokenizer load_sentencepiece(std::string const& path, site where = site::here()) {
  return sentencepiece_tokenizer(std::string(io::mapped_file(path, where).text()), path, where);
}

} // namespace tessera::inline TESSERA_ABI::data

#endif
#endif
/// Trains a sentencepiece tokenizer on a text file, once: the model is kept, and used again as long as the
/// text and the options are the same.
///
///     auto const tokenizer = data::prepare_sentencepiece("bible.txt", "run/tokenizer.model",
///     {.vocabulary_size = 2048});
///
/// One process prepares; others load the model afterwards. Exists under TESSERA_WITH_SENTENCEPIECE,
/// TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_DATA_PREPARE_SENTENCEPIECE_HPP
#define TESSERA_DATA_PREPARE_SENTENCEPIECE_HPP

#if defined(TESSERA_WITH_SENTENCEPIECE) && defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <string>

namespace tessera::inline TESSERA_ABI::data {

/// Makes, or finds again, the model file. Throws as train_sentencepiece does, and io_error if the text is
/// missing or empty, or the disk is full.
inline sentencepiece_tokenizer prepare_sentencepiece(std::string const& text_path,
                                                     std::string const& model_path,
                                                     sentencepiece_options options,
                                                     site where = site::here()) {
  io::mapped_file const text(text_path, where);
  auto made_from = detail::identity_of(text);
  made_from["vocabulary_size"] = options.vocabulary_size;
  made_from["training_bytes"] = options.training_bytes;
  if (!detail::is_current(model_path, made_from, where)) {
    train_sentencepiece(text.text(), options, where).save(model_path, where);
    detail::record(model_path, made_from, where);
  }
  return load_sentencepiece(model_path, where);
}

} // namespace tessera::inline TESSERA_ABI::data

#endif
#endif
/// In which order samples are visited: every epoch is a permutation of all samples of its own, computed, not
/// stored. The order depends on the seed and the number of samples and on nothing else, so any number of
/// ranks shares it, and resuming needs the position only.
///
///     data::sampler order(samples, {.seed = 7});
///     for (index_t position = resumed; ; ++position)    // rank r of R takes the positions that are its own
///       order.sample_at(position);
///
/// The permutation is a Feistel network (Luby and Rackoff, 1988) over the next power of four, with Philox as
/// its round function; numbers beyond the last sample are sent through again (Black and Rogaway, "Ciphers
/// with arbitrary finite domains", 2002). Cost: O(1) memory, at most four walks on average (more below 64
/// samples), about a microsecond.
#ifndef TESSERA_DATA_SAMPLER_HPP
#define TESSERA_DATA_SAMPLER_HPP

namespace tessera::inline TESSERA_ABI::data {

/// A permutation of [0, size) chosen by a seed and a stream.
class keyed_permutation {
public:
  /// Throws size_error for a negative size.
  constexpr keyed_permutation(index_t size, std::uint64_t seed, std::uint64_t stream,
                              site where = site::here())
      : size_(size), random_(seed, stream) {
    if (size < 0) throw size_error("E-data-006", where, "a permutation of ", size, " elements");
    while (half_bits_ < 32 && std::uint64_t{1} << (2 * half_bits_) < static_cast<std::uint64_t>(size))
      ++half_bits_;
  }

  constexpr index_t size() const noexcept { return size_; }

  /// Where `at` is sent. Different places go to different places. Throws size_error outside [0, size).
  constexpr index_t operator()(index_t at, site where = site::here()) const {
    if (at < 0 || at >= size_)
      throw size_error("E-data-006", where, "element ", at, " of a permutation of ", size_);
    auto walker = static_cast<std::uint64_t>(at);
    do walker = network(walker);
    while (walker >= static_cast<std::uint64_t>(size_));
    return static_cast<index_t>(walker);
  }

private:
  static constexpr int rounds = 8;

  /// (left, right) -> (right, left xor f(round, right)), eight times: a permutation of [0, 4^half_bits).
  constexpr std::uint64_t network(std::uint64_t value) const noexcept {
    auto const mask = (std::uint64_t{1} << half_bits_) - 1;
    auto left = value >> half_bits_;
    auto right = value & mask;
    for (std::uint64_t round = 0; round < rounds; ++round) {
      auto const mixed = left ^ (random_.words(round << 32 | right).word[0] & mask);
      left = right;
      right = mixed;
    }
    return left << half_bits_ | right;
  }

  index_t size_;
  philox random_;
  int half_bits_ = 3;
};

struct sampler_options {
  std::uint64_t seed = 0;
  bool shuffle = true; ///< false: 0, 1, 2, ... in every epoch.
};

class sampler {
public:
  /// Throws size_error if there are no samples.
  explicit constexpr sampler(index_t samples, sampler_options options = {}, site where = site::here())
      : samples_(samples), options_(options) {
    if (samples < 1)
      throw size_error("E-data-007", where, "there is nothing to sample from: ", samples, " samples");
  }

  constexpr index_t samples() const noexcept { return samples_; }
  constexpr index_t epoch_of(index_t position) const noexcept { return position / samples_; }

  /// The sample at a position of the endless order; position p is the (p % samples)-th of epoch p / samples.
  /// Throws size_error for a negative position.
  constexpr index_t sample_at(index_t position, site where = site::here()) const {
    if (position < 0) throw size_error("E-data-007", where, "the position ", position, " is negative");
    auto const place = position % samples_;
    if (!options_.shuffle) return place;
    auto const stream =
        layout::stream_of("order of samples") + static_cast<std::uint64_t>(epoch_of(position));
    return keyed_permutation(samples_, options_.seed, stream)(place);
  }

private:
  index_t samples_;
  sampler_options options_;
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
/// How surprising a text is to the simplest models, in nats per byte: the marks that a trained model's loss
/// has to beat.
///
///     auto const marks = data::text_statistics_of(text);
///     marks.unigram_entropy;   // H(X): knows how often each byte occurs
///     marks.bigram_entropy;    // H(X_t | X_t-1): knows the byte before
///
/// Both are the entropies of the text's own counts (so the best possible values of such models on this very
/// text), with natural logarithms: H = -sum p ln p. The bigram entropy is over the bytes that have one before
/// them: -sum_ab p(ab) ln (p(ab) / p(a)). Texts too short to have any uncertainty give 0.
#ifndef TESSERA_DATA_TEXT_STATISTICS_HPP
#define TESSERA_DATA_TEXT_STATISTICS_HPP

#include <cmath>
#include <string_view>
#include <vector>

namespace tessera::inline TESSERA_ABI::data {

struct text_statistics {
  index_t bytes = 0;
  double unigram_entropy = 0; ///< nats per byte
  double bigram_entropy = 0;  ///< nats per byte, given the byte before
};

namespace detail {

/// n ln n, the term of which entropies of counts are made: N H = N ln N - sum n ln n.
inline double times_own_log(index_t count) noexcept {
  auto const n = static_cast<double>(count);
  return count > 1 ? n * std::log(n) : 0.0;
}

} // namespace detail

/// One pass over the text.
inline text_statistics text_statistics_of(std::string_view text) {
  constexpr std::size_t values = 256;
  std::vector<index_t> pairs(values * values), single(values), before(values);
  for (std::size_t n = 0; n < text.size(); ++n) {
    auto const byte = static_cast<unsigned char>(text[n]);
    ++single[byte];
    if (n == 0) continue;
    auto const last = static_cast<unsigned char>(text[n - 1]);
    ++before[last];
    ++pairs[last * values + byte];
  }
  auto const sum_over = [](std::vector<index_t> const& counts) {
    double sum = 0;
    for (auto count : counts) sum += detail::times_own_log(count);
    return sum;
  };
  text_statistics result{static_cast<index_t>(text.size()), 0, 0};
  auto const per = [](double sum, index_t count) {
    return count > 0 && sum > 0 ? sum / static_cast<double>(count) : 0.0;
  };
  result.unigram_entropy = per(detail::times_own_log(result.bytes) - sum_over(single), result.bytes);
  result.bigram_entropy = per(sum_over(before) - sum_over(pairs), result.bytes - 1);
  return result;
}

} // namespace tessera::inline TESSERA_ABI::data

#endif
/// A stretch of tokens cut into samples of one sequence each: sample s is the tokens [s L, s L + L), its
/// targets are the same stretch one token later. Samples do not overlap, except that a sample's last target
/// is the first token of the next; a rest shorter than a sample is left out.
///
///     data::token_dataset all(file.tokens(), {.sequence_length = 256, .vocabulary_size = 256});
///     auto const [training, validation] = all.split(0.1);
///     training.fill(order.sample_at(position), tokens, targets);
///
/// Borrows the tokens. Cost of `fill`: L + 1 tokens copied, each compared with the vocabulary's size.
#ifndef TESSERA_DATA_TOKEN_DATASET_HPP
#define TESSERA_DATA_TOKEN_DATASET_HPP

#include <cmath>

namespace tessera::inline TESSERA_ABI::data {

struct token_dataset_options {
  index_t sequence_length = 0;
  index_t vocabulary_size = 0;
};

class token_dataset {
public:
  /// Throws size_error if the tokens are fewer than one sequence and its last target.
  token_dataset(token_view tokens, token_dataset_options options, site where = site::here())
      : tokens_(tokens), options_(options) {
    if (options.sequence_length < 1 || options.vocabulary_size < 1)
      throw config_error("E-data-008", where, "a dataset of sequences of ", options.sequence_length,
                         " tokens out of a vocabulary of ", options.vocabulary_size, " is impossible");
    if (tokens.size() == 0) throw size_error("E-data-009", where, "the data holds no tokens");
    if (tokens.size() <= options.sequence_length)
      throw size_error("E-data-009", where, "the data holds ", tokens.size(), " tokens; one sequence of ",
                       options.sequence_length, " and its last target take ", options.sequence_length + 1,
                       ": give more text or a shorter sequence");
    samples_ = (tokens.size() - 1) / options.sequence_length;
  }

  /// Samples.
  index_t size() const noexcept { return samples_; }
  index_t sequence_length() const noexcept { return options_.sequence_length; }
  index_t vocabulary_size() const noexcept { return options_.vocabulary_size; }
  /// The tokens that samples are cut from (the split's own stretch and its last target).
  token_view tokens() const noexcept { return tokens_; }

  /// Copies one sample. Throws size_error for a sample that is not there, spans of another length, or a token
  /// outside the vocabulary (naming its place).
  void fill(index_t sample, std::span<std::int32_t> tokens, std::span<std::int32_t> targets,
            site where = site::here()) const {
    auto const length = options_.sequence_length;
    if (sample < 0 || sample >= samples_)
      throw size_error("E-data-010", where, "sample ", sample, " of ", samples_, " was asked for");
    if (static_cast<index_t>(tokens.size()) != length || static_cast<index_t>(targets.size()) != length)
      throw size_error("E-data-010", where, "a sample has ", length,
                       " tokens and targets, there is room for ", tokens.size(), " and ", targets.size());
    tokens_.copy(sample * length, tokens, options_.vocabulary_size, where);
    tokens_.copy(sample * length + 1, targets, options_.vocabulary_size, where);
  }

  /// Looks at all tokens before training begins. Throws size_error for one outside the vocabulary.
  void check(site where = site::here()) const { tokens_.check(options_.vocabulary_size, where); }

  /// Samples [first, first + count) alone; count >= 1.
  token_dataset subset(index_t first, index_t count, site where = site::here()) const {
    if (first < 0 || count < 1 || first > samples_ - count)
      throw size_error("E-data-010", where, "samples ", first, " to ", first + count, " of ", samples_,
                       " were asked for");
    auto const length = options_.sequence_length;
    return {tokens_.slice(first * length, count * length + 1, where), options_, where};
  }

  struct parts;
  /// The first samples for training, the last `validation_fraction` (rounded, at least one) for validation.
  /// Throws config_error for a fraction outside (0, 1), size_error if one part would be empty.
  parts split(double validation_fraction, site where = site::here()) const;

private:
  token_view tokens_;
  token_dataset_options options_;
  index_t samples_ = 0;
};

struct token_dataset::parts {
  token_dataset training;
  token_dataset validation;
};

inline token_dataset::parts token_dataset::split(double validation_fraction, site where) const {
  if (!(validation_fraction > 0 && validation_fraction < 1))
    throw config_error("E-data-011", where, "the share of validation is ", validation_fraction,
                       ", it must lie between 0 and 1");
  if (samples_ < 2)
    throw size_error("E-data-009", where, "the data holds one sequence of ", options_.sequence_length,
                     " tokens; training and validation need one each: give more text or a shorter sequence");
  auto validation = static_cast<index_t>(std::llround(static_cast<double>(samples_) * validation_fraction));
  if (validation < 1) validation = 1;
  if (validation > samples_ - 1) validation = samples_ - 1;
  auto const training = samples_ - validation;
  return {subset(0, training, where), subset(training, validation, where)};
}

} // namespace tessera::inline TESSERA_ABI::data

#endif

/// AdamW, fused: one pass reads the gradient, updates both moments and the fp32 weight, applies decoupled
/// weight decay, and writes the weight in its storage type (Loshchilov and Hutter, "Decoupled weight decay
/// regularization", 2019; the update is the one of torch.optim.AdamW).
///
///     g = gradient_scale * gradient                m = beta1 m + (1 - beta1) g     v = beta2 v + (1 - beta2)
///     g^2 w = w (1 - rate * decay) - rate * m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon)
///
///     optim::adamw<exec::host, bf16> o(ex, n, {.weight_decay = 0.1}, decayed);
///     o.start_from(ex, weights);
///     o.step(ex, weights, gradients, {.step = 1, .learning_rate = 3e-4, .gradient_scale = 1.0 / tokens});
///
/// Cost: 28 bytes an element with fp32 weights and gradients; 26 plus the gradient with 16-bit weights, whose
/// master is kept in fp32.
#ifndef TESSERA_OPTIM_ADAMW_HPP
#define TESSERA_OPTIM_ADAMW_HPP

#include <cmath>

/// A square root that loops can be vectorised over.
#ifndef TESSERA_OPTIM_DETAIL_SQUARE_ROOT_HPP
#define TESSERA_OPTIM_DETAIL_SQUARE_ROOT_HPP

#include <bit>
#include <cstdint>

namespace tessera::inline TESSERA_ABI::optim::detail {

/// The square root of x >= 0 to one unit in the last place, without a branch or a call, so that a loop over
/// it is vectorised. (std::sqrt sets errno, which forbids that unless a program is compiled with
/// -fno-math-errno.) Infinity and NaN are their own roots. The root of a subnormal number (below 2^-126) may
/// come out too small; it is below 2^-63 in any case, far below any epsilon that it is added to.
///
/// A guess at 1 / sqrt(x) from the bits (half the exponent, negated), two Newton steps on it, and one on the
/// root itself. The last choice is made by a mask: a conditional expression would come back as a branch.
[[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr float square_root(float x) noexcept {
  auto const bits = std::bit_cast<std::int32_t>(x);
  auto inverse = std::bit_cast<float>(0x5f375a86 - (bits >> 1));
  auto const half = 0.5f * x;
  inverse *= 1.5f - half * inverse * inverse;
  inverse *= 1.5f - half * inverse * inverse;
  auto root = x * inverse;
  root += 0.5f * inverse * (x - root * root);
  auto const finite = -static_cast<std::int32_t>(bits < 0x7f800000);
  return std::bit_cast<float>((std::bit_cast<std::int32_t>(root) & finite) | (bits & ~finite));
}

} // namespace tessera::inline TESSERA_ABI::optim::detail

#endif
/// One pass over a flat shard that applies an element-wise update rule: what every optimizer here is made of.
/// A rule is a small functor that host and device share; it says how many fp32 state arrays it keeps and sees
/// one element at a time.
///
///     struct descent {
///       static constexpr int slots = 0;
///       float rate;
///       float operator()(float weight, float gradient, float decay) const { return weight - rate * gradient;
///       }
///     };
///     flat_update(ex, flat_shard<float, float, 0>{.weights = w, .gradients = g}, descent{0.1f});
///
/// Cost: each array is read once and written once; nothing else is moved.
#ifndef TESSERA_OPTIM_FLAT_UPDATE_HPP
#define TESSERA_OPTIM_FLAT_UPDATE_HPP

#include <array>

namespace tessera::inline TESSERA_ABI::optim {

/// The arrays of a shard, all of the same length, in one kind of memory.
template <storage_scalar T, storage_scalar G, int Slots, memory_space Memory = host_memory>
struct flat_shard {
  memory_span<T, Memory> weights;         ///< Written, rounded to T. Read where there is no master.
  memory_span<float, Memory> master = {}; ///< The weights in fp32; empty: `weights` are the only ones.
  memory_span<G const, Memory> gradients; ///< Read.
  std::array<memory_span<float, Memory>, static_cast<std::size_t>(Slots)> state = {}; ///< Read and written.
  /// In order, disjoint; elsewhere the decay is 0. Known to the host.
  std::span<layout::range const> decayed = {};
};

/// `rule(weight, gradient, decay, state&...)` updates the state and returns the new weight.
template <class Rule>
concept update_rule = (Rule::slots == 0 && std::is_invocable_r_v<float, Rule const&, float, float, float>) ||
                      (Rule::slots == 1 &&
                       std::is_invocable_r_v<float, Rule const&, float, float, float, float&>) ||
                      (Rule::slots == 2 &&
                       std::is_invocable_r_v<float, Rule const&, float, float, float, float&, float&>);

/// The implementation for one backend, `run(ex, shard, rule, decay, where)` and `copy(ex, out, in, where)`;
/// `host/flat_update.hpp` has the host's.
template <class Backend>
struct flat_update_on;

/// Applies `rule` to every element of the shard, with `decay` in the decayed ranges and 0 outside them. The
/// result does not depend on the number of threads.
/// Throws size_error where the arrays' lengths differ (E-optim-001) or a decayed range is out of order or
/// outside the shard (E-optim-002).
template <exec::space Ex, storage_scalar T, storage_scalar G, int Slots, update_rule Rule>
  requires(Slots == Rule::slots)
void flat_update(Ex& ex, flat_shard<T, G, Slots, typename Ex::memory> const& shard, Rule const& rule,
                 float decay = 0, site where = site::here()) {
  auto const n = shard.weights.size();
  auto fits = shard.gradients.size() == n && (shard.master.empty() || shard.master.size() == n);
  for (auto const& array : shard.state) fits = fits && array.size() == n;
  if (!fits)
    throw size_error("E-optim-001", where, "an update of ", n, " weights was given ", shard.gradients.size(),
                     " gradients, ", shard.master.size(), " master weights and ",
                     Slots == 0 ? 0 : shard.state.front().size(), " elements of state");
  index_t reached = 0;
  for (auto const& r : shard.decayed) {
    if (r.begin < reached || r.end < r.begin || r.end > static_cast<index_t>(n))
      throw size_error("E-optim-002", where, "decayed range [", r.begin, ", ", r.end,
                       ") is out of order or outside a shard of ", n, " elements");
    reached = r.end;
  }
  flat_update_on<typename Ex::backend>::run(ex, shard, rule, decay, where);
}

/// Widens storage to fp32 element by element: how a master copy starts.
template <exec::space Ex, span_in<typename Ex::memory> Values>
  requires storage_scalar<typename Values::value_type>
void flat_copy(Ex& ex, memory_span<float, typename Ex::memory> out, Values values,
               site where = site::here()) {
  memory_span<typename Values::value_type const, typename Ex::memory> const in = values;
  if (out.size() != in.size())
    throw size_error("E-optim-003", where, out.size(), " master weights cannot start from ", in.size(),
                     " values");
  flat_update_on<typename Ex::backend>::copy(ex, out, in, where);
}

} // namespace tessera::inline TESSERA_ABI::optim

/// The host's pass over a flat shard: one contiguous range a thread, cut where the decay changes, each piece
/// a single vectorised loop.
#ifndef TESSERA_OPTIM_HOST_FLAT_UPDATE_HPP
#define TESSERA_OPTIM_HOST_FLAT_UPDATE_HPP

namespace tessera::inline TESSERA_ABI::optim {

template <>
struct flat_update_on<exec::host_backend> {
  /// Elements that are worth a thread, and the granule of a thread's share: threads touch no common line.
  static constexpr index_t chunk = 4096;

  template <exec::host_space Ex, storage_scalar T, storage_scalar G, int Slots, update_rule Rule>
  static void run(Ex& ex, flat_shard<T, G, Slots> const& shard, Rule const& rule, float decay, site) {
    auto const n = static_cast<index_t>(shard.weights.size());
    ex.parallel_for((n + chunk - 1) / chunk, 1, [&](index_t first, index_t last) {
      auto const share = layout::range{first * chunk, last * chunk < n ? last * chunk : n};
      auto reached = share.begin;
      for (auto const& range : shard.decayed) {
        auto const inside = layout::intersection(range, share);
        if (inside.empty()) continue;
        piece(shard, {reached, inside.begin}, rule, 0);
        piece(shard, inside, rule, decay);
        reached = inside.end;
      }
      piece(shard, {reached, share.end}, rule, 0);
    });
  }

  template <exec::host_space Ex, storage_scalar From>
  static void copy(Ex& ex, std::span<float> out, std::span<From const> in, site) {
    ex.parallel_for(static_cast<index_t>(out.size()), chunk, [&](index_t begin, index_t end) {
      for (auto i = begin; i < end; ++i)
        out[static_cast<std::size_t>(i)] = static_cast<float>(in[static_cast<std::size_t>(i)]);
    });
  }

private:
  template <class T, class G, int Slots, class Rule>
  static void piece(flat_shard<T, G, Slots> const& shard, layout::range part, Rule const& rule, float decay) {
    if (shard.master.empty())
      loop<false>(shard, part, rule, decay);
    else
      loop<true>(shard, part, rule, decay);
  }

  template <bool HasMaster, class T, class G, int Slots, class Rule>
  static void loop(flat_shard<T, G, Slots> const& shard, layout::range part, Rule rule, float decay) {
    auto* __restrict weights = shard.weights.data();
    auto* __restrict master = shard.master.data();
    auto const* __restrict gradients = shard.gradients.data();
    float* __restrict first = nullptr, * __restrict second = nullptr;
    if constexpr (Slots > 0) first = shard.state[0].data();
    if constexpr (Slots > 1) second = shard.state[1].data();
    TESSERA_SIMD()
    for (index_t i = part.begin; i < part.end; ++i)
      element<HasMaster>(weights + i, master + i, gradients + i, first + i, second + i, rule, decay);
  }

  // A function of its own: g++ does not vectorise a 16-bit temporary that is written in the loop itself.
  template <bool HasMaster, class T, class G, class Rule>
  [[gnu::always_inline]] static void element(T* weight, float* master, G const* gradient, float* first,
                                             float* second, Rule const& rule, float decay) {
    float value;
    if constexpr (HasMaster)
      value = *master;
    else
      value = static_cast<float>(*weight);
    if constexpr (Rule::slots == 0)
      value = rule(value, static_cast<float>(*gradient), decay);
    else if constexpr (Rule::slots == 1)
      value = rule(value, static_cast<float>(*gradient), decay, *first);
    else
      value = rule(value, static_cast<float>(*gradient), decay, *first, *second);
    if constexpr (HasMaster) *master = value;
    *weight = static_cast<T>(value);
  }
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif

#endif
/// What an optimizer is here: the state of one flat shard of parameters, and a fused pass that turns the
/// shard's gradients into new weights. It knows nothing of ranks, units or names: whoever owns the shard says
/// which of its elements decay and what the gradients must be multiplied by.
///
///     optim::adamw<exec::host, bf16> o(ex, n, {.weight_decay = 0.1}, decayed);
///     o.start_from(ex, weights);
///     o.step(ex, weights, gradients, {.step = 1, .learning_rate = 3e-4, .gradient_scale = 1.0 / tokens});
#ifndef TESSERA_OPTIM_OPTIMIZER_HPP
#define TESSERA_OPTIM_OPTIMIZER_HPP

#include <concepts>
#include <string_view>
#include <vector>

namespace tessera::inline TESSERA_ABI::optim {

/// What changes from update to update.
struct step_values {
  index_t step = 1;          ///< Number of this update, from 1: bias corrections depend on it.
  double learning_rate = 0;  ///< Of this update.
  double gradient_scale = 1; ///< Factor on every gradient: clipping / (token count * loss scale).
};

/// One array of an optimizer's state, by the name it has in checkpoints ("master", "exp_avg", ...).
template <memory_space Memory = host_memory>
struct state_array {
  std::string_view name;
  memory_span<float, Memory> values;
};

/// Semantics: the optimizer serves a shard of `elements()` elements. `start_from` takes the first weights (in
/// storage precision, or in fp32 where the initial values are known better). `step` updates all of them.
/// `state()` is everything a checkpoint needs besides the weights; after its arrays are overwritten with
/// saved ones, the run goes on with the same bits.
template <class O, class Ex, class T, class G>
concept optimizer = exec::space<Ex> && storage_scalar<T> && storage_scalar<G> &&
    std::constructible_from<O, Ex&, index_t, typename O::options_type, std::vector<layout::range>,
                            memory_account> &&
    requires(O& o, O const& c, Ex& ex, memory_span<T, typename Ex::memory> weights,
             memory_span<G const, typename Ex::memory> gradients,
             memory_span<float const, typename Ex::memory> values, step_values step) {
  { c.elements() } -> std::same_as<index_t>;
  { o.state() } -> std::same_as<std::vector<state_array<typename Ex::memory>>>;
  o.start_from(ex, memory_span<T const, typename Ex::memory>(weights));
  o.start_from(ex, values);
  o.step(ex, weights, gradients, step);
  // Bytes of state for each element, known without an object: what a memory plan adds up.
  { O::state_bytes(typename O::options_type{}) } -> std::same_as<index_t>;
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif

namespace tessera::inline TESSERA_ABI::optim {

struct adamw_options {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
};

/// The update of one element, with everything that is the same for all of them worked out beforehand.
struct adamw_rule {
  static constexpr int slots = 2;

  float gradient_scale, beta1, beta2, new_in_first, new_in_second, rate, inverse_root_correction, epsilon;

  adamw_rule(adamw_options const& options, step_values const& values)
      : gradient_scale(static_cast<float>(values.gradient_scale)), beta1(static_cast<float>(options.beta1)),
        beta2(static_cast<float>(options.beta2)), new_in_first(static_cast<float>(1 - options.beta1)),
        new_in_second(static_cast<float>(1 - options.beta2)),
        rate(static_cast<float>(values.learning_rate /
                                (1 - std::pow(options.beta1, static_cast<double>(values.step))))),
        inverse_root_correction(
            static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, static_cast<double>(values.step))))),
        epsilon(static_cast<float>(options.epsilon)) {}

  /// `decay` is learning rate * weight decay, or 0.
  [[gnu::always_inline]] TESSERA_HOST_DEVICE float operator()(float weight, float gradient, float decay,
                                                              float& first, float& second) const noexcept {
    auto const g = gradient_scale * gradient;
    first = beta1 * first + new_in_first * g;
    second = beta2 * second + new_in_second * g * g;
    auto const deviation = detail::square_root(second) * inverse_root_correction + epsilon;
    return weight * (1.0f - decay) - rate * first / deviation;
  }
};

/// One AdamW update of the arrays that the caller holds. `master` may be empty. Throws size_error where the
/// lengths differ, config_error (E-optim-004) where step is below 1.
template <exec::space Ex, span_in<typename Ex::memory> Weights, span_in<typename Ex::memory> Gradients>
  requires(storage_scalar<typename Weights::element_type>&& storage_scalar<typename Gradients::value_type>)
void adamw_update(Ex& ex, Weights weights, memory_span<float, typename Ex::memory> master,
                  memory_span<float, typename Ex::memory> first_moment,
                  memory_span<float, typename Ex::memory> second_moment, Gradients gradients,
                  adamw_options const& options, step_values const& values,
                  std::span<layout::range const> decayed, site where = site::here()) {
  if (values.step < 1)
    throw config_error("E-optim-004", where, "the number of an update is ", values.step,
                       "; the first is 1, as its bias correction needs");
  using shard =
      flat_shard<typename Weights::value_type, typename Gradients::value_type, 2, typename Ex::memory>;
  flat_update(ex,
              shard{.weights = weights,
                    .master = master,
                    .gradients = gradients,
                    .state = {first_moment, second_moment},
                    .decayed = decayed},
              adamw_rule(options, values), static_cast<float>(values.learning_rate * options.weight_decay),
              where);
}

/// The AdamW state of one flat shard: two fp32 moments, and an fp32 master where weights are 16-bit.
template <exec::space Ex, storage_scalar T>
class adamw {
public:
  using options_type = adamw_options;
  using memory = typename Ex::memory;
  static constexpr bool has_master = !std::same_as<T, float>;

  static constexpr index_t state_bytes(adamw_options const&) noexcept { return has_master ? 12 : 8; }

  /// `decayed`: the elements that weight decay acts on, in order and disjoint.
  adamw(Ex&, index_t elements, adamw_options options, std::vector<layout::range> decayed,
        memory_account account = {nullptr, memory_kind::optimizer_state}, site where = site::here())
      : elements_(elements), options_(options), decayed_(static_cast<std::vector<layout::range>&&>(decayed)),
        master_({has_master ? elements : 0}, account, where), first_moment_({elements}, account, where),
        second_moment_({elements}, account, where) {}

  index_t elements() const noexcept { return elements_; }
  adamw_options const& options() const noexcept { return options_; }

  /// Sets the master weights, from the weights as stored or from better known fp32 values. Without a master
  /// only the length is checked.
  template <span_in<memory> Values>
    requires(std::same_as<typename Values::value_type, T> || std::same_as<typename Values::value_type, float>)
  void start_from(Ex& ex, Values values, site where = site::here()) {
    if constexpr (has_master) flat_copy(ex, master_.span(), values, where);
  }

  template <span_in<memory> Gradients>
    requires storage_scalar<typename Gradients::value_type>
  void step(Ex& ex, memory_span<T, memory> weights, Gradients gradients, step_values const& values,
            site where = site::here()) {
    adamw_update(ex, weights, master_.span(), first_moment_.span(), second_moment_.span(), gradients,
                 options_, values, std::span<layout::range const>(decayed_), where);
  }

  std::vector<state_array<memory>> state() {
    std::vector<state_array<memory>> arrays;
    if constexpr (has_master) arrays.push_back({"master", master_.span()});
    arrays.push_back({"exp_avg", first_moment_.span()});
    arrays.push_back({"exp_avg_sq", second_moment_.span()});
    return arrays;
  }

private:
  index_t elements_;
  adamw_options options_;
  std::vector<layout::range> decayed_;
  tensor<float, 1, memory> master_, first_moment_, second_moment_;
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif
/// Which parameters weight decay acts on, chosen by kind. By default those of two dimensions, matrices and
/// embeddings, and neither biases nor the gains of norms (the habit of GPT-2's trainers).
///
///     auto decayed = optim::decayed_ranges(map, {.position_embedding = false});
#ifndef TESSERA_OPTIM_DECAY_HPP
#define TESSERA_OPTIM_DECAY_HPP

#include <span>

namespace tessera::inline TESSERA_ABI::optim {

struct decay_rule {
  bool matrix = true;
  bool token_embedding = true;
  bool position_embedding = true;
  bool bias = false;
  bool norm_gain = false;
  bool norm_bias = false;

  constexpr bool operator()(layout::parameter_kind kind) const noexcept {
    switch (kind) {
    case layout::parameter_kind::matrix:
      return matrix;
    case layout::parameter_kind::token_embedding:
      return token_embedding;
    case layout::parameter_kind::position_embedding:
      return position_embedding;
    case layout::parameter_kind::bias:
      return bias;
    case layout::parameter_kind::norm_gain:
      return norm_gain;
    case layout::parameter_kind::norm_bias:
      return norm_bias;
    }
    return false;
  }
};

/// The decayed parameters of a unit's block as ranges of that block, in order.
inline std::vector<layout::range> decayed_ranges(layout::parameter_map const& map, decay_rule rule = {}) {
  std::vector<layout::range> ranges;
  for (auto const& p : map)
    if (rule(p.kind) && p.size > 0) ranges.push_back(p.where());
  return ranges;
}

/// What `part` holds of some ranges, counted from the beginning of `part`: the mask of a shard.
inline std::vector<layout::range> ranges_within(std::span<layout::range const> ranges, layout::range part) {
  std::vector<layout::range> inside;
  for (auto const& r : ranges) {
    auto const shared = layout::intersection(r, part);
    if (!shared.empty()) inside.push_back({shared.begin - part.begin, shared.end - part.begin});
  }
  return inside;
}

} // namespace tessera::inline TESSERA_ABI::optim

#endif
/// The learning rate as a function of the step: a warm-up, then one of four forms.
///
///     optim::schedule rate({.form = optim::schedule_form::cosine, .peak = 3e-4, .steps = 1000, .warm_up =
///     {50}}); rate(0);      // the first step's: 3e-4 / 50 rate(49);     // the warm-up's last: 3e-4
#ifndef TESSERA_OPTIM_SCHEDULE_HPP
#define TESSERA_OPTIM_SCHEDULE_HPP

#include <cmath>
#include <string_view>

namespace tessera::inline TESSERA_ABI::optim {

/// How the rate runs from the end of the warm-up, at progress p = 0, to the last step, p = 1:
/// `constant` stays at the peak; `linear` and `cosine` fall to the final rate along a line or half a cosine;
/// `warm_up_stable_decay` stays at the peak and falls over the last `decay` steps as 1 - sqrt of the progress
/// of that part (Hägele et al., "Scaling laws and compute-optimal training beyond fixed training durations",
/// 2024).
enum class schedule_form { constant, linear, cosine, warm_up_stable_decay };

constexpr char const* name_of(schedule_form form) noexcept {
  constexpr char const* names[] = {"constant", "linear", "cosine", "warm_up_stable_decay"};
  return names[static_cast<int>(form)];
}

/// The form of that name. Throws config_error (E-optim-005) for any other.
inline schedule_form schedule_form_named(std::string_view name, site where = site::here()) {
  for (auto form : {schedule_form::constant, schedule_form::linear, schedule_form::cosine,
                    schedule_form::warm_up_stable_decay})
    if (name == name_of(form)) return form;
  throw config_error("E-optim-005", where, "no learning rate schedule is named \"", name,
                     "\"; there are constant, linear, cosine and warm_up_stable_decay");
}

/// The first steps, in which the rate rises along a line from peak / steps to the peak.
struct warm_up {
  index_t steps = 0;

  /// The factor at 0-based `step`: (step + 1) / steps, at most 1.
  constexpr double operator()(index_t step) const noexcept {
    return step + 1 >= steps ? 1.0 : static_cast<double>(step + 1) / static_cast<double>(steps);
  }
};

struct schedule_options {
  schedule_form form = schedule_form::cosine;
  double peak = 0;
  double final_fraction = 0.1; ///< The final rate as a fraction of the peak; unused by `constant`.
  index_t steps = 0;           ///< Of the whole run, warm-up included; unused by `constant`.
  optim::warm_up warm_up = {};
  index_t decay = 0; ///< Length of the final fall; `warm_up_stable_decay` only.
};

/// A value: copy it, compare it, ask it for any step in any order.
class schedule {
public:
  schedule() = default;

  /// Throws config_error (E-optim-006) for impossible lengths or rates.
  explicit schedule(schedule_options options, site where = site::here()) : options_(options) {
    auto const& o = options_;
    auto const falls = o.form != schedule_form::constant;
    auto const decay = o.form == schedule_form::warm_up_stable_decay ? o.decay : 0;
    if (!(o.peak >= 0) || !(o.final_fraction >= 0) || o.warm_up.steps < 0 || decay < 0 || o.steps < 0 ||
        (falls && o.warm_up.steps + decay > o.steps))
      throw config_error("E-optim-006", where, "impossible ", name_of(o.form), " schedule: peak ", o.peak,
                         ", final fraction ", o.final_fraction, ", ", o.steps, " steps with ",
                         o.warm_up.steps, " of warm-up and ", decay,
                         " of decay; rates must not be negative and the parts must ", "fit into the steps");
  }

  /// The rate of 0-based `step`. From step `steps` on, the final rate.
  double operator()(index_t step) const noexcept {
    auto const& o = options_;
    if (step < o.warm_up.steps) return o.peak * o.warm_up(step);
    if (o.form == schedule_form::constant) return o.peak;
    auto const start = o.form == schedule_form::warm_up_stable_decay ? o.steps - o.decay : o.warm_up.steps;
    if (step < start) return o.peak;
    auto const progress =
        step >= o.steps ? 1.0 : static_cast<double>(step - start) / static_cast<double>(o.steps - start);
    auto const last = o.peak * o.final_fraction;
    return last + (o.peak - last) * remaining(progress);
  }

  schedule_options const& options() const noexcept { return options_; }

private:
  /// 1 at progress 0, 0 at progress 1.
  double remaining(double progress) const noexcept {
    if (options_.form == schedule_form::cosine)
      return 0.5 + 0.5 * std::cos(3.14159265358979323846 * progress);
    if (options_.form == schedule_form::warm_up_stable_decay) return 1 - std::sqrt(progress);
    return 1 - progress;
  }

  schedule_options options_{.form = schedule_form::constant};
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif
/// Stochastic gradient descent with momentum, fused into one pass (the update of torch.optim.SGD: momentum as
/// a decaying sum of gradients, weight decay added to the gradient, Nesterov's look-ahead on request).
///
///     g = gradient_scale * gradient + decay * w       m = momentum m + g
///     w = w - rate * m       or, with nesterov,       w = w - rate * (g + momentum m)
///
///     optim::sgd<exec::host, float> o(ex, n, {.momentum = 0.9}, decayed);
///     o.step(ex, weights, gradients, {.step = 1, .learning_rate = 0.1});
///
/// Cost: 20 bytes an element with fp32 weights and gradients, 12 without momentum.
#ifndef TESSERA_OPTIM_SGD_HPP
#define TESSERA_OPTIM_SGD_HPP

namespace tessera::inline TESSERA_ABI::optim {

struct sgd_options {
  double momentum = 0.9; ///< 0: plain descent, without state.
  double weight_decay = 0;
  bool nesterov = false;
};

/// The update of one element with momentum.
struct sgd_rule {
  static constexpr int slots = 1;

  float gradient_scale, momentum, rate;
  float look_ahead; ///< 1 with Nesterov's momentum, else 0.

  sgd_rule(sgd_options const& options, step_values const& values)
      : gradient_scale(static_cast<float>(values.gradient_scale)),
        momentum(static_cast<float>(options.momentum)), rate(static_cast<float>(values.learning_rate)),
        look_ahead(options.nesterov ? 1.0f : 0.0f) {}

  [[gnu::always_inline]] TESSERA_HOST_DEVICE float operator()(float weight, float gradient, float decay,
                                                              float& velocity) const noexcept {
    auto const g = gradient_scale * gradient + decay * weight;
    velocity = momentum * velocity + g;
    auto const ahead = g + momentum * velocity;
    return weight - rate * (look_ahead != 0 ? ahead : velocity);
  }
};

/// The update of one element without momentum.
struct descent_rule {
  static constexpr int slots = 0;

  float gradient_scale, rate;

  explicit descent_rule(step_values const& values)
      : gradient_scale(static_cast<float>(values.gradient_scale)),
        rate(static_cast<float>(values.learning_rate)) {}

  [[gnu::always_inline]] TESSERA_HOST_DEVICE float operator()(float weight, float gradient,
                                                              float decay) const noexcept {
    return weight - rate * (gradient_scale * gradient + decay * weight);
  }
};

/// The state of one flat shard: the velocity, where there is momentum, and an fp32 master where weights are
/// 16-bit.
template <exec::space Ex, storage_scalar T>
class sgd {
public:
  using options_type = sgd_options;
  using memory = typename Ex::memory;
  static constexpr bool has_master = !std::same_as<T, float>;

  static constexpr index_t state_bytes(sgd_options const& options) noexcept {
    return (has_master ? 4 : 0) + (options.momentum != 0 ? 4 : 0);
  }

  /// `decayed`: the elements that weight decay acts on, in order and disjoint.
  sgd(Ex&, index_t elements, sgd_options options, std::vector<layout::range> decayed,
      memory_account account = {nullptr, memory_kind::optimizer_state}, site where = site::here())
      : elements_(elements), options_(options), decayed_(static_cast<std::vector<layout::range>&&>(decayed)),
        master_({has_master ? elements : 0}, account, where),
        velocity_({options.momentum != 0 ? elements : 0}, account, where) {}

  index_t elements() const noexcept { return elements_; }
  sgd_options const& options() const noexcept { return options_; }

  /// Sets the master weights, from the weights as stored or from better known fp32 values.
  template <span_in<memory> Values>
    requires(std::same_as<typename Values::value_type, T> || std::same_as<typename Values::value_type, float>)
  void start_from(Ex& ex, Values values, site where = site::here()) {
    if constexpr (has_master) flat_copy(ex, master_.span(), values, where);
  }

  template <span_in<memory> Gradients>
    requires storage_scalar<typename Gradients::value_type>
  void step(Ex& ex, memory_span<T, memory> weights, Gradients gradients, step_values const& values,
            site where = site::here()) {
    using G = typename Gradients::value_type;
    auto const decay = static_cast<float>(options_.weight_decay);
    if (options_.momentum != 0)
      flat_update(ex,
                  flat_shard<T, G, 1, memory>{.weights = weights,
                                              .master = master_.span(),
                                              .gradients = gradients,
                                              .state = {velocity_.span()},
                                              .decayed = decayed_},
                  sgd_rule(options_, values), decay, where);
    else
      flat_update(
          ex,
          flat_shard<T, G, 0, memory>{
              .weights = weights, .master = master_.span(), .gradients = gradients, .decayed = decayed_},
          descent_rule(values), decay, where);
  }

  std::vector<state_array<memory>> state() {
    std::vector<state_array<memory>> arrays;
    if constexpr (has_master) arrays.push_back({"master", master_.span()});
    if (options_.momentum != 0) arrays.push_back({"momentum_buffer", velocity_.span()});
    return arrays;
  }

private:
  index_t elements_;
  sgd_options options_;
  std::vector<layout::range> decayed_;
  tensor<float, 1, memory> master_, velocity_;
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif

/// Generation: feeds tokens to a model and gives the logits of the next one. Keys and values of earlier
/// tokens are kept, so a token costs one row of every product, and reads every weight once.
///
///     decoder<exec::host, bf16, float> d(units, store, config, {.batch = 1});
///     auto logits = d.feed(ex, prompt);            // [batch, vocabulary], after the last token
///     while (...) logits = d.feed(ex, next_token);
#ifndef TESSERA_NN_DECODER_HPP
#define TESSERA_NN_DECODER_HPP

/// Every parameter of a model in one contiguous buffer, and their gradients in another of the same shape:
/// unit i's block is the stretch unit_range(i) of both. Reducing, clipping, updating and saving are then each
/// one pass over contiguous memory, of all units or of some.
///
///     auto units = make_transformer<exec::host, bf16, float>(config);
///     parameter_store<exec::host, bf16, float> store(units, {.meter = &meter});
///     store.weights(i);  store.gradients(i);  store.lend(i);      // what unit i's forward and backward take
#ifndef TESSERA_NN_PARAMETER_STORE_HPP
#define TESSERA_NN_PARAMETER_STORE_HPP

/// A model is a sequence of units: the embedding, each transformer block, the head. A unit describes one flat
/// block of parameters and knows a forward and a backward over it; it does not hold the block. Whoever runs
/// the model lends blocks, activation memory and caches to units, so that sharding, gathering, recomputing or
/// moving parameters needs no word in any layer. nn/model.hpp is the plainest runner:
///
///     stream<Ex, T> s{.tokens = tokens, .targets = targets};
///     for (i = 0, 1, ...) units[i]->forward(ex, blocks[i], s, memory, pass);         // then the loss is
///     there for (i = last, ..., 0) units[i]->backward(ex, blocks[i], s, memory, pass);     // and
///     gradients[i]
#ifndef TESSERA_NN_UNIT_HPP
#define TESSERA_NN_UNIT_HPP

#include <memory>
#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::nn {

/// Sizes of a micro-batch.
struct batch_shape {
  index_t batch = 0;           ///< Samples.
  index_t sequence_length = 0; ///< Tokens of a sample.

  constexpr index_t tokens() const noexcept { return batch * sequence_length; }
  friend constexpr bool operator==(batch_shape const&, batch_shape const&) = default;
};

/// Losses add up: a sum over predicted tokens, in nats, and their count. Nothing is divided before all
/// micro-batches of all ranks are in; a count of zero is legal.
struct loss_sum {
  double sum = 0;
  double count = 0;

  constexpr loss_sum& operator+=(loss_sum other) noexcept {
    sum += other.sum;
    count += other.count;
    return *this;
  }
};

/// What forward and backward of one micro-batch agree on.
struct pass {
  std::uint64_t seed = 0;   ///< Of the run; keys dropout together with step, layer and global sample.
  std::uint64_t step = 0;   ///< Optimizer step.
  index_t first_sample = 0; ///< Number of the micro-batch's first sample within the step's global batch.
  bool training = true;     ///< False: no dropout, nothing is kept for a backward.
  bool accumulate = false;  ///< True: add to the gradient blocks; false: overwrite them.
  float gradient_scale = 1; ///< Factor on the gradient of the loss sum (fp16 loss scaling).
  int slot = 0;             ///< Which of the micro-batches in flight this is; see unit::reserve.
};

/// What flows between units.
template <exec::space Ex, storage_scalar T>
struct stream {
  using memory = typename Ex::memory;

  view<std::int32_t const, 2, memory> tokens = {};  ///< [batch, sequence_length]
  view<std::int32_t const, 2, memory> targets = {}; ///< The same; `ops::ignore_index` predicts nothing.
  view<T, 2, memory> hidden = {};   ///< [tokens, width]; forward replaces it by the unit's output.
  view<T, 2, memory> gradient = {}; ///< [tokens, width]; backward turns the gradient of the unit's
                                    ///< output into that of its input, in place.
  /// {sum, count}: the head's forward adds to them where the space runs, and nobody waits. Empty: it waits,
  /// and adds to `loss`.
  view<double, 1, memory> totals = {};
  loss_sum loss = {};

  // Lent by a decoder, which feeds a few tokens at a time; empty otherwise.
  index_t first_position = 0;         ///< Position of the first token of each sample.
  view<T, 3, memory> keys = {};       ///< [batch, capacity, cache_width()] of the unit that runs.
  view<T, 3, memory> values = {};     ///< The same.
  view<float, 2, memory> logits = {}; ///< [batch, vocabulary]: the head leaves the last token's, no loss.

  batch_shape shape() const noexcept { return {tokens.extent(0), tokens.extent(1)}; }
};

/// One step of the model. T is the storage type of weights and activations, G that of gradients.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class unit {
public:
  using memory = typename Ex::memory;

  /// The parameters that a call works on. All spans have the size of the block of the map they belong to.
  struct blocks {
    memory_span<T const, memory> weights;
    memory_span<G, memory> gradients; ///< Empty outside training. The head writes its own in its forward.
    memory_span<T const, memory>
        tied_weights; ///< The block of the unit named by `tied_to`, where there is one.
    memory_span<G, memory>
        tied_gradients; ///< A tied gradient is written before its owner's backward, which adds.
  };

  virtual ~unit() = default;

  virtual std::string const& name() const = 0;
  virtual layout::parameter_map const& parameters() const = 0;

  /// The name of an earlier unit whose block this unit also reads (a tied head), or empty.
  virtual std::string const& tied_to() const = 0;

  /// Prepares for `micro_batches` forwards that wait for their backwards at once (pass::slot below it).
  virtual void reserve(int micro_batches) = 0;

  /// Bytes that a training forward takes from the arena and keeps for its backward, its output included. Its
  /// input, s.hidden as it came, must stay as well; the runner releases both after the backward.
  virtual index_t kept_bytes(batch_shape shape) const = 0;
  /// Further bytes that forward or backward takes and gives back before it returns. A forward that does not
  /// train keeps its output only: no more than kept and scratch bytes together, of which all but the
  /// embedding's output are given back.
  virtual index_t scratch_bytes(batch_shape shape) const = 0;
  /// Elements of a token's keys, and of its values, that decoding keeps; 0 for a unit without attention.
  virtual index_t cache_width() const { return 0; }

  /// Reads s.hidden (s.tokens in the first unit), leaves its output in s.hidden.
  virtual void forward(Ex& ex, blocks const& parameters, stream<Ex, T>& s, arena<memory>& activations,
                       pass const& p) = 0;
  /// Turns s.gradient into the gradient of its input and writes, or adds, the parameters' gradients.
  virtual void backward(Ex& ex, blocks const& parameters, stream<Ex, T>& s, arena<memory>& activations,
                        pass const& p) = 0;
};

/// A model's units in the order in which they run.
template <exec::space Ex, storage_scalar T, storage_scalar G>
using unit_list = std::vector<std::unique_ptr<unit<Ex, T, G>>>;

} // namespace tessera::inline TESSERA_ABI::nn

#endif

namespace tessera::inline TESSERA_ABI::nn {

struct store_options {
  memory_meter* meter = nullptr;
  bool gradients = true; ///< False where nothing is trained.
};

template <exec::space Ex, storage_scalar T, storage_scalar G>
class parameter_store {
public:
  using memory = typename Ex::memory;
  using blocks = typename unit<Ex, T, G>::blocks;

  /// Zeros for all parameters of `units`. Throws config_error where two parameters or units share a name, or
  /// a unit is tied to one that does not come before it.
  explicit parameter_store(unit_list<Ex, T, G> const& units, store_options options = {},
                           site where = site::here()) {
    index_t end = 0;
    for (auto const& u : units) {
      for (auto const& earlier : entries_) require_distinct(earlier, *u, where);
      auto const begin = end;
      end += u->parameters().block_size();
      entries_.push_back({u->name(), u->parameters(), {begin, end}, none});
      if (!u->tied_to().empty()) entries_.back().tied = find(u->tied_to(), entries_.size() - 1, where);
    }
    weights_ = tensor<T, 1, memory>({end}, {options.meter, memory_kind::parameters}, where);
    if (options.gradients)
      gradients_ = tensor<G, 1, memory>({end}, {options.meter, memory_kind::gradients}, where);
  }

  std::size_t units() const noexcept { return entries_.size(); }
  /// Where unit `i` stands in weights() and gradients().
  layout::range unit_range(std::size_t i) const { return entries_[i].where; }
  std::string const& unit_name(std::size_t i) const { return entries_[i].name; }
  layout::parameter_map const& parameters(std::size_t i) const { return entries_[i].map; }

  /// Elements of the whole buffer, the gaps of alignment included; parameter_count leaves them out.
  index_t size() const noexcept { return weights_.size(); }
  index_t parameter_count() const noexcept {
    index_t count = 0;
    for (auto const& e : entries_) count += e.map.parameter_count();
    return count;
  }
  bool has_gradients() const noexcept { return gradients_.size() == weights_.size(); }

  memory_span<T, memory> weights() noexcept { return weights_.span(); }
  memory_span<T const, memory> weights() const noexcept { return weights_.span(); }
  memory_span<G, memory> gradients() noexcept { return gradients_.span(); }
  memory_span<G const, memory> gradients() const noexcept { return gradients_.span(); }

  memory_span<T, memory> weights(std::size_t i) noexcept { return part(weights(), i); }
  memory_span<T const, memory> weights(std::size_t i) const noexcept { return part(weights(), i); }
  /// Empty where the store holds no gradients.
  memory_span<G, memory> gradients(std::size_t i) noexcept { return part(gradients(), i); }
  memory_span<G const, memory> gradients(std::size_t i) const noexcept { return part(gradients(), i); }

  /// Everything that unit `i` works on.
  blocks lend(std::size_t i) noexcept {
    blocks lent{weights(i), gradients(i), {}, {}};
    if (auto const tied = entries_[i].tied; tied != none) {
      lent.tied_weights = weights(tied);
      lent.tied_gradients = gradients(tied);
    }
    return lent;
  }

  /// Calls f(parameter, range of the whole buffer) for every parameter, in order.
  template <std::invocable<layout::parameter const&, layout::range> F>
  void for_each(F&& f) const {
    for (auto const& e : entries_)
      for (auto const& p : e.map)
        f(p, layout::range{e.where.begin + p.offset, e.where.begin + p.where().end});
  }

private:
  static constexpr auto none = static_cast<std::size_t>(-1);

  struct entry {
    std::string name;
    layout::parameter_map map;
    layout::range where;
    std::size_t tied; ///< Number of the unit whose block this one reads too.
  };

  static void require_distinct(entry const& earlier, unit<Ex, T, G> const& later, site where) {
    if (earlier.name == later.name())
      throw config_error("E-nn-014", where, "two units are named ", earlier.name);
    for (auto const& a : earlier.map)
      for (auto const& b : later.parameters())
        if (a.name == b.name)
          throw config_error("E-nn-014", where, "units ", earlier.name, " and ", later.name(),
                             " both have a parameter ", a.name);
  }

  std::size_t find(std::string const& name, std::size_t before, site where) const {
    for (std::size_t i = 0; i < before; ++i)
      if (entries_[i].name == name) return i;
    throw config_error("E-nn-015", where, "unit ", entries_.back().name, " is tied to ", name,
                       ", which is not among the units before it");
  }

  template <span_in<memory> Block>
  Block part(Block all, std::size_t i) const noexcept {
    auto const where = entries_[i].where;
    if (all.empty()) return {};
    return all.subspan(static_cast<std::size_t>(where.begin), static_cast<std::size_t>(where.size()));
  }

  std::vector<entry> entries_;
  tensor<T, 1, memory> weights_;
  tensor<G, 1, memory> gradients_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
/// The sizes and choices of a decoder-only transformer: everything that decides which parameters it has and
/// what it computes.
///
///     auto config = tiny_llama();
///     config.layers = 4;
///     config.validate();                                   // throws config_error that says how to fix it
///     auto units = make_transformer<exec::host, float, float>(config);
#ifndef TESSERA_NN_TRANSFORMER_CONFIG_HPP
#define TESSERA_NN_TRANSFORMER_CONFIG_HPP

namespace tessera::inline TESSERA_ABI::nn {

/// gpt2: learned positions, layer norm, biases, GELU (tanh form).
/// llama: rotary positions, RMS norm, no biases, SwiGLU, grouped key/value heads.
enum class transformer_family { gpt2, llama };

constexpr char const* name_of(transformer_family family) noexcept {
  return family == transformer_family::gpt2 ? "gpt2" : "llama";
}

struct transformer_config {
  transformer_family family = transformer_family::gpt2;
  index_t vocabulary_size = 50257;
  index_t sequence_length = 1024; ///< The longest sample.
  index_t width = 768;            ///< Of the residual stream.
  index_t layers = 12;
  index_t heads = 12;
  index_t key_value_heads = 0; ///< Llama: heads that share a key and value; 0 means one for each head.
  index_t feed_forward = 0;    ///< Inner width; 0 means 4 width (gpt2), 8/3 width rounded up to 32 (llama).
  float dropout = 0;           ///< Of the embedding's output and of both residual branches of each block.
  bool tied_head = true;       ///< The head multiplies by the token embedding instead of its own matrix.
  float norm_epsilon = 1e-5f;
  float rotary_theta = 10000;      ///< Llama only.
  float initial_deviation = 0.02f; ///< Of matrices; residual projections have it divided by sqrt(2 layers).
  float label_smoothing = 0;       ///< Of the training loss; the evaluated loss is always the plain one.
  float z_loss = 0;                ///< Of the training loss.

  constexpr index_t head_width() const noexcept { return width / heads; }
  constexpr index_t kv_heads() const noexcept { return key_value_heads == 0 ? heads : key_value_heads; }
  constexpr index_t inner_width() const noexcept {
    if (feed_forward != 0) return feed_forward;
    return family == transformer_family::gpt2 ? 4 * width : ((8 * width + 2) / 3 + 31) / 32 * 32;
  }
  friend bool operator==(transformer_config const&, transformer_config const&) = default;

  /// Throws config_error where no such model exists. Every message names the field, its value and the remedy.
  void validate(site where = site::here()) const {
    auto const positive = [&](char const* field, index_t value) {
      if (value < 1)
        throw config_error("E-nn-001", where, "transformer_config: ", field, " is ", value,
                           ", set it to 1 or more");
    };
    positive("vocabulary_size", vocabulary_size);
    positive("sequence_length", sequence_length);
    positive("width", width);
    positive("layers", layers);
    positive("heads", heads);
    positive("key_value_heads (0 counts as heads)", kv_heads());
    positive("feed_forward (0 counts as the family's default)", inner_width());
    if (vocabulary_size > std::numeric_limits<std::int32_t>::max())
      throw config_error("E-nn-002", where, "transformer_config: vocabulary_size is ", vocabulary_size,
                         ", tokens are 32-bit: set it to at most 2147483647");
    if (width % heads != 0)
      throw config_error("E-nn-003", where, "transformer_config: width ", width,
                         " is not a multiple of heads ", heads, "; ", width / heads * heads, " or ",
                         (width / heads + 1) * heads, " would be");
    if (heads % kv_heads() != 0)
      throw config_error("E-nn-004", where, "transformer_config: heads ", heads,
                         " is not a multiple of key_value_heads ", kv_heads(),
                         "; choose a divisor of heads, or 0 for one key and value a head");
    if (family == transformer_family::gpt2 && kv_heads() != heads)
      throw config_error("E-nn-005", where, "transformer_config: gpt2 has one key and value a head (", heads,
                         "), key_value_heads is ", kv_heads(), "; set it to 0, or family to llama");
    if (family == transformer_family::llama && head_width() % 2 != 0)
      throw config_error("E-nn-006", where, "transformer_config: rotary positions turn pairs, a head is ",
                         head_width(), " wide; choose width and heads so that width / heads is even");
    auto const in_unit_interval = [&](char const* field, float value) {
      if (!(value >= 0 && value < 1))
        throw config_error("E-nn-007", where, "transformer_config: ", field, " is ", double{value},
                           ", set it to 0 or more and below 1");
    };
    in_unit_interval("dropout", dropout);
    in_unit_interval("label_smoothing", label_smoothing);
    auto const above = [&](char const* field, float value, bool fits, char const* bound) {
      if (!fits)
        throw config_error("E-nn-008", where, "transformer_config: ", field, " is ", double{value},
                           ", set it ", bound);
    };
    above("norm_epsilon", norm_epsilon, norm_epsilon > 0 && norm_epsilon < 1, "above 0, such as 1e-5");
    above("rotary_theta", rotary_theta, rotary_theta > 1 && rotary_theta < 1e30f, "above 1, such as 10000");
    above("initial_deviation", initial_deviation, initial_deviation > 0 && initial_deviation < 1e3f,
          "above 0, such as 0.02");
    above("z_loss", z_loss, z_loss >= 0 && z_loss < 1e3f, "to 0 or more, such as 1e-4");
  }
};

/// The published 124 million parameter GPT-2. The vocabulary is not padded.
inline transformer_config gpt2_124m() {
  return {};
}

/// Small enough for tests and first runs: bytes as tokens, about 0.2 million parameters.
inline transformer_config tiny_gpt2() {
  return {.family = transformer_family::gpt2,
          .vocabulary_size = 256,
          .sequence_length = 64,
          .width = 64,
          .layers = 4,
          .heads = 4};
}
inline transformer_config tiny_llama() {
  return {.family = transformer_family::llama,
          .vocabulary_size = 256,
          .sequence_length = 64,
          .width = 64,
          .layers = 4,
          .heads = 4,
          .key_value_heads = 2,
          .tied_head = false};
}

} // namespace tessera::inline TESSERA_ABI::nn

#endif

namespace tessera::inline TESSERA_ABI::nn {

struct decoder_options {
  index_t batch = 1;    ///< Samples side by side, all of one length.
  index_t capacity = 0; ///< Tokens that a sample may reach; 0 stands for the config's sequence length.
  index_t chunk = 128;  ///< Tokens of a sample that run at once: bounds the activation memory of a prompt.
  memory_meter* meter = nullptr;
};

/// Borrows the units and the store, which outlive it. Gives the same numbers as the full forward, to
/// rounding.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class decoder {
public:
  using memory = typename Ex::memory;
  using token_view = view<std::int32_t const, 2, memory>;

  /// Throws size_error for options that do not fit the config.
  decoder(unit_list<Ex, T, G>& units, parameter_store<Ex, T, G>& store, transformer_config const& config,
          decoder_options options = {}, site where = site::here())
      : units_(units), store_(store), options_(options) {
    if (options_.capacity == 0) options_.capacity = config.sequence_length;
    if (options_.batch < 1 || options_.chunk < 1 || options_.capacity < 1 ||
        options_.capacity > config.sequence_length)
      throw size_error("E-nn-021", where, "decoder: batch ", options_.batch, ", chunk ", options_.chunk,
                       ", capacity ", options_.capacity,
                       "; need 1 or more of each, and a capacity of at most ", config.sequence_length,
                       " (transformer_config::sequence_length)");
    options_.chunk = (std::min)(options_.chunk, options_.capacity);
    index_t cached = 0;
    auto const shape = batch_shape{options_.batch, options_.chunk};
    auto bytes = index_t{0};
    for (auto const& u : units_) {
      cached += 2 * options_.batch * options_.capacity * u->cache_width();
      bytes = (std::max)(bytes, u->kept_bytes(shape) + u->scratch_bytes(shape));
    }
    bytes += units_.front()->kept_bytes(shape); // the hidden state that flows
    cache_ = tensor<T, 1, memory>({cached}, {options_.meter, memory_kind::activations}, where);
    logits_ = tensor<float, 2, memory>({options_.batch, config.vocabulary_size},
                                       {options_.meter, memory_kind::activations}, where);
    activations_ = arena<memory>(bytes, {options_.meter, memory_kind::activations}, where);
  }

  /// Tokens of a sample fed so far, and how many there can be.
  index_t length() const noexcept { return length_; }
  index_t capacity() const noexcept { return options_.capacity; }

  /// Forgets all tokens.
  void reset() noexcept { length_ = 0; }

  /// Appends tokens[batch, any number > 0]. The logits stay until the next call. Throws size_error where they
  /// do not fit; the decoder is then as it was.
  view<float const, 2, memory> feed(Ex& ex, token_view tokens, site where = site::here()) {
    if (tokens.extent(0) != options_.batch || tokens.extent(1) < 1)
      throw size_error("E-nn-022", where, "decoder: tokens are ", text_of(tokens.extents()), ", need [",
                       options_.batch, ", 1 or more]");
    if (tokens.extent(1) > options_.capacity - length_)
      throw size_error("E-nn-023", where, "decoder: ", tokens.extent(1), " tokens after ", length_,
                       " do not fit the capacity of ", options_.capacity,
                       "; reset it and feed the last tokens again, or stop");
    auto const before = length_;
    try {
      for (index_t begin = 0; begin < tokens.extent(1); begin += options_.chunk)
        run(ex, tokens.slice(1, begin, (std::min)(begin + options_.chunk, tokens.extent(1))));
    } catch (...) {
      length_ = before;
      throw;
    }
    return logits_.view();
  }

private:
  void run(Ex& ex, token_view tokens) {
    arena_scope const scope(activations_);
    stream<Ex, T> s{.tokens = tokens, .first_position = length_, .logits = logits_.view()};
    auto* next = cache_.data();
    for (std::size_t i = 0; i < units_.size(); ++i) {
      auto const width = units_[i]->cache_width();
      auto const sizes = extents<3>{options_.batch, options_.capacity, width};
      s.keys = view<T, 3, memory>(next, sizes);
      s.values = view<T, 3, memory>(next + s.keys.size(), sizes);
      next += 2 * s.keys.size();
      units_[i]->forward(ex, store_.lend(i), s, activations_, {.training = false});
    }
    length_ += tokens.extent(1);
  }

  unit_list<Ex, T, G>& units_;
  parameter_store<Ex, T, G>& store_;
  decoder_options options_;
  tensor<T, 1, memory> cache_; ///< Per unit its keys, then its values: [batch, capacity, cache_width()].
  tensor<float, 2, memory> logits_;
  arena<memory> activations_;
  index_t length_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
/// The first unit: rows of a table looked up by token, learned positions added (GPT-2), then dropout.
///
///     embedding<Ex, T, G> unit(config);       // parameters "wte.weight", "wpe.weight" or
///                                             // "model.embed_tokens.weight"
#ifndef TESSERA_NN_EMBEDDING_HPP
#define TESSERA_NN_EMBEDDING_HPP

/// The part of a unit that is the same for all: its name and its parameter map, and the check of what is
/// lent.
#ifndef TESSERA_NN_DETAIL_DESCRIBED_UNIT_HPP
#define TESSERA_NN_DETAIL_DESCRIBED_UNIT_HPP

#include <vector>

/// Views of the parameters in a unit's flat block.
#ifndef TESSERA_NN_DETAIL_PARAMETER_VIEWS_HPP
#define TESSERA_NN_DETAIL_PARAMETER_VIEWS_HPP

namespace tessera::inline TESSERA_ABI::nn::detail {

/// A matrix [rows, columns] or, with one row, a vector inside a block. A unit keeps these instead of looking
/// its parameters up by name at every step. No rows: the unit has no such parameter, and its view is empty.
struct place {
  index_t offset = 0;
  index_t rows = 0;
  index_t columns = 0;

  template <memory_space Memory, span_in<Memory> Block>
  view<typename Block::element_type, 2, Memory> matrix(Block block) const noexcept {
    return {rows == 0 ? nullptr : block.data() + offset, {rows, columns}};
  }
  template <memory_space Memory, span_in<Memory> Block>
  view<typename Block::element_type, 1, Memory> vector(Block block) const noexcept {
    return {rows == 0 ? nullptr : block.data() + offset, {rows * columns}};
  }
};

inline place place_of(layout::parameter const& p) {
  return p.shape.size() == 2 ? place{p.offset, p.shape[0], p.shape[1]} : place{p.offset, 1, p.size};
}

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif
/// One list of activation pieces serves two readers: `take` from the arena, or from an arena_plan that only
/// adds up, so that the plan cannot forget what the forward takes.
#ifndef TESSERA_NN_DETAIL_PIECES_HPP
#define TESSERA_NN_DETAIL_PIECES_HPP

namespace tessera::inline TESSERA_ABI::nn::detail {

/// Takes like an arena, hands out views without memory, and knows the bytes.
template <memory_space Memory>
class arena_plan {
public:
  template <class T, int Rank>
  view<T, Rank, Memory> take(extents<Rank> const& sizes, site where = site::here()) {
    bytes_ += arena<Memory>::template bytes_for<T>(element_count(sizes, where));
    return {static_cast<T*>(nullptr), sizes};
  }
  index_t bytes() const noexcept { return bytes_; }

private:
  index_t bytes_ = 0;
};

/// What pieces are taken from: an arena or its plan.
template <class A, class Memory>
concept piece_source = std::same_as<A, arena<Memory>> || std::same_as<A, arena_plan<Memory>>;

/// The bytes of whatever `take(source)` takes.
template <memory_space Memory, std::invocable<arena_plan<Memory>&> Take>
index_t planned_bytes(Take&& take) {
  arena_plan<Memory> plan;
  take(plan);
  return plan.bytes();
}

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif

namespace tessera::inline TESSERA_ABI::nn::detail {

/// `Pieces` is what a training forward keeps for its backward, one for each micro-batch in flight.
template <exec::space Ex, storage_scalar T, storage_scalar G, std::default_initializable Pieces>
class described_unit : public unit<Ex, T, G> {
public:
  using typename unit<Ex, T, G>::blocks;

  std::string const& name() const override { return name_; }
  layout::parameter_map const& parameters() const override { return map_; }
  std::string const& tied_to() const override { return tied_to_; }

  void reserve(int micro_batches) override {
    if (micro_batches < 1)
      throw config_error("E-nn-011", site::here(), name_, ": ", micro_batches,
                         " micro-batches in flight were reserved, need 1 or more");
    slots_.resize(static_cast<std::size_t>(micro_batches));
  }

protected:
  explicit described_unit(std::string name, std::string tied_to = {})
      : name_(static_cast<std::string&&>(name)), tied_to_(static_cast<std::string&&>(tied_to)), slots_(1) {}

  /// Where micro-batch p.slot keeps its pieces.
  Pieces& slot(pass const& p) {
    if (p.slot < 0 || static_cast<std::size_t>(p.slot) >= slots_.size())
      throw config_error("E-nn-012", site::here(), name_, ": micro-batch slot ", p.slot, " of ",
                         slots_.size(), " reserved; call reserve with more");
    return slots_[static_cast<std::size_t>(p.slot)];
  }

  void check_weights(blocks const& lent) const { check("weights", lent.weights.size()); }
  void check_gradients(blocks const& lent) const {
    check_weights(lent);
    check("gradients", lent.gradients.size());
  }

  layout::parameter_map map_;

private:
  void check(char const* what, std::size_t elements) const {
    if (static_cast<index_t>(elements) != map_.block_size())
      throw size_error("E-nn-010", site::here(), name_, ": the block of ", what, " has ", elements,
                       " elements, its parameter map has ", map_.block_size());
  }

  std::string name_, tied_to_;
  std::vector<Pieces> slots_;
};

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif
/// How the dropouts of a model are numbered: 0 is the embedding's, 1 + 2 i and 2 + 2 i are those of block i's
/// branches. With the global sample number it makes a mask that no split into micro-batches or ranks changes.
#ifndef TESSERA_NN_DETAIL_DROPOUT_LAYERS_HPP
#define TESSERA_NN_DETAIL_DROPOUT_LAYERS_HPP

namespace tessera::inline TESSERA_ABI::nn::detail {

inline ops::dropout_options dropout_of(float probability, index_t layer, batch_shape shape, pass const& p) {
  return {.probability = probability,
          .seed = p.seed,
          .step = p.step,
          .layer = static_cast<std::uint64_t>(layer),
          .first_sample = p.first_sample,
          .rows_per_sample = shape.sequence_length};
}

template <class T, memory_space Memory>
view<T, 1, Memory> flat(view<T, 2, Memory> matrix) {
  return matrix.template reshape<1>({matrix.size()});
}

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif

namespace tessera::inline TESSERA_ABI::nn {

namespace detail {
struct nothing_kept {};
} // namespace detail

template <exec::space Ex, storage_scalar T, storage_scalar G>
class embedding final : public detail::described_unit<Ex, T, G, detail::nothing_kept> {
public:
  using memory = typename Ex::memory;
  using typename unit<Ex, T, G>::blocks;

  /// Of a model of a valid config.
  explicit embedding(transformer_config const& config)
      : detail::described_unit<Ex, T, G, detail::nothing_kept>("embedding"), dropout_(config.dropout),
        shared_(config.tied_head), longest_(config.sequence_length) {
    using enum layout::parameter_kind;
    auto& map = this->map_;
    auto const gpt2 = config.family == transformer_family::gpt2;
    auto const start = layout::normal_values(config.initial_deviation);
    table_ = detail::place_of(map[map.add(gpt2 ? "wte.weight" : "model.embed_tokens.weight",
                                          {config.vocabulary_size, config.width}, token_embedding, start)]);
    if (gpt2)
      positions_ = detail::place_of(
          map[map.add("wpe.weight", {config.sequence_length, config.width}, position_embedding, start)]);
  }

  index_t kept_bytes(batch_shape shape) const override {
    return arena<memory>::template bytes_for<T>(shape.tokens() * table_.columns);
  }
  index_t scratch_bytes(batch_shape) const override { return 0; }

  /// Throws size_error for a token outside the vocabulary, or a position beyond the config's sequence length.
  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    this->check_weights(lent);
    auto const shape = s.shape();
    if (s.first_position + shape.sequence_length > longest_)
      throw size_error("E-nn-013", site::here(), "a sample reaches position ",
                       s.first_position + shape.sequence_length, ", the model was made for ", longest_,
                       "; shorten it or make the model with a larger sequence_length");
    s.hidden = activations.template take<T, 2>({shape.tokens(), table_.columns});
    ops::embedding(ex, s.hidden, s.tokens, table_.matrix<memory>(lent.weights),
                   positions_.matrix<memory>(lent.weights), {.first_position = s.first_position});
    if (drops(p)) ops::dropout(ex, s.hidden, s.hidden, detail::dropout_of(dropout_, 0, shape, p));
  }

  /// With a tied head, the head has written the table's gradient of this pass already.
  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>&, pass const& p) override {
    this->check_gradients(lent);
    if (drops(p)) ops::dropout(ex, s.gradient, s.gradient, detail::dropout_of(dropout_, 0, s.shape(), p));
    ops::embedding_backward(
        ex, table_.matrix<memory>(lent.gradients), positions_.matrix<memory>(lent.gradients), s.gradient,
        s.tokens, {.accumulate_table = p.accumulate || shared_, .accumulate_positions = p.accumulate});
  }

private:
  bool drops(pass const& p) const noexcept { return p.training && dropout_ > 0; }

  float dropout_;
  bool shared_; ///< The head multiplies by the table too.
  index_t longest_;
  detail::place table_, positions_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
/// The feed-forward part of a transformer block, between its norm and its residual sum: GPT-2's two linear
/// layers with a GELU between them, or Llama's gated form. The GELU is applied inside the first product.
///
///     gelu_feed_forward<Ex, T, G> feed_forward(map, "h.0.mlp", config);
///     auto kept = feed_forward.take(arena, tokens);
///     feed_forward.forward(ex, weights, out, in, kept);
#ifndef TESSERA_NN_FEED_FORWARD_HPP
#define TESSERA_NN_FEED_FORWARD_HPP

#include <cmath>

namespace tessera::inline TESSERA_ABI::nn {

/// A feed-forward part. Semantics: `forward` fills `out` and the pieces that `backward` reads.
template <class F, class Ex, class T, class G>
concept feed_forward_layer = requires(F const& layer, Ex& ex,
                                      memory_span<T const, typename Ex::memory> weights,
                                      memory_span<G, typename Ex::memory> gradients,
                                      view<T, 2, typename Ex::memory> x, arena<typename Ex::memory>& memory,
                                      typename F::pieces const& kept) {
  { layer.take(memory, index_t{}) } -> std::same_as<typename F::pieces>;
  { layer.scratch_bytes(index_t{}) } -> std::same_as<index_t>;
  layer.forward(ex, weights, x, x, kept);
  layer.backward(ex, weights, gradients, x, x, x, kept, memory, true);
};

/// out = gelu(in w1^T + b1) w2^T + b2
template <exec::space Ex, storage_scalar T, storage_scalar G>
class gelu_feed_forward {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  struct pieces {
    matrix before, activated; ///< [tokens, inner]
  };

  gelu_feed_forward(layout::parameter_map& map, std::string const& prefix, transformer_config const& config) {
    using enum layout::parameter_kind;
    auto const width = config.width, inner = config.inner_width();
    auto const zeros = layout::constant_values(0);
    up_ =
        detail::place_of(map[map.add(prefix + ".c_fc.weight", {inner, width}, layout::parameter_kind::matrix,
                                     layout::normal_values(config.initial_deviation))]);
    up_bias_ = detail::place_of(map[map.add(prefix + ".c_fc.bias", {inner}, bias, zeros)]);
    down_ = detail::place_of(map[map.add(
        prefix + ".c_proj.weight", {width, inner}, layout::parameter_kind::matrix,
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers))))]);
    down_bias_ = detail::place_of(map[map.add(prefix + ".c_proj.bias", {width}, bias, zeros)]);
  }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, up_.rows}), source.template take<T, 2>({tokens, up_.rows})};
  }

  index_t scratch_bytes(index_t tokens) const {
    return arena<memory>::template bytes_for<T>(tokens * up_.rows);
  }

  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix_in in,
               pieces const& kept) const {
    ops::linear(ex, kept.activated, in, up_.matrix<memory>(weights), up_bias_.vector<memory>(weights),
                {.activation = ops::activation::gelu_tanh, .pre_activation = kept.before});
    ops::linear(ex, out, kept.activated, down_.matrix<memory>(weights), down_bias_.vector<memory>(weights));
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, matrix d_in,
                matrix_in d_out, matrix_in in, pieces const& kept, arena<memory>& activations,
                bool accumulate) const {
    using linear_gradients = ops::linear_gradients<T, G, memory>;
    arena_scope const scope(activations);
    auto const d_inner = activations.template take<T, 2>({in.extent(0), up_.rows});
    ops::linear_backward(
        ex, linear_gradients{d_inner, down_.matrix<memory>(gradients), down_bias_.vector<memory>(gradients)},
        d_out, kept.activated, down_.matrix<memory>(weights),
        {.accumulate = accumulate,
         .input_activation = ops::activation::gelu_tanh,
         .input_pre_activation = kept.before}); // d_inner is the gradient before the activation
    ops::linear_backward(
        ex, linear_gradients{d_in, up_.matrix<memory>(gradients), up_bias_.vector<memory>(gradients)},
        d_inner, in, up_.matrix<memory>(weights), {.accumulate = accumulate});
  }

private:
  detail::place up_, up_bias_, down_, down_bias_;
};

/// out = (silu(in gate^T) * (in up^T)) down^T; gate and up are one product.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class swiglu_feed_forward {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  struct pieces {
    matrix gate_up;   ///< [tokens, 2 inner]
    matrix activated; ///< [tokens, inner]
  };

  swiglu_feed_forward(layout::parameter_map& map, std::string const& prefix,
                      transformer_config const& config) {
    auto const width = config.width, inner = config.inner_width();
    auto const kind = layout::parameter_kind::matrix;
    auto const start = layout::normal_values(config.initial_deviation);
    auto const gate = map.add(prefix + ".gate_proj.weight", {inner, width}, kind, start);
    map.add_joined(prefix + ".up_proj.weight", {inner, width}, kind, start);
    gate_up_ = {map[gate].offset, 2 * inner, width};
    down_ = detail::place_of(map[map.add(
        prefix + ".down_proj.weight", {width, inner}, kind,
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers))))]);
  }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, gate_up_.rows}),
            source.template take<T, 2>({tokens, down_.columns})};
  }

  index_t scratch_bytes(index_t tokens) const {
    return detail::planned_bytes<memory>([&](auto& plan) { take(plan, tokens); });
  }

  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix_in in,
               pieces const& kept) const {
    ops::linear(ex, kept.gate_up, in, gate_up_.matrix<memory>(weights), {});
    ops::swiglu(ex, kept.activated, kept.gate_up);
    ops::linear(ex, out, kept.activated, down_.matrix<memory>(weights), {});
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, matrix d_in,
                matrix_in d_out, matrix_in in, pieces const& kept, arena<memory>& activations,
                bool accumulate) const {
    using linear_gradients = ops::linear_gradients<T, G, memory>;
    arena_scope const scope(activations);
    auto const d = take(activations, in.extent(0)); // the gradients of the pieces, of the same sizes
    ops::linear_backward(ex, linear_gradients{d.activated, down_.matrix<memory>(gradients), {}}, d_out,
                         kept.activated, down_.matrix<memory>(weights), {.accumulate = accumulate});
    ops::swiglu_backward(ex, d.gate_up, d.activated, kept.gate_up);
    ops::linear_backward(ex, linear_gradients{d_in, gate_up_.matrix<memory>(gradients), {}}, d.gate_up, in,
                         gate_up_.matrix<memory>(weights), {.accumulate = accumulate});
  }

private:
  detail::place gate_up_, down_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
/// The last unit: the final norm, the product with the vocabulary's matrix (its own, or the embedding's table
/// when tied), and the loss, all logits at once never in memory (ops/linear_cross_entropy.hpp).
///
/// In training its forward already makes the gradient of that product's input and writes, or adds, that of
/// its matrix, since both need the logits, which are then gone; its backward is the final norm's. For a
/// decoder it leaves the last token's logits instead of a loss.
#ifndef TESSERA_NN_HEAD_HPP
#define TESSERA_NN_HEAD_HPP

/// The norms of transformer blocks as layers: each adds its parameters to a unit's map, and runs forward and
/// backward over the unit's block. Both take the residual sum before them into the same pass over memory.
///
///     layer_norm<Ex, T, G> norm(map, "ln_f", width, 1e-5f);
///     auto statistics = norm.take(arena, rows);
///     norm.forward(ex, weights, out, in, statistics);
#ifndef TESSERA_NN_NORM_HPP
#define TESSERA_NN_NORM_HPP

namespace tessera::inline TESSERA_ABI::nn {

/// How a layer's backward leaves its gradients.
struct backward_options {
  bool accumulate = false;       ///< Add to the parameters' gradients.
  bool accumulate_input = false; ///< Add to the gradient of the input.
};

/// A norm over rows of one width. Semantics: `forward_sum` leaves a + b in `sum` and its norm in `out`;
/// `backward` needs what the forward read as `in` (the sum) and its statistics.
template <class N, class Ex, class T, class G>
concept norm_layer = requires(N const& norm, Ex& ex, memory_span<T const, typename Ex::memory> weights,
                              memory_span<G, typename Ex::memory> gradients,
                              view<T, 2, typename Ex::memory> x, arena<typename Ex::memory>& memory,
                              typename N::statistics statistics) {
  { norm.take(memory, index_t{}) } -> std::same_as<typename N::statistics>;
  norm.forward(ex, weights, x, x, statistics);
  norm.forward_sum(ex, weights, x, x, x, x, statistics);
  norm.backward(ex, weights, gradients, x, x, x, statistics, backward_options{});
};

/// Mean and deviation removed, gain and bias learned.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class layer_norm {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  struct statistics {
    view<float, 1, memory> mean, reciprocal_deviation;
  };

  layer_norm(layout::parameter_map& map, std::string const& name, index_t width, float epsilon)
      : options_{.epsilon = epsilon} {
    using enum layout::parameter_kind;
    gain_ = detail::place_of(map[map.add(name + ".weight", {width}, norm_gain, layout::constant_values(1))]);
    bias_ = detail::place_of(map[map.add(name + ".bias", {width}, norm_bias, layout::constant_values(0))]);
  }

  template <detail::piece_source<memory> Source>
  statistics take(Source& source, index_t rows) const {
    return {source.template take<float, 1>({rows}), source.template take<float, 1>({rows})};
  }

  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix_in in,
               statistics kept) const {
    ops::layer_norm(ex, out, kept.mean, kept.reciprocal_deviation, in, gain_.vector<memory>(weights),
                    bias_.vector<memory>(weights), options_);
  }

  void forward_sum(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix sum, matrix_in a,
                   matrix_in b, statistics kept) const {
    ops::residual_layer_norm(ex, out, sum, kept.mean, kept.reciprocal_deviation, a, b,
                             gain_.vector<memory>(weights), bias_.vector<memory>(weights), options_);
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, matrix d_in,
                matrix_in d_out, matrix_in in, statistics kept, backward_options options) const {
    ops::layer_norm_backward(
        ex, d_in, gain_.vector<memory>(gradients), bias_.vector<memory>(gradients), d_out, in, kept.mean,
        kept.reciprocal_deviation, gain_.vector<memory>(weights),
        {.accumulate = options.accumulate, .accumulate_input = options.accumulate_input});
  }

private:
  detail::place gain_, bias_;
  ops::norm_options options_;
};

/// The root mean square divided out, gain learned.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class rms_norm {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  struct statistics {
    view<float, 1, memory> reciprocal_deviation;
  };

  rms_norm(layout::parameter_map& map, std::string const& name, index_t width, float epsilon)
      : options_{.epsilon = epsilon} {
    using enum layout::parameter_kind;
    gain_ = detail::place_of(map[map.add(name + ".weight", {width}, norm_gain, layout::constant_values(1))]);
  }

  template <detail::piece_source<memory> Source>
  statistics take(Source& source, index_t rows) const {
    return {source.template take<float, 1>({rows})};
  }

  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix_in in,
               statistics kept) const {
    ops::rms_norm(ex, out, kept.reciprocal_deviation, in, gain_.vector<memory>(weights), options_);
  }

  void forward_sum(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix sum, matrix_in a,
                   matrix_in b, statistics kept) const {
    ops::residual_rms_norm(ex, out, sum, kept.reciprocal_deviation, a, b, gain_.vector<memory>(weights),
                           options_);
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, matrix d_in,
                matrix_in d_out, matrix_in in, statistics kept, backward_options options) const {
    ops::rms_norm_backward(ex, d_in, gain_.vector<memory>(gradients), d_out, in, kept.reciprocal_deviation,
                           gain_.vector<memory>(weights),
                           {.accumulate = options.accumulate, .accumulate_input = options.accumulate_input});
  }

private:
  detail::place gain_;
  ops::norm_options options_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif

namespace tessera::inline TESSERA_ABI::nn {

namespace detail {

template <class Norm, class Matrix>
struct head_pieces {
  Matrix in; ///< Kept by the unit before.
  typename Norm::statistics norm;
  Matrix d_normed;
};

} // namespace detail

template <exec::space Ex, storage_scalar T, storage_scalar G, norm_layer<Ex, T, G> Norm>
class head final
    : public detail::described_unit<Ex, T, G, detail::head_pieces<Norm, view<T, 2, typename Ex::memory>>> {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using pieces = detail::head_pieces<Norm, matrix>;
  using typename unit<Ex, T, G>::blocks;

  /// Of a model of a valid config, whose first unit is `first`.
  head(transformer_config const& config, unit<Ex, T, G> const& first)
      : detail::described_unit<Ex, T, G, pieces>("head", config.tied_head ? first.name() : std::string()),
        config_(config), norm_(this->map_, config.family == transformer_family::gpt2 ? "ln_f" : "model.norm",
                               config.width, config.norm_epsilon) {
    auto& map = this->map_;
    vocabulary_ = detail::place_of(
        config.tied_head
            ? first.parameters()[0]
            : map[map.add("lm_head.weight", {config.vocabulary_size, config.width},
                          layout::parameter_kind::matrix, layout::normal_values(config.initial_deviation))]);
  }

  index_t kept_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) { take(plan, shape.tokens()); });
  }
  index_t scratch_bytes(batch_shape shape) const override {
    return arena<memory>::template bytes_for<T>(shape.tokens() * config_.width) +
           ops::linear_cross_entropy_scratch_bytes<T, memory>(shape.tokens(), config_.vocabulary_size);
  }

  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    p.training ? this->check_gradients(lent) : this->check_weights(lent);
    auto const start = activations.mark();
    auto const vocabulary = vocabulary_.matrix<memory>(tied() ? lent.tied_weights : lent.weights);
    auto const in = s.logits.empty() ? s.hidden : last_tokens(s);
    auto kept = take(activations, in.extent(0));
    kept.in = in;
    {
      arena_scope const scope(activations);
      auto const normed = activations.template take<T, 2>(in.extents());
      norm_.forward(ex, lent.weights, normed, in, kept.norm);
      if (!s.logits.empty())
        ops::matmul(ex, s.logits, normed, vocabulary, {.transpose_b = true});
      else
        s.loss += loss_of(ex, lent, normed, vocabulary, kept.d_normed, s, activations, p);
    }
    if (p.training)
      this->slot(p) = kept;
    else
      activations.release(start);
  }

  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>&, pass const& p) override {
    this->check_gradients(lent);
    auto const& kept = this->slot(p);
    norm_.backward(ex, lent.weights, lent.gradients, s.gradient, kept.d_normed, kept.in, kept.norm,
                   {.accumulate = p.accumulate});
  }

private:
  bool tied() const noexcept { return config_.tied_head; }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t rows) const {
    pieces taken;
    taken.norm = norm_.take(source, rows);
    taken.d_normed = source.template take<T, 2>({rows, config_.width});
    return taken;
  }

  loss_sum loss_of(Ex& ex, blocks const& lent, matrix normed, view<T const, 2, memory> vocabulary,
                   matrix d_normed, stream<Ex, T> const& s, arena<memory>& activations, pass const& p) const {
    ops::linear_cross_entropy_gradients<T, G, memory> gradients;
    ops::linear_cross_entropy_options<memory> options;
    if (p.training) {
      gradients = {d_normed, vocabulary_.matrix<memory>(tied() ? lent.tied_gradients : lent.gradients)};
      options = {.label_smoothing = config_.label_smoothing,
                 .z_loss = config_.z_loss,
                 .gradient_scale = p.gradient_scale,
                 .accumulate = p.accumulate};
    }
    options.totals = s.totals;
    auto const loss = ops::linear_cross_entropy(ex, gradients, normed, vocabulary, detail::flat(s.targets),
                                                options, activations);
    return {loss.sum, loss.count};
  }

  /// The hidden row of each sample's last token.
  static matrix last_tokens(stream<Ex, T> const& s) {
    auto const shape = s.shape();
    auto const width = s.hidden.extent(1);
    return {s.hidden.data() + (shape.sequence_length - 1) * width,
            {shape.batch, width},
            {shape.sequence_length * width, 1}};
  }

  transformer_config config_;
  Norm norm_;
  detail::place vocabulary_; ///< In this unit's block, or in the embedding's.
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
/// The starting values of parameters: each element is a function of the seed, its parameter's name and its
/// index in that parameter alone, so any rank may initialise any stretch and all agree.
///
///     initialise(ex, store, seed);
///     initialise(ex, map, shard, ex_shard_of_the_block, seed);
#ifndef TESSERA_NN_INITIALISE_HPP
#define TESSERA_NN_INITIALISE_HPP

namespace tessera::inline TESSERA_ABI::nn {

/// Fills `out`, which holds the elements `part` of a unit's block; gaps between parameters become zero.
/// Throws size_error where `out` has not the size of `part`.
template <exec::space Ex, span_in<typename Ex::memory> Out>
void initialise(Ex& ex, layout::parameter_map const& map, layout::range part, Out out, std::uint64_t seed,
                site where = site::here()) {
  if (static_cast<index_t>(out.size()) != part.size())
    throw size_error("E-nn-016", where, "initialise: ", out.size(), " elements for a stretch of ",
                     part.size());
  using stretch = view<typename Out::element_type, 1, typename Ex::memory>;
  ops::fill(ex, stretch(out.data(), {part.size()}), 0);
  for (auto const& piece : layout::segments_of(map, part)) {
    auto const start = piece.whole->start;
    ops::random_normal(ex, stretch(out.data() + (piece.in_block.begin - part.begin), {piece.in_block.size()}),
                       {.mean = start.mean,
                        .deviation = start.deviation,
                        .seed = seed,
                        .stream = layout::stream_of(piece.whole->name),
                        .first = piece.first_element},
                       where);
  }
}

/// Fills all weights of a store.
template <exec::space Ex, storage_scalar T, storage_scalar G>
void initialise(Ex& ex, parameter_store<Ex, T, G>& store, std::uint64_t seed) {
  for (std::size_t i = 0; i < store.units(); ++i)
    initialise(ex, store.parameters(i), {0, store.unit_range(i).size()}, store.weights(i), seed);
}

} // namespace tessera::inline TESSERA_ABI::nn

#endif
/// A config turned into the units of a model: embedding, blocks, head.
///
///     auto units = make_transformer<exec::host, bf16, float>(tiny_llama());
#ifndef TESSERA_NN_MAKE_TRANSFORMER_HPP
#define TESSERA_NN_MAKE_TRANSFORMER_HPP

/// One block of a pre-norm transformer as a unit:
///
///     middle = in + dropout(attention(norm(in)))
///     out = middle + dropout(feed_forward(norm(middle)))
///
/// gpt2_block and llama_block fill in the norm and the feed-forward part. The first residual sum is made in
/// the pass of the norm that follows it; the backward needs no pass of its own for either sum, since both
/// norms add their gradient to the one that flows past them.
///
/// Keeps, in elements of T a token: GPT-2 16 width (inner width 4 width), Llama 5 width + 3 inner + packed
/// queries, keys and values.
#ifndef TESSERA_NN_TRANSFORMER_BLOCK_HPP
#define TESSERA_NN_TRANSFORMER_BLOCK_HPP

/// The attention part of a transformer block, between its norm and its residual sum: one packed projection to
/// queries, keys and values, rotary positions where the family has them, causal attention, and the projection
/// back. The same for GPT-2 and Llama but for names, biases, rotation and grouped heads.
///
///     self_attention<Ex, T, G> attention(map, "h.0.attn", config);
///     auto kept = attention.take(arena, shape);
///     attention.forward(ex, weights, out, in, kept, stream);
#ifndef TESSERA_NN_SELF_ATTENTION_HPP
#define TESSERA_NN_SELF_ATTENTION_HPP

#include <cmath>

namespace tessera::inline TESSERA_ABI::nn {

template <exec::space Ex, storage_scalar T, storage_scalar G>
class self_attention {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  /// What the backward reads: queries, keys (both rotated) and values packed in rows, what attention made of
  /// them, and the logarithms of its sums.
  struct pieces {
    matrix packed, mixed;
    view<float, 3, memory> log_sum_exp;
  };

  self_attention(layout::parameter_map& map, std::string const& prefix, transformer_config const& config)
      : heads_(config.heads), key_heads_(config.kv_heads()), head_width_(config.head_width()),
        rotary_theta_(config.family == transformer_family::llama ? config.rotary_theta : 0) {
    using enum layout::parameter_kind;
    auto const width = config.width;
    auto const start = layout::normal_values(config.initial_deviation);
    auto const residual_start =
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers)));
    if (config.family == transformer_family::gpt2) {
      auto const zeros = layout::constant_values(0);
      in_ = detail::place_of(
          map[map.add(prefix + ".c_attn.weight", {packed_width(), width}, matrix_kind, start)]);
      in_bias_ = detail::place_of(map[map.add(prefix + ".c_attn.bias", {packed_width()}, bias, zeros)]);
      out_ = detail::place_of(
          map[map.add(prefix + ".c_proj.weight", {width, width}, matrix_kind, residual_start)]);
      out_bias_ = detail::place_of(map[map.add(prefix + ".c_proj.bias", {width}, bias, zeros)]);
    } else {
      auto const query = map.add(prefix + ".q_proj.weight", {width, width}, matrix_kind, start);
      map.add_joined(prefix + ".k_proj.weight", {cache_width(), width}, matrix_kind, start);
      map.add_joined(prefix + ".v_proj.weight", {cache_width(), width}, matrix_kind, start);
      in_ = {map[query].offset, packed_width(), width};
      out_ = detail::place_of(
          map[map.add(prefix + ".o_proj.weight", {width, width}, matrix_kind, residual_start)]);
    }
  }

  /// Elements of a token's keys, and of its values.
  index_t cache_width() const noexcept { return key_heads_ * head_width_; }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, batch_shape shape) const {
    auto const tokens = shape.tokens();
    return {source.template take<T, 2>({tokens, packed_width()}),
            source.template take<T, 2>({tokens, heads_ * head_width_}),
            source.template take<float, 3>({shape.batch, heads_, shape.sequence_length})};
  }

  index_t scratch_bytes(batch_shape shape) const {
    return detail::planned_bytes<memory>([&](auto& plan) { take_scratch(plan, shape.tokens()); });
  }

  /// out = the projected attention of in[tokens, width]. With a cache in `s`, keys and values are appended to
  /// it and attention sees all that it holds.
  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix_in in, pieces const& kept,
               stream<Ex, T> const& s) const {
    auto const shape = s.shape();
    ops::linear(ex, kept.packed, in, in_.matrix<memory>(weights), in_bias_.vector<memory>(weights));
    rotate(ex, kept.packed, shape, s.first_position, false);
    auto const all = split(kept.packed, shape);
    auto const mixed = heads_of(kept.mixed, shape);
    if (s.keys.empty()) {
      ops::attention(ex, mixed, kept.log_sum_exp, all.query, all.key, all.value);
    } else {
      append(ex, s.keys, all.key, s.first_position);
      append(ex, s.values, all.value, s.first_position);
      auto const end = s.first_position + shape.sequence_length;
      ops::attention(ex, mixed, kept.log_sum_exp, all.query, cached(s.keys, end), cached(s.values, end));
    }
    ops::linear(ex, out, kept.mixed, out_.matrix<memory>(weights), out_bias_.vector<memory>(weights));
  }

  /// d_in = the gradient of `in`, given that of the output.
  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, matrix d_in,
                matrix_in d_out, matrix_in in, pieces const& kept, batch_shape shape,
                arena<memory>& activations, bool accumulate) const {
    arena_scope const scope(activations);
    auto const [d_mixed, d_packed] = take_scratch(activations, shape.tokens());
    ops::linear_backward(ex, gradients_of(gradients, d_mixed, out_, out_bias_), d_out, kept.mixed,
                         out_.matrix<memory>(weights), {.accumulate = accumulate});
    auto const all = split(kept.packed, shape);
    auto const d_all = split(d_packed, shape);
    ops::attention_backward(ex, d_all.query, d_all.key, d_all.value, heads_of(d_mixed, shape), all.query,
                            all.key, all.value, heads_of(kept.mixed, shape), kept.log_sum_exp);
    rotate(ex, d_packed, shape, 0, true);
    ops::linear_backward(ex, gradients_of(gradients, d_in, in_, in_bias_), d_packed, in,
                         in_.matrix<memory>(weights), {.accumulate = accumulate});
  }

private:
  static constexpr auto matrix_kind = layout::parameter_kind::matrix;
  using by_head = view<T, 4, memory>; ///< [batch, sequence, heads, head_width]

  struct scratch {
    matrix d_mixed, d_packed;
  };
  struct query_key_value {
    by_head query, key, value;
  };

  index_t packed_width() const noexcept { return (heads_ + 2 * key_heads_) * head_width_; }

  template <detail::piece_source<memory> Source>
  scratch take_scratch(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, heads_ * head_width_}),
            source.template take<T, 2>({tokens, packed_width()})};
  }

  /// Heads [first, first + count) of rows that hold nothing but heads.
  by_head heads_of(matrix rows, batch_shape shape, index_t first, index_t count) const {
    auto const row = rows.extent(1);
    return {rows.data() + first * head_width_,
            {shape.batch, shape.sequence_length, count, head_width_},
            {shape.sequence_length * row, row, head_width_, 1}};
  }
  by_head heads_of(matrix rows, batch_shape shape) const { return heads_of(rows, shape, 0, heads_); }
  query_key_value split(matrix packed, batch_shape shape) const {
    return {heads_of(packed, shape, 0, heads_), heads_of(packed, shape, heads_, key_heads_),
            heads_of(packed, shape, heads_ + key_heads_, key_heads_)};
  }

  /// Queries and keys stand side by side and turn together.
  void rotate(Ex& ex, matrix packed, batch_shape shape, index_t first_position, bool inverse) const {
    if (rotary_theta_ > 0)
      ops::rotary(ex, heads_of(packed, shape, 0, heads_ + key_heads_),
                  {.theta = rotary_theta_, .first_position = first_position, .inverse = inverse});
  }

  void append(Ex& ex, view<T, 3, memory> cache, by_head rows, index_t first_position) const {
    for (index_t b = 0; b < rows.extent(0); ++b)
      for (index_t t = 0; t < rows.extent(1); ++t)
        ops::cast(ex, cache[b][first_position + t], rows[b][t].template reshape<1>({cache_width()}));
  }
  by_head cached(view<T, 3, memory> cache, index_t end) const {
    return {cache.data(),
            {cache.extent(0), end, key_heads_, head_width_},
            {cache.stride(0), cache.stride(1), head_width_, 1}};
  }

  static ops::linear_gradients<T, G, memory> gradients_of(memory_span<G, memory> gradients, matrix d_in,
                                                          detail::place weight, detail::place bias) {
    return {d_in, weight.matrix<memory>(gradients), bias.vector<memory>(gradients)};
  }

  index_t heads_, key_heads_, head_width_;
  float rotary_theta_; ///< 0: no rotation.
  detail::place in_, in_bias_, out_, out_bias_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif

namespace tessera::inline TESSERA_ABI::nn {

namespace detail {

template <class Norm, class Attention, class FeedForward, class Matrix>
struct block_pieces {
  typename Norm::statistics norm_1, norm_2;
  typename Attention::pieces attention;
  typename FeedForward::pieces feed_forward;
  Matrix in; ///< Kept by the unit before.
  Matrix normed_1, middle, normed_2, out;
};

/// The prefixes of a block's parameters.
struct block_names {
  std::string norm_1, attention, norm_2, feed_forward;

  static block_names of(transformer_family family, index_t layer) {
    auto const number = std::to_string(layer);
    if (family == transformer_family::gpt2) {
      auto const h = "h." + number;
      return {h + ".ln_1", h + ".attn", h + ".ln_2", h + ".mlp"};
    }
    auto const h = "model.layers." + number;
    return {h + ".input_layernorm", h + ".self_attn", h + ".post_attention_layernorm", h + ".mlp"};
  }
};

} // namespace detail

template <exec::space Ex, storage_scalar T, storage_scalar G, norm_layer<Ex, T, G> Norm,
          feed_forward_layer<Ex, T, G> FeedForward>
class transformer_block final
    : public detail::described_unit<Ex, T, G,
                                    detail::block_pieces<Norm, self_attention<Ex, T, G>, FeedForward,
                                                         view<T, 2, typename Ex::memory>>> {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using pieces = detail::block_pieces<Norm, self_attention<Ex, T, G>, FeedForward, matrix>;
  using typename unit<Ex, T, G>::blocks;

  /// Block number `layer` of a model of a valid config.
  transformer_block(transformer_config const& config, index_t layer)
      : transformer_block(config, layer, detail::block_names::of(config.family, layer)) {}

  index_t kept_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) { take(plan, shape); });
  }

  index_t scratch_bytes(batch_shape shape) const override {
    auto const tokens = shape.tokens();
    auto const row = arena<memory>::template bytes_for<T>(tokens * width_);
    auto const attention = attention_.scratch_bytes(shape),
               feed_forward = feed_forward_.scratch_bytes(tokens);
    return (dropout_ > 0 ? 2 : 1) * row + (attention > feed_forward ? attention : feed_forward);
  }

  index_t cache_width() const override { return attention_.cache_width(); }

  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    this->check_weights(lent);
    auto const start = activations.mark();
    auto kept = take(activations, s.shape());
    kept.in = s.hidden;
    if (!p.training) kept.out = s.hidden; // nobody needs the input again
    {
      arena_scope const scope(activations);
      auto const branch = activations.template take<T, 2>({s.shape().tokens(), width_});
      norm_1_.forward(ex, lent.weights, kept.normed_1, kept.in, kept.norm_1);
      attention_.forward(ex, lent.weights, branch, kept.normed_1, kept.attention, s);
      if (drops(p)) {
        ops::dropout_add(ex, kept.middle, kept.in, branch, dropout_of(0, s, p));
        norm_2_.forward(ex, lent.weights, kept.normed_2, kept.middle, kept.norm_2);
      } else {
        norm_2_.forward_sum(ex, lent.weights, kept.normed_2, kept.middle, kept.in, branch, kept.norm_2);
      }
      feed_forward_.forward(ex, lent.weights, branch, kept.normed_2, kept.feed_forward);
      if (drops(p))
        ops::dropout_add(ex, kept.out, kept.middle, branch, dropout_of(1, s, p));
      else
        ops::add(ex, detail::flat(kept.out), detail::flat(kept.middle), detail::flat(branch));
    }
    s.hidden = kept.out;
    if (p.training)
      this->slot(p) = kept;
    else
      activations.release(start);
  }

  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
                pass const& p) override {
    this->check_gradients(lent);
    auto const& kept = this->slot(p);
    arena_scope const scope(activations);
    auto const d_normed = activations.template take<T, 2>({s.shape().tokens(), width_});
    auto const d_dropped = drops(p) ? activations.template take<T, 2>(d_normed.extents()) : s.gradient;
    backward_options const add{.accumulate = p.accumulate, .accumulate_input = true};

    if (drops(p)) ops::dropout(ex, d_dropped, s.gradient, dropout_of(1, s, p));
    feed_forward_.backward(ex, lent.weights, lent.gradients, d_normed, d_dropped, kept.normed_2,
                           kept.feed_forward, activations, p.accumulate);
    norm_2_.backward(ex, lent.weights, lent.gradients, s.gradient, d_normed, kept.middle, kept.norm_2, add);

    if (drops(p)) ops::dropout(ex, d_dropped, s.gradient, dropout_of(0, s, p));
    attention_.backward(ex, lent.weights, lent.gradients, d_normed, d_dropped, kept.normed_1, kept.attention,
                        s.shape(), activations, p.accumulate);
    norm_1_.backward(ex, lent.weights, lent.gradients, s.gradient, d_normed, kept.in, kept.norm_1, add);
  }

private:
  transformer_block(transformer_config const& config, index_t layer, detail::block_names const& names)
      : detail::described_unit<Ex, T, G, pieces>("block." + std::to_string(layer)), layer_(layer),
        width_(config.width), dropout_(config.dropout),
        norm_1_(this->map_, names.norm_1, config.width, config.norm_epsilon),
        attention_(this->map_, names.attention, config),
        norm_2_(this->map_, names.norm_2, config.width, config.norm_epsilon),
        feed_forward_(this->map_, names.feed_forward, config) {}

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, batch_shape shape) const {
    auto const tokens = shape.tokens();
    auto const row = [&] { return source.template take<T, 2>({tokens, width_}); };
    pieces taken;
    taken.norm_1 = norm_1_.take(source, tokens);
    taken.norm_2 = norm_2_.take(source, tokens);
    taken.attention = attention_.take(source, shape);
    taken.feed_forward = feed_forward_.take(source, tokens);
    taken.normed_1 = row();
    taken.middle = row();
    taken.normed_2 = row();
    taken.out = row();
    return taken;
  }

  bool drops(pass const& p) const noexcept { return p.training && dropout_ > 0; }
  ops::dropout_options dropout_of(index_t branch, stream<Ex, T> const& s, pass const& p) const {
    return detail::dropout_of(dropout_, 1 + 2 * layer_ + branch, s.shape(), p);
  }

  index_t layer_, width_;
  float dropout_;
  Norm norm_1_;
  self_attention<Ex, T, G> attention_;
  Norm norm_2_;
  FeedForward feed_forward_;
};

/// Layer norm, biases, GELU.
template <exec::space Ex, storage_scalar T, storage_scalar G>
using gpt2_block = transformer_block<Ex, T, G, layer_norm<Ex, T, G>, gelu_feed_forward<Ex, T, G>>;

/// RMS norm, rotary positions, grouped heads, SwiGLU.
template <exec::space Ex, storage_scalar T, storage_scalar G>
using llama_block = transformer_block<Ex, T, G, rms_norm<Ex, T, G>, swiglu_feed_forward<Ex, T, G>>;

} // namespace tessera::inline TESSERA_ABI::nn

#endif

namespace tessera::inline TESSERA_ABI::nn {

/// The units in the order in which they run. T is the storage type of weights and activations, G that of
/// gradients. Throws config_error for an impossible config.
template <exec::space Ex, storage_scalar T, storage_scalar G>
unit_list<Ex, T, G> make_transformer(transformer_config const& config, site where = site::here()) {
  config.validate(where);
  auto const gpt2 = config.family == transformer_family::gpt2;
  unit_list<Ex, T, G> units;
  units.push_back(std::make_unique<embedding<Ex, T, G>>(config));
  for (index_t layer = 0; layer < config.layers; ++layer)
    if (gpt2)
      units.push_back(std::make_unique<gpt2_block<Ex, T, G>>(config, layer));
    else
      units.push_back(std::make_unique<llama_block<Ex, T, G>>(config, layer));
  auto const& first = *units.front();
  if (gpt2)
    units.push_back(std::make_unique<head<Ex, T, G, layer_norm<Ex, T, G>>>(config, first));
  else
    units.push_back(std::make_unique<head<Ex, T, G, rms_norm<Ex, T, G>>>(config, first));
  return units;
}

} // namespace tessera::inline TESSERA_ABI::nn

#endif
/// A whole model on one rank: the units, their parameters and gradients, and activation memory planned for
/// the largest micro-batch. Nothing is allocated after construction.
///
///     exec::host ex;
///     model<exec::host, bf16, float> m(config, {.batch = 4, .sequence_length = 64});
///     initialise(ex, m.store(), seed);
///     auto loss = m.forward_backward(ex, tokens, targets, {.step = 1}, [](std::size_t unit) {});
///     // m.store().gradients() is that of loss.sum: divide by the count of all micro-batches of all ranks
#ifndef TESSERA_NN_MODEL_HPP
#define TESSERA_NN_MODEL_HPP

namespace tessera::inline TESSERA_ABI::nn {

struct model_options {
  memory_meter* meter = nullptr;
  bool training = true; ///< False: no gradients, and activation memory for evaluation only.
};

template <exec::space Ex, storage_scalar T, storage_scalar G>
class model {
public:
  using memory = typename Ex::memory;
  using token_view = view<std::int32_t const, 2, memory>;

  /// `largest` bounds the micro-batches to come by the activation memory that they need.
  /// Throws config_error for an impossible config, size_error for a batch that is not one of the config's.
  explicit model(transformer_config const& config, batch_shape largest, model_options options = {},
                 site where = site::here())
      : config_(config), training_(options.training), units_(make_transformer<Ex, T, G>(config, where)),
        store_(units_, {.meter = options.meter, .gradients = options.training}, where),
        starts_(units_.size()), totals_({2}, {options.meter, memory_kind::other}, where) {
    check_shape(largest, where);
    activations_ =
        arena<memory>(planned_bytes(largest, training_), {options.meter, memory_kind::activations}, where);
  }

  transformer_config const& config() const noexcept { return config_; }
  unit_list<Ex, T, G>& units() noexcept { return units_; }
  parameter_store<Ex, T, G>& store() noexcept { return store_; }
  parameter_store<Ex, T, G> const& store() const noexcept { return store_; }
  arena<memory> const& activations() const noexcept { return activations_; }

  /// Activation bytes that a micro-batch needs at most at one time. Training keeps what all units before the
  /// running one left for their backward; evaluation only what flows.
  index_t planned_bytes(batch_shape shape, bool training = true) const {
    auto const flowing = arena<memory>::template bytes_for<T>(shape.tokens() * config_.width);
    index_t kept = flowing, peak = kept; // the gradient that flows back, or the hidden state alone
    for (auto const& u : units_) {
      auto const own = u->kept_bytes(shape);
      peak = (std::max)(peak, kept + own + u->scratch_bytes(shape));
      if (training) kept += own;
    }
    return peak;
  }

  /// The summed loss of one micro-batch; writes the gradient of its sum (times p.gradient_scale), or adds it
  /// where p.accumulate says so. `ready(i)` is called as soon as the gradients of unit i are final, from the
  /// last unit to the first. Throws size_error for a batch larger than planned, a token outside the
  /// vocabulary, or a target that is neither in it nor ignored; config_error without training.
  template <std::invocable<std::size_t> Ready>
  loss_sum forward_backward(Ex& ex, token_view tokens, token_view targets, pass p, Ready&& ready,
                            site where = site::here()) {
    clear_loss(ex);
    start_forward_backward(ex, tokens, targets, p, ready, where);
    return read_loss(ex);
  }
  loss_sum forward_backward(Ex& ex, token_view tokens, token_view targets, pass p = {},
                            site where = site::here()) {
    return forward_backward(
        ex, tokens, targets, p, [](std::size_t) {}, where);
  }

  /// The same in three steps, where the space works on while the host goes on, or where the second one is
  /// captured in a graph: `start_forward_backward` adds to the loss without waiting for it.
  void clear_loss(Ex& ex) {
    zero(ex, totals_.span()); // of exec/copy.hpp, or of the space's own header
  }
  template <std::invocable<std::size_t> Ready>
  void start_forward_backward(Ex& ex, token_view tokens, token_view targets, pass p, Ready&& ready,
                              site where = site::here()) {
    if (!training_)
      throw config_error("E-nn-017", where, "forward_backward of a model made with .training = false");
    p.training = true;
    arena_scope const scope(activations_);
    auto s = begin(tokens, targets, true, where);
    s.gradient = activations_.template take<T, 2>({s.shape().tokens(), config_.width});
    for (std::size_t i = 0; i < units_.size(); ++i) {
      starts_[i] = activations_.mark();
      units_[i]->forward(ex, store_.lend(i), s, activations_, p);
    }
    for (auto i = units_.size(); i-- > 0;) {
      units_[i]->backward(ex, store_.lend(i), s, activations_, p);
      activations_.release(starts_[i]);
      ready(i);
    }
  }
  /// Waits for it. Throws what the space found out only now, such as a token outside the vocabulary.
  loss_sum read_loss(Ex& ex) {
    double totals[2];
    copy(ex, std::span<double>(totals), totals_.span());
    return {totals[0], totals[1]};
  }

  /// The summed loss of one micro-batch in nats, without dropout, smoothing or z-loss.
  loss_sum evaluate(Ex& ex, token_view tokens, token_view targets, site where = site::here()) {
    arena_scope const scope(activations_);
    clear_loss(ex);
    auto s = begin(tokens, targets, false, where);
    for (std::size_t i = 0; i < units_.size(); ++i)
      units_[i]->forward(ex, store_.lend(i), s, activations_, {.training = false});
    return read_loss(ex);
  }

private:
  void check_shape(batch_shape shape, site where) const {
    if (shape.batch < 0 || shape.sequence_length < 1 || shape.sequence_length > config_.sequence_length)
      throw size_error("E-nn-018", where, "a micro-batch of ", shape.batch, " samples of ",
                       shape.sequence_length, " tokens; the model takes 0 or more samples of 1 to ",
                       config_.sequence_length, " tokens (transformer_config::sequence_length)");
  }

  stream<Ex, T> begin(token_view tokens, token_view targets, bool training, site where) {
    stream<Ex, T> s{.tokens = tokens, .targets = targets, .totals = totals_.view()};
    check_shape(s.shape(), where);
    if (targets.extents() != tokens.extents())
      throw size_error("E-nn-019", where, "tokens are ", text_of(tokens.extents()), ", targets ",
                       text_of(targets.extents()), "; they need the same shape");
    if (auto const needed = planned_bytes(s.shape(), training); needed > activations_.capacity())
      throw size_error("E-nn-020", where, "a micro-batch of ", text_of(tokens.extents()), " tokens needs ",
                       needed, " bytes of activations, the model was made with ", activations_.capacity(),
                       "; make it with a larger batch_shape or feed smaller micro-batches");
    return s;
  }

  transformer_config config_;
  bool training_;
  unit_list<Ex, T, G> units_;
  parameter_store<Ex, T, G> store_;
  arena<memory> activations_;
  std::vector<typename arena<memory>::position> starts_;
  tensor<double, 1, memory> totals_; ///< {sum, count} of the loss.
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif

/// Which units' gradients travel together: consecutive units, in the order in which backward finishes them,
/// until a message is worth its latency. Arithmetic alone, the same on every rank.
///
///     for (auto const& b : parallel::buckets_of(units, 1 << 20))
///       b.elements;                                  // one stretch of the gradient buffer
#ifndef TESSERA_PARALLEL_BUCKETS_HPP
#define TESSERA_PARALLEL_BUCKETS_HPP

#include <span>
#include <vector>

namespace tessera::inline TESSERA_ABI::parallel {

struct bucket {
  std::size_t first_unit = 0, end_unit = 0; ///< Units [first_unit, end_unit).
  layout::range elements;                   ///< Where they stand in the flat buffers.
};

/// Postconditions: the buckets run from the last unit to the first and every unit is in one of them; each has
/// at least `least_elements` elements, except the last one of the list, and would have fewer without its
/// first unit.
inline std::vector<bucket> buckets_of(std::span<layout::range const> units, index_t least_elements) {
  std::vector<bucket> buckets;
  for (auto end = units.size(); end > 0;) {
    auto first = end - 1;
    while (first > 0 && units[end - 1].end - units[first].begin < least_elements) --first;
    buckets.push_back({first, end, {units[first].begin, units[end - 1].end}});
    end = first;
  }
  return buckets;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
/// Data parallel training: every rank works on its own samples, gradients are summed over the ranks while
/// backward is still running, and every rank ends the step with the same weights, bit by bit.
///
///     parallel::data_parallel<comm::mpi, exec::host, bf16, float> replicas(
///         comm, ex, parallel::flat_model_of(model.store()), optim::adamw_options{}, {.zero = 1});
///     for (index_t i = 0; i < micro_batches; ++i)
///       loss += model.forward_backward(ex, tokens(i), targets(i), {.accumulate = i > 0}, [&](std::size_t
///       unit) {
///         if (i + 1 == micro_batches) replicas.gradients_ready(unit);
///       });
///     auto done = replicas.update(ex, loss, {.step = step + 1, .learning_rate = rate(step), .clip_norm =
///     1});
///
/// ZeRO stage 0 keeps the whole optimizer state on each rank and sums gradients by all_reduce, one message a
/// bucket. Stage 1 keeps on each rank the state of the part of every unit that it owns (layout::ownership),
/// brings each part's gradients to its owner by reduce_scatter_v, and the new weights to all ranks by
/// all_gather_v, one message a unit. Parts may be uneven or empty.
///
/// Cost of a step, for n elements: stage 0 sends and receives what an all_reduce of n gradients does; stage 1
/// what a reduce_scatter of n gradients and an all_gather of n weights do. Both: one message of 24 bytes.
/// Every rank issues the same collectives whatever its samples; one that has none calls `nothing_to_add`.
#ifndef TESSERA_PARALLEL_DATA_PARALLEL_HPP
#define TESSERA_PARALLEL_DATA_PARALLEL_HPP

#include <algorithm>

/// What the strategies of this room act on: the weights of all units in one buffer, their gradients in
/// another of the same shape, and where each unit stands. Borrowed: the buffers belong to whoever runs the
/// model.
///
///     nn::parameter_store<exec::host, bf16, float> store(units);
///     auto flat = parallel::flat_model_of(store, optim::decay_rule{.position_embedding = false});
#ifndef TESSERA_PARALLEL_FLAT_MODEL_HPP
#define TESSERA_PARALLEL_FLAT_MODEL_HPP

namespace tessera::inline TESSERA_ABI::parallel {

template <storage_scalar T, storage_scalar G, memory_space Memory = host_memory>
struct flat_model {
  memory_span<T, Memory> weights;
  memory_span<G, Memory> gradients;
  std::vector<layout::range> units; ///< Unit by unit, without gaps, from 0 to the end of `weights`.
  /// What weight decay acts on in each unit's block, counted from the block's beginning.
  std::vector<std::vector<layout::range>> decayed;

  memory_span<T, Memory> weights_of(layout::range part) const { return part_of(weights, part); }
  memory_span<G, Memory> gradients_of(layout::range part) const { return part_of(gradients, part); }

  /// Throws size_error (E-parallel-001) where the pieces do not fit together.
  void validate(site where = site::here()) const {
    index_t end = 0;
    auto fits = gradients.size() == weights.size() && decayed.size() == units.size();
    for (auto const& u : units) {
      fits = fits && u.begin == end && u.end >= u.begin;
      end = u.end;
    }
    if (!fits || end != static_cast<index_t>(weights.size()))
      throw size_error("E-parallel-001", where, "a flat model has ", weights.size(), " weights, ",
                       gradients.size(), " gradients, ", units.size(), " units that end at ", end, " and ",
                       decayed.size(),
                       " masks of weight decay; units must follow each other from 0 to the end "
                       "of the weights, with a gradient for each weight and a mask for each unit");
  }

private:
  template <span_in<Memory> Span>
  static Span part_of(Span all, layout::range part) {
    return all.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
  }
};

/// The flat model of a parameter store that holds gradients.
template <exec::space Ex, storage_scalar T, storage_scalar G>
flat_model<T, G, typename Ex::memory> flat_model_of(nn::parameter_store<Ex, T, G>& store,
                                                    optim::decay_rule rule = {}) {
  flat_model<T, G, typename Ex::memory> flat{store.weights(), store.gradients(), {}, {}};
  for (std::size_t u = 0; u < store.units(); ++u) {
    flat.units.push_back(store.unit_range(u));
    flat.decayed.push_back(optim::decayed_ranges(store.parameters(u), rule));
  }
  return flat;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
/// The Euclidean norm of all gradients of a model, and clipping by it. Who counts which element is asked of
/// layout::ownership, so that each element counts once, whether the ranks hold replicas or shards.
///
///     auto norm = parallel::global_norm(comm, ex, gradients, units);   // every rank: the same bits
///     auto factor = parallel::clip_factor(norm, 1.0);                  // what gradients are multiplied by
///
/// A gradient that is infinite or NaN on any rank makes the norm so on all of them: whatever they decide by
/// it, they decide together.
#ifndef TESSERA_PARALLEL_GLOBAL_NORM_HPP
#define TESSERA_PARALLEL_GLOBAL_NORM_HPP

#include <cmath>

namespace tessera::inline TESSERA_ABI::parallel {

/// The sum of squares, in double, of the elements that `who` counts. `units` are the blocks of the flat
/// buffer `gradients`; what this rank owns of it must have been reduced over the ranks.
template <exec::space Ex, span_in<typename Ex::memory> Gradients>
double counted_squares(Ex& ex, Gradients gradients, std::span<layout::range const> units,
                       layout::ownership who) {
  using stretch = view<typename Gradients::element_type, 1, typename Ex::memory>;
  double sum = 0;
  for (auto const& unit : units) {
    auto const mine = who.of(unit.size());
    sum += ops::sum_of_squares(ex, stretch(gradients.data() + unit.begin + mine.begin, {mine.size()}));
  }
  return sum;
}

/// The norm over all ranks. Called by every rank. Cost: one pass over 1 / ranks of the gradients, one message
/// of 8 bytes.
template <comm::communicator Comm, exec::space Ex, span_in<typename Ex::memory> Gradients>
double global_norm(Comm& comm, Ex& ex, Gradients gradients, std::span<layout::range const> units) {
  auto const mine = counted_squares(ex, gradients, units, {comm.rank(), comm.size()});
  return std::sqrt(comm.all_reduce(mine, comm::reduce_options{}));
}

/// The factor that shortens a gradient of length `norm` to `limit`; 1 where it is shorter. A limit of 0 means
/// no clipping.
constexpr double clip_factor(double norm, double limit) noexcept {
  return limit > 0 && norm > limit ? limit / norm : 1;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
/// The loss of all ranks: sums and counts travel, the one division comes last.
///
///     auto total = parallel::sum_over_ranks(comm, local);      // every rank: the same bits
///     auto nats_per_token = parallel::mean_of(total);          // 0 where nothing was predicted
#ifndef TESSERA_PARALLEL_LOSS_HPP
#define TESSERA_PARALLEL_LOSS_HPP

namespace tessera::inline TESSERA_ABI::parallel {

/// Called by every rank; a rank that predicted nothing gives {0, 0}. Cost: one message of 16 bytes.
template <comm::communicator Comm>
nn::loss_sum sum_over_ranks(Comm& comm, nn::loss_sum local) {
  double values[] = {local.sum, local.count};
  comm.all_reduce(std::span<double>(values), comm::reduce_options{});
  return {values[0], values[1]};
}

/// Of what has been summed over all micro-batches and ranks.
constexpr double mean_of(nn::loss_sum total) noexcept {
  return total.count > 0 ? total.sum / total.count : 0;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
/// What data parallel training keeps on one rank, worked out before anything is allocated: the same figures
/// that the memory meter shows afterwards, and, beside them, what the ZeRO formula says (Rajbhandari et al.,
/// "ZeRO: memory optimizations toward training trillion parameter models", 2020).
///
///     auto plan = parallel::plan_memory(units, {.ranks = 4, .zero = 1, .weight_bytes = 2, .gradient_bytes =
///     4,
///                                               .state_bytes = 12});
///     plan.optimizer_state;      // bytes on rank 0
#ifndef TESSERA_PARALLEL_MEMORY_PLAN_HPP
#define TESSERA_PARALLEL_MEMORY_PLAN_HPP

#include <span>

namespace tessera::inline TESSERA_ABI::parallel {

/// Bytes by kind.
struct memory_plan {
  index_t parameters = 0;
  index_t gradients = 0;
  index_t optimizer_state = 0;
  index_t communication = 0; ///< An upper bound; the others are exact.

  constexpr index_t total() const noexcept {
    return parameters + gradients + optimizer_state + communication;
  }
  constexpr index_t of(memory_kind kind) const noexcept {
    switch (kind) {
    case memory_kind::parameters:
      return parameters;
    case memory_kind::gradients:
      return gradients;
    case memory_kind::optimizer_state:
      return optimizer_state;
    case memory_kind::communication:
      return communication;
    default:
      return 0;
    }
  }
};

struct memory_plan_options {
  int rank = 0;
  int ranks = 1;
  int zero = 0;
  index_t weight_bytes = 4;   ///< sizeof of the weights' storage type.
  index_t gradient_bytes = 4; ///< sizeof of the gradients' storage type.
  index_t state_bytes = 8;    ///< Optimizer state of an element: Optimizer::state_bytes(options).
};

/// The part of a unit's block whose optimizer state a rank keeps: all of it at stage 0, what it owns from
/// stage 1 on.
constexpr layout::range kept_state(index_t block_size, layout::ownership who, int zero) {
  return zero == 0 ? layout::range{0, block_size} : who.of(block_size);
}

/// Exact for the elements of `units`, gaps of alignment included. Communication depends on the communicator
/// and is left at 0 here: data_parallel::plan adds it.
inline memory_plan plan_memory(std::span<layout::range const> units, memory_plan_options const& o) {
  memory_plan plan;
  for (auto const& unit : units) {
    plan.parameters += unit.size() * o.weight_bytes;
    plan.gradients += unit.size() * o.gradient_bytes;
    plan.optimizer_state += kept_state(unit.size(), {o.rank, o.ranks}, o.zero).size() * o.state_bytes;
  }
  return plan;
}

/// The formula: weights + gradients + state / ranks, for each of n parameters: with bf16 weights and AdamW
/// (2 + g + 12 / N) n bytes at stage 1.
constexpr double zero_formula_bytes(index_t n, memory_plan_options const& o) noexcept {
  auto const state = static_cast<double>(o.state_bytes) / (o.zero == 0 ? 1 : o.ranks);
  return static_cast<double>(n) * (static_cast<double>(o.weight_bytes + o.gradient_bytes) + state);
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif

namespace tessera::inline TESSERA_ABI::parallel {

struct data_parallel_options {
  int zero = 1;                            ///< Stage 0 or 1.
  index_t bucket_bytes = index_t{4} << 20; ///< Units are reduced together until they are this large.
  int in_flight = 2;                       ///< Messages under way at once; each has memory of its own, which
                                           ///< grows to the largest message that it has carried.
  comm::summation order = comm::summation::rank_order;
  memory_meter* meter = nullptr; ///< Counts the optimizer state.
};

struct update_options {
  index_t step = 1;         ///< Number of this update, from 1.
  double learning_rate = 0; ///< Of this update.
  double clip_norm = 0;     ///< The longest gradient of the mean loss; 0: no clipping.
  double loss_scale = 1;    ///< What the gradients were multiplied by (pass::gradient_scale).
};

/// The same on every rank, bit by bit.
struct update_result {
  nn::loss_sum loss;        ///< Over all micro-batches of all ranks.
  double gradient_norm = 0; ///< Of the gradient of the mean loss, before clipping.
  /// False where loss or gradients are infinite or NaN, or nothing was predicted: then neither weights nor
  /// state have changed on any rank.
  bool applied = false;
};

/// The communicator's messages stand in the memory that the space works in: comm::nccl goes with exec::cuda,
/// the others with exec::host.
template <class Comm, class Ex>
concept communicates_for = comm::communicator<Comm> && exec::space<Ex> &&
    std::same_as<typename Comm::bulk_memory, typename Ex::memory>;

template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G,
          class Optimizer = optim::adamw<Ex, T>>
  requires communicates_for<Comm, Ex> && optim::optimizer<Optimizer, Ex, T, G>
class data_parallel {
public:
  using memory = typename Ex::memory;
  using optimizer_options = typename Optimizer::options_type;

  /// Weights must be the same on all ranks. Throws size_error (E-parallel-001) for a model that does not fit
  /// together, config_error (E-parallel-002) for a stage or bounds that do not exist.
  data_parallel(Comm& comm, Ex& ex, flat_model<T, G, memory> model, optimizer_options const& settings,
                data_parallel_options options = {}, site where = site::here())
      : comm_(comm), model_(static_cast<flat_model<T, G, memory>&&>(model)),
        options_(options), who_{comm.rank(), comm.size()} {
    model_.validate(where);
    if (options.zero < 0 || options.zero > 1 || options.bucket_bytes < 1 || options.in_flight < 1)
      throw config_error("E-parallel-002", where, "data_parallel: zero is ", options.zero,
                         " (0 or 1), bucket_bytes ", options.bucket_bytes, " and in_flight ",
                         options.in_flight, " (1 or more)");
    buckets_ = buckets_of(model_.units, least_elements(options));
    optimizers_.reserve(model_.units.size());
    for (std::size_t u = 0; u < model_.units.size(); ++u)
      optimizers_.emplace_back(ex, owned(u).size(), settings,
                               optim::ranges_within(model_.decayed[u], owned(u)),
                               memory_account{options.meter, memory_kind::optimizer_state});
    ready_.resize(model_.units.size());
    counts_.resize(static_cast<std::size_t>(comm.size()));
    under_way_.reserve(model_.units.size());
    start_from_weights(ex);
  }
  data_parallel(data_parallel const&) = delete;
  data_parallel& operator=(data_parallel const&) = delete;

  /// What a rank will keep and, for communication, keep at most.
  static memory_plan plan(std::span<layout::range const> units, layout::ownership who,
                          optimizer_options const& settings, data_parallel_options const& options = {}) {
    auto plan = plan_memory(units, {.rank = who.rank,
                                    .ranks = who.ranks,
                                    .zero = options.zero,
                                    .weight_bytes = sizeof(T),
                                    .gradient_bytes = sizeof(G),
                                    .state_bytes = Optimizer::state_bytes(settings)});
    if constexpr (requires { Comm::template scratch_bytes<G>(index_t{}, int{}); }) {
      auto largest = Comm::template scratch_bytes<double>(3, who.ranks);
      auto const carry = [&](index_t n) {
        largest = (std::max)(largest, Comm::template scratch_bytes<G>(n, who.ranks));
      };
      if (options.zero == 0)
        for (auto const& b : buckets_of(units, least_elements(options))) carry(b.elements.size());
      else // parts are whole granules, so rank 0's may be more than an even share
        for (auto const& unit : units) carry(who.of(unit.size(), 0).size() * who.ranks);
      plan.communication = largest * options.in_flight;
    }
    return plan;
  }

  std::size_t units() const noexcept { return model_.units.size(); }
  data_parallel_options const& options() const noexcept { return options_; }

  /// The part of unit `u`'s block whose optimizer state this rank keeps, counted from the block's beginning,
  /// and that state: what a checkpoint saves, restores, or cuts anew for other ranks.
  layout::range owned(std::size_t u) const { return kept_state(model_.units[u].size(), who_, options_.zero); }
  Optimizer& optimizer(std::size_t u) { return optimizers_[u]; }

  /// Lets the fp32 masters start anew from the weights as they are: after these were set from outside.
  void start_from_weights(Ex& ex) {
    for (std::size_t u = 0; u < units(); ++u)
      optimizers_[u].start_from(ex, memory_span<T const, memory>(model_.weights_of(owned_elements(u))));
  }

  /// Lets the fp32 masters start from values known in fp32: `fill(unit, range of its block, out)` writes
  /// them.
  template <std::invocable<std::size_t, layout::range, memory_span<float, typename Ex::memory>> Fill>
  void start_from(Ex& ex, Fill&& fill) {
    index_t largest = 0;
    for (std::size_t u = 0; u < units(); ++u) largest = (std::max)(largest, owned(u).size());
    tensor<float, 1, memory> values({largest}, {options_.meter, memory_kind::other});
    for (std::size_t u = 0; u < units(); ++u) {
      auto const part = values.span().first(static_cast<std::size_t>(owned(u).size()));
      fill(u, owned(u), part);
      optimizers_[u].start_from(ex, memory_span<float const, memory>(part));
    }
  }

  /// Unit `u`'s gradients hold the sum over all of this rank's micro-batches. Starts what can be reduced and
  /// drives what is under way. Throws config_error (E-parallel-003) for a unit that is not awaited.
  void gradients_ready(std::size_t u, site where = site::here()) {
    if (u >= units() || ready_[u])
      throw config_error("E-parallel-003", where, "gradients_ready(", u, ") of ", units(),
                         " units: each is to be called once a step, in the last micro-batch alone");
    ready_[u] = true;
    while (next_bucket_ < buckets_.size() && all_ready(buckets_[next_bucket_])) {
      reduce(buckets_[next_bucket_]);
      ++next_bucket_;
    }
    for (auto i = oldest_; i < under_way_.size(); ++i) (void)under_way_[i].test();
  }

  /// Called instead by a rank without a micro-batch in this step: its gradients are zeros.
  void nothing_to_add(Ex& ex, site where = site::here()) {
    auto const all = static_cast<index_t>(model_.gradients.size());
    ops::fill(ex, view<G, 1, memory>(model_.gradients.data(), {all}), 0);
    for (auto u = units(); u-- > 0;) gradients_ready(u, where);
  }

  /// Ends the step: waits for the gradients, decides with all ranks whether they are finite, clips, updates,
  /// and brings the weights to all ranks. `loss` is what this rank's micro-batches gave. The gradients are
  /// divided here, once, by the count of all ranks. Throws config_error (E-parallel-004) where some unit's
  /// gradients were never ready.
  update_result update(Ex& ex, nn::loss_sum loss, update_options const& how, site where = site::here()) {
    if (next_bucket_ < buckets_.size())
      throw config_error("E-parallel-004", where, "update: the gradients of unit ",
                         buckets_[next_bucket_].end_unit - 1, " or one before it were not ready; call ",
                         "gradients_ready for all ", units(), " units, or nothing_to_add");
    wait_for_all();
    next_bucket_ = 0;
    std::fill(ready_.begin(), ready_.end(), false);

    double sums[] = {loss.sum, loss.count,
                     counted_squares(ex, memory_span<G const, memory>(model_.gradients), model_.units, who_)};
    comm_.all_reduce(std::span<double>(sums), comm::reduce_options{});
    update_result result{.loss = {sums[0], sums[1]}};
    auto const divisor = sums[1] * how.loss_scale;
    if (sums[1] > 0) result.gradient_norm = std::sqrt(sums[2]) / divisor;
    result.applied = sums[1] > 0 && std::isfinite(sums[0]) && std::isfinite(result.gradient_norm);
    if (!result.applied) return result;

    optim::step_values const values{.step = how.step,
                                    .learning_rate = how.learning_rate,
                                    .gradient_scale =
                                        clip_factor(result.gradient_norm, how.clip_norm) / divisor};
    for (std::size_t u = 0; u < units(); ++u) {
      auto const part = owned_elements(u);
      optimizers_[u].step(ex, model_.weights_of(part),
                          memory_span<G const, memory>(model_.gradients_of(part)), values);
      if (options_.zero == 1) gather(u);
    }
    wait_for_all();
    return result;
  }

private:
  using request = typename Comm::request;

  static index_t least_elements(data_parallel_options const& options) {
    return (std::max)(index_t{1}, options.bucket_bytes / static_cast<index_t>(sizeof(G)));
  }

  layout::range owned_elements(std::size_t u) const {
    auto const at = model_.units[u].begin;
    auto const part = owned(u);
    return {at + part.begin, at + part.end};
  }

  bool all_ready(bucket const& b) const {
    for (auto u = b.first_unit; u < b.end_unit; ++u)
      if (!ready_[u]) return false;
    return true;
  }

  void reduce(bucket const& b) {
    comm::reduce_options const how{.order = options_.order};
    if (options_.zero == 0) {
      make_room();
      under_way_.push_back(comm_.start_all_reduce(model_.gradients_of(b.elements), how));
      return;
    }
    for (auto u = b.end_unit; u-- > b.first_unit;) {
      make_room();
      under_way_.push_back(comm_.start_reduce_scatter_v(
          model_.gradients_of(owned_elements(u)),
          memory_span<G const, memory>(model_.gradients_of(model_.units[u])), counts_of(u), how));
    }
  }

  void gather(std::size_t u) {
    make_room();
    under_way_.push_back(comm_.start_all_gather_v(
        model_.weights_of(model_.units[u]),
        memory_span<T const, memory>(model_.weights_of(owned_elements(u))), counts_of(u)));
  }

  std::span<index_t const> counts_of(std::size_t u) {
    for (int r = 0; r < who_.ranks; ++r)
      counts_[static_cast<std::size_t>(r)] = who_.of(model_.units[u].size(), r).size();
    return counts_;
  }

  void make_room() {
    while (under_way_.size() - oldest_ >= static_cast<std::size_t>(options_.in_flight))
      under_way_[oldest_++].wait();
  }

  void wait_for_all() {
    while (oldest_ < under_way_.size()) under_way_[oldest_++].wait();
    under_way_.clear();
    oldest_ = 0;
  }

  Comm& comm_;
  flat_model<T, G, memory> model_;
  data_parallel_options options_;
  layout::ownership who_;
  std::vector<bucket> buckets_;
  std::vector<Optimizer> optimizers_;
  std::vector<bool> ready_;
  std::size_t next_bucket_ = 0;    ///< The next one to be reduced in this step.
  std::vector<request> under_way_; ///< Of this step's messages, in order; those before oldest_ have ended.
  std::size_t oldest_ = 0;
  std::vector<index_t> counts_;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif

/// Ranks that were started with different settings would compute different models and wait for each other in
/// the wrong places. They find out before anything else.
///
///     require_agreement(comm, settings);          // config_error on every rank, naming what differs
#ifndef TESSERA_TRAIN_AGREEMENT_HPP
#define TESSERA_TRAIN_AGREEMENT_HPP

/// The settings of a training run: one struct, and one table that says what each setting is called, what it
/// means and which values it may take. JSON, the command line, --help, the checks, and what a resumed run may
/// not change are all read from that table, so they cannot disagree.
///
///     train::settings s;
///     train::set(s, "learning_rate", "3e-4");     // by name, as text; unknown names name the nearest
///     train::check(s);                            // throws config_error that says how to fix it
#ifndef TESSERA_TRAIN_SETTINGS_HPP
#define TESSERA_TRAIN_SETTINGS_HPP

#include <charconv>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

/// Which of several names a misspelt one was probably meant to be.
#ifndef TESSERA_TRAIN_DETAIL_NEAREST_HPP
#define TESSERA_TRAIN_DETAIL_NEAREST_HPP

#include <algorithm>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

namespace tessera::inline TESSERA_ABI::train::detail {

/// Insertions, deletions and substitutions that turn `a` into `b` (Levenshtein, one row at a time).
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    auto diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      auto const substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = (std::min)({substituted, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row[b.size()];
}

/// The candidate with the smallest edit distance; empty if there are none.
inline std::string_view nearest(std::string_view name, std::span<std::string_view const> candidates) {
  auto const best = std::min_element(candidates.begin(), candidates.end(), [&](auto a, auto b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
  return best == candidates.end() ? std::string_view{} : *best;
}

} // namespace tessera::inline TESSERA_ABI::train::detail

#endif

namespace tessera::inline TESSERA_ABI::train {

struct settings {
  std::string data;
  std::string tokenizer = "bytes";
  index_t vocabulary = 0;
  double validation_share = 0.05;

  std::string family = "gpt2";
  index_t layers = 4;
  index_t width = 256;
  index_t heads = 4;
  index_t key_value_heads = 0;
  index_t feed_forward = 0;
  index_t sequence_length = 128;
  double dropout = 0;
  double norm_epsilon = 1e-5;
  double rotary_theta = 10000;
  double label_smoothing = 0;
  double z_loss = 0;
  bool tied_head = true;
  std::string storage = "bf16";

  index_t steps = 1000;
  index_t batch = 16;
  index_t micro_batch = 8;
  double learning_rate = 1e-3;
  std::string schedule = "cosine";
  index_t warm_up_steps = 50;
  index_t decay_steps = 0;
  double final_rate_share = 0.1;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double clip = 1;
  index_t seed = 1337;

  std::string device = "host";
  index_t ranks = 1;
  index_t threads = 0;
  index_t zero_stage = 1;
  double bucket_mib = 4;

  std::string run = "run";
  index_t checkpoint_every = 200;
  index_t keep = 3;
  index_t validate_every = 100;
  index_t validation_samples = 64;
  index_t log_every = 1;
  bool measure_peak = true;
  index_t sample_tokens = 200;
  std::string prompt = "In the beginning";

  /// Names of differences that this resumption is meant to have. Never part of a file: it is said once.
  std::vector<std::string> allow_difference;
};

/// What a checkpoint says to another value of a setting.
enum class binding {
  refused, ///< It decides the run's numbers or their rounding: refused unless it is allowed by name.
  free     ///< It does not.
};

struct field {
  std::string_view group;
  std::string_view name; ///< The key in JSON; on the command line --with-hyphens.
  std::variant<std::string settings::*, index_t settings::*, double settings::*, bool settings::*> member;
  std::string_view help;
  binding bound = binding::refused;
  double least = 0; ///< For numbers; text has `choices` instead.
  double most = 9e15;
  std::string_view choices{}; ///< "gpt2|llama"; empty: any text.
};

inline constexpr field fields[] = {
    {"Data", "data", &settings::data,
     "Text to learn from: any file of UTF-8 text, or (with tokenizer 'tokens') a token file in llm.c's .bin "
     "layout. A resumed run recognises it by its content, not by its path.",
     binding::free},
    {"Data", "tokenizer", &settings::tokenizer,
     "How text becomes numbers: 'bytes' takes each byte as a token; 'sentencepiece' learns pieces of words "
     "from the text; 'tokens' means that the data is a token file already.",
     binding::refused, 0, 0, "bytes|sentencepiece|tokens"},
    {"Data", "vocabulary", &settings::vocabulary,
     "Number of different tokens. 0 chooses: 256 for bytes, 2048 for sentencepiece.", binding::refused, 0,
     1 << 24},
    {"Data", "validation_share", &settings::validation_share,
     "Share of the tokens, at the end of the text, that is kept for validation and never trained on.",
     binding::refused, 0, 0.5},

    {"Model", "family", &settings::family,
     "'gpt2': learned positions, layer norm, GELU; 'llama': rotary positions, RMS norm, SwiGLU.",
     binding::refused, 0, 0, "gpt2|llama"},
    {"Model", "layers", &settings::layers, "Number of transformer blocks.", binding::refused, 1, 10000},
    {"Model", "width", &settings::width, "Numbers that describe one token between blocks.", binding::refused,
     1, 1 << 20},
    {"Model", "heads", &settings::heads, "Attention heads; the width must be a multiple of it.",
     binding::refused, 1, 1 << 20},
    {"Model", "key_value_heads", &settings::key_value_heads,
     "Heads of keys and values, each shared by heads / key_value_heads query heads (llama). 0: as many as "
     "heads.",
     binding::refused, 0, 1 << 20},
    {"Model", "feed_forward", &settings::feed_forward,
     "Inner width of the feed-forward layers. 0: 4 times the width (gpt2), 8/3 of it (llama).",
     binding::refused, 0, 1 << 24},
    {"Model", "sequence_length", &settings::sequence_length, "Tokens that the model sees at once.",
     binding::refused, 1, 1 << 24},
    {"Model", "dropout", &settings::dropout, "Probability that an activation is dropped in training.",
     binding::refused, 0, 0.999},
    {"Model", "norm_epsilon", &settings::norm_epsilon, "Added to the variance that norms divide by.",
     binding::refused, 1e-12, 0.1},
    {"Model", "rotary_theta", &settings::rotary_theta, "Base of the rotary positions' wavelengths (llama).",
     binding::refused, 1.001, 1e12},
    {"Model", "label_smoothing", &settings::label_smoothing,
     "Share of the training target that is spread over all tokens. Validation never has it.",
     binding::refused, 0, 0.999},
    {"Model", "z_loss", &settings::z_loss,
     "Weight of the squared log of the softmax's normaliser in the training loss; keeps logits small.",
     binding::refused, 0, 100},
    {"Model", "tied_head", &settings::tied_head,
     "true: the output layer uses the token embedding's matrix; false: it has its own."},
    {"Model", "storage", &settings::storage,
     "What weights and activations are stored in; sums are always made in fp32. bf16 keeps fp32 master "
     "weights in the optimizer.",
     binding::refused, 0, 0, "fp32|bf16"},

    {"Training", "steps", &settings::steps, "Optimizer steps of the whole run.", binding::refused, 0, 1e12},
    {"Training", "batch", &settings::batch,
     "Sequences of one step, over all ranks. The result does not depend on how ranks share them, to "
     "rounding.",
     binding::refused, 1, 1 << 30},
    {"Training", "micro_batch", &settings::micro_batch,
     "Sequences that one rank works on at once; lower it to save memory. Gradients add up over "
     "micro-batches.",
     binding::refused, 1, 1 << 30},
    {"Training", "learning_rate", &settings::learning_rate, "The largest learning rate of the schedule."},
    {"Training", "schedule", &settings::schedule,
     "The learning rate after warm-up: 'constant', 'linear' or 'cosine' down to the final share at the last "
     "step, or 'warm_up_stable_decay': stable, then down over the last decay_steps.",
     binding::refused, 0, 0, "constant|linear|cosine|warm_up_stable_decay"},
    {"Training", "warm_up_steps", &settings::warm_up_steps,
     "Steps over which the learning rate rises from 0.", binding::refused, 0, 1e12},
    {"Training", "decay_steps", &settings::decay_steps,
     "Length of the decay of 'warm_up_stable_decay'. 0: a fifth of the steps.", binding::refused, 0, 1e12},
    {"Training", "final_rate_share", &settings::final_rate_share,
     "The last step's learning rate, as a share of the largest.", binding::refused, 0, 1},
    {"Training", "weight_decay", &settings::weight_decay,
     "Decoupled decay of matrices and embeddings; norms and biases are not decayed."},
    {"Training", "beta1", &settings::beta1, "AdamW: memory of the gradient's mean.", binding::refused, 0,
     0.999999},
    {"Training", "beta2", &settings::beta2, "AdamW: memory of the gradient's square.", binding::refused, 0,
     0.9999999},
    {"Training", "epsilon", &settings::epsilon, "AdamW: added to the root of the square.", binding::refused,
     1e-30, 1},
    {"Training", "clip", &settings::clip,
     "Gradients with a larger global norm are scaled down to it. 0: never."},
    {"Training", "seed", &settings::seed, "Of the weights, the order of the data and the dropout."},

    {"Layout", "device", &settings::device,
     "Where a rank computes: 'host' is the processor; 'cuda' is an NVIDIA GPU for each rank, in programs "
     "built with TESSERA_WITH_CUDA.",
     binding::refused, 0, 0, "host|cuda"},
    {"Layout", "ranks", &settings::ranks,
     "Ranks as threads of one process. Under mpiexec the ranks are its processes, and this stays 1.",
     binding::free, 1, 4096},
    {"Layout", "threads", &settings::threads,
     "Threads of each rank on the host. 0: the machine's cores shared among the ranks.", binding::free, 0,
     4096},
    {"Layout", "zero_stage", &settings::zero_stage,
     "1 shares the optimizer's state among the ranks (ZeRO-1); 0 gives each rank all of it.",
     binding::refused, 0, 1},
    {"Layout", "bucket_mib", &settings::bucket_mib,
     "Gradients are reduced in pieces of about this many MiB while the backward pass runs.", binding::free,
     0.001, 65536},

    {"Run", "run", &settings::run,
     "Folder of the run: checkpoints, metrics.csv, loss.svg, summary.json. If it holds a checkpoint, the run "
     "goes on from the latest.",
     binding::free},
    {"Run", "checkpoint_every", &settings::checkpoint_every,
     "Steps between checkpoints; the last step always makes one. 0: only the last.", binding::free, 0, 1e12},
    {"Run", "keep", &settings::keep, "Checkpoints to keep; older ones are deleted.", binding::free, 1, 1e6},
    {"Run", "validate_every", &settings::validate_every,
     "Steps between validations; there is always one at the end. 0: only then.", binding::free, 0, 1e12},
    {"Run", "validation_samples", &settings::validation_samples,
     "Sequences of a validation while training; the one at the end takes all. 0: all, always.", binding::free,
     0, 1e12},
    {"Run", "log_every", &settings::log_every, "Steps between lines of the log (not on a terminal).",
     binding::free, 1, 1e12},
    {"Run", "measure_peak", &settings::measure_peak,
     "Measure at the start how fast large matrix products are here, to show the share of it that training "
     "reaches. false saves about a second.",
     binding::free},
    {"Run", "sample_tokens", &settings::sample_tokens, "Tokens of text to write at the end. 0: none.",
     binding::free, 0, 1e9},
    {"Run", "prompt", &settings::prompt, "What that text begins with.", binding::free},
};

/// The table's row of that name, or config_error that names the nearest.
inline field const& field_of(std::string_view name, site where = site::here()) {
  std::vector<std::string_view> names;
  for (auto const& f : fields) {
    if (f.name == name) return f;
    names.push_back(f.name);
  }
  throw config_error("E-train-001", where, "there is no setting '", name, "'; did you mean '",
                     detail::nearest(name, names), "'?");
}

/// A setting's value as text that `set` reads back to the same value.
inline std::string value_text(settings const& s, field const& f) {
  return std::visit(
      [&](auto member) -> std::string {
        using value_type = std::remove_cvref_t<decltype(s.*member)>;
        if constexpr (std::same_as<value_type, std::string>)
          return s.*member;
        else if constexpr (std::same_as<value_type, bool>)
          return s.*member ? "true" : "false";
        else {
          char digits[40];
          auto const end = std::to_chars(digits, digits + sizeof digits, s.*member).ptr;
          return {digits, end};
        }
      },
      f.member);
}

/// Throws config_error unless the value is one that the table allows.
inline void check(settings const& s, field const& f, site where = site::here()) {
  auto const contains = [](std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
  };
  std::visit(
      [&](auto member) {
        auto const& value = s.*member;
        if constexpr (std::same_as<decltype(value), std::string const&>) {
          if (f.choices.empty()) return;
          if (value.find('|') != std::string::npos ||
              !contains('|' + std::string(f.choices) + '|', '|' + value + '|'))
            throw config_error("E-train-002", where, f.name, " is '", value, "'; it must be one of ",
                               f.choices);
        } else if constexpr (!std::same_as<decltype(value), bool const&>) {
          auto const number = static_cast<double>(value);
          if (!(number >= f.least && number <= f.most)) // also refuses NaN
            throw config_error("E-train-003", where, f.name, " is ", value_text(s, f), "; it must lie in [",
                               f.least, ", ", f.most, "]");
        }
      },
      f.member);
}

/// Sets one setting from text. Throws config_error for an unknown name and for a value it cannot take.
inline void set(settings& s, std::string_view name, std::string_view text, site where = site::here()) {
  auto const& f = field_of(name, where);
  auto const refuse = [&](char const* kind) {
    throw config_error("E-train-004", where, name, " is '", text, "'; it must be ", kind);
  };
  std::visit(
      [&](auto member) {
        auto& value = s.*member;
        if constexpr (std::same_as<decltype(value), std::string&>)
          value = text;
        else if constexpr (std::same_as<decltype(value), bool&>) {
          if (text != "true" && text != "false") refuse("true or false");
          value = text == "true";
        } else {
          auto parsed = value;
          auto const [end, fault] = std::from_chars(text.data(), text.data() + text.size(), parsed);
          if (fault != std::errc{} || end != text.data() + text.size())
            refuse(std::same_as<decltype(value), double&> ? "a number" : "a whole number");
          value = parsed;
        }
      },
      f.member);
  check(s, f, where);
}

/// Checks every setting by itself, and those that must fit each other. Throws config_error that says which
/// settings do not fit and how to fix it.
inline void check(settings const& s, site where = site::here()) {
  for (auto const& f : fields) check(s, f, where);
  auto const multiple_above = [](index_t value, index_t of) { return (value + of - 1) / of * of; };
  if (s.data.empty())
    throw config_error("E-train-005", where, "no data was given: set data to a text file (--data FILE)");
  if (s.run.empty())
    throw config_error("E-train-005", where, "no folder was given for the run: set run (--run FOLDER)");
  if (s.width % s.heads != 0)
    throw config_error("E-train-006", where, "width ", s.width, " is not a multiple of heads ", s.heads,
                       "; set width to ", multiple_above(s.width, s.heads), " or change heads");
  if (s.family == "llama" && s.width / s.heads % 2 != 0)
    throw config_error("E-train-006", where, "rotary positions turn pairs, and a head has ",
                       s.width / s.heads, " elements; set width to ", multiple_above(s.width, 2 * s.heads));
  if (s.key_value_heads != 0 && s.family != "llama")
    throw config_error("E-train-007", where, "key_value_heads is ", s.key_value_heads,
                       ", which only family llama has; set it to 0 or choose llama");
  if (s.key_value_heads != 0 && s.heads % s.key_value_heads != 0)
    throw config_error("E-train-006", where, "heads ", s.heads, " is not a multiple of key_value_heads ",
                       s.key_value_heads, "; set key_value_heads to a divisor of it");
  if (s.dropout != 0 && s.family == "llama")
    throw config_error("E-train-007", where, "dropout is ", s.dropout,
                       ", which family llama does not have; set it to 0 or choose gpt2");
  if (s.tokenizer == "bytes" && s.vocabulary != 0 && s.vocabulary != 256)
    throw config_error("E-train-007", where, "vocabulary is ", s.vocabulary,
                       ", and bytes have 256; leave it at 0 or choose tokenizer sentencepiece");
  if (s.tokenizer == "tokens" && s.vocabulary == 0)
    throw config_error("E-train-007", where,
                       "a token file does not say how many tokens there are; set vocabulary");
  if (s.threads != 0 && s.device != "host")
    throw config_error("E-train-007", where, "threads is ", s.threads, ", and device ", s.device,
                       " computes in none of them; leave it at 0 or choose device host");
  if (s.warm_up_steps > s.steps)
    throw config_error("E-train-008", where, "warm_up_steps ", s.warm_up_steps, " is more than steps ",
                       s.steps, "; the learning rate would never reach its height");
  if (s.decay_steps != 0 && s.schedule != "warm_up_stable_decay")
    throw config_error("E-train-007", where, "decay_steps is ", s.decay_steps,
                       ", which only schedule warm_up_stable_decay has");
  if (s.warm_up_steps + s.decay_steps > s.steps)
    throw config_error("E-train-008", where, "warm_up_steps ", s.warm_up_steps, " and decay_steps ",
                       s.decay_steps, " are more than steps ", s.steps);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// Ranks go on together or fail together. Work that only some ranks do (reading a file, writing a checkpoint)
/// may fail on one of them; the others would then wait for ever in their next collective. Here every rank
/// learns of it, and every rank throws.
///
///     together(comm, [&] { open_my_shard(); });             // any rank may throw
///     on_root(comm, [&] { write_checkpoint(); });           // rank 0 alone works
///     auto text = from_root(comm, [&] { return read_file("config.json"); });
#ifndef TESSERA_TRAIN_TOGETHER_HPP
#define TESSERA_TRAIN_TOGETHER_HPP

#include <concepts>
#include <exception>
#include <string>

namespace tessera::inline TESSERA_ABI::train {

/// The same text on every rank: the root's.
template <comm::communicator Comm>
std::string shared_text(Comm& comm, std::string text, int root = 0) {
  auto length = static_cast<index_t>(text.size());
  comm.broadcast(std::span(&length, 1), root);
  text.resize(static_cast<std::size_t>(length));
  comm.broadcast(std::as_writable_bytes(std::span(text.data(), text.size())), root);
  return text;
}

/// Every rank calls `work`. If it throws on some ranks, they throw on with their own exception, and the
/// others throw peer_failed (E-train-040) with the message of the lowest of them. Cost: one reduction of one
/// number where nothing fails. An exception that says that the communicator itself is lost is passed on
/// without another word to it.
template <comm::communicator Comm, std::invocable Work>
void together(Comm& comm, Work&& work, site where = site::here()) {
  std::exception_ptr failure;
  std::string message;
  try {
    work();
  } catch (peer_failed const&) {
    throw;
  } catch (collective_mismatch const&) {
    throw;
  } catch (stalled const&) {
    throw;
  } catch (library_error const&) {
    throw;
  } catch (std::exception const& fault) {
    failure = std::current_exception();
    message = fault.what();
  }
  auto const none = comm.size();
  auto const first = comm.all_reduce(failure ? comm.rank() : none, {.operation = comm::reduction::min});
  if (first == none) return;
  message = shared_text(comm, message, first);
  if (failure) std::rethrow_exception(failure);
  throw peer_failed("E-train-040", where, "rank ", first, " failed: ", message);
}

/// Rank 0 calls `work`; if it throws, every rank throws.
template <comm::communicator Comm, std::invocable Work>
void on_root(Comm& comm, Work&& work, site where = site::here()) {
  together(
      comm,
      [&] {
        if (comm.rank() == 0) work();
      },
      where);
}

/// Rank 0 calls `work`, and every rank gets the text that it returns.
template <comm::communicator Comm, std::invocable Work>
std::string from_root(Comm& comm, Work&& work, site where = site::here()) {
  std::string text;
  on_root(
      comm, [&] { text = work(); }, where);
  return shared_text(comm, text);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif

namespace tessera::inline TESSERA_ABI::train {

/// Every rank compares its settings with rank 0's, the allowed differences included. Throws config_error
/// (E-train-041) on the ranks that differ, naming each setting with both values, peer_failed with the same
/// words on the others. Cost: three small messages.
template <comm::communicator Comm>
void require_agreement(Comm& comm, settings const& mine, site where = site::here()) {
  auto const lines_of = [](settings const& s) {
    std::vector<std::string> lines;
    for (auto const& f : fields) lines.push_back(std::string(f.name) + " " + value_text(s, f));
    std::string allowed = "allow_difference";
    for (auto const& name : s.allow_difference) allowed += " " + name;
    lines.push_back(allowed);
    return lines;
  };
  auto const here = lines_of(mine);
  std::string joined;
  for (auto const& line : here) joined += line + '\0';
  auto rest = shared_text(comm, joined);
  together(
      comm,
      [&] {
        std::string differing;
        for (auto const& line : here) {
          auto const end = rest.find('\0');
          auto const there = rest.substr(0, end);
          rest.erase(0, end == std::string::npos ? end : end + 1);
          if (line != there)
            differing += tessera::text_of("\n  rank ", comm.rank(), ": ", line, "; rank 0: ", there);
        }
        if (!differing.empty())
          throw config_error("E-train-041", where,
                             "the ranks were started with different settings:", differing);
      },
      where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// Compares the tensors that a file holds with those that a model has, as exact sets.
#ifndef TESSERA_TRAIN_DETAIL_TENSOR_SETS_HPP
#define TESSERA_TRAIN_DETAIL_TENSOR_SETS_HPP

#if defined(TESSERA_WITH_JSON)

#include <map>
#include <string>
#include <vector>

namespace tessera::inline TESSERA_ABI::train::detail {

struct tensor_sets {
  std::vector<std::string> missing;    ///< The model has them, the file does not.
  std::vector<std::string> unexpected; ///< The file has them, the model does not.
  std::vector<std::string> misshapen;  ///< Both have them, in another shape or type: "name: F32 [2] ..."

  bool equal() const noexcept { return missing.empty() && unexpected.empty() && misshapen.empty(); }
};

inline tensor_sets compare_tensors(std::vector<io::tensor_entry> const& wanted,
                                   std::vector<io::tensor_entry> const& held) {
  std::map<std::string, io::tensor_entry const*> left;
  for (auto const& entry : held) left.emplace(entry.name, &entry);
  tensor_sets sets;
  for (auto const& entry : wanted) {
    auto const found = left.find(entry.name);
    if (found == left.end()) {
      sets.missing.push_back(entry.name);
      continue;
    }
    auto const& other = *found->second;
    if (other.type != entry.type || other.shape != entry.shape)
      sets.misshapen.push_back(tessera::text_of(entry.name, " (", io::name_of(other.type), " ",
                                                other.shape_text(), " in the file, ", io::name_of(entry.type),
                                                " ", entry.shape_text(), " in the model)"));
    left.erase(found);
  }
  for (auto const& [name, entry] : left) sets.unexpected.push_back(name);
  return sets;
}

/// Throws io_error (E-train-060) that lists all three sets, unless they are empty.
inline void require_equal_sets(tensor_sets const& sets, std::string const& path, site where) {
  if (sets.equal()) return;
  std::string text;
  auto const list = [&](char const* title, std::vector<std::string> const& names) {
    if (names.empty()) return;
    text += tessera::text_of("\n  ", title, " (", names.size(), "):");
    for (auto const& name : names) text += "\n    " + name;
  };
  list("missing", sets.missing);
  list("unexpected", sets.unexpected);
  list("of another shape or type", sets.misshapen);
  throw io_error("E-train-060", where, path, " does not hold the tensors of this model:", text,
                 "\nit was made with other model settings, or by another program");
}

} // namespace tessera::inline TESSERA_ABI::train::detail

#endif
#endif
/// Settings as JSON: one flat object with a key for each row of the settings table. Keys that are left out
/// keep their defaults; unknown keys are errors that name the nearest.
///
///     auto s = train::read_settings("config.json");
///     io::write_json("run/config.json", train::json_of(s));
#ifndef TESSERA_TRAIN_SETTINGS_JSON_HPP
#define TESSERA_TRAIN_SETTINGS_JSON_HPP

#if defined(TESSERA_WITH_JSON)

namespace tessera::inline TESSERA_ABI::train {

/// In the table's order: every setting, or those alone that decide the run's numbers.
inline io::json json_of(settings const& s, bool bound_alone = false) {
  auto object = io::json::object();
  for (auto const& f : fields)
    if (!bound_alone || f.bound == binding::refused)
      std::visit([&](auto member) { object[std::string(f.name)] = s.*member; }, f.member);
  return object;
}

/// Throws config_error for unknown keys, wrong types and values that a setting cannot take. `source` is what
/// messages call the object.
inline settings settings_of(io::json const& object, std::string const& source, site where = site::here()) {
  settings s;
  io::json_reader read(object, source, where);
  for (auto const& f : fields) {
    std::visit([&](auto member) { s.*member = read.optional(std::string(f.name), s.*member, where); },
               f.member);
    check(s, f, where);
  }
  read.finish(where);
  return s;
}

inline settings read_settings(std::string const& path, site where = site::here()) {
  return settings_of(io::read_json(path, where), path, where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
/// Everything that decides the numbers of a run, as it stands in a checkpoint's state.json. A run goes on
/// only under the same; what differs is refused by name unless the user says that this very difference is
/// meant.
///
///     require_same(saved, current, settings.allow_difference, "run/checkpoints/step-00000100");
#ifndef TESSERA_TRAIN_RUN_STATE_HPP
#define TESSERA_TRAIN_RUN_STATE_HPP

#if defined(TESSERA_WITH_JSON)

namespace tessera::inline TESSERA_ABI::train {

struct run_state {
  index_t step = 0;     ///< Steps done.
  index_t position = 0; ///< Of the sampler: samples consumed since the run began.
  settings chosen;
  std::string optimizer = "adamw";
  std::string data; ///< The corpus's fingerprint.
  index_t vocabulary = 0;
  index_t ranks = 1; ///< With zero_stage and micro_batch: the layout.
};

/// Of the settings, those that decide the numbers: where a run lies and how often it speaks is not its state.
inline io::json json_of(run_state const& s) {
  return {{"format", "tessera run 1"},
          {"step", s.step},
          {"position", s.position},
          {"optimizer", s.optimizer},
          {"data", s.data},
          {"vocabulary", s.vocabulary},
          {"ranks", s.ranks},
          {"settings", json_of(s.chosen, true)}};
}

/// Throws io_error if it is not the state of a run of this version; `source` is what messages call it.
inline run_state run_state_of(io::json const& object, std::string const& source, site where = site::here()) {
  try {
    io::json_reader read(object, source, where);
    if (read.required<std::string>("format", where) != "tessera run 1")
      throw io_error("E-train-050", where, source, " is of another format than \"tessera run 1\"");
    run_state s;
    s.step = read.required<index_t>("step", where);
    s.position = read.required<index_t>("position", where);
    s.optimizer = read.required<std::string>("optimizer", where);
    s.data = read.required<std::string>("data", where);
    s.vocabulary = read.required<index_t>("vocabulary", where);
    s.ranks = read.required<index_t>("ranks", where);
    read.section("settings", where);
    read.finish(where);
    s.chosen = settings_of(object.at("settings"), source + ": settings", where);
    return s;
  } catch (config_error const& fault) {
    throw io_error("E-train-050", where, source, " is not the state of a run: ", fault.what());
  }
}

/// One thing that differs, under the name by which it can be allowed.
struct run_difference {
  std::string name, saved, current;
};

inline std::vector<run_difference> differences(run_state const& saved, run_state const& current) {
  std::vector<run_difference> found;
  auto const compare = [&](std::string_view name, std::string a, std::string b) {
    if (a != b) found.push_back({std::string(name), std::move(a), std::move(b)});
  };
  compare("data", saved.data, current.data);
  compare("optimizer", saved.optimizer, current.optimizer);
  compare("ranks", std::to_string(saved.ranks), std::to_string(current.ranks));
  for (auto const& f : fields)
    if (f.bound == binding::refused)
      compare(f.name, value_text(saved.chosen, f), value_text(current.chosen, f));
  return found;
}

/// Throws config_error that lists every difference that is not allowed, and one for an allowed name that does
/// not exist.
inline void require_same(run_state const& saved, run_state const& current,
                         std::vector<std::string> const& allowed, std::string const& checkpoint,
                         site where = site::here()) {
  auto const is_allowed = [&](std::string const& name) {
    return std::find(allowed.begin(), allowed.end(), name) != allowed.end();
  };
  for (auto const& name : allowed)
    if (name != "data" && name != "optimizer" && name != "ranks") (void)field_of(name, where);
  std::string list, remedy;
  for (auto const& d : differences(saved, current)) {
    if (is_allowed(d.name)) continue;
    list += tessera::text_of("\n  ", d.name, ": ", d.saved, " there, ", d.current, " here");
    remedy += " --allow-difference " + d.name;
  }
  if (!list.empty())
    throw config_error("E-train-051", where, "the checkpoint ", checkpoint,
                       " belongs to a run that differs from this one:", list,
                       "\nuse another folder (--run), restore the settings, or, if it is meant, say", remedy);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
/// Checkpoints of a run: every tensor whole and by name, whatever the layout of the ranks that wrote it.
/// A folder `step-00000100/` holds model.safetensors (the weights under their Hugging Face names),
/// optimizer.safetensors (NAME.master, NAME.exp_avg, NAME.exp_avg_sq), state.json, for a learnt tokenizer
/// tokenizer.model, and the manifest that makes it a checkpoint (io/commit.hpp).
///
///     save_checkpoint(comm, "run/checkpoints", state, model.store(), replicas, {.keep = 3});
///     auto const latest = latest_checkpoint(comm, "run/checkpoints");        // "" if there is none
///     auto const state = read_state(comm, latest);
///     load_checkpoint(comm, ex, latest, model.store(), replicas);
///
/// Called by every rank. Rank 0 writes; the optimizer's shards come to it unit by unit, so that no rank ever
/// holds the whole state. Whatever goes wrong on one rank, all of them throw.
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_TRAIN_CHECKPOINT_HPP
#define TESSERA_TRAIN_CHECKPOINT_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <optional>

namespace tessera::inline TESSERA_ABI::train {

namespace detail {

template <storage_scalar T, exec::space Ex, storage_scalar G>
std::vector<io::tensor_entry> weight_entries(nn::parameter_store<Ex, T, G> const& store) {
  std::vector<io::tensor_entry> entries;
  store.for_each([&](layout::parameter const& p, layout::range) {
    entries.push_back({p.name, io::dtype_of<T>(), p.shape});
  });
  return entries;
}

/// One array of one parameter in the optimizer's file.
struct state_tensor {
  std::string name; ///< Such as "wte.weight.exp_avg".
  std::size_t unit = 0;
  layout::parameter const* whole = nullptr;
  std::size_t array = 0; ///< Number among the optimizer's arrays.
};

/// All of them in the order of the file, which is that of their names.
template <exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
std::vector<state_tensor> state_tensors(nn::parameter_store<Ex, T, G> const& store, Replicas& replicas) {
  std::vector<state_tensor> tensors;
  for (std::size_t u = 0; u < store.units(); ++u) {
    auto const arrays = replicas.optimizer(u).state();
    for (auto const& p : store.parameters(u))
      for (std::size_t a = 0; a < arrays.size(); ++a)
        tensors.push_back({tessera::text_of(p.name, ".", arrays[a].name), u, &p, a});
  }
  std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) { return a.name < b.name; });
  return tensors;
}

inline std::vector<io::tensor_entry> entries_of(std::vector<state_tensor> const& tensors) {
  std::vector<io::tensor_entry> entries;
  for (auto const& t : tensors) entries.push_back({t.name, io::dtype::f32, t.whole->shape});
  return entries;
}

/// The elements of a span, for the host to read.
template <exec::space Ex, span_in<typename Ex::memory> Span>
std::vector<typename Span::value_type> on_host(Ex& ex, Span values, site where) {
  std::vector<typename Span::value_type> copied(values.size());
  copy(ex, std::span(copied), values, where);
  return copied;
}

template <class Span>
Span part_of(Span all, layout::range part) {
  return all.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
}

/// Brings one unit's state from the ranks that keep it to rank 0. Called by every rank.
template <comm::communicator Comm, exec::space Ex, class Replicas>
class unit_gatherer {
public:
  unit_gatherer(Comm& comm, Ex& ex, Replicas& replicas) : comm_(comm), ex_(ex), replicas_(replicas) {}

  /// Array `a` of unit `u`, whole; on rank 0 alone.
  std::span<float const> whole(std::size_t u, index_t block_size, std::size_t a) {
    if (u != unit_) gather(u, block_size);
    return gathered_.empty() ? std::span<float const>{} : std::span<float const>(gathered_[a]);
  }

private:
  void gather(std::size_t u, index_t block_size) {
    unit_ = u;
    gathered_.clear();
    layout::ownership const who{comm_.rank(), comm_.size()};
    std::vector<index_t> counts;
    for (int r = 0; r < who.ranks; ++r) counts.push_back(who.of(block_size, r).size());
    using memory = typename Ex::memory;
    auto const is_root = comm_.rank() == 0;
    for (auto const& array : replicas_.optimizer(u).state()) {
      if (replicas_.options().zero == 0) {
        if (is_root) gathered_.push_back(on_host(ex_, array.values, site::here()));
        continue;
      }
      tensor<float, 1, memory> all({is_root ? block_size : 0});
      comm_.gather_v(all.span(), memory_span<float const, memory>(array.values), counts, 0);
      if (is_root) gathered_.push_back(on_host(ex_, all.span(), site::here()));
    }
  }

  Comm& comm_;
  Ex& ex_;
  Replicas& replicas_;
  std::size_t unit_ = static_cast<std::size_t>(-1);
  std::vector<std::vector<float>> gathered_;
};

template <exec::space Ex, storage_scalar T, storage_scalar G>
void write_weights(io::commit_writer& commit, Ex& ex, nn::parameter_store<Ex, T, G> const& store,
                   site where) {
  std::map<std::string, layout::range> places;
  store.for_each([&](layout::parameter const& p, layout::range r) { places[p.name] = r; });
  io::safetensors_writer file(commit.path("model.safetensors"), weight_entries<T>(store), {{"format", "pt"}},
                              where);
  auto const order = file.entries();
  for (auto const& entry : order) {
    auto const values = on_host(ex, part_of(store.weights(), places.at(entry.name)), where);
    file.write(entry.name, std::as_bytes(std::span(values)), where);
  }
  commit.add("model.safetensors", file.commit(where));
}

} // namespace detail

struct save_options {
  index_t keep = 3;              ///< Older checkpoints are deleted once this one is complete.
  std::string tokenizer_model{}; ///< Of a learnt tokenizer; rank 0's counts.
};

/// Writes the checkpoint of `state.step` and returns its folder. Throws io_error on all ranks if the disk is
/// full or the like, numeric_error if a weight is not finite: what stood there before is kept.
template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
std::string save_checkpoint(Comm& comm, Ex& ex, std::string const& folder, run_state const& state,
                            nn::parameter_store<Ex, T, G> const& store, Replicas& replicas,
                            save_options const& options = {}, site where = site::here()) {
  std::optional<io::commit_writer> commit;
  std::optional<io::safetensors_writer> file;
  auto const tensors = detail::state_tensors(store, replicas);
  on_root(
      comm,
      [&] {
        if (!ops::all_finite(ex,
                             view<T const, 1, typename Ex::memory>(store.weights().data(), {store.size()})))
          throw numeric_error("E-train-061", where, "a weight is not finite after step ", state.step,
                              "; no checkpoint is made of it");
        commit.emplace(folder, state.step, where);
        detail::write_weights(*commit, ex, store, where);
        file.emplace(commit->path("optimizer.safetensors"), detail::entries_of(tensors),
                     std::map<std::string, std::string>{{"format", "pt"}}, where);
      },
      where);

  // Every rank takes part in every gather, also after rank 0 could not write: nobody may be left waiting.
  detail::unit_gatherer<Comm, Ex, Replicas> gatherer(comm, ex, replicas);
  std::exception_ptr failure;
  for (auto const& t : tensors) {
    auto const whole = gatherer.whole(t.unit, store.unit_range(t.unit).size(), t.array);
    if (comm.rank() != 0 || failure) continue;
    try {
      file->write(t.name,
                  std::as_bytes(whole.subspan(static_cast<std::size_t>(t.whole->offset),
                                              static_cast<std::size_t>(t.whole->size))),
                  where);
    } catch (error const&) {
      failure = std::current_exception();
    }
  }

  std::string path;
  on_root(
      comm,
      [&] {
        if (failure) std::rethrow_exception(failure);
        commit->add("optimizer.safetensors", file->commit(where));
        if (!options.tokenizer_model.empty())
          io::write_file(commit->path("tokenizer.model"), options.tokenizer_model, where);
        io::write_json(commit->path("state.json"), json_of(state), where);
        path = commit->commit(where).path;
        io::prune_commits(folder, options.keep, where);
      },
      where);
  return shared_text(comm, path);
}

/// The folder of the newest checkpoint, every byte of it checked; empty if there is none. What a killed run
/// left half done is cleared away. Throws io_error on all ranks if the newest is cut or altered: going on
/// from an older one is for a person to decide.
template <comm::communicator Comm>
std::string latest_checkpoint(Comm& comm, std::string const& folder, site where = site::here()) {
  return from_root(
      comm,
      [&]() -> std::string {
        io::recover_commits(folder, where);
        auto const found = io::latest_commit(folder, where);
        if (!found.refused.empty())
          throw io_error(
              "E-train-062", where, "the newest checkpoint cannot be used: ", found.refused.front(),
              found.checkpoint
                  ? "\nto go on from " + found.checkpoint->path + " instead, remove the newer folder"
                  : std::string("\nthere is no other; to begin again, choose another folder (--run)"));
        return found.checkpoint ? found.checkpoint->path : std::string{};
      },
      where);
}

/// The folder of the newest whole checkpoint below `run`, or `run` itself where that is one: for programs
/// that only read, also while the run goes on. Called by one process. Throws io_error if there is none.
inline std::string readable_checkpoint(std::string const& run, site where = site::here()) {
  if (io::file_exists(run + "/manifest.json")) {
    io::check_files(io::read_manifest(run + "/manifest.json", where), run, where);
    return run;
  }
  auto const found = io::latest_commit(run + "/checkpoints", where);
  std::string refused;
  for (auto const& why : found.refused) refused += "\n  " + why;
  if (!found.checkpoint)
    throw io_error("E-train-063", where, run, " holds no checkpoint that can be read", refused);
  return found.checkpoint->path;
}

/// The state of a checkpoint. Throws io_error on all ranks if there is none.
template <comm::communicator Comm>
run_state read_state(Comm& comm, std::string const& checkpoint, site where = site::here()) {
  run_state state;
  auto const path = checkpoint + "/state.json";
  together(
      comm, [&] { state = run_state_of(io::read_json(path, where), path, where); }, where);
  return state;
}

/// Reads the weights of a model, all ranks of them all. Throws io_error that lists the missing, unexpected
/// and misshapen tensors as exact sets.
template <exec::space Ex, storage_scalar T, storage_scalar G>
void load_weights(Ex& ex, std::string const& checkpoint, nn::parameter_store<Ex, T, G>& store,
                  site where = site::here()) {
  io::safetensors_file const file(checkpoint + "/model.safetensors", where);
  detail::require_equal_sets(detail::compare_tensors(detail::weight_entries<T>(store), file.entries()),
                             file.path(), where);
  store.for_each([&](layout::parameter const& p, layout::range r) {
    std::vector<T> values(static_cast<std::size_t>(p.size));
    file.read(p.name, std::span(values), where);
    copy(ex, detail::part_of(store.weights(), r), std::span<T const>(values), where);
  });
}

/// Reads weights and optimizer state into whatever layout the ranks have now: each takes the part it keeps.
/// After it the run goes on with the same bits.
template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
void load_checkpoint(Comm& comm, Ex& ex, std::string const& checkpoint, nn::parameter_store<Ex, T, G>& store,
                     Replicas& replicas, site where = site::here()) {
  together(
      comm,
      [&] {
        load_weights(ex, checkpoint, store, where);
        replicas.start_from_weights(ex);
        io::safetensors_file const file(checkpoint + "/optimizer.safetensors", where);
        auto const tensors = detail::state_tensors(store, replicas);
        detail::require_equal_sets(detail::compare_tensors(detail::entries_of(tensors), file.entries()),
                                   file.path(), where);
        for (auto const& t : tensors) {
          auto const kept = replicas.owned(t.unit);
          auto const shared = layout::intersection(t.whole->where(), kept);
          if (shared.empty()) continue;
          std::vector<float> values(static_cast<std::size_t>(shared.size()));
          file.read_part(t.name, shared.begin - t.whole->offset, std::span(values), where);
          copy(ex,
               detail::part_of(replicas.optimizer(t.unit).state()[t.array].values,
                               {shared.begin - kept.begin, shared.end - kept.begin}),
               std::span<float const>(values), where);
        }
      },
      where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
/// The settings of a run from a command line: each row of the settings table is an option, `--config FILE`
/// reads JSON first, and what is said on the command line wins. --help is made from the same table.
///
///     auto parsed = command_line(argc, argv, {.program = "train_gpt", .purpose = "Trains ..."});
///     if (!parsed) return 0;                              // --help was asked for and printed
#ifndef TESSERA_TRAIN_COMMAND_LINE_HPP
#define TESSERA_TRAIN_COMMAND_LINE_HPP

#if defined(TESSERA_WITH_CLI11) && defined(TESSERA_WITH_JSON)

#include <cstdio>
#include <optional>

#include <CLI/CLI.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct command_line_text {
  std::string program;
  std::string purpose;
  std::string examples;
};

/// Returns nothing when help was asked for: it is printed to `help_to`, or nowhere if that is null (the ranks
/// that do not speak). Throws config_error for unknown options, naming the nearest, and for values that a
/// setting cannot take; io_error for a config file that cannot be read.
inline std::optional<settings> command_line(int argc, char const* const* argv, command_line_text const& text,
                                            std::FILE* help_to = stdout, site where = site::here()) {
  CLI::App app(text.purpose, text.program);
  app.footer(
      "The folder given by --run holds everything a run leaves behind. Starting the same command again\n"
      "goes on from its latest checkpoint.\n" +
      text.examples);
  app.allow_extras();
  app.get_formatter()->column_width(34);

  std::string config;
  std::vector<std::string> allowed;
  app.add_option("--config", config,
                 "JSON file with any of the settings below, named with underscores; the\n"
                 "command line overrides it.")
      ->type_name("FILE");
  app.add_option("--allow-difference", allowed,
                 "Resume although this setting (or 'data') differs from the checkpoint's. May be repeated.")
      ->type_name("NAME");

  settings const defaults;
  std::vector<std::pair<CLI::Option*, std::string>> given(std::size(fields));
  auto const hyphenated = [](std::string_view name) {
    std::string option = "--" + std::string(name);
    for (auto& c : option) c = c == '_' ? '-' : c;
    return option;
  };
  for (std::size_t i = 0; i < std::size(fields); ++i) {
    auto const& f = fields[i];
    constexpr char const* kinds[] = {"TEXT", "INTEGER", "NUMBER", "true|false"};
    given[i].first = app.add_option(hyphenated(f.name), given[i].second, std::string(f.help))
                         ->type_name(f.choices.empty() ? kinds[f.member.index()] : std::string(f.choices))
                         ->default_str(value_text(defaults, f))
                         ->group(std::string(f.group));
  }

  try {
    app.parse(argc, argv);
  } catch (CLI::CallForHelp const&) {
    if (help_to != nullptr) std::fprintf(help_to, "%s", app.help().c_str());
    return std::nullopt;
  } catch (CLI::ParseError const& fault) {
    throw config_error("E-train-009", where, "the command line cannot be understood: ", fault.what());
  }
  if (auto const extras = app.remaining(); !extras.empty()) {
    std::vector<std::string> options{"--config", "--allow-difference", "--help"};
    for (auto const& f : fields) options.push_back(hyphenated(f.name));
    throw config_error(
        "E-train-009", where, "there is no option '", extras[0], "'; did you mean '",
        detail::nearest(extras[0], std::vector<std::string_view>(options.begin(), options.end())),
        "'? --help lists all");
  }

  auto chosen = config.empty() ? settings{} : read_settings(config, where);
  for (std::size_t i = 0; i < std::size(fields); ++i)
    if (given[i].first->count() > 0) set(chosen, fields[i].name, given[i].second, where);
  chosen.allow_difference = allowed;
  return chosen;
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
/// The tokenizer of a run, chosen by name when the program runs: bytes, or sentencepiece with the model that
/// was learnt from the text. With tokenizer "tokens" there is no text, and asking for some is an error.
///
///     auto const tokenizer = text_tokenizer("sentencepiece", model_bytes);
///     tokenizer.decode(tokenizer.encode("In the beginning"));
#ifndef TESSERA_TRAIN_TEXT_TOKENIZER_HPP
#define TESSERA_TRAIN_TEXT_TOKENIZER_HPP

#if defined(TESSERA_WITH_SENTENCEPIECE)

#include <variant>

namespace tessera::inline TESSERA_ABI::train {

class text_tokenizer {
  template <class F>
  auto with_text(site where, F&& f) const {
    if (auto const* bytes = std::get_if<data::byte_tokenizer>(&held_)) return f(*bytes);
    if (auto const* learnt = std::get_if<data::sentencepiece_tokenizer>(&held_)) return f(*learnt);
    throw config_error("E-train-046", where,
                       "this run learns from a token file; it has no text to read or write");
  }

public:
  text_tokenizer() = default;
  /// `model` is sentencepiece's; the others have none. Throws config_error for a name that is no tokenizer,
  /// io_error for bytes that are no model.
  text_tokenizer(std::string_view name, std::string model, site where = site::here()) {
    if (name == "bytes")
      held_ = data::byte_tokenizer();
    else if (name == "sentencepiece")
      held_.emplace<data::sentencepiece_tokenizer>(std::move(model), "the run's tokenizer.model", where);
    else if (name != "tokens")
      throw config_error("E-train-045", where, "there is no tokenizer '", name, "'");
  }
  explicit text_tokenizer(data::sentencepiece_tokenizer learnt) : held_(std::move(learnt)) {}

  /// False for "tokens": there is no text.
  bool has_text() const noexcept { return held_.index() != 0; }

  std::vector<std::int32_t> encode(std::string_view text, site where = site::here()) const {
    return with_text(where, [&](auto const& tokenizer) { return tokenizer.encode(text); });
  }
  std::string decode(std::span<std::int32_t const> tokens, site where = site::here()) const {
    return with_text(where, [&](auto const& tokenizer) { return tokenizer.decode(tokens); });
  }
  index_t vocabulary_size(site where = site::here()) const {
    return with_text(where, [](auto const& tokenizer) { return tokenizer.vocabulary_size(); });
  }
  /// The bytes that, with the name, make this tokenizer again.
  std::string model() const {
    auto const* const learnt = std::get_if<data::sentencepiece_tokenizer>(&held_);
    return learnt == nullptr ? std::string{} : learnt->model();
  }
  /// How many bytes of text each token stands for.
  std::vector<index_t> bytes_of_tokens(site where = site::here()) const {
    std::vector<index_t> bytes(static_cast<std::size_t>(vocabulary_size(where)));
    for (std::size_t token = 0; token < bytes.size(); ++token) {
      auto const one = static_cast<std::int32_t>(token);
      bytes[token] = static_cast<index_t>(decode(std::span(&one, 1), where).size());
    }
    return bytes;
  }

private:
  std::variant<std::monostate, data::byte_tokenizer, data::sentencepiece_tokenizer> held_;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
/// What a run learns from, prepared once and opened by every rank: the text as a file of tokens, cut into
/// training and validation samples, with the tokenizer and the entropies of the simplest models.
///
///     auto const text = open_corpus(comm, settings);
///     text.training.fill(order.sample_at(position), tokens, targets);
///     text.statistics.bigram_entropy;             // nats per byte, to compare the loss with
///
/// Rank 0 tokenizes into `RUN/data/`, where a resumed run finds the tokens again.
/// Exists under TESSERA_WITH_JSON, TESSERA_WITH_XXHASH and TESSERA_WITH_SENTENCEPIECE.
#ifndef TESSERA_TRAIN_CORPUS_HPP
#define TESSERA_TRAIN_CORPUS_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH) && defined(TESSERA_WITH_SENTENCEPIECE)

#include <optional>

namespace tessera::inline TESSERA_ABI::train {

namespace detail {

/// What rank 0 tells the others about the prepared files.
struct prepared_corpus {
  std::string tokens;               ///< Path of the token file.
  std::string model;                ///< Path of the tokenizer's model; empty: none.
  index_t vocabulary = 0;           ///< Of the model that is to be trained.
  data::text_statistics statistics; ///< bytes 0: a token file, whose text is not known.
};

inline prepared_corpus prepare_corpus(settings const& s, site where) {
  if (s.tokenizer == "tokens") return {s.data, {}, s.vocabulary, {}};
  prepared_corpus prepared{s.run + "/data/tokens.bin", {}, 256, {}};
  auto const text = io::mapped_file(s.data, where); // before a folder is made for a text that is not there
  io::make_folders(s.run + "/data", where);
  io::remove_leftovers(s.run + "/data", where); // a killed run's
  if (s.tokenizer == "bytes") {
    (void)data::prepare_text(s.data, prepared.tokens, data::byte_tokenizer(), where);
  } else {
    prepared.model = s.run + "/data/tokenizer.model";
    prepared.vocabulary = s.vocabulary == 0 ? 2048 : s.vocabulary;
    auto const tokenizer =
        data::prepare_sentencepiece(s.data, prepared.model, {.vocabulary_size = prepared.vocabulary}, where);
    (void)data::prepare_text(s.data, prepared.tokens, tokenizer, where);
  }
  prepared.statistics = data::text_statistics_of(text.text());
  return prepared;
}

} // namespace detail

struct corpus {
  data::token_file file;
  data::token_dataset training;
  data::token_dataset validation;
  text_tokenizer tokenizer;
  index_t vocabulary = 0;
  data::text_statistics statistics; ///< Of the whole text; bytes 0 where there is none.
  /// Bytes of text for each token to be predicted; 0 where there is no text.
  double training_bytes_per_token = 0;
  double validation_bytes_per_token = 0;
  /// Of the tokens, in their order.
  std::string fingerprint;
};

namespace detail {

/// Over the tokens that are predicted: all but the first.
inline double bytes_per_token(data::token_dataset const& part, std::vector<index_t> const& bytes_of_tokens) {
  auto const predicted = part.tokens().slice(1, part.tokens().size() - 1);
  index_t sum = 0;
  for (index_t n = 0; n < predicted.size(); ++n) sum += bytes_of_tokens[predicted[n]];
  return static_cast<double>(sum) / static_cast<double>(predicted.size());
}

inline corpus open_prepared(prepared_corpus const& prepared, settings const& s, site where) {
  data::token_file file(prepared.tokens, where);
  auto const all = data::token_dataset(
      file.tokens(), {.sequence_length = s.sequence_length, .vocabulary_size = prepared.vocabulary}, where);
  all.check(where);
  auto const parts = all.split(s.validation_share, where);
  auto model =
      prepared.model.empty() ? std::string{} : std::string(io::mapped_file(prepared.model, where).text());
  corpus opened{std::move(file),
                parts.training,
                parts.validation,
                text_tokenizer(s.tokenizer, std::move(model), where),
                prepared.vocabulary,
                prepared.statistics,
                0,
                0,
                io::hexadecimal(data::fingerprint_of(all.tokens()))};
  if (opened.tokenizer.has_text()) {
    auto const bytes = opened.tokenizer.bytes_of_tokens(where);
    opened.training_bytes_per_token = bytes_per_token(opened.training, bytes);
    opened.validation_bytes_per_token = bytes_per_token(opened.validation, bytes);
  }
  return opened;
}

} // namespace detail

/// Called by every rank of `comm`. Throws on all of them if the text is missing, empty or too short, or holds
/// a token outside the vocabulary.
template <comm::communicator Comm>
corpus open_corpus(Comm& comm, settings const& s, site where = site::here()) {
  detail::prepared_corpus prepared;
  on_root(
      comm, [&] { prepared = detail::prepare_corpus(s, where); }, where);
  prepared.tokens = shared_text(comm, prepared.tokens);
  prepared.model = shared_text(comm, prepared.model);
  auto& [bytes, unigram, bigram] = prepared.statistics;
  comm.broadcast(std::span(&prepared.vocabulary, 1), 0);
  comm.broadcast(std::span(&bytes, 1), 0);
  comm.broadcast(std::span(&unigram, 1), 0);
  comm.broadcast(std::span(&bigram, 1), 0);
  std::optional<corpus> opened;
  together(
      comm, [&] { opened.emplace(detail::open_prepared(prepared, s, where)); }, where);
  return std::move(*opened);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
/// Continues a list of tokens with a trained model.
///
///     auto more = train::generate(ex, decoder, prompt, 200, {.temperature = 0.8}, philox(seed),
///                                 [&](std::int32_t token) { print(token); });
///
/// Cost: one pass over the weights a token. When the model's context is full, its second half is fed again
/// and the rest forgotten.
#ifndef TESSERA_TRAIN_GENERATE_HPP
#define TESSERA_TRAIN_GENERATE_HPP

/// Chooses the next token from a model's logits: greedily at temperature 0, else at random from the softmax
/// of logits / temperature, cut to the `top_k` most probable tokens and to the smallest set of them whose
/// probabilities reach `top_p` (Holtzman et al., "The curious case of neural text degeneration", 2019). The
/// random number belongs to the token's index, so that a continuation does not depend on how it was made.
///
///     philox random(seed);
///     auto next = sample_token(logits, {.temperature = 0.8, .top_k = 50}, random, position);
#ifndef TESSERA_TRAIN_SAMPLE_HPP
#define TESSERA_TRAIN_SAMPLE_HPP

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

namespace tessera::inline TESSERA_ABI::train {

struct sampling {
  double temperature = 1; ///< Below 1: bolder; 0: always the most probable token.
  index_t top_k = 0;      ///< 0: all tokens.
  double top_p = 1;       ///< In (0, 1]; 1: all tokens.
};

/// Throws config_error for impossible options, numeric_error where no logit is finite or one is NaN.
inline std::int32_t sample_token(std::span<float const> logits, sampling const& options, philox const& random,
                                 std::uint64_t index, site where = site::here()) {
  if (!(options.temperature >= 0) || options.top_k < 0 || !(options.top_p > 0 && options.top_p <= 1))
    throw config_error("E-train-030", where, "temperature ", options.temperature, ", top_k ", options.top_k,
                       ", top_p ", options.top_p, ": the first two must be 0 or more, and top_p in (0, 1]");
  if (logits.empty()) throw size_error("E-train-031", where, "there are no logits to choose from");
  auto const first = std::max_element(logits.begin(), logits.end());
  auto const has_nan = std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  if (has_nan || !std::isfinite(*first))
    throw numeric_error("E-train-032", where, "the model's logits are not finite at token ", index,
                        "; the weights are broken");
  if (options.temperature == 0) return narrow<std::int32_t>(first - logits.begin());

  // Most probable first; equal logits in the order of their numbers, so that the order is one.
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  auto const logit = [&](std::int32_t token) { return logits[static_cast<std::size_t>(token)]; };
  auto const kept =
      options.top_k == 0 ? order.size() : (std::min)(order.size(), static_cast<std::size_t>(options.top_k));
  auto const last = order.begin() + static_cast<std::ptrdiff_t>(kept);
  std::partial_sort(order.begin(), last, order.end(),
                    [&](auto a, auto b) { return logit(a) != logit(b) ? logit(a) > logit(b) : a < b; });
  order.erase(last, order.end());

  std::vector<double> until(order.size()); // probability, not normalised, of the tokens up to each one
  auto total = 0.0;
  for (std::size_t i = 0; i < order.size(); ++i)
    until[i] = total += std::exp((static_cast<double>(logit(order[i])) - *first) / options.temperature);
  auto const nucleus = std::lower_bound(until.begin(), until.end(), options.top_p * total);
  auto const end = nucleus == until.end() ? until.end() : nucleus + 1;

  auto const drawn = random.uniform(index) * *(end - 1);
  auto const chosen = std::upper_bound(until.begin(), end, drawn);
  return order[static_cast<std::size_t>((chosen == end ? end - 1 : chosen) - until.begin())];
}

} // namespace tessera::inline TESSERA_ABI::train

#endif

namespace tessera::inline TESSERA_ABI::train {

/// The `count` tokens that follow `prompt`; `seen` is called with each as soon as it is chosen. Only the end
/// of a prompt that is longer than the context is used. Throws size_error for an empty prompt.
template <exec::space Ex, storage_scalar T, storage_scalar G, std::invocable<std::int32_t> Seen>
std::vector<std::int32_t>
generate(Ex& ex, nn::decoder<Ex, T, G>& decoder, std::vector<std::int32_t> const& prompt, index_t count,
         sampling const& how, philox const& random, Seen&& seen, site where = site::here()) {
  if (prompt.empty())
    throw size_error("E-train-033", where, "there is no prompt to continue; give one token or more");
  auto text = prompt;
  exec::staged<std::int32_t, 2, Ex> tokens(ex, {1, decoder.capacity()}, {}, where);
  std::vector<float> logits;
  auto const feed_last = [&](index_t count) {
    std::copy(text.end() - static_cast<std::ptrdiff_t>(count), text.end(), tokens.host().data());
    auto const found = decoder.feed(ex, tokens.upload(ex).slice(1, 0, count), where)[0].span();
    logits.resize(found.size());
    copy(ex, std::span<float>(logits), found, where);
  };
  decoder.reset();
  auto waiting = (std::min)(static_cast<index_t>(text.size()), decoder.capacity()); // not yet fed
  for (index_t n = 0; n < count; ++n) {
    if (decoder.length() + waiting > decoder.capacity()) {
      decoder.reset();
      waiting = (decoder.capacity() + 1) / 2;
    }
    feed_last(waiting);
    waiting = 1;
    text.push_back(sample_token(logits, how, random, static_cast<std::uint64_t>(n), where));
    seen(text.back());
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// The loss curves of a run as one self-contained SVG: training and validation loss over the steps, with
/// level lines to compare with, such as the entropies that a unigram and a bigram model of the text reach.
///
///     auto svg = loss_curve({.title = "King James text", .training = points, .validation = others,
///                            .levels = {{"unigram", 3.05}, {"bigram", 2.32}}});
#ifndef TESSERA_TRAIN_LOSS_CURVE_HPP
#define TESSERA_TRAIN_LOSS_CURVE_HPP

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::inline TESSERA_ABI::train {

struct curve_point {
  double step = 0;
  double loss = 0;
};

struct curve_level {
  std::string name;
  double loss = 0;
};

struct loss_curve_options {
  std::string title = "Loss";
  std::string subtitle{};
  std::string unit = "nats per byte";
  std::vector<curve_point> training{};
  std::vector<curve_point> validation{};
  std::vector<curve_level> levels{};
};

namespace detail {

/// A step of 1, 2 or 5 times a power of ten that cuts `length` into about `wanted` parts.
inline double tick_step(double length, int wanted) {
  auto const rough = length / wanted;
  auto const power = std::pow(10.0, std::floor(std::log10(rough)));
  auto const digit = rough / power;
  return power * (digit < 1.5 ? 1 : digit < 3.5 ? 2 : digit < 7.5 ? 5 : 10);
}

inline std::string escaped(std::string_view text) {
  std::string safe;
  for (char c : text) {
    if (c == '<')
      safe += "&lt;";
    else if (c == '>')
      safe += "&gt;";
    else if (c == '&')
      safe += "&amp;";
    else if (c == '"')
      safe += "&quot;";
    else if (static_cast<unsigned char>(c) >= 0x20)
      safe += c;
  }
  return safe;
}

template <class... Numbers>
std::string formatted(char const* form, Numbers... numbers) {
  char text[512];
  std::snprintf(text, sizeof text, form, numbers...);
  return text;
}

/// Mean of each of at most `most` stretches of the curve, so that a long run draws as fast as a short one.
inline std::vector<curve_point> thinned(std::vector<curve_point> const& points, std::size_t most) {
  std::vector<curve_point> finite, result;
  for (auto const& p : points)
    if (std::isfinite(p.loss) && std::isfinite(p.step)) finite.push_back(p);
  auto const stretch = (finite.size() + most - 1) / most;
  for (std::size_t begin = 0; begin < finite.size(); begin += stretch) {
    auto const end = (std::min)(begin + stretch, finite.size());
    curve_point mean;
    for (auto i = begin; i < end; ++i) mean.step += finite[i].step, mean.loss += finite[i].loss;
    result.push_back(
        {mean.step / static_cast<double>(end - begin), mean.loss / static_cast<double>(end - begin)});
  }
  return result;
}

/// The trend in the noise: the mean of the points around each, fewer towards both ends, where the curve is
/// steep or its last value matters.
inline std::vector<curve_point> smoothed(std::vector<curve_point> const& points) {
  auto result = points;
  std::vector<double> until(points.size() + 1, 0.0);
  for (std::size_t i = 0; i < points.size(); ++i) until[i + 1] = until[i] + points[i].loss;
  for (std::size_t i = 0; i < points.size(); ++i) {
    auto const reach = (std::min)({i / 8, points.size() / 60, points.size() - 1 - i});
    result[i].loss = (until[i + reach + 1] - until[i - reach]) / static_cast<double>(2 * reach + 1);
  }
  return result;
}

/// Maps (step, loss) into the drawing.
struct chart_frame {
  double left = 72, right = 814, top = 84, bottom = 470;
  double first_step = 0, last_step = 1, low = 0, high = 1;

  double x(double step) const {
    return left + (step - first_step) / (last_step - first_step) * (right - left);
  }
  double y(double loss) const { return bottom - (loss - low) / (high - low) * (bottom - top); }

  std::string path(std::vector<curve_point> const& points) const {
    std::string d;
    for (auto const& p : points) d += formatted("%s%.1f,%.1f", d.empty() ? "M" : " ", x(p.step), y(p.loss));
    return d;
  }
};

inline std::string chart_axes(chart_frame const& f, std::string const& unit) {
  std::string svg;
  auto const loss_step = tick_step(f.high - f.low, 6);
  for (auto k = std::ceil(f.low / loss_step - 1e-9); k * loss_step <= f.high * (1 + 1e-9); ++k) {
    auto const y = f.y(k * loss_step);
    svg += formatted("<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", f.left, y,
                     f.right, y);
    svg += formatted("<text class=\"tick\" text-anchor=\"end\" x=\"%.1f\" y=\"%.1f\">%.4g</text>\n",
                     f.left - 10, y + 4, k * loss_step);
  }
  auto const step_step = (std::max)(1.0, tick_step(f.last_step - f.first_step, 8));
  for (auto k = std::ceil(f.first_step / step_step); k * step_step <= f.last_step; ++k) {
    auto const x = f.x(k * step_step);
    svg += formatted("<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", x, f.bottom,
                     x, f.bottom + 5);
    svg += formatted("<text class=\"tick\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">%.10g</text>\n", x,
                     f.bottom + 21, k * step_step);
  }
  svg += formatted("<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", f.left,
                   f.bottom, f.right, f.bottom);
  svg += formatted("<text class=\"name\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">step</text>\n",
                   (f.left + f.right) / 2, f.bottom + 46);
  auto const middle = (f.top + f.bottom) / 2;
  return svg +
         formatted(
             "<text class=\"name\" text-anchor=\"middle\" transform=\"translate(22,%.1f) rotate(-90)\">",
             middle) +
         escaped(unit) + "</text>\n";
}

/// Labels at the right border, moved apart so that none covers another.
struct border_label {
  double y;
  std::string style, text;
};
inline std::string border_labels(std::vector<border_label> labels, double x, double bottom) {
  std::sort(labels.begin(), labels.end(), [](auto const& a, auto const& b) { return a.y < b.y; });
  constexpr auto apart = 17.0;
  for (std::size_t i = 1; i < labels.size(); ++i)
    labels[i].y = (std::max)(labels[i].y, labels[i - 1].y + apart);
  for (auto i = labels.size(); i-- > 0;) {
    auto const limit = i + 1 < labels.size() ? labels[i + 1].y - apart : bottom;
    labels[i].y = (std::min)(labels[i].y, limit);
  }
  std::string svg;
  for (auto const& label : labels)
    svg += "<text class=\"" + label.style + "\"" + formatted(" x=\"%.1f\" y=\"%.1f\">", x, label.y + 4) +
           escaped(label.text) + "</text>\n";
  return svg;
}

} // namespace detail

/// The picture, 960 by 540. Points that are not finite are left out; with no points at all the frame remains.
inline std::string loss_curve(loss_curve_options const& options) {
  using detail::formatted;
  auto const training = detail::thinned(options.training, 1500);
  auto const validation = detail::thinned(options.validation, 300);
  auto const trend = detail::smoothed(training);

  detail::chart_frame frame;
  auto low = HUGE_VAL, high = -HUGE_VAL, last = 1.0;
  auto const see = [&](double step, double loss) {
    low = (std::min)(low, loss);
    high = (std::max)(high, loss);
    last = (std::max)(last, step);
  };
  for (auto const& p : training) see(p.step, p.loss);
  for (auto const& p : validation) see(p.step, p.loss);
  for (auto const& level : options.levels) see(0, level.loss);
  if (!(low <= high)) low = 0, high = 1;
  auto const margin = 0.06 * (std::max)(high - low, 1e-3);
  frame.low = (std::max)(0.0, low - margin);
  frame.high = high + margin;
  frame.last_step = last;

  std::string svg =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 540\" width=\"960\" height=\"540\" "
      "role=\"img\" font-family=\"Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n<title>" +
      detail::escaped(options.title) +
      "</title>\n<style>\n"
      ".title{font-size:20px;font-weight:600;fill:#1b2733}.sub{font-size:13px;fill:#5b6b7b}\n"
      ".tick{font-size:12px;fill:#5b6b7b}.name{font-size:13px;fill:#36475a}\n"
      ".grid{stroke:#e6ebf0;stroke-width:1}.axis{stroke:#93a1b0;stroke-width:1}\n"
      ".raw{fill:none;stroke:#2f6fde;stroke-width:1;opacity:.25;stroke-linejoin:round}\n"
      ".train{fill:none;stroke:#2f6fde;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}\n"
      ".valid{fill:none;stroke:#e0702a;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}\n"
      ".dot{fill:#fff;stroke:#e0702a;stroke-width:1.8}\n"
      ".level{stroke:#7d8a97;stroke-width:1.3;stroke-dasharray:6 5}\n"
      ".l-train{font-size:13px;font-weight:600;fill:#2f6fde}.l-valid{font-size:13px;font-weight:600;fill:#"
      "e0702a}\n"
      ".l-level{font-size:12px;fill:#5b6b7b}\n</style>\n"
      "<rect width=\"960\" height=\"540\" fill=\"#fff\"/>\n";
  svg += "<text class=\"title\" x=\"24\" y=\"36\">" + detail::escaped(options.title) + "</text>\n";
  svg += "<text class=\"sub\" x=\"24\" y=\"58\">" + detail::escaped(options.subtitle) + "</text>\n";
  svg += detail::chart_axes(frame, options.unit);

  std::vector<detail::border_label> labels;
  for (auto const& level : options.levels) {
    if (!std::isfinite(level.loss)) continue;
    auto const y = frame.y(level.loss);
    svg += formatted("<line class=\"level\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", frame.left,
                     y, frame.right, y);
    labels.push_back({y, "l-level", level.name + formatted(" %.3f", level.loss)});
  }
  if (!training.empty()) {
    svg += "<path class=\"raw\" d=\"" + frame.path(training) + "\"/>\n";
    svg += "<path class=\"train\" d=\"" + frame.path(trend) + "\"/>\n";
    labels.push_back({frame.y(trend.back().loss), "l-train", formatted("training %.3f", trend.back().loss)});
  }
  if (!validation.empty()) {
    svg += "<path class=\"valid\" d=\"" + frame.path(validation) + "\"/>\n";
    if (validation.size() <= 60)
      for (auto const& p : validation)
        svg += formatted("<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.4\"/>\n", frame.x(p.step),
                         frame.y(p.loss));
    labels.push_back(
        {frame.y(validation.back().loss), "l-valid", formatted("validation %.3f", validation.back().loss)});
  }
  return svg + detail::border_labels(labels, frame.right + 10, frame.bottom) + "</svg>\n";
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// What this machine's processor or device can do at most: the rate of a large matrix product, measured here
/// and now, to compare a run with. The best of several tries counts, since everything else on the machine
/// only slows it.
///
///     auto const peak = train::matrix_peak<bf16>(ex);      // operations a second, of this rank's space
///
/// Cost: about half a second. Ranks that share a machine measure at the same time, so that their sum is what
/// the machine gives to all of them at once.
#ifndef TESSERA_TRAIN_MACHINE_HPP
#define TESSERA_TRAIN_MACHINE_HPP

#include <algorithm>
#include <chrono>

namespace tessera::inline TESSERA_ABI::train {

struct peak_options {
  index_t size = 1024; ///< The matrices are square, and doubled while a product ends within `seconds`.
  index_t largest = 8192;
  double seconds = 1e-3;
  int tries = 5;
};

namespace detail {

template <storage_scalar T, exec::space Ex>
double product_rate(Ex& ex, index_t n, int tries) {
  tensor<T, 2, typename Ex::memory> a({n, n}), b({n, n}), c({n, n});
  ops::fill(ex, a.view().template reshape<1>({n * n}), 0.5f);
  ops::fill(ex, b.view().template reshape<1>({n * n}), 0.25f);
  auto fastest = 0.0;
  for (int i = 0; i <= tries; ++i) {
    ex.synchronize();
    auto const start = std::chrono::steady_clock::now();
    ops::matmul(ex, c.view(), a.view(), b.view());
    ex.synchronize();
    auto const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    // The first one prepares kernels and touches memory.
    if (i > 0 && seconds > 0) fastest = (std::max)(fastest, 2.0 * static_cast<double>(n * n * n) / seconds);
  }
  return fastest;
}

/// In matrices large enough for the time of a product to be that of its arithmetic.
template <storage_scalar T, exec::space Ex>
double product_rate(Ex& ex, peak_options options) {
  auto rate = product_rate<T>(ex, options.size, options.tries);
  for (auto n = options.size; 2 * n <= options.largest; n *= 2) {
    if (2.0 * static_cast<double>(n * n * n) > rate * options.seconds) break;
    rate = product_rate<T>(ex, 2 * n, options.tries);
  }
  return rate;
}

} // namespace detail

/// Operations a second of the faster of a product in T and one in fp32: without 16-bit instructions the
/// latter is what the processor can do.
template <storage_scalar T, exec::space Ex>
double matrix_peak(Ex& ex, peak_options options = {}) {
  return (std::max)(detail::product_rate<T>(ex, options), detail::product_rate<float>(ex, options));
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// metrics.csv: one row a step, appended as the run goes. Each row is one write of a whole line, so that a
/// killed run leaves at most one cut line at the end. A resumed run drops what lies after the step that it
/// resumes from, so that the file holds each step exactly once.
///
///     metrics_file file("run/metrics.csv", resumed_step);
///     file.append({.step = 21, .tokens = 43008, .loss = 3.1, ...});
///     auto rows = read_metrics("run/metrics.csv");
#ifndef TESSERA_TRAIN_METRICS_HPP
#define TESSERA_TRAIN_METRICS_HPP

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

namespace tessera::inline TESSERA_ABI::train {

/// One step. Losses are in nats per token; NaN stands for "not measured at this step".
struct metrics_row {
  double step = 0;
  double tokens = 0; ///< Trained on since the run began.
  double loss = 0;
  double validation_loss = std::numeric_limits<double>::quiet_NaN();
  double learning_rate = 0;
  double gradient_norm = 0;
  double tokens_per_second = 0;
  double peak_share = 0;
  double communication_share = 0;
};

namespace detail {

using metrics_member = double metrics_row::*;
struct metrics_column {
  char const* name;
  metrics_member member; // by an alias: nvcc writes the type itself in a way that g++ warns of
};
inline constexpr metrics_column metrics_columns[] = {
    {"step", &metrics_row::step},
    {"tokens", &metrics_row::tokens},
    {"loss", &metrics_row::loss},
    {"validation_loss", &metrics_row::validation_loss},
    {"learning_rate", &metrics_row::learning_rate},
    {"gradient_norm", &metrics_row::gradient_norm},
    {"tokens_per_second", &metrics_row::tokens_per_second},
    {"peak_share", &metrics_row::peak_share},
    {"communication_share", &metrics_row::communication_share},
};

inline std::string metrics_header() {
  std::string line;
  for (auto const& column : metrics_columns) line += (line.empty() ? "" : ",") + std::string(column.name);
  return line + '\n';
}

/// Shortest digits that read back to the same value; an empty cell for NaN.
inline std::string metrics_line(metrics_row const& row) {
  std::string line;
  for (auto const& column : metrics_columns) {
    auto const value = row.*column.member;
    char digits[40];
    auto const end = std::isnan(value) ? digits : std::to_chars(digits, digits + sizeof digits, value).ptr;
    if (&column != metrics_columns) line += ',';
    line.append(digits, end);
  }
  return line + '\n';
}

/// True, and `row` filled, when the line has a number or nothing in every column.
inline bool parse_metrics_line(std::string_view line, metrics_row& row) {
  auto const* at = line.data();
  auto const* const end = at + line.size();
  for (auto const& column : metrics_columns) {
    if (&column != metrics_columns) {
      if (at == end || *at != ',') return false;
      ++at;
    }
    row.*column.member = std::numeric_limits<double>::quiet_NaN();
    if (at == end || *at == ',') continue;
    auto const result = std::from_chars(at, end, row.*column.member);
    if (result.ec != std::errc{}) return false;
    at = result.ptr;
  }
  return at == end;
}

inline std::string file_text_or_nothing(std::string const& path, site where) {
  std::string text;
  auto* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    if (errno == ENOENT) return text;
    throw io_error("E-train-020", where, "cannot open ", path, ": ", std::strerror(errno));
  }
  char piece[65536];
  for (std::size_t got; (got = std::fread(piece, 1, sizeof piece, file)) > 0;) text.append(piece, got);
  std::fclose(file);
  return text;
}

} // namespace detail

/// The whole rows of a metrics file; a missing file has none. A line that a killed run cut is left out.
/// Throws io_error for a file whose first line is not the header.
inline std::vector<metrics_row> read_metrics(std::string const& path, site where = site::here()) {
  auto const text = detail::file_text_or_nothing(path, where);
  std::vector<metrics_row> rows;
  auto const header = detail::metrics_header();
  if (text.size() < header.size()) return rows; // not even the header was written whole
  if (text.compare(0, header.size(), header) != 0)
    throw io_error("E-train-021", where, path, " does not begin with the header ", header,
                   "it belongs to another program or version; move it away");
  for (std::size_t begin = header.size(), end; begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    if (end == std::string::npos) break;
    metrics_row row;
    if (detail::parse_metrics_line(std::string_view(text).substr(begin, end - begin), row))
      rows.push_back(row);
  }
  return rows;
}

/// Appends to a metrics file. Move it nowhere; one process writes it.
class metrics_file {
public:
  /// Keeps the rows up to and including `resumed_step`, drops the rest. Throws io_error.
  metrics_file(std::string path, index_t resumed_step, site where = site::here()) : path_(std::move(path)) {
    auto const rows = read_metrics(path_, where);
    auto text = detail::metrics_header();
    for (auto const& row : rows)
      if (row.step <= static_cast<double>(resumed_step)) text += detail::metrics_line(row);
    // The kept rows are written beside the file and take its place in one step: a kill leaves one or the
    // other.
    auto const beside = path_ + ".new";
    open(beside, O_CREAT | O_WRONLY | O_TRUNC, where);
    write_all(text, where);
    if (::fsync(descriptor_) != 0 || std::rename(beside.c_str(), path_.c_str()) != 0) fail("replace", where);
    ::close(descriptor_);
    open(path_, O_WRONLY | O_APPEND, where);
  }
  metrics_file(metrics_file const&) = delete;
  metrics_file& operator=(metrics_file const&) = delete;
  ~metrics_file() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  void append(metrics_row const& row, site where = site::here()) {
    write_all(detail::metrics_line(row), where);
  }

private:
  [[noreturn]] void fail(char const* what, site where) const {
    throw io_error("E-train-020", where, "cannot ", what, " ", path_, ": ", std::strerror(errno));
  }
  void open(std::string const& path, int flags, site where) {
    descriptor_ = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
    if (descriptor_ < 0) fail("open", where);
  }
  void write_all(std::string_view text, site where) {
    while (!text.empty()) {
      auto const written = ::write(descriptor_, text.data(), text.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("write", where);
      text.remove_prefix(static_cast<std::size_t>(written));
    }
  }

  std::string path_;
  int descriptor_ = -1;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// Which samples of a step a rank works on, and in which portions: the batch is cut evenly among the ranks
/// and each rank's share into micro-batches. A sample's number within the batch does not depend on either.
///
///     for (auto const& part : micro_batches(layout::shard_of(batch, ranks, rank), 8)) ...   // ranges of the
///     batch
#ifndef TESSERA_TRAIN_MICRO_BATCHES_HPP
#define TESSERA_TRAIN_MICRO_BATCHES_HPP

#include <vector>

namespace tessera::inline TESSERA_ABI::train {

/// Postconditions: in order, disjoint, cover `share`; each has 1 to `most` samples. None for an empty share.
inline std::vector<layout::range> micro_batches(layout::range share, index_t most) {
  std::vector<layout::range> parts;
  for (auto at = share.begin; at < share.end; at += most)
    parts.push_back({at, at + most < share.end ? at + most : share.end});
  return parts;
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// Settings turned into what the other rooms take: the model's config, the optimizer's and the schedule's
/// options, and the work of one token.
#ifndef TESSERA_TRAIN_MODEL_SETTINGS_HPP
#define TESSERA_TRAIN_MODEL_SETTINGS_HPP

namespace tessera::inline TESSERA_ABI::train {

inline nn::transformer_config model_config(settings const& s, index_t vocabulary) {
  return {.family = s.family == "gpt2" ? nn::transformer_family::gpt2 : nn::transformer_family::llama,
          .vocabulary_size = vocabulary,
          .sequence_length = s.sequence_length,
          .width = s.width,
          .layers = s.layers,
          .heads = s.heads,
          .key_value_heads = s.key_value_heads,
          .feed_forward = s.feed_forward,
          .dropout = static_cast<float>(s.dropout),
          .tied_head = s.tied_head,
          .norm_epsilon = static_cast<float>(s.norm_epsilon),
          .rotary_theta = static_cast<float>(s.rotary_theta),
          .label_smoothing = static_cast<float>(s.label_smoothing),
          .z_loss = static_cast<float>(s.z_loss)};
}

inline optim::adamw_options adamw_options(settings const& s) {
  return {.beta1 = s.beta1, .beta2 = s.beta2, .epsilon = s.epsilon, .weight_decay = s.weight_decay};
}

inline optim::schedule_options schedule_options(settings const& s) {
  auto const fifth = (std::min)(s.steps / 5, s.steps - s.warm_up_steps);
  return {.form = optim::schedule_form_named(s.schedule),
          .peak = s.learning_rate,
          .final_fraction = s.final_rate_share,
          .steps = s.steps,
          .warm_up = {s.warm_up_steps},
          .decay = s.decay_steps == 0 ? fifth : s.decay_steps};
}

/// Floating-point operations of forward and backward for one token, of the matrix products alone: 6 for each
/// weight that takes part in one, and 6 T width a layer for attention over T tokens, half of which a token
/// sees on average (Narayanan et al., "Efficient large-scale language model training", 2021).
template <exec::space Ex, storage_scalar T, storage_scalar G>
double operations_per_token(nn::model<Ex, T, G> const& model) {
  auto const& config = model.config();
  index_t weights = 0;
  model.store().for_each([&](layout::parameter const& p, layout::range) {
    auto const multiplied = p.kind == layout::parameter_kind::matrix ||
                            (p.kind == layout::parameter_kind::token_embedding && config.tied_head);
    if (multiplied) weights += p.size;
  });
  return 6.0 * static_cast<double>(weights) +
         6.0 * static_cast<double>(config.layers * config.sequence_length * config.width);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// One line about where a run stands. On a terminal the line is redrawn in place; in a log each line stands
/// by itself, every so many steps.
///
///     progress shown(stderr, {.terminal = isatty(2), .every = 10});
///     shown.show({.step = 20, .steps = 100, .loss = 3.2, ...});
///     shown.note("checkpoint run/step-00000020");        // a line of its own, above the progress line
#ifndef TESSERA_TRAIN_PROGRESS_HPP
#define TESSERA_TRAIN_PROGRESS_HPP

#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>

namespace tessera::inline TESSERA_ABI::train {

struct progress_values {
  index_t step = 0;
  index_t steps = 0;
  double loss = 0;             ///< Of this step, in nats per token.
  double validation_loss = -1; ///< The latest; negative: none yet.
  double learning_rate = 0;
  double gradient_norm = 0;       ///< Before clipping.
  double tokens_per_second = 0;   ///< Over all ranks.
  double peak_share = 0;          ///< Of the measured matrix peak of all ranks; 0: not measured.
  double communication_share = 0; ///< Of the step's time, spent waiting in collectives.
  double seconds_left = 0;
};

/// "45s", "3m05s", "2h10m", "3d04h".
inline std::string duration_text(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  auto const total = std::lround(seconds);
  char text[32];
  if (total < 60)
    std::snprintf(text, sizeof text, "%lds", total);
  else if (total < 3600)
    std::snprintf(text, sizeof text, "%ldm%02lds", total / 60, total % 60);
  else if (total < 86400)
    std::snprintf(text, sizeof text, "%ldh%02ldm", total / 3600, total / 60 % 60);
  else
    std::snprintf(text, sizeof text, "%ldd%02ldh", total / 86400, total / 3600 % 24);
  return text;
}

/// "954", "9.5k", "12.3k", "1.2M".
inline std::string rate_text(double value) {
  char text[32];
  if (value < 1000)
    std::snprintf(text, sizeof text, "%.0f", value);
  else if (value < 1e6)
    std::snprintf(text, sizeof text, "%.1fk", value / 1e3);
  else
    std::snprintf(text, sizeof text, "%.1fM", value / 1e6);
  return text;
}

inline std::string progress_line(progress_values const& v) {
  auto const steps = std::to_string(v.steps);
  char text[256];
  std::snprintf(text, sizeof text, "step %*lld/%s  loss %.4f", narrow<int>(steps.size()),
                static_cast<long long>(v.step), steps.c_str(), v.loss);
  std::string line = text;
  if (v.validation_loss >= 0) {
    std::snprintf(text, sizeof text, "  val %.4f", v.validation_loss);
    line += text;
  }
  std::snprintf(text, sizeof text, "  lr %.2e  norm %.2f  %s tok/s", v.learning_rate, v.gradient_norm,
                rate_text(v.tokens_per_second).c_str());
  line += text;
  if (v.peak_share > 0) {
    std::snprintf(text, sizeof text, "  peak %.0f%%", 100 * v.peak_share);
    line += text;
  }
  std::snprintf(text, sizeof text, "  comm %.0f%%  left %s", 100 * v.communication_share,
                duration_text(v.seconds_left).c_str());
  return line + text;
}

struct progress_options {
  bool terminal = false; ///< Redraw one line rather than print many.
  index_t every =
      1; ///< Without a terminal: print each step that is a multiple of it, the first and the last.
  bool silent = false; ///< Nothing at all: for the ranks that do not speak.
};

class progress {
public:
  /// `out` stays the caller's.
  explicit progress(std::FILE* out, progress_options options = {}) : out_(out), options_(options) {}
  progress(progress const&) = delete;
  progress& operator=(progress const&) = delete;
  ~progress() { end_line(); }

  void show(progress_values const& values) {
    if (options_.silent) return;
    auto const line = progress_line(values);
    if (options_.terminal) {
      std::fprintf(out_, "\r\x1b[K%s", line.c_str()); // back to the first column, clear, draw
      drawn_ = true;
    } else if (!spoken_ || values.step % options_.every == 0 || values.step == values.steps) {
      std::fprintf(out_, "%s\n", line.c_str());
      spoken_ = true;
    }
    std::fflush(out_);
  }

  /// A line that stays.
  void note(std::string_view text) {
    if (options_.silent) return;
    if (drawn_) std::fprintf(out_, "\r\x1b[K");
    drawn_ = false;
    std::fprintf(out_, "%.*s\n", narrow<int>(text.size()), text.data());
    std::fflush(out_);
  }

  /// Leaves the drawn line standing and goes to the next.
  void end_line() {
    if (drawn_) std::fprintf(out_, "\n");
    drawn_ = false;
  }

private:
  std::FILE* out_;
  progress_options options_;
  bool drawn_ = false;
  bool spoken_ = false;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// What a run leaves to be read: `summary.json`, and a table of memory by kind beside what the formula of
/// ZeRO (Rajbhandari et al., 2020) says it must be.
///
///     auto const expected = zero_formula(parameters, {.ranks = 2, .zero = 1, .weight_bytes = 2, .state_bytes
///     = 12}); std::puts(memory_table(peaks, expected).c_str());
#ifndef TESSERA_TRAIN_SUMMARY_HPP
#define TESSERA_TRAIN_SUMMARY_HPP

#include <array>
#include <cstdio>
#include <string>

namespace tessera::inline TESSERA_ABI::train {

/// Bytes of each kind of memory, in the order of memory_kind.
using bytes_by_kind = std::array<index_t, memory_kind_count>;

inline bytes_by_kind peaks_of(memory_meter const& meter) {
  bytes_by_kind peaks{};
  for (int kind = 0; kind < memory_kind_count; ++kind)
    peaks[static_cast<std::size_t>(kind)] = meter.peak(static_cast<memory_kind>(kind));
  return peaks;
}

/// The formula by kind, for `elements` parameters: weights and gradients whole, the optimizer's state whole
/// (stage 0) or divided by the ranks (stage 1). Kinds that the formula does not speak of are -1.
inline bytes_by_kind zero_formula(index_t elements, parallel::memory_plan_options const& o) {
  bytes_by_kind bytes;
  bytes.fill(-1);
  auto const at = [&](memory_kind kind) -> index_t& { return bytes[static_cast<std::size_t>(kind)]; };
  at(memory_kind::parameters) = elements * o.weight_bytes;
  at(memory_kind::gradients) = elements * o.gradient_bytes;
  at(memory_kind::optimizer_state) = elements * o.state_bytes / (o.zero == 0 ? 1 : o.ranks);
  return bytes;
}

inline std::string mebibytes_text(index_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / 1048576.0);
  return bytes < 0 ? "" : text;
}

/// Lines of "kind, peak bytes of the fullest rank, formula".
inline std::string memory_table(bytes_by_kind const& peaks, bytes_by_kind const& formula) {
  char line[128];
  std::snprintf(line, sizeof line, "%-16s %14s %14s\n", "memory, a rank", "peak", "ZeRO formula");
  std::string table = line;
  index_t total = 0;
  for (std::size_t kind = 0; kind < peaks.size(); ++kind) {
    if (peaks[kind] == 0 && formula[kind] <= 0) continue;
    std::snprintf(line, sizeof line, "%-16s %14s %14s\n", name_of(static_cast<memory_kind>(kind)),
                  mebibytes_text(peaks[kind]).c_str(), mebibytes_text(formula[kind]).c_str());
    table += line;
    total += peaks[kind];
  }
  std::snprintf(line, sizeof line, "%-16s %14s\n", "sum", mebibytes_text(total).c_str());
  return table + line;
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
/// The training loop: samples -> forward and backward over micro-batches -> gradients summed over the ranks
/// -> optimizer -> metrics, validation, checkpoints. A run that finds a checkpoint in its folder goes on from
/// it with the same bits as if it had never stopped.
///
///     exec::host ex({.threads = 2});
///     train::trainer<comm::mpi, exec::host, bf16> trainer(comm, ex, settings, {.out = stderr});
///     trainer.run();                                   // to the last step, then the report in the run's
///     folder
///
/// Called by every rank of `comm`. Every decision (stop, save, refuse) is made from values that are the same
/// on all ranks, or is agreed upon first, so that an error on one rank ends all of them. Exists under
/// TESSERA_WITH_JSON, TESSERA_WITH_XXHASH and TESSERA_WITH_SENTENCEPIECE.
#ifndef TESSERA_TRAIN_TRAINER_HPP
#define TESSERA_TRAIN_TRAINER_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH) && defined(TESSERA_WITH_SENTENCEPIECE)

#include <chrono>

namespace tessera::inline TESSERA_ABI::train {

struct trainer_options {
  std::FILE* out = nullptr; ///< Where rank 0 shows progress; null: nowhere.
  bool terminal = false;    ///< Redraw one line instead of printing many.
};

/// T is the storage type of weights and activations; gradients are summed in fp32.
template <comm::communicator Comm, exec::space Ex, storage_scalar T>
  requires parallel::communicates_for<Comm, Ex>
class trainer {
public:
  using gradient = float;
  using replicas_type = parallel::data_parallel<Comm, Ex, T, gradient>;

  /// Opens the data, makes the model, and goes back to the latest checkpoint if there is one. Throws, on all
  /// ranks, for settings that differ between ranks or cannot be, for data that cannot be used, and for a
  /// checkpoint of another run.
  trainer(Comm& comm, Ex& ex, settings chosen, trainer_options options = {}, site where = site::here())
      : comm_(comm), ex_(ex), settings_(agreed(comm, std::move(chosen), where)), options_(options),
        shown_(options.out, {.terminal = options.terminal,
                             .every = settings_.log_every,
                             .silent = options.out == nullptr || comm.rank() != 0}),
        text_(open_corpus(comm, settings_, where)), order_(text_.training.size(), {.seed = seed()}),
        share_(layout::shard_of(settings_.batch, comm.size(), comm.rank())),
        model_(model_config(settings_, text_.vocabulary), largest_micro_batch(), {.meter = &memory_}, where),
        replicas_(comm, ex, parallel::flat_model_of(model_.store()), adamw_options(settings_),
                  {.zero = narrow<int>(settings_.zero_stage),
                   .bucket_bytes = static_cast<index_t>(settings_.bucket_mib * (1 << 20)),
                   .meter = &memory_},
                  where),
        rate_(schedule_options(settings_)),
        tokens_(ex, {largest_micro_batch().batch, settings_.sequence_length}, {&memory_, memory_kind::data}),
        targets_(ex, {largest_micro_batch().batch, settings_.sequence_length},
                 {&memory_, memory_kind::data}) {
    comm_.meter().time_calls(true);
    initialise();
    resume(where);
    if (settings_.measure_peak) peak_ = comm_.all_reduce(matrix_peak<T>(ex_));
    for (auto const& note : ex_.notes()) shown_.note(note);
  }

  /// Trains to the last step, validates on all validation samples, and leaves a checkpoint.
  void run(site where = site::here()) {
    while (step_ < settings_.steps) {
      auto row = train_step(where);
      auto const last = step_ == settings_.steps;
      if (last || due(settings_.validate_every)) {
        validation_ = validate(last ? 0 : settings_.validation_samples);
        row.validation_loss = parallel::mean_of(validation_);
      }
      on_root(
          comm_, [&] { metrics_->append(row, where); }, where);
      show(row);
      if (last || due(settings_.checkpoint_every)) save(where);
    }
    if (validation_.count == 0) validation_ = validate(0);
    shown_.end_line();
  }

  settings const& chosen() const noexcept { return settings_; }
  corpus const& text() const noexcept { return text_; }
  nn::model<Ex, T, gradient>& model() noexcept { return model_; }
  memory_meter const& memory() const noexcept { return memory_; }
  index_t step() const noexcept { return step_; }
  /// Of the last validation, over all ranks.
  nn::loss_sum validation() const noexcept { return validation_; }
  /// Operations a second of all ranks in large matrix products; 0: not measured.
  double peak() const noexcept { return peak_; }
  Comm& ranks() noexcept { return comm_; }
  Ex& space() noexcept { return ex_; }
  progress& shown() noexcept { return shown_; }

  std::string metrics_path() const { return settings_.run + "/metrics.csv"; }
  std::string checkpoints() const { return settings_.run + "/checkpoints"; }

private:
  using token_view = typename nn::model<Ex, T, gradient>::token_view;
  using clock = std::chrono::steady_clock;
  static double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
  }

  std::uint64_t seed() const { return static_cast<std::uint64_t>(settings_.seed); }
  bool due(index_t every) const { return every > 0 && step_ % every == 0; }

  /// The settings, once it is certain that they are possible and the same on every rank.
  static settings agreed(Comm& comm, settings chosen, site where) {
    together(
        comm, [&] { check(chosen, where); }, where);
    require_agreement(comm, chosen, where);
    return chosen;
  }

  nn::batch_shape largest_micro_batch() const {
    auto const largest_share = layout::shard_of(settings_.batch, comm_.size(), 0).size();
    return {(std::min)(settings_.micro_batch, largest_share), settings_.sequence_length};
  }

  /// Weights in storage precision, masters in fp32: both from the same numbers.
  void initialise() {
    nn::initialise(ex_, model_.store(), seed());
    replicas_.start_from(ex_, [&](std::size_t unit, layout::range part, auto out) {
      nn::initialise(ex_, model_.store().parameters(unit), part, out, seed());
    });
  }

  run_state state() const {
    return {.step = step_,
            .position = step_ * settings_.batch,
            .chosen = settings_,
            .data = text_.fingerprint,
            .vocabulary = text_.vocabulary,
            .ranks = comm_.size()};
  }

  void resume(site where) {
    auto const checkpoint = latest_checkpoint(comm_, checkpoints(), where);
    if (!checkpoint.empty()) {
      auto const saved = read_state(comm_, checkpoint, where);
      together(
          comm_, [&] { require_same(saved, state(), settings_.allow_difference, checkpoint, where); }, where);
      load_checkpoint(comm_, ex_, checkpoint, model_.store(), replicas_, where);
      step_ = saved.step;
      first_position_ = saved.position - step_ * settings_.batch;
      shown_.note("resumed from " + checkpoint);
    }
    on_root(
        comm_,
        [&] {
          io::make_folders(settings_.run, where);
          io::remove_leftovers(settings_.run, where); // a killed run's
          io::write_json(settings_.run + "/settings.json", json_of(settings_), where);
          metrics_.emplace(metrics_path(), step_, where);
        },
        where);
  }

  /// Samples [part) of this step's batch, or of the validation samples, where the space reads them. The one
  /// before is no longer needed: its loss has been read.
  template <class SampleAt>
  std::pair<token_view, token_view> fill(data::token_dataset const& from, layout::range part,
                                         SampleAt&& sample_at, site where) {
    for (auto i = part.begin; i < part.end; ++i) {
      auto const row = i - part.begin;
      from.fill(sample_at(i), tokens_.host()[row].span(), targets_.host()[row].span(), where);
    }
    return {tokens_.upload(ex_).slice(0, 0, part.size()), targets_.upload(ex_).slice(0, 0, part.size())};
  }

  metrics_row train_step(site where) {
    auto const start = clock::now();
    auto const waited = comm_.meter().total().seconds;
    auto const first = first_position_ + step_ * settings_.batch;
    auto const parts = micro_batches(share_, settings_.micro_batch);
    nn::loss_sum loss;
    for (auto const& part : parts) {
      auto const [tokens, targets] = fill(
          text_.training, part, [&](index_t i) { return order_.sample_at(first + i); }, where);
      auto const is_last = &part == &parts.back();
      loss += model_.forward_backward(ex_, tokens, targets,
                                      {.seed = seed(),
                                       .step = static_cast<std::uint64_t>(step_),
                                       .first_sample = part.begin,
                                       .accumulate = &part != &parts.front()},
                                      [&](std::size_t unit) {
                                        if (is_last) replicas_.gradients_ready(unit);
                                      });
    }
    if (parts.empty()) replicas_.nothing_to_add(ex_);
    auto const learning_rate = rate_(step_);
    auto const done = replicas_.update(
        ex_, loss, {.step = step_ + 1, .learning_rate = learning_rate, .clip_norm = settings_.clip}, where);
    ++step_;
    auto const mean = parallel::mean_of(done.loss);
    if (!done.applied) refuse_step(mean, done.gradient_norm, where);

    auto const seconds = seconds_since(start);
    auto const per_second = done.loss.count / seconds;
    return {.step = static_cast<double>(step_),
            .tokens = static_cast<double>(step_ * settings_.batch * settings_.sequence_length),
            .loss = mean,
            .learning_rate = learning_rate,
            .gradient_norm = done.gradient_norm,
            .tokens_per_second = per_second,
            .peak_share = peak_ > 0 ? per_second * operations_per_token(model_) / peak_ : 0,
            .communication_share = (comm_.meter().total().seconds - waited) / seconds};
  }

  /// Loss and norm are the same on every rank, so every rank comes here or none does.
  [[noreturn]] void refuse_step(double loss, double norm, site where) {
    shown_.end_line();
    auto const kept = io::commits_in(checkpoints(), where);
    throw numeric_error(
        "E-train-070", where, "step ", step_, ": the loss is ", loss, " and the gradient's norm ", norm,
        "; the step was not taken and no checkpoint was made of it. ",
        kept.empty() ? "There is no earlier checkpoint" : "The last good checkpoint is " + kept.back().path,
        "; lower learning_rate (", settings_.learning_rate,
        "), lengthen warm_up_steps, or look for broken data");
  }

  /// Over `samples` samples spread evenly over the validation part, or all of them (0).
  nn::loss_sum validate(index_t samples, site where = site::here()) {
    auto const all = text_.validation.size();
    auto const count = samples == 0 || samples > all ? all : samples;
    nn::loss_sum loss;
    auto const mine = layout::shard_of(count, comm_.size(), comm_.rank());
    for (auto const& part : micro_batches(mine, largest_micro_batch().batch)) {
      auto const [tokens, targets] = fill(
          text_.validation, part, [&](index_t i) { return i * all / count; }, where);
      loss += model_.evaluate(ex_, tokens, targets, where);
    }
    return parallel::sum_over_ranks(comm_, loss);
  }

  void save(site where) {
    auto const path =
        save_checkpoint(comm_, ex_, checkpoints(), state(), model_.store(), replicas_,
                        {.keep = settings_.keep, .tokenizer_model = text_.tokenizer.model()}, where);
    if (step_ == settings_.steps) shown_.note("checkpoint " + path);
  }

  void show(metrics_row const& row) {
    auto const blend = seconds_a_step_ == 0 ? 1.0 : 0.1;
    auto const seconds =
        static_cast<double>(settings_.batch * settings_.sequence_length) / row.tokens_per_second;
    seconds_a_step_ += blend * (seconds - seconds_a_step_);
    shown_.show({.step = step_,
                 .steps = settings_.steps,
                 .loss = row.loss,
                 .validation_loss = validation_.count > 0 ? parallel::mean_of(validation_) : -1,
                 .learning_rate = row.learning_rate,
                 .gradient_norm = row.gradient_norm,
                 .tokens_per_second = row.tokens_per_second,
                 .peak_share = row.peak_share,
                 .communication_share = row.communication_share,
                 .seconds_left = seconds_a_step_ * static_cast<double>(settings_.steps - step_)});
  }

  Comm& comm_;
  Ex& ex_;
  settings settings_;
  trainer_options options_;
  progress shown_;
  memory_meter memory_;
  corpus text_;
  data::sampler order_;
  layout::range share_; ///< Of the batch's samples: this rank's.
  nn::model<Ex, T, gradient> model_;
  replicas_type replicas_;
  optim::schedule rate_;
  exec::staged<std::int32_t, 2, Ex> tokens_, targets_;
  std::optional<metrics_file> metrics_; ///< On rank 0.
  index_t step_ = 0;                    ///< Steps done.
  index_t first_position_ = 0; ///< Of the sampler at step 0; other than 0 after an allowed other batch.
  nn::loss_sum validation_;
  double peak_ = 0;
  double seconds_a_step_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
/// What a finished run leaves to be read: loss.svg, sample.txt and summary.json in its folder, and a short
/// account on the terminal: losses beside the entropies of the simplest models, memory by kind beside the
/// ZeRO formula, and a sample of text.
///
///     trainer.run();
///     train::report(trainer, stdout);          // called by every rank; rank 0 writes
#ifndef TESSERA_TRAIN_REPORT_HPP
#define TESSERA_TRAIN_REPORT_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH) && defined(TESSERA_WITH_SENTENCEPIECE)

namespace tessera::inline TESSERA_ABI::train {

namespace detail {

/// The figures of a run that the summary and the account are made from.
struct run_figures {
  double training_loss = 0; ///< Nats per token, mean over the last twentieth of the steps.
  double tokens_per_second = 0, peak_share = 0, communication_share = 0, seconds = 0;
};

/// The first step of a process prepares kernels and touches memory; it counts in `seconds` alone.
inline run_figures figures_of(std::vector<metrics_row> const& rows) {
  run_figures f;
  auto const last = (std::max)(std::size_t{1}, rows.size() / 20);
  auto tokens = 0.0, seconds = 0.0, before = 0.0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    auto const& row = rows[i];
    auto const own = row.tokens - before, time = own / row.tokens_per_second;
    before = row.tokens;
    f.seconds += time;
    if (i + last >= rows.size()) f.training_loss += row.loss / static_cast<double>(last);
    if (i == 0 && rows.size() > 1) continue;
    tokens += own;
    seconds += time;
    f.peak_share += row.peak_share * time;
    f.communication_share += row.communication_share * time;
  }
  if (seconds > 0) {
    f.tokens_per_second = tokens / seconds;
    f.peak_share /= seconds;
    f.communication_share /= seconds;
  }
  return f;
}

/// Per byte of text where there is text, else per token.
inline double per_unit(double nats_per_token, double bytes_per_token) {
  return bytes_per_token > 0 ? nats_per_token / bytes_per_token : nats_per_token;
}

template <comm::communicator Comm, exec::space Ex, storage_scalar T>
std::string sample_text(trainer<Comm, Ex, T>& t) {
  auto const& s = t.chosen();
  if (s.sample_tokens == 0 || !t.text().tokenizer.has_text()) return {};
  auto prompt = t.text().tokenizer.encode(s.prompt);
  if (prompt.empty()) prompt.push_back(0);
  nn::decoder<Ex, T, float> decoder(t.model().units(), t.model().store(), t.model().config());
  auto const more =
      generate(t.space(), decoder, prompt, s.sample_tokens, {.temperature = 0.7, .top_p = 0.95},
               philox(static_cast<std::uint64_t>(s.seed), layout::stream_of("sample")), [](std::int32_t) {});
  return s.prompt + t.text().tokenizer.decode(more);
}

template <comm::communicator Comm, exec::space Ex, storage_scalar T>
std::string run_title(trainer<Comm, Ex, T>& t) {
  auto const& s = t.chosen();
  char size[32];
  std::snprintf(size, sizeof size, "%.1f M", static_cast<double>(t.model().store().parameter_count()) / 1e6);
  return tessera::text_of(s.family, ", ", size, " parameters, ", scalar_name<T>(), ", ", t.ranks().size(),
                          t.ranks().size() == 1 ? " rank" : " ranks", ", ZeRO-", s.zero_stage, ", seed ",
                          s.seed);
}

template <comm::communicator Comm, exec::space Ex, storage_scalar T>
std::string run_picture(trainer<Comm, Ex, T>& t, std::vector<metrics_row> const& rows) {
  auto const& text = t.text();
  auto const has_text = text.tokenizer.has_text();
  auto const name = t.chosen().data.substr(t.chosen().data.find_last_of('/') + 1);
  loss_curve_options picture{
      .title = name, .subtitle = run_title(t), .unit = has_text ? "nats per byte" : "nats per token"};
  for (auto const& row : rows) {
    picture.training.push_back({row.step, per_unit(row.loss, text.training_bytes_per_token)});
    if (std::isfinite(row.validation_loss))
      picture.validation.push_back(
          {row.step, per_unit(row.validation_loss, text.validation_bytes_per_token)});
  }
  if (has_text)
    picture.levels = {{"unigram", text.statistics.unigram_entropy},
                      {"bigram", text.statistics.bigram_entropy}};
  return loss_curve(picture);
}

inline io::json json_of(bytes_by_kind const& bytes) {
  auto object = io::json::object();
  for (std::size_t kind = 0; kind < bytes.size(); ++kind)
    if (bytes[kind] >= 0) object[name_of(static_cast<memory_kind>(kind))] = bytes[kind];
  return object;
}

} // namespace detail

/// Called by every rank when `run` has returned. `communicator` is what the summary calls the kind of ranks.
template <comm::communicator Comm, exec::space Ex, storage_scalar T>
void report(trainer<Comm, Ex, T>& t, std::FILE* out, std::string const& communicator,
            site where = site::here()) {
  auto peaks = peaks_of(t.memory());
  auto const exchanges = peaks_of(t.ranks().memory()), scratch = peaks_of(t.space().scratch());
  for (std::size_t kind = 0; kind < peaks.size(); ++kind) peaks[kind] += exchanges[kind] + scratch[kind];
  t.ranks().all_reduce(std::span<index_t>(peaks), {.operation = comm::reduction::max});
  on_root(
      t.ranks(),
      [&] {
        auto const& s = t.chosen();
        auto const& text = t.text();
        auto const rows = read_metrics(t.metrics_path(), where);
        auto const f = detail::figures_of(rows);
        auto const validation = parallel::mean_of(t.validation());
        auto const training_loss = detail::per_unit(f.training_loss, text.training_bytes_per_token);
        auto const validation_loss = detail::per_unit(validation, text.validation_bytes_per_token);
        auto const formula = zero_formula(t.model().store().parameter_count(),
                                          {.ranks = t.ranks().size(),
                                           .zero = narrow<int>(s.zero_stage),
                                           .weight_bytes = sizeof(T),
                                           .gradient_bytes = sizeof(float),
                                           .state_bytes = optim::adamw<Ex, T>::state_bytes({})});
        auto const sample = detail::sample_text(t);
        io::write_file(s.run + "/loss.svg", detail::run_picture(t, rows), where);
        io::write_file(s.run + "/sample.txt", sample + "\n", where);
        io::write_json(s.run + "/summary.json",
                       {{"steps", t.step()},
                        {"parameters", t.model().store().parameter_count()},
                        {"unit_of_loss", text.tokenizer.has_text() ? "nats per byte" : "nats per token"},
                        {"training_loss", training_loss},
                        {"validation_loss", validation_loss},
                        {"validation_loss_per_token", validation},
                        {"unigram_entropy", text.statistics.unigram_entropy},
                        {"bigram_entropy", text.statistics.bigram_entropy},
                        {"bytes_per_token", text.validation_bytes_per_token},
                        {"vocabulary", text.vocabulary},
                        {"seconds", f.seconds},
                        {"tokens_per_second", f.tokens_per_second},
                        {"matrix_peak_share", f.peak_share},
                        {"matrix_peak_operations_per_second", t.peak()},
                        {"communication_share", f.communication_share},
                        {"peak_bytes", detail::json_of(peaks)},
                        {"zero_formula_bytes", detail::json_of(formula)},
                        {"layout",
                         {{"communicator", communicator},
                          {"ranks", t.ranks().size()},
                          {"runs_on", t.space().description()},
                          {"zero_stage", s.zero_stage}}},
                        {"storage", std::string(scalar_name<T>())},
                        {"seed", s.seed}},
                       where);
        auto const unit = text.tokenizer.has_text() ? "nats per byte" : "nats per token";
        std::fprintf(out, "\n%s, %lld steps in %s\n\n", detail::run_title(t).c_str(),
                     static_cast<long long>(t.step()), duration_text(f.seconds).c_str());
        std::fprintf(out, "training loss    %8.4f %s\nvalidation loss  %8.4f %s\n", training_loss, unit,
                     validation_loss, unit);
        if (text.tokenizer.has_text())
          std::fprintf(out, "bigram entropy   %8.4f %s of the text\nunigram entropy  %8.4f %s of the text\n",
                       text.statistics.bigram_entropy, unit, text.statistics.unigram_entropy, unit);
        std::fprintf(out,
                     "speed            %8s tokens/s, %.0f%% of the matrix peak, %.0f%% in communication\n\n",
                     rate_text(f.tokens_per_second).c_str(), 100 * f.peak_share, 100 * f.communication_share);
        std::fprintf(out, "%s\n", memory_table(peaks, formula).c_str());
        if (!sample.empty()) std::fprintf(out, "%s\n\n", sample.c_str());
        std::fprintf(out, "in %s: summary.json, metrics.csv, loss.svg, sample.txt, checkpoints/\n",
                     s.run.c_str());
      },
      where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif

#if defined(TESSERA_WITH_CUDA) && defined(__CUDACC__)
/// All of Tessera's CUDA side, for .cu files. A single operation comes by its own header, such as
/// <tessera/ops/cuda/gelu.cuh>, and compiles faster.
///
/// Made by tests/house/make_single_header.py.
#ifndef TESSERA_CUDA_CUH
#define TESSERA_CUDA_CUH

/// What kernels use that is no plain C++: dynamic shared memory, 16-byte accesses, the tensor cores and
/// asynchronous copies. The emulation of CUDA that the tests run kernels under (tests/cuda_emulation/) has
/// this header once more, in plain C++.
#ifndef TESSERA_EXEC_DEVICE_CUH
#define TESSERA_EXEC_DEVICE_CUH

#include <cuda_runtime.h>

namespace tessera::inline TESSERA_ABI::exec {

/// The block's dynamic shared memory, whose size is given at the launch. Every call gives the same memory,
/// aligned to 128 bytes.
template <class T>
inline __device__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char tessera_dynamic_shared[];
  return reinterpret_cast<T*>(tessera_dynamic_shared);
}

/// Sixteen bytes of elements, as one access moves them.
template <class T>
  requires(16 % sizeof(T) == 0)
struct alignas(16) vector16 {
  static constexpr int count = 16 / sizeof(T);
  T values[count];

  TESSERA_HOST_DEVICE T& operator[](int i) noexcept { return values[i]; }
  TESSERA_HOST_DEVICE T const& operator[](int i) const noexcept { return values[i]; }
};

/// `from` is aligned to 16 bytes, in global or shared memory.
template <class T>
inline __device__ vector16<T> load16(T const* from) {
  return std::bit_cast<vector16<T>>(*reinterpret_cast<uint4 const*>(from));
}
template <class T>
__device__ inline void store16(T* to, vector16<T> const& value) {
  *reinterpret_cast<uint4*>(to) = std::bit_cast<uint4>(value);
}

// ---- 16-bit pairs, tensor cores, asynchronous copies -----------------------------------------------------

/// bf16 or fp16: what the tensor cores multiply with fp32 sums.
template <class T>
concept tensor_core_scalar = std::same_as<T, bf16> || std::same_as<T, fp16>;

/// 2^x, within about two units in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Two floats, rounded to nearest even, `low` in the lower half.
template <tensor_core_scalar T>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  std::uint32_t pair;
  if constexpr (std::same_as<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// d += a b by all lanes of a warp: a is 16 x 16, b is 16 x 8, d is 16 x 8. With g = lane / 4, t = lane % 4,
/// a register of two elements holds them in order of columns (a) or rows (b), the first in the lower half:
///   a[0]: row g,     columns 2t, 2t + 1      a[1]: row g + 8, columns 2t, 2t + 1
///   a[2]: row g,     columns 2t + 8, 2t + 9  a[3]: row g + 8, columns 2t + 8, 2t + 9
///   b0:   column g,  rows 2t, 2t + 1         b1:   column g,  rows 2t + 8, 2t + 9
///   d[0], d[1]: row g, columns 2t, 2t + 1    d[2], d[3]: row g + 8, columns 2t, 2t + 1
template <tensor_core_scalar T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
  if constexpr (std::same_as<T, bf16>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Reads four 8 x 8 matrices of 16-bit elements from shared memory, by all lanes of a warp: lane 8 i + r
/// gives the address of row r, 16 bytes, of matrix i. r[i] receives of matrix i the elements of row lane / 4
/// in columns 2 (lane % 4) and one more; transposed, those of column lane / 4 in rows 2 (lane % 4) and one
/// more.
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&r)[4], void const* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row))));
}
__device__ __forceinline__ void load_matrix_x4_transposed(std::uint32_t (&r)[4], void const* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row))));
}

/// Starts to copy 16 (4) bytes from global to shared memory, or zeros where not `inside`; then nothing is
/// read. Both aligned to the size. `copy_async_commit` closes a group of the copies that this thread started;
/// `copy_async_wait<N>` waits until all but its last N groups are there. Other threads see them after the
/// next barrier.
__device__ __forceinline__ void copy_async16(void* shared, void const* global, bool inside = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global)), "r"(inside ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async4(void* shared, void const* global, bool inside = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global)), "r"(inside ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
/// Element by element kernels in one line: a function of one element, and the arrays that it writes and
/// reads.
///
///     struct doubled {
///       TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = 2.0f * x; }
///     };
///     exec::for_elements(ex, n, doubled{}, exec::writes(out), exec::reads(in));
///     exec::for_elements(ex, rows, width, doubled{}, exec::writes(out, stride), exec::reads(in, stride));
///
/// Arithmetic is in float whatever the arrays store. Each array is read once, written once, or (`updates`)
/// both, in accesses of 16 bytes wherever all of them can be: rows may begin anywhere as long as they begin
/// at the same distance from such a boundary; otherwise element by element. Arrays may be one another, or be
/// disjoint.
///
/// A function that wants the elements' numbers takes a whole pack: `f(first, float (&y)[N], float (&x)[N])`
/// for elements first .. first + N - 1 (counted row by row), any N.
#ifndef TESSERA_EXEC_ELEMENTS_CUH
#define TESSERA_EXEC_ELEMENTS_CUH

#include <algorithm>

/// How kernels are declared and started.
///
///     template <class T>
///     TESSERA_KERNEL void double_all(T* x, index_t n) { ... }
///
///     exec::launch(ex, {.grid = exec::grid_of(blocks), .block = dim3(256)}, double_all<T>, x, n);
#ifndef TESSERA_EXEC_LAUNCH_CUH
#define TESSERA_EXEC_LAUNCH_CUH

/// A kernel belongs to the library or program that it is compiled into: a second one of the same name, in
/// another library that was built for other GPUs, must not be taken for it.
#define TESSERA_KERNEL __attribute__((visibility("hidden"))) __global__

namespace tessera::inline TESSERA_ABI::exec {

struct launch_shape {
  dim3 grid = dim3(1);
  dim3 block = dim3(1);
  /// Dynamic shared memory; the kernel reaches it by dynamic_shared<T>() (exec/device.cuh).
  std::size_t shared_bytes = 0;
  site where = site::here();
};

/// Starts a kernel in the space's stream. A grid without blocks starts nothing.
template <cuda_space Ex, class... Parameters, class... Arguments>
void launch(Ex& ex, launch_shape const& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  // More than this must be asked for.
  constexpr std::size_t always_allowed = std::size_t{48} << 10;
  if (shape.shared_bytes > always_allowed)
    cuda_check(cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    narrow<int>(shape.shared_bytes, shape.where)),
               "cudaFuncSetAttribute", shape.where);
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = shape.grid;
  configuration.blockDim = shape.block;
  configuration.dynamicSmemBytes = shape.shared_bytes;
  configuration.stream = ex.stream();
  cuda_check(cudaLaunchKernelEx(&configuration, kernel, static_cast<Arguments&&>(arguments)...),
             "cudaLaunchKernelEx", shape.where);
}

/// A grid of as many blocks. Throws size_error (E-core-003) for more than 2^32 - 1.
inline dim3 grid_of(index_t x, index_t y = 1, index_t z = 1, site where = site::here()) {
  return dim3(narrow<unsigned>(x, where), narrow<unsigned>(y, where), narrow<unsigned>(z, where));
}

/// Blocks for `items` that a grid-stride loop walks over, `items_per_block` at a time: one block for each
/// piece, but not more than `waves` for each multiprocessor. Of no influence on results.
template <cuda_space Ex>
dim3 grid_for(Ex& ex, index_t items, index_t items_per_block, int waves = 8, site where = site::here()) {
  auto const needed = (items + items_per_block - 1) / items_per_block;
  auto const useful = index_t{ex.multiprocessors()} * waves;
  return grid_of(needed < useful ? needed : useful, 1, 1, where);
}

/// Whether 16-byte accesses reach this address, and every row that starts a multiple of `stride` after it.
template <class T>
bool aligned16(T const* data, index_t stride = 0) noexcept {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         stride * static_cast<index_t>(sizeof(T)) % 16 == 0;
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
/// A few neighbouring elements of an array, in registers, as float: what one thread moves at a time. On an
/// address that 16 divides a pack moves in accesses of 16 bytes.
///
///     constexpr int n = exec::pack_size<T>;
///     float x[n];
///     exec::load_pack(x, in + i);          // in + i aligned, or n == 1
///     exec::store_pack(out + i, x);
///     exec::load_part(x, in + i, count, aligned);   // anywhere, and fewer than n at an end
#ifndef TESSERA_EXEC_PACK_CUH
#define TESSERA_EXEC_PACK_CUH

namespace tessera::inline TESSERA_ABI::exec {

/// So many elements that one access moves 16 bytes of the narrowest of these types, and whole accesses the
/// others.
template <storage_scalar... T>
inline constexpr int pack_size = ((sizeof(T) == 2) || ...) ? 8 : 4;

/// values = the N elements from `from` on.
template <int N, storage_scalar T>
__device__ __forceinline__ void load_pack(float (&values)[N], T const* from) {
  if constexpr (N == 1) {
    values[0] = *from;
  } else {
    constexpr int step = vector16<T>::count;
    static_assert(N % step == 0);
#pragma unroll
    for (int i = 0; i < N; i += step) {
      auto const words = load16(from + i);
#pragma unroll
      for (int j = 0; j < step; ++j) values[i + j] = words[j];
    }
  }
}

/// The N elements from `to` on = values, rounded.
template <int N, storage_scalar T>
__device__ __forceinline__ void store_pack(T* to, float const (&values)[N]) {
  if constexpr (N == 1) {
    *to = T(values[0]);
  } else {
    constexpr int step = vector16<T>::count;
    static_assert(N % step == 0);
#pragma unroll
    for (int i = 0; i < N; i += step) {
      vector16<T> words;
#pragma unroll
      for (int j = 0; j < step; ++j) words[j] = T(values[i + j]);
      store16(to + i, words);
    }
  }
}

/// As load_pack, of `count` elements (the others become 0); element by element unless all N are wanted and
/// `aligned` says that `from` is.
template <int N, storage_scalar T>
__device__ __forceinline__ void load_part(float (&values)[N], T const* from, index_t count, bool aligned) {
  if (aligned && count >= N) {
    load_pack(values, from);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
  }
}

template <int N, storage_scalar T>
__device__ __forceinline__ void store_part(T* to, float const (&values)[N], index_t count, bool aligned) {
  if (aligned && count >= N) {
    store_pack(to, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < count) to[i] = T(values[i]);
  }
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif

namespace tessera::inline TESSERA_ABI::exec {

enum class array_use { read, write, update };

/// An array and what a kernel does with it. `stride`: elements from row to row.
template <storage_scalar T, array_use Use>
struct element_array {
  using value_type = T;
  T* data;
  index_t stride;
};

namespace detail {
template <class>
inline constexpr bool is_element_array = false;
template <storage_scalar T, array_use Use>
inline constexpr bool is_element_array<element_array<T, Use>> = true;
} // namespace detail

/// What `writes`, `reads` and `updates` make.
template <class A>
concept array_of_elements = detail::is_element_array<A>;

template <storage_scalar T>
constexpr element_array<T, array_use::write> writes(T* data, index_t stride = 0) noexcept {
  return {data, stride};
}
template <storage_scalar T>
constexpr element_array<T, array_use::update> updates(T* data, index_t stride = 0) noexcept {
  return {data, stride};
}
/// Kernels do not write through it.
template <storage_scalar T>
constexpr element_array<T, array_use::read> reads(T const* data, index_t stride = 0) noexcept {
  return {const_cast<T*>(data), stride};
}

namespace detail {

/// N elements of one array in registers, from when they are read until they are written.
template <int N, class Array>
struct element_place;
template <int N, storage_scalar T, array_use Use>
struct element_place<N, element_array<T, Use>> {
  T* at;
  float value[N];

  __device__ __forceinline__ element_place(element_array<T, Use> array, index_t row, index_t column)
      : at(array.data + row * array.stride + column) {
    if constexpr (Use != array_use::write) load_pack(value, at);
  }
  __device__ __forceinline__ void finish() const {
    if constexpr (Use != array_use::read) store_pack(at, value);
  }
};

template <int N, class Function, class... Place>
__device__ __forceinline__ void call(Function const& function, index_t first, Place... place) {
  if constexpr (std::is_invocable_v<Function const&, index_t, decltype((place.value))...>) {
    function(first, place.value...);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) function(place.value[i]...);
  }
  (place.finish(), ...);
}

/// How each row is cut: `head` elements, `packs` whole packs of N that are aligned in all arrays, the rest.
struct element_plan {
  index_t rows, width, head, packs;
};

inline constexpr int element_threads = 256;

template <int N, class Function, class... Array>
TESSERA_KERNEL void __launch_bounds__(element_threads)
    element_kernel(element_plan plan, __grid_constant__ Function const function, Array... array) {
  auto const first = index_t{blockIdx.x} * blockDim.x + threadIdx.x;
  auto const threads = index_t{gridDim.x} * blockDim.x;
  auto const single = plan.width - plan.packs * N;
  for (auto row = index_t{blockIdx.y} * blockDim.y + threadIdx.y; row < plan.rows;
       row += index_t{gridDim.y} * blockDim.y) {
#pragma unroll 1 // one turn, but for the largest arrays
    for (auto p = first; p < plan.packs; p += threads) {
      auto const i = plan.head + p * N;
      call<N>(function, row * plan.width + i, element_place<N, Array>(array, row, i)...);
    }
#pragma unroll 1
    for (auto s = first; s < single; s += threads) {
      auto const i = s < plan.head ? s : s + plan.packs * N;
      call<1>(function, row * plan.width + i, element_place<1, Array>(array, row, i)...);
    }
  }
}

/// The head after which every row of every array is aligned, or -1.
template <int N, class... Array>
index_t common_head(index_t rows, Array const&... array) {
  for (index_t head = 0; head < N; ++head)
    if ((aligned16(array.data + head, rows > 1 ? array.stride : 0) && ...)) return head;
  return -1;
}

} // namespace detail

/// Applies `function` to each of `rows` rows of `width` elements.
template <cuda_space Ex, class Function, array_of_elements... Array>
void for_elements(Ex& ex, index_t rows, index_t width, Function const& function, Array... array) {
  if (rows <= 0 || width <= 0) return;
  if (((array.stride == width) && ...)) width *= rows, rows = 1; // no gaps: one long row
  constexpr int n = pack_size<typename Array::value_type...>;
  auto const head = detail::common_head<n>(rows, array...);
  detail::element_plan const plan{.rows = rows,
                                  .width = width,
                                  .head = head > 0 ? head : 0,
                                  .packs = head < 0 || head > width ? 0 : (width - head) / n};
  auto const work = (std::max)(plan.packs, width - plan.packs * n);
  index_t across = 32; // threads along a row; short rows share a block
  while (across < detail::element_threads && across < work) across *= 2;
  auto const down = (std::min)(detail::element_threads / across, rows);
  constexpr index_t most_across = index_t{1} << 20, most_down = 65535; // the kernel loops over the rest
  launch(ex,
         {.grid = grid_of((std::min)((work + across - 1) / across, most_across),
                          (std::min)((rows + down - 1) / down, most_down)),
          .block = grid_of(across, down)},
         detail::element_kernel<n, Function, Array...>, plan, function, array...);
}

/// Applies `function` to each of `count` elements.
template <cuda_space Ex, class Function, array_of_elements... Array>
void for_elements(Ex& ex, index_t count, Function const& function, Array... array) {
  for_elements(ex, 1, count, function, array...);
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif

/// add on CUDA: one pass.
#ifndef TESSERA_OPS_CUDA_ADD_CUH
#define TESSERA_OPS_CUDA_ADD_CUH

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {
struct add_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float a, float b) const noexcept { y = a + b; }
};
} // namespace cuda_detail

template <>
struct add_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 1, typename Ex::memory> out, view<T const, 1, typename Ex::memory> a,
                  view<T const, 1, typename Ex::memory> b) {
    exec::for_elements(ex, out.size(), cuda_detail::add_element{}, exec::writes(out.data()),
                       exec::reads(a.data()), exec::reads(b.data()));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// attention on CUDA, in the manner of FlashAttention-2: scores exist in registers only, forward and
/// backward, and memory is linear in the number of tokens (backward keeps one float a query and head beside
/// the gradients). 16-bit storage goes through the tensor cores (mma.sync m16n8k16, fp32 sums; sm_80 and
/// newer) in tiles made for heads of 64, 96 and 128; narrower heads are filled up with zeros to the next of
/// these. fp32 storage, and wider heads, take the plain kernels. Results do not depend on anything but the
/// inputs: no atomic sums.
///
/// Rows that begin at multiples of 16 bytes are copied by cp.async, others element by element.
///
/// What is not used yet: on sm_90, wgmma would multiply 64-row tiles straight from shared memory and the TMA
/// would bring them, while mma.sync reaches about two thirds of that chip's matrix peak; on sm_100, tcgen05.
#ifndef TESSERA_OPS_CUDA_ATTENTION_CUH
#define TESSERA_OPS_CUDA_ATTENTION_CUH

/// Attention backward on the tensor cores. Scores are made again from the logarithms of their sums; with
/// delta = sum(d_out * out) of a query, P = exp(scale q kᵀ - log_sum_exp) and dS = P * (d_out vᵀ - delta),
///     dv = Pᵀ d_out,   dk = scale dSᵀ q,   dq = scale dS k.
/// Three kernels: delta; dk and dv, a thread block for each block of keys; dq, one for each block of queries.
/// The latter two both make P and dS (7 products of tiles where one kernel with atomic sums needs 5), and in
/// return every sum is made by one warp, in registers, in an order that does not change.
#ifndef TESSERA_OPS_CUDA_DETAIL_ATTENTION_BACKWARD_CUH
#define TESSERA_OPS_CUDA_DETAIL_ATTENTION_BACKWARD_CUH

/// What the attention kernels share: their sizes, matrices of one head in global memory, tiles of them in
/// shared memory, and products of tiles on the tensor cores.
///
/// A warp's product has 16 M rows and 8 N columns and stays in registers as float[M][N][4], as mma_16x8x16
/// (exec/device.cuh) leaves it: lane l holds rows l / 4 (elements 0, 1) and l / 4 + 8 (elements 2, 3) of each
/// 16 x 8 piece, in columns 2 (l % 4) and 2 (l % 4) + 1. Two such pieces side by side, rounded to 16 bits,
/// are just what the instruction wants as its left operand of 16 x 16: a product turns into the left operand
/// of the next one without leaving its registers.
#ifndef TESSERA_OPS_CUDA_DETAIL_ATTENTION_TILES_CUH
#define TESSERA_OPS_CUDA_DETAIL_ATTENTION_TILES_CUH

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// [batch, tokens, heads, width] on the device.
template <class T>
using attention_heads = view<T, 4, exec::cuda_memory>;

/// detail::attention_shape as kernels read it. Attention without a mask is causal attention whose first query
/// stands behind the last key, so kernels know only the latter.
struct attention_sizes {
  int queries, keys, heads, key_heads, width, first_query;
  float scale;

  attention_sizes(detail::attention_shape const& shape, site where)
      : queries(narrow<int>(shape.queries, where)), keys(narrow<int>(shape.keys, where)),
        heads(narrow<int>(shape.heads, where)), key_heads(narrow<int>(shape.key_heads, where)),
        width(narrow<int>(shape.width, where)),
        first_query(shape.causal && shape.first_query < shape.keys ? narrow<int>(shape.first_query, where)
                                                                   : keys),
        scale(shape.scale) {
    narrow<int>(shape.queries + shape.keys + 512, where); // positions in tiles that hang over
  }

  /// Keys that the query at `t` sees: 0 .. visible(t) - 1.
  TESSERA_HOST_DEVICE int visible(int t) const noexcept {
    auto const end = first_query + t + 1;
    return end < keys ? end : keys;
  }
  TESSERA_HOST_DEVICE int group() const noexcept { return heads / key_heads; }
};

/// One head of one sample: row t begins at data + t * stride.
template <class T>
struct head_matrix {
  T* data;
  index_t stride;

  __device__ head_matrix(attention_heads<T> const& x, int sample, int head)
      : data(x.data() + sample * x.stride(0) + head * x.stride(2)), stride(x.stride(1)) {}
  __device__ T* row(int t) const { return data + t * stride; }
};

/// Which block of rows of which head a thread block works on: the blocks of one head follow each other.
struct attention_place {
  int sample, head, block;

  __device__ attention_place(int heads, int blocks) {
    auto const index = static_cast<int>(blockIdx.x), row = index / blocks;
    block = index % blocks;
    head = row % heads;
    sample = row / heads;
  }
};

TESSERA_HOST_DEVICE constexpr int blocks_of(int count, int size) noexcept {
  return (count + size - 1) / size;
}

/// Whether every row of all of them begins and ends at multiples of 16 bytes, as tiles need it.
template <class... T>
bool rows_are_aligned(attention_heads<T> const&... all) {
  auto const is_aligned = []<class U>(attention_heads<U> const& x) {
    constexpr index_t unit = 16 / sizeof(U);
    for (int d = 0; d < 3; ++d)
      if (x.extent(d) > 1 && x.stride(d) % unit != 0) return false;
    return x.extent(3) % unit == 0 && reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0;
  };
  return (is_aligned(all) && ...);
}

/// The largest value, and the sum, of the four lanes that share a row of a product.
__device__ inline float maximum_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

inline constexpr float log2_of_e = 1.44269504f, log_of_2 = 0.693147181f;

/// A product, rounded to 16 bits: a left operand for each two pieces of 16 x 8.
template <exec::tensor_core_scalar T, int M, int N>
struct packed_product {
  std::uint32_t pairs[M][N / 2][4];

  __device__ explicit packed_product(float const (&values)[M][N][4]) {
#pragma unroll
    for (int i = 0; i < M * N * 2; ++i) {
      auto const m = i / (2 * N), n = i / 2 % N, c = i % 2 * 2;
      pairs[m][n / 2][n % 2 * 2 + c / 2] = exec::pack_pair<T>(values[m][n][c], values[m][n][c + 1]);
    }
  }
};

/// Rows of `Width` 16-bit elements in shared memory. A row's pieces of 16 bytes are permuted by the row's
/// number, so that eight rows of one column of pieces, which ldmatrix reads at once, lie in different banks.
template <exec::tensor_core_scalar T, int Width>
struct attention_tile {
  static constexpr int pieces = Width / 8;
  static_assert(pieces % 4 == 0 && Width % 16 == 0);

  /// Where piece `piece` of row `row` begins. 128 bytes hold the 32 banks: rows of whole multiples of that
  /// all begin at bank 0 and take eight different places; else rows begin at bank 0 and 16 in turn. Pieces
  /// change places among `turn` neighbours only.
  static constexpr int turn = pieces % 8 == 0 ? 8 : 4;
  static __device__ int at(int row, int piece) {
    return row * Width + 8 * (piece / turn * turn + ((piece ^ (turn == 8 ? row : row / 2)) & (turn - 1)));
  }

  /// Starts to copy rows first .. first + Rows - 1 of `from`, zeros beyond row `end` and column `width`; they
  /// are there when copy_async_wait says so. Called by all `Threads` threads of a block.
  template <int Rows, int Threads>
  static __device__ void load(T* tile, head_matrix<T const> const& from, int first, int end, int width) {
    // `turn` threads side by side copy a row, and go down the rows together.
    constexpr int step = Threads / turn;
    static_assert(Rows % step == 0 && step % 8 == 0);
    auto const thread = static_cast<int>(threadIdx.x);
    auto const row = first + thread / turn, column = 8 * (thread % turn);
    auto* to = tile + at(thread / turn, thread % turn);
    auto const* source = from.row(row) + column;
#pragma unroll
    for (int r = 0; r < Rows; r += step) {
#pragma unroll
      for (int c = 0; c < Width; c += 8 * turn)
        exec::copy_async16(to + r * Width + c, source + c, row + r < end && column + c < width);
      source += step * from.stride;
    }
  }

  /// 16 M rows of a tile, from `row` on, as a left operand that is read anew for each product. Steps of the
  /// product are unrolled `Unroll` at a time: the more, the more registers hold what was read ahead.
  template <int M, int Unroll = Width / 16>
  struct rows_in_shared {
    static constexpr int unroll = Unroll;
    T const* first;

    __device__ rows_in_shared(T const* tile, int row) : first(tile + row * Width) {}
    __device__ void read(std::uint32_t (&a)[M][4], int k) const {
#pragma unroll
      for (int m = 0; m < M; ++m) exec::load_matrix_x4(a[m], first + 16 * m * Width + shifted(square(), k));
    }
  };
  /// The same, read once and kept: Width M / 4 registers.
  template <int M>
  struct rows_in_registers {
    static constexpr int unroll = Width / 16;
    std::uint32_t all[Width / 16][M][4];

    __device__ rows_in_registers(T const* tile, int row) {
#pragma unroll
      for (int k = 0; k < Width / 16; ++k) rows_in_shared<M>(tile, row).read(all[k], k);
    }
    __device__ void read(std::uint32_t (&a)[M][4], int k) const {
#pragma unroll
      for (int i = 0; i < 4 * M; ++i) a[i / 4][i % 4] = all[k][i / 4][i % 4];
    }
  };

  /// sums += left rightᵀ, of rows 0 .. 8 N - 1 of `right`.
  template <int M, int N, class Rows>
  static __device__ void multiply_transposed(float (&sums)[M][N][4], Rows const& left, T const* right) {
#pragma unroll Rows::unroll
    for (int k = 0; k < Width / 16; ++k) {
      std::uint32_t a[M][4];
      left.read(a, k);
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        std::uint32_t b[4];
        exec::load_matrix_x4(b, right + 8 * n * Width + shifted(columns(), k));
#pragma unroll
        for (int m = 0; m < M; ++m) {
          exec::mma_16x8x16<T>(sums[m][n], a[m], b[0], b[1]);
          exec::mma_16x8x16<T>(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// sums += left right, of a product `left`, packed, and rows 0 .. 8 N - 1 of `right`.
  template <int M, int N>
  static __device__ void multiply(float (&sums)[M][Width / 8][4], packed_product<T, M, N> const& left,
                                  T const* right) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k)
#pragma unroll
      for (int n = 0; n < Width / 16; ++n) {
        std::uint32_t b[4];
        exec::load_matrix_x4_transposed(b, right + 16 * k * Width + shifted(square(), n));
#pragma unroll
        for (int m = 0; m < M; ++m) {
          exec::mma_16x8x16<T>(sums[m][2 * n], left.pairs[m][k], b[0], b[1]);
          exec::mma_16x8x16<T>(sums[m][2 * n + 1], left.pairs[m][k], b[2], b[3]);
        }
      }
  }

  /// Writes a warp's product to rows first + row .. of `to`, as far as they lie before `end`, by way of rows
  /// row .. of `tile`, which this warp alone must be using.
  template <int M>
  static __device__ void store(head_matrix<T> const& to, int first, int end, int width, T* tile, int row,
                               float const (&values)[M][Width / 8][4]) {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < Width / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          auto* pair = tile + at(row + 16 * m + 8 * h + lane / 4, n) + 2 * (lane % 4);
          *reinterpret_cast<std::uint32_t*>(pair) =
              exec::pack_pair<T>(values[m][n][2 * h], values[m][n][2 * h + 1]);
        }
    __syncwarp();
    for (int i = lane; i < 16 * M * pieces; i += 32) {
      auto const r = row + i / pieces, piece = i % pieces;
      if (first + r < end && 8 * piece < width)
        exec::store16(to.row(first + r) + 8 * piece, exec::load16(tile + at(r, piece)));
    }
  }

private:
  // Four 8 x 8 matrices are read at once, of which each lane names one row: of rows 0 .. 15 in pieces 0 and
  // 1, from where `shifted` leads to pieces 2 k and 2 k + 1.

  /// Upper left, lower left, upper right, lower right: a left operand as it is; transposed, a right operand
  /// of 16 columns whose depth runs down the rows.
  static __device__ int square() {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    return at(lane % 16, lane / 16);
  }
  /// Upper left, upper right, lower left, lower right: a right operand of 16 columns, which are the rows.
  static __device__ int columns() {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    return at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  /// Permuting the pieces is an exclusive or, and rows begin at multiples of `turn` pieces.
  static __device__ int shifted(int offset, int k) {
    return (offset ^ 16 * (k % (turn / 2))) + 8 * turn * (k / (turn / 2));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// Of the kernel for dk and dv. Its two sums take 16 row_tiles x Width floats of a warp's registers each.
template <int Width>
struct attention_keys_tuning {
  static constexpr int warps = 4, row_tiles = Width == 64 ? 2 : 1, queries = Width == 96 ? 64 : 32;
  static constexpr int unroll = Width == 64 ? 2 : Width / 16; ///< More, and registers spill.
  static constexpr int threads = 32 * warps, keys = 16 * row_tiles * warps;
  static constexpr int shared_bytes = (2 * keys + 4 * queries) * Width * 2 + 4 * queries * 4;
};

/// Of the kernel for dq.
template <int Width>
struct attention_queries_tuning {
  static constexpr int warps = 4, row_tiles = 2, keys = 32;
  static constexpr int unroll = Width < 128 ? Width / 16 : 2; ///< More, and registers spill.
  static constexpr int threads = 32 * warps, queries = 16 * row_tiles * warps;
  static constexpr int shared_bytes = (2 * queries + 4 * keys) * Width * 2;
};

template <storage_scalar T>
struct attention_backward_arguments {
  attention_heads<T> dq, dk, dv;
  attention_heads<T const> d_out, q, k, v, out;
  float const* log_sum_exp;
  float* delta; ///< [batch, heads, queries], as log_sum_exp.
  attention_sizes sizes;
  bool aligned; ///< Rows can be read 16 bytes at a time.

  /// Where the numbers of a head's queries begin in log_sum_exp and delta.
  __device__ index_t rows_of(int sample, int head) const {
    return (index_t{sample} * sizes.heads + head) * sizes.queries;
  }
};

inline constexpr int attention_delta_threads = 256;

/// delta = sum(d_out * out) of each row; eight lanes a row, four rows a warp.
template <storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(attention_delta_threads)
    attention_delta(attention_backward_arguments<T> x, index_t rows) {
  constexpr int unit = 16 / sizeof(T), lanes = 8;
  auto const row = (index_t{blockIdx.x} * attention_delta_threads + threadIdx.x) / lanes;
  auto const lane = static_cast<int>(threadIdx.x % lanes);
  auto const& sizes = x.sizes;
  float sum = 0;
  auto const head = static_cast<int>(row % sizes.heads);
  auto const query = static_cast<int>(row / sizes.heads % sizes.queries);
  auto const sample = static_cast<int>(row / sizes.heads / sizes.queries);
  if (row < rows) {
    auto const* a = head_matrix<T const>(x.d_out, sample, head).row(query);
    auto const* b = head_matrix<T const>(x.out, sample, head).row(query);
    if (x.aligned) {
      for (int d = unit * lane; d < sizes.width; d += unit * lanes) {
        auto const left = exec::load16(a + d), right = exec::load16(b + d);
#pragma unroll
        for (int i = 0; i < unit; ++i) sum += static_cast<float>(left[i]) * static_cast<float>(right[i]);
      }
    } else {
      for (int d = lane; d < sizes.width; d += lanes)
        sum += static_cast<float>(a[d]) * static_cast<float>(b[d]);
    }
  }
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (row < rows && lane == 0) x.delta[x.rows_of(sample, head) + query] = sum;
}

/// dk and dv of a block of keys: sums over the queries of all heads that read them, head after head. Scores
/// stand on their side (rows are keys), so that Pᵀ and dSᵀ are left operands as they are. Queries and d_out
/// have two places each: while one block is multiplied, the next one is on its way.
template <exec::tensor_core_scalar T, int Width>
TESSERA_KERNEL void __launch_bounds__(attention_keys_tuning<Width>::threads, 2)
    attention_backward_keys(attention_backward_arguments<T> x) {
  using tuning = attention_keys_tuning<Width>;
  using tile = attention_tile<T, Width>;
  constexpr int queries = tuning::queries, keys = tuning::keys, threads = tuning::threads;
  constexpr int M = tuning::row_tiles, N = queries / 8;
  using rows = typename tile::template rows_in_shared<M, tuning::unroll>;
  static_assert(2 * queries <= threads);
  auto const sizes = x.sizes;
  attention_place const place(sizes.key_heads, blocks_of(sizes.keys, keys));
  auto const thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  auto const first = place.block * keys, row = thread / 32 * 16 * M, own = first + row;

  auto* const k_tile = exec::dynamic_shared<T>();
  auto *const v_tile = k_tile + keys * Width, *const q_tiles = v_tile + keys * Width;
  auto* const d_out_tiles = q_tiles + 2 * queries * Width;
  auto* const numbers = reinterpret_cast<float*>(d_out_tiles + 2 * queries * Width);
  float dk[M][Width / 8][4] = {}, dv[M][Width / 8][4] = {};

  // The blocks of queries that see any of the keys, of one head after the other.
  auto const group = sizes.group(), last = blocks_of(sizes.queries, queries);
  auto const begin = first > sizes.first_query ? (first - sizes.first_query) / queries : 0;
  auto next_head = begin < last ? 0 : group, next_block = begin, place_of_next = 0;
  auto const load_next = [&] {
    auto const head = place.head * group + next_head, query = next_block * queries;
    tile::template load<queries, threads>(q_tiles + place_of_next * queries * Width,
                                          head_matrix<T const>(x.q, place.sample, head), query, sizes.queries,
                                          sizes.width);
    tile::template load<queries, threads>(d_out_tiles + place_of_next * queries * Width,
                                          head_matrix<T const>(x.d_out, place.sample, head), query,
                                          sizes.queries, sizes.width);
    if (thread < 2 * queries) {
      auto const inside = query + thread % queries < sizes.queries;
      auto const at = inside ? x.rows_of(place.sample, head) + query + thread % queries : 0;
      exec::copy_async4(numbers + place_of_next * 2 * queries + thread,
                        (thread < queries ? x.log_sum_exp : x.delta) + at, inside);
    }
    exec::copy_async_commit();
  };

  tile::template load<keys, threads>(k_tile, {x.k, place.sample, place.head}, first, sizes.keys, sizes.width);
  tile::template load<keys, threads>(v_tile, {x.v, place.sample, place.head}, first, sizes.keys, sizes.width);
  if (next_head < group) load_next();
  while (next_head < group) {
    auto const query = next_block * queries;
    auto const* const q_tile = q_tiles + place_of_next * queries * Width;
    auto const* const d_out_tile = d_out_tiles + place_of_next * queries * Width;
    auto const* const log_sum_exp = numbers + place_of_next * 2 * queries;
    auto const* const delta = log_sum_exp + queries;
    exec::copy_async_wait<0>();
    __syncthreads(); // this block is there, and nobody reads the one before it any more
    place_of_next ^= 1;
    if (++next_block == last) ++next_head, next_block = begin;
    if (next_head < group) load_next();
    if (own >= sizes.visible(query + queries - 1)) continue;

    float p[M][N][4] = {}, ds[M][N][4] = {};
    tile::multiply_transposed(p, rows(k_tile, row), q_tile);
    auto const factor = sizes.scale * log2_of_e;
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
      auto const total = log_sum_exp[8 * n + 2 * (lane % 4) + c % 2] * log2_of_e;
      p[m][n][c] = exec::exp2_approximate(fmaf(p[m][n][c], factor, -total));
    }
    if (own + 16 * M > sizes.visible(query)) {
#pragma unroll
      for (int i = 0; i < M * N * 4; ++i) {
        auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
        auto const key = own + 16 * m + c / 2 * 8 + lane / 4;
        if (key >= sizes.visible(query + 8 * n + 2 * (lane % 4) + c % 2)) p[m][n][c] = 0;
      }
    }
    tile::multiply_transposed(ds, rows(v_tile, row), d_out_tile);
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
      ds[m][n][c] = p[m][n][c] * (ds[m][n][c] - delta[8 * n + 2 * (lane % 4) + c % 2]);
    }
    packed_product<T, M, N> const packed_p(p), packed_ds(ds);
    tile::multiply(dv, packed_p, d_out_tile);
    tile::multiply(dk, packed_ds, q_tile);
  }
  exec::copy_async_wait<0>(); // where nobody sees the keys, they are still on their way
  __syncthreads();

#pragma unroll
  for (int i = 0; i < M * Width / 2; ++i) dk[i / (Width / 2)][i / 4 % (Width / 8)][i % 4] *= sizes.scale;
  tile::store(head_matrix<T>(x.dk, place.sample, place.head), first, sizes.keys, sizes.width, k_tile, row,
              dk);
  tile::store(head_matrix<T>(x.dv, place.sample, place.head), first, sizes.keys, sizes.width, v_tile, row,
              dv);
}

/// dq of a block of queries: a sum over the keys that they see, two places each for keys and values.
template <exec::tensor_core_scalar T, int Width>
TESSERA_KERNEL void __launch_bounds__(attention_queries_tuning<Width>::threads, 2)
    attention_backward_queries(attention_backward_arguments<T> x) {
  using tuning = attention_queries_tuning<Width>;
  using tile = attention_tile<T, Width>;
  constexpr int queries = tuning::queries, keys = tuning::keys, threads = tuning::threads;
  constexpr int M = tuning::row_tiles, N = keys / 8;
  using rows = typename tile::template rows_in_shared<M, tuning::unroll>;
  auto const sizes = x.sizes;
  auto const blocks = blocks_of(sizes.queries, queries);
  attention_place const place(sizes.heads, blocks);
  auto const lane = static_cast<int>(threadIdx.x % 32);
  auto const row = static_cast<int>(threadIdx.x / 32) * 16 * M;
  auto const first = (blocks - 1 - place.block) * queries, own = first + row;
  auto const key_head = place.head / sizes.group();
  head_matrix<T const> const k(x.k, place.sample, key_head), v(x.v, place.sample, key_head);

  auto* const q_tile = exec::dynamic_shared<T>();
  auto *const d_out_tile = q_tile + queries * Width, *const k_tiles = d_out_tile + queries * Width;
  auto* const v_tiles = k_tiles + 2 * keys * Width;
  float dq[M][Width / 8][4] = {};

  float total[M][2], delta[M][2];
#pragma unroll
  for (int i = 0; i < 2 * M; ++i) {
    auto const query = own + 8 * i + lane / 4;
    auto const at = x.rows_of(place.sample, place.head) + query;
    total[i / 2][i % 2] = query < sizes.queries ? x.log_sum_exp[at] * log2_of_e : 0.0f;
    delta[i / 2][i % 2] = query < sizes.queries ? x.delta[at] : 0.0f;
  }
  auto const load = [&](int key) {
    auto const at = key / keys % 2 * keys * Width;
    tile::template load<keys, threads>(k_tiles + at, k, key, sizes.keys, sizes.width);
    tile::template load<keys, threads>(v_tiles + at, v, key, sizes.keys, sizes.width);
    exec::copy_async_commit();
  };

  auto const end = sizes.visible((first + queries < sizes.queries ? first + queries : sizes.queries) - 1);
  auto const warp_begin = sizes.visible(own);
  auto const warp_end = own < sizes.queries ? sizes.visible(own + 16 * M - 1) : 0;
  tile::template load<queries, threads>(q_tile, {x.q, place.sample, place.head}, first, sizes.queries,
                                        sizes.width);
  tile::template load<queries, threads>(d_out_tile, {x.d_out, place.sample, place.head}, first, sizes.queries,
                                        sizes.width);
  load(0);
  for (int key = 0; key < end; key += keys) {
    exec::copy_async_wait<0>();
    __syncthreads(); // this block is there, and nobody reads the one before it any more
    if (key + keys < end) load(key + keys);
    if (key >= warp_end) continue;
    auto const at = key / keys % 2 * keys * Width;

    float p[M][N][4] = {}, ds[M][N][4] = {};
    tile::multiply_transposed(p, rows(q_tile, row), k_tiles + at);
    auto const factor = sizes.scale * log2_of_e;
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
      p[m][n][c] = exec::exp2_approximate(fmaf(p[m][n][c], factor, -total[m][c / 2]));
    }
    if (key + keys > warp_begin) {
#pragma unroll
      for (int i = 0; i < M * N * 4; ++i) {
        auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
        auto const query = own + 16 * m + c / 2 * 8 + lane / 4;
        if (key + 8 * n + 2 * (lane % 4) + c % 2 >= sizes.visible(query)) p[m][n][c] = 0;
      }
    }
    tile::multiply_transposed(ds, rows(d_out_tile, row), v_tiles + at);
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
      ds[m][n][c] = p[m][n][c] * (ds[m][n][c] - delta[m][c / 2]);
    }
    tile::multiply(dq, packed_product<T, M, N>(ds), k_tiles + at);
  }
  exec::copy_async_wait<0>(); // where there was no key, the queries are still on their way
  __syncthreads();

#pragma unroll
  for (int i = 0; i < M * Width / 2; ++i) dq[i / (Width / 2)][i / 4 % (Width / 8)][i % 4] *= sizes.scale;
  tile::store(head_matrix<T>(x.dq, place.sample, place.head), first, sizes.queries, sizes.width, q_tile, row,
              dq);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
/// Attention forward on the tensor cores (Dao, "FlashAttention-2", 2023). A thread block takes a block of
/// queries of one head and walks over the keys that they see; each warp keeps its rows of the output, their
/// reference exponents and sums in registers, and everything is written once, at the end.
#ifndef TESSERA_OPS_CUDA_DETAIL_ATTENTION_FORWARD_CUH
#define TESSERA_OPS_CUDA_DETAIL_ATTENTION_FORWARD_CUH

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// Tile sizes of the forward kernel. Two row tiles of 16 a warp: each right operand read from shared memory
/// serves two products.
template <int Width>
struct attention_forward_tuning {
  static constexpr int warps = 4, row_tiles = 2, keys = 64;
  static constexpr int unroll = Width < 128 ? Width / 16 : 2; ///< More, and registers spill.
  static constexpr bool keep_queries = Width == 64; ///< In registers, from the first product to the last.
  static constexpr int threads = 32 * warps, queries = 16 * row_tiles * warps;
  static constexpr int shared_bytes = (queries + 2 * keys) * Width * 2;
};

template <storage_scalar T>
struct attention_forward_arguments {
  attention_heads<T> out;
  float* log_sum_exp;
  attention_heads<T const> q, k, v;
  attention_sizes sizes;
};

/// Softmax over columns that come in blocks. Exponentials are taken relative to a reference for each row.
/// The reference follows the row's maximum, but not at once: while the maximum exceeds it by less than 2^8,
/// nothing can overflow, and a pass over the output is saved.
template <int M, int N>
class online_softmax {
public:
  __device__ online_softmax() {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) {
      reference_[i / 2][i % 2] = lowest;
      sum_[i / 2][i % 2] = 0;
    }
  }

  /// Turns scores into exponentials of factor * score, factor > 0 and in units of log 2; rescales `out`.
  template <int W>
  __device__ void apply(float (&scores)[M][N][4], float (&out)[M][W][4], float factor) {
    float top[M][2];
    auto far = false;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        auto largest = scores[m][0][2 * h];
#pragma unroll
        for (int n = 0; n < N; ++n)
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
        top[m][h] = maximum_of_row(largest) * factor;
        far = far || top[m][h] > reference_[m][h] + 8;
      }
    if (__any_sync(0xffffffffu, far)) follow(top, out);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          auto const e = exec::exp2_approximate(fmaf(scores[m][n][i], factor, -reference_[m][i / 2]));
          scores[m][n][i] = e;
          sum_[m][i / 2] += e;
        }
  }

  /// Adds up the sums of the lanes of a row; call once, after the last block.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) sum_[i / 2][i % 2] = sum_of_row(sum_[i / 2][i % 2]);
  }
  /// What the output of row (m, h) must be multiplied by, zero where nothing was seen.
  __device__ float normaliser(int m, int h) const {
    return sum_[m][h] > 0 ? 1 / sum_[m][h] : 0.0f;
  }
  __device__ float log_sum_exp(int m, int h) const {
    return (reference_[m][h] + log2f(sum_[m][h])) * log_of_2;
  }

private:
  /// Finite, so that the difference to the score of a hidden key, minus infinity, is no NaN.
  static constexpr float lowest = std::numeric_limits<float>::lowest();

  template <int W>
  __device__ void follow(float const (&top)[M][2], float (&out)[M][W][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        auto const reference = fmaxf(reference_[m][h], top[m][h]);
        auto const shrink = exec::exp2_approximate(reference_[m][h] - reference);
        reference_[m][h] = reference;
        sum_[m][h] *= shrink;
#pragma unroll
        for (int n = 0; n < W; ++n) {
          out[m][n][2 * h] *= shrink;
          out[m][n][2 * h + 1] *= shrink;
        }
      }
  }

  float reference_[M][2], sum_[M][2]; ///< The sum is that of the lane's own columns until finish().
};

template <int M, int N>
__device__ void negate(float (&values)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M * N * 4; ++i) values[i / (4 * N)][i / 4 % N][i % 4] *= -1.0f;
}

/// The keys and the values of a block have one place in shared memory each: while one is multiplied, the
/// other is on its way.
template <exec::tensor_core_scalar T, int Width>
TESSERA_KERNEL void __launch_bounds__(attention_forward_tuning<Width>::threads, 2)
    attention_forward_tiles(attention_forward_arguments<T> x) {
  using tuning = attention_forward_tuning<Width>;
  using tile = attention_tile<T, Width>;
  constexpr int queries = tuning::queries, keys = tuning::keys, threads = tuning::threads;
  constexpr int M = tuning::row_tiles, N = keys / 8;
  using rows = std::conditional_t<tuning::keep_queries, typename tile::template rows_in_registers<M>,
                                  typename tile::template rows_in_shared<M, tuning::unroll>>;
  auto const sizes = x.sizes;
  auto const blocks = blocks_of(sizes.queries, queries);
  attention_place const place(sizes.heads, blocks);
  auto const lane = static_cast<int>(threadIdx.x % 32);
  auto const row = static_cast<int>(threadIdx.x / 32) * 16 * M; // the warp's first, in the block
  auto const first = (blocks - 1 - place.block) * queries; // the block's first: the longest walks start first
  auto const key_head = place.head / sizes.group();
  head_matrix<T const> const q(x.q, place.sample, place.head), k(x.k, place.sample, key_head),
      v(x.v, place.sample, key_head);

  auto* const q_tile = exec::dynamic_shared<T>();
  auto *const k_tile = q_tile + queries * Width, *const v_tile = k_tile + keys * Width;
  float out[M][Width / 8][4] = {};
  online_softmax<M, N> softmax;
  auto const factor = fabsf(sizes.scale) * log2_of_e;

  auto const end = sizes.visible((first + queries < sizes.queries ? first + queries : sizes.queries) - 1);
  auto const warp_begin = sizes.visible(first + row);
  auto const warp_end = first + row < sizes.queries ? sizes.visible(first + row + 16 * M - 1) : 0;
  tile::template load<queries, threads>(q_tile, q, first, sizes.queries, sizes.width);
  tile::template load<keys, threads>(k_tile, k, 0, sizes.keys, sizes.width);
  exec::copy_async_commit();
  exec::copy_async_wait<0>();
  __syncthreads();
  rows const q_rows(q_tile, row);
  for (int key = 0; key < end; key += keys) {
    float scores[M][N][4] = {};
    exec::copy_async_wait<0>();
    __syncthreads(); // the keys are there, and nobody reads values any more
    tile::template load<keys, threads>(v_tile, v, key, sizes.keys, sizes.width);
    exec::copy_async_commit();
    if (key < warp_end) tile::multiply_transposed(scores, q_rows, k_tile);

    exec::copy_async_wait<0>();
    __syncthreads(); // the values are there, and nobody reads keys any more
    if (key < warp_end) {
      if (sizes.scale < 0) negate(scores);
      if (key + keys > warp_begin) {
#pragma unroll
        for (int i = 0; i < M * N * 4; ++i) {
          auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
          auto const query = first + row + 16 * m + c / 2 * 8 + lane / 4;
          if (key + 8 * n + 2 * (lane % 4) + c % 2 >= sizes.visible(query))
            scores[m][n][c] = -std::numeric_limits<float>::infinity();
        }
      }
      softmax.apply(scores, out, factor);
    }
    packed_product<T, M, N> const p(scores);
    if (key + keys < end) { // not before: the copy's addresses would need the registers of the scores
      tile::template load<keys, threads>(k_tile, k, key + keys, sizes.keys, sizes.width);
      exec::copy_async_commit();
    }
    if (key < warp_end) tile::multiply(out, p, v_tile);
  }

  softmax.finish();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto const normaliser = softmax.normaliser(m, h);
#pragma unroll
      for (int n = 0; n < Width / 8; ++n) {
        out[m][n][2 * h] *= normaliser;
        out[m][n][2 * h + 1] *= normaliser;
      }
      auto const query = first + row + 16 * m + 8 * h + lane / 4;
      if (lane % 4 == 0 && query < sizes.queries)
        x.log_sum_exp[(index_t{place.sample} * sizes.heads + place.head) * sizes.queries + query] =
            softmax.log_sum_exp(m, h);
    }
  tile::store(head_matrix<T>(x.out, place.sample, place.head), first, sizes.queries, sizes.width, q_tile, row,
              out);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
/// Attention in plain CUDA C++, for what the tensor cores' tiles do not take: fp32, which stays fp32 in every
/// product, and heads wider than 128. One warp a row of the result, one lane a column of the scores; the row
/// and its sums stand in shared memory. Written to be checked against the formula, not to be fast.
#ifndef TESSERA_OPS_CUDA_DETAIL_ATTENTION_PLAIN_CUH
#define TESSERA_OPS_CUDA_DETAIL_ATTENTION_PLAIN_CUH

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// Four warps a block, fewer where rows are so wide that their shared memory would not fit: each warp has
/// `floats_per_warp`.
struct attention_plain_tuning {
  static constexpr int warps = 4, shared_bytes = 48 << 10;

  static int threads(int floats_per_warp) noexcept {
    auto const fitting = shared_bytes / (4 * floats_per_warp);
    return 32 * (fitting < 1 ? 1 : fitting < warps ? fitting : warps);
  }
};

/// The row of the result that a warp works on, and its lane.
struct warp_row {
  int lane, token, head, sample;
  bool inside;

  __device__ warp_row(int tokens, int heads, int batch) : lane(static_cast<int>(threadIdx.x % 32)) {
    auto const row = index_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
    token = static_cast<int>(row % tokens);
    head = static_cast<int>(row / tokens % heads);
    sample = static_cast<int>(row / tokens / heads);
    inside = sample < batch;
  }
};

/// The warp's part of the dynamic shared memory.
__device__ inline float* floats_of_warp(int count) {
  return exec::dynamic_shared<float>() + threadIdx.x / 32 * static_cast<unsigned>(count);
}

__device__ inline float maximum_of_warp(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ inline float sum_of_warp(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <storage_scalar T>
__device__ float dot(float const* a, T const* b, int width) {
  float sum = 0;
  for (int d = 0; d < width; ++d) sum += a[d] * static_cast<float>(b[d]);
  return sum;
}

/// sum[d] = shrink * sum[d] + Σ weight * row first + j, where `weight` is lane j's, over j < count.
template <storage_scalar T>
__device__ void add_rows(float* sum, float shrink, float weight, head_matrix<T const> const& rows, int first,
                         int count, int width, int lane) {
  for (int begin = 0; begin < width; begin += 32) {
    auto const d = begin + lane;
    float part = 0;
    for (int j = 0; j < count; ++j) {
      auto const w = __shfl_sync(0xffffffffu, weight, j);
      if (d < width) part += w * static_cast<float>(rows.row(first + j)[d]);
    }
    if (d < width) sum[d] = sum[d] * shrink + part;
  }
}

template <storage_scalar T>
__device__ void load_row(float* to, T const* from, int width, int lane, float factor = 1) {
  for (int d = lane; d < width; d += 32) to[d] = factor * static_cast<float>(from[d]);
}
template <storage_scalar T>
__device__ void store_row(T* to, float const* from, int width, int lane, float factor = 1) {
  for (int d = lane; d < width; d += 32) to[d] = T(factor * from[d]);
}
__device__ inline void clear_row(float* row, int width, int lane) {
  for (int d = lane; d < width; d += 32) row[d] = 0;
}

template <storage_scalar T>
TESSERA_KERNEL void attention_forward_plain(attention_forward_arguments<T> x, int batch) {
  auto const sizes = x.sizes;
  warp_row const at(sizes.queries, sizes.heads, batch);
  if (!at.inside) return;
  auto const key_head = at.head / sizes.group();
  head_matrix<T const> const k(x.k, at.sample, key_head), v(x.v, at.sample, key_head);
  auto *const q = floats_of_warp(2 * sizes.width), *const out = q + sizes.width;
  load_row(q, head_matrix<T const>(x.q, at.sample, at.head).row(at.token), sizes.width, at.lane, sizes.scale);
  clear_row(out, sizes.width, at.lane);
  __syncwarp();

  auto top = -std::numeric_limits<float>::infinity();
  float sum = 0;
  auto const visible = sizes.visible(at.token);
  for (int key = 0; key < visible; key += 32) {
    auto const seen = key + at.lane < visible;
    auto const score =
        seen ? dot(q, k.row(key + at.lane), sizes.width) : -std::numeric_limits<float>::infinity();
    auto const new_top = fmaxf(top, maximum_of_warp(score));
    auto const p = seen ? elementary::exp(score - new_top) : 0.0f, shrink = elementary::exp(top - new_top);
    sum = sum * shrink + sum_of_warp(p);
    top = new_top;
    add_rows(out, shrink, p, v, key, visible - key < 32 ? visible - key : 32, sizes.width, at.lane);
  }
  store_row(head_matrix<T>(x.out, at.sample, at.head).row(at.token), out, sizes.width, at.lane,
            sum > 0 ? 1 / sum : 0.0f);
  if (at.lane == 0)
    x.log_sum_exp[(index_t{at.sample} * sizes.heads + at.head) * sizes.queries + at.token] = top + logf(sum);
}

template <storage_scalar T>
TESSERA_KERNEL void attention_backward_queries_plain(attention_backward_arguments<T> x, int batch) {
  auto const sizes = x.sizes;
  warp_row const at(sizes.queries, sizes.heads, batch);
  if (!at.inside) return;
  auto const key_head = at.head / sizes.group();
  head_matrix<T const> const k(x.k, at.sample, key_head), v(x.v, at.sample, key_head);
  auto *const q = floats_of_warp(3 * sizes.width), *const d_out = q + sizes.width,
              *const dq = d_out + sizes.width;
  load_row(q, head_matrix<T const>(x.q, at.sample, at.head).row(at.token), sizes.width, at.lane, sizes.scale);
  load_row(d_out, head_matrix<T const>(x.d_out, at.sample, at.head).row(at.token), sizes.width, at.lane);
  clear_row(dq, sizes.width, at.lane);
  __syncwarp();

  auto const number = x.rows_of(at.sample, at.head) + at.token;
  auto const total = x.log_sum_exp[number], delta = x.delta[number];
  auto const visible = sizes.visible(at.token);
  for (int key = 0; key < visible; key += 32) {
    float ds = 0;
    if (key + at.lane < visible) {
      auto const p = elementary::exp(dot(q, k.row(key + at.lane), sizes.width) - total);
      ds = p * (dot(d_out, v.row(key + at.lane), sizes.width) - delta);
    }
    add_rows(dq, 1.0f, ds, k, key, visible - key < 32 ? visible - key : 32, sizes.width, at.lane);
  }
  store_row(head_matrix<T>(x.dq, at.sample, at.head).row(at.token), dq, sizes.width, at.lane, sizes.scale);
}

template <storage_scalar T>
TESSERA_KERNEL void attention_backward_keys_plain(attention_backward_arguments<T> x, int batch) {
  auto const sizes = x.sizes;
  warp_row const at(sizes.keys, sizes.key_heads, batch);
  if (!at.inside) return;
  auto *const k = floats_of_warp(4 * sizes.width), *const v = k + sizes.width;
  auto *const dk = v + sizes.width, *const dv = dk + sizes.width;
  load_row(k, head_matrix<T const>(x.k, at.sample, at.head).row(at.token), sizes.width, at.lane, sizes.scale);
  load_row(v, head_matrix<T const>(x.v, at.sample, at.head).row(at.token), sizes.width, at.lane);
  clear_row(dk, sizes.width, at.lane);
  clear_row(dv, sizes.width, at.lane);
  __syncwarp();

  auto const begin =
      at.token > sizes.first_query ? at.token - sizes.first_query : 0; // the first that sees it
  for (int head = at.head * sizes.group(); head < (at.head + 1) * sizes.group(); ++head) {
    head_matrix<T const> const q(x.q, at.sample, head), d_out(x.d_out, at.sample, head);
    auto const numbers = x.rows_of(at.sample, head);
    for (int query = begin; query < sizes.queries; query += 32) {
      float p = 0, ds = 0;
      if (query + at.lane < sizes.queries) {
        auto const number = numbers + query + at.lane;
        p = elementary::exp(dot(k, q.row(query + at.lane), sizes.width) - x.log_sum_exp[number]);
        ds = p * (dot(v, d_out.row(query + at.lane), sizes.width) - x.delta[number]);
      }
      auto const count = sizes.queries - query < 32 ? sizes.queries - query : 32;
      add_rows(dv, 1.0f, p, d_out, query, count, sizes.width, at.lane);
      add_rows(dk, 1.0f, ds, q, query, count, sizes.width, at.lane);
    }
  }
  store_row(head_matrix<T>(x.dk, at.sample, at.head).row(at.token), dk, sizes.width, at.lane, sizes.scale);
  store_row(head_matrix<T>(x.dv, at.sample, at.head).row(at.token), dv, sizes.width, at.lane);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct attention_on<exec::cuda_backend> {
  template <class T>
  using heads = cuda_detail::attention_heads<T>;

  template <exec::cuda_space Ex, storage_scalar T>
  static void forward(Ex& ex, heads<T> out, view<float, 3, exec::cuda_memory> log_sum_exp, heads<T const> q,
                      heads<T const> k, heads<T const> v, detail::attention_shape const& shape,
                      site where = site::here()) {
    if (shape.width == 0) return;
    using namespace cuda_detail;
    attention_forward_arguments<T> const x{.out = out,
                                           .log_sum_exp = log_sum_exp.data(),
                                           .q = q,
                                           .k = k,
                                           .v = v,
                                           .sizes = attention_sizes(shape, where)};
    auto const tiled =
        rows_are_aligned(out, q, k, v) &&
        for_width<T>(shape.width, [&]<int Width>(std::integral_constant<int, Width>) {
          using tuning = attention_forward_tuning<Width>;
          launch_blocks<tuning>(ex, shape.batch * shape.heads * blocks_of(x.sizes.queries, tuning::queries),
                                attention_forward_tiles<T, Width>, x, where);
        });
    if (!tiled)
      launch_rows(ex, shape.batch, shape.heads * shape.queries, 2 * shape.width, attention_forward_plain<T>,
                  x, where);
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void backward(Ex& ex, heads<T> dq, heads<T> dk, heads<T> dv, heads<T const> d_out, heads<T const> q,
                       heads<T const> k, heads<T const> v, heads<T const> out,
                       view<float const, 3, exec::cuda_memory> log_sum_exp,
                       detail::attention_shape const& shape, site where = site::here()) {
    if (shape.width == 0) return;
    using namespace cuda_detail;
    auto const rows = shape.batch * shape.heads * shape.queries;
    auto& memory = ex.template handle<exec::scratch<delta_memory, exec::cuda_memory>>();
    auto* const delta = memory.template take<float>(rows, where);
    attention_backward_arguments<T> const x{.dq = dq,
                                            .dk = dk,
                                            .dv = dv,
                                            .d_out = d_out,
                                            .q = q,
                                            .k = k,
                                            .v = v,
                                            .out = out,
                                            .log_sum_exp = log_sum_exp.data(),
                                            .delta = delta,
                                            .sizes = attention_sizes(shape, where),
                                            .aligned = rows_are_aligned(dq, dk, dv, d_out, q, k, v, out)};
    exec::launch(ex,
                 {.grid = exec::grid_of((rows * 8 + attention_delta_threads - 1) / attention_delta_threads, 1,
                                        1, where),
                  .block = dim3(attention_delta_threads),
                  .where = where},
                 attention_delta<T>, x, rows);
    auto const tiled =
        x.aligned && for_width<T>(shape.width, [&]<int Width>(std::integral_constant<int, Width>) {
          using of_keys = attention_keys_tuning<Width>;
          using of_queries = attention_queries_tuning<Width>;
          launch_blocks<of_keys>(ex, shape.batch * shape.key_heads * blocks_of(x.sizes.keys, of_keys::keys),
                                 attention_backward_keys<T, Width>, x, where);
          launch_blocks<of_queries>(
              ex, shape.batch * shape.heads * blocks_of(x.sizes.queries, of_queries::queries),
              attention_backward_queries<T, Width>, x, where);
        });
    if (tiled) return;
    launch_rows(ex, shape.batch, shape.key_heads * shape.keys, 4 * shape.width,
                attention_backward_keys_plain<T>, x, where);
    launch_rows(ex, shape.batch, shape.heads * shape.queries, 3 * shape.width,
                attention_backward_queries_plain<T>, x, where);
  }

private:
  struct delta_memory {};

  /// Calls `with` with the narrowest tile that heads of `width` fit; false where there is none.
  template <storage_scalar T, class With>
  static bool for_width(index_t width, With&& with) {
    if constexpr (sizeof(T) == 2) {
      if (width <= 64)
        with(std::integral_constant<int, 64>());
      else if (width <= 96)
        with(std::integral_constant<int, 96>());
      else if (width <= 128)
        with(std::integral_constant<int, 128>());
      return width <= 128;
    } else {
      return false;
    }
  }

  template <class Tuning, exec::cuda_space Ex, class Arguments>
  static void launch_blocks(Ex& ex, index_t blocks, void (*kernel)(Arguments), Arguments const& x,
                            site where) {
    exec::launch(ex,
                 {.grid = exec::grid_of(narrow<int>(blocks, where), 1, 1, where),
                  .block = dim3(Tuning::threads),
                  .shared_bytes = Tuning::shared_bytes,
                  .where = where},
                 kernel, x);
  }

  /// A warp for each of `rows` rows of each sample, with so many floats of shared memory.
  template <exec::cuda_space Ex, class Arguments>
  static void launch_rows(Ex& ex, index_t batch, index_t rows, index_t floats, void (*kernel)(Arguments, int),
                          Arguments const& x, site where) {
    auto const threads = cuda_detail::attention_plain_tuning::threads(narrow<int>(floats, where));
    auto const warps = threads / 32;
    exec::launch(ex,
                 {.grid = exec::grid_of(narrow<int>((batch * rows + warps - 1) / warps, where), 1, 1, where),
                  .block = dim3(static_cast<unsigned>(threads)),
                  .shared_bytes = static_cast<std::size_t>(4 * floats * warps),
                  .where = where},
                 kernel, x, narrow<int>(batch, where));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// cast on CUDA: one pass; between equal types the device's own copy.
#ifndef TESSERA_OPS_CUDA_CAST_CUH
#define TESSERA_OPS_CUDA_CAST_CUH

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {
struct copy_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = x; }
};
} // namespace cuda_detail

template <>
struct cast_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar To, storage_scalar From>
  static void run(Ex& ex, view<To, 1, typename Ex::memory> out, view<From const, 1, typename Ex::memory> in) {
    if constexpr (std::same_as<To, From>) {
      if (out.data() != in.data()) exec::copy(ex, out.span(), in.span());
    } else {
      exec::for_elements(ex, in.size(), cuda_detail::copy_element{}, exec::writes(out.data()),
                         exec::reads(in.data()));
    }
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// cross_entropy on CUDA: a block takes a row, reads it with a running maximum in every thread (online
/// softmax, Milakov and Gimelshein, 2018), and once more for its gradient, last elements first: those are
/// still in the caches, as the whole row is in the second level's.
#ifndef TESSERA_OPS_CUDA_CROSS_ENTROPY_CUH
#define TESSERA_OPS_CUDA_CROSS_ENTROPY_CUH

#include <cub/block/block_reduce.cuh>

/// Bad values that only kernels see: tokens and targets outside their range. A kernel raises the fault and
/// goes on without harm; the space's next `synchronize` throws what the host operation would have thrown.
///
///     auto& found = ex.template handle<cuda_detail::faults>();
///     launch(..., found.expect(fault::target, classes, where), ...);     // a fault_flag, passed by value
///     if (bad) flag.raise(row, target);                                  // in the kernel
#ifndef TESSERA_OPS_CUDA_DETAIL_FAULTS_CUH
#define TESSERA_OPS_CUDA_DETAIL_FAULTS_CUH

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

using exec::cuda_memory;

enum class fault { target, token, token_backward };

/// Where a kernel leaves the fault of the lowest row: the row counted down from 2^31 - 1, above the value.
/// Zero: none.
struct fault_flag {
  unsigned long long* word;

  __device__ void raise(index_t row, std::int32_t value) const {
    constexpr index_t last = 0x7ffffffe; // rows beyond are reported as this one
    auto const from_end = static_cast<unsigned long long>(last + 1 - (row < last ? row : last));
    atomicMax(word, from_end << 32 | static_cast<std::uint32_t>(value));
  }
};

/// A handle of exec::cuda.
class faults final : public exec::late_check {
public:
  explicit faults(exec::cuda& ex) : ex_(&ex), words_({kinds}, ex.scratch_account()) { ex.watch(*this); }

  /// The flag for a kernel that is about to start, whose values must lie in [0, limit). Where they stand in a
  /// matrix, `row` counts its elements row by row.
  fault_flag expect(fault kind, index_t limit, site where, index_t columns = 1) {
    expected_[static_cast<int>(kind)] = {limit, columns > 0 ? columns : 1, where};
    return {words_.data() + static_cast<int>(kind)};
  }

  void look(site) override {
    unsigned long long raised[kinds];
    exec::cuda_check(
        cudaMemcpyAsync(raised, words_.data(), sizeof raised, cudaMemcpyDeviceToHost, ex_->stream()),
        "cudaMemcpyAsync");
    exec::cuda_check(cudaStreamSynchronize(ex_->stream()), "cudaStreamSynchronize");
    for (int kind = 0; kind < kinds; ++kind)
      if (raised[kind] != 0) {
        exec::zero(*ex_, words_.span());
        report(static_cast<fault>(kind), index_t{0x7fffffff} - static_cast<index_t>(raised[kind] >> 32),
               static_cast<std::int32_t>(raised[kind] & 0xffffffffu), expected_[kind]);
      }
  }

private:
  static constexpr int kinds = 3;
  struct expectation {
    index_t limit = 0, columns = 1;
    site where;
  };

  [[noreturn]] static void report(fault kind, index_t row, std::int32_t value, expectation const& expected) {
    if (kind == fault::target)
      throw size_error("E-ops-004", expected.where, "cross_entropy: the target of row ", row, " is ", value,
                       ", must lie in [0, ", expected.limit, ") or be ignore_index (", ignore_index, ")");
    throw size_error("E-ops-011", expected.where, kind == fault::token ? "embedding" : "embedding_backward",
                     ": the token at (", row / expected.columns, ", ", row % expected.columns, ") is ", value,
                     ", must lie in [0, ", expected.limit, ")");
  }

  exec::cuda* ex_;
  tensor<unsigned long long, 1, cuda_memory> words_;
  expectation expected_[kinds];
};

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

/// The softmax of some of a row's elements.
struct softmax_part {
  float maximum = -0x1.fffffep+127f; // the lowest finite number: rows may begin with minus infinities
  float exponentials = 0;            // of x - maximum
  float logits = 0;

  template <int N>
  __device__ __forceinline__ void add(float const (&x)[N]) {
    auto higher = maximum;
#pragma unroll
    for (int i = 0; i < N; ++i) higher = elementary::larger(higher, x[i]);
    if (higher > maximum) {
      exponentials *= elementary::exp(maximum - higher);
      maximum = higher;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      exponentials += elementary::exp(x[i] - maximum);
      logits += x[i];
    }
  }
};

struct merge_softmax {
  __device__ softmax_part operator()(softmax_part const& a, softmax_part const& b) const {
    softmax_part both;
    both.maximum = elementary::larger(a.maximum, b.maximum);
    both.exponentials = a.exponentials * elementary::exp(a.maximum - both.maximum) +
                        b.exponentials * elementary::exp(b.maximum - both.maximum);
    both.logits = a.logits + b.logits;
    return both;
  }
};

/// A row cut at the boundaries of 16 bytes: `head` elements, `packs` of N, the rest.
template <storage_scalar T>
struct row_pieces {
  static constexpr int n = exec::pack_size<T>;
  index_t head, packs, single;

  __device__ row_pieces(T const* row, index_t width) {
    auto const past = static_cast<index_t>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
    head = past == 0 ? 0 : static_cast<index_t>(16 / sizeof(T)) - past;
    if (head > width) head = width;
    packs = (width - head) / n;
    single = width - packs * n;
  }
  __device__ index_t pack(index_t p) const { return head + p * n; }
  /// The elements outside packs, counted from 0.
  __device__ index_t element(index_t s) const { return s < head ? s : s + packs * n; }
};

struct loss_and_count {
  double loss = 0, count = 0;
};
struct add_losses {
  __device__ loss_and_count operator()(loss_and_count const& a, loss_and_count const& b) const {
    return {a.loss + b.loss, a.count + b.count};
  }
};

template <storage_scalar T>
__device__ void fill_row(T* x, index_t classes, float value) {
  for (auto i = index_t{threadIdx.x}; i < classes; i += blockDim.x) x[i] = T(value);
}

template <int Threads, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(Threads, 1536 / Threads)
    cross_entropy_kernel(T* logits, index_t stride, index_t classes, float* losses,
                         std::int32_t const* targets, cross_entropy_options<cuda_memory> options,
                         fault_flag flag) {
  using reduce = cub::BlockReduce<softmax_part, Threads>;
  constexpr int n = row_pieces<T>::n;
  __shared__ typename reduce::TempStorage storage;
  __shared__ softmax_row shared_row;
  auto const row = index_t{blockIdx.x};
  auto* x = logits + row * stride;
  auto const target = targets[row];
  auto const is_class = target >= 0 && target < classes;
  if (!is_class) {
    auto const ignored = target == ignore_index;
    constexpr auto not_a_number = std::bit_cast<float>(0x7fc00000u);
    if (threadIdx.x == 0) {
      losses[row] = ignored ? 0.0f : not_a_number;
      if (!ignored) flag.raise(row, target);
    }
    if (options.write_gradient) fill_row(x, classes, ignored ? 0.0f : not_a_number);
    return;
  }

  row_pieces<T> const pieces(x, classes);
  softmax_part part;
  for (auto p = index_t{threadIdx.x}; p < pieces.packs; p += Threads) {
    float value[n];
    exec::load_pack(value, x + pieces.pack(p));
    part.add(value);
  }
  for (auto s = index_t{threadIdx.x}; s < pieces.single; s += Threads) {
    float const value[1] = {static_cast<float>(x[pieces.element(s)])};
    part.add(value);
  }
  part = reduce(storage).Reduce(part, merge_softmax{});
  if (threadIdx.x == 0) {
    shared_row = {part.maximum, part.exponentials, part.maximum + elementary::log(part.exponentials),
                  options.label_smoothing > 0 ? part.logits / static_cast<float>(classes) : 0.0f};
    losses[row] = cross_entropy_loss(shared_row, static_cast<float>(x[target]), options);
  }
  if (!options.write_gradient) return;
  __syncthreads();

  cross_entropy_slope const g(shared_row, classes, options);
  auto const maximum = shared_row.maximum;
  auto const elsewhere = [&](float logit) { return elementary::exp(logit - maximum) * g.slope - g.even; };
  for (auto s = index_t{threadIdx.x}; s < pieces.single; s += Threads) {
    auto const i = pieces.element(s);
    auto const value = elsewhere(static_cast<float>(x[i]));
    x[i] = T(i == target ? value - g.target : value);
  }
  for (auto p = pieces.packs - 1 - index_t{threadIdx.x}; p >= 0; p -= Threads) {
    auto const first = pieces.pack(p);
    float value[n];
    exec::load_pack(value, x + first);
#pragma unroll
    for (int i = 0; i < n; ++i) value[i] = elsewhere(value[i]);
    if (auto const at = target - first; at >= 0 && at < n) {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (i == at) value[i] -= g.target;
    }
    exec::store_pack(x + first, value);
  }
}

inline constexpr int total_threads = 256;

/// totals (+)= {the sum of the losses, the number of rows that are not ignored}, in one block: one order.
template <std::floating_point Loss>
TESSERA_KERNEL void __launch_bounds__(total_threads)
    loss_totals_kernel(double* totals, Loss const* losses, std::int32_t const* targets, index_t rows,
                       bool add) {
  using reduce = cub::BlockReduce<loss_and_count, total_threads>;
  __shared__ typename reduce::TempStorage storage;
  loss_and_count mine;
  for (auto row = index_t{threadIdx.x}; row < rows; row += total_threads) {
    mine.loss += static_cast<double>(losses[row]);
    mine.count += targets[row] != ignore_index ? 1 : 0;
  }
  auto const all = reduce(storage).Reduce(mine, add_losses{});
  if (threadIdx.x != 0) return;
  totals[0] = all.loss + (add ? totals[0] : 0);
  totals[1] = all.count + (add ? totals[1] : 0);
}

} // namespace cuda_detail

template <>
struct cross_entropy_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static sum_and_count run(Ex& ex, view<T, 2, exec::cuda_memory> logits,
                           view<float, 1, exec::cuda_memory> losses,
                           view<std::int32_t const, 1, exec::cuda_memory> targets,
                           cross_entropy_options<exec::cuda_memory> const& options, site where) {
    using namespace cuda_detail;
    auto const rows = logits.extent(0), classes = logits.extent(1);
    if (rows == 0) return {};
    auto const flag = ex.template handle<faults>().expect(fault::target, classes, where);
    auto const start = [&](auto threads) {
      exec::launch(ex, {.grid = exec::grid_of(rows), .block = dim3(decltype(threads)::value), .where = where},
                   cross_entropy_kernel<decltype(threads)::value, T>, logits.data(), logits.stride(0),
                   classes, losses.data(), targets.data(), options, flag);
    };
    if (classes <= 4096)
      start(std::integral_constant<int, 128>{});
    else
      start(std::integral_constant<int, 512>{});

    auto const waits = options.totals.empty();
    auto* totals =
        waits
            ? ex.template handle<exec::scratch<cross_entropy_on, exec::cuda_memory>>().template take<double>(
                  2, where)
            : options.totals.data();
    exec::launch(ex, {.block = dim3(total_threads), .where = where}, loss_totals_kernel<float>, totals,
                 static_cast<float const*>(losses.data()), targets.data(), rows, !waits);
    if (!waits) return {};
    double result[2];
    exec::copy(ex, std::span<double>(result), device_span<double const, exec::cuda_memory>(totals, 2), where);
    return {result[0], result[1]};
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// dropout on CUDA: one pass that draws its random words where it uses them, four elements from one counter.
#ifndef TESSERA_OPS_CUDA_DROPOUT_CUH
#define TESSERA_OPS_CUDA_DROPOUT_CUH

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

/// y = dropout(x), or residual + dropout(x).
struct dropout_elements {
  dropout_mask mask;

  template <int N>
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&y)[N], float const (&x)[N]) const noexcept {
    auto const index = mask.first_index + static_cast<std::uint64_t>(first);
    if (N >= 4 && index % 4 == 0) {
      for (int quad = 0; quad < N / 4; ++quad) {
        auto const four = mask.random.words(index / 4 + static_cast<std::uint64_t>(quad));
        for (int w = 0; w < 4; ++w) y[4 * quad + w] = mask.apply(x[4 * quad + w], four.word[w]);
      }
    } else {
      for (int i = 0; i < N; ++i)
        y[i] = mask.apply(x[i], mask.random.bits(index + static_cast<std::uint64_t>(i)));
    }
  }

  template <int N>
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&y)[N], float const (&residual)[N],
                                      float const (&x)[N]) const noexcept {
    (*this)(first, y, x);
    for (int i = 0; i < N; ++i) y[i] += residual[i];
  }
};

} // namespace cuda_detail

template <>
struct dropout_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 2, typename Ex::memory> out, view<T const, 2, typename Ex::memory> residual,
                  view<T const, 2, typename Ex::memory> in, dropout_mask const& mask) {
    using array = view<T const, 1, typename Ex::memory>;
    auto const size = in.size();
    cuda_detail::dropout_elements const dropout{mask};
    auto const y = exec::writes(out.data());
    auto const r = exec::reads(residual.data()), x = exec::reads(in.data());
    if (mask.probability > 0 && residual.data() != nullptr)
      exec::for_elements(ex, size, dropout, y, r, x);
    else if (mask.probability > 0)
      exec::for_elements(ex, size, dropout, y, x);
    else if (residual.data() != nullptr)
      add_on<exec::cuda_backend>::run(ex, view<T, 1, typename Ex::memory>(out.data(), {size}),
                                      array(residual.data(), {size}), array(in.data(), {size}));
    else
      cast_on<exec::cuda_backend>::run(ex, view<T, 1, typename Ex::memory>(out.data(), {size}),
                                       array(in.data(), {size}));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// embedding on CUDA. The backward sorts the rows by token (a stable radix sort), so that each row of the
/// table is summed in float, in the order of the tokens, and written once.
#ifndef TESSERA_OPS_CUDA_EMBEDDING_CUH
#define TESSERA_OPS_CUDA_EMBEDDING_CUH

#include <cub/device/device_radix_sort.cuh>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

inline constexpr int embedding_lanes = 32, embedding_rows = 8; ///< A warp takes a row.

/// Rows of a matrix, for kernels that read or write packs of them.
template <class T>
struct matrix_rows {
  T* data;
  index_t stride;
  bool aligned; ///< Every row begins at a boundary of 16 bytes.

  explicit matrix_rows(view<T, 2, cuda_memory> matrix) noexcept
      : data(matrix.data()), stride(matrix.stride(0)),
        aligned(exec::aligned16(matrix.data(), matrix.stride(0))) {}
  __device__ T* at(index_t row, index_t column) const { return data + row * stride + column; }
};

template <storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(embedding_lanes* embedding_rows)
    embedding_kernel(matrix_rows<T> out, view<std::int32_t const, 2, cuda_memory> tokens,
                     matrix_rows<T const> table, matrix_rows<T const> positions, index_t first_position,
                     index_t classes, index_t width, fault_flag flag) {
  constexpr int n = exec::pack_size<T>;
  auto const row = index_t{blockIdx.x} * embedding_rows + threadIdx.y;
  if (row >= tokens.size()) return;
  auto const t = row % tokens.extent(1);
  auto const token = *tokens.address(row / tokens.extent(1), t);
  auto const known = token >= 0 && token < classes;
  if (!known && threadIdx.x == 0) flag.raise(row, token);
  for (auto column = index_t{threadIdx.x} * n; column < width; column += embedding_lanes * n) {
    auto const count = width - column;
    float value[n];
#pragma unroll
    for (int i = 0; i < n; ++i) value[i] = std::bit_cast<float>(0x7fc00000u); // what no token embeds to: NaN
    if (known) exec::load_part(value, table.at(token, column), count, table.aligned);
    if (positions.data != nullptr) {
      float position[n];
      exec::load_part(position, positions.at(first_position + t, column), count, positions.aligned);
#pragma unroll
      for (int i = 0; i < n; ++i) value[i] += position[i];
    }
    exec::store_part(out.at(row, column), value, count, out.aligned);
  }
}

/// What is sorted: each row's token (`classes` for one that is none) and its number.
template <std::unsigned_integral Key>
TESSERA_KERNEL void __launch_bounds__(256)
    token_keys_kernel(Key* keys, std::int32_t* rows, view<std::int32_t const, 2, cuda_memory> tokens,
                      std::uint32_t classes, fault_flag flag) {
  auto const row = index_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= tokens.size()) return;
  auto const token = *tokens.address(row / tokens.extent(1), row % tokens.extent(1));
  auto const known = token >= 0 && static_cast<Key>(token) < classes;
  if (!known) flag.raise(row, token);
  keys[row] = known ? static_cast<Key>(token) : classes;
  rows[row] = static_cast<std::int32_t>(row);
}

/// first[v] = the number of sorted keys below v, for v in [0, classes].
template <std::unsigned_integral Key>
TESSERA_KERNEL void __launch_bounds__(256)
    token_starts_kernel(std::int32_t* first, Key const* keys, std::int32_t count, Key classes) {
  auto const v = blockIdx.x * blockDim.x + threadIdx.x;
  if (v > classes) return;
  std::int32_t low = 0, high = count;
  while (low < high) {
    auto const middle = low + (high - low) / 2;
    if (keys[middle] < v)
      low = middle + 1;
    else
      high = middle;
  }
  first[v] = low;
}

/// Which rows of the gradient belong to a row of the table: those of its token.
struct rows_of_token {
  std::int32_t const* first;
  std::int32_t const* rows;

  __device__ index_t begin(index_t token) const { return first[token]; }
  __device__ index_t end(index_t token) const { return first[token + 1]; }
  __device__ index_t row(index_t k, index_t) const { return rows[k]; }
};

/// Those of its position, one of each sample.
struct rows_of_position {
  index_t samples, length, first_position;

  __device__ index_t begin(index_t) const { return 0; }
  __device__ index_t end(index_t position) const {
    auto const t = position - first_position;
    return t >= 0 && t < length ? samples : 0;
  }
  __device__ index_t row(index_t k, index_t position) const { return k * length + position - first_position; }
};

/// out[i] (+)= the sum of its rows of `in`, in their order: a warp for each i and each 32 packs of columns.
template <storage_scalar G, storage_scalar T, class Rows>
TESSERA_KERNEL void __launch_bounds__(embedding_lanes* embedding_rows)
    row_sums_kernel(matrix_rows<G> out, matrix_rows<T const> in, Rows rows, index_t count, index_t width,
                    bool accumulate) {
  constexpr int n = exec::pack_size<G, T>;
  auto const i = index_t{blockIdx.x} * embedding_rows + threadIdx.y;
  auto const column = (index_t{blockIdx.y} * embedding_lanes + threadIdx.x) * n;
  auto const left = width - column;
  if (i >= count || left <= 0) return;
  auto const begin = rows.begin(i), end = rows.end(i);
  if (begin == end && accumulate) return;
  float sum[n] = {};
  if (accumulate) exec::load_part(sum, out.at(i, column), left, out.aligned);
#pragma unroll 2
  for (auto k = begin; k < end; ++k) {
    float value[n];
    exec::load_part(value, in.at(rows.row(k, i), column), left, in.aligned);
#pragma unroll
    for (int j = 0; j < n; ++j) sum[j] += value[j];
  }
  exec::store_part(out.at(i, column), sum, left, out.aligned);
}

} // namespace cuda_detail

template <>
struct embedding_on<exec::cuda_backend> {
  template <class T, int Rank>
  using device_view = view<T, Rank, exec::cuda_memory>;

  template <exec::cuda_space Ex, storage_scalar T>
  static void forward(Ex& ex, device_view<T, 2> out, device_view<std::int32_t const, 2> tokens,
                      device_view<T const, 2> table, device_view<T const, 2> positions,
                      index_t first_position, site where) {
    using namespace cuda_detail;
    auto const classes = table.extent(0);
    auto const flag = ex.template handle<faults>().expect(fault::token, classes, where, tokens.extent(1));
    exec::launch(ex,
                 {.grid = exec::grid_of((tokens.size() + embedding_rows - 1) / embedding_rows),
                  .block = dim3(embedding_lanes, embedding_rows),
                  .where = where},
                 embedding_kernel<T>, matrix_rows<T>(out), tokens, matrix_rows<T const>(table),
                 matrix_rows<T const>(positions), first_position, classes, table.extent(1), flag);
  }

  template <exec::cuda_space Ex, storage_scalar G, storage_scalar T>
  static void backward(Ex& ex, device_view<G, 2> d_table, device_view<G, 2> d_positions,
                       device_view<T const, 2> d_out, device_view<std::int32_t const, 2> tokens,
                       embedding_backward_options const& options, site where) {
    using namespace cuda_detail;
    sum_rows(ex, d_table, d_out, sorted(ex, tokens, d_table.extent(0), where), options.accumulate_table,
             where);
    if (d_positions.data() != nullptr)
      sum_rows(ex, d_positions, d_out,
               rows_of_position{tokens.extent(0), tokens.extent(1), options.first_position},
               options.accumulate_positions, where);
  }

private:
  template <class Tag, class T, exec::cuda_space Ex>
  static T* take(Ex& ex, index_t count, site where) {
    return ex.template handle<exec::scratch<Tag, exec::cuda_memory>>().template take<T>(count, where);
  }
  struct keys_in;
  struct keys_out;
  struct rows_in;
  struct rows_out;
  struct starts;
  struct sorting;

  template <exec::cuda_space Ex>
  static cuda_detail::rows_of_token sorted(Ex& ex, device_view<std::int32_t const, 2> tokens, index_t classes,
                                           site where) {
    using namespace cuda_detail;
    auto const count = narrow<std::int32_t>(tokens.size(), where);
    auto const limit = static_cast<std::uint32_t>(narrow<std::int32_t>(classes, where));
    auto* keys = take<keys_in, std::uint32_t>(ex, count, where);
    auto* keys_sorted = take<keys_out, std::uint32_t>(ex, count, where);
    auto* rows = take<rows_in, std::int32_t>(ex, count, where);
    auto* rows_sorted = take<rows_out, std::int32_t>(ex, count, where);
    auto* first = take<starts, std::int32_t>(ex, classes + 1, where);
    if (count > 0) {
      auto const flag =
          ex.template handle<faults>().expect(fault::token_backward, classes, where, tokens.extent(1));
      exec::launch(ex, {.grid = exec::grid_of((count + 255) / 256), .block = dim3(256), .where = where},
                   token_keys_kernel<std::uint32_t>, keys, rows, tokens, limit, flag);
      auto const bits = static_cast<int>(std::bit_width(limit));
      std::size_t bytes = 0;
      auto const sort = [&](void* memory) {
        exec::cuda_check(cub::DeviceRadixSort::SortPairs(memory, bytes,
                                                         static_cast<std::uint32_t const*>(keys), keys_sorted,
                                                         static_cast<std::int32_t const*>(rows), rows_sorted,
                                                         count, 0, bits, ex.stream()),
                         "cub::DeviceRadixSort::SortPairs", where);
      };
      sort(nullptr); // asks for the bytes
      sort(take<sorting, char>(ex, narrow<index_t>(bytes > 0 ? bytes : 1, where), where));
    }
    exec::launch(ex, {.grid = exec::grid_of((classes + 256) / 256), .block = dim3(256), .where = where},
                 token_starts_kernel<std::uint32_t>, first, static_cast<std::uint32_t const*>(keys_sorted),
                 count, limit);
    return {first, rows_sorted};
  }

  template <exec::cuda_space Ex, storage_scalar G, storage_scalar T, class Rows>
  static void sum_rows(Ex& ex, device_view<G, 2> out, device_view<T const, 2> in, Rows rows, bool accumulate,
                       site where) {
    using namespace cuda_detail;
    constexpr index_t across = embedding_lanes * exec::pack_size<G, T>;
    auto const count = out.extent(0), width = out.extent(1);
    exec::launch(
        ex,
        {.grid = exec::grid_of((count + embedding_rows - 1) / embedding_rows, (width + across - 1) / across),
         .block = dim3(embedding_lanes, embedding_rows),
         .where = where},
        row_sums_kernel<G, T, Rows>, matrix_rows<G>(out), matrix_rows<T const>(in), rows, count, width,
        accumulate);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// gelu on CUDA: one pass.
#ifndef TESSERA_OPS_CUDA_GELU_CUH
#define TESSERA_OPS_CUDA_GELU_CUH

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

template <gelu_form Form>
struct gelu_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = gelu_value<Form>(x); }
};
template <gelu_form Form>
struct gelu_gradient {
  TESSERA_HOST_DEVICE void operator()(float& dx, float dy, float x) const noexcept {
    dx = dy * gelu_slope<Form>(x);
  }
};

} // namespace cuda_detail

template <>
struct gelu_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 1, typename Ex::memory> out, view<T const, 1, typename Ex::memory> in,
                      gelu_form form) {
    auto const run = [&](auto element) {
      exec::for_elements(ex, in.size(), element, exec::writes(out.data()), exec::reads(in.data()));
    };
    if (form == gelu_form::tanh)
      run(cuda_detail::gelu_element<gelu_form::tanh>{});
    else
      run(cuda_detail::gelu_element<gelu_form::erf>{});
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 1, typename Ex::memory> d_in,
                       view<T const, 1, typename Ex::memory> d_out, view<T const, 1, typename Ex::memory> in,
                       gelu_form form) {
    auto const run = [&](auto element) {
      exec::for_elements(ex, in.size(), element, exec::writes(d_in.data()), exec::reads(d_out.data()),
                         exec::reads(in.data()));
    };
    if (form == gelu_form::tanh)
      run(cuda_detail::gelu_gradient<gelu_form::tanh>{});
    else
      run(cuda_detail::gelu_gradient<gelu_form::erf>{});
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// layer_norm on CUDA: see detail/norm_rows.cuh.
#ifndef TESSERA_OPS_CUDA_LAYER_NORM_CUH
#define TESSERA_OPS_CUDA_LAYER_NORM_CUH

/// Layer norm and RMS norm on CUDA are one algorithm. A row up to 16384 elements is read once and stays in
/// registers until it is written; the backward keeps rows up to 8192 elements, and the sums for gain and bias
/// of the rows that a block goes through (half as many where rows do not allow accesses of 16 bytes). Longer
/// rows are read again for each sum (from the second-level cache as a rule) and their sums for gain and bias
/// stand in scratch memory meanwhile.
#ifndef TESSERA_OPS_CUDA_DETAIL_NORM_ROWS_CUH
#define TESSERA_OPS_CUDA_DETAIL_NORM_ROWS_CUH

#include <algorithm>

/// Sums over the rows of fp32 partial results, in fixed order: how gradients of what all rows share (the gain
/// and bias of a norm) are finished.
#ifndef TESSERA_OPS_CUDA_DETAIL_PARTIAL_SUMS_CUH
#define TESSERA_OPS_CUDA_DETAIL_PARTIAL_SUMS_CUH

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

inline constexpr int partial_columns = 32, partial_lanes = 32;

/// One block for 32 columns: thread (x, y) adds up the rows y, y + 32, ... of column x, then the first row of
/// threads adds their results in order. Block row k serves the output k, whose partial results start
/// k * width elements into each row.
template <storage_scalar G, int Outputs>
struct partial_outputs {
  G* out[Outputs];
};

template <storage_scalar G, int Outputs>
TESSERA_KERNEL void __launch_bounds__(partial_columns* partial_lanes)
    partial_sum_kernel(partial_outputs<G, Outputs> outputs, float const* partial, index_t rows, index_t width,
                       bool accumulate) {
  __shared__ float sums[partial_lanes][partial_columns];
  auto const column = index_t{blockIdx.x} * partial_columns + threadIdx.x;
  auto const* from = partial + blockIdx.y * width + column;
  auto sum = 0.0f;
  if (column < width)
    for (index_t row = threadIdx.y; row < rows; row += partial_lanes) sum += from[row * Outputs * width];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= width) return;
  auto* out = outputs.out[0];
#pragma unroll
  for (unsigned k = 1; k < Outputs; ++k)
    if (blockIdx.y == k) out = outputs.out[k];
  auto total = accumulate ? static_cast<float>(out[column]) : 0.0f;
  for (int lane = 0; lane < partial_lanes; ++lane) total += sums[lane][threadIdx.x];
  out[column] = G(total);
}

/// outputs.out[k][i] (+)= the sum over r of partial[(r * Outputs + k) * width + i].
template <exec::cuda_space Ex, storage_scalar G, int Outputs>
void add_partials(Ex& ex, partial_outputs<G, Outputs> outputs, float const* partial, index_t rows,
                  index_t width, bool accumulate, site where) {
  exec::launch(ex,
               {.grid = exec::grid_of((width + partial_columns - 1) / partial_columns, Outputs),
                .block = dim3(partial_columns, partial_lanes),
                .where = where},
               partial_sum_kernel<G, Outputs>, outputs, partial, rows, width, accumulate);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
/// How kernels that work row by row are laid out: a group of threads to a row, each thread with its share of
/// the row in registers. A block holds blockDim.y groups of blockDim.x threads, whole warps; a thread of a
/// group takes the packs threadIdx.x, threadIdx.x + blockDim.x, ... of the row.
#ifndef TESSERA_OPS_CUDA_DETAIL_ROWS_CUH
#define TESSERA_OPS_CUDA_DETAIL_ROWS_CUH

#include <type_traits>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// The most threads of a group, and of a block.
inline constexpr int most_row_threads = 512;

/// Threads to a row of `width` elements, `each` elements to a thread at most: a power of two of them, up to
/// most_row_threads. Rows that are longer still are worked through in stretches.
inline index_t row_threads(index_t width, int each) noexcept {
  index_t threads = 32;
  while (threads < most_row_threads && threads * each < width) threads *= 2;
  return threads;
}

/// Rows of a matrix.
template <class T>
struct row_array {
  T* data;
  index_t stride;

  template <memory_space M>
  row_array(view<T, 2, M> rows) : data(rows.data()), stride(rows.stride(0)) {} // NOLINT: meant to be implicit
  __device__ __forceinline__ T* row(index_t r) const { return data + r * stride; }
  bool aligned() const { return exec::aligned16(data, stride); }
};

/// Calls f(k, i) for each pack k of this thread in the stretch of a row that starts at `begin`, whose first
/// element is i. N is the elements of an access of 16 bytes, or 1 where rows do not allow those.
template <int N, int Packs, class F>
__device__ __forceinline__ void for_packs(int begin, int width, F&& f) {
#pragma unroll
  for (int k = 0; k < Packs; ++k) {
    auto const i = begin + (k * int(blockDim.x) + int(threadIdx.x)) * N;
    if (i < width) f(k, i);
  }
}

/// The thread's packs of a stretch, as they are stored.
template <int N, int Packs, storage_scalar T>
struct row_packs {
  struct single {
    T values[1];
  };
  std::conditional_t<N == 1, single, exec::vector16<T>> pack[Packs];

  __device__ __forceinline__ float operator()(int k, int e) const { return pack[k].values[e]; }
};

/// Reads them; 0 behind the row's end. All loads are under way before the first is waited for.
template <int N, int Packs, storage_scalar T>
__device__ __forceinline__ row_packs<N, Packs, T> read_packs(T const* row, int begin, int width) {
  row_packs<N, Packs, T> read = {};
  for_packs<N, Packs>(begin, width, [&](int k, int i) {
    if constexpr (N == 1)
      read.pack[k].values[0] = row[i];
    else
      read.pack[k] = exec::load16(row + i);
  });
  return read;
}

/// Replaces each value by its sum over the threads of the group, the same bits in all of them. Called by the
/// whole block, or by whole groups where a group is one warp.
template <int Count>
__device__ __forceinline__ void sum_over_group(float (&value)[Count]) {
  constexpr auto all = 0xffffffffu;
#pragma unroll
  for (int c = 0; c < Count; ++c)
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value[c] += __shfl_xor_sync(all, value[c], distance);
  if (blockDim.x == 32) return;

  __shared__ float of_warp[Count][most_row_threads / 32];
  auto const group_first = threadIdx.y * blockDim.x / 32, warps = blockDim.x / 32;
  __syncthreads(); // the sums before these have been read
  if (threadIdx.x % 32 == 0)
    for (int c = 0; c < Count; ++c) of_warp[c][group_first + threadIdx.x / 32] = value[c];
  __syncthreads();
#pragma unroll
  for (int c = 0; c < Count; ++c) {
    value[c] = 0;
    for (unsigned w = 0; w < warps; ++w) value[c] += of_warp[c][group_first + w];
  }
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

template <storage_scalar T>
struct norm_forward {
  row_array<T> out, sums; ///< `sums` and `b` are empty where there is no residual.
  row_array<T const> a, b;
  T const *gain, *bias;
  float *mean, *deviation;
  index_t rows;
  int width;
  float share, epsilon; ///< 1 / width
};

/// Elements of a row that a thread keeps: forward 32, backward two numbers for each of 16, and two sums; half
/// as many where accesses are single elements, since each has its address.
constexpr int forward_share(int n) noexcept {
  return n == 1 ? 16 : 32;
}
constexpr int backward_share(int n) noexcept {
  return n == 1 ? 8 : 16;
}

template <bool Centred, int N, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(most_row_threads) norm_forward_kernel(norm_forward<T> const p) {
  constexpr int packs = forward_share(N) / N;
  auto const row = index_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.rows) return; // a whole group, which is one warp where a block has several
  auto const width = p.width, stretch = packs * N * int(blockDim.x);
  auto const held = width <= stretch;

  float x[packs][N];
  // The first reading adds the residual and stores the sum, which any further one reads.
  auto const read = [&](int begin, bool first) {
    auto const with_residual = p.sums.data != nullptr;
    auto const a =
        read_packs<N, packs, T>(with_residual && !first ? p.sums.row(row) : p.a.row(row), begin, width);
    for (int k = 0; k < packs; ++k)
      for (int e = 0; e < N; ++e) x[k][e] = a(k, e);
    if (!with_residual || !first) return;
    auto const b = read_packs<N, packs>(p.b.row(row), begin, width);
    for_packs<N, packs>(begin, width, [&](int k, int i) {
      for (int e = 0; e < N; ++e) x[k][e] = T(x[k][e] + b(k, e)); // rounded as stored
      exec::store_pack(p.sums.row(row) + i, x[k]);
    });
  };
  float sum[1] = {};
  auto centre = 0.0f;
  if (Centred) {
    for (int begin = 0; begin < width; begin += stretch) {
      read(begin, true);
      for_packs<N, packs>(begin, width, [&](int k, int) {
        for (int e = 0; e < N; ++e) sum[0] += x[k][e];
      });
    }
    sum_over_group(sum);
    centre = sum[0] * p.share;
    sum[0] = 0;
  }
  for (int begin = 0; begin < width; begin += stretch) {
    if (!Centred || !held) read(begin, !Centred);
    for_packs<N, packs>(begin, width, [&](int k, int) {
      for (int e = 0; e < N; ++e) sum[0] += (x[k][e] - centre) * (x[k][e] - centre);
    });
  }
  sum_over_group(sum);
  auto const r = 1.0f / sqrtf(sum[0] * p.share + p.epsilon);
  if (threadIdx.x == 0) {
    if (Centred) p.mean[row] = centre;
    p.deviation[row] = r;
  }
  for (int begin = 0; begin < width; begin += stretch) {
    if (!held) read(begin, false);
    for_packs<N, packs>(begin, width, [&](int k, int i) {
      float gain[N], bias[N] = {};
      exec::load_pack(gain, p.gain + i);
      if (Centred) exec::load_pack(bias, p.bias + i);
      for (int e = 0; e < N; ++e) x[k][e] = (x[k][e] - centre) * r * gain[e] + bias[e];
      exec::store_pack(p.out.row(row) + i, x[k]);
    });
  }
}

template <storage_scalar T>
struct norm_backward {
  row_array<T> d_in;
  row_array<T const> d_out, in;
  T const* gain;
  float const *mean, *deviation;
  float* partial; ///< For each block a row of d_gain, and one of d_bias where centred.
  index_t rows, rows_per_block;
  int width;
  float share;
  bool accumulate_input;
};

/// With h = d_out * gain and n the normalised input:
///     d_in = (h - mean(h) - n mean(h n)) / deviation   (without mean(h) where not centred),
///     d_gain = sum over rows of d_out n,  d_bias = sum over rows of d_out.
template <bool Centred, int N, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(most_row_threads) norm_backward_kernel(norm_backward<T> const p) {
  constexpr int packs = backward_share(N) / N, kinds = Centred ? 2 : 1;
  auto const width = p.width, stretch = packs * N * int(blockDim.x);
  auto const held = width <= stretch;
  auto* const partial = p.partial + index_t{blockIdx.x} * kinds * width;

  row_packs<N, packs, T> dy;
  float x[packs][N], sums[kinds][packs][N] = {}; // x: normalised
  if (!held)
    for (int i = int(threadIdx.x); i < kinds * width; i += int(blockDim.x)) partial[i] = 0;

  auto const first_row = index_t{blockIdx.x} * p.rows_per_block;
  auto const end = (std::min)(first_row + p.rows_per_block, p.rows);
  // All groups take part in each round, since they meet in sum_over_group; in the last some find no row.
  for (auto round = first_row; round < end; round += blockDim.y) {
    auto const row = round + threadIdx.y;
    auto const here = row < end ? width : 0;
    auto const r = here > 0 ? p.deviation[row] : 0.0f;
    auto const centre = Centred && here > 0 ? p.mean[row] : 0.0f;
    auto const read = [&](int begin) {
      dy = read_packs<N, packs>(p.d_out.row(row), begin, here);
      auto const in = read_packs<N, packs>(p.in.row(row), begin, here);
      for (int k = 0; k < packs; ++k)
        for (int e = 0; e < N; ++e) x[k][e] = (in(k, e) - centre) * r;
    };
    float means[kinds] = {}; // of h n, and of h
    for (int begin = 0; begin < width; begin += stretch) {
      read(begin);
      for_packs<N, packs>(begin, here, [&](int k, int i) {
        float gain[N];
        exec::load_pack(gain, p.gain + i);
        for (int e = 0; e < N; ++e) {
          auto const h = dy(k, e) * gain[e];
          means[0] += h * x[k][e];
          if (Centred) means[kinds - 1] += h;
        }
      });
    }
    sum_over_group(means);
    auto const hn_mean = means[0] * p.share, h_mean = Centred ? means[kinds - 1] * p.share : 0.0f;

    for (int begin = 0; begin < width; begin += stretch) {
      if (!held) read(begin);
      for_packs<N, packs>(begin, here, [&](int k, int i) {
        float gain[N], d[N] = {};
        exec::load_pack(gain, p.gain + i);
        if (p.accumulate_input) exec::load_pack(d, p.d_in.row(row) + i);
        for (int e = 0; e < N; ++e) {
          sums[0][k][e] += dy(k, e) * x[k][e];
          if (Centred) sums[kinds - 1][k][e] += dy(k, e);
          d[e] += (dy(k, e) * gain[e] - h_mean - x[k][e] * hn_mean) * r;
        }
        exec::store_pack(p.d_in.row(row) + i, d);
        if (!held)
          for (int kind = 0; kind < kinds; ++kind)
            for (int e = 0; e < N; ++e) {
              partial[kind * width + i + e] += sums[kind][k][e];
              sums[kind][k][e] = 0;
            }
      });
    }
  }

  // The groups' sums, one group after the other: each adds to what the one before left in shared memory.
  if (!held) return;
  auto* const so_far = exec::dynamic_shared<float>();
  for (unsigned group = 0; group < blockDim.y; ++group) {
    if (threadIdx.y == group)
      for_packs<N, packs>(0, width, [&](int k, int i) {
        for (int kind = 0; kind < kinds; ++kind)
          for (int e = 0; e < N; ++e) {
            auto const at = kind * width + i + e;
            auto const total = sums[kind][k][e] + (group > 0 ? so_far[at] : 0.0f);
            (group + 1 < blockDim.y ? so_far : partial)[at] = total;
          }
      });
    __syncthreads();
  }
}

/// Centred: subtract the mean and add a bias (layer norm). Otherwise `mean`, `bias` and `d_bias` are not
/// used.
template <bool Centred>
struct norm_rows {
  template <exec::cuda_space Ex, storage_scalar T, memory_space M = typename Ex::memory>
  static void forward(Ex& ex, view<T, 2, M> out, view<T, 2, M> sums, view<float, 1, M> mean,
                      view<float, 1, M> deviation, view<T const, 2, M> a, view<T const, 2, M> b,
                      view<T const, 1, M> gain, view<T const, 1, M> bias, float epsilon) {
    auto const rows = a.extent(0), width = a.extent(1);
    norm_forward<T> const p{.out = out,
                            .sums = sums,
                            .a = a,
                            .b = b,
                            .gain = gain.data(),
                            .bias = bias.data(),
                            .mean = mean.data(),
                            .deviation = deviation.data(),
                            .rows = rows,
                            .width = narrow<int>(width),
                            .share = 1.0f / static_cast<float>((std::max)(width, index_t{1})),
                            .epsilon = epsilon};
    constexpr int wide = exec::pack_size<T>;
    auto const aligned = width % wide == 0 && p.out.aligned() && p.sums.aligned() && p.a.aligned() &&
                         p.b.aligned() && exec::aligned16(p.gain) && exec::aligned16(p.bias);
    auto const across = row_threads(width, forward_share(aligned ? wide : 1));
    auto const down = across == 32 ? index_t{4} : index_t{1};
    exec::launch(ex, {.grid = exec::grid_of((rows + down - 1) / down), .block = exec::grid_of(across, down)},
                 aligned ? norm_forward_kernel<Centred, wide, T> : norm_forward_kernel<Centred, 1, T>, p);
  }

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G, memory_space M = typename Ex::memory>
  static void backward(Ex& ex, view<T, 2, M> d_in, view<G, 1, M> d_gain, view<G, 1, M> d_bias,
                       view<T const, 2, M> d_out, view<T const, 2, M> in, view<float const, 1, M> mean,
                       view<float const, 1, M> deviation, view<T const, 1, M> gain, bool accumulate,
                       bool accumulate_input, site where) {
    constexpr int kinds = Centred ? 2 : 1;
    auto const rows = in.extent(0), width = in.extent(1);
    constexpr int wide = exec::pack_size<T>;
    auto const aligned = width % wide == 0 && row_array(d_in).aligned() && row_array(d_out).aligned() &&
                         row_array(in).aligned() && exec::aligned16(gain.data());
    auto const across = row_threads(width, backward_share(aligned ? wide : 1));
    auto const down = (std::max)(index_t{256} / across, index_t{1});
    // A number of blocks that does not depend on the device: nor does the order of the sums.
    auto const rounds = (rows + down - 1) / down;
    auto const rows_per_block = (rounds + most_blocks - 1) / most_blocks * down;
    auto const blocks = rows > 0 ? (rows + rows_per_block - 1) / rows_per_block : 0;
    auto& scratch = ex.template handle<exec::scratch<norm_rows, M>>();
    auto* partial = scratch.template take<float>(blocks * kinds * width, where);

    norm_backward<T> const p{.d_in = d_in,
                             .d_out = d_out,
                             .in = in,
                             .gain = gain.data(),
                             .mean = mean.data(),
                             .deviation = deviation.data(),
                             .partial = partial,
                             .rows = rows,
                             .rows_per_block = rows_per_block,
                             .width = narrow<int>(width),
                             .share = 1.0f / static_cast<float>((std::max)(width, index_t{1})),
                             .accumulate_input = accumulate_input};
    exec::launch(ex,
                 {.grid = exec::grid_of(blocks),
                  .block = exec::grid_of(across, down),
                  .shared_bytes = down > 1 ? static_cast<std::size_t>(kinds * width) * sizeof(float) : 0,
                  .where = where},
                 aligned ? norm_backward_kernel<Centred, wide, T> : norm_backward_kernel<Centred, 1, T>, p);

    partial_outputs<G, kinds> outputs{{d_gain.data()}};
    if constexpr (Centred) outputs.out[1] = d_bias.data();
    add_partials(ex, outputs, partial, blocks, width, accumulate, where);
  }

private:
  static constexpr index_t most_blocks = 256;
};

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct layer_norm_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, memory_space M>
  static void forward(Ex& ex, view<T, 2, M> out, view<T, 2, M> sum, view<float, 1, M> mean,
                      view<float, 1, M> deviation, view<T const, 2, M> a, view<T const, 2, M> b,
                      view<T const, 1, M> gain, view<T const, 1, M> bias, float epsilon) {
    cuda_detail::norm_rows<true>::forward(ex, out, sum, mean, deviation, a, b, gain, bias, epsilon);
  }

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G, memory_space M>
  static void backward(Ex& ex, view<T, 2, M> d_in, view<G, 1, M> d_gain, view<G, 1, M> d_bias,
                       view<T const, 2, M> d_out, view<T const, 2, M> in, view<float const, 1, M> mean,
                       view<float const, 1, M> deviation, view<T const, 1, M> gain,
                       norm_backward_options options, site where) {
    cuda_detail::norm_rows<true>::backward(ex, d_in, d_gain, d_bias, d_out, in, mean, deviation, gain,
                                           options.accumulate, options.accumulate_input, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// linear on CUDA: one product by cuBLASLt that also adds the bias, applies a GELU or the slope of one, or
/// sums the bias gradient, wherever its rules on addresses allow that; separate kernels elsewhere.
///
/// The GELU inside a product is the tanh form, for 16-bit storage: nothing is said of the accuracy of
/// cuBLASLt's tanh, so fp32 and the erf form go through this library's own formula. A bias gradient that is
/// added to, and one behind an activation, is summed by a kernel.
#ifndef TESSERA_OPS_CUDA_LINEAR_CUH
#define TESSERA_OPS_CUDA_LINEAR_CUH

/// Sums over the rows of a matrix, one for each column, in an order that depends on the number of rows alone:
/// the bias gradient of a linear layer, and on the same pass the gradient before its activation.
#ifndef TESSERA_OPS_CUDA_DETAIL_COLUMN_SUMS_CUH
#define TESSERA_OPS_CUDA_DETAIL_COLUMN_SUMS_CUH

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

using exec::cuda_memory;

inline constexpr int column_lanes = 32;    // threads across, a pack of columns each
inline constexpr int column_rows = 8;      // threads down
inline constexpr index_t split_rows = 128; // rows whose sum is one partial sum

/// What is summed: the elements of `in`, or, where `Slope` has a slope, in * slope(before), which also goes
/// to `out`.
template <storage_scalar T>
struct column_source {
  T const* in;
  index_t in_stride;
  T const* before = nullptr;
  index_t before_stride = 0;
  T* out = nullptr;
  index_t out_stride = 0;
  bool aligned = false; ///< All of them, in every row.
};

/// Sums as they are.
struct no_slope {};

template <class Slope, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(column_lanes* column_rows)
    column_parts_kernel(float* parts, column_source<T> source, Slope slope, index_t rows, index_t columns) {
  constexpr int n = exec::pack_size<T>;
  __shared__ float sums[column_rows][n][column_lanes];
  auto const lane = static_cast<int>(threadIdx.x), down = static_cast<int>(threadIdx.y);
  auto const column = (index_t{blockIdx.x} * column_lanes + lane) * n;
  auto const count = columns - column;
  auto const end = (index_t{blockIdx.y} + 1) * split_rows;
  float sum[n] = {};
  if (count > 0)
    for (auto row = index_t{blockIdx.y} * split_rows + down; row < (end < rows ? end : rows);
         row += column_rows) {
      float value[n];
      exec::load_part(value, source.in + row * source.in_stride + column, count, source.aligned);
      if constexpr (!std::same_as<Slope, no_slope>) {
        float before[n];
        exec::load_part(before, source.before + row * source.before_stride + column, count, source.aligned);
#pragma unroll
        for (int i = 0; i < n; ++i) value[i] *= slope(before[i]);
        exec::store_part(source.out + row * source.out_stride + column, value, count, source.aligned);
      }
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] += value[i];
    }
#pragma unroll
  for (int i = 0; i < n; ++i) sums[down][i][lane] = sum[i];
  __syncthreads();
  if (down != 0) return;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    for (int other = 1; other < column_rows; ++other) sum[i] += sums[other][i][lane];
    if (i < count) parts[index_t{blockIdx.y} * columns + column + i] = sum[i];
  }
}

/// sums[columns] (+)= the columns of source[rows, columns].
template <exec::cuda_space Ex, storage_scalar G, storage_scalar T, class Slope>
void column_sums(Ex& ex, G* sums, column_source<T> source, Slope slope, index_t rows, index_t columns,
                 bool accumulate, site where) {
  constexpr index_t across = column_lanes * exec::pack_size<T>;
  auto const splits = (rows + split_rows - 1) / split_rows;
  auto* parts = ex.template handle<exec::scratch<column_source<float>, cuda_memory>>().template take<float>(
      splits * columns, where);
  exec::launch(ex,
               {.grid = exec::grid_of((columns + across - 1) / across, splits),
                .block = dim3(column_lanes, column_rows),
                .where = where},
               column_parts_kernel<Slope, T>, parts, source, slope, rows, columns);
  add_partials(ex, partial_outputs<G, 1>{{sums}}, parts, splits, columns, accumulate, where);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
/// Matrix products on CUDA, by cuBLASLt. It multiplies operands of one type into that type or fp32. Where
/// they differ, or lie in memory as no leading dimension can say, they are first copied into fp32 or dense
/// scratch memory; a 16-bit result of other operands is made in fp32 and rounded once.
#ifndef TESSERA_OPS_CUDA_MATMUL_CUH
#define TESSERA_OPS_CUDA_MATMUL_CUH

/// Matrix products by cuBLASLt: the library's handle, its workspace, and for each shape that came by the
/// descriptors and the algorithm chosen for it, kept in a handle of exec::cuda.
///
/// cuBLASLt counts columns first. A row-major c = a b is its c^T = b^T a^T: this file hands b over as its A
/// and a as its B, and nobody else thinks about it. Products of fp32 are made in fp32 (no TF32); partial sums
/// of any product are added in fp32.
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_OPS_CUDA_DETAIL_CUBLASLT_HPP
#define TESSERA_OPS_CUDA_DETAIL_CUBLASLT_HPP

#if defined(TESSERA_WITH_CUDA)

#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <cublasLt.h>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

using exec::cuda_memory;

/// Throws library_error where cuBLASLt did not do what it was called for.
inline void cublaslt_check(cublasStatus_t status, char const* call, site where) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw library_error("E-ops-107", where, call, " failed: ", cublasLtGetStatusName(status), " (",
                        cublasLtGetStatusString(status), ")");
}

template <storage_scalar T>
constexpr cudaDataType data_type() noexcept {
  if constexpr (std::same_as<T, float>)
    return CUDA_R_32F;
  else if constexpr (std::same_as<T, bf16>)
    return CUDA_R_16BF;
  else
    return CUDA_R_16F;
}

/// The power of two, up to 256, that an address is a multiple of. Algorithms differ in what they ask for.
inline index_t alignment_of(void const* address) noexcept {
  auto const bits = reinterpret_cast<std::uintptr_t>(address) | 256u;
  return static_cast<index_t>(bits & (~bits + 1));
}

/// How a matrix of a batch lies in memory: rows `leading` elements apart, or columns where `columns` says so.
struct matrix_layout {
  bool columns = false;
  index_t leading = 1, next = 0;
};

/// None where neither the rows nor the columns are dense and apart. [batch, rows, columns]
template <class T, memory_space M>
std::optional<matrix_layout> layout_of(view<T, 3, M> matrix) {
  auto const rows = matrix.extent(1), columns = matrix.extent(2);
  auto const next = matrix.extent(0) > 1 ? matrix.stride(0) : 0;
  auto const dense = [](index_t length, index_t stride) { return length <= 1 || stride == 1; };
  auto const apart = [](index_t lines, index_t stride, index_t length) {
    return lines <= 1 || stride >= (length > 1 ? length : 1);
  };
  auto const leading = [](index_t lines, index_t stride, index_t length) {
    auto const least = length > 1 ? length : 1;
    return lines > 1 ? stride : least;
  };
  if (next < 0) return {};
  if (dense(columns, matrix.stride(2)) && apart(rows, matrix.stride(1), columns))
    return matrix_layout{false, leading(rows, matrix.stride(1), columns), next};
  if (dense(rows, matrix.stride(1)) && apart(columns, matrix.stride(2), rows))
    return matrix_layout{true, leading(columns, matrix.stride(2), rows), next};
  return {};
}

/// What is done to a product before it is stored; see ops/cuda/linear.cuh.
struct product_epilogue {
  cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_DEFAULT;
  void const* bias = nullptr; ///< Added, or where column sums go.
  void const* aux = nullptr;  ///< The matrix before the GELU, written or read.
  index_t aux_leading = 0;
};

/// Owns one of cuBLASLt's descriptors.
template <class Descriptor, cublasStatus_t (*Destroy)(Descriptor)>
class descriptor {
public:
  descriptor() = default;
  descriptor(descriptor&& other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  descriptor& operator=(descriptor&& other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~descriptor() {
    // Looked at, as all are; a destructor has nobody to tell.
    if (held_ != nullptr) (void)cublasLtGetStatusName(Destroy(held_));
  }
  Descriptor get() const noexcept { return held_; }
  Descriptor* place() noexcept { return &held_; }

private:
  Descriptor held_ = nullptr;
};

class cublaslt {
public:
  explicit cublaslt(exec::cuda&) {
    cublaslt_check(cublasLtCreate(library_.place()), "cublasLtCreate", site::here());
    cublaslt_check(cublasLtMatmulPreferenceCreate(preference_.place()), "cublasLtMatmulPreferenceCreate",
                   site::here());
  }

  /// c (+)= a b with the epilogue, on the space's stream. `a` and `b` have one type, c has it too or is fp32.
  /// False, and nothing done, where a layout is not one that cuBLASLt takes or where it has no algorithm.
  /// What it can do beside the product depends on its version and the device, and is not written down in
  /// full: an epilogue that it refuses is noted and left to separate kernels.
  template <storage_scalar C, storage_scalar T>
    requires(std::same_as<C, T> || std::same_as<C, float>)
  bool multiply(exec::cuda& ex, view<C, 3, cuda_memory> c, view<T const, 3, cuda_memory> a,
                view<T const, 3, cuda_memory> b, bool accumulate, product_epilogue const& epilogue,
                site where) {
    auto const of_a = layout_of(a), of_b = layout_of(b);
    auto const of_c = layout_of(c);
    if (!of_a || !of_b || !of_c || of_c->columns || a.extent(2) == 0) return false;
    if (c.extent(0) > 1 && of_c->next < c.extent(1) * of_c->leading) return false;
    // Everything as cuBLASLt sees it: its A is b^T, its B is a^T, its D is c^T.
    shape const key{.type = data_type<T>(),
                    .type_d = data_type<C>(),
                    .batch = c.extent(0),
                    .m = c.extent(2),
                    .n = c.extent(1),
                    .k = a.extent(2),
                    .transposed_a = of_b->columns,
                    .transposed_b = of_a->columns,
                    .leading_a = of_b->leading,
                    .leading_b = of_a->leading,
                    .leading_d = of_c->leading,
                    .next_a = of_b->next,
                    .next_b = of_a->next,
                    .next_d = of_c->next,
                    .alignment_a = alignment_of(b.data()),
                    .alignment_b = alignment_of(a.data()),
                    .alignment_d = alignment_of(c.data()),
                    .epilogue = epilogue.kind,
                    .alignment_bias = alignment_of(epilogue.bias),
                    .alignment_aux = alignment_of(epilogue.aux),
                    .leading_aux = epilogue.aux_leading};
    auto& how = plan_of(ex, key, epilogue, where);
    if (!how.possible) return false;
    point_at(how.operation.get(), epilogue, where);
    float const one = 1, beta = accumulate ? 1.0f : 0.0f;
    auto* workspace = how.workspace_bytes == 0
                          ? nullptr
                          : ex.template handle<exec::scratch<cublaslt, cuda_memory>>().template take<char>(
                                how.workspace_bytes, where);
    auto const status =
        cublasLtMatmul(library_.get(), how.operation.get(), &one, b.data(), how.a.get(), a.data(),
                       how.b.get(), &beta, c.data(), how.d.get(), c.data(), how.d.get(), &how.algorithm,
                       workspace, static_cast<std::size_t>(how.workspace_bytes), ex.stream());
    if (is_refusal(status, epilogue.kind)) {
      give_up(ex, how);
      return false;
    }
    cublaslt_check(status, "cublasLtMatmul", where);
    return true;
  }

  /// Shapes that are known.
  std::size_t plans() const noexcept { return plans_.size(); }

private:
  /// All that the choice of an algorithm depends on; every member has 64 bits, so that there is no padding.
  struct shape {
    index_t type, type_d, batch, m, n, k, transposed_a, transposed_b, leading_a, leading_b, leading_d, next_a,
        next_b, next_d, alignment_a, alignment_b, alignment_d, epilogue, alignment_bias, alignment_aux,
        leading_aux;

    bool operator==(shape const&) const = default;
  };
  struct hash_of_shape {
    std::size_t operator()(shape const& key) const noexcept {
      return std::hash<std::string_view>()({reinterpret_cast<char const*>(&key), sizeof key});
    }
  };

  struct plan {
    bool possible = false;
    descriptor<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> operation;
    descriptor<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> a, b, d;
    cublasLtMatmulAlgo_t algorithm{};
    index_t workspace_bytes = 0;
  };

  /// More shapes than a program of fixed sizes ever has; beyond it all are forgotten.
  static constexpr std::size_t most_plans = 4096;

  plan& plan_of(exec::cuda& ex, shape const& key, product_epilogue const& epilogue, site where) {
    if (auto const known = plans_.find(key); known != plans_.end()) return known->second;
    if (plans_.size() >= most_plans) plans_.clear();
    return plans_.emplace(key, make(ex, key, epilogue, where)).first->second;
  }

  plan make(exec::cuda& ex, shape const& key, product_epilogue const& epilogue, site where) const {
    plan made;
    auto const operation_is = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
      cublaslt_check(cublasLtMatmulDescSetAttribute(made.operation.get(), attribute, &value, sizeof value),
                     "cublasLtMatmulDescSetAttribute", where);
    };
    cublaslt_check(cublasLtMatmulDescCreate(made.operation.place(), CUBLAS_COMPUTE_32F, CUDA_R_32F),
                   "cublasLtMatmulDescCreate", where);
    operation_is(CUBLASLT_MATMUL_DESC_TRANSA, key.transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    operation_is(CUBLASLT_MATMUL_DESC_TRANSB, key.transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    operation_is(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue.kind);
    if (epilogue.aux != nullptr)
      operation_is(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{epilogue.aux_leading});
    point_at(made.operation.get(), epilogue, where);

    auto const layout = [&](auto& of, index_t type, index_t rows, index_t columns, index_t leading,
                            index_t next) {
      cublaslt_check(cublasLtMatrixLayoutCreate(of.place(), static_cast<cudaDataType>(type),
                                                narrow<std::uint64_t>(rows, where),
                                                narrow<std::uint64_t>(columns, where), leading),
                     "cublasLtMatrixLayoutCreate", where);
      if (key.batch == 1) return;
      auto const count = narrow<std::int32_t>(key.batch, where);
      auto const offset = std::int64_t{next};
      auto const is = [&](cublasLtMatrixLayoutAttribute_t attribute, auto const& value) {
        cublaslt_check(cublasLtMatrixLayoutSetAttribute(of.get(), attribute, &value, sizeof value),
                       "cublasLtMatrixLayoutSetAttribute", where);
      };
      is(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count);
      is(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, offset);
    };
    // A is [m, k] and B [k, n] before they are transposed, with columns adjacent.
    layout(made.a, key.type, key.transposed_a ? key.k : key.m, key.transposed_a ? key.m : key.k,
           key.leading_a, key.next_a);
    layout(made.b, key.type, key.transposed_b ? key.n : key.k, key.transposed_b ? key.k : key.n,
           key.leading_b, key.next_b);
    layout(made.d, key.type_d, key.m, key.n, key.leading_d, key.next_d);
    choose(ex, made, key, where);
    return made;
  }

  /// The best algorithm by cuBLASLt's own estimate, within the workspace and the alignments.
  void choose(exec::cuda& ex, plan& made, shape const& key, site where) const {
    auto const prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      cublaslt_check(cublasLtMatmulPreferenceSetAttribute(preference_.get(), attribute, &value, sizeof value),
                     "cublasLtMatmulPreferenceSetAttribute", where);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, narrow<std::uint64_t>(ex.workspace_bytes(), where));
    // Partial sums of a split k are added in fp32, not in the type of the result.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, narrow<std::uint32_t>(key.alignment_a, where));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, narrow<std::uint32_t>(key.alignment_b, where));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, narrow<std::uint32_t>(key.alignment_d, where));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, narrow<std::uint32_t>(key.alignment_d, where));

    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    auto const status =
        cublasLtMatmulAlgoGetHeuristic(library_.get(), made.operation.get(), made.a.get(), made.b.get(),
                                       made.d.get(), made.d.get(), preference_.get(), 1, &found, &count);
    auto const kind = static_cast<cublasLtEpilogue_t>(key.epilogue);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED && !is_refusal(status, kind))
      cublaslt_check(status, "cublasLtMatmulAlgoGetHeuristic", where);
    if (status != CUBLAS_STATUS_SUCCESS || count < 1 || found.state != CUBLAS_STATUS_SUCCESS) {
      if (kind != CUBLASLT_EPILOGUE_DEFAULT) give_up(ex, made);
      return;
    }
    made.possible = true;
    made.algorithm = found.algo;
    made.workspace_bytes = narrow<index_t>(found.workspaceSize, where);
  }

  /// The product alone is possible, whatever the answer to the epilogue.
  static bool is_refusal(cublasStatus_t status, cublasLtEpilogue_t kind) noexcept {
    return kind != CUBLASLT_EPILOGUE_DEFAULT &&
           (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE);
  }
  static void give_up(exec::cuda& ex, plan& made) {
    made.possible = false;
    ex.note(
        "some products: cuBLASLt does not apply bias, GELU or their gradients to them; separate kernels do");
  }

  static void point_at(cublasLtMatmulDesc_t operation, product_epilogue const& epilogue, site where) {
    auto const is = [&](cublasLtMatmulDescAttributes_t attribute, void const* value) {
      if (value != nullptr)
        cublaslt_check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value),
                       "cublasLtMatmulDescSetAttribute", where);
    };
    is(CUBLASLT_MATMUL_DESC_BIAS_POINTER, epilogue.bias);
    is(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, epilogue.aux);
  }

  descriptor<cublasLtHandle_t, cublasLtDestroy> library_;
  descriptor<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference_;
  std::unordered_map<shape, plan, hash_of_shape> plans_;
};

/// A matrix as a batch of one.
template <class T, memory_space M>
view<T, 3, M> batch_of_one(view<T, 2, M> matrix) {
  return {matrix.data(), {1, matrix.extent(0), matrix.extent(1)}, {0, matrix.stride(0), matrix.stride(1)}};
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif

#endif

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

inline constexpr int copy_threads = 256;

/// to = from, or to += from; any strides, element by element: not a path that anything fast takes.
template <storage_scalar To, storage_scalar From>
TESSERA_KERNEL void __launch_bounds__(copy_threads)
    copy_kernel(view<To, 3, cuda_memory> to, view<From const, 3, cuda_memory> from, bool accumulate) {
  auto const rows = to.extent(1), columns = to.extent(2), count = to.size();
  for (auto i = index_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += index_t{gridDim.x} * blockDim.x) {
    auto const row = i / columns, batch = row / rows;
    auto& place = *to.address(batch, row % rows, i % columns);
    auto const value = static_cast<float>(*from.address(batch, row % rows, i % columns));
    place = To(accumulate ? static_cast<float>(place) + value : value);
  }
}

template <storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(copy_threads) clear_kernel(view<T, 3, cuda_memory> to) {
  auto const rows = to.extent(1), columns = to.extent(2), count = to.size();
  for (auto i = index_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += index_t{gridDim.x} * blockDim.x)
    *to.address(i / columns / rows, i / columns % rows, i % columns) = T(0.0f);
}

template <exec::cuda_space Ex, storage_scalar To, storage_scalar From>
void copy_matrices(Ex& ex, view<To, 3, cuda_memory> to, view<From const, 3, cuda_memory> from,
                   bool accumulate, site where) {
  exec::launch(
      ex, {.grid = exec::grid_for(ex, to.size(), copy_threads), .block = dim3(copy_threads), .where = where},
      copy_kernel<To, From>, to, from, accumulate);
}

template <exec::cuda_space Ex, storage_scalar T>
void clear_matrices(Ex& ex, view<T, 3, cuda_memory> to, site where) {
  exec::launch(
      ex, {.grid = exec::grid_for(ex, to.size(), copy_threads), .block = dim3(copy_threads), .where = where},
      clear_kernel<T>, to);
}

/// The operand, or a dense copy of it where its type or its layout is none that cuBLASLt takes.
template <class Tag, storage_scalar To, exec::cuda_space Ex, storage_scalar From>
view<To const, 3, cuda_memory> operand_as(Ex& ex, view<From const, 3, cuda_memory> given, site where) {
  if constexpr (std::same_as<To, From>)
    if (layout_of(given)) return given;
  view<To, 3, cuda_memory> const copy(
      ex.template handle<exec::scratch<Tag, cuda_memory>>().template take<To>(given.size(), where),
      given.extents());
  copy_matrices(ex, copy, given, false, where);
  return copy;
}

} // namespace cuda_detail

template <>
struct matmul_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run(Ex& ex, view<C, 2, exec::cuda_memory> c, view<A const, 2, exec::cuda_memory> a,
                  view<B const, 2, exec::cuda_memory> b, bool accumulate, site where = site::here()) {
    using cuda_detail::batch_of_one;
    run_batched(ex, batch_of_one(c), batch_of_one(a), batch_of_one(b), accumulate, where);
  }

  template <exec::cuda_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run_batched(Ex& ex, view<C, 3, exec::cuda_memory> c, view<A const, 3, exec::cuda_memory> a,
                          view<B const, 3, exec::cuda_memory> b, bool accumulate, site where) {
    using namespace cuda_detail;
    using operand = std::conditional_t<std::same_as<A, B>, A, float>;
    if (c.empty()) return;
    if (a.extent(2) == 0) { // sums of nothing
      if (!accumulate) clear_matrices(ex, c, where);
      return;
    }
    auto const left = operand_as<left_copy, operand>(ex, a, where);
    auto const right = operand_as<right_copy, operand>(ex, b, where);
    auto& library = ex.template handle<cublaslt>();
    if constexpr (std::same_as<C, operand> || std::same_as<C, float>)
      if (is_target(c)) {
        if (!library.multiply(ex, c, left, right, accumulate, {}, where)) refuse(c, left, where);
        return;
      }
    view<float, 3, cuda_memory> const sums(
        ex.template handle<exec::scratch<result_copy, cuda_memory>>().template take<float>(c.size(), where),
        c.extents());
    if (!library.multiply(ex, sums, left, right, false, {}, where)) refuse(c, left, where);
    copy_matrices(ex, c, view<float const, 3, cuda_memory>(sums), accumulate, where);
  }

private:
  struct left_copy;
  struct right_copy;
  struct result_copy;

  /// Whether cuBLASLt can write it: rows apart, matrices apart.
  template <storage_scalar C>
  static bool is_target(view<C, 3, exec::cuda_memory> c) {
    auto const layout = cuda_detail::layout_of(c);
    return layout && !layout->columns && (c.extent(0) == 1 || layout->next >= c.extent(1) * layout->leading);
  }

  template <storage_scalar C, storage_scalar T>
  [[noreturn]] static void refuse(view<C, 3, exec::cuda_memory> c, view<T const, 3, exec::cuda_memory> a,
                                  site where) {
    throw library_error("E-ops-107", where, "cuBLASLt has no algorithm for products of extents ",
                        text_of(c.extents()), " over ", a.extent(2), " elements of ", scalar_name<T>());
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

struct plus_bias {
  TESSERA_HOST_DEVICE void operator()(float& y, float sum, float bias) const noexcept { y = sum + bias; }
};
struct unchanged {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = x; }
};
template <gelu_form Form>
struct gelu_of {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = gelu_value<Form>(x); }
};
/// The slope of the GELU, and the gradient before it.
template <gelu_form Form>
struct slope_of {
  TESSERA_HOST_DEVICE float operator()(float x) const noexcept { return gelu_slope<Form>(x); }
  TESSERA_HOST_DEVICE void operator()(float& d_in, float d_out, float x) const noexcept {
    d_in = d_out * gelu_slope<Form>(x);
  }
};

/// What cuBLASLt asks of a vector or matrix that an epilogue reads or writes.
template <class T>
bool suits_epilogue(view<T, 1, cuda_memory> bias) noexcept {
  return exec::aligned16(bias.data());
}
template <class T>
bool suits_epilogue(view<T, 2, cuda_memory> aux) noexcept {
  return exec::aligned16(aux.data()) && aux.stride(0) % 8 == 0 && aux.stride(0) >= aux.extent(1);
}

} // namespace cuda_detail

template <>
struct linear_on<exec::cuda_backend> {
  template <class T, int Rank>
  using device_view = view<T, Rank, exec::cuda_memory>;

  template <exec::cuda_space Ex, storage_scalar T>
  static void forward(Ex& ex, device_view<T, 2> out, device_view<T const, 2> in,
                      device_view<T const, 2> weight, device_view<T const, 1> bias,
                      linear_options<T, exec::cuda_memory> const& options, site where) {
    auto const pre = options.pre_activation;
    device_view<T const, 2> const weight_t(weight.data(), {weight.extent(1), weight.extent(0)},
                                           {1, weight.stride(0)});
    if (options.activation == activation::gelu_tanh &&
        gelu_by_product(ex, out, in, weight_t, bias, pre, where))
      return;
    // Product and bias first, where they are kept or else in the output.
    auto const before = pre.empty() ? out : pre;
    product_plus_bias(ex, before, in, weight_t, bias, where);
    auto const finish = [&](auto function) {
      exec::for_elements(ex, out.extent(0), out.extent(1), function, exec::writes(out.data(), out.stride(0)),
                         exec::reads(before.data(), before.stride(0)));
    };
    switch (options.activation) {
    case activation::none:
      if (!pre.empty()) finish(cuda_detail::unchanged{});
      break;
    case activation::gelu_tanh:
      finish(cuda_detail::gelu_of<gelu_form::tanh>{});
      break;
    case activation::gelu_erf:
      finish(cuda_detail::gelu_of<gelu_form::erf>{});
      break;
    }
  }

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G>
  static void backward(Ex& ex, linear_gradients<T, G, exec::cuda_memory> const& gradients,
                       device_view<T const, 2> d_out, device_view<T const, 2> in,
                       device_view<T const, 2> weight,
                       linear_backward_options<T, exec::cuda_memory> const& options, site where) {
    auto const own_activation = options.activation != activation::none;
    if (own_activation) {
      auto d_pre = options.scratch;
      if (d_pre.data() == nullptr)
        d_pre = {ex.template handle<exec::scratch<linear_on, exec::cuda_memory>>().template take<T>(
                     d_out.size(), where),
                 d_out.extents()};
      if (options.activation == activation::gelu_tanh)
        before_own_activation(ex, gradients.bias, d_pre, d_out, cuda_detail::slope_of<gelu_form::tanh>{},
                              options, where);
      else
        before_own_activation(ex, gradients.bias, d_pre, d_out, cuda_detail::slope_of<gelu_form::erf>{},
                              options, where);
      d_out = d_pre;
    }
    weight_gradient(ex, gradients.weight, own_activation ? device_view<G, 1>() : gradients.bias, d_out, in,
                    options.accumulate, where);
    input_gradient(ex, gradients.input, d_out, weight, options, where);
  }

private:
  using epilogue = cuda_detail::product_epilogue;

  /// out (+)= a b with an epilogue; false where cuBLASLt cannot.
  template <exec::cuda_space Ex, storage_scalar C, storage_scalar T>
  static bool product(Ex& ex, device_view<C, 2> out, device_view<T const, 2> a, device_view<T const, 2> b,
                      epilogue const& then, site where) {
    using cuda_detail::batch_of_one;
    return ex.template handle<cuda_detail::cublaslt>().multiply(ex, batch_of_one(out), batch_of_one(a),
                                                                batch_of_one(b), false, then, where);
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static bool gelu_by_product(Ex& ex, device_view<T, 2> out, device_view<T const, 2> in,
                              device_view<T const, 2> weight_t, device_view<T const, 1> bias,
                              device_view<T, 2> pre, site where) {
    if constexpr (std::same_as<T, float>) {
      return false;
    } else {
      using cuda_detail::suits_epilogue;
      if (!suits_epilogue(bias) || (!pre.empty() && !suits_epilogue(pre))) return false;
      auto kind = static_cast<unsigned>(pre.empty() ? CUBLASLT_EPILOGUE_GELU : CUBLASLT_EPILOGUE_GELU_AUX);
      if (!bias.empty()) kind |= CUBLASLT_EPILOGUE_BIAS;
      epilogue then{static_cast<cublasLtEpilogue_t>(kind), bias.data()};
      if (!pre.empty()) then.aux = pre.data(), then.aux_leading = pre.stride(0);
      return product(ex, out, in, weight_t, then, where);
    }
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void product_plus_bias(Ex& ex, device_view<T, 2> out, device_view<T const, 2> in,
                                device_view<T const, 2> weight_t, device_view<T const, 1> bias, site where) {
    using product_on = matmul_on<exec::cuda_backend>;
    if (bias.empty()) return product_on::run(ex, out, in, weight_t, false, where);
    if (cuda_detail::suits_epilogue(bias) &&
        product(ex, out, in, weight_t, {CUBLASLT_EPILOGUE_BIAS, bias.data()}, where))
      return;
    // The sum is rounded once, after the bias.
    device_view<float, 2> sums;
    if constexpr (std::same_as<T, float>)
      sums = out;
    else
      sums = {ex.template handle<exec::scratch<fp32_sums, exec::cuda_memory>>().template take<float>(
                  out.size(), where),
              out.extents()};
    product_on::run(ex, sums, in, weight_t, false, where);
    exec::for_elements(ex, out.extent(0), out.extent(1), cuda_detail::plus_bias{},
                       exec::writes(out.data(), out.stride(0)), exec::reads(sums.data(), sums.stride(0)),
                       exec::reads(bias.data()));
  }

  /// d_pre = d_out * slope(pre), and the sums of its columns.
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G, class Slope>
  static void before_own_activation(Ex& ex, device_view<G, 1> bias, device_view<T, 2> d_pre,
                                    device_view<T const, 2> d_out, Slope slope,
                                    linear_backward_options<T, exec::cuda_memory> const& options,
                                    site where) {
    auto const pre = options.pre_activation;
    if (bias.empty())
      exec::for_elements(ex, d_out.extent(0), d_out.extent(1), slope,
                         exec::writes(d_pre.data(), d_pre.stride(0)),
                         exec::reads(d_out.data(), d_out.stride(0)), exec::reads(pre.data(), pre.stride(0)));
    else
      cuda_detail::column_sums(
          ex, bias.data(),
          cuda_detail::column_source<T>{.in = d_out.data(),
                                        .in_stride = d_out.stride(0),
                                        .before = pre.data(),
                                        .before_stride = pre.stride(0),
                                        .out = d_pre.data(),
                                        .out_stride = d_pre.stride(0),
                                        .aligned = aligned(d_out) && aligned(pre) && aligned(d_pre)},
          slope, d_out.extent(0), d_out.extent(1), options.accumulate, where);
  }

  /// d_weight (+)= d_out^T in and d_bias (+)= the columns of d_out, in one call where nothing is added to.
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G>
  static void weight_gradient(Ex& ex, device_view<G, 2> weight, device_view<G, 1> bias,
                              device_view<T const, 2> d_out, device_view<T const, 2> in, bool accumulate,
                              site where) {
    auto const m = d_out.extent(0), n = d_out.extent(1);
    device_view<T const, 2> const d_out_t(d_out.data(), {n, m}, {1, d_out.stride(0)});
    if constexpr (std::same_as<G, T> || std::same_as<G, float>)
      if (!weight.empty() && !bias.empty() && !accumulate && cuda_detail::suits_epilogue(bias) &&
          product(ex, weight, d_out_t, in, {CUBLASLT_EPILOGUE_BGRADB, bias.data()}, where))
        return;
    if (!bias.empty())
      cuda_detail::column_sums(ex, bias.data(),
                               cuda_detail::column_source<T>{.in = d_out.data(),
                                                             .in_stride = d_out.stride(0),
                                                             .aligned = aligned(d_out)},
                               cuda_detail::no_slope{}, m, n, accumulate, where);
    if (!weight.empty()) matmul_on<exec::cuda_backend>::run(ex, weight, d_out_t, in, accumulate, where);
  }

  /// d_in (+)= d_out weight, or d_in = d_out weight * the slope of the activation that made the input.
  template <exec::cuda_space Ex, storage_scalar T>
  static void input_gradient(Ex& ex, device_view<T, 2> d_in, device_view<T const, 2> d_out,
                             device_view<T const, 2> weight,
                             linear_backward_options<T, exec::cuda_memory> const& options, site where) {
    if (d_in.empty()) return;
    auto const pre = options.input_pre_activation;
    if constexpr (!std::same_as<T, float>)
      if (options.input_activation == activation::gelu_tanh && cuda_detail::suits_epilogue(pre) &&
          product(ex, d_in, d_out, weight, {CUBLASLT_EPILOGUE_DGELU, nullptr, pre.data(), pre.stride(0)},
                  where))
        return;
    matmul_on<exec::cuda_backend>::run(ex, d_in, d_out, weight, options.accumulate_input, where);
    auto const finish = [&](auto slope) {
      exec::for_elements(ex, d_in.extent(0), d_in.extent(1), slope, exec::writes(d_in.data(), d_in.stride(0)),
                         exec::reads(d_in.data(), d_in.stride(0)), exec::reads(pre.data(), pre.stride(0)));
    };
    if (options.input_activation == activation::gelu_tanh) finish(cuda_detail::slope_of<gelu_form::tanh>{});
    if (options.input_activation == activation::gelu_erf) finish(cuda_detail::slope_of<gelu_form::erf>{});
  }

  template <class T>
  static bool aligned(device_view<T, 2> rows) noexcept {
    return exec::aligned16(rows.data(), rows.stride(0));
  }

  struct fp32_sums;
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// linear_cross_entropy on CUDA: the same chunks as on the host, by the products and the fused classifier of
/// this folder. With `totals` nothing in it waits for the device.
#ifndef TESSERA_OPS_CUDA_LINEAR_CROSS_ENTROPY_CUH
#define TESSERA_OPS_CUDA_LINEAR_CROSS_ENTROPY_CUH

#endif
/// random_normal on CUDA: one pass; both numbers of a pair are drawn for themselves.
#ifndef TESSERA_OPS_CUDA_RANDOM_NORMAL_CUH
#define TESSERA_OPS_CUDA_RANDOM_NORMAL_CUH

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

struct random_normal_elements {
  philox random;
  std::uint64_t first_index;
  float mean, deviation;

  template <int N>
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&y)[N]) const noexcept {
    for (int i = 0; i < N; ++i)
      y[i] = mean + deviation * random.normal(first_index + static_cast<std::uint64_t>(first + i));
  }
};

} // namespace cuda_detail

template <>
struct random_normal_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 1, typename Ex::memory> out, random_normal_options const& options) {
    exec::for_elements(
        ex, out.size(),
        cuda_detail::random_normal_elements{.random = philox(options.seed, options.stream),
                                            .first_index = static_cast<std::uint64_t>(options.first),
                                            .mean = options.mean,
                                            .deviation = options.deviation},
        exec::writes(out.data()));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// Sums on CUDA: blocks add up their share, the host adds their results in order. Which element goes where
/// depends on the count alone, so that the same values give the same bits wherever they lie and on any
/// device. Waits for the result.
#ifndef TESSERA_OPS_CUDA_REDUCE_CUH
#define TESSERA_OPS_CUDA_REDUCE_CUH

#include <array>

#include <cub/block/block_reduce.cuh>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

inline constexpr int reduce_threads = 256, reduce_blocks = 1024;

/// partial[block] = the sum of term(x) over every x of the block. term(0) is 0.
template <storage_scalar T, class Term>
TESSERA_KERNEL void __launch_bounds__(reduce_threads)
    reduce_kernel(double* partial, T const* in, index_t count, bool aligned, Term term) {
  constexpr int n = exec::pack_size<T>;
  auto const step = index_t{gridDim.x} * reduce_threads * n;
  auto i = (index_t{blockIdx.x} * reduce_threads + threadIdx.x) * n;
  auto sum = 0.0;
  float x[n];
  if (aligned)
#pragma unroll 4
    for (; i + n <= count; i += step) {
      exec::load_pack(x, in + i);
      for (int e = 0; e < n; ++e) sum += term(x[e]);
    }
  for (; i < count; i += step) {
    exec::load_part(x, in + i, count - i, false);
    for (int e = 0; e < n; ++e) sum += term(x[e]);
  }
  using block = cub::BlockReduce<double, reduce_threads>;
  __shared__ typename block::TempStorage storage;
  auto const total = block(storage).Sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

} // namespace cuda_detail

template <>
struct reduce_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, class Term>
  static double sum(Ex& ex, view<T const, 1, typename Ex::memory> in, Term term, site where) {
    using namespace cuda_detail;
    constexpr index_t share = index_t{reduce_threads} * exec::pack_size<T>;
    auto const blocks = (std::min)((in.size() + share - 1) / share, index_t{reduce_blocks});
    auto& scratch = ex.template handle<exec::scratch<reduce_on, typename Ex::memory>>();
    auto* partial = scratch.template take<double>(reduce_blocks, where);
    exec::launch(ex, {.grid = exec::grid_of(blocks), .block = dim3(reduce_threads), .where = where},
                 reduce_kernel<T, Term>, partial, in.data(), in.size(), exec::aligned16(in.data()), term);

    std::array<double, reduce_blocks> results;
    auto const count = static_cast<std::size_t>(blocks);
    exec::copy(ex, std::span<double>(results.data(), count),
               memory_span<double const, typename Ex::memory>(partial, count), where);
    auto total = 0.0;
    for (std::size_t b = 0; b < count; ++b) total += results[b];
    return total;
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// rms_norm on CUDA: see detail/norm_rows.cuh.
#ifndef TESSERA_OPS_CUDA_RMS_NORM_CUH
#define TESSERA_OPS_CUDA_RMS_NORM_CUH

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct rms_norm_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, memory_space M>
  static void forward(Ex& ex, view<T, 2, M> out, view<T, 2, M> sum, view<float, 1, M> deviation,
                      view<T const, 2, M> a, view<T const, 2, M> b, view<T const, 1, M> gain, float epsilon) {
    cuda_detail::norm_rows<false>::forward(ex, out, sum, view<float, 1, M>{}, deviation, a, b, gain,
                                           view<T const, 1, M>{}, epsilon);
  }

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G, memory_space M>
  static void backward(Ex& ex, view<T, 2, M> d_in, view<G, 1, M> d_gain, view<T const, 2, M> d_out,
                       view<T const, 2, M> in, view<float const, 1, M> deviation, view<T const, 1, M> gain,
                       norm_backward_options options, site where) {
    cuda_detail::norm_rows<false>::backward(ex, d_in, d_gain, view<G, 1, M>{}, d_out, in,
                                            view<float const, 1, M>{}, deviation, gain, options.accumulate,
                                            options.accumulate_input, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// rotary on CUDA: the host's table of cosines and sines for each (theta, D) that came by, copied to the
/// device once, then one pass. A table that grows cannot do so while a graph is captured: run the operation
/// once before.
#ifndef TESSERA_OPS_CUDA_ROTARY_CUH
#define TESSERA_OPS_CUDA_ROTARY_CUH

#include <vector>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

/// A handle of exec::cuda.
class rotary_tables {
public:
  explicit rotary_tables(memory_account account) noexcept : account_(account) {}

  /// Rows of D / 2 cosines and D / 2 sines for positions [0, positions).
  template <exec::cuda_space Ex>
  float const* of(Ex& ex, float theta, index_t half, index_t positions, site where) {
    auto* known = find(theta, half);
    if (known == nullptr) {
      tables_.push_back({theta, half, {}});
      known = &tables_.back();
    }
    if (positions > known->rows.extent(0)) {
      auto const size = 2 * known->rows.extent(0) > positions ? 2 * known->rows.extent(0) : positions;
      tensor<float, 2> filled({size, 2 * half}, {}, where);
      detail::fill_rotary_table(filled.data(), theta, half, size);
      known->rows = tensor<float, 2, exec::cuda_memory>(filled.extents(), account_, where);
      exec::copy(ex, known->rows.span(), std::span<float const>(filled.span()), where);
    }
    return known->rows.data();
  }

private:
  struct table {
    float theta;
    index_t half;
    tensor<float, 2, exec::cuda_memory> rows;
  };
  table* find(float theta, index_t half) noexcept {
    for (auto& known : tables_)
      if (known.theta == theta && known.half == half) return &known;
    return nullptr;
  }

  memory_account account_;
  std::vector<table> tables_;
};

inline constexpr int rotary_lanes = 32, rotary_tokens = 8;

/// A token is turned by the lanes of a warp, N pairs each at a time.
template <int N, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(rotary_lanes* rotary_tokens)
    rotary_kernel(view<T, 4, exec::cuda_memory> x, float const* table, index_t first_position, float sign) {
  auto const sequence = x.extent(1), tokens = x.extent(0) * sequence, half = x.extent(3) / 2;
  auto const packs = static_cast<unsigned>(half / N), count = packs * static_cast<unsigned>(x.extent(2));
  for (auto token = index_t{blockIdx.x} * rotary_tokens + threadIdx.y; token < tokens;
       token += index_t{gridDim.x} * rotary_tokens) {
    auto const t = token % sequence;
    auto const* cosines = table + (first_position + t) * 2 * half;
    auto* at = x.data() + token / sequence * x.stride(0) + t * x.stride(1);
    for (auto i = static_cast<unsigned>(threadIdx.x); i < count; i += rotary_lanes) {
      auto const pair = index_t{i % packs} * N;
      auto* first = at + index_t{i / packs} * x.stride(2) + pair;
      float a[N], b[N], cosine[N], sine[N];
      exec::load_pack(a, first);
      exec::load_pack(b, first + half);
      exec::load_pack(cosine, cosines + pair);
      exec::load_pack(sine, cosines + half + pair);
#pragma unroll
      for (int j = 0; j < N; ++j) detail::rotate(a[j], b[j], cosine[j], sign * sine[j]);
      exec::store_pack(first, a);
      exec::store_pack(first + half, b);
    }
  }
}

} // namespace cuda_detail

template <>
struct rotary_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 4, exec::cuda_memory> x, rotary_options const& options, site where) {
    using namespace cuda_detail;
    if (x.empty()) return;
    auto const half = x.extent(3) / 2;
    // One count for both, so that lanes count in 32 bits.
    (void)narrow<std::int32_t>(x.extent(2) * half, where);
    auto const positions = element_count<1>({options.first_position + x.extent(1)}, where);
    auto const* table = ex.template handle<rotary_tables>().of(ex, options.theta, half, positions, where);
    constexpr int n = exec::pack_size<T>;
    auto const whole = half % n == 0 && exec::aligned16(x.data(), x.stride(0)) &&
                       exec::aligned16(x.data(), x.stride(1)) && exec::aligned16(x.data(), x.stride(2));
    exec::launch(ex,
                 {.grid = exec::grid_for(ex, x.extent(0) * x.extent(1), rotary_tokens),
                  .block = dim3(rotary_lanes, rotary_tokens),
                  .where = where},
                 whole ? rotary_kernel<n, T> : rotary_kernel<1, T>, x, table, options.first_position,
                 options.inverse ? -1.0f : 1.0f);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// scale and fill on CUDA: one pass.
#ifndef TESSERA_OPS_CUDA_SCALE_CUH
#define TESSERA_OPS_CUDA_SCALE_CUH

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {
struct scale_element {
  float factor;
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = factor * x; }
};
struct fill_element {
  float value;
  TESSERA_HOST_DEVICE void operator()(float& y) const noexcept { y = value; }
};
} // namespace cuda_detail

template <>
struct scale_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void scale(Ex& ex, view<T, 1, typename Ex::memory> out, view<T const, 1, typename Ex::memory> in,
                    float factor) {
    exec::for_elements(ex, in.size(), cuda_detail::scale_element{factor}, exec::writes(out.data()),
                       exec::reads(in.data()));
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void fill(Ex& ex, view<T, 1, typename Ex::memory> out, float value) {
    exec::for_elements(ex, out.size(), cuda_detail::fill_element{value}, exec::writes(out.data()));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
/// swiglu on CUDA: one pass over gate and up side by side.
#ifndef TESSERA_OPS_CUDA_SWIGLU_CUH
#define TESSERA_OPS_CUDA_SWIGLU_CUH

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

struct swiglu_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float gate, float up) const noexcept {
    y = silu_value(gate) * up;
  }
};
struct swiglu_gradient {
  TESSERA_HOST_DEVICE void operator()(float& d_gate, float& d_up, float dy, float gate,
                                      float up) const noexcept {
    auto const silu = silu_with_slope(gate);
    d_gate = dy * up * silu.slope;
    d_up = dy * silu.value;
  }
};

} // namespace cuda_detail

template <>
struct swiglu_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 2, typename Ex::memory> out,
                      view<T const, 2, typename Ex::memory> gate_up) {
    auto const width = out.extent(1);
    auto const both = gate_up.stride(0);
    exec::for_elements(ex, out.extent(0), width, cuda_detail::swiglu_element{},
                       exec::writes(out.data(), out.stride(0)), exec::reads(gate_up.data(), both),
                       exec::reads(gate_up.data() + width, both));
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 2, typename Ex::memory> d_gate_up,
                       view<T const, 2, typename Ex::memory> d_out,
                       view<T const, 2, typename Ex::memory> gate_up) {
    auto const width = d_out.extent(1);
    auto const both = gate_up.stride(0), d_both = d_gate_up.stride(0);
    exec::for_elements(ex, d_out.extent(0), width, cuda_detail::swiglu_gradient{},
                       exec::writes(d_gate_up.data(), d_both), exec::writes(d_gate_up.data() + width, d_both),
                       exec::reads(d_out.data(), d_out.stride(0)), exec::reads(gate_up.data(), both),
                       exec::reads(gate_up.data() + width, both));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif

#if defined(TESSERA_WITH_NCCL)
/// comm::nccl with the kernel that adds in rank_order. A program that reduces in rank_order over NCCL
/// includes this file in a file that nvcc compiles, for the types that it reduces there.
///
/// Cost of the kernel: each piece and the output once through memory, 16 bytes at a time where all of them
/// are aligned.
#ifndef TESSERA_COMM_CUDA_NCCL_CUH
#define TESSERA_COMM_CUDA_NCCL_CUH

#if defined(TESSERA_WITH_NCCL)

namespace tessera::inline TESSERA_ABI::comm::detail {

inline constexpr int combine_threads = 256;

/// out[i] = reduction over r of pieces[r * stride + i], `Width` elements a thread: as `combine` on the host.
template <class T, reduction Operation, int Width>
__launch_bounds__(combine_threads) TESSERA_KERNEL
    void combine_pieces(T* out, T const* pieces, index_t n, index_t stride, int ranks, int* overflow) {
  using wide = accumulator_t<T>;
  auto const begin =
      (static_cast<index_t>(blockIdx.x) * combine_threads + static_cast<index_t>(threadIdx.x)) * Width;
  if (begin >= n) return;
  bool exact = true;
  if constexpr (Width > 1) {
    if (begin + Width <= n) {
      wide sum[Width];
      auto part = exec::load16(pieces + begin);
#pragma unroll
      for (int i = 0; i < Width; ++i) sum[i] = static_cast<wide>(part[i]);
      for (int r = 1; r < ranks; ++r) {
        part = exec::load16(pieces + r * stride + begin);
#pragma unroll
        for (int i = 0; i < Width; ++i) exact &= combine_value<Operation>(sum[i], static_cast<wide>(part[i]));
      }
#pragma unroll
      for (int i = 0; i < Width; ++i) part[i] = static_cast<T>(sum[i]);
      exec::store16(out + begin, part);
      if (!exact && overflow != nullptr) atomicMax(overflow, 1);
      return;
    }
  }
  auto const end = begin + Width < n ? begin + Width : n;
  for (auto i = begin; i < end; ++i) {
    auto sum = static_cast<wide>(pieces[i]);
    for (int r = 1; r < ranks; ++r)
      exact &= combine_value<Operation>(sum, static_cast<wide>(pieces[r * stride + i]));
    out[i] = static_cast<T>(sum);
  }
  if (!exact && overflow != nullptr) atomicMax(overflow, 1);
}

template <class T, reduction Operation>
void launch_combine(device_combine_space& space, combine_step const& s) {
  auto* out = static_cast<T*>(s.out);
  auto const* pieces = static_cast<T const*>(s.pieces);
  constexpr int width = 16 / sizeof(T);
  auto const shape = [&](index_t per_thread) {
    auto const per_block = combine_threads * per_thread;
    return exec::launch_shape{.grid = exec::grid_of((s.n + per_block - 1) / per_block, 1, 1, s.where),
                              .block = dim3(combine_threads),
                              .where = s.where};
  };
  if (exec::aligned16(pieces, s.stride) && exec::aligned16(out))
    exec::launch(space.lane, shape(width), &combine_pieces<T, Operation, width>, out, pieces, s.n, s.stride,
                 s.ranks, space.overflow);
  else
    exec::launch(space.lane, shape(1), &combine_pieces<T, Operation, 1>, out, pieces, s.n, s.stride, s.ranks,
                 space.overflow);
}

template <reducible_scalar T>
bool combine_on_device(void* where, combine_step const& step) {
  auto& space = *static_cast<device_combine_space*>(where);
  switch (step.operation) {
  case reduction::sum:
    launch_combine<T, reduction::sum>(space, step);
    break;
  case reduction::max:
    launch_combine<T, reduction::max>(space, step);
    break;
  case reduction::min:
    launch_combine<T, reduction::min>(space, step);
    break;
  }
  return true;
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

#endif
#endif

/// CUDA's pass over a flat shard: one kernel, in which each thread looks up the decay of its elements. The
/// decayed ranges go along as a parameter of the kernel, so that nothing has to be copied beforehand; a shard
/// with more of them than a parameter holds takes one kernel for each stretch that has so many.
#ifndef TESSERA_OPTIM_CUDA_FLAT_UPDATE_CUH
#define TESSERA_OPTIM_CUDA_FLAT_UPDATE_CUH

#include <tuple>

namespace tessera::inline TESSERA_ABI::optim {

namespace cuda_detail {

/// Disjoint ranges in order. Parameters of a kernel may take 4096 bytes together.
struct decayed_ranges {
  static constexpr int most = 192;
  int count = 0;
  layout::range range[most];

  /// Bit i: element first + i stands in a range, for i in [0, n).
  TESSERA_HOST_DEVICE unsigned among(index_t first, int n) const noexcept {
    int at = 0, after = count; // the first range that ends behind `first`
    while (at < after) {
      auto const middle = (at + after) / 2;
      if (range[middle].end <= first)
        at = middle + 1;
      else
        after = middle;
    }
    auto bits = 0u;
    for (; at < count && range[at].begin < first + n; ++at) {
      auto const from = range[at].begin > first ? int(range[at].begin - first) : 0;
      auto const to = range[at].end < first + n ? int(range[at].end - first) : n;
      bits |= (1u << to) - (1u << from);
    }
    return bits;
  }
};

/// A rule with what it needs beside the arrays: (weight, gradient, state...), or where there is a master
/// (weight, master, gradient, state...), of which the weight is only written.
template <class Rule, bool HasMaster>
struct update_elements {
  Rule rule;
  float decay;
  decayed_ranges decayed;

  template <int N, class... State>
    requires(!HasMaster)
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&weight)[N], float (&gradient)[N],
                                      State&... state) const noexcept {
    update(first, weight, gradient, state...);
  }
  template <int N, class... State>
    requires(HasMaster)
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&weight)[N], float (&master)[N],
                                      float (&gradient)[N], State&... state) const noexcept {
    update(first, master, gradient, state...);
    for (int i = 0; i < N; ++i) weight[i] = master[i];
  }

private:
  template <int N, class... State>
  TESSERA_HOST_DEVICE void update(index_t first, float (&weight)[N], float const (&gradient)[N],
                                  State&... state) const noexcept {
    auto const decays = decayed.among(first, N);
    for (int i = 0; i < N; ++i)
      weight[i] = rule(weight[i], gradient[i], (decays >> i & 1u) != 0 ? decay : 0.0f, state[i]...);
  }
};

struct widened_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = x; }
};

} // namespace cuda_detail

template <>
struct flat_update_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G, int Slots, update_rule Rule>
  static void run(Ex& ex, flat_shard<T, G, Slots, typename Ex::memory> const& shard, Rule const& rule,
                  float decay, site) {
    cuda_detail::decayed_ranges decayed;
    index_t done = 0;
    for (auto const& range : shard.decayed) {
      if (decayed.count == cuda_detail::decayed_ranges::most) {
        stretch(ex, shard, {done, range.begin}, rule, decay, decayed);
        done = range.begin;
        decayed.count = 0;
      }
      decayed.range[decayed.count++] = {range.begin - done, range.end - done};
    }
    stretch(ex, shard, {done, static_cast<index_t>(shard.weights.size())}, rule, decay, decayed);
  }

  template <exec::cuda_space Ex, storage_scalar From>
  static void copy(Ex& ex, device_span<float, typename Ex::memory> out,
                   device_span<From const, typename Ex::memory> in, site) {
    exec::for_elements(ex, static_cast<index_t>(out.size()), cuda_detail::widened_element{},
                       exec::writes(out.data()), exec::reads(in.data()));
  }

private:
  template <class Ex, class T, class G, int Slots, class M, class Rule>
  static void stretch(Ex& ex, flat_shard<T, G, Slots, M> const& shard, layout::range part, Rule const& rule,
                      float decay, cuda_detail::decayed_ranges const& decayed) {
    auto const run = [&](auto... state) {
      auto* const weights = shard.weights.data() + part.begin;
      auto const gradients = exec::reads(shard.gradients.data() + part.begin);
      if (shard.master.empty())
        exec::for_elements(ex, part.size(), cuda_detail::update_elements<Rule, false>{rule, decay, decayed},
                           exec::updates(weights), gradients, exec::updates(state.data() + part.begin)...);
      else
        exec::for_elements(ex, part.size(), cuda_detail::update_elements<Rule, true>{rule, decay, decayed},
                           exec::writes(weights), exec::updates(shard.master.data() + part.begin), gradients,
                           exec::updates(state.data() + part.begin)...);
    };
    std::apply(run, shard.state);
  }
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif

#endif
#endif

#endif
