/// The manifest of a checkpoint: which files belong to it, how large they are, and what their bytes, and
/// those of each tensor in them, sum up to. It is the commit record: written last, and itself protected by a
/// checksum, so that whoever reads it knows that everything else was complete.
///
///     auto const record = io::read_manifest("step-00000100/manifest.json");
///     io::check_files(record, "step-00000100");     // io_error that names the damaged file and tensor
///
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH. Checking reads every byte once.
#ifndef TESSERA_IO_MANIFEST_HPP
#define TESSERA_IO_MANIFEST_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <string>
#include <vector>

#include <tessera/io/checksum.hpp>
#include <tessera/io/json.hpp>
#include <tessera/io/tensor_entry.hpp>

namespace tessera::inline TESSERA_ABI::io {

struct file_record {
  std::string name;
  index_t bytes = 0;
  std::uint64_t checksum = 0;
  std::vector<tensor_record> tensors; ///< Those whose checksums are known; they lie within the file.
  friend bool operator==(file_record const&, file_record const&) = default;
};

struct manifest {
  index_t step = 0;
  std::vector<file_record> files;
  friend bool operator==(manifest const&, manifest const&) = default;
};

/// The manifest as text; the same manifest gives the same bytes.
inline std::string manifest_text(manifest const& record, site where = site::here()) {
  json files = json::array();
  for (auto const& file : record.files) {
    json tensors = json::array();
    for (auto const& tensor : file.tensors)
      tensors.push_back({{"name", tensor.name},
                         {"offset", tensor.offset},
                         {"bytes", tensor.bytes},
                         {"xxh3", hexadecimal(tensor.checksum)}});
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"xxh3", hexadecimal(file.checksum)},
                     {"tensors", std::move(tensors)}});
  }
  json whole{{"format", "tessera checkpoint 1"}, {"step", record.step}, {"files", std::move(files)}};
  auto const checksum = checksum_of(text_of_json(whole, where));
  whole["xxh3"] = hexadecimal(checksum);
  return text_of_json(whole, where);
}

/// Reads a manifest. Throws io_error if it is missing, cut or altered by as much as one bit.
inline manifest read_manifest(std::string const& path, site where = site::here()) {
  mapped_file const file(path, where);
  manifest record;
  try {
    auto const whole = parse_json(file.text(), path, where);
    record.step = whole.at("step").get<index_t>();
    auto const number = [](json const& digits) {
      return static_cast<std::uint64_t>(std::stoull(digits.get<std::string>(), nullptr, 16));
    };
    for (auto const& entry : whole.at("files")) {
      file_record known{entry.at("name").get<std::string>(),
                        entry.at("bytes").get<index_t>(),
                        number(entry.at("xxh3")),
                        {}};
      for (auto const& tensor : entry.at("tensors"))
        known.tensors.push_back({tensor.at("name").get<std::string>(), tensor.at("offset").get<index_t>(),
                                 tensor.at("bytes").get<index_t>(), number(tensor.at("xxh3"))});
      record.files.push_back(std::move(known));
    }
  } catch (error const&) {
    throw;
  } catch (std::exception const& cause) {
    throw io_error("E-io-030", where, path, " is not a manifest: ", cause.what());
  }
  // The text follows from the content, checksum included: any other text was not written by us.
  if (manifest_text(record, where) != file.text())
    throw io_error("E-io-030", where, path,
                   " was altered: its content and its checksum do not belong together");
  return record;
}

namespace detail {

/// Which tensors of a damaged file are hit, for the message.
inline std::string damaged_tensors(file_record const& known, std::span<std::byte const> bytes) {
  std::string names;
  int others = 0;
  for (auto const& tensor : known.tensors) {
    auto const part =
        bytes.subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.bytes));
    if (checksum_of(part) == tensor.checksum) continue;
    if (names.empty())
      names = "tensor " + tensor.name;
    else
      ++others;
  }
  if (names.empty()) return "its header, or what lies between tensors";
  return others == 0 ? names : tessera::text_of(names, " and ", others, " more");
}

} // namespace detail

/// Compares one file with its record: there, and of the right size. Throws io_error.
inline void check_size(file_record const& known, std::string const& folder, site where = site::here()) {
  auto const path = folder + "/" + known.name;
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    throw io_error("E-io-031", where, "the checkpoint ", folder, " lacks its file ", known.name);
  if (status.st_size != known.bytes)
    throw io_error("E-io-032", where, path, " has ", status.st_size, " bytes, its manifest says ",
                   known.bytes, ": it was ", status.st_size < known.bytes ? "cut" : "altered");
}

/// Compares one file with its record, size and bytes. Throws io_error.
inline void check_file(file_record const& known, std::string const& folder, site where = site::here()) {
  check_size(known, folder, where);
  if (known.bytes == 0) return;
  auto const path = folder + "/" + known.name;
  mapped_file const file(path, where);
  if (checksum_of(file.bytes()) != known.checksum)
    throw io_error("E-io-033", where, path, " was altered: the checksum of its bytes is ",
                   hexadecimal(checksum_of(file.bytes())), ", its manifest says ",
                   hexadecimal(known.checksum), "; damaged: ", detail::damaged_tensors(known, file.bytes()));
}

/// Compares every file of a manifest. Throws io_error for the first that differs.
inline void check_files(manifest const& record, std::string const& folder, site where = site::here()) {
  for (auto const& file : record.files) check_file(file, folder, where);
}

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
