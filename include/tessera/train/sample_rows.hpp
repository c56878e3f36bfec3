/// Samples for one rank, where its space reads them: whole, or the positions that it holds of each under
/// context parallelism.
///
///     sample_rows<Ex> rows(ex, 8, sequence_length, group.positions(sequence_length), local_length);
///     rows.fill(dataset, 0, sample);                     // row 0
///     rows.upload(ex);
///     rows.tokens({0, 1});  rows.targets({0, 1});        // views that a model takes
#ifndef TESSERA_TRAIN_SAMPLE_ROWS_HPP
#define TESSERA_TRAIN_SAMPLE_ROWS_HPP

#include <tessera/data/token_dataset.hpp>
#include <tessera/exec/copy.hpp>
#include <tessera/layout/shard.hpp>
#include <tessera/ops/token_positions.hpp>

namespace tessera::inline TESSERA_ABI::train {

template <exec::space Ex>
class sample_rows {
public:
  using token_view = view<std::int32_t const, 2, typename Ex::memory>;

  /// Room for `rows` samples, of `here` tokens each, which stand at `positions` of whole samples of `length`.
  sample_rows(Ex& ex, index_t rows, index_t length, ops::token_positions positions, index_t here,
              memory_account account = {})
      : positions_(positions), tokens_(ex, {rows, here}, account), targets_(ex, {rows, here}, account),
        whole_tokens_(static_cast<std::size_t>(length)), whole_targets_(whole_tokens_.size()) {}

  /// Puts a sample into a row. Throws size_error for a sample that is not there.
  void fill(data::token_dataset const& from, index_t row, index_t sample, site where = site::here()) {
    from.fill(sample, whole_tokens_, whole_targets_, where);
    auto const tokens = tokens_.host()[row].span(), targets = targets_.host()[row].span();
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      auto const at = static_cast<std::size_t>(positions_(static_cast<index_t>(t)));
      tokens[t] = whole_tokens_[at];
      targets[t] = whole_targets_[at];
    }
  }

  /// Brings what was filled in to the space, in order with its operations.
  void upload(Ex& ex) {
    tokens_here_ = tokens_.upload(ex);
    targets_here_ = targets_.upload(ex);
  }
  token_view tokens(layout::range rows) const { return tokens_here_.slice(0, rows.begin, rows.end); }
  token_view targets(layout::range rows) const { return targets_here_.slice(0, rows.begin, rows.end); }

private:
  ops::token_positions positions_;
  exec::staged<std::int32_t, 2, Ex> tokens_, targets_;
  std::vector<std::int32_t> whole_tokens_, whole_targets_;
  token_view tokens_here_, targets_here_;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
