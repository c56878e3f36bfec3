#include <tessera/parallel/data_parallel.hpp>

#include <mutex>

#include "fixture.hpp"
#include <tessera/optim/sgd.hpp>

using namespace tessera;
using namespace fixture;
using parallel::data_parallel;
using parallel::data_parallel_options;
using parallel::flat_model;

namespace {

/// The weights, gradients and masks of one rank's copy of a model.
template <class T, class G>
struct replica {
  std::vector<layout::range> units = hostile_units();
  std::vector<T> weights = std::vector<T>(static_cast<std::size_t>(units.back().end));
  std::vector<G> gradients = std::vector<G>(weights.size());

  replica() { reference::fill_normal(std::span<T>(weights), 11); }

  flat_model<T, G> flat() {
    flat_model<T, G> model{weights, gradients, units, {}};
    for (auto unit : units) model.decayed.push_back({{unit.size() / 3, unit.size()}});
    return model;
  }

  /// What a backward does: unit by unit from the last one, overwriting or adding.
  template <class Ready>
  void backward(index_t step, index_t sample, bool accumulate, Ready&& ready) {
    for (auto u = units.size(); u-- > 0;) {
      for (auto e = units[u].begin; e < units[u].end; ++e) {
        auto& g = gradients[static_cast<std::size_t>(e)];
        g = G((accumulate ? static_cast<float>(g) : 0.0f) + gradient_of(step, sample, e));
      }
      ready(u);
    }
  }
};

struct layout_case {
  int ranks; ///< 0: comm::self.
  data_parallel_options options;
};

std::vector<layout_case> const layouts = {
    {1, {.zero = 0}},
    {1, {.zero = 1}},
    {2, {.zero = 0, .bucket_bytes = 1}},
    {2, {.zero = 1, .bucket_bytes = 1, .in_flight = 1}},
    {3, {.zero = 0, .bucket_bytes = 300, .in_flight = 1}},
    {3, {.zero = 1, .bucket_bytes = 300}},
    {4, {.zero = 0}},
    {4, {.zero = 1, .in_flight = 100}},
};

constexpr index_t samples = 7, steps = 3;

struct outcome {
  double norm, loss;
};

/// Trains on seven samples a step, dealt to the ranks in turn, each rank adding up its own. Returns each
/// rank's weights.
template <class T, class G, class Optimizer>
std::vector<std::vector<T>> train(layout_case const& which, typename Optimizer::options_type settings,
                                  std::vector<std::vector<outcome>>* outcomes = nullptr) {
  auto const ranks = which.ranks == 0 ? 1 : which.ranks;
  std::vector<std::vector<T>> weights(static_cast<std::size_t>(ranks));
  if (outcomes != nullptr) outcomes->assign(static_cast<std::size_t>(ranks), {});
  on_ranks(which.ranks, [&]<class Comm>(Comm& comm) {
    exec::host ex({.threads = 1});
    replica<T, G> mine;
    data_parallel<Comm, exec::host, T, G, Optimizer> replicas(comm, ex, mine.flat(), settings, which.options);
    for (index_t step = 0; step < steps; ++step) {
      nn::loss_sum loss;
      // In step 1 the last rank has no sample at all.
      auto const active = step == 1 && ranks > 1 ? ranks - 1 : ranks;
      if (comm.rank() >= active) replicas.nothing_to_add(ex);
      for (index_t s = comm.rank(); comm.rank() < active && s < samples; s += active) {
        loss += {static_cast<double>(s), 3};
        mine.backward(step, s, s >= active, [&](std::size_t u) {
          if (s + active >= samples) replicas.gradients_ready(u);
        });
      }
      auto const done = replicas.update(
          ex, loss, {.step = step + 1, .learning_rate = 0.01, .clip_norm = step == 2 ? 1.0 : 0});
      if (outcomes != nullptr && done.applied)
        (*outcomes)[static_cast<std::size_t>(comm.rank())].push_back({done.gradient_norm, done.loss.sum});
    }
    weights[static_cast<std::size_t>(comm.rank())] = mine.weights;
  });
  return weights;
}

template <class T_, class G_, class Optimizer_>
struct kit {
  using T = T_;
  using G = G_;
  using Optimizer = Optimizer_;
};

using host = exec::host;

} // namespace

TEST_CASE_TEMPLATE("Ranks, ZeRO stages, buckets and accumulation do not change a bit of the weights", K,
                   kit<float, float, optim::adamw<host, float>>, kit<bf16, float, optim::adamw<host, bf16>>,
                   kit<bf16, bf16, optim::adamw<host, bf16>>, kit<float, float, optim::sgd<host, float>>) {
  using T = typename K::T;
  auto const expected = train<T, typename K::G, typename K::Optimizer>({0, {.zero = 0}}, {}).front();
  CHECK_FALSE(same_bits(expected, replica<T, float>().weights));
  for (auto const& each : layouts) {
    CAPTURE(each.ranks);
    CAPTURE(each.options.zero);
    for (auto const& weights : train<T, typename K::G, typename K::Optimizer>(each, {}))
      CHECK(same_bits(weights, expected));
  }
}

