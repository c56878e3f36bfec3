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

struct parameter {
  std::string name;
  std::vector<index_t> shape;
  parameter_kind kind = parameter_kind::matrix;
  initial_values start;
  index_t offset = 0; ///< First element within the unit's block.
  index_t size = 0;   ///< Elements.

  constexpr range where() const noexcept { return {offset, offset + size}; }
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

  /// Appends a parameter and returns its number. Throws size_error for an impossible shape, config_error for
  /// a name that is already there.
  std::size_t add(std::string name, std::vector<index_t> shape, parameter_kind kind, initial_values start,
                  site where = site::here()) {
    for (auto const& known : parameters_)
      if (known.name == name) throw config_error("E-layout-002", where, "two parameters are named ", name);
    index_t size = 1;
    for (auto extent : shape) size = element_count<2>({size, extent}, where);
    if (size > std::numeric_limits<index_t>::max() - alignment - block_size_)
      throw size_error("E-layout-003", where, "the parameter ", name, " of ", size, " elements and the ",
                       block_size_, " before it make a block of more than 2^63 - 1");
    parameters_.push_back({static_cast<std::string&&>(name), static_cast<std::vector<index_t>&&>(shape), kind,
                           start, block_size_, size});
    block_size_ += (size + alignment - 1) / alignment * alignment;
    return parameters_.size() - 1;
  }

  /// As `add`, but begins where the last parameter ends, without a gap: a row block of a packed matrix that
  /// keeps a name of its own.
  std::size_t add_joined(std::string name, std::vector<index_t> shape, parameter_kind kind,
                         initial_values start, site where = site::here()) {
    auto const number =
        add(static_cast<std::string&&>(name), static_cast<std::vector<index_t>&&>(shape), kind, start, where);
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
  std::vector<parameter> parameters_;
  index_t block_size_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::layout

#endif
