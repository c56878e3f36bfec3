/// Ranks with named axes over any communicator: each axis has a communicator of its own, and so have the
/// ranks over which gradients are summed.
///
///     partition::mesh<comm::mpi> mesh(world, {.pipeline = 2, .data = 2, .tensor = 2});
///     mesh.along(axis::tensor).all_reduce(sums);       // this rank's neighbours along one axis
///     mesh.gradient_group().all_reduce(gradients);     // data x context
///
/// Cost: made once, one `split` for each group that is neither the world nor made already; all groups of one
/// rank are the same communicator, on which every collective is a copy. Nothing later.
#ifndef TESSERA_PARTITION_MESH_HPP
#define TESSERA_PARTITION_MESH_HPP

#include <initializer_list>
#include <vector>

#include <tessera/comm/communicator.hpp>
#include <tessera/layout/mesh_shape.hpp>

namespace tessera::inline TESSERA_ABI::partition {

using layout::axis;
using layout::axis_set;

/// Borrows the world communicator, which outlives it.
template <comm::communicator Comm>
class mesh {
public:
  /// Called by all ranks of `world`, with the same shape. `pairs` are groups of several axes that the program
  /// wants besides data x context (layout::gradient_axes), which is always there.
  /// Throws config_error on all ranks alike where the sizes do not multiply to the world's (E-layout-011).
  explicit mesh(Comm& world, layout::mesh_shape const& shape, std::initializer_list<axis_set> pairs = {},
                site where = site::here())
      : world_(&world), place_{shape, world.rank()} {
    shape.validate(world.size(), where);
    groups_.reserve(pairs.size() + 8); // their addresses stay
    add({}, where);
    for (auto one : layout::axes_in_order) {
      add(one, where);
      axes_[static_cast<std::size_t>(one)] = known_.back().group;
    }
    add(layout::gradient_axes, where);
    add(axis::data | axis::context, where); // along which redistributions move at once
    for (auto axes : pairs) add(axes, where);
  }

  Comm& world() noexcept { return *world_; }
  layout::mesh_shape const& shape() const noexcept { return place_.shape; }
  int rank() const noexcept { return place_.rank; } ///< Among all.
  layout::mesh_place const& place() const noexcept { return place_; }

  /// The ranks that differ from this one in these axes alone, ordered as in the world.
  /// Throws config_error (E-partition-001) for a set of axes that the mesh was not made with.
  Comm& along(axis_set axes, site where = site::here()) {
    for (auto const& known : known_)
      if (same_ranks(known.axes, axes)) return *known.group;
    throw config_error("E-partition-001", where, "this mesh has no communicator along ", text_of(axes),
                       "; name the axes when it is made: mesh(world, shape, {axis::a | axis::b})");
  }
  Comm& along(axis which) noexcept { return *axes_[static_cast<std::size_t>(which)]; }
  /// The ranks that hold the same dense parameters and other samples or positions, data-major.
  Comm& gradient_group() { return along(layout::gradient_axes); }

  int size(axis_set axes) const { return narrow<int>(place_.shape.size(axes)); }
  int coordinate(axis which) const noexcept { return place_.shape.coordinate(place_.rank, which); }

private:
  struct known_group {
    axis_set axes;
    Comm* group;
  };

  /// Groups of the same ranks are one communicator.
  void add(axis_set axes, site where) {
    Comm* group = nullptr;
    auto const ranks = place_.shape.size(axes);
    if (ranks == world_->size()) group = world_;
    for (auto const& known : known_)
      if (group == nullptr && same_ranks(known.axes, axes)) group = known.group;
    if (group == nullptr) {
      int color = 0; // the coordinates in which the group's ranks agree
      for (auto one : layout::axes_in_order)
        if (!axes.has(one)) color = color * place_.shape.size(one) + coordinate(one);
      groups_.push_back(world_->split(color, place_.rank, where));
      group = &groups_.back();
    }
    known_.push_back({axes, group});
  }
  bool same_ranks(axis_set a, axis_set b) const noexcept {
    for (auto one : layout::axes_in_order)
      if (place_.shape.size(one) > 1 && a.has(one) != b.has(one)) return false;
    return true;
  }

  Comm* world_;
  layout::mesh_place place_;
  std::vector<Comm> groups_;
  std::vector<known_group> known_;
  Comm* axes_[5] = {};
};

} // namespace tessera::inline TESSERA_ABI::partition

#endif