TEST_CASE("The step is the one of a plain loop over the gradient of the mean loss") {
  using optimizer = optim::sgd<host, float>;
  std::vector<std::vector<outcome>> outcomes;
  auto const found = train<float, float, optimizer>({2, {.zero = 1}}, {.momentum = 0}, &outcomes);
  replica<float, float> plain;
  std::vector<double> weights(plain.weights.begin(), plain.weights.end());
  for (index_t step = 0; step < steps; ++step) {
    double squares = 0;
    std::vector<double> mean(weights.size());
    for (std::size_t e = 0; e < weights.size(); ++e) {
      for (index_t s = 0; s < samples; ++s) mean[e] += gradient_of(step, s, static_cast<index_t>(e));
      mean[e] /= 3 * samples;
      squares += mean[e] * mean[e];
    }
    auto const norm = std::sqrt(squares);
    for (auto const& of_rank : outcomes) {
      CHECK(of_rank[static_cast<std::size_t>(step)].norm == doctest::Approx(norm).epsilon(1e-12));
      CHECK(of_rank[static_cast<std::size_t>(step)].loss == 21);
    }
    auto const factor = step == 2 && norm > 1 ? 1 / norm : 1;
    for (std::size_t e = 0; e < weights.size(); ++e) weights[e] -= 0.01 * factor * mean[e];
  }
  CHECK(reference::max_relative_error(std::span<float const>(found[1]), weights) < 1e-6);
}

TEST_CASE(
    "A gradient or loss that is not finite on one rank stops the update on all, and leaves all as it was") {
  for (int zero : {0, 1})
    for (int what : {0, 1, 2}) {
      int applied = 0, changed = 0;
      std::mutex guard;
      comm::run_threads(3, [&](comm::threads& comm) {
        host ex({.threads = 1});
        replica<bf16, float> mine;
        auto const before = mine.weights;
        data_parallel<comm::threads, host, bf16, float> replicas(comm, ex, mine.flat(), {}, {.zero = zero});
        auto const step = [&](bool spoil) {
          nn::loss_sum loss{1, 1};
          mine.backward(0, comm.rank(), false, [&](std::size_t u) {
            // Rank 2 spoils the first element of unit 0, which rank 0 owns.
            if (spoil && comm.rank() == 2 && u == 0 && what < 2)
              mine.gradients[0] = what == 0 ? NAN : INFINITY;
            replicas.gradients_ready(u);
          });
          if (spoil && comm.rank() == 2 && what == 2) loss.sum = NAN;
          return replicas.update(ex, loss, {.step = 1, .learning_rate = 0.1}).applied;
        };
        auto const spoilt = step(true);
        auto const same = same_bits(before, mine.weights);
        float state = 0;
        for (std::size_t u = 0; u < replicas.units(); ++u)
          for (auto const& array : replicas.optimizer(u).state())
            if (array.name == "exp_avg")
              for (auto v : array.values) state += std::fabs(v);
        auto const good = step(false); // and training goes on
        std::scoped_lock lock(guard);
        applied += spoilt;
        changed += !same || state != 0 || !good || same_bits(before, mine.weights);
      });
      CHECK(applied == 0);
      CHECK(changed == 0);
    }
}

TEST_CASE("A step in which no rank predicted anything changes nothing") {
  std::vector<int> applied(2, -1);
  comm::run_threads(2, [&](comm::threads& comm) {
    host ex({.threads = 1});
    replica<float, float> mine;
    auto const before = mine.weights;
    data_parallel<comm::threads, host, float, float> replicas(comm, ex, mine.flat(), {});
    replicas.nothing_to_add(ex);
    auto const done = replicas.update(ex, {}, {.step = 1, .learning_rate = 0.1});
    applied[static_cast<std::size_t>(comm.rank())] =
        done.applied || done.gradient_norm != 0 || !same_bits(before, mine.weights);
  });
  CHECK(applied == std::vector<int>{0, 0});
}

TEST_CASE("Reductions start while backward runs, and move as many bytes as the contract says") {
  comm::run_threads(2, [&](comm::threads& comm) {
    for (int zero : {0, 1}) {
      host ex({.threads = 1});
      replica<bf16, float> mine;
      auto const n = mine.units.back().end;
      data_parallel<comm::threads, host, bf16, float> replicas(comm, ex, mine.flat(), {},
                                                               {.zero = zero, .bucket_bytes = 1});
      comm.meter().reset();
      auto const what = zero == 0 ? comm::collective::all_reduce : comm::collective::reduce_scatter;
      index_t before_last = 0;
      mine.backward(0, comm.rank(), false, [&](std::size_t u) {
        replicas.gradients_ready(u);
        if (u == 1) before_last = comm.meter().of(what).calls;
      });
      if (before_last < 4) throw numeric_error("T", site::here(), "no overlap: ", before_last, " calls");
      replicas.update(ex, {1, 1}, {.step = 1, .learning_rate = 0.1});
      auto const reduced = comm.meter().of(what).bytes,
                 gathered = comm.meter().of(comm::collective::all_gather).bytes;
      if (reduced != 4 * n + (zero == 0 ? 24 : 0) || gathered != (zero == 0 ? 0 : 2 * n))
        throw numeric_error("T", site::here(), "bytes reduced ", reduced, ", gathered ", gathered, " of ", n);
    }
  });
}

