#include <doctest/doctest.h>

#include <tessera/train/detail/nearest.hpp>

namespace detail = tessera::train::detail;

TEST_CASE("the edit distance counts insertions, deletions and substitutions") {
  CHECK(detail::edit_distance("", "") == 0);
  CHECK(detail::edit_distance("", "abc") == 3);
  CHECK(detail::edit_distance("abc", "") == 3);
  CHECK(detail::edit_distance("kitten", "sitting") == 3);
  CHECK(detail::edit_distance("flaw", "lawn") == 2);
  CHECK(detail::edit_distance("same", "same") == 0);
}

TEST_CASE("the nearest of several names is found, and of none nothing") {
  std::string_view const names[] = {"width", "heads", "layers"};
  CHECK(detail::nearest("layer", names) == "layers");
  CHECK(detail::nearest("with", names) == "width");
  CHECK(detail::nearest("x", {}).empty());
}
