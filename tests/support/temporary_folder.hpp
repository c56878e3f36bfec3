/// A folder of its own for one test, gone afterwards, and helpers to look at files byte by byte.
#ifndef TESSERA_TESTS_SUPPORT_TEMPORARY_FOLDER_HPP
#define TESSERA_TESTS_SUPPORT_TEMPORARY_FOLDER_HPP

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace test {

class temporary_folder {
public:
  temporary_folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    path_ = pattern;
  }
  temporary_folder(temporary_folder const&) = delete;
  ~temporary_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  std::string const& path() const { return path_; }
  std::string operator/(std::string const& name) const { return path_ + "/" + name; }

private:
  std::string path_;
};

/// A file's bytes, read without the library.
inline std::string contents_of(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Writes bytes without the library.
inline void put(std::string const& path, std::string const& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

} // namespace test

#endif
