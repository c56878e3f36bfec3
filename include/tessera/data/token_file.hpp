/// Token shards in the layout of llm.c (github.com/karpathy/llm.c): a header of 256 int32 (magic, version,
/// token count, zeros), then the tokens. Magic 20240520, version 1: two bytes a token; magic 20240801,
/// version 7: four.
///
///     data::token_file file("tinyshakespeare_train.bin");
///     file.tokens();                                     // a token_view on the mapped file
///
///     data::token_writer writer("mine.bin", data::token_width::two);
///     writer.append(tokens);
///     writer.commit();                                   // complete, or not there
///
/// Reading maps: cost is a page read when a token on it is touched.
#ifndef TESSERA_DATA_TOKEN_FILE_HPP
#define TESSERA_DATA_TOKEN_FILE_HPP

#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <tessera/data/token_view.hpp>
#include <tessera/io/atomic_file.hpp>
#include <tessera/io/mapped_file.hpp>

namespace tessera::inline TESSERA_ABI::data {

static_assert(std::endian::native == std::endian::little, "token shards are little-endian");

namespace detail {

inline constexpr std::size_t token_header_words = 256;
inline constexpr std::size_t token_header_bytes = 4 * token_header_words;

constexpr std::int32_t token_magic(token_width width) noexcept {
  return width == token_width::two ? 20240520 : 20240801;
}
constexpr std::int32_t token_version(token_width width) noexcept {
  return width == token_width::two ? 1 : 7;
}

} // namespace detail

class token_file {
public:
  /// Throws io_error unless the file is exactly a header and the tokens it claims.
  explicit token_file(std::string path, site where = site::here()) : file_(std::move(path), where) {
    auto const bytes = file_.bytes();
    if (bytes.size() < detail::token_header_bytes)
      refuse(where, "it has ", bytes.size(), " bytes, the header alone has ", detail::token_header_bytes);
    std::int32_t header[detail::token_header_words];
    std::memcpy(header, bytes.data(), sizeof header);
    for (auto width : {token_width::two, token_width::four})
      if (header[0] == detail::token_magic(width)) {
        if (header[1] != detail::token_version(width))
          refuse(where, "it is of version ", header[1], ", known is ", detail::token_version(width));
        width_ = width;
      }
    if (header[0] != detail::token_magic(width_))
      refuse(where, "it begins with ", header[0], " in place of 20240520 or 20240801");
    for (std::size_t word = 3; word < detail::token_header_words; ++word)
      if (header[word] != 0) refuse(where, "word ", word, " of its header is ", header[word], ", not 0");
    auto const have = file_.size() - static_cast<index_t>(detail::token_header_bytes);
    if (header[2] < 0 || have != index_t{header[2]} * static_cast<index_t>(width_))
      refuse(where, "its header claims ", header[2], " tokens of ", static_cast<index_t>(width_), " bytes, ",
             have, " bytes follow: it was cut, or added to");
    size_ = header[2];
  }

  index_t size() const noexcept { return size_; }
  std::string const& path() const noexcept { return file_.path(); }

  token_view tokens() const noexcept {
    auto const* const first = file_.bytes().data() + detail::token_header_bytes;
    auto const count = static_cast<std::size_t>(size_);
    if (width_ == token_width::two) return std::span(reinterpret_cast<std::uint16_t const*>(first), count);
    return std::span(reinterpret_cast<std::uint32_t const*>(first), count);
  }

private:
  template <class... Parts>
  [[noreturn]] void refuse(site where, Parts const&... parts) const {
    throw io_error("E-data-004", where, file_.path(), " is not a token shard: ", parts...);
  }

  io::mapped_file file_;
  token_width width_ = token_width::two;
  index_t size_ = 0;
};

class token_writer {
public:
  token_writer(std::string path, token_width width, site where = site::here())
      : file_(std::move(path), where), width_(width) {
    write_header(where);
  }

  /// Throws size_error for a token that does not fit the width, or more than 2^31 - 1 tokens.
  void append(std::span<std::int32_t const> tokens, site where = site::here()) {
    if (static_cast<index_t>(tokens.size()) > (std::numeric_limits<std::int32_t>::max)() - count_)
      throw size_error("E-data-005", where, file_.path(), ": a shard holds at most 2^31 - 1 tokens");
    auto const largest = width_ == token_width::two ? 0xffff : (std::numeric_limits<std::int32_t>::max)();
    for (std::size_t n = 0; n < tokens.size(); ++n)
      if (tokens[n] < 0 || tokens[n] > largest)
        throw size_error("E-data-005", where, file_.path(), ": token ", count_ + static_cast<index_t>(n),
                         " is ", tokens[n], ", it must be in [0, ", largest, "]");
    if (width_ == token_width::four) {
      file_.write(std::as_bytes(tokens), where);
    } else {
      std::vector<std::uint16_t> const narrowed(tokens.begin(), tokens.end());
      file_.write(std::as_bytes(std::span(narrowed)), where);
    }
    count_ += static_cast<index_t>(tokens.size());
  }

  /// Completes the header and puts the file in place.
  void commit(site where = site::here()) {
    write_header(where);
    file_.commit(where);
  }

  index_t size() const noexcept { return count_; }

private:
  void write_header(site where) {
    std::int32_t const header[detail::token_header_words] = {
        detail::token_magic(width_), detail::token_version(width_), narrow<std::int32_t>(count_)};
    auto const bytes = std::as_bytes(std::span(header));
    file_.bytes() == 0 ? file_.write(bytes, where) : file_.rewrite(0, bytes, where);
  }

  io::atomic_file file_;
  token_width width_;
  index_t count_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
