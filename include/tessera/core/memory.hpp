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

#include <tessera/core/view.hpp>

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
