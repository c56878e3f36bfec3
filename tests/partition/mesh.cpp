#include <tessera/partition/mesh.hpp>

#include <tessera/comm/self.hpp>

#include "support/ranks.hpp"
#include "support/thrown.hpp"

using namespace tessera;
using partition::axis;

namespace {
constexpr comm::communicator_options patient{.stall_limit = 20};
}

TEST_CASE("each axis joins the ranks that differ in its coordinate alone, in order") {
  for (layout::mesh_shape const shape : {layout::mesh_shape{.pipeline = 2, .data = 2, .tensor = 2},
                                         layout::mesh_shape{.data = 2, .context = 3},
                                         layout::mesh_shape{.context = 2, .tensor = 2, .expert = 2}})
    comm::run_threads(
        static_cast<int>(shape.size()),
        [&](comm::threads& world) {
          partition::mesh mesh(world, shape, {axis::pipeline | axis::tensor});
          auto const me = shape.coordinates(world.rank());
          for (layout::axis_set const axes :
               {layout::axis_set(axis::data), layout::axis_set(axis::tensor),
                layout::axis_set(axis::pipeline), layout::axis_set(axis::context),
                layout::axis_set(axis::expert), layout::gradient_axes, axis::pipeline | axis::tensor}) {
            auto& group = mesh.along(axes);
            CHECK(group.size() == mesh.size(axes));
            std::vector<int> members(static_cast<std::size_t>(group.size())), expected;
            int const mine[] = {world.rank()};
            group.all_gather(std::span(members), mine);
            for (int r = 0; r < world.size(); ++r) {
              bool inside = true;
              for (auto one : layout::axes_in_order)
                inside = inside && (axes.has(one) || shape.coordinate(r, one) == me[one]);
              if (inside) expected.push_back(r);
            }
            CHECK(members == expected);
          }
          CHECK(mesh.coordinate(axis::tensor) == me.tensor);
          CHECK(&mesh.gradient_group() == &mesh.along(axis::data | axis::expert | axis::context));
        },
        patient);
}

TEST_CASE("groups of the same ranks are one communicator, and those of one rank cost one split") {
  comm::run_threads(
      4,
      [](comm::threads& world) {
        partition::mesh all(world, {.tensor = 4});
        CHECK(&all.along(axis::tensor) == &world);
        CHECK(world.meter().of(comm::collective::split).calls == 1);
        CHECK(&all.along(axis::data) == &all.along(axis::pipeline));
        partition::mesh mixed(world, {.data = 2, .tensor = 2});
        CHECK(&mixed.gradient_group() == &mixed.along(axis::data));
        CHECK(world.meter().of(comm::collective::split).calls == 1 + 3);
        auto moved = std::move(mixed);
        CHECK(moved.along(axis::tensor).all_reduce(1) == 2);
      },
      patient);
  comm::self alone;
  partition::mesh mesh(alone, {});
  CHECK(&mesh.along(axis::tensor) == &alone);
  CHECK(alone.meter().of(comm::collective::split).calls == 0);
}

TEST_CASE("a shape of another size, and axes that were not asked for, are refused on every rank") {
  comm::run_threads(
      8,
      [](comm::threads& world) {
        auto const end =
            test::error_of<config_error>([&] { partition::mesh mesh(world, {.data = 2, .tensor = 2}); });
        CHECK(end.id == "E-layout-011");
        partition::mesh mesh(world, {.pipeline = 2, .data = 2, .tensor = 2});
        auto const unknown = test::error_of<config_error>([&] { mesh.along(axis::data | axis::tensor); });
        CHECK(unknown.id == "E-partition-001");
        CHECK(unknown.says("along data x tensor"));
        CHECK(&mesh.along(axis::data | axis::context) == &mesh.along(axis::data));
      },
      patient);
}
