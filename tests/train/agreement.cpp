#include <doctest/doctest.h>

#include <atomic>

#include <support/ranks.hpp>
#include <support/thrown.hpp>

#include <tessera/train/agreement.hpp>

using namespace tessera;

TEST_CASE("ranks with the same settings agree") {
  test::on_thread_ranks(4, [](comm::threads& ranks) {
    train::settings s;
    s.data = "text with\nlines";
    CHECK_NOTHROW(train::require_agreement(ranks, s));
  });
}

TEST_CASE("one rank that differs in any setting is an error on all, which names it") {
  for (auto const& f : train::fields) {
    CAPTURE(std::string(f.name));
    std::atomic<int> named = 0;
    comm::run_threads(3, [&](comm::threads& ranks) {
      train::settings s;
      if (ranks.rank() == 1)
        std::visit(
            [&](auto member) {
              auto& value = s.*member;
              if constexpr (std::same_as<decltype(value), std::string&>)
                value += "\n\n";
              else if constexpr (std::same_as<decltype(value), bool&>)
                value = !value;
              else
                value += 1;
            },
            f.member);
      auto const own = ranks.rank() == 1;
      auto const caught = own ? test::error_of<config_error>([&] { train::require_agreement(ranks, s); })
                              : test::error_of<peer_failed>([&] { train::require_agreement(ranks, s); });
      if (caught.id == (own ? "E-train-041" : "E-train-040") &&
          caught.says("rank 1: " + std::string(f.name) + " "))
        ++named;
    });
    CHECK(named == 3);
  }
}

TEST_CASE("allowed differences are part of the agreement") {
  std::atomic<int> failed = 0;
  comm::run_threads(2, [&](comm::threads& ranks) {
    train::settings s;
    if (ranks.rank() == 0) s.allow_difference = {"data"};
    try {
      train::require_agreement(ranks, s);
    } catch (error const&) {
      ++failed;
    }
  });
  CHECK(failed == 2);
}
