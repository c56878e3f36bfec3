// alone
#include <doctest/doctest.h>

#include <atomic>

#include <tessera/comm/threads.hpp>

#include "support/ranks.hpp"
#include "support/thrown.hpp"

struct model {
  template <class Body>
  static void run(Body body, tessera::comm::communicator_options options = {}) {
    options.stall_limit = 20; // a hang fails the test, not the run
    test::on_thread_ranks(8, body, options);
  }
};

#include "comm/conformance.hpp"

using namespace tessera;

namespace {

/// What each rank's body ended with.
template <class Body>
std::vector<test::thrown> ends_of(int ranks, Body body,
                                  comm::communicator_options options = {.stall_limit = 20}) {
  std::vector<test::thrown> ends(static_cast<std::size_t>(ranks));
  try {
    comm::run_threads(
        ranks,
        [&](comm::threads& c) {
          auto& end = ends[static_cast<std::size_t>(c.rank())];
          try {
            body(c);
          } catch (error const& e) {
            end = {e.id(), e.what()};
            throw;
          }
        },
        options);
  } catch (std::exception const&) { // looked at through `ends`
  }
  return ends;
}

struct spoiled : std::exception {
  char const* what() const noexcept override { return "spoiled on purpose"; }
};

} // namespace

TEST_CASE("ranks that call different collectives all learn both calls and both places") {
  auto const mismatch = [](auto odd_one) {
    auto const ends = ends_of(4, [&](comm::threads& c) {
      std::vector<float> data(12), all(48);
      c.barrier();
      if (c.rank() == 2)
        odd_one(c, data);
      else
        c.all_reduce(std::span(data));
    });
    for (auto const& end : ends) {
      CHECK(end.id == "E-comm-010");
      CHECK(end.says("all_reduce (sum, rank_order) of 12 fp32 at threads.cpp:"));
      CHECK(end.says("rank 2 "));
      CHECK(end.says("(collective 2 of its communicator)"));
    }
    return ends[0];
  };
  CHECK(mismatch([](auto& c, auto&) { c.barrier(); }).says("barrier at threads.cpp:"));
  CHECK(mismatch([](auto& c, auto& data) { c.all_reduce(std::span(data).first(11)); }).says("of 11 fp32"));
  CHECK(mismatch([](auto& c, auto& data) { c.broadcast(std::span(data), 1); }).says("broadcast with root 1"));
  CHECK(mismatch([](auto& c, auto& data) {
          c.all_reduce(std::span(data), {.operation = comm::reduction::max});
        }).says("all_reduce (max, rank_order)"));
  CHECK(mismatch([](auto& c, auto& data) {
          c.all_reduce(std::span(data), {.order = comm::summation::native});
        }).says("all_reduce (sum, native)"));
  CHECK(mismatch([](auto& c, auto&) {
          std::vector<bf16> other(12);
          c.all_reduce(std::span(other));
        }).says("of 12 bf16"));
}

TEST_CASE("ranks that disagree on roots or counts all learn it") {
  for (auto const& end : ends_of(3, [](comm::threads& c) {
         std::vector<float> data(2);
         c.broadcast(std::span(data), c.rank() == 1 ? 0 : 2);
       }))
    CHECK(end.id == "E-comm-010");
  for (auto const& end : ends_of(3, [](comm::threads& c) {
         std::vector<float> data(6), part(2);
         std::vector<index_t> counts = {2, 2, 2};
         if (c.rank() == 1) counts = {1, 2, 3};
         c.all_gather_v(std::span(data), part, counts);
         c.barrier();
       }))
    CHECK((end.id == "E-comm-010" || end.id == "E-comm-001"));
  for (auto const& end : ends_of(2, [](comm::threads& c) {
         std::vector<float> out(6), in(4);
         std::vector<index_t> gives = {2, 2}, gets = {2, 2};
         if (c.rank() == 1) gets = {4, 2};
         c.all_to_all_v(std::span(out).first(c.rank() == 1 ? 6 : 4), gets, in, gives);
       })) {
    CHECK(end.id == "E-comm-010");
    CHECK(end.says("rank 0 sends 2 elements to rank 1, which expects 4"));
  }
}

TEST_CASE("ranks that all wait for each other in different communicators or calls learn it; nobody hangs") {
  for (int other : {0, 1, 2}) {
    CAPTURE(other);
    std::atomic<int> told = 0;
    comm::run_threads(3, [&](comm::threads& ranks) {
      auto twin = ranks.split(0, ranks.rank());
      auto const caught = test::error_of<collective_mismatch>([&] {
        float value = 0;
        if (ranks.rank() != other)
          twin.barrier();
        else if (other == 0)
          ranks.barrier();
        else
          ranks.receive(std::span(&value, 1), 0, 0);
      });
      told += caught.id == "E-comm-010" && caught.says("all of them wait: rank 0 ") &&
              caught.says(other == 0 ? "barrier" : "receive") && caught.says(", rank 2 ");
    });
    CHECK(told == 3);
  }
}

