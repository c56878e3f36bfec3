#include <tessera/core/error.hpp>

#include <doctest/doctest.h>

using namespace tessera;

TEST_CASE("a message joins its parts and ends with the id and the place") {
  size_error const caught("E-core-001", site{"/some/where/file.cpp", 12, "f"}, "gain has ", 3,
                          " elements, not ", 4L, ", ", 0.5, ", ", true, ", ", 'c', ", ", std::string("text"));
  CHECK(std::string(caught.what()) ==
        "gain has 3 elements, not 4, 0.5, true, c, text [E-core-001 at file.cpp:12]");
  CHECK(std::string(caught.id()) == "E-core-001");
}

TEST_CASE("site::here as a default argument is the caller's place") {
  auto const call = [](site where = site::here()) { return where; };
  auto const place = call();
  CHECK(place.line == __LINE__ - 1);
  CHECK(std::string(place.file).ends_with("error.cpp"));
}

TEST_CASE_TEMPLATE("every exception is a tessera::error and a std::exception", E, size_error, config_error,
                   out_of_memory, io_error, peer_failed, collective_mismatch, stalled, library_error,
                   numeric_error) {
  CHECK_THROWS_AS(throw E("E-core-001", site::here(), "x"), error);
  CHECK_THROWS_AS(throw E("E-core-001", site::here(), "x"), std::exception);
  static_assert(std::is_nothrow_move_constructible_v<E> || std::is_copy_constructible_v<E>);
}

TEST_CASE("numbers print so that they can be read back") {
  CHECK(text_of(1e-8) == "1e-08");
  CHECK(text_of(1.0f) == "1");
  CHECK(text_of(-9223372036854775807L - 1) == "-9223372036854775808");
  CHECK(text_of(18446744073709551615UL) == "18446744073709551615");
  CHECK(text_of() == "");
}
