#include <tessera/partition/plan.hpp>

#include <tessera/core/philox.hpp>
#include <tessera/partition/redistribute.hpp>

#include "partition/fixture.hpp"

using namespace tessera;
using namespace tessera::partition;
using test::laid_out;
using test::numbers;
using test::on_mesh;
using test::sent_along;

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

struct change_of_lists {
  partitioning from, to;
};

/// Carries all of them out, and back between the duals; compares values, bytes and gradients.
void check_all(layout::mesh_shape const& shape, std::vector<change_of_lists> const& changes) {
  index_t const rows = 5, columns = 3;
  auto const whole = test::whole_values(rows * columns);
  auto const laid = [&](partitioning const& parts) { return laid_out{parts, shape, rows, columns}; };
  std::vector<std::vector<numbers>> values(changes.size()), gradients(changes.size());
  for (auto* each : {&values, &gradients})
    for (auto& one : *each) one.resize(static_cast<std::size_t>(shape.size()));
  on_mesh(shape, [&](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
    auto const me = static_cast<std::size_t>(world.rank());
    for (std::size_t p = 0; p < changes.size(); ++p) {
      auto const from = laid(changes[p].from), to = laid(changes[p].to);
      auto const before = sent_along(on);
      values[p][me] = carried<bf16>(ex, on, from, to, from.spread(whole)[me]);
      auto const planned = make_plan(extents<2>{rows, columns}, 2, on.place(), from.parts, to.parts);
      auto const off = sent_along(on) - before - planned.sent_bytes();
      CHECK(off * off <= 36); // the meter rounds sums, the plan summands
      gradients[p][me] = carried<float>(ex, on, laid(test::dual_of(to.parts)),
                                        laid(test::dual_of(from.parts)), to.gradient_of_uses(whole)[me]);
    }
  });
  for (std::size_t p = 0; p < changes.size(); ++p) {
    CAPTURE(text_of(changes[p].from));
    CAPTURE(text_of(changes[p].to));
    test::check_value(laid(changes[p].to), values[p], whole);
    test::check_gradient(laid(changes[p].from), laid(changes[p].to), gradients[p], whole);
  }
}

constexpr placement each_placement[] = {replicate::value, invariant::value, shard<0>::value, shard<1>::value,
                                        partial<>::value};

} // namespace

TEST_CASE("along two axes at once every list becomes every other, and the gradient comes back") {
  auto const all_pairs = [](axis first, axis second) {
    std::vector<change_of_lists> changes;
    for (auto const& a : each_placement)
      for (auto const& b : each_placement)
        for (auto const& c : each_placement)
          for (auto const& d : each_placement)
            changes.push_back({{{first, second}, {a, b}, 2}, {{first, second}, {c, d}, 2}});
    return changes;
  };
  check_all({.data = 2, .tensor = 2}, all_pairs(axis::data, axis::tensor));
  check_all({.data = 2, .tensor = 2}, all_pairs(axis::tensor, axis::data));
  check_all({.data = 2, .context = 2}, all_pairs(axis::data, axis::context));
  check_all({.context = 3}, all_pairs(axis::data, axis::context));
  check_all({.data = 2, .context = 3}, all_pairs(axis::data, axis::context));
}

TEST_CASE("along three axes, whatever their order in the list") {
  axis const orders[][3] = {{axis::data, axis::context, axis::tensor},
                            {axis::tensor, axis::data, axis::context},
                            {axis::data, axis::tensor, axis::context}};
  philox const random(7);
  std::uint64_t drawn = 0;
  auto const any = [&] { return each_placement[random.bits(drawn++) % 5]; };
  for (auto const& order : orders) {
    std::vector<change_of_lists> changes;
    for (int i = 0; i < 60; ++i)
      changes.push_back({{{order[0], order[1], order[2]}, {any(), any(), any()}, 3},
                         {{order[0], order[1], order[2]}, {any(), any(), any()}, 3}});
    check_all({.data = 2, .context = 2, .tensor = 2}, changes);
  }
}

