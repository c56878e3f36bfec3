/// The header of a safetensors file, and the checks of every claim it makes.
#ifndef TESSERA_IO_DETAIL_SAFETENSORS_HEADER_HPP
#define TESSERA_IO_DETAIL_SAFETENSORS_HEADER_HPP

#if defined(TESSERA_WITH_JSON)

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <tessera/io/json.hpp>
#include <tessera/io/tensor_entry.hpp>

namespace tessera::inline TESSERA_ABI::io::detail {

/// Larger headers are refused: a length that was damaged must not ask for all memory.
inline constexpr std::uint64_t largest_safetensors_header = 100'000'000;

struct safetensors_header {
  std::vector<tensor_entry> entries; ///< By their place in the data.
  std::map<std::string, std::string> metadata;
  std::size_t data_start = 0;
};

/// The checks of one file's header; every failure names the file.
class safetensors_parser {
public:
  safetensors_parser(std::span<std::byte const> file, std::string const& path, site where)
      : file_(file), path_(path), where_(where) {}

  safetensors_header parse() {
    auto const header_json = parse_json(header_text(), path_ + ": the header", where_);
    if (!header_json.is_object()) refuse("the header is not a JSON object");
    for (auto const& item : header_json.items())
      if (item.key() == "__metadata__")
        read_metadata(item.value());
      else
        header_.entries.push_back(entry_of(item.key(), item.value()));
    check_that_data_is_covered();
    return std::move(header_);
  }

private:
  template <class... Parts>
  [[noreturn]] void refuse(Parts const&... parts) const {
    throw io_error("E-io-020", where_, path_, " is not a valid safetensors file: ", parts...);
  }

  std::string_view header_text() {
    if (file_.size() < 8) refuse("it has ", file_.size(), " bytes, fewer than the 8 of the header's length");
    std::uint64_t length = 0;
    for (int byte = 7; byte >= 0; --byte)
      length = length << 8 | std::to_integer<std::uint64_t>(file_[static_cast<std::size_t>(byte)]);
    if (length > largest_safetensors_header)
      refuse("the header claims ", length, " bytes, at most ", largest_safetensors_header, " are allowed");
    if (length > file_.size() - 8)
      refuse("the header claims ", length, " bytes, the file has ", file_.size() - 8,
             " after its length: it was cut or is of another format");
    header_.data_start = 8 + static_cast<std::size_t>(length);
    return {reinterpret_cast<char const*>(file_.data()) + 8, static_cast<std::size_t>(length)};
  }

  void read_metadata(json const& value) {
    if (!value.is_object()) refuse("__metadata__ is not an object");
    for (auto const& item : value.items()) {
      if (!item.value().is_string()) refuse("__metadata__: \"", item.key(), "\" is not a string");
      header_.metadata.emplace(item.key(), item.value().get<std::string>());
    }
  }

  index_t count_of(std::string const& name, json const& number) const {
    if (!number.is_number_unsigned() || !std::in_range<index_t>(number.get<std::uint64_t>()))
      refuse("tensor ", name, ": ", brief(number), " is not a size");
    return number.get<index_t>();
  }

  tensor_entry entry_of(std::string const& name, json const& value) const {
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets"))
      refuse("tensor ", name, " is not described by dtype, shape and data_offsets");
    tensor_entry entry;
    entry.name = name;
    entry.type = type_of(name, value["dtype"]);
    auto const& shape = value["shape"];
    auto const& offsets = value["data_offsets"];
    if (!shape.is_array() || !offsets.is_array() || offsets.size() != 2)
      refuse("tensor ", name, ": shape must be a list and data_offsets a list of two");
    for (auto const& extent : shape) entry.shape.push_back(count_of(name, extent));
    entry.begin = count_of(name, offsets[0]);
    entry.end = count_of(name, offsets[1]);
    auto const bytes = entry.byte_count();
    if (bytes < 0)
      refuse("tensor ", name, ": shape ", entry.shape_text(), " of ", name_of(entry.type),
             " overflows or does not fill whole bytes");
    if (entry.end < entry.begin || entry.end - entry.begin != bytes)
      refuse("tensor ", name, ": shape ", entry.shape_text(), " of ", name_of(entry.type), " takes ", bytes,
             " bytes, its offsets are [", entry.begin, ", ", entry.end, ")");
    return entry;
  }

  dtype type_of(std::string const& name, json const& value) const {
    for (int n = 0; n < dtype_count; ++n)
      if (value == name_of(static_cast<dtype>(n))) return static_cast<dtype>(n);
    refuse("tensor ", name, " has the unknown dtype ", brief(value));
  }

  void check_that_data_is_covered() {
    std::sort(header_.entries.begin(), header_.entries.end(), [](auto const& a, auto const& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    index_t covered = 0;
    for (auto const& entry : header_.entries) {
      if (entry.begin != covered)
        refuse("tensor ", entry.name, " begins at byte ", entry.begin,
               " of the data, the one before it ends at ", covered);
      covered = entry.end;
    }
    if (auto const have = static_cast<index_t>(file_.size() - header_.data_start); have != covered)
      refuse("its tensors take ", covered, " bytes, it has ", have, have < covered ? ": it was cut" : "");
  }

  std::span<std::byte const> file_;
  std::string const& path_;
  site where_;
  safetensors_header header_;
};

inline safetensors_header parse_safetensors_header(std::span<std::byte const> file, std::string const& path,
                                                   site where) {
  return safetensors_parser(file, path, where).parse();
}

} // namespace tessera::inline TESSERA_ABI::io::detail

#endif

#endif
