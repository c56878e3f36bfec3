#include <doctest/doctest.h>

#include <atomic>

#include <sys/resource.h>

#include <csignal>

#include <support/ranks.hpp>
#include <support/temporary_folder.hpp>
#include <support/thrown.hpp>

#include <tessera/exec/host.hpp>
#include <tessera/nn/initialise.hpp>
#include <tessera/parallel/data_parallel.hpp>
#include <tessera/train/checkpoint.hpp>

using namespace tessera;
using ex_type = exec::host;

namespace {

/// A unit that is parameters alone.
template <class T>
class parameters_alone final : public nn::unit<ex_type, T, float> {
  using base = nn::unit<ex_type, T, float>;

public:
  parameters_alone(std::string name, std::vector<std::pair<std::string, std::vector<index_t>>> const& tensors)
      : name_(std::move(name)) {
    for (auto const& [tensor, shape] : tensors)
      map_.add(tensor, shape, layout::parameter_kind::matrix, layout::normal_values(0.5f));
  }
  std::string const& name() const override { return name_; }
  layout::parameter_map const& parameters() const override { return map_; }
  std::string const& tied_to() const override { return none_; }
  void reserve(int) override {}
  void recompute(nn::recomputation) override {}
  index_t kept_for_weights_bytes(nn::batch_shape) const override { return 0; }
  index_t kept_bytes(nn::batch_shape) const override { return 0; }
  index_t scratch_bytes(nn::batch_shape) const override { return 0; }
  void forward(ex_type&, typename base::blocks const&, nn::stream<ex_type, T>&, arena<>&,
               nn::pass const&) override {}
  void backward(ex_type&, typename base::blocks const&, nn::stream<ex_type, T>&, arena<>&,
                nn::pass const&) override {}

private:
  std::string name_, none_;
  layout::parameter_map map_;
};

/// Units whose tensors' names interleave, with odd sizes and an empty tensor.
template <class T>
nn::unit_list<ex_type, T, float> units_of(index_t width = 7) {
  nn::unit_list<ex_type, T, float> units;
  auto const add = [&](char const* name,
                       std::vector<std::pair<std::string, std::vector<index_t>>> const& tensors) {
    units.push_back(std::make_unique<parameters_alone<T>>(name, tensors));
  };
  add("first", {{"m.embed", {13, width}}, {"z.scale", {1}}});
  add("second", {{"m.block.0", {width, width}}, {"m.block.1", {33}}, {"m.empty", {0, 5}}});
  add("third", {{"a.head", {width, 3}}, {"n.norm", {width}}});
  return units;
}

template <class T>
using replicas_of = parallel::data_parallel<comm::threads, ex_type, T, float>;

/// A rank of a run: weights and state, moved by a few updates with gradients of a known form.
template <class T>
struct run_of {
  ex_type ex{{.threads = 1}};
  nn::unit_list<ex_type, T, float> units;
  nn::parameter_store<ex_type, T, float> store;
  replicas_of<T> replicas;

  run_of(comm::threads& ranks, int zero, index_t width = 7)
      : units(units_of<T>(width)), store(units),
        replicas(ranks, ex, parallel::flat_model_of(store), optim::adamw_options{}, {.zero = zero}) {
    nn::initialise(ex, store, 3);
    replicas.start_from_weights(ex);
  }

  void update(index_t step) {
    auto const gradients = store.gradients();
    store.for_each([&](layout::parameter const&, layout::range r) { // the gaps' gradients are zero
      for (auto i = r.begin; i < r.end; ++i)
        gradients[static_cast<std::size_t>(i)] = static_cast<float>((step * 7 + i * 31) % 17) - 8;
    });
    for (auto u = replicas.units(); u-- > 0;) replicas.gradients_ready(u);
    (void)replicas.update(ex, {1, 1}, {.step = step, .learning_rate = 0.01});
  }
};

train::run_state state_at(index_t step) {
  train::run_state s;
  s.step = step;
  s.chosen.data = "x";
  return s;
}

std::string folder_text(std::string const& folder) {
  std::string all;
  for (auto const& name : io::names_in(folder)) all += name + "\n" + test::contents_of(folder + "/" + name);
  return all;
}

} // namespace

