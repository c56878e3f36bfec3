/// How ranks are laid out over named axes: sizes, coordinates, and the number of a rank among all.
///
///     constexpr layout::mesh_shape shape{.pipeline = 2, .data = 2, .tensor = 4};
///     shape.size();                                         // 16
///     shape.coordinate(13, layout::axis::tensor);           // 1
///     shape.rank_of({.pipeline = 1, .data = 1, .tensor = 1}); // 13
///
/// Ranks count pipeline, data, expert, context and tensor coordinates, the last one fastest: neighbours along
/// the tensor axis, which exchange most, are neighbours among the ranks, and a pipeline stage is a stretch of
/// them.
#ifndef TESSERA_LAYOUT_MESH_SHAPE_HPP
#define TESSERA_LAYOUT_MESH_SHAPE_HPP

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::layout {

enum class axis : std::uint8_t { data, tensor, pipeline, context, expert };

constexpr char const* name_of(axis which) noexcept {
  constexpr char const* names[] = {"data", "tensor", "pipeline", "context", "expert"};
  return names[static_cast<std::size_t>(which)];
}

/// The axes from slowest to fastest, as ranks count them.
inline constexpr axis axes_in_order[] = {axis::pipeline, axis::data, axis::expert, axis::context,
                                         axis::tensor};

/// Some of the axes: `axis::data | axis::context`.
class axis_set {
public:
  constexpr axis_set() = default;
  constexpr axis_set(axis one) noexcept : bits_(bit_of(one)) {} // NOLINT: meant to be implicit

  constexpr bool has(axis one) const noexcept { return (bits_ & bit_of(one)) != 0; }
  constexpr bool empty() const noexcept { return bits_ == 0; }

  friend constexpr axis_set operator|(axis_set a, axis_set b) noexcept {
    a.bits_ = static_cast<std::uint8_t>(a.bits_ | b.bits_);
    return a;
  }
  friend constexpr bool operator==(axis_set, axis_set) = default;

private:
  static constexpr std::uint8_t bit_of(axis one) noexcept {
    return static_cast<std::uint8_t>(1u << static_cast<unsigned>(one));
  }
  std::uint8_t bits_ = 0;
};

constexpr axis_set operator|(axis a, axis b) noexcept {
  return axis_set(a) | axis_set(b);
}

/// The ranks that see different samples, or different positions of them, with the same dense parameters:
/// gradients are summed over these.
inline constexpr axis_set gradient_axes = axis::data | axis::expert | axis::context;

/// "data x context", slowest first.
inline std::string text_of(axis_set axes) {
  std::string text;
  for (auto one : axes_in_order)
    if (axes.has(one)) text += tessera::text_of(text.empty() ? "" : " x ", name_of(one));
  return text;
}

/// A rank's place: one coordinate an axis.
struct mesh_coordinates {
  int pipeline = 0;
  int data = 0;
  int context = 0;
  int tensor = 0;
  int expert = 0;

  constexpr int operator[](axis which) const noexcept {
    return which == axis::pipeline  ? pipeline
           : which == axis::data    ? data
           : which == axis::context ? context
           : which == axis::tensor  ? tensor
                                    : expert;
  }
  friend constexpr bool operator==(mesh_coordinates const&, mesh_coordinates const&) = default;
};

struct mesh_shape {
  int pipeline = 1;
  int data = 1;
  int context = 1;
  int tensor = 1;
  int expert = 1;

  constexpr int size(axis which) const noexcept {
    return mesh_coordinates{pipeline, data, context, tensor, expert}[which];
  }
  /// The product over the axes of a set.
  constexpr index_t size(axis_set axes) const noexcept {
    index_t product = 1;
    for (auto one : axes_in_order)
      if (axes.has(one)) product *= size(one);
    return product;
  }
  /// Ranks in all.
  constexpr index_t size() const noexcept { return size(axis::pipeline | gradient_axes | axis::tensor); }

  /// `rank` is one of [0, size()).
  constexpr int coordinate(int rank, axis which) const noexcept {
    int stride = 1;
    for (int i = 4; axes_in_order[i] != which; --i) stride *= size(axes_in_order[i]);
    return rank / stride % size(which);
  }
  constexpr mesh_coordinates coordinates(int rank) const noexcept {
    return {coordinate(rank, axis::pipeline), coordinate(rank, axis::data), coordinate(rank, axis::context),
            coordinate(rank, axis::tensor), coordinate(rank, axis::expert)};
  }
  /// The rank at coordinates inside the mesh: `rank_of(coordinates(r)) == r`.
  constexpr int rank_of(mesh_coordinates const& at) const noexcept {
    int rank = 0;
    for (auto one : axes_in_order) rank = rank * size(one) + at[one];
    return rank;
  }

  /// Throws config_error where an axis is empty (E-layout-010) or where this is not a mesh of `ranks` ranks
  /// (E-layout-011).
  constexpr void validate(int ranks, site where = site::here()) const {
    index_t product = 1;
    for (auto one : axes_in_order) {
      if (size(one) < 1)
        throw config_error("E-layout-010", where, "the ", name_of(one), " axis has ", size(one),
                           " ranks; an axis that is not used has 1");
      if (__builtin_mul_overflow(product, index_t{size(one)}, &product)) product = 0;
    }
    if (product == ranks) return;
    auto const others = data > 0 ? product / data : 0;
    throw config_error(
        "E-layout-011", where, text_of(*this), " takes ", product, " ranks, and there are ", ranks, "; ",
        others > 0 && ranks % others == 0
            ? tessera::text_of("with data = ", ranks / others, " it fits, or start ", product, " ranks")
            : tessera::text_of("start ", product, " ranks, or choose sizes whose product is ", ranks));
  }

  /// "pipeline 2 x data 2 x tensor 4": axes of one rank are left out.
  friend std::string text_of(mesh_shape const& shape) {
    std::string text;
    for (auto one : axes_in_order)
      if (shape.size(one) != 1)
        text += tessera::text_of(text.empty() ? "" : " x ", name_of(one), " ", shape.size(one));
    return text.empty() ? "one rank" : text;
  }
  friend constexpr bool operator==(mesh_shape const&, mesh_shape const&) = default;
};

/// One rank of a mesh: all that arithmetic over a mesh needs to know of where it runs.
struct mesh_place {
  mesh_shape shape;
  int rank = 0;

  constexpr mesh_coordinates coordinates() const noexcept { return shape.coordinates(rank); }
  friend constexpr bool operator==(mesh_place const&, mesh_place const&) = default;
};

} // namespace tessera::inline TESSERA_ABI::layout

#endif
