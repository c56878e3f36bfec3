/// What Tessera throws. Every exception derives from `tessera::error`, carries a stable id (`E-comm-003`,
/// listed in docs/troubleshooting.md) and a message that says what was expected, what came, where, and what
/// to do.
///
///     throw size_error("E-ops-001", site::here(), "gain has ", n, " elements, rows have ", width);
#ifndef TESSERA_CORE_ERROR_HPP
#define TESSERA_CORE_ERROR_HPP

#include <concepts>
#include <exception>
#include <string>
#include <string_view>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_STABLE_ABI {

/// A place in a source file. As a default argument, `site where = site::here()` is the caller's place.
/// (std::source_location is missing under clang 14 with libstdc++.)
struct site {
  char const* file = "";
  int line = 0;
  char const* function = "";

  static constexpr site here(char const* file = __builtin_FILE(), int line = __builtin_LINE(),
                             char const* function = __builtin_FUNCTION()) noexcept {
    return {file, line, function};
  }
};

namespace detail {

inline void append(std::string& text, std::string_view part) {
  text += part;
}
inline void append(std::string& text, char part) {
  text += part;
}
template <std::integral Integer>
void append(std::string& text, Integer part) {
  if constexpr (std::same_as<Integer, bool>)
    text += part ? "true" : "false";
  else
    text += std::to_string(part);
}
inline void append(std::string& text, double part) {
  char digits[32];
  __builtin_snprintf(digits, sizeof digits, "%.9g", part);
  text += digits;
}
inline void append(std::string& text, site part) {
  std::string_view file = part.file;
  if (auto slash = file.find_last_of('/'); slash != std::string_view::npos) file.remove_prefix(slash + 1);
  text += file;
  text += ':';
  text += std::to_string(part.line);
}

} // namespace detail

/// Joins strings, numbers and sites into one string, for messages.
template <class... Parts>
std::string text_of(Parts const&... parts) {
  std::string text;
  (detail::append(text, parts), ...);
  return text;
}

/// Base of all exceptions thrown by Tessera.
class TESSERA_VISIBLE error : public std::exception {
public:
  template <class... Parts>
  error(char const* id, site where, Parts const&... parts)
      : id_(id), text_(text_of(parts..., " [", id, " at ", where, "]")) {}

  char const* what() const noexcept override { return text_.c_str(); }

  /// The stable id, such as `E-comm-003`.
  char const* id() const noexcept { return id_; }

private:
  char const* id_;
  std::string text_;
};

/// A shape, extent, count or stride that does not fit.
class TESSERA_VISIBLE size_error : public error {
  using error::error;
};
/// A setting, or a combination of settings, that is impossible or that this build lacks.
class TESSERA_VISIBLE config_error : public error {
  using error::error;
};
/// Memory that was not to be had; the message says how much and for what.
class TESSERA_VISIBLE out_of_memory : public error {
  using error::error;
};
/// A file that is missing, cut, altered or of another format, or a disk that is full.
class TESSERA_VISIBLE io_error : public error {
  using error::error;
};
/// Another rank failed, so that this rank's collective can never finish.
class TESSERA_VISIBLE peer_failed : public error {
  using error::error;
};
/// Ranks that called different collectives, or the same one with other types, counts or roots.
class TESSERA_VISIBLE collective_mismatch : public error {
  using error::error;
};
/// A collective that did not finish within the watchdog's limit.
class TESSERA_VISIBLE stalled : public error {
  using error::error;
};
/// A call of another library (MPI, oneDNN, the operating system) that returned an error code.
class TESSERA_VISIBLE library_error : public error {
  using error::error;
};
/// A number that must be finite and is not.
class TESSERA_VISIBLE numeric_error : public error {
  using error::error;
};

} // namespace tessera::inline TESSERA_STABLE_ABI

#endif
