/// Where each named parameter stands in a unit's flat block.
///
///     parameter_map map;
///     auto w = map.add("attention.weight", {3 * c, c}, parameter_kind::matrix, normal_values(0.02f));
///     map[w].offset;  map.block_size();
#ifndef TESSERA_LAYOUT_PARAMETERS_HPP
#define TESSERA_LAYOUT_PARAMETERS_HPP

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/layout/shard.hpp>

namespace tessera::inline TESSERA_ABI::layout {

/// What a parameter is; weight decay and learning-rate rules are chosen by it.
enum class parameter_kind { matrix, bias, norm_gain, norm_bias, token_embedding, position_embedding };

constexpr char const* name_of(parameter_kind kind) noexcept {
  constexpr char const* names[] = {
      "matrix", "bias", "norm_gain", "norm_bias", "token_embedding", "position_embedding"};
  return names[static_cast<int>(kind)];
}

/// How a parameter starts: mean + deviation * standard normal, each element by its index (core/philox.hpp).
struct initial_values {
  float mean = 0;
  float deviation = 0;
};
constexpr initial_values constant_values(float value) noexcept {
  return {value, 0};
}
constexpr initial_values normal_values(float deviation) noexcept {
  return {0, deviation};
}

/// What this rank holds of a parameter that the ranks of a tensor-parallel group share. By default: all of
/// it, and nobody else has it.
struct parameter_share {
  int dimension = -1;          ///< The dimension that is cut; -1: none.
  std::vector<range> pieces{}; ///< The stretches of it that this rank holds, in the order in which it does.
  int copies = 1;              ///< Consecutive ranks of the group that hold the same elements.
  /// The copies' gradients are summands, which must be added up (the values are `replicate`); otherwise each
  /// copy's gradient is the whole one (`invariant`).
  bool partial = false;
};

/// A stretch of adjacent elements of this rank's part of a parameter, which is adjacent in the whole as well.
struct run {
  range here;           ///< Within this rank's part.
  index_t in_whole = 0; ///< Its first element's index within the whole parameter.
};

struct parameter {
  std::string name;
  std::vector<index_t> shape; ///< Of this rank's part, which is all of it unless `share` says otherwise.
  parameter_kind kind = parameter_kind::matrix;
  initial_values start;
  index_t offset = 0; ///< First element within the unit's block.
  index_t size = 0;   ///< Elements of this rank's part.
  std::vector<index_t> whole_shape{};
  parameter_share share{};

  constexpr range where() const noexcept { return {offset, offset + size}; }

  /// Elements of the whole parameter.
  constexpr index_t whole_size() const noexcept {
    index_t count = 1;
    for (auto extent : whole_shape) count *= extent;
    return count;
  }

