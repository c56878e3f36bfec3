/// Writes a safetensors file tensor by tensor: the header is known in advance, so that no tensor needs to be
/// held in memory beside the others, and a tensor may come in pieces (the shards of several ranks).
///
///     io::safetensors_writer file("model.safetensors",
///                                 {{"w", io::dtype::f32, {2, 3}}, {"b", io::dtype::f32, {3}}});
///     for (auto const& entry : file.entries())       // the order of the data: by type, then by name
///       file.write(entry.name, bytes_of(entry.name));
///     auto const records = file.commit();            // name, place and checksum of every tensor
///
/// The file appears under its name, complete and on the disk, at `commit`; before, or after a failure,
/// whatever stood there is untouched. The same content gives the same bytes. Cost: the bytes once.
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_IO_SAFETENSORS_WRITER_HPP
#define TESSERA_IO_SAFETENSORS_WRITER_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <map>
#include <string>
#include <vector>

#include <tessera/io/atomic_file.hpp>
#include <tessera/io/checksum.hpp>
#include <tessera/io/safetensors.hpp>

namespace tessera::inline TESSERA_ABI::io {

class safetensors_writer {
public:
  /// Writes the header. `begin` and `end` of the entries are set here. Throws config_error for two equal
  /// names or a name that is not UTF-8, size_error for an impossible shape, io_error.
  safetensors_writer(std::string path, std::vector<tensor_entry> entries,
                     std::map<std::string, std::string> const& metadata = {}, site where = site::here())
      : entries_(std::move(entries)), file_(std::move(path), where) {
    place_entries(where);
    auto const text = header_text(metadata, where);
    std::byte length[8];
    for (std::size_t byte = 0; byte < 8; ++byte)
      length[byte] = static_cast<std::byte>(text.size() >> (8 * byte) & 255u);
    file_.write(length, where);
    file_.write(text, where);
  }

  /// All tensors in the order in which they are to be written.
  std::vector<tensor_entry> const& entries() const noexcept { return entries_; }

  /// Appends bytes to the tensor `name`: the one begun before, or, when that one is complete, the next.
  /// Throws config_error for any other, size_error for more bytes than its shape has.
  void write(std::string const& name, std::span<std::byte const> bytes, site where = site::here()) {
    finish_complete_ones(name);
    if (at_ == entries_.size() || entries_[at_].name != name)
      throw config_error("E-io-028", where, file_.path(), ": tensor ", name, " was written where ",
                         at_ == entries_.size() ? "nothing more" : entries_[at_].name, " belongs");
    auto const left = entries_[at_].end - entries_[at_].begin - written_;
    if (static_cast<index_t>(bytes.size()) > left)
      throw size_error("E-io-029", where, file_.path(), ": tensor ", name, " was given ", bytes.size(),
                       " bytes more, ", left, " are left of its shape ", entries_[at_].shape_text());
    file_.write(bytes, where);
    stream_.update(bytes);
    written_ += static_cast<index_t>(bytes.size());
  }

  /// Ends the file and puts it in place. Throws size_error, naming the tensor, if bytes are missing.
  std::vector<tensor_record> commit(site where = site::here()) {
    finish_complete_ones({});
    if (at_ != entries_.size())
      throw size_error("E-io-029", where, file_.path(), ": tensor ", entries_[at_].name, " has ", written_,
                       " of its ", entries_[at_].end - entries_[at_].begin, " bytes");
    file_.commit(where);
    return std::move(records_);
  }

private:
  /// Larger types first: every tensor is aligned to its type if the start of the data is.
  void place_entries(site where) {
    std::sort(entries_.begin(), entries_.end(), [](auto const& a, auto const& b) {
      return a.type != b.type ? a.type > b.type : a.name < b.name;
    });
    std::set<std::string> names{"__metadata__"};
    index_t at = 0;
    for (auto& entry : entries_) {
      if (!names.insert(entry.name).second)
        throw config_error("E-io-026", where, file_.path(), ": the name ", entry.name,
                           " is reserved, or two tensors have it");
      auto const bytes = entry.byte_count();
      if (bytes < 0 || bytes > (std::numeric_limits<index_t>::max)() - at)
        throw size_error("E-io-027", where, file_.path(), ": tensor ", entry.name, ": shape ",
                         entry.shape_text(), " of ", name_of(entry.type), " is impossible");
      entry.begin = at;
      entry.end = at += bytes;
    }
  }

  std::string header_text(std::map<std::string, std::string> const& metadata, site where) {
    auto header = json::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    for (auto const& entry : entries_) {
      auto& described = header[entry.name];
      described["dtype"] = name_of(entry.type);
      described["shape"] = entry.shape;
      described["data_offsets"] = {entry.begin, entry.end};
    }
    std::string text;
    try {
      text = header.dump();
    } catch (json::exception const& cause) {
      throw config_error("E-io-013", where, file_.path(),
                         ": a name cannot be written as JSON: ", cause.what());
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    if (text.size() > detail::largest_safetensors_header)
      throw size_error("E-io-027", where, file_.path(), ": a header of ", text.size(), " bytes is too large");
    data_start_ = 8 + static_cast<index_t>(text.size());
    return text;
  }

  /// Records the tensors that have all their bytes, up to the one called `wanted`.
  void finish_complete_ones(std::string const& wanted) {
    while (at_ < entries_.size() && written_ == entries_[at_].end - entries_[at_].begin &&
           entries_[at_].name != wanted) {
      auto const& entry = entries_[at_++];
      records_.push_back({entry.name, data_start_ + entry.begin, entry.end - entry.begin, stream_.value()});
      stream_.reset();
      written_ = 0;
    }
  }

  std::vector<tensor_entry> entries_;
  std::vector<tensor_record> records_;
  atomic_file file_;
  checksum_stream stream_;
  std::size_t at_ = 0;     ///< The tensor being written.
  index_t written_ = 0;    ///< Its bytes so far.
  index_t data_start_ = 0; ///< Where the data begins in the file.
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
