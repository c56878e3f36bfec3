#include <doctest/doctest.h>

#include <atomic>

#include <support/ranks.hpp>
#include <support/thrown.hpp>

#include <tessera/train/together.hpp>

using namespace tessera;
using train::together;

TEST_CASE("where nothing fails every rank goes on") {
  std::atomic<int> worked = 0;
  test::on_thread_ranks(4, [&](comm::threads& ranks) {
    together(ranks, [&] { ++worked; });
    train::on_root(ranks, [&] { ++worked; });
  });
  CHECK(worked == 1 + 2 + 3 + 4 + 4);
}

TEST_CASE("an error on any one rank is an error on all, and the communicator stays usable") {
  for (int ranks = 2; ranks <= 4; ++ranks)
    for (int failing = 0; failing < ranks; ++failing) {
      CAPTURE(ranks);
      CAPTURE(failing);
      std::atomic<int> own = 0, others = 0;
      comm::run_threads(ranks, [&](comm::threads& all) {
        try {
          together(all, [&] {
            if (all.rank() == failing)
              throw io_error("E-test-001", site::here(), "the disk of rank ", failing);
          });
        } catch (io_error const& e) {
          if (all.rank() == failing && std::string(e.id()) == "E-test-001") ++own;
        } catch (peer_failed const& e) {
          auto const text = std::string(e.what());
          if (text.find("the disk of rank " + std::to_string(failing)) != std::string::npos) ++others;
        }
        if (all.all_reduce(1.0) != ranks) ++own; // still in step
      });
      CHECK(own == 1);
      CHECK(others == ranks - 1);
    }
}

TEST_CASE("errors on all ranks are each rank's own") {
  std::atomic<int> own = 0;
  comm::run_threads(3, [&](comm::threads& all) {
    auto const caught = test::error_of<size_error>(
        [&] { together(all, [&] { throw size_error("E-test-002", site::here(), "rank ", all.rank()); }); });
    if (caught.says("rank " + std::to_string(all.rank()))) ++own;
  });
  CHECK(own == 3);
}

TEST_CASE("an exception of the standard library is told to the others too") {
  std::atomic<int> others = 0;
  comm::run_threads(2, [&](comm::threads& all) {
    try {
      train::on_root(all, [] { throw std::bad_alloc(); });
    } catch (peer_failed const&) {
      ++others;
    } catch (std::bad_alloc const&) {
    }
  });
  CHECK(others == 1);
}

TEST_CASE("a lost communicator is not spoken to again") {
  comm::run_threads(1, [&](comm::threads& all) {
    CHECK_THROWS_AS(together(all, [] { throw stalled("E-test-003", site::here(), "lost"); }), stalled);
  });
}

TEST_CASE("every rank gets the root's text, whatever its length") {
  for (auto const& text : {std::string(), std::string("x"), std::string(70001, 'y'), std::string("a\0b", 3)})
    test::on_thread_ranks(3, [&](comm::threads& ranks) {
      auto const mine = ranks.rank() == 0 ? text : std::string("of no interest");
      CHECK(train::shared_text(ranks, mine) == text);
      CHECK(train::from_root(ranks, [&] { return text; }) == text);
    });
}
