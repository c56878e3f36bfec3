#include <doctest/doctest.h>

#include <set>

#include <tessera/nn/make_transformer.hpp>
#include <tessera/nn/parameter_store.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {
using store_of = nn::parameter_store<exec::host, bf16, float>;
}

TEST_CASE("the units' ranges follow each other and cover both buffers") {
  auto const units = nn::make_transformer<exec::host, bf16, float>(fixture::odd_llama());
  memory_meter meter;
  store_of s(units, {.meter = &meter});
  index_t end = 0, parameters = 0;
  for (std::size_t i = 0; i < s.units(); ++i) {
    CHECK(s.unit_range(i).begin == end);
    end = s.unit_range(i).end;
    CHECK(s.weights(i).data() == s.weights().data() + s.unit_range(i).begin);
    CHECK(static_cast<index_t>(s.weights(i).size()) == s.unit_range(i).size());
    CHECK(s.gradients(i).data() == s.gradients().data() + s.unit_range(i).begin);
    CHECK(s.gradients(i).size() == s.weights(i).size());
    CHECK(s.unit_name(i) == units[i]->name());
    CHECK(reinterpret_cast<std::uintptr_t>(s.weights(i).data()) % 64 == 0);
    parameters += units[i]->parameters().parameter_count();
  }
  CHECK(end == s.size());
  CHECK(s.parameter_count() == parameters);
  CHECK(meter.current(memory_kind::parameters) == s.size() * 2);
  CHECK(meter.current(memory_kind::gradients) == s.size() * 4);
}

TEST_CASE("for_each visits every parameter once at its place") {
  auto const units = nn::make_transformer<exec::host, bf16, float>(fixture::odd_gpt2());
  store_of s(units);
  std::set<std::string> names;
  index_t reached = 0, elements = 0;
  s.for_each([&](layout::parameter const& p, layout::range where) {
    CHECK(where.begin >= reached);
    CHECK(where.size() == p.size);
    reached = where.end;
    elements += p.size;
    CHECK(names.insert(p.name).second);
  });
  CHECK(reached <= s.size());
  CHECK(elements == s.parameter_count());
}

TEST_CASE("a tied head is lent the embedding's block, an untied one is not") {
  for (bool const tied : {true, false}) {
    auto config = fixture::odd_llama();
    config.tied_head = tied;
    auto const units = nn::make_transformer<exec::host, bf16, float>(config);
    store_of s(units);
    auto const lent = s.lend(units.size() - 1);
    CHECK(lent.weights.data() == s.weights(units.size() - 1).data());
    CHECK(lent.tied_weights.data() == (tied ? s.weights(0).data() : nullptr));
    CHECK(lent.tied_gradients.data() == (tied ? s.gradients(0).data() : nullptr));
    CHECK(s.lend(0).tied_weights.empty());
  }
}

TEST_CASE("a store without gradients takes none") {
  auto const units = nn::make_transformer<exec::host, bf16, float>(fixture::odd_gpt2());
  memory_meter meter;
  store_of s(units, {.meter = &meter, .gradients = false});
  CHECK(!s.has_gradients());
  CHECK(s.gradients().empty());
  CHECK(s.gradients(1).empty());
  CHECK(s.lend(s.units() - 1).tied_gradients.empty());
  CHECK(meter.current(memory_kind::gradients) == 0);
}

TEST_CASE("units that clash, or that are tied to nobody, are refused") {
  auto const id_of = [](nn::unit_list<exec::host, bf16, float> const& units) {
    try {
      store_of const s(units);
    } catch (config_error const& e) {
      return std::string(e.id());
    }
    return std::string("accepted");
  };
  auto twice = nn::make_transformer<exec::host, bf16, float>(fixture::odd_gpt2());
  twice[2] = std::make_unique<nn::gpt2_block<exec::host, bf16, float>>(fixture::odd_gpt2(), 0);
  CHECK(id_of(twice) == "E-nn-014");

  auto headless = nn::make_transformer<exec::host, bf16, float>(fixture::odd_gpt2());
  headless.erase(headless.begin());
  CHECK(id_of(headless) == "E-nn-015");
}
