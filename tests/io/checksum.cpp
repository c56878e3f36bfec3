// requires: xxhash
#include <doctest/doctest.h>

#include <vector>

#include <tessera/io/checksum.hpp>

using namespace tessera;

namespace {

/// The bytes over which xxHash publishes its sanity checks.
std::vector<std::byte> published_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  std::uint64_t generator = 2654435761u;
  for (auto& byte : bytes) {
    byte = static_cast<std::byte>(generator >> 56);
    generator *= 11400714785074694797u;
  }
  return bytes;
}

} // namespace

TEST_CASE("checksums are those that xxHash publishes for XXH3 with 64 bits") {
  struct {
    std::size_t bytes;
    std::uint64_t checksum;
  } const published[] = {{0, 0x2D06800538D394C2u},   {1, 0xC44BDFF4074EECDBu},    {6, 0x27B56A84CD2D7325u},
                         {12, 0xA713DAF0DFBB77E7u},  {24, 0xA3FE70BF9D3510EBu},   {48, 0x397DA259ECBA1F11u},
                         {80, 0xBCDEFBBB2C47C90Au},  {195, 0xCD94217EE362EC3Au},  {403, 0xCDEB804D65C6DEA4u},
                         {512, 0x617E49599013CB6Bu}, {2048, 0xDD59E2C3A5F038E0u}, {2240, 0x6E73A90539CF2948u},
                         {2367, 0xCB37AEB9E5D361EDu}};
  for (auto const& entry : published) {
    CAPTURE(entry.bytes);
    CHECK(io::checksum_of(published_bytes(entry.bytes)) == entry.checksum);
  }
}

TEST_CASE("pieces of any size give the checksum of the whole") {
  auto const bytes = published_bytes(5000);
  io::checksum_stream stream;
  for (std::size_t step : {1u, 7u, 255u, 256u, 1021u, 5000u}) {
    CAPTURE(step);
    stream.reset();
    for (std::size_t at = 0; at < bytes.size(); at += step)
      stream.update(std::span(bytes).subspan(at, (std::min)(step, bytes.size() - at)));
    stream.update({});
    CHECK(stream.value() == io::checksum_of(bytes));
  }
  io::checksum_stream empty;
  CHECK(empty.value() == io::checksum_of(std::string_view{}));
  auto moved = std::move(stream);
  CHECK(moved.value() == io::checksum_of(bytes));
}

TEST_CASE("one altered bit alters the checksum") {
  auto bytes = published_bytes(300);
  auto const before = io::checksum_of(bytes);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    REQUIRE(io::checksum_of(bytes) != before);
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
  }
}

TEST_CASE("checksums are written as sixteen digits") {
  CHECK(io::hexadecimal(0) == "0000000000000000");
  CHECK(io::hexadecimal(0x2D06800538D394C2u) == "2d06800538d394c2");
  CHECK(io::hexadecimal(~std::uint64_t{0}) == "ffffffffffffffff");
}
