#include <doctest/doctest.h>

#include <support/thrown.hpp>

#include "shared_model.hpp"

using namespace tessera;
using shared::axes;

namespace {

nn::transformer_config gpt2(bool tied, float dropout) {
  auto config = fixture::odd_gpt2();
  config.width = 20;
  config.heads = 4;
  config.tied_head = tied;
  config.dropout = dropout;
  config.label_smoothing = 0.1f;
  return config;
}
/// 4 heads share 2 keys and values: one of them on two ranks where there are four.
nn::transformer_config llama(bool tied, float dropout) {
  auto config = fixture::odd_llama();
  config.tied_head = tied;
  config.dropout = dropout;
  config.z_loss = 0.01f;
  return config;
}
std::vector<nn::transformer_config> models() {
  return {gpt2(true, 0.2f), gpt2(false, 0), llama(false, 0.2f), llama(true, 0)};
}

shared::outcome alone(nn::transformer_config const& config, fixture::batch const& batch,
                      shared::manner how = {}, shared::nudge const& moved = {}) {
  shared::ex_t ex({.threads = 1});
  return shared::run(ex, config, nn::one_rank(), batch, how, moved);
}

double size_of(std::vector<double> const& values) {
  double sum = 0;
  for (auto v : values) sum += v * v;
  return std::sqrt(sum);
}

/// The whole loss, and each parameter's whole gradient relative to the largest one's norm: that of GPT-2's
/// key biases is nothing but rounding.
void check_same(shared::whole_outcome const& given, shared::whole_outcome const& expected, double tolerance) {
  CHECK(given.loss.count == expected.loss.count);
  CHECK(given.loss.sum == doctest::Approx(expected.loss.sum).epsilon(tolerance));
  REQUIRE(given.gradients.size() == expected.gradients.size());
  for (auto const& parameter : expected.gradients) { // not bound by name: clang 14 captures no bindings
    auto const& name = parameter.first;
    auto const& whole = parameter.second;
    INFO(name);
    auto const& mine = given.gradients.at(name);
    CHECK(fixture::distance(mine, whole) < tolerance);
    CHECK(size_of(whole) > 0);
  }
}

std::vector<axes> tensor_axes() {
  std::vector<axes> all;
  for (int tensor : {1, 2, 4})
    for (bool sequence : {false, true})
      if (tensor > 1 || !sequence)
        all.push_back({.tensor = tensor, .options = {.sequence_parallel = sequence}});
  return all;
}

} // namespace

TEST_CASE("on 1, 2 and 4 tensor ranks, rows shared or not, loss and gradients are those of one rank") {
  for (auto const& config : models()) {
    fixture::batch const batch(3, 7, config.vocabulary_size);
    auto const expected = shared::together({alone(config, batch)});
    for (auto const& on : tensor_axes()) {
      CAPTURE(on.tensor);
      CAPTURE(on.options.sequence_parallel);
      auto const ranks = shared::run_on(on, config, batch);
      check_same(shared::together(ranks), expected, 1e-5);
      for (auto const& r : ranks) CHECK(r.peak <= r.planned);
    }
  }
}

TEST_CASE("in bf16 they are those of one rank to rounding, and recomputation changes no bit") {
  shared::any_family<bf16> const family;
  for (auto const& config : {gpt2(true, 0.2f), llama(false, 0.2f)}) {
    fixture::batch const batch(3, 7, config.vocabulary_size);
    shared::ex_t ex({.threads = 1});
    auto const expected = shared::together({shared::run(ex, config, nn::one_rank(), batch, {}, {}, family)});
    for (auto const& on : tensor_axes()) {
      CAPTURE(on.tensor);
      CAPTURE(on.options.sequence_parallel);
      auto const ranks = shared::run_on(on, config, batch, {}, {}, family);
      check_same(shared::together(ranks), expected, 2e-2);
      for (auto const& r : ranks) CHECK(r.peak <= r.planned);
      auto const again = shared::run_on(on, config, batch,
                                        {.recompute = nn::recomputation::unit, .split = true}, {}, family);
      for (std::size_t r = 0; r < ranks.size(); ++r) CHECK(ranks[r].gradients == again[r].gradients);
    }
  }
}

