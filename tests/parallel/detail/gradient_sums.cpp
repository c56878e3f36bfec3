/// Sums of real numbers, whose rounding tells one order from another; and what happens to buffers and to
/// other ranks when something goes wrong in the middle.
#include <tessera/parallel/detail/gradient_sums.hpp>

#include <chrono>
#include <latch>
#include <mutex>
#include <thread>

#include "../zero_fixture.hpp"

using namespace tessera;
using namespace fixture;

namespace {

using state_type = zero<comm::threads, host, float, float>;

struct outcome {
  std::vector<float> weights;
  std::vector<double> norms, losses;
  friend bool operator==(outcome const&, outcome const&) = default;
};

struct way {
  int ranks, stage;
  index_t micro_batches; ///< Of a rank.
  bool reproducible = true;
  int groups = 1;
};

/// Two steps of `ranks * micro_batches` micro-batches; micro-batch i of rank r is number r * micro_batches +
/// i.
outcome train(way const& how) {
  outcome found;
  auto const maps = toy_maps();
  comm::run_threads(how.ranks, [&](comm::threads& comm) {
    host ex({.threads = 1});
    auto const inner = comm.size() / how.groups;
    auto shards = comm.split(comm.rank() / inner, comm.rank());
    auto replicas = comm.split(comm.rank() % inner, comm.rank());
    state_type state(
        {.gradients = shards, .world = comm, .replicas = how.groups > 1 ? &replicas : nullptr}, ex,
        toy_units(maps), {},
        {.stage = how.stage, .reproducible = how.reproducible, .micro_batches = how.micro_batches});
    toy_rank<state_type> toy(state, ex, maps, toy_gradients::real);
    toy.start();
    for (index_t step = 0; step < 2; ++step) {
      std::vector<nn::loss_sum> losses;
      for (index_t i = 0; i < how.micro_batches; ++i) {
        auto const number = comm.rank() * how.micro_batches + i;
        losses.push_back(
            {philox(1, static_cast<std::uint64_t>(step)).normal(static_cast<std::uint64_t>(number)) * 0.3 + 5,
             7});
        toy.micro_batch(step, number, i, i + 1 == how.micro_batches);
      }
      auto const done = state.update(ex, losses, {.step = step + 1, .learning_rate = 0.01, .clip_norm = 0.1});
      if (comm.rank() != 0) continue;
      found.norms.push_back(done.gradient_norm);
      found.losses.push_back(done.loss.sum);
    }
    auto const weights = toy.weights();
    if (comm.rank() == 0) found.weights = weights;
  });
  return found;
}

} // namespace

TEST_CASE("The reproducible mode gives the same bits of loss, norm and weights on any number of ranks") {
  auto const expected = train({1, 0, 8});
  for (int stage : {0, 1, 2, 3})
    for (int ranks : {1, 2, 4, 8}) {
      CAPTURE(stage);
      CAPTURE(ranks);
      CHECK(train({ranks, stage, 8 / ranks}) == expected);
    }
  CHECK(train({4, 2, 2, true, 2}) == expected);
  CHECK(train({8, 3, 1, true, 2}) == expected);
  // Without it the order of the sums shows.
  CHECK_FALSE(train({1, 0, 8, false}) == expected);
  CHECK_FALSE(train({4, 0, 2, false}) == expected);
}

TEST_CASE(
    "The tree is that of any number of micro-batches, and of a number of ranks that is no power of two") {
  CHECK(train({3, 1, 2}) == train({1, 0, 6}));
  CHECK(train({3, 3, 4}) == train({1, 2, 12}));
  CHECK(train({1, 3, 7}) == train({1, 0, 7}));
  CHECK(train({7, 2, 1}) == train({1, 0, 7}));
}

TEST_CASE("A reproducible sum that is no tree is refused, and says what to change") {
  auto const maps = toy_maps();
  comm::run_threads(2, [&](comm::threads& comm) {
    host ex({.threads = 1});
    zero_ranks<comm::threads> const groups{.gradients = comm, .world = comm};
    auto const expect = [&](std::string const& id, std::string const& wanted) {
      if (id != wanted) throw numeric_error("T", site::here(), "got ", id, " instead of ", wanted);
    };
    expect(id_thrown_by<config_error>([&] {
             state_type(groups, ex, toy_units(maps), {}, {.reproducible = true, .micro_batches = 3});
           }),
           "E-parallel-014");
    state_type state(groups, ex, toy_units(maps), {}, {.reproducible = true, .micro_batches = 2});
    toy_rank<state_type> toy(state, ex, maps);
    toy.micro_batch(0, 0, 0, false);
    toy.forward(0, 1, 1);
    expect(id_thrown_by<config_error>([&] { toy.forward(0, 2, 2); }), "E-parallel-013");
    toy.backward(0, 1, 1, true, [](std::size_t) {});
    expect(id_thrown_by<config_error>([&] { state.update(ex, nn::loss_sum{1, 1}, {}); }), "E-parallel-016");
    state.update(ex, std::vector<nn::loss_sum>{{1, 1}, {1, 1}}, {});
  });
}