TEST_CASE_TEMPLATE(
    "a checkpoint's bytes do not depend on the ranks that wrote it, nor on how they share the state", T,
    float, bf16) {
  std::string first;
  for (int zero : {0, 1})
    for (int ranks = 1; ranks <= 4; ++ranks) {
      CAPTURE(zero);
      CAPTURE(ranks);
      test::temporary_folder folder;
      std::string path;
      comm::run_threads(ranks, [&](comm::threads& all) {
        run_of<T> run(all, zero);
        // One rank's gradients, so that the sum over ranks is the same for any number of them.
        for (index_t step = 1; step <= 3; ++step) {
          if (all.rank() == 0) {
            run.update(step);
          } else {
            run.replicas.nothing_to_add(run.ex);
            (void)run.replicas.update(run.ex, {0, 0}, {.step = step, .learning_rate = 0.01});
          }
        }
        auto const saved =
            train::save_checkpoint(all, run.ex, folder.path(), state_at(3), run.store, run.replicas);
        if (all.rank() == 0) path = saved;
      });
      auto const text = folder_text(path);
      if (first.empty()) first = text;
      CHECK(text == first);
    }
}

TEST_CASE_TEMPLATE("any number of ranks goes on from a checkpoint with the bits of those that wrote it", T,
                   float, bf16) {
  test::temporary_folder folder;
  std::vector<std::vector<T>> expected; // weights after one more update
  auto const remember = [&](run_of<T>& run, comm::threads& all) {
    run.update(3);
    if (all.rank() == 0) expected.emplace_back(run.store.weights().begin(), run.store.weights().end());
  };
  comm::run_threads(1, [&](comm::threads& all) {
    run_of<T> run(all, 1);
    run.update(1);
    run.update(2);
    (void)train::save_checkpoint(all, run.ex, folder.path(), state_at(2), run.store, run.replicas);
    remember(run, all);
  });
  for (int zero : {0, 1})
    for (int ranks : {1, 3}) {
      comm::run_threads(ranks, [&](comm::threads& all) {
        run_of<T> run(all, zero);
        auto const path = train::latest_checkpoint(all, folder.path());
        CHECK(train::read_state(all, path).step == 2);
        train::load_checkpoint(all, run.ex, path, run.store, run.replicas);
        if (all.rank() > 0) { // as above: one rank's gradients
          run.replicas.nothing_to_add(run.ex);
          (void)run.replicas.update(run.ex, {0, 0}, {.step = 3, .learning_rate = 0.01});
        } else
          remember(run, all);
      });
    }
  REQUIRE(expected.size() == 5);
  for (auto const& weights : expected)
    CHECK(std::memcmp(weights.data(), expected[0].data(), weights.size() * sizeof(T)) == 0);
}

TEST_CASE("a checkpoint of another shape is refused on every rank, with the exact sets") {
  test::temporary_folder folder;
  comm::run_threads(2, [&](comm::threads& all) {
    run_of<float> run(all, 1);
    (void)train::save_checkpoint(all, run.ex, folder.path(), state_at(1), run.store, run.replicas);
  });
  std::atomic<int> refused = 0;
  comm::run_threads(2, [&](comm::threads& all) {
    run_of<float> other(all, 1, 8);
    auto const path = train::latest_checkpoint(all, folder.path());
    auto const caught = test::error_of<io_error>(
        [&] { train::load_checkpoint(all, other.ex, path, other.store, other.replicas); });
    if (caught.id == "E-train-060" &&
        caught.says("m.embed (F32 [13, 7] in the file, F32 [13, 8] in the model)") && !caught.says("z.scale"))
      ++refused;
  });
  CHECK(refused == 2);
}

TEST_CASE("a weight that is not finite makes no checkpoint, and the one before stays") {
  test::temporary_folder folder;
  std::atomic<int> failed = 0;
  comm::run_threads(2, [&](comm::threads& all) {
    run_of<float> run(all, 1);
    (void)train::save_checkpoint(all, run.ex, folder.path(), state_at(1), run.store, run.replicas);
    run.store.weights()[5] = std::nanf("");
    try {
      (void)train::save_checkpoint(all, run.ex, folder.path(), state_at(2), run.store, run.replicas);
    } catch (numeric_error const& e) {
      if (all.rank() == 0 && std::string(e.id()) == "E-train-061") ++failed;
    } catch (peer_failed const&) {
      ++failed;
    }
    CHECK(train::latest_checkpoint(all, folder.path()) == folder.path() + "/step-00000001");
  });
  CHECK(failed == 2);
}

