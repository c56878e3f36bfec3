#include <tessera/partition/redistribute.hpp>

#include <algorithm>
#include <tuple>

#include <tessera/exec/host.hpp>

#include "partition/fixture.hpp"
#include "support/thrown.hpp"

using namespace tessera;
using namespace tessera::partition;
using test::laid_out;
using test::numbers;

namespace {

constexpr comm::communicator_options patient{.stall_limit = 20};
using one_axis = std::tuple<replicate, invariant, shard<0>, shard<1>, shard<0, 2>, partial<>>;

template <class F, class... Each>
void for_each_of(std::tuple<Each...>, F f) {
  (f(Each{}), ...);
}

/// Runs body(world, mesh, ex) on the mesh's ranks.
template <class Body>
void on_mesh(layout::mesh_shape const& shape, Body body) {
  comm::run_threads(
      narrow<int>(shape.size()),
      [&](comm::threads& world) {
        mesh on(world, shape);
        exec::host ex({.threads = 1});
        body(world, on, ex);
      },
      patient);
}

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

/// Each reader sees the whole's values in what it holds.
void check_value(laid_out const& to, std::vector<numbers> const& local, numbers const& whole) {
  for (int reader = 0; reader < to.ranks(); ++reader) {
    auto const seen = to.seen_by(reader, local);
    for (auto e : to.elements(reader))
      CHECK(seen[static_cast<std::size_t>(e)] == whole[static_cast<std::size_t>(e)]);
  }
}

/// The gradient that came back, summed over a replicated input's copies, is the finite difference.
void check_gradient(laid_out const& from, laid_out const& to, std::vector<numbers> const& gradient,
                    numbers const& whole) {
  auto const input = from.spread(whole);
  laid_out const placed{test::dual_of(from.parts), from.shape, from.rows, from.columns};
  for (int rank = 0; rank < from.ranks(); ++rank) {
    auto const seen = placed.seen_by(rank, gradient);
    auto const mine = from.elements(rank);
    for (std::size_t k = 0; k < mine.size(); ++k)
      CHECK(seen[static_cast<std::size_t>(mine[k])] ==
            doctest::Approx(test::finite_difference(from, to, input, rank, k)).epsilon(1e-5));
  }
}

/// What the meters of a mesh's different communicators have counted.
index_t metered(mesh<comm::threads>& on) {
  std::vector<comm::threads*> groups{&on.world()};
  for (auto axes :
       {axis_set(axis::data), axis_set(axis::context), axis_set(axis::tensor), axis::data | axis::context})
    if (std::find(groups.begin(), groups.end(), &on.along(axes)) == groups.end())
      groups.push_back(&on.along(axes));
  index_t bytes = 0;
  for (auto* each : groups) bytes += each->meter().total().bytes;
  return bytes;
}

} // namespace

TEST_CASE(
    "every pair of placements, uneven and empty parts: values, gradients by finite differences, and bytes") {
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (auto const& [rows, columns] : {std::pair<index_t, index_t>{5, 3}, {2, 6}, {0, 3}}) {
      CAPTURE(ranks);
      CAPTURE(rows);
      layout::mesh_shape const shape{.tensor = ranks};
      for_each_of(one_axis{}, [&, rows = rows, columns = columns]<class From>(From) {
        for_each_of(one_axis{}, [&]<class To>(To) {
          laid_out const from{partitioning_of<placed<axis::tensor, From>>, shape, rows, columns};
          laid_out const to{partitioning_of<placed<axis::tensor, To>>, shape, rows, columns};
          CAPTURE(text_of(from.parts));
          CAPTURE(text_of(to.parts));
          auto const whole = test::whole_values(rows * columns);
          auto const input = from.spread(whole), uses = to.gradient_of_uses(whole);
          std::vector<numbers> values(input.size()), gradients(input.size());
          on_mesh(shape, [&](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
            auto const me = static_cast<std::size_t>(world.rank());
            partitioned_tensor<float, 2, host_memory, placed<axis::tensor, From>> x(on.place(),
                                                                                    {rows, columns});
            set(x.local(), input[me]);
            auto const before = metered(on);
            auto const y = redistribute<To>(ex, on, x);
            index_t planned = 0;
            for (auto const& each : plan_of<To>(x).steps) planned += each.payload_bytes;
            CHECK(metered(on) - before == planned);
            values[me] = get(y.local());
            partitioned_tensor<float, 2, host_memory, placed<axis::tensor, dual<To>>> d_y(on.place(),
                                                                                          {rows, columns});
            set(d_y.local(), uses[me]);
            gradients[me] = get(redistribute_backward<From>(ex, on, d_y).local());
          });
          check_value(to, values, whole);
          check_gradient(from, to, gradients, whole);
        });
      });
    }
}

namespace {

/// One redistribution by values rather than types, so that all pairs of lists cost one instantiation.
template <class T>
numbers carried(exec::host& ex, mesh<comm::threads>& on, laid_out const& from, laid_out const& to,
                numbers const& input) {
  auto const me = on.rank();
  std::vector<T> in(input.size()), out(to.elements(me).size());
  for (std::size_t i = 0; i < input.size(); ++i) in[i] = T(static_cast<float>(input[i]));
  auto const steps = cheapest_steps(from.parts, to.parts);
  partition::detail::journey<exec::host, comm::threads, T, 2>(ex, on,
                                                              {.to = out.data(),
                                                               .from = in.data(),
                                                               .whole = {from.rows, from.columns},
                                                               .before = from.parts,
                                                               .steps = &steps,
                                                               .where = site::here()})
      .run();
  numbers values;
  for (auto each : out) values.push_back(static_cast<float>(each));
  return values;
}

} // namespace

