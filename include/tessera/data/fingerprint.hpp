/// One number for a list of tokens: the same for the same tokens, however they are stored. A run's state
/// holds it, so that a run is not resumed on other data unnoticed.
///
/// Exists under TESSERA_WITH_XXHASH. Cost: every token read once.
#ifndef TESSERA_DATA_FINGERPRINT_HPP
#define TESSERA_DATA_FINGERPRINT_HPP

#if defined(TESSERA_WITH_XXHASH)

#include <cstdint>

#include <tessera/data/token_view.hpp>
#include <tessera/io/checksum.hpp>

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