  /// Where the elements of this rank's part stand in the whole, in order.
  std::vector<run> runs() const {
    if (share.dimension < 0) return size == 0 ? std::vector<run>{} : std::vector<run>{{{0, size}, 0}};
    auto const cut = static_cast<std::size_t>(share.dimension);
    index_t outer = 1, inner = 1, at = 0;
    for (std::size_t d = 0; d < cut; ++d) outer *= whole_shape[d];
    for (auto d = cut + 1; d < whole_shape.size(); ++d) inner *= whole_shape[d];
    std::vector<run> found;
    for (index_t o = 0; o < outer; ++o)
      for (auto const& piece : share.pieces) {
        auto const length = piece.size() * inner, first = (o * whole_shape[cut] + piece.begin) * inner;
        auto const joins = !found.empty() && found.back().in_whole + found.back().here.size() == first;
        if (joins)
          found.back().here.end += length;
        else if (length > 0)
          found.push_back({{at, at + length}, first});
        at += length;
      }
    return found;
  }
};

/// A stable number for a name (FNV-1a): the random stream of a parameter does not depend on where it stands.
constexpr std::uint64_t stream_of(std::string_view name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

/// The parameters of one unit in the order of their offsets. Each starts at a multiple of `alignment`
/// elements, or joined to the one before; gaps hold zeros, have zero gradients, and belong to no parameter.
class parameter_map {
public:
  static constexpr index_t alignment = 32; // 64 bytes of the smallest storage type

  /// Appends a parameter of `whole_shape`, or this rank's share of it, and returns its number. Throws
  /// size_error for an impossible shape or share, config_error for a name that is already there.
  std::size_t add(std::string name, std::vector<index_t> whole_shape, parameter_kind kind,
                  initial_values start, parameter_share share = {}, site where = site::here()) {
    for (auto const& known : parameters_)
      if (known.name == name) throw config_error("E-layout-002", where, "two parameters are named ", name);
    auto const shape = part_of(whole_shape, share, name, where);
    index_t size = 1;
    for (auto extent : whole_shape) size = element_count<2>({size, extent}, where);
    size = 1;
    for (auto extent : shape) size = element_count<2>({size, extent}, where);
    if (size > std::numeric_limits<index_t>::max() - alignment - block_size_)
      throw size_error("E-layout-003", where, "the parameter ", name, " of ", size, " elements and the ",
                       block_size_, " before it make a block of more than 2^63 - 1");
    parameters_.push_back({static_cast<std::string&&>(name), shape, kind, start, block_size_, size,
                           static_cast<std::vector<index_t>&&>(whole_shape),
                           static_cast<parameter_share&&>(share)});
    block_size_ += (size + alignment - 1) / alignment * alignment;
    return parameters_.size() - 1;
  }

  /// As `add`, but begins where the last parameter ends, without a gap: a row block of a packed matrix that
  /// keeps a name of its own.
  std::size_t add_joined(std::string name, std::vector<index_t> whole_shape, parameter_kind kind,
                         initial_values start, parameter_share share = {}, site where = site::here()) {
    auto const number =
        add(static_cast<std::string&&>(name), static_cast<std::vector<index_t>&&>(whole_shape), kind, start,
            static_cast<parameter_share&&>(share), where);
    if (number == 0) return number;
    auto& p = parameters_[number];
    p.offset = parameters_[number - 1].where().end;
    block_size_ = (p.where().end + alignment - 1) / alignment * alignment;
    return number;
  }

  parameter const& operator[](std::size_t number) const { return parameters_[number]; }
  std::size_t size() const noexcept { return parameters_.size(); }
  auto begin() const noexcept { return parameters_.begin(); }
  auto end() const noexcept { return parameters_.end(); }

  /// Elements of the flat block, gaps included.
  index_t block_size() const noexcept { return block_size_; }
  /// Elements of all parameters, gaps not included.
  index_t parameter_count() const noexcept {
    index_t count = 0;
    for (auto const& p : parameters_) count += p.size;
    return count;
  }

private:
  static std::vector<index_t> part_of(std::vector<index_t> const& whole, parameter_share const& share,
                                      std::string const& name, site where) {
    auto part = whole;
    if (share.copies < 1 || share.dimension >= std::ssize(whole))
      throw size_error("E-layout-004", where, "the parameter ", name, " of ", whole.size(),
                       " dimensions is cut along dimension ", share.dimension, " and held by ", share.copies,
                       " ranks; name one of its dimensions, and 1 rank or more");
    if (share.dimension < 0) return part;
    auto& extent = part[static_cast<std::size_t>(share.dimension)];
    auto const all = extent;
    extent = 0;
    for (auto const& piece : share.pieces) {
      if (piece.begin < 0 || piece.end < piece.begin || piece.end > all)
        throw size_error("E-layout-004", where, "the parameter ", name, " has ", all, " along dimension ",
                         share.dimension, "; the piece from ", piece.begin, " to ", piece.end,
                         " does not lie within it");
      extent += piece.size();
    }
    return part;
  }

  std::vector<parameter> parameters_;
  index_t block_size_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::layout

#endif
