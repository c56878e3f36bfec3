#include <doctest/doctest.h>

#include <support/thrown.hpp>

#include <tessera/exec/host.hpp>
#include <tessera/nn/initialise.hpp>
#include <tessera/train/generate.hpp>

using namespace tessera;
using ex_type = exec::host;

namespace {

/// A model whose most probable next token is the last one plus one, and which remembers what it was fed.
class counting_unit final : public nn::unit<ex_type, float, float> {
public:
  std::vector<std::int32_t> fed;

  std::string const& name() const override { return name_; }
  layout::parameter_map const& parameters() const override { return map_; }
  std::string const& tied_to() const override { return none_; }
  void reserve(int) override {}
  void recompute(nn::recomputation) override {}
  index_t kept_for_weights_bytes(nn::batch_shape) const override { return 0; }
  index_t kept_bytes(nn::batch_shape) const override { return 64; }
  index_t scratch_bytes(nn::batch_shape) const override { return 0; }
  void forward(ex_type&, blocks const&, nn::stream<ex_type, float>& s, arena<>&, nn::pass const&) override {
    for (index_t i = 0; i < s.tokens.extent(1); ++i) fed.push_back(s.tokens(0, i));
    for (index_t v = 0; v < s.logits.extent(1); ++v)
      s.logits(0, v) = v == (fed.back() + 1) % 50 ? 9.0f : 0.0f;
  }
  void backward(ex_type&, blocks const&, nn::stream<ex_type, float>&, arena<>&, nn::pass const&) override {}

private:
  std::string name_ = "counting", none_;
  layout::parameter_map map_;
};

struct counting_model {
  ex_type ex{{.threads = 1}};
  nn::unit_list<ex_type, float, float> units;
  counting_unit* unit;
  nn::parameter_store<ex_type, float, float> store;
  nn::decoder<ex_type, float, float> decoder;

  explicit counting_model(index_t context)
      : units(list()), unit(static_cast<counting_unit*>(units[0].get())), store(units),
        decoder(units, store, {.vocabulary_size = 50, .sequence_length = context}) {}

  static nn::unit_list<ex_type, float, float> list() {
    nn::unit_list<ex_type, float, float> units;
    units.push_back(std::make_unique<counting_unit>());
    return units;
  }
  std::vector<std::int32_t> next(std::vector<std::int32_t> const& prompt, index_t count,
                                 train::sampling how = {.temperature = 0}) {
    return train::generate(ex, decoder, prompt, count, how, philox(5), [](std::int32_t) {});
  }
};

} // namespace

TEST_CASE("tokens follow the prompt one by one, each is shown, and each is fed once") {
  counting_model m(16);
  std::vector<std::int32_t> shown;
  auto const more = train::generate(m.ex, m.decoder, {7, 8, 9}, 4, {.temperature = 0}, philox(1),
                                    [&](std::int32_t token) { shown.push_back(token); });
  CHECK(more == std::vector<std::int32_t>{10, 11, 12, 13});
  CHECK(shown == more);
  CHECK(m.unit->fed == std::vector<std::int32_t>{7, 8, 9, 10, 11, 12});
}

TEST_CASE("a full context goes on with its second half") {
  for (index_t context : {1, 2, 5, 8}) {
    CAPTURE(context);
    counting_model m(context);
    auto const more = m.next({3}, 40);
    REQUIRE(more.size() == 40);
    for (std::size_t i = 0; i < more.size(); ++i) CHECK(more[i] == static_cast<std::int32_t>((4 + i) % 50));
  }
}

TEST_CASE("of a prompt longer than the context the end is used") {
  counting_model m(4);
  CHECK(m.next({1, 2, 3, 4, 5, 20, 21}, 2) == std::vector<std::int32_t>{22, 23});
  CHECK(m.unit->fed.front() == 4);
}

TEST_CASE("a second text does not depend on the first, and the same seed gives the same text") {
  counting_model m(8);
  train::sampling const warm{.temperature = 3};
  auto const first = m.next({1, 2}, 20, warm);
  (void)m.next({9}, 5, warm);
  CHECK(m.next({1, 2}, 20, warm) == first);
}

TEST_CASE("nothing to continue is an error, and no tokens are no tokens") {
  counting_model m(8);
  CHECK(test::error_of<size_error>([&] { m.next({}, 3); }).id == "E-train-033");
  CHECK(m.next({1}, 0).empty());
}
