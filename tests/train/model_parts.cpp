/// Checkpoints of models that are cut in every way: what is written does not depend on it, and what is read
/// is each rank's own. Maps are made by hand here, without layers.
#include <doctest/doctest.h>

#include <atomic>

#include <support/temporary_folder.hpp>
#include <support/thrown.hpp>

#include <tessera/comm/threads.hpp>
#include <tessera/core/philox.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/layout/mesh_shape.hpp>
#include <tessera/train/checkpoint.hpp>
#include <tessera/train/model_parts.hpp>

using namespace tessera;

namespace {

constexpr auto matrix = layout::parameter_kind::matrix;

/// Three units: cut along rows, along columns, in two stretches, by copies, not at all; one tensor is empty,
/// one has fewer rows than there are tensor ranks.
layout::parameter_map map_of(std::size_t unit, int ranks, int rank) {
  auto const start = layout::normal_values(1);
  auto const rows = [&](index_t n) {
    return layout::parameter_share{.dimension = 0, .pieces = {layout::shard_of(n, ranks, rank)}};
  };
  layout::parameter_map map;
  switch (unit) {
  case 0:
    map.add("a.table", {37, 6}, matrix, start, ranks == 1 ? layout::parameter_share{} : rows(37));
    map.add("a.places", {5, 6}, matrix, start, {.copies = ranks});
    break;
  case 1: {
    map.add("b.norm", {6}, matrix, start, {.copies = ranks, .partial = true});
    // Packed q and k: the rank's part of each.
    auto const q = layout::shard_of(8, ranks, rank), k = layout::shard_of(4, ranks, rank);
    map.add("b.packed", {12, 6}, matrix, start, {.dimension = 0, .pieces = {q, {8 + k.begin, 8 + k.end}}});
    map.add_joined("b.bias", {3}, matrix, start, rows(3));
    map.add("b.out", {6, 8}, matrix, start, {.dimension = 1, .pieces = {q}});
    map.add("b.empty", {0, 3}, matrix, start);
    break;
  }
  default: {
    // Fewer heads than ranks: two ranks hold the same.
    auto const copies = ranks == 4 ? 2 : 1;
    map.add(
        "c.shared", {2, 5}, matrix, start,
        {.dimension = 0, .pieces = {layout::shard_of(2, ranks / copies, rank / copies)}, .copies = copies});
    map.add("c.head", {9, 6}, matrix, start, rows(9));
  }
  }
  return map;
}
constexpr std::size_t units = 3;

train::whole_model whole() {
  train::whole_model all{.units = {}, .arrays = {"mean", "square"}};
  for (std::size_t u = 0; u < units; ++u) all.units.push_back(map_of(u, 1, 0));
  return all;
}

/// Element `e` of a whole tensor, in the weights (array 0) and the two arrays of state.
float value_of(std::string const& name, index_t e, std::size_t array) {
  return static_cast<float>(philox(layout::stream_of(name), array).uniform(static_cast<std::uint64_t>(e)));
}

struct cut {
  layout::mesh_shape mesh;
  int zero;
};

/// What one rank keeps under a cut: blocks of its stage's units, whole (stage 0), with shards of the state
/// (1, 2), or shards of all (3).
struct kept_model {
  layout::mesh_shape mesh;
  int zero, rank;
  std::vector<layout::parameter_map> maps;
  std::vector<std::vector<float>> weights;
  std::vector<std::vector<std::vector<float>>> state;

  kept_model(cut const& how, int rank_) : mesh(how.mesh), zero(how.zero), rank(rank_) {
    for (std::size_t u = 0; u < units; ++u) {
      maps.push_back(map_of(u, mesh.tensor, tensor_rank()));
      auto const size = [](layout::range r) { return static_cast<std::size_t>(r.size()); };
      weights.emplace_back(size(weights_at(u)));
      state.push_back({std::vector<float>(size(state_at(u))), std::vector<float>(size(state_at(u)))});
    }
  }
  int tensor_rank() const { return mesh.coordinate(rank, layout::axis::tensor); }
  bool holds(std::size_t u) const {
    return mesh.coordinate(rank, layout::axis::pipeline) ==
           static_cast<int>(u) * mesh.pipeline / static_cast<int>(units);
  }
  layout::range all(std::size_t u) const { return {0, maps[u].block_size()}; }
  layout::range owned(std::size_t u) const {
    auto const at = mesh.coordinates(rank);
    return layout::ownership{at.data * mesh.context + at.context, mesh.data * mesh.context}.of(all(u).size());
  }
  layout::range weights_at(std::size_t u) const { return zero == 3 ? owned(u) : all(u); }
  layout::range state_at(std::size_t u) const { return zero == 0 ? all(u) : owned(u); }

  auto parts() {
    return [this](std::size_t u) {
      train::unit_part<float> part;
      if (!holds(u)) return part;
      return train::unit_part<float>{.map = &maps[u],
                                     .tensor_rank = tensor_rank(),
                                     .weights_at = weights_at(u),
                                     .weights = weights[u],
                                     .state_at = state_at(u),
                                     .state = {state[u][0], state[u][1]},
                                     .counted = owned(u)};
    };
  }