TEST_CASE("along two axes at once every list becomes every other, and the gradient comes back") {
  placement const each[] = {replicate::value, invariant::value, shard<0>::value, shard<1>::value,
                            partial<>::value};
  struct axes_and_shape {
    axis first, second;
    layout::mesh_shape shape;
  };
  for (auto const& [first, second, shape] :
       {axes_and_shape{axis::data, axis::tensor, {.data = 2, .tensor = 2}},
        axes_and_shape{axis::tensor, axis::data, {.data = 2, .tensor = 2}},
        axes_and_shape{axis::data, axis::context, {.data = 2, .context = 2}},
        axes_and_shape{axis::data, axis::context, {.data = 1, .context = 3}},
        axes_and_shape{axis::data, axis::context, {.data = 2, .context = 3}}}) {
    index_t const rows = 5, columns = 3;
    auto const whole = test::whole_values(rows * columns);
    std::vector<std::pair<laid_out, laid_out>> pairs;
    for (auto const& a : each)
      for (auto const& b : each)
        for (auto const& c : each)
          for (auto const& d : each)
            pairs.push_back({{{{first, second}, {a, b}, 2}, shape, rows, columns},
                             {{{first, second}, {c, d}, 2}, shape, rows, columns}});
    std::vector<std::vector<numbers>> values(pairs.size()), gradients(pairs.size());
    for (std::size_t p = 0; p < pairs.size(); ++p) values[p].resize(6), gradients[p].resize(6);
    on_mesh(shape, [&](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
      auto const me = static_cast<std::size_t>(world.rank());
      for (std::size_t p = 0; p < pairs.size(); ++p) {
        auto const& [from, to] = pairs[p];
        auto const before = metered(on);
        values[p][me] = carried<bf16>(ex, on, from, to, from.spread(whole)[me]);
        index_t planned = 0;
        for (auto const& one :
             make_plan(extents<2>{rows, columns}, 2, on.place(), from.parts, to.parts).steps)
          planned += one.payload_bytes;
        CHECK(metered(on) - before == planned);
        auto d_to = to, d_from = from;
        d_to.parts = test::dual_of(to.parts);
        d_from.parts = test::dual_of(from.parts);
        gradients[p][me] = carried<float>(ex, on, d_to, d_from, to.gradient_of_uses(whole)[me]);
      }
    });
    for (std::size_t p = 0; p < pairs.size(); ++p) {
      auto const& [from, to] = pairs[p];
      CAPTURE(text_of(from.parts));
      CAPTURE(text_of(to.parts));
      check_value(to, values[p], whole);
      check_gradient(from, to, gradients[p], whole);
    }
  }
}

TEST_CASE("maxima and minima are taken where they are asked for") {
  on_mesh({.tensor = 3}, [](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
    partitioned_tensor<float, 1, host_memory, placed<axis::tensor, partial<comm::reduction::max>>> x(
        on.place(), {5});
    for (index_t i = 0; i < 5; ++i) x.local()(i) = static_cast<float>((i + world.rank()) % 3);
    auto const all = redistribute<replicate>(ex, on, x);
    for (index_t i = 0; i < 5; ++i) CHECK(all.local()(i) == 2);
    auto const part = redistribute<shard<0>>(ex, on, x);
    for (index_t i = 0; i < part.local().size(); ++i) CHECK(part.local()(i) == 2);
  });
}

TEST_CASE("a tensor of any rank is cut along any dimension, in 16-bit types too") {
  on_mesh({.tensor = 3}, [](comm::threads&, mesh<comm::threads>& on, exec::host& ex) {
    auto const check = [&]<class T>(T) {
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
    };
    check(bf16{});
    check(fp16{});
    check(float{});
    check(double{});
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
    tensor<float, 1> memory({8});
    auto const whole = partitioned<placed<axis::tensor, replicate>>(on.place(), {8}, memory.view());
    auto const half =
        partitioned<placed<axis::tensor, shard<0>>>(on.place(), {8}, memory.view().slice(0, 2, 6));
    auto const overlap = error_of<size_error>([&] { redistribute(ex, on, half, whole); });
    CHECK(overlap.id == "E-partition-004");
    CHECK(overlap.says("a slice needs memory of its own"));
    auto const other =
        partitioned<placed<axis::tensor, replicate>>(on.place(), {7}, memory.view().slice(0, 0, 7));
    CHECK(error_of<size_error>([&] { redistribute(ex, on, other, whole); }).id == "E-partition-006");
    auto const elsewhere =
        partitioned<placed<axis::tensor, replicate>>({{.data = 2}, world.rank()}, {8}, memory.view());
    auto const mesh_error = error_of<size_error>([&] { redistribute(ex, on, elsewhere, whole); });
    CHECK(mesh_error.id == "E-partition-005");
    CHECK(mesh_error.says("of data 2"));
  });
}
