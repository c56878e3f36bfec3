/// Pieces of text as sentencepiece sees them: lines, well-formed UTF-8, its mark for a space, byte tokens.
#ifndef TESSERA_DATA_DETAIL_TEXT_PIECES_HPP
#define TESSERA_DATA_DETAIL_TEXT_PIECES_HPP

#include <cstdint>
#include <string>
#include <string_view>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::data::detail {

/// U+2581: how sentencepiece writes a space inside a piece.
inline constexpr std::string_view space_mark = "\xE2\x96\x81";

/// Bytes of the well-formed UTF-8 character that the text begins with; 0 if it begins with none.
constexpr std::size_t utf8_length(std::string_view text) noexcept {
  if (text.empty()) return 0;
  auto const byte = [&](std::size_t n) { return n < text.size() ? static_cast<unsigned char>(text[n]) : 0u; };
  auto const follows = [&](std::size_t n) { return (byte(n) & 0xC0u) == 0x80u; };
  auto const lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return follows(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    // No overlong forms, no surrogates.
    if ((lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) > 0x9F)) return 0;
    return follows(1) && follows(2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if ((lead == 0xF0 && byte(1) < 0x90) || (lead == 0xF4 && byte(1) > 0x8F)) return 0;
    return follows(1) && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

/// How many bytes from the start sentencepiece keeps as they are: well-formed, without its mark, up to a
/// line's end (a newline, when the text begins with it, is not among them: it is a byte token).
constexpr std::size_t plain_prefix(std::string_view text) noexcept {
  std::size_t length = 0;
  while (length < text.size()) {
    auto const rest = text.substr(length);
    auto const character = utf8_length(rest);
    if (character == 0 || rest.front() == '\n' || rest.front() == '\0' || rest.substr(0, 3) == space_mark)
      break;
    length += character;
  }
  return length;
}

/// Takes the first line off a text, at most about 4096 bytes of it; without the newline.
inline std::string take_line(std::string_view& text) {
  constexpr std::size_t most = 4096;
  auto const newline = text.find('\n');
  auto length = newline < text.size() ? newline : text.size();
  auto const whole = length <= most;
  if (!whole) {
    auto const space = text.rfind(' ', most);
    length = space != std::string_view::npos && space > 0 ? space : most;
    // Not through the middle of a character (at most three bytes follow the first).
    for (int back = 0; back < 3 && (static_cast<unsigned char>(text[length]) & 0xC0u) == 0x80u; ++back)
      --length;
  }
  std::string line(text.substr(0, length));
  text.remove_prefix(length + (whole && newline < text.size() ? 1 : 0));
  return line;
}

/// The name of a byte's token: "<0x0A>".
inline std::string byte_piece(int byte) {
  constexpr char const* digits = "0123456789ABCDEF";
  return {'<', '0', 'x', digits[byte / 16], digits[byte % 16], '>'};
}

/// The byte that such a name means.
inline std::string byte_of_piece(std::string_view piece) {
  for (int byte = 0; byte < 256; ++byte)
    if (byte_piece(byte) == piece) return {static_cast<char>(byte)};
  return {};
}

/// A piece with its marks turned back into spaces.
inline std::string with_spaces(std::string_view piece) {
  std::string text;
  while (!piece.empty()) {
    auto const marked = piece.substr(0, 3) == space_mark;
    text += marked ? ' ' : piece.front();
    piece.remove_prefix(marked ? 3 : 1);
  }
  return text;
}

} // namespace tessera::inline TESSERA_ABI::data::detail

#endif
