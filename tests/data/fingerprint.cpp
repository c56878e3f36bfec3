// requires: xxhash
#include <doctest/doctest.h>

#include <tessera/data/fingerprint.hpp>

using namespace tessera;

TEST_CASE("the same tokens have the same fingerprint, however they are stored") {
  std::vector<std::uint16_t> narrow(40'001);
  for (std::size_t n = 0; n < narrow.size(); ++n) narrow[n] = static_cast<std::uint16_t>(n * 40503);
  std::vector<std::uint32_t> const wide(narrow.begin(), narrow.end());
  auto const fingerprint = data::fingerprint_of(std::span<std::uint16_t const>(narrow));
  CHECK(fingerprint == data::fingerprint_of(std::span(wide)));
  CHECK(fingerprint == io::checksum_of(std::as_bytes(std::span(wide))));
  auto other = wide;
  other[20'000] ^= 1;
  CHECK(fingerprint != data::fingerprint_of(std::span<std::uint32_t const>(other)));
  CHECK(fingerprint != data::fingerprint_of(std::span(wide).first(40'000)));
  CHECK(data::fingerprint_of({}) == io::checksum_of(""));
}
