/// A layout in one line of text, as a person writes it into a config and a log shows it.
///
///     auto layout = parallel::parse_layout("data 2 x tensor 2 x pipeline 2, zero 3, 1f1b");
///     std::puts(text_of(layout).c_str());
#ifndef TESSERA_PARALLEL_LAYOUT_TEXT_HPP
#define TESSERA_PARALLEL_LAYOUT_TEXT_HPP

#include <tessera/parallel/training_layout.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// "data 2 x tensor 2 x pipeline 2, zero 3, 1f1b, micro-batch 4": what is left out has its default, apart
/// from the ZeRO stage, which is always said. `parse_layout` reads it back to the same value.
inline std::string text_of(training_layout const& l) {
  std::string text = l.data == 0 ? "data rest" : tessera::text_of("data ", l.data);
  auto const axis = [&](char const* name, int ranks) {
    if (ranks != 1) text += tessera::text_of(" x ", name, " ", ranks);
  };
  axis("tensor", l.tensor);
  axis("pipeline", l.pipeline);
  axis("context", l.context);
  auto const say = [&](bool said, auto const&... parts) {
    if (said) text += tessera::text_of(", ", parts...);
  };
  using kind = layout::schedule_kind;
  say(true, "zero ", l.zero);
  say(l.shard_group != 0, "shard group ", l.shard_group);
  say(l.sequence_parallel, "sequence parallel");
  say(l.form != context_form::ring, name_of(l.form));
  say(l.assignment != layout::sequence_assignment::zigzag, name_of(l.assignment));
  say(l.pipeline > 1 && l.schedule == kind::one_forward_one_backward, "1f1b");
  say(l.schedule == kind::gpipe, "gpipe");
  say(l.schedule == kind::zero_bubble, "zero bubble");
  say(l.schedule == kind::interleaved_one_forward_one_backward, "interleaved ", l.chunks);
  say(l.micro_batch != 0, "micro-batch ", l.micro_batch);
  say(l.recompute != recomputation::none, "recompute ", name_of(l.recompute));
  say(l.reproducible, "reproducible");
  return text;
}

namespace detail {

/// One clause of a layout's text without the blanks around it, and what follows it.
inline std::string_view next_clause(std::string_view& rest, std::string_view between) {
  auto const end = rest.find(between);
  auto clause = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view{} : rest.substr(end + between.size());
  while (!clause.empty() && clause.front() == ' ') clause.remove_prefix(1);
  while (!clause.empty() && clause.back() == ' ') clause.remove_suffix(1);
  return clause;
}

/// Whether `clause` is `word` and a whole number, which is then left in `value`.
template <std::signed_integral Integer>
bool reads(std::string_view clause, std::string_view word, Integer& value) {
  if (!clause.starts_with(word) || clause.size() < word.size() + 2 || clause[word.size()] != ' ')
    return false;
  Integer number = 0;
  for (auto c : clause.substr(word.size() + 1))
    if (c < '0' || c > '9' || number > 99'999'999)
      return false;
    else
      number = static_cast<Integer>(10 * number + (c - '0'));
  value = number;
  return true;
}

/// One clause behind the axes.
inline bool read_clause(std::string_view clause, training_layout& l) {
  using kind = layout::schedule_kind;
  auto const is = [&](std::string_view word, auto& member, auto value) {
    if (clause != word) return false;
    member = value;
    return true;
  };
  if (reads(clause, "interleaved", l.chunks)) {
    l.schedule = kind::interleaved_one_forward_one_backward;
    return true;
  }
  return reads(clause, "zero", l.zero) || reads(clause, "shard group", l.shard_group) ||
         reads(clause, "micro-batch", l.micro_batch) || is("sequence parallel", l.sequence_parallel, true) ||
         is("ring", l.form, context_form::ring) || is("exchange", l.form, context_form::exchange) ||
         is("zigzag", l.assignment, layout::sequence_assignment::zigzag) ||
         is("contiguous", l.assignment, layout::sequence_assignment::contiguous) ||
         is("gpipe", l.schedule, kind::gpipe) || is("1f1b", l.schedule, kind::one_forward_one_backward) ||
         is("zero bubble", l.schedule, kind::zero_bubble) ||
         is("recompute none", l.recompute, recomputation::none) ||
         is("recompute attention", l.recompute, recomputation::attention) ||
         is("recompute unit", l.recompute, recomputation::unit) || is("reproducible", l.reproducible, true);
}

} // namespace detail

/// Reads the axes, joined by " x ", and then the choices, joined by commas, in any order. Throws config_error
/// (E-parallel-075) that quotes what it cannot read and lists what there is.
inline training_layout parse_layout(std::string_view text, site where = site::here()) {
  training_layout l;
  auto rest = text;
  auto axes = detail::next_clause(rest, ",");
  do {
    auto const clause = detail::next_clause(axes, " x ");
    if (!(clause == "data rest" || detail::reads(clause, "data", l.data) ||
          detail::reads(clause, "tensor", l.tensor) || detail::reads(clause, "pipeline", l.pipeline) ||
          detail::reads(clause, "context", l.context)))
      throw config_error(
          "E-parallel-075", where, "layout '", text, "': '", clause,
          "' is no axis; a layout begins with data N, tensor N, pipeline N and context N joined "
          "by ' x ', such as 'data 2 x tensor 2'");
  } while (!axes.empty());
  while (!rest.empty()) {
    auto const clause = detail::next_clause(rest, ",");
    if (!detail::read_clause(clause, l))
      throw config_error("E-parallel-075", where, "layout '", text, "': '", clause,
                         "' is not known; behind the axes may stand, after commas: zero N, shard group N, "
                         "sequence parallel, ring, exchange, zigzag, contiguous, gpipe, 1f1b, interleaved N, "
                         "zero bubble, micro-batch N, recompute attention, recompute unit, reproducible");
  }
  return l;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
