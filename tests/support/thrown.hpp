/// What an expression throws, for comparing type, id and message.
#ifndef TESSERA_TESTS_SUPPORT_THROWN_HPP
#define TESSERA_TESTS_SUPPORT_THROWN_HPP

#include <concepts>
#include <string>

#include <tessera/core/error.hpp>

namespace test {

struct thrown {
  std::string id = "nothing was thrown";
  std::string message;
  bool says(std::string const& text) const { return message.find(text) != std::string::npos; }
};

/// Calls `f` and catches an exception of the given type; one of another type passes through.
template <std::derived_from<tessera::error> Error, std::invocable F>
thrown error_of(F f) {
  try {
    f();
  } catch (Error const& caught) {
    return {caught.id(), caught.what()};
  }
  return {};
}

} // namespace test

#endif