TEST_CASE("one collective does where one does, and sums over two axes go by way of a part") {
  using at = placed<axis::tensor, partial<>>;
  auto const names = [](partitioning const& from, partitioning const& to) {
    std::string text;
    auto const steps = cheapest_steps(from, to);
    for (int i = 0; i < steps.size; ++i)
      text += tessera::text_of(i > 0 ? ", " : "", name_of(steps.at[i].what), " ", text_of(steps.at[i].along));
    return text;
  };
  static_assert(cheapest_steps(partitioning_of<at>, partitioning_of<placed<axis::tensor, shard<0>>>).size ==
                1);
  auto const two = [](axis second, placement const& a, placement const& b) {
    return partitioning{{axis::data, second}, {a, b}, 2};
  };
  constexpr auto sum = partial<>::value, rows = shard<0>::value, columns = shard<1>::value,
                 all = invariant::value;
  CHECK(names(partitioning_of<at>, partitioning_of<placed<axis::tensor, shard<1>>>) ==
        "reduce_scatter tensor");
  CHECK(names(partitioning_of<at>, partitioning_of<placed<axis::tensor, replicate>>) == "all_reduce tensor");
  CHECK(names(two(axis::context, sum, sum), two(axis::context, all, all)) == "all_reduce data x context");
  CHECK(names(two(axis::context, sum, sum), two(axis::context, rows, rows)) ==
        "reduce_scatter data x context");
  CHECK(names(two(axis::context, rows, rows), two(axis::context, columns, columns)) ==
        "all_to_all data x context");
  CHECK(names(two(axis::tensor, sum, sum), two(axis::tensor, all, all)) ==
        "reduce_scatter tensor, all_reduce data, all_gather tensor");
  CHECK(names(two(axis::tensor, sum, rows), two(axis::tensor, columns, rows)) == "reduce_scatter data");
  CHECK(names(two(axis::tensor, all, sum), two(axis::tensor, columns, all)) ==
        "slice data, all_reduce tensor");
  CHECK(names(two(axis::tensor, rows, rows), two(axis::tensor, all, all)) ==
        "all_gather tensor, all_gather data");
  // An axis that keeps its placement takes no part where there is a way without it.
  CHECK(names(two(axis::context, all, sum), two(axis::context, all, all)) == "all_reduce context");
  CHECK(names(two(axis::tensor, columns, sum), two(axis::tensor, columns, rows)) == "reduce_scatter tensor");
}

TEST_CASE("lists of three axes have a plan that is short enough to be kept") {
  placement const each[] = {invariant::value, shard<0>::value, shard<1>::value, partial<>::value};
  int longest = 0;
  for (int from = 0; from < 64; ++from)
    for (int to = 0; to < 64; to += 3) {
      auto const list = [&](int n) {
        return partitioning{
            {axis::data, axis::context, axis::tensor}, {each[n / 16], each[n / 4 % 4], each[n % 4]}, 3};
      };
      auto const steps = cheapest_steps(list(from), list(to));
      auto now = list(from);
      for (int i = 0; i < steps.size; ++i) now = after(now, steps.at[i]);
      for (int i = 0; i < 3; ++i) CHECK(now.at[i] == list(to).at[i]);
      longest = std::max(longest, steps.size);
    }
  CHECK(longest < max_steps);
}

TEST_CASE("a plan prints what it will do, and leaves axes of one rank out") {
  layout::mesh_place const place{{.data = 1, .tensor = 4}, 0};
  auto const parts = [](placement const& data, placement const& tensor) {
    return partitioning{{axis::data, axis::tensor}, {data, tensor}, 2};
  };
  auto const plan = make_plan(extents<2>{8, 6}, 4, place, parts(partial<>::value, partial<>::value),
                              parts(invariant::value, shard<0>::value));
  CHECK(text_of(plan) ==
        "[8, 6] x 4 bytes on tensor 4, rank 0: data: partial<sum>, tensor: partial<sum> -> data: invariant, "
        "tensor: shard<0>\n"
        "  reduce_scatter along tensor (4 ranks), partial<sum> -> shard<0>: sends 144 bytes\n"
        "sends 144 bytes\n");
  auto const none = make_plan(extents<2>{8, 6}, 4, place, parts(partial<>::value, invariant::value),
                              parts(invariant::value, replicate::value));
  CHECK(text_of(none).find("nothing to do") != std::string::npos);
}

TEST_CASE("the page about partitions prints this") {
  on_mesh({.data = 2, .tensor = 2}, [](comm::threads& world, mesh<comm::threads>& mesh, exec::host& ex) {
    index_t const tokens = 1024, width = 768;
    // [doc: partition]
    using summands = placed<axis::tensor, partial<>>; // what a row-parallel product leaves
    using my_rows = placed<axis::tensor, shard<0>>;   // what sequence-parallel norms want
    partitioned_tensor<float, 2, host_memory, summands> sums(mesh.place(), {tokens, width});
    partitioned_tensor<float, 2, host_memory, my_rows> rows(mesh.place(), {tokens, width});
    redistribute(ex, mesh, rows, sums); // reduce_scatter

    auto d_sums = redistribute_backward<partial<>>(ex, mesh, rows); // its adjoint, all_gather
    // [/doc]
    CHECK(d_sums.local().extent(0) == tokens);

    // [doc: plan]
    using gradient = partitioned_tensor<float, 2, host_memory, placed<axis::data, partial<>>,
                                        placed<axis::tensor, partial<>>>;
    gradient d_weight(mesh.place(), {768, 3072});
    auto const plan = plan_of<invariant, invariant>(d_weight);
    // [/doc]
    if (world.rank() == 0)
      CHECK(
          text_of(plan) ==
          R"([768, 3072] x 4 bytes on data 2 x tensor 2, rank 0: data: partial<sum>, tensor: partial<sum> -> data: invariant, tensor: invariant
  reduce_scatter along tensor (2 ranks), partial<sum> -> shard<0>: sends 4718592 bytes
  all_reduce along data (2 ranks), partial<sum> -> invariant: sends 4718592 bytes
  all_gather along tensor (2 ranks), shard<0> -> invariant: sends 4718592 bytes
sends 14155776 bytes
)");
  });
}
