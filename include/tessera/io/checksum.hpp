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

#include <tessera/core/extents.hpp>

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
