#include <tessera/partition/redistribute.hpp>

#include <tuple>

#include "partition/fixture.hpp"
#include "support/thrown.hpp"

using namespace tessera;
using namespace tessera::partition;
using test::laid_out;
using test::numbers;
using test::on_mesh;
using test::sent_along;

namespace {

template <class T, int Rank>
void set(view<T, Rank> to, numbers const& values) {
  REQUIRE(to.size() == static_cast<index_t>(values.size()));
  for (std::size_t i = 0; i < values.size(); ++i) to.data()[i] = T(static_cast<float>(values[i]));
}
template <class T, int Rank>
numbers get(view<T, Rank> from) {
  numbers values;
  for (index_t i = 0; i < from.size(); ++i) values.push_back(static_cast<float>(from.data()[i]));
  return values;
}

/// There and back by the types; returns what the redistribution and its backward gave.
template <class From, class To>
std::pair<numbers, numbers> there_and_back(mesh<comm::threads>& on, exec::host& ex, extents<2> const& whole,
                                           numbers const& values, numbers const& uses) {
  partitioned_tensor<float, 2, host_memory, placed<axis::tensor, From>> x(on.place(), whole);
  set(x.local(), values);
  auto const before = sent_along(on);
  auto const y = redistribute<To>(ex, on, x);
  CHECK(sent_along(on) - before == plan_of<To>(x).sent_bytes());
  partitioned_tensor<float, 2, host_memory, placed<axis::tensor, dual<To>>> d_y(on.place(), whole);
  set(d_y.local(), uses);
  return {get(y.local()), get(redistribute_backward<From>(ex, on, d_y).local())};
}

struct pair_of_placements {
  placement from, to;
  std::pair<numbers, numbers> (*run)(mesh<comm::threads>&, exec::host&, extents<2> const&, numbers const&,
                                     numbers const&);
};
template <class... Each>
std::vector<pair_of_placements> all_pairs(std::tuple<Each...>) {
  std::vector<pair_of_placements> all;
  auto const from = [&]<class From>(From) {
    (all.push_back({From::value, Each::value, there_and_back<From, Each>}), ...);
  };
  (from(Each{}), ...);
  all.push_back({shard<0>::value, shard<0, 2>::value, there_and_back<shard<0>, shard<0, 2>>});
  all.push_back({shard<0, 2>::value, shard<1>::value, there_and_back<shard<0, 2>, shard<1>>});
  return all;
}

} // namespace

TEST_CASE("every pair of placements, uneven and empty parts: values, bytes, and the gradient of a global "
          "scalar by finite differences") {
  auto const pairs = all_pairs(std::tuple<replicate, invariant, shard<0>, shard<1>, partial<>>{});
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (extents<2> const size : {extents<2>{5, 3}, {2, 6}, {0, 3}}) {
      CAPTURE(ranks);
      CAPTURE(size[0]);
      layout::mesh_shape const shape{.tensor = ranks};
      auto const whole = test::whole_values(size[0] * size[1]);
      auto const over_tensor = [&](placement const& p) {
        return laid_out{{{axis::tensor}, {p}, 1}, shape, size[0], size[1]};
      };
      std::vector<std::vector<numbers>> values(pairs.size()), gradients(pairs.size());
      for (auto* each : {&values, &gradients})
        for (auto& one : *each) one.resize(static_cast<std::size_t>(ranks));
      on_mesh(shape, [&](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
        auto const me = static_cast<std::size_t>(world.rank());
        for (std::size_t p = 0; p < pairs.size(); ++p)
          std::tie(values[p][me], gradients[p][me]) =
              pairs[p].run(on, ex, size, over_tensor(pairs[p].from).spread(whole)[me],
                           over_tensor(pairs[p].to).gradient_of_uses(whole)[me]);
      });
      for (std::size_t p = 0; p < pairs.size(); ++p) {
        auto const from = over_tensor(pairs[p].from), to = over_tensor(pairs[p].to);
        CAPTURE(text_of(from.parts));
        CAPTURE(text_of(to.parts));
        test::check_value(to, values[p], whole);
        test::check_gradient(from, to, gradients[p], whole);
      }
    }
}

TEST_CASE("maxima and minima are taken where they are asked for") {
  on_mesh({.tensor = 3}, [](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
    partitioned_tensor<float, 2, host_memory, placed<axis::tensor, partial<comm::reduction::max>>> x(
        on.place(), {5, 1});
    for (index_t i = 0; i < 5; ++i) x.local()(i, 0) = static_cast<float>((i + world.rank()) % 3);
    auto const all = redistribute<replicate>(ex, on, x);
    for (index_t i = 0; i < 5; ++i) CHECK(all.local()(i, 0) == 2);
    auto const part = redistribute<shard<0>>(ex, on, x);
    for (index_t i = 0; i < part.local().size(); ++i) CHECK(part.local().data()[i] == 2);
  });
}