TEST_CASE("ranks without a row, a class, or a column of the inner width are ordinary") {
  for (auto config : {gpt2(true, 0.2f), llama(false, 0.2f)}) {
    config.vocabulary_size = 3;
    config.feed_forward = 2;
    fixture::batch const batch(1, 2, config.vocabulary_size);
    auto const expected = shared::together({alone(config, batch)});
    for (bool sequence : {false, true})
      check_same(shared::together(shared::run_on({.tensor = 4, .options = {.sequence_parallel = sequence}},
                                                 config, batch)),
                 expected, 1e-5);
  }
}

TEST_CASE("on context ranks too, in both forms, with tensor ranks or without") {
  for (auto const& config : {gpt2(true, 0.2f), llama(false, 0.2f)}) {
    fixture::batch const batch(3, 11, config.vocabulary_size);
    auto const expected = shared::together({alone(config, batch)});
    for (auto form : {parallel::context_form::ring, parallel::context_form::exchange})
      for (auto assignment : {layout::sequence_assignment::zigzag, layout::sequence_assignment::contiguous})
        for (int tensor : {1, 2}) {
          CAPTURE(static_cast<int>(form));
          CAPTURE(tensor);
          auto const sequence = tensor > 1 && assignment == layout::sequence_assignment::zigzag;
          axes const on{.tensor = tensor,
                        .context = 2,
                        .options = {.sequence_parallel = sequence, .form = form, .assignment = assignment}};
          auto const ranks = shared::run_on(on, config, batch);
          check_same(shared::together(ranks), expected, 1e-5);
          for (auto const& r : ranks) CHECK(r.peak <= r.planned);
        }
  }
}

TEST_CASE("recomputation and a backward in two parts change no bit") {
  for (auto const& config : {gpt2(true, 0.2f), llama(false, 0.2f)}) {
    fixture::batch const batch(4, 5, config.vocabulary_size);
    for (axes const& on :
         {axes{.tensor = 1}, axes{.tensor = 2}, axes{.tensor = 2, .options = {.sequence_parallel = true}},
          axes{.tensor = 2, .context = 2}}) {
      CAPTURE(on.tensor);
      auto const expected = shared::run_on(on, config, batch, {.micro_batches = 2});
      for (auto what : {nn::recomputation::none, nn::recomputation::attention, nn::recomputation::unit})
        for (bool split : {false, true}) {
          CAPTURE(name_of(what));
          CAPTURE(split);
          auto const given =
              shared::run_on(on, config, batch, {.recompute = what, .split = split, .micro_batches = 2});
          for (std::size_t r = 0; r < given.size(); ++r) {
            CHECK(given[r].loss.sum == expected[r].loss.sum);
            CHECK(given[r].gradients == expected[r].gradients);
            CHECK(given[r].peak <= given[r].planned);
          }
        }
    }
  }
}

TEST_CASE("the copies of what acts on all rows have one gradient, the same bits") {
  auto const config = gpt2(true, 0.2f);
  fixture::batch const batch(3, 7, config.vocabulary_size);
  for (bool sequence : {false, true}) {
    auto const ranks =
        shared::run_on({.tensor = 4, .options = {.sequence_parallel = sequence}}, config, batch);
    index_t copies = 0;
    auto const part_of = [](shared::outcome const& r, std::size_t u, std::size_t number) {
      auto const& p = r.maps[u][number];
      return std::vector<float>(r.gradients[u].begin() + p.offset, r.gradients[u].begin() + p.where().end);
    };
    for (std::size_t u = 0; u < ranks[0].maps.size(); ++u)
      for (std::size_t i = 0; i < ranks[0].maps[u].size(); ++i) {
        auto const& p = ranks[0].maps[u][i];
        if (p.share.copies == 1 || p.share.partial) continue;
        ++copies;
        CAPTURE(p.name);
        for (auto const& r : ranks) CHECK(part_of(r, u, i) == part_of(ranks[0], u, i));
      }
    // Positions and the biases behind products; where rows are not shared, norms as well.
    CHECK(copies == (sequence ? 5 : 15));
  }
}