  /// f(value here, value that it must have) for everything that this rank keeps.
  template <class F>
  void for_each(F f) {
    for (std::size_t u = 0; u < units; ++u) {
      if (!holds(u)) continue;
      auto const visit = [&](layout::range at, std::vector<float>& values, std::size_t array) {
        for (auto const& s : layout::segments_of(maps[u], at))
          for (index_t n = 0; n < s.in_block.size(); ++n)
            f(values[static_cast<std::size_t>(s.in_block.begin - at.begin + n)],
              value_of(s.whole->name, s.first_element + n, array));
      };
      visit(weights_at(u), weights[u], 0);
      visit(state_at(u), state[u][0], 1);
      visit(state_at(u), state[u][1], 2);
    }
  }
};

cut const cuts[] = {{{}, 0},
                    {{.data = 3}, 1},
                    {{.data = 2, .tensor = 2}, 2},
                    {{.data = 2, .context = 2}, 3},
                    {{.tensor = 4}, 1},
                    {{.pipeline = 3}, 0},
                    {{.pipeline = 2, .data = 2, .tensor = 2}, 3},
                    {{.pipeline = 2, .tensor = 4}, 1}};

train::run_state first_state() {
  train::run_state s;
  s.step = 1;
  s.chosen.data = "x";
  return s;
}

std::string save(cut const& how, std::string const& folder) {
  std::string path;
  comm::run_threads(narrow<int>(how.mesh.size()), [&](comm::threads& all) {
    exec::host ex({.threads = 1});
    kept_model model(how, all.rank());
    model.for_each([](float& here, float value) { here = value; });
    auto const saved = train::save_checkpoint<float>(all, ex, folder, first_state(), whole(), model.parts());
    if (all.rank() == 0) path = saved;
  });
  return path;
}

} // namespace

TEST_CASE("a checkpoint has the same bytes whatever the layout, and each layout reads what it keeps") {
  test::temporary_folder folder;
  std::string first_weights, first_state;
  for (std::size_t n = 0; n < std::size(cuts); ++n) {
    CAPTURE(n);
    auto const path = save(cuts[n], folder / ("cut" + std::to_string(n)));
    auto const weights = test::contents_of(path + "/model.safetensors");
    auto const state = test::contents_of(path + "/optimizer.safetensors");
    if (n == 0) {
      first_weights = weights;
      first_state = state;
    }
    CHECK(weights == first_weights);
    CHECK(state == first_state);

    comm::run_threads(narrow<int>(cuts[n].mesh.size()), [&](comm::threads& all) {
      exec::host ex({.threads = 1});
      kept_model model(cuts[n], all.rank());
      train::load_checkpoint<float>(all, ex, folder / "cut0/step-00000001", whole(), model.parts());
      index_t wrong = 0;
      model.for_each([&](float& here, float value) { wrong += here == value ? 0 : 1; });
      CHECK(wrong == 0);
    });
  }
  io::safetensors_file const file(folder / "cut0/step-00000001/optimizer.safetensors");
  CHECK(file.entries().size() == 18);
  CHECK(file.at("b.out.square").shape == std::vector<index_t>{6, 8});
}

TEST_CASE("where an element is written by no rank, or by two, all ranks throw and nothing is left") {
  for (auto const twice : {false, true}) {
    CAPTURE(twice);
    test::temporary_folder folder;
    std::atomic<int> refused = 0;
    comm::run_threads(4, [&](comm::threads& all) {
      exec::host ex({.threads = 1});
      kept_model model({{.data = 2, .tensor = 2}, 0}, all.rank());
      auto const parts = [&, honest = model.parts()](std::size_t u) {
        auto part = honest(u);
        if (u == 1 && all.rank() == 3) part.counted = twice ? model.all(u) : layout::range{};
        return part;
      };
      try {
        (void)train::save_checkpoint<float>(all, ex, folder.path(), first_state(), whole(), parts);
      } catch (error const& e) {
        if (std::string(e.what()).find("E-train-064") != std::string::npos) ++refused;
      }
      CHECK(train::latest_checkpoint(all, folder.path()).empty());
    });
    CHECK(refused == 4);
    CHECK(io::names_in(folder.path()).empty());
  }
}

TEST_CASE("a rank that cannot read its part makes all ranks throw") {
  test::temporary_folder folder;
  auto const path = save(cuts[0], folder.path());
  auto const bytes = test::contents_of(path + "/optimizer.safetensors");
  test::put(path + "/optimizer.safetensors", bytes.substr(0, bytes.size() - 40));
  std::atomic<int> failed = 0;
  comm::run_threads(4, [&](comm::threads& all) {
    exec::host ex({.threads = 1});
    kept_model model({{.pipeline = 2, .tensor = 2}, 1}, all.rank());
    try {
      train::load_checkpoint<float>(all, ex, path, whole(), model.parts());
    } catch (error const&) {
      ++failed;
    }
  });
  CHECK(failed == 4);
}