TEST_CASE("Buffers lent to requests are guarded, and every stage leaves them alone") {
  auto const maps = toy_maps();
  for (int stage : {0, 1, 2, 3}) {
    comm::run_threads(2,
                      [&](comm::threads& comm) {
                        host ex({.threads = 1});
                        state_type state({.gradients = comm, .world = comm}, ex, toy_units(maps), {},
                                         {.stage = stage, .bucket_bytes = 1, .in_flight = 3});
                        toy_rank<state_type> toy(state, ex, maps);
                        toy.start();
                        for (index_t step = 0; step < 2; ++step) {
                          toy.micro_batch(step, comm.rank(), 0, false);
                          toy.micro_batch(step, comm.rank() + 2, 1, true);
                          state.update(ex, nn::loss_sum{1, 1}, {.step = step + 1, .learning_rate = 0.1});
                        }
                      },
                      {.checked = true, .stall_limit = 20});
    // A runner that writes to a block after it has said that it is ready.
    std::string id;
    std::latch written(1);
    try {
      comm::run_threads(2,
                        [&](comm::threads& comm) {
                          host ex({.threads = 1});
                          state_type state({.gradients = comm, .world = comm}, ex, toy_units(maps), {},
                                           {.stage = stage, .bucket_bytes = 1, .in_flight = 9});
                          auto const lent = state.lend(ex, 4, {});
                          state.done(4);
                          if (comm.rank() == 1) written.wait();
                          for (auto u : {5, 4, 3, 2, 1, 0})
                            state.gradients_ready(ex, static_cast<std::size_t>(u));
                          if (comm.rank() == 0) {
                            lent.gradients[0] = 1;
                            written.count_down();
                          }
                          try {
                            state.update(ex, nn::loss_sum{1, 1}, {.step = 1});
                          } catch (error const& e) {
                            if (comm.rank() == 0) id = e.id();
                            throw;
                          }
                        },
                        {.checked = true, .stall_limit = 20});
    } catch (error const&) {
    }
    CAPTURE(stage);
    CHECK(id == (stage < 2 ? "E-comm-014" : "E-comm-015")); // an output, an input
  }
}

TEST_CASE(
    "A rank that throws, or stays away, in the middle is named to all others, which do not wait for it") {
  auto const maps = toy_maps();
  for (int stage : {0, 1, 2, 3})
    for (bool throws : {true, false}) {
      std::vector<std::string> said(3);
      try {
        comm::run_threads(3,
                          [&](comm::threads& comm) {
                            host ex({.threads = 1});
                            state_type state({.gradients = comm, .world = comm}, ex, toy_units(maps), {},
                                             {.stage = stage, .bucket_bytes = 1, .in_flight = 1});
                            toy_rank<state_type> toy(state, ex, maps);
                            try {
                              toy.forward(0, comm.rank(), 0);
                              toy.backward(0, comm.rank(), 0, true, [&](std::size_t u) {
                                if (comm.rank() != 1 || u != 3) return;
                                if (throws) throw numeric_error("T", site::here(), "this rank's own fault");
                                std::this_thread::sleep_for(std::chrono::milliseconds(500));
                              });
                              state.update(ex, nn::loss_sum{1, 1}, {.step = 1});
                            } catch (error const& e) {
                              said[static_cast<std::size_t>(comm.rank())] = e.what();
                              throw;
                            }
                          },
                          {.stall_limit = 0.1});
      } catch (error const&) {
      }
      CAPTURE(stage);
      CAPTURE(throws);
      auto const what = stage == 0 ? "all_reduce" : "reduce_scatter";
      for (auto rank : {0u, 2u}) {
        CAPTURE(said[rank]);
        CHECK((said[rank].find(what) != std::string::npos ||
               said[rank].find("all_gather") != std::string::npos));
        CHECK(said[rank].find("rank 1") != std::string::npos);
      }
    }
}
