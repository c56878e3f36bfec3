/// Tokens that stand somewhere else, in two or four bytes each: a mapped file or a vector. Trivially
/// copyable; the memory outlives it.
///
///     data::token_view tokens = vector_of_int32;      // or token_file::tokens()
///     tokens.copy(first, out, vocabulary_size);       // size_error for a token out of range
#ifndef TESSERA_DATA_TOKEN_VIEW_HPP
#define TESSERA_DATA_TOKEN_VIEW_HPP

#include <cstdint>
#include <span>
#include <vector>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::data {

/// Bytes of one stored token.
enum class token_width { two = 2, four = 4 };

class token_view {
public:
  token_view() = default;
  token_view(std::span<std::uint16_t const> tokens) noexcept // NOLINT: meant to be implicit
      : data_(tokens.data()), size_(static_cast<index_t>(tokens.size())), width_(token_width::two) {}
  token_view(std::span<std::uint32_t const> tokens) noexcept // NOLINT
      : data_(tokens.data()), size_(static_cast<index_t>(tokens.size())) {}
  token_view(std::span<std::int32_t const> tokens) noexcept // NOLINT
      : data_(tokens.data()), size_(static_cast<index_t>(tokens.size())) {}
  token_view(std::vector<std::int32_t> const& tokens) noexcept // NOLINT
      : token_view(std::span<std::int32_t const>(tokens)) {}
  token_view(std::vector<std::int32_t>&&) = delete; // it would be gone before the view

  index_t size() const noexcept { return size_; }
  token_width width() const noexcept { return width_; }

  /// The number stored at `at`; what was a negative one is beyond every vocabulary.
  std::uint32_t operator[](index_t at) const noexcept {
    return width_ == token_width::two ? static_cast<std::uint16_t const*>(data_)[at]
                                      : static_cast<std::uint32_t const*>(data_)[at];
  }

  /// Tokens [first, first + count).
  token_view slice(index_t first, index_t count, site where = site::here()) const {
    must_hold(first, count, where);
    auto part = *this;
    part.data_ = static_cast<std::byte const*>(data_) + first * static_cast<index_t>(width_);
    part.size_ = count;
    return part;
  }

  /// Copies tokens [first, first + out.size()). Throws size_error for one outside [0, vocabulary_size).
  void copy(index_t first, std::span<std::int32_t> out, index_t vocabulary_size,
            site where = site::here()) const {
    auto const count = static_cast<index_t>(out.size());
    must_hold(first, count, where);
    std::uint32_t largest = 0;
    for (index_t n = 0; n < count; ++n) {
      auto const token = (*this)[first + n];
      largest = token > largest ? token : largest;
      out[static_cast<std::size_t>(n)] = static_cast<std::int32_t>(token);
    }
    if (count > 0 && largest >= vocabulary_size) refuse_first_beyond(first, count, vocabulary_size, where);
  }

  /// Looks at all tokens. Throws size_error for the first outside [0, vocabulary_size). Reads everything
  /// once.
  void check(index_t vocabulary_size, site where = site::here()) const {
    std::uint32_t largest = 0;
    for (index_t n = 0; n < size_; ++n) largest = (*this)[n] > largest ? (*this)[n] : largest;
    if (size_ > 0 && largest >= vocabulary_size) refuse_first_beyond(0, size_, vocabulary_size, where);
  }

private:
  void must_hold(index_t first, index_t count, site where) const {
    if (first < 0 || count < 0 || first > size_ - count)
      throw size_error("E-data-002", where, "tokens ", first, " to ", first + count,
                       " were asked for, there are ", size_);
  }
  [[noreturn]] void refuse_first_beyond(index_t first, index_t count, index_t vocabulary_size,
                                        site where) const {
    auto at = first;
    while (at < first + count - 1 && (*this)[at] < vocabulary_size) ++at;
    throw size_error("E-data-003", where, "token ", at, " is ", (*this)[at], ", the vocabulary has ",
                     vocabulary_size, ": the data was made with another tokenizer, or is damaged");
  }

  void const* data_ = nullptr;
  index_t size_ = 0;
  token_width width_ = token_width::four;
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
