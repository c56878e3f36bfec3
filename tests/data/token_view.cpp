#include <doctest/doctest.h>

#include <tessera/data/token_view.hpp>

#include "support/thrown.hpp"

using namespace tessera;

TEST_CASE("tokens are the same in two and in four bytes") {
  std::vector<std::uint16_t> const narrow{3, 65535, 0, 7};
  std::vector<std::uint32_t> const wide{3, 65535, 0, 7};
  std::vector<std::int32_t> const plain{3, 65535, 0, 7};
  for (auto view :
       {data::token_view(std::span(narrow)), data::token_view(std::span(wide)), data::token_view(plain)}) {
    REQUIRE(view.size() == 4);
    std::vector<std::int32_t> out(4);
    view.copy(0, out, 65536);
    CHECK(out == plain);
    view.check(65536);
    out.resize(2);
    view.slice(1, 3).copy(1, out, 65536);
    CHECK(out == std::vector<std::int32_t>{0, 7});
    view.slice(4, 0).copy(0, {}, 1);
  }
  CHECK(data::token_view().size() == 0);
  data::token_view().check(1);
  static_assert(!std::is_constructible_v<data::token_view, std::vector<std::int32_t>&&>);
  static_assert(std::is_trivially_copyable_v<data::token_view>);
}

TEST_CASE("a token outside the vocabulary is an error that names the first such place and value") {
  std::vector<std::int32_t> const tokens{1, 2, 9, 10, 3};
  data::token_view const view = tokens;
  std::vector<std::int32_t> out(3);
  view.copy(1, out, 11);
  CHECK(test::error_of<size_error>([&] {
          view.copy(1, out, 10);
        }).says("token 3 is 10, the vocabulary has 10"));
  CHECK(test::error_of<size_error>([&] { view.check(9); }).says("token 2 is 9, the vocabulary has 9"));
  CHECK(test::error_of<size_error>([&] { view.check(1); }).says("token 0 is 1,"));
  CHECK(test::error_of<size_error>([&] { view.check(1); }).id == "E-data-003");
  std::vector<std::int32_t> const negative{0, -1};
  CHECK(test::error_of<size_error>([&] { data::token_view(negative).check(1 << 30); }).says("token 1 is "));
}

TEST_CASE("tokens beyond the end are an error") {
  std::vector<std::int32_t> const tokens{1, 2, 3};
  data::token_view const view = tokens;
  std::vector<std::int32_t> out(2);
  CHECK(test::error_of<size_error>([&] { view.copy(2, out, 10); }).id == "E-data-002");
  CHECK(test::error_of<size_error>([&] { view.copy(-1, out, 10); }).id == "E-data-002");
  CHECK(test::error_of<size_error>([&] { view.slice(1, 3); }).id == "E-data-002");
  CHECK(test::error_of<size_error>([&] { view.slice(0, -1); }).id == "E-data-002");
}
