#include <doctest/doctest.h>

#include <limits>

#include <tessera/io/tensor_entry.hpp>

using namespace tessera;

namespace {

index_t bytes_of(io::dtype type, std::vector<index_t> shape) {
  return io::tensor_entry{"t", type, std::move(shape)}.byte_count();
}

} // namespace

TEST_CASE("a shape takes the product of its extents, a scalar one element") {
  CHECK(bytes_of(io::dtype::f32, {}) == 4);
  CHECK(bytes_of(io::dtype::f32, {2, 3}) == 24);
  CHECK(bytes_of(io::dtype::bf16, {7}) == 14);
  CHECK(bytes_of(io::dtype::c64, {1, 1}) == 8);
  CHECK(bytes_of(io::dtype::f32, {5, 0, 3}) == 0);
  CHECK(bytes_of(io::dtype::f4, {1, 2}) == 1);
  CHECK(bytes_of(io::dtype::f6_e2m3, {4}) == 3);
}

TEST_CASE("shapes that overflow, are negative, or end within a byte take no number of bytes") {
  constexpr auto most = std::numeric_limits<index_t>::max();
  CHECK(bytes_of(io::dtype::f4, {1, 3}) == -1);
  CHECK(bytes_of(io::dtype::f6_e3m2, {3}) == -1);
  CHECK(bytes_of(io::dtype::f32, {-1}) == -1);
  CHECK(bytes_of(io::dtype::u8, {2, most}) == -1);
  CHECK(bytes_of(io::dtype::f32, {most}) == -1);
}

TEST_CASE("types of C++ have the names of the format") {
  CHECK(io::name_of(io::dtype_of<float>()) == std::string("F32"));
  CHECK(io::name_of(io::dtype_of<double>()) == std::string("F64"));
  CHECK(io::name_of(io::dtype_of<bf16>()) == std::string("BF16"));
  CHECK(io::name_of(io::dtype_of<fp16>()) == std::string("F16"));
  CHECK(io::name_of(io::dtype_of<bool>()) == std::string("BOOL"));
  CHECK(io::name_of(io::dtype_of<std::int8_t>()) == std::string("I8"));
  CHECK(io::name_of(io::dtype_of<std::uint16_t>()) == std::string("U16"));
  CHECK(io::name_of(io::dtype_of<std::int32_t>()) == std::string("I32"));
  CHECK(io::name_of(io::dtype_of<std::uint64_t>()) == std::string("U64"));
  CHECK_FALSE(io::safetensors_scalar<int*>);
}

TEST_CASE("the order and the widths of types are those of the format") {
  CHECK(io::dtype::boolean < io::dtype::f4);
  CHECK(io::dtype::bf16 < io::dtype::i32);
  CHECK(io::dtype::f32 < io::dtype::f64);
  CHECK(static_cast<int>(io::dtype::u64) + 1 == io::dtype_count);
  for (int n = 0; n < io::dtype_count; ++n)
    CHECK(std::string(io::name_of(static_cast<io::dtype>(n))).size() >= 2);
  CHECK(io::bits_of(io::dtype::f8_e8m0) == 8);
  CHECK(io::bits_of(io::dtype::i16) == 16);
  CHECK(io::bits_of(io::dtype::u64) == 64);
}

TEST_CASE("a shape is shown in brackets") {
  CHECK(io::tensor_entry{"t", io::dtype::f32, {}}.shape_text() == "[]");
  CHECK(io::tensor_entry{"t", io::dtype::f32, {2, 3}}.shape_text() == "[2, 3]");
}