TEST_CASE("a tensor of any rank is cut along any dimension") {
  on_mesh({.tensor = 3}, [](comm::threads&, mesh<comm::threads>& on, exec::host& ex) {
    using T = fp16;
    extents<4> const whole{2, 4, 5, 3};
    partitioned_tensor<T, 4, host_memory, placed<axis::tensor, shard<2>>> x(on.place(), whole);
    auto const local = x.local();
    auto const value = [&](index_t a, index_t b, index_t c, index_t d) {
      return static_cast<float>(((a * 4 + b) * 5 + c) * 3 + d);
    };
    for (index_t a = 0; a < 2; ++a)
      for (index_t b = 0; b < 4; ++b)
        for (index_t c = 0; c < local.extent(2); ++c)
          for (index_t d = 0; d < 3; ++d) {
            local(a, b, c, d) = T(value(a, b, c + x.box().begin[2], d));
            CHECK(x.view().number_of(a, b, c, d) == value(a, b, c + x.box().begin[2], d));
          }
    auto const y = redistribute<shard<1>>(ex, on, x);
    auto const first = y.box().begin[1];
    for (index_t a = 0; a < 2; ++a)
      for (index_t b = 0; b < y.local().extent(1); ++b)
        for (index_t c = 0; c < 5; ++c)
          for (index_t d = 0; d < 3; ++d) CHECK(y.local()(a, b, c, d) == T(value(a, b + first, c, d)));
  });
}

TEST_CASE("into memory that is there, in place where sums are taken, and nothing allocated the second time") {
  on_mesh({.data = 2, .tensor = 2}, [](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
    tensor<float, 2> local({4, 6}), part({4, 3});
    auto const sums = partitioned<placed<axis::tensor, partial<>>>(on.place(), {4, 6}, local.view());
    auto const mine = partitioned<placed<axis::tensor, shard<1>>>(on.place(), {4, 6}, part.view());
    index_t allocations = 0;
    for (int round = 0; round < 3; ++round) {
      for (index_t i = 0; i < 24; ++i) local.data()[i] = static_cast<float>(i + world.rank());
      redistribute(ex, on, mine, sums);
      auto pending = start_redistribute(ex, on, mine, sums);
      pending.wait();
      auto const total = partitioned<placed<axis::tensor, invariant>>(on.place(), {4, 6}, local.view());
      redistribute(ex, on, total, sums);
      if (round == 1) allocations = ex.scratch().allocations();
      auto const ranks = world.rank() / 2 * 4 + 1; // of this rank's pair, added up
      CHECK(local(3, 5) == static_cast<float>(46 + ranks));
      CHECK(part(3, 0) == static_cast<float>(2 * (18 + 3 * (world.rank() % 2)) + ranks));
    }
    CHECK(ex.scratch().allocations() == allocations);
  });
}

