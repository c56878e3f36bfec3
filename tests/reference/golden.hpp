/// Reads the files that make_references.py wrote.
///
///     golden file("gpt2.bin");
///     file.floats("gradient.wte.weight");   // in the order of the file, widened to double
#ifndef TESSERA_TESTS_REFERENCE_GOLDEN_HPP
#define TESSERA_TESTS_REFERENCE_GOLDEN_HPP

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

class golden {
public:
  struct tensor {
    std::vector<std::int64_t> shape;
    std::vector<double> values;
  };

  explicit golden(std::string const& name) {
    // Beside this header, wherever the test runs.
    std::string folder = __FILE__;
    folder.erase(folder.find_last_of('/') + 1);
    std::ifstream file(folder + name, std::ios::binary);
    char magic[8] = {};
    if (!file.read(magic, 8) || std::memcmp(magic, "TSGOLD1\n", 8) != 0)
      throw std::runtime_error(folder + name + " is not a golden file; run make_references.py");
    std::uint32_t length = 0;
    while (file.read(reinterpret_cast<char*>(&length), 4)) {
      std::string key(length, ' ');
      file.read(key.data(), length);
      auto const kind = read<std::uint32_t>(file), rank = read<std::uint32_t>(file);
      tensor t;
      std::int64_t count = 1;
      for (std::uint32_t d = 0; d < rank; ++d) {
        t.shape.push_back(read<std::int64_t>(file));
        count *= t.shape.back();
      }
      t.values.resize(static_cast<std::size_t>(count));
      for (auto& value : t.values)
        value = kind == 0   ? static_cast<double>(read<float>(file))
                : kind == 1 ? static_cast<double>(read<std::int32_t>(file))
                            : read<double>(file);
      if (!file) throw std::runtime_error(folder + name + " is cut");
      tensors_[key] = t;
    }
  }

  tensor const& operator[](std::string const& name) const {
    auto const found = tensors_.find(name);
    if (found == tensors_.end()) throw std::runtime_error("no tensor " + name + " in the golden file");
    return found->second;
  }
  std::vector<std::int32_t> integers(std::string const& name) const {
    auto const& values = (*this)[name].values;
    return {values.begin(), values.end()};
  }

private:
  template <class V>
  static V read(std::ifstream& file) {
    V value{};
    file.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }

  std::map<std::string, tensor> tensors_;
};

#endif