TEST_CASE("Memory is what was planned, and once every message has been sent a step takes none") {
  for (auto const& both : {std::pair{1, 1}, {2, 1}, {2, 2}, {3, 1}, {3, 3}})
    for (int zero : {0, 1}) {
      auto const ranks = both.first, in_flight = both.second;
      struct figures {
        index_t state, planned_state, communication, planned_communication, allocations;
      };
      std::vector<figures> found(static_cast<std::size_t>(ranks));
      comm::run_threads(ranks, [&](comm::threads& comm) {
        host ex({.threads = 1});
        memory_meter meter;
        replica<bf16, float> mine;
        data_parallel_options const options{
            .zero = zero, .bucket_bytes = 1000, .in_flight = in_flight, .meter = &meter};
        using engine = data_parallel<comm::threads, host, bf16, float>;
        auto const plan = engine::plan(mine.units, {comm.rank(), comm.size()}, {}, options);
        engine replicas(comm, ex, mine.flat(), {}, options);
        auto const step = [&](index_t number) {
          mine.backward(number, comm.rank(), false, [&](std::size_t u) { replicas.gradients_ready(u); });
          replicas.update(ex, {1, 1}, {.step = number, .learning_rate = 0.1});
        };
        for (index_t number = 1; number <= 4; ++number) step(number);
        auto const taken = [&] { return meter.allocations() + comm.memory().allocations(); };
        auto const allocations = taken();
        for (index_t number = 5; number <= 8; ++number) step(number);
        found[static_cast<std::size_t>(comm.rank())] = {
            meter.peak(memory_kind::optimizer_state), plan.optimizer_state,
            comm.memory().peak(memory_kind::communication), plan.communication, taken() - allocations};
      });
      for (auto const& f : found) {
        CHECK(f.state == f.planned_state);
        CHECK(f.communication <= f.planned_communication);
        // With several messages under way, which memory carries which depends on when they end.
        if (in_flight == 1) CHECK(f.allocations == 0);
      }
    }
}

TEST_CASE("What ranks own covers every unit once, and masters can start from fp32 values") {
  std::vector<std::vector<layout::range>> owned(3);
  std::vector<float> masters(static_cast<std::size_t>(hostile_units().back().end));
  comm::run_threads(3, [&](comm::threads& comm) {
    host ex({.threads = 1});
    replica<bf16, float> mine;
    data_parallel<comm::threads, host, bf16, float> replicas(comm, ex, mine.flat(), {});
    replicas.start_from(ex, [&](std::size_t u, layout::range part, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] = 0.1f * static_cast<float>(mine.units[u].begin + part.begin + static_cast<index_t>(i));
    });
    for (std::size_t u = 0; u < replicas.units(); ++u) {
      auto const part = replicas.owned(u);
      owned[static_cast<std::size_t>(comm.rank())].push_back(part);
      auto const values = replicas.optimizer(u).state()[0].values;
      std::copy(values.begin(), values.end(), masters.begin() + (mine.units[u].begin + part.begin));
    }
  });
  auto const units = hostile_units();
  for (std::size_t u = 0; u < units.size(); ++u) {
    index_t end = 0;
    for (auto const& of_rank : owned) {
      CHECK(of_rank[u].begin == end);
      end = of_rank[u].end;
    }
    CHECK(end == units[u].size());
  }
  bool right = true;
  for (std::size_t i = 0; i < masters.size(); ++i)
    right = right && masters[i] == 0.1f * static_cast<float>(i);
  CHECK(right);
}

TEST_CASE("Misuse is refused by name") {
  comm::self alone;
  host ex({.threads = 1});
  replica<float, float> mine;
  using engine = data_parallel<comm::self, host, float, float>;
  auto const made_with = [&](data_parallel_options options) {
    return id_thrown_by<config_error>([&] { engine(alone, ex, mine.flat(), {}, options); });
  };
  CHECK(made_with({.zero = 2}) == "E-parallel-002");
  CHECK(made_with({.bucket_bytes = 0}) == "E-parallel-002");
  CHECK(made_with({.in_flight = 0}) == "E-parallel-002");

  engine replicas(alone, ex, mine.flat(), {});
  CHECK(id_thrown_by<config_error>([&] { replicas.gradients_ready(99); }) == "E-parallel-003");
  CHECK(id_thrown_by<config_error>([&] { replicas.update(ex, {}, {}); }) == "E-parallel-004");
  replicas.gradients_ready(6);
  CHECK(id_thrown_by<config_error>([&] { replicas.gradients_ready(6); }) == "E-parallel-003");
}
