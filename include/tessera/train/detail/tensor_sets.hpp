/// Compares the tensors that a file holds with those that a model has, as exact sets.
#ifndef TESSERA_TRAIN_DETAIL_TENSOR_SETS_HPP
#define TESSERA_TRAIN_DETAIL_TENSOR_SETS_HPP

#if defined(TESSERA_WITH_JSON)

#include <map>
#include <string>
#include <vector>

#include <tessera/io/safetensors.hpp>

namespace tessera::inline TESSERA_ABI::train::detail {

struct tensor_sets {
  std::vector<std::string> missing;    ///< The model has them, the file does not.
  std::vector<std::string> unexpected; ///< The file has them, the model does not.
  std::vector<std::string> misshapen;  ///< Both have them, in another shape or type: "name: F32 [2] ..."

  bool equal() const noexcept { return missing.empty() && unexpected.empty() && misshapen.empty(); }
};

inline tensor_sets compare_tensors(std::vector<io::tensor_entry> const& wanted,
                                   std::vector<io::tensor_entry> const& held) {
  std::map<std::string, io::tensor_entry const*> left;
  for (auto const& entry : held) left.emplace(entry.name, &entry);
  tensor_sets sets;
  for (auto const& entry : wanted) {
    auto const found = left.find(entry.name);
    if (found == left.end()) {
      sets.missing.push_back(entry.name);
      continue;
    }
    auto const& other = *found->second;
    if (other.type != entry.type || other.shape != entry.shape)
      sets.misshapen.push_back(tessera::text_of(entry.name, " (", io::name_of(other.type), " ",
                                                other.shape_text(), " in the file, ", io::name_of(entry.type),
                                                " ", entry.shape_text(), " in the model)"));
    left.erase(found);
  }
  for (auto const& [name, entry] : left) sets.unexpected.push_back(name);
  return sets;
}

/// Throws io_error (E-train-060) that lists all three sets, unless they are empty.
inline void require_equal_sets(tensor_sets const& sets, std::string const& path, site where) {
  if (sets.equal()) return;
  std::string text;
  auto const list = [&](char const* title, std::vector<std::string> const& names) {
    if (names.empty()) return;
    text += tessera::text_of("\n  ", title, " (", names.size(), "):");
    for (auto const& name : names) text += "\n    " + name;
  };
  list("missing", sets.missing);
  list("unexpected", sets.unexpected);
  list("of another shape or type", sets.misshapen);
  throw io_error("E-train-060", where, path, " does not hold the tensors of this model:", text,
                 "\nit was made with other model settings, or by another program");
}

} // namespace tessera::inline TESSERA_ABI::train::detail

#endif
#endif
