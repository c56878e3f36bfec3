/// The settings of a run from a command line: each row of the settings table is an option, `--config FILE`
/// reads JSON first, and what is said on the command line wins. --help is made from the same table.
///
///     auto parsed = command_line(argc, argv, {.program = "train_gpt", .purpose = "Trains ..."});
///     if (!parsed) return 0;                              // --help was asked for and printed
#ifndef TESSERA_TRAIN_COMMAND_LINE_HPP
#define TESSERA_TRAIN_COMMAND_LINE_HPP

#if defined(TESSERA_WITH_CLI11) && defined(TESSERA_WITH_JSON)

#include <cstdio>
#include <optional>

#include <CLI/CLI.hpp>

#include <tessera/train/settings_json.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct command_line_text {
  std::string program;
  std::string purpose;
  std::string examples;
};

/// Returns nothing when help was asked for: it is printed to `help_to`, or nowhere if that is null (the ranks
/// that do not speak). Throws config_error for unknown options, naming the nearest, and for values that a
/// setting cannot take; io_error for a config file that cannot be read.
inline std::optional<settings> command_line(int argc, char const* const* argv, command_line_text const& text,
                                            std::FILE* help_to = stdout, site where = site::here()) {
  CLI::App app(text.purpose, text.program);
  app.footer(
      "The folder given by --run holds everything a run leaves behind. Starting the same command again\n"
      "goes on from its latest checkpoint.\n" +
      text.examples);
  app.allow_extras();
  app.get_formatter()->column_width(34);

  std::string config;
  std::vector<std::string> allowed;
  app.add_option("--config", config,
                 "JSON file with any of the settings below, named with underscores; the\n"
                 "command line overrides it.")
      ->type_name("FILE");
  app.add_option("--allow-difference", allowed,
                 "Resume although this setting (or 'data') differs from the checkpoint's. May be repeated.")
      ->type_name("NAME");

  settings const defaults;
  std::vector<std::pair<CLI::Option*, std::string>> given(std::size(fields));
  auto const hyphenated = [](std::string_view name) {
    std::string option = "--" + std::string(name);
    for (auto& c : option) c = c == '_' ? '-' : c;
    return option;
  };
  for (std::size_t i = 0; i < std::size(fields); ++i) {
    auto const& f = fields[i];
    constexpr char const* kinds[] = {"TEXT", "INTEGER", "NUMBER", "true|false"};
    given[i].first = app.add_option(hyphenated(f.name), given[i].second, std::string(f.help))
                         ->type_name(f.choices.empty() ? kinds[f.member.index()] : std::string(f.choices))
                         ->default_str(value_text(defaults, f))
                         ->group(std::string(f.group));
  }

  try {
    app.parse(argc, argv);
  } catch (CLI::CallForHelp const&) {
    if (help_to != nullptr) std::fprintf(help_to, "%s", app.help().c_str());
    return std::nullopt;
  } catch (CLI::ParseError const& fault) {
    throw config_error("E-train-009", where, "the command line cannot be understood: ", fault.what());
  }
  if (auto const extras = app.remaining(); !extras.empty()) {
    std::vector<std::string> options{"--config", "--allow-difference", "--help"};
    for (auto const& f : fields) options.push_back(hyphenated(f.name));
    throw config_error(
        "E-train-009", where, "there is no option '", extras[0], "'; did you mean '",
        detail::nearest(extras[0], std::vector<std::string_view>(options.begin(), options.end())),
        "'? --help lists all");
  }

  auto chosen = config.empty() ? settings{} : read_settings(config, where);
  for (std::size_t i = 0; i < std::size(fields); ++i)
    if (given[i].first->count() > 0) set(chosen, fields[i].name, given[i].second, where);
  chosen.allow_difference = allowed;
  return chosen;
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
