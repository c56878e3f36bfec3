/// The safetensors format (github.com/huggingface/safetensors): named arrays in one file. A u64 length, a
/// JSON header (name -> dtype, shape, data_offsets), then the data, packed. This header describes and reads;
/// io/safetensors_writer.hpp writes.
///
///     io::safetensors_file file("model.safetensors");
///     file.read<float>("wte.weight", weights);         // type and size are checked
///     for (auto const& entry : file.entries()) ...      // name, type, shape
///
/// The file is mapped: opening reads the header only. Nothing of it is believed before every offset, shape
/// and size has been checked; what does not fit exactly is an io_error that names the file and the tensor.
/// Exists under TESSERA_WITH_JSON.
#ifndef TESSERA_IO_SAFETENSORS_HPP
#define TESSERA_IO_SAFETENSORS_HPP

#if defined(TESSERA_WITH_JSON)

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <tessera/io/detail/safetensors_header.hpp>
#include <tessera/io/mapped_file.hpp>
#include <tessera/io/tensor_entry.hpp>

namespace tessera::inline TESSERA_ABI::io {

class safetensors_file {
public:
  /// Maps the file and checks its header. Throws io_error.
  explicit safetensors_file(std::string path, site where = site::here())
      : file_(std::move(path), where),
        header_(detail::parse_safetensors_header(file_.bytes(), file_.path(), where)) {
    for (std::size_t n = 0; n < header_.entries.size(); ++n) numbers_.emplace(header_.entries[n].name, n);
  }

  /// All tensors, in the order of their data.
  std::vector<tensor_entry> const& entries() const noexcept { return header_.entries; }
  std::map<std::string, std::string> const& metadata() const noexcept { return header_.metadata; }
  std::string const& path() const noexcept { return file_.path(); }

  /// The entry of a name, or nullptr.
  tensor_entry const* find(std::string const& name) const noexcept {
    auto const found = numbers_.find(name);
    return found == numbers_.end() ? nullptr : &header_.entries[found->second];
  }
  /// The entry of a name. Throws io_error if there is none.
  tensor_entry const& at(std::string const& name, site where = site::here()) const {
    if (auto const* entry = find(name)) return *entry;
    throw io_error("E-io-023", where, path(), " holds no tensor ", name);
  }

  /// The bytes of a tensor, as they stand in the file.
  std::span<std::byte const> bytes(tensor_entry const& entry) const noexcept {
    return file_.bytes().subspan(header_.data_start + static_cast<std::size_t>(entry.begin),
                                 static_cast<std::size_t>(entry.end - entry.begin));
  }

  /// Copies elements [first, first + out.size()) of a tensor. Throws io_error if there is no such tensor or
  /// it holds another type, size_error if it has fewer elements.
  template <safetensors_scalar T>
  void read_part(std::string const& name, index_t first, std::span<T> out, site where = site::here()) const {
    auto const& entry = at(name, where);
    if (entry.type != dtype_of<T>())
      throw io_error("E-io-024", where, path(), ": tensor ", name, " is of type ", name_of(entry.type), ", ",
                     name_of(dtype_of<T>()), " was asked for");
    auto const wanted = static_cast<index_t>(out.size());
    if (first < 0 || first > entry.elements() - wanted)
      throw size_error("E-io-025", where, path(), ": tensor ", name, " has ", entry.elements(),
                       " elements; elements ", first, " to ", first + wanted, " were asked for");
    auto const* const from = bytes(entry).data() + first * static_cast<index_t>(sizeof(T));
    if (!out.empty()) std::memcpy(static_cast<void*>(out.data()), from, out.size_bytes());
  }

  /// Copies a whole tensor; `out` has exactly its size.
  template <safetensors_scalar T>
  void read(std::string const& name, std::span<T> out, site where = site::here()) const {
    if (auto const have = at(name, where).elements(); have != static_cast<index_t>(out.size()))
      throw size_error("E-io-025", where, path(), ": tensor ", name, " has ", have, " elements, ", out.size(),
                       " were asked for");
    read_part(name, 0, out, where);
  }

private:
  mapped_file file_;
  detail::safetensors_header header_;
  std::map<std::string, std::size_t> numbers_;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