TEST_CASE("gather and reduce are adjoint, rows uneven or absent") {
  for (index_t tokens : {0, 1, 3, 13})
    for (bool sequence : {false, true}) {
      index_t const width = 5;
      auto const pairs = shared::on_ranks(
          {.tensor = 4, .options = {.sequence_parallel = sequence}},
          [&](shared::ex_t& ex, shared::group_t const& group) {
            auto const mine = group.rows(tokens);
            auto x = fixture::numbers(mine.size() * width,
                                      1 + static_cast<std::uint64_t>(group.tensor_rank())),
                 y = fixture::numbers(tokens * width, 11 + static_cast<std::uint64_t>(group.tensor_rank()));
            if (!sequence) x = fixture::numbers(tokens * width, 1); // every rank has the value
            std::vector<float> room(y.size());
            view<float, 2> const local(x.data(), {mine.size(), width}), full(y.data(), {tokens, width});
            auto const all = group.gather(ex, view<float, 2>(room.data(), {tokens, width}), local);
            double const forward = fixture::inner(all.span(), y);
            auto const to = full.slice(0, mine.begin, mine.end);
            group.reduce(ex, to, full);
            return std::pair(forward, fixture::inner(x, to.span()));
          });
      double forward = 0, backward = 0;
      for (auto const& [f, b] : pairs) {
        forward += f; // <gather x, y> = <x, reduce y>, each rank's use of the value a summand
        backward += sequence ? b : 0;
      }
      if (!sequence) backward = pairs[0].second;
      CHECK(forward == doctest::Approx(backward).epsilon(1e-5));
    }
}

TEST_CASE("heads that ranks cannot share are refused with what to change") {
  auto const refused = [](nn::transformer_config const& config, int tensor) {
    return test::error_of<config_error>([&] {
             shared::on_ranks({.tensor = tensor}, [&](shared::ex_t&, shared::group_t const& group) {
               return nn::make_transformer<shared::ex_t, float, float>(config, group,
                                                                       {0, nn::unit_count(config)})
                   .size();
             });
           })
        .id;
  };
  CHECK(refused(llama(false, 0), 3) == "E-nn-024");
  auto config = llama(false, 0);
  config.heads = config.key_value_heads = 6;
  CHECK(refused(config, 4) == "E-nn-024");
  config.key_value_heads = 3;
  CHECK(refused(config, 2) == "E-nn-024");
  CHECK(refused(llama(false, 0), 4) == "nothing was thrown");
}

TEST_CASE("the ranks' parts cover the model, and each parameter is counted once") {
  auto const config = llama(false, 0);
  std::vector<index_t> counted(4);
  comm::run_threads(4, [&](comm::threads& world) {
    partition::mesh<comm::threads> mesh(world, {.tensor = 4});
    parallel::model_group group(mesh, {.sequence_parallel = true});
    auto units = nn::make_transformer<exec::host, float, float>(config, group, {0, nn::unit_count(config)});
    for (auto const& u : units)
      for (auto const& r :
           layout::counted_ranges(u->parameters(), {0, u->parameters().block_size()}, world.rank()))
        counted[static_cast<std::size_t>(world.rank())] += r.size();
  });
  index_t whole = 0, shared = 0;
  for (auto const& u : nn::make_transformer<exec::host, float, float>(config))
    whole += u->parameters().parameter_count();
  for (auto count : counted) shared += count;
  CHECK(shared == whole);
}

TEST_CASE("a stage has its units alone; a tied head knows what it borrows without the embedding") {
  auto const config = gpt2(true, 0);
  auto const make = [&](layout::range part) {
    return nn::make_transformer<exec::host, float, float>(config, nn::one_rank(), part);
  };
  auto const last = make({2, 4});
  REQUIRE(last.size() == 2);
  CHECK(last[0]->name() == "block.1");
  CHECK(last[1]->tied_to() == "embedding");
  auto const borrowed = nn::embedding_parameters(config, nn::one_rank());
  CHECK(borrowed.block_size() == make({0, 1})[0]->parameters().block_size());
  CHECK(borrowed[0].name == "wte.weight");
  CHECK(make({1, 1}).empty());
  for (auto part : {layout::range{0, 5}, layout::range{-1, 2}, layout::range{3, 2}})
    CHECK(test::error_of<size_error>([&] { (void)make(part); }).id == "E-nn-027");
}
