/// JSON (RFC 8259) that is read strictly and written the same way every time: keys keep their order, numbers
/// are the shortest that read back to the same value, and a key that nobody asked for is an error that names
/// the nearest one.
///
///     auto const text = io::read_json("config.json");
///     io::json_reader read(text, "config.json");
///     auto const width = read.required<index_t>("width");
///     auto const rate = read.optional<float>("learning_rate", 3e-4f);
///     read.finish();            // config_error: unknown key "learning_rte"; did you mean "learning_rate"?
///
/// Exists under TESSERA_WITH_JSON; the one file that includes nlohmann/json.
#ifndef TESSERA_IO_JSON_HPP
#define TESSERA_IO_JSON_HPP

#if defined(TESSERA_WITH_JSON)

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <tessera/io/atomic_file.hpp>
#include <tessera/io/detail/nearest.hpp>
#include <tessera/io/mapped_file.hpp>

namespace tessera::inline TESSERA_ABI::io {

/// A JSON value whose objects keep the order in which keys were added.
using json = nlohmann::ordered_json;

/// Parses one JSON document. `source` is what messages call it. Refuses two equal keys in one object, text
/// after the end, comments, and byte-order marks. Throws io_error.
inline json parse_json(std::string_view text, std::string const& source, site where = site::here()) {
  // The parser would take a zero byte for the end, and skip a byte-order mark.
  if (text.find('\0') != std::string_view::npos || text.substr(0, 3) == "\xEF\xBB\xBF")
    throw io_error("E-io-011", where, source, " is not JSON: it holds a zero byte or a byte-order mark");
  std::vector<std::set<std::string>> keys;
  std::string twice;
  auto const watch_keys = [&](int, json::parse_event_t event, json& parsed) {
    using kind = json::parse_event_t;
    if (event == kind::object_start) keys.emplace_back();
    if (event == kind::object_end && !keys.empty()) keys.pop_back();
    if (event == kind::key && !keys.empty() && !keys.back().insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  json value;
  try {
    value = json::parse(text, watch_keys);
  } catch (json::exception const& cause) {
    throw io_error("E-io-011", where, source, " is not JSON: ", cause.what());
  }
  if (!twice.empty())
    throw io_error("E-io-012", where, source, ": the key \"", twice, "\" stands there twice");
  return value;
}

/// Reads a JSON file. Throws io_error.
inline json read_json(std::string const& path, site where = site::here()) {
  return parse_json(mapped_file(path, where).text(), path, where);
}

/// The text of a value, indented for people. Throws config_error for strings that are not UTF-8 and for
/// numbers that JSON does not have.
inline std::string text_of_json(json const& value, site where = site::here()) {
  try {
    return value.dump(2) + "\n";
  } catch (json::exception const& cause) {
    throw config_error("E-io-013", where, "cannot be written as JSON: ", cause.what());
  }
}

/// Writes a JSON file: complete, or not at all.
inline void write_json(std::string const& path, json const& value, site where = site::here()) {
  write_file(path, text_of_json(value, where), where);
}

namespace detail {

/// A value for a message: short, whatever came.
inline std::string brief(json const& value) {
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";
  auto text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

} // namespace detail

/// What `json_reader` can read: booleans, integers (range-checked), floating-point numbers, strings, and
/// lists of these.
template <class T>
concept json_value = std::same_as<T, bool> || std::integral<T> || std::floating_point<T> ||
    std::same_as<T, std::string> || requires {
  typename T::value_type;
  requires std::same_as<T, std::vector<typename T::value_type>>;
};

/// Reads one JSON object key by key and remembers what was asked for. Errors name the full path of the key
/// ("config.json: optimizer.beta1"). The object outlives the reader.
class json_reader {
public:
  json_reader(json const& object, std::string name, site where = site::here())
      : object_(&object), name_(std::move(name)) {
    if (!object.is_object())
      throw config_error("E-io-014", where, name_, " must be a JSON object { ... }, it is ",
                         object.type_name());
  }

  bool has(std::string const& key) {
    known_.insert(key);
    return object_->contains(key);
  }

  /// Throws config_error if the key is missing or holds another type.
  template <json_value T>
  T required(std::string const& key, site where = site::here()) {
    if (!has(key)) {
      auto const meant = detail::nearest(key, keys_not_known());
      throw config_error("E-io-015", where, name_, " lacks the key \"", key, "\"",
                         meant.empty() ? "" : "; it has \"" + meant + "\"");
    }
    return convert<T>((*object_)[key], path_of(key), where);
  }

  /// The value, or `otherwise` where the key is missing.
  template <json_value T>
  T optional(std::string const& key, T otherwise, site where = site::here()) {
    return has(key) ? convert<T>((*object_)[key], path_of(key), where) : otherwise;
  }

  /// A string that must be one of `names`; gives its place among them.
  std::size_t choice(std::string const& key, std::vector<std::string> const& names, std::size_t otherwise,
                     site where = site::here()) {
    if (!has(key)) return otherwise;
    auto const value = required<std::string>(key, where);
    for (std::size_t n = 0; n < names.size(); ++n)
      if (names[n] == value) return n;
    std::string all;
    for (auto const& name : names) all += (all.empty() ? "" : ", ") + name;
    throw config_error("E-io-017", where, path_of(key), " is \"", value, "\"; it can be: ", all);
  }

  /// A reader of the object under `key`, which must be there.
  json_reader section(std::string const& key, site where = site::here()) {
    if (!has(key)) throw config_error("E-io-015", where, name_, " lacks the section \"", key, "\"");
    return {(*object_)[key], path_of(key), where};
  }

  /// Refuses the object if it has a key that was never asked for.
  void finish(site where = site::here()) const {
    for (auto const& item : object_->items()) {
      if (known_.count(item.key()) != 0) continue;
      auto const meant = detail::nearest(item.key(), {known_.begin(), known_.end()});
      throw config_error("E-io-016", where, name_, ": unknown key \"", item.key(), "\"",
                         meant.empty() ? "" : "; did you mean \"" + meant + "\"?");
    }
  }

private:
  std::string path_of(std::string const& key) const {
    return name_ + (name_.find(": ") == std::string::npos ? ": " : ".") + key;
  }
  std::vector<std::string> keys_not_known() const {
    std::vector<std::string> found;
    for (auto const& item : object_->items())
      if (known_.count(item.key()) == 0) found.push_back(item.key());
    return found;
  }

  template <json_value T>
  static T convert(json const& value, std::string const& path, site where) {
    auto const refuse = [&](auto const&... expected) {
      throw config_error("E-io-017", where, path, " must be ", expected..., ", it is ", detail::brief(value));
    };
    if constexpr (std::same_as<T, bool>) {
      if (!value.is_boolean()) refuse("true or false");
      return value.template get<bool>();
    } else if constexpr (std::integral<T>) {
      using limits = std::numeric_limits<T>;
      auto const fits = value.is_number_unsigned() ? std::in_range<T>(value.template get<std::uint64_t>())
                                                   : value.is_number_integer() &&
                                                         std::in_range<T>(value.template get<std::int64_t>());
      if (!fits) refuse("an integer from ", (limits::min)(), " to ", (limits::max)());
      return value.template get<T>();
    } else if constexpr (std::floating_point<T>) {
      if (!value.is_number()) refuse("a number");
      auto const number = value.template get<T>();
      if (!std::isfinite(number)) refuse("a number within the range of its type");
      return number;
    } else if constexpr (std::same_as<T, std::string>) {
      if (!value.is_string()) refuse("a string");
      return value.template get<std::string>();
    } else {
      if (!value.is_array()) refuse("a list");
      T list;
      for (auto const& element : value)
        list.push_back(
            convert<typename T::value_type>(element, path + "[" + std::to_string(list.size()) + "]", where));
      return list;
    }
  }

  json const* object_;
  std::string name_;
  std::set<std::string> known_;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