TEST_CASE("a disk that is full in any file is an error on every rank and leaves the checkpoint before it") {
  test::temporary_folder folder;
  std::atomic<int> failed = 0;
  auto const before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit unlimited{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &unlimited) == 0);
  comm::run_threads(2, [&](comm::threads& all) {
    run_of<bf16> run(all, 1);
    (void)train::save_checkpoint(all, run.ex, folder.path(), state_at(1), run.store, run.replicas);
    for (rlim_t limit : {100, 1200, 2500}) { // bytes: within the weights, within the state
      if (all.rank() == 0) {
        rlimit const small{limit, unlimited.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &small);
      }
      all.barrier();
      try {
        (void)train::save_checkpoint(all, run.ex, folder.path(), state_at(2), run.store, run.replicas);
      } catch (error const&) {
        ++failed;
      }
      all.barrier();
      if (all.rank() == 0) ::setrlimit(RLIMIT_FSIZE, &unlimited);
      all.barrier();
      CHECK(train::latest_checkpoint(all, folder.path()) == folder.path() + "/step-00000001");
    }
  });
  std::signal(SIGXFSZ, before);
  CHECK(failed == 6);
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
}

TEST_CASE("the newest checkpoints are kept, and a damaged newest one is named, not passed over") {
  test::temporary_folder folder;
  comm::run_threads(2, [&](comm::threads& all) {
    run_of<float> run(all, 1);
    CHECK(train::latest_checkpoint(all, folder.path()).empty());
    for (index_t step = 1; step <= 4; ++step)
      (void)train::save_checkpoint(all, run.ex, folder.path(), state_at(step), run.store, run.replicas,
                                   {.keep = 2, .tokenizer_model = "pieces"});
  });
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{"step-00000003", "step-00000004"});
  CHECK(test::contents_of(folder / "step-00000004/tokenizer.model") == "pieces");
  test::put(folder / "step-00000004/tokenizer.model", "pjeces");
  comm::run_threads(1, [&](comm::threads& all) {
    auto const caught = test::error_of<io_error>([&] { (void)train::latest_checkpoint(all, folder.path()); });
    CHECK(caught.id == "E-train-062");
    CHECK(caught.says("tokenizer.model"));
    CHECK(caught.says("step-00000003"));
  });
}

TEST_CASE("a reader gets the newest whole checkpoint of a run, or the one it names, and disturbs nothing") {
  test::temporary_folder folder;
  auto const refused = [&](std::string const& name) {
    return test::error_of<io_error>([&] { (void)train::readable_checkpoint(folder / name); });
  };
  CHECK(refused("run").id == "E-train-063");
  comm::run_threads(1, [&](comm::threads& all) {
    run_of<float> run(all, 1);
    for (index_t step = 1; step <= 2; ++step)
      (void)train::save_checkpoint(all, run.ex, folder / "run/checkpoints", state_at(step), run.store,
                                   run.replicas);
  });
  io::make_folders(folder / "run/checkpoints/.step-00000003.pending");
  CHECK(train::readable_checkpoint(folder / "run") == folder / "run/checkpoints/step-00000002");
  test::put(folder / "run/checkpoints/step-00000002/state.json", "{}");
  CHECK(train::readable_checkpoint(folder / "run") == folder / "run/checkpoints/step-00000001");
  CHECK(train::readable_checkpoint(folder / "run/checkpoints/step-00000001") ==
        folder / "run/checkpoints/step-00000001");
  CHECK(refused("run/checkpoints/step-00000002").says("state.json"));
  test::put(folder / "run/checkpoints/step-00000001/state.json", "{}");
  CHECK(refused("run").id == "E-train-063");
  CHECK(refused("run").says("step-00000001/state.json"));
  CHECK(io::folder_exists(folder / "run/checkpoints/.step-00000003.pending"));
}

TEST_CASE("weights go on with the tokenizer that they were trained with alone") {
  test::temporary_folder folder;
  train::require_tokenizer(folder.path(), "");
  auto const refused = [&](std::string_view model) {
    return test::error_of<config_error>([&] { train::require_tokenizer(folder.path(), model); }).id;
  };
  CHECK(refused("pieces") == "E-train-065");
  test::put(folder / "tokenizer.model", "pieces");
  train::require_tokenizer(folder.path(), "pieces");
  CHECK(refused("other pieces") == "E-train-065");
  CHECK(refused("") == "E-train-065");
}