TEST_CASE("a unit's flat block: gradients summed into the part that ZeRO gives a rank, weights gathered, in "
          "place") {
  using summands = placed<axis::data, partial<>>;
  using part = placed<axis::data, shard<0, 32>>;
  using whole = placed<axis::data, invariant>;
  on_mesh({.data = 4}, [](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
    for (index_t const n : {96, 128, 3232}) { // three parts for four ranks; equal ones; uneven ones
      tensor<float, 2> block({n, 1});
      auto const all = block.view();
      for (index_t i = 0; i < n; ++i) all.data()[i] = static_cast<float>(i * (1 + world.rank()));
      auto const mine = local_range(n, 0, partitioning_of<part>, on.shape(), on.place().coordinates());
      auto const shard = partitioned<part>(on.place(), {n, 1}, all.slice(0, mine.begin, mine.end));
      redistribute(ex, on, shard, partitioned<summands>(on.place(), {n, 1}, all));
      for (auto i = mine.begin; i < mine.end; ++i) CHECK(all.data()[i] == static_cast<float>(10 * i));
      start_redistribute(ex, on, partitioned<whole>(on.place(), {n, 1}, all), shard).wait();
      int wrong = 0;
      for (index_t i = 0; i < n; ++i) wrong += all.data()[i] == static_cast<float>(10 * i) ? 0 : 1;
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE(
    "requests are in flight together and end in any order; one of several collectives goes on by itself") {
  on_mesh({.data = 2, .tensor = 2}, [](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
    using part_of_two = partitioned_tensor<float, 2, host_memory, placed<axis::data, partial<>>,
                                           placed<axis::tensor, shard<1>>>;
    part_of_two a(on.place(), {5, 3}), b(on.place(), {5, 3});
    for (index_t i = 0; i < a.local().size(); ++i) {
      a.local().data()[i] = static_cast<float>(world.rank());
      b.local().data()[i] = 10;
    }
    using cut = partitioned_tensor<float, 2, host_memory, placed<axis::data, shard<1>>,
                                   placed<axis::tensor, shard<1>>>;
    using scattered = partitioned_tensor<float, 2, host_memory, placed<axis::data, shard<0>>,
                                         placed<axis::tensor, shard<1>>>;
    scattered a_sum(on.place(), {5, 3}), b_sum(on.place(), {5, 3});
    auto first = start_redistribute(ex, on, a_sum, a);
    auto second = start_redistribute(ex, on, b_sum, b);
    second.wait();
    while (!first.test()) {
    }
    CHECK(first.test());
    for (index_t i = 0; i < a_sum.local().size(); ++i) {
      CHECK(a_sum.local().data()[i] == static_cast<float>(2 * (world.rank() % 2) + 2));
      CHECK(b_sum.local().data()[i] == 20);
    }
    cut nested(on.place(), {5, 3}); // the inner cut is undone before the outer one is made
    CHECK(plan_of<shard<1>, shard<1>>(a).steps.size() > 2);
    auto long_way = start_redistribute(ex, on, nested, a);
    auto moved = std::move(long_way);
    moved.wait();
    for (index_t i = 0; i < nested.local().size(); ++i) {
      auto const column = nested.box().begin[1] + i % nested.local().extent(1);
      CHECK(nested.local().data()[i] == static_cast<float>(column < 2 ? 2 : 4));
    }
    { auto dropped = start_redistribute(ex, on, a_sum, b); } // waits
    CHECK((a_sum.local().size() == 0 || a_sum.local().data()[0] == 20));
  });
}

TEST_CASE("a rank that throws in the middle leaves no other waiting, and the others say in what") {
  std::vector<std::string> ends(4);
  CHECK_THROWS_AS(on_mesh({.data = 2, .tensor = 2},
                          [&](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
                            partitioned_tensor<float, 2, host_memory, placed<axis::data, partial<>>,
                                               placed<axis::tensor, shard<1>>>
                                x(on.place(), {64, 64});
                            try {
                              auto const once = redistribute<shard<0>, shard<1>>(ex, on, x);
                              world.barrier();
                              if (world.rank() == 2)
                                throw numeric_error("E-test-001", site::here(), "rank 2 stops");
                              auto const all = redistribute<invariant, invariant>(ex, on, once);
                            } catch (peer_failed const& e) {
                              ends[static_cast<std::size_t>(world.rank())] = e.what();
                              throw;
                            }
                          }),
                  numeric_error);
  CHECK(ends[2].empty());
  for (auto r : {0u, 1u, 3u}) {
    CHECK(ends[r].find("all_gather") != std::string::npos);
    CHECK(ends[r].find("rank 2") != std::string::npos);
  }
}

TEST_CASE("tensors of another mesh, of another whole, and memory that overlaps are refused") {
  using test::error_of;
  on_mesh({.tensor = 2}, [](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
    tensor<float, 2> memory({8, 1});
    auto const whole = partitioned<placed<axis::tensor, replicate>>(on.place(), {8, 1}, memory.view());
    auto const half =
        partitioned<placed<axis::tensor, shard<0>>>(on.place(), {8, 1}, memory.view().slice(0, 2, 6));
    auto const overlap = error_of<size_error>([&] { redistribute(ex, on, half, whole); });
    CHECK(overlap.id == "E-partition-004");
    CHECK(overlap.says("a slice needs memory of its own"));
    auto const other =
        partitioned<placed<axis::tensor, replicate>>(on.place(), {7, 1}, memory.view().slice(0, 0, 7));
    CHECK(error_of<size_error>([&] { redistribute(ex, on, other, whole); }).id == "E-partition-006");
    auto const elsewhere =
        partitioned<placed<axis::tensor, replicate>>({{.data = 2}, world.rank()}, {8, 1}, memory.view());
    auto const mesh_error = error_of<size_error>([&] { redistribute(ex, on, elsewhere, whole); });
    CHECK(mesh_error.id == "E-partition-005");
    CHECK(mesh_error.says("of data 2"));
  });
}