TEST_CASE("a rank that ends early is a mismatch for those that wait for it") {
  auto const ends = ends_of(3, [](comm::threads& c) {
    c.barrier();
    if (c.rank() != 1) c.barrier();
  });
  CHECK(ends[1].id == "nothing was thrown");
  CHECK(ends[0].id == "E-comm-010");
  CHECK(ends[2].says("rank 1 has ended (its last: barrier at threads.cpp:"));
}

TEST_CASE("a rank that fails wakes all others, whatever they wait in, and its own exception comes out") {
  std::atomic<int> woken = 0;
  CHECK_THROWS_AS(comm::run_threads(8,
                                    [&](comm::threads& c) {
                                      auto part = c.split(c.rank() % 2, 0);
                                      if (c.rank() == 5) throw spoiled();
                                      std::vector<float> data(5003);
                                      try {
                                        if (c.rank() % 4 == 0) part.start_all_reduce(std::span(data)).wait();
                                        if (c.rank() % 4 == 0) c.barrier();
                                        if (c.rank() % 4 == 1) part.barrier();
                                        if (c.rank() % 4 == 2) {
                                          auto pending = part.start_all_reduce(std::span(data));
                                          pending.wait();
                                          c.barrier();
                                        }
                                        if (c.rank() % 4 == 3) c.receive(std::span(data), 5, 0);
                                      } catch (peer_failed const& e) {
                                        CHECK(std::string(e.id()) == "E-comm-017");
                                        ++woken;
                                        throw;
                                      }
                                    },
                                    {.stall_limit = 20}),
                  spoiled);
  CHECK(woken == 7);
}

TEST_CASE(
    "a request destroyed by an exception is abandoned: nobody waits for it, nobody writes to its buffers") {
  CHECK_THROWS_AS(comm::run_threads(3,
                                    [](comm::threads& c) {
                                      c.barrier();
                                      std::vector<float> data(5003);
                                      auto pending = c.start_all_reduce(std::span(data));
                                      if (c.rank() == 1) throw spoiled();
                                      pending.wait();
                                      c.barrier();
                                    },
                                    {.stall_limit = 20}),
                  spoiled);
  auto const ends = ends_of(2, [](comm::threads& c) {
    std::vector<float> data(3);
    if (c.rank() == 0) {
      try {
        auto pending = c.start_all_reduce(std::span(data));
        throw spoiled();
      } catch (spoiled const&) { // and on we go, with a communicator that is lost
      }
    }
    c.barrier();
  });
  CHECK(ends[0].id == "E-comm-016");
  CHECK(ends[1].id != "nothing was thrown");
}

TEST_CASE("the watchdog names the collective and the ranks that it waits for") {
  std::atomic<bool> over = false;
  std::vector<test::thrown> ends(3);
  CHECK_THROWS_AS(comm::run_threads(3,
                                    [&](comm::threads& c) {
                                      c.barrier();
                                      if (c.rank() == 1) { // busy elsewhere until the others have given up
                                        while (!over) std::this_thread::yield();
                                      }
                                      try {
                                        std::vector<float> data(9);
                                        c.all_reduce(std::span(data));
                                      } catch (error const& e) {
                                        ends[static_cast<std::size_t>(c.rank())] = {e.id(), e.what()};
                                        over = true;
                                        throw;
                                      }
                                    },
                                    {.stall_limit = 0.05}),
                  stalled);
  for (auto const& end : ends) {
    CHECK(end.id == "E-comm-021");
    CHECK(end.says("gave up all_reduce (sum, rank_order) of 9 fp32 at threads.cpp:"));
    CHECK(end.says("it waited for rank 1 (its last: barrier at threads.cpp:"));
  }
}

TEST_CASE("the two sides of a message that differ in length or type are an error on both") {
  for (bool const other_type : {false, true})
    for (auto const& end : ends_of(2, [&](comm::threads& c) {
           std::vector<float> data(4);
           std::vector<std::int32_t> numbers(3);
           if (c.rank() == 0) c.send(std::span(data).first(3), 1, 0);
           if (c.rank() == 1 && other_type) c.receive(std::span(numbers), 0, 0);
           if (c.rank() == 1 && !other_type) c.receive(std::span(data), 0, 0);
         })) {
      CHECK(end.id == "E-comm-013");
      CHECK(end.says("of 3 fp32"));
    }
}

TEST_CASE("a receive that is taken back leaves its communicator as it was") {
  comm::run_threads(2, [](comm::threads& c) {
    std::vector<float> data(3, 1.0f);
    auto taken = c.start_receive(std::span(data), 1 - c.rank(), 5);
    c.barrier();
    taken.withdraw();
    CHECK(taken.test());
    CHECK(c.all_reduce(1) == 2);
    auto kept = c.start_receive(std::span(data), 1 - c.rank(), 5);
    std::vector<float> const mine(3, 2.0f);
    c.send(std::span(mine), 1 - c.rank(), 5);
    kept.wait();
    CHECK(data == mine);
  });
}

TEST_CASE("a number of ranks below one is refused") {
  auto const end = test::error_of<config_error>([] { comm::run_threads(0, [](comm::threads&) {}); });
  CHECK(end.id == "E-comm-007");
}
