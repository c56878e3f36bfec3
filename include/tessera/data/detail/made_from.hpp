/// Files that are made from other files and kept: beside FILE stands FILE.json, which says what FILE was made
/// from and what its bytes sum up to. It is written last, so a FILE without it, or with another one, is
/// stale.
#ifndef TESSERA_DATA_DETAIL_MADE_FROM_HPP
#define TESSERA_DATA_DETAIL_MADE_FROM_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <string>

#include <tessera/io/checksum.hpp>
#include <tessera/io/json.hpp>

namespace tessera::inline TESSERA_ABI::data::detail {

inline io::json with_checksum_of(std::string const& path, io::json made_from, site where) {
  made_from["bytes_xxh3"] = io::hexadecimal(io::checksum_of(io::mapped_file(path, where).bytes()));
  return made_from;
}

/// Whether `path` is there, undamaged, and made from just this.
inline bool is_current(std::string const& path, io::json const& made_from, site where) {
  try {
    if (!io::file_exists(path) || !io::file_exists(path + ".json")) return false;
    return io::read_json(path + ".json", where) == with_checksum_of(path, made_from, where);
  } catch (io_error const&) {
    return false;
  }
}

/// Says of a complete `path` what it was made from.
inline void record(std::string const& path, io::json const& made_from, site where) {
  io::write_json(path + ".json", with_checksum_of(path, made_from, where), where);
}

/// What identifies a text: its length and checksum, not where it stands.
inline io::json identity_of(io::mapped_file const& text) {
  return {{"text_bytes", text.size()}, {"text_xxh3", io::hexadecimal(io::checksum_of(text.bytes()))}};
}

} // namespace tessera::inline TESSERA_ABI::data::detail

#endif
#endif
