/// Which part of a layer's parameters one of several tensor-parallel ranks holds, in the words of
/// layout::parameter_share: cut along a dimension, or a copy on each rank.
///
///     tensor_part const part{.ranks = 4, .rank = 1};
///     map.add("up.weight", {inner, width}, kind, start, part.cut(0, inner));     // rows 1/4 .. 2/4
///     map.add("down.bias", {width}, kind, start, part.copy());                   // all of it
#ifndef TESSERA_NN_TENSOR_PART_HPP
#define TESSERA_NN_TENSOR_PART_HPP

#include <tessera/layout/parameters.hpp>

namespace tessera::inline TESSERA_ABI::nn {

struct tensor_part {
  int ranks = 1;
  int rank = 0;
  /// The ranks share the rows between products (sequence parallelism): what acts on rows has on each rank
  /// only a summand of its parameters' gradient.
  bool shares_rows = false;

  /// This rank's part of n rows or columns. Uneven and empty parts are ordinary.
  constexpr layout::range of(index_t n) const { return layout::shard_of(n, ranks, rank); }

  layout::parameter_share cut(int dimension, index_t n) const { return cut(dimension, {of(n)}); }
  /// `pieces` of the dimension, which `copies` neighbours hold alike and have summands of a gradient for.
  layout::parameter_share cut(int dimension, std::vector<layout::range> pieces, int copies = 1) const {
    if (ranks == 1) return {};
    return {dimension, static_cast<std::vector<layout::range>&&>(pieces), copies, copies > 1};
  }

  /// A copy on each rank, with the whole gradient there.
  layout::parameter_share copy() const { return {.copies = ranks}; }
  /// The same, of a parameter that acts on the rows that are here.
  layout::parameter_share copy_on_rows() const { return {.copies = ranks, .partial = shares_rows}; }
};

/// The heads of an attention part that a rank holds. Where there are fewer key/value heads than ranks,
/// neighbours hold the same one: `copies` of them.
struct head_part {
  layout::range queries, keys;
  int copies = 1;

  /// Throws config_error (E-nn-024) where the heads cannot be shared so.
  static constexpr head_part of(tensor_part part, index_t heads, index_t key_heads,
                                site where = site::here()) {
    if (heads % part.ranks != 0)
      throw config_error("E-nn-024", where, part.ranks, " tensor-parallel ranks cannot share ", heads,
                         " heads: set heads to a multiple of the ranks (",
                         (heads / part.ranks + 1) * part.ranks,
                         " would be), or take a number of ranks that divides them");
    if (key_heads % part.ranks != 0 && part.ranks % key_heads != 0)
      throw config_error("E-nn-024", where, part.ranks, " tensor-parallel ranks cannot share ", key_heads,
                         " key/value heads: one number must divide the other; set key_value_heads to ",
                         part.ranks, ", or take a number of ranks that fits");
    auto const here = heads / part.ranks;
    auto const copies = key_heads < part.ranks ? narrow<int>(part.ranks / key_heads) : 1;
    auto const keys = key_heads < part.ranks ? index_t{1} : key_heads / part.ranks;
    auto const first = part.rank / copies * keys;
    return {{part.rank * here, (part.rank + 1) * here}, {first, first + keys}, copies};
  }
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
