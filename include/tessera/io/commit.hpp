/// Checkpoints as folders that are either complete or not there. Files are written into a hidden folder; the
/// manifest goes last; one rename makes `step-00000100/` appear. A run that is killed at any moment leaves
/// the checkpoints before it as they were.
///
///     io::recover_commits("run/checkpoints");                   // once, at the start of a program
///     io::commit_writer next("run/checkpoints", 100);
///     io::safetensors_writer weights(next.path("model.safetensors"), entries);
///     ...                                                        // any files, by any rank
///     next.add("model.safetensors", weights.commit());           // checksums of its tensors
///     next.commit();
///     io::prune_commits("run/checkpoints", 3);                   // keep the newest three
///     auto const latest = io::latest_commit("run/checkpoints");  // the newest whose every byte is right
///
/// One process (rank 0) makes, commits and prunes; others only write files into `pending_folder`.
/// Cost of a commit: the bytes read back once for their checksums, one sync a file and three of folders.
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_IO_COMMIT_HPP
#define TESSERA_IO_COMMIT_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <tessera/io/detail/step_names.hpp>
#include <tessera/io/folder.hpp>
#include <tessera/io/manifest.hpp>

namespace tessera::inline TESSERA_ABI::io {

/// A checkpoint that was committed.
struct committed {
  index_t step = 0;
  std::string path; ///< Its folder.
};

/// Where the files of step `step` are written before they are committed.
inline std::string pending_folder(std::string const& folder, index_t step) {
  return folder + "/." + detail::step_name(step) + ".pending";
}

/// A checkpoint being written. Unless it is committed, nothing of it remains.
class commit_writer {
public:
  /// Makes the hidden folder, and `folder` if need be. Throws size_error for a negative step, io_error.
  commit_writer(std::string folder, index_t step, site where = site::here())
      : folder_(std::move(folder)), step_(step), pending_(pending_folder(folder_, step)) {
    if (step < 0) throw size_error("E-io-034", where, "a checkpoint of step ", step, " was asked for");
    make_folders(folder_, where);
    remove_all(pending_, where); // a killed program's
    make_folders(pending_, where);
  }
  commit_writer(commit_writer&& other) noexcept
      : folder_(std::move(other.folder_)), step_(other.step_), pending_(std::exchange(other.pending_, {})),
        tensors_(std::move(other.tensors_)) {}
  commit_writer& operator=(commit_writer&&) = delete;
  ~commit_writer() {
    try {
      if (!pending_.empty()) remove_all(pending_);
    } catch (error const&) { // recover_commits removes it next time
    }
  }

  /// Where to write the file `name` of this checkpoint.
  std::string path(std::string const& name) const { return pending_ + "/" + name; }

  /// Adds the checksums of the tensors of a file to the manifest.
  void add(std::string name, std::vector<tensor_record> tensors) {
    tensors_.push_back({std::move(name), 0, 0, std::move(tensors)});
  }

  /// Makes the checkpoint appear, complete and on the disk, replacing one of the same step.
  committed commit(site where = site::here()) {
    manifest record{step_, {}};
    for (auto const& name : names_in(pending_, where)) record.files.push_back(record_of(name, where));
    for (auto& known : tensors_) add_tensors(record, known, where);
    write_file(path("manifest.json"), manifest_text(record, where), where);
    auto const target = folder_ + "/" + detail::step_name(step_);
    detail::put_in_place(pending_, target, where);
    detail::sync_path(folder_, where);
    if (folder_exists(pending_)) remove_all(pending_, where); // what was replaced
    pending_.clear();
    return {step_, target};
  }

private:
  file_record record_of(std::string const& name, site where) const {
    if (!file_exists(path(name)) || name.front() == '.' || name == "manifest.json")
      throw config_error("E-io-035", where, "the checkpoint of step ", step_, " cannot hold ", path(name),
                         ": a folder, a file that is still being written, or a name that is reserved");
    detail::sync_path(path(name), where);
    struct stat status {};
    if (::stat(path(name).c_str(), &status) != 0) detail::fail("E-io-001", where, "read", path(name), errno);
    if (status.st_size == 0) return {name, 0, checksum_of(std::string_view{}), {}};
    mapped_file const file(path(name), where);
    return {name, file.size(), checksum_of(file.bytes()), {}};
  }

  void add_tensors(manifest& record, file_record& known, site where) const {
    for (auto& file : record.files) {
      if (file.name != known.name) continue;
      for (auto const& tensor : known.tensors)
        if (tensor.offset < 0 || tensor.bytes < 0 || tensor.offset > file.bytes - tensor.bytes)
          throw size_error("E-io-038", where, "tensor ", tensor.name, " lies outside ", path(file.name));
      file.tensors = known.tensors;
      return;
    }
    throw config_error("E-io-036", where, "tensors of ", known.name, " were added to the checkpoint of step ",
                       step_, ", which holds no such file");
  }

  std::string folder_;
  index_t step_;
  std::string pending_;
  std::vector<file_record> tensors_;
};

namespace detail {

/// All folders that bear the name of a checkpoint, by step, oldest first.
inline std::vector<committed> named_as_commits(std::string const& folder, site where) {
  std::vector<committed> found;
  if (!folder_exists(folder)) return found;
  for (auto const& name : names_in(folder, where))
    if (auto const step = step_of(name); step >= 0 && folder_exists(folder + "/" + name))
      found.push_back({step, folder + "/" + name});
  std::sort(found.begin(), found.end(), [](auto const& a, auto const& b) { return a.step < b.step; });
  return found;
}

} // namespace detail

/// All checkpoints of a folder by step, oldest first; none if there is no such folder. Only their names and
/// the presence of a manifest are looked at.
inline std::vector<committed> commits_in(std::string const& folder, site where = site::here()) {
  auto found = detail::named_as_commits(folder, where);
  std::erase_if(found, [](auto const& c) { return !file_exists(c.path + "/manifest.json"); });
  return found;
}

/// Reads a checkpoint's manifest, which must be of its step. Throws io_error.
inline manifest manifest_of(committed const& checkpoint, site where = site::here()) {
  auto record = read_manifest(checkpoint.path + "/manifest.json", where);
  if (record.step != checkpoint.step)
    throw io_error("E-io-030", where, checkpoint.path, " holds the manifest of step ", record.step);
  return record;
}

/// Checks every byte of a checkpoint. Throws io_error that names the file, and the tensor, that was cut or
/// altered.
inline void verify(committed const& checkpoint, site where = site::here()) {
  check_files(manifest_of(checkpoint, where), checkpoint.path, where);
}

namespace detail {

/// Whether a checkpoint is whole: every byte, or only its manifest and the sizes of its files.
inline bool holds(committed const& checkpoint, bool every_byte, site where) {
  try {
    auto const record = manifest_of(checkpoint, where);
    for (auto const& file : record.files)
      every_byte ? check_file(file, checkpoint.path, where) : check_size(file, checkpoint.path, where);
    return true;
  } catch (io_error const&) {
    return false;
  }
}

} // namespace detail

struct latest_found {
  std::optional<committed> checkpoint; ///< The newest whose every byte is right.
  std::vector<std::string> refused;    ///< Why each newer one is not it: to be shown to the user.
};

/// Looks for the newest checkpoint that verifies. One without a manifest was damaged by somebody: none is
/// ever committed without it.
inline latest_found latest_commit(std::string const& folder, site where = site::here()) {
  latest_found result;
  auto const all = detail::named_as_commits(folder, where);
  for (auto checkpoint = all.rbegin(); checkpoint != all.rend() && !result.checkpoint; ++checkpoint) {
    try {
      verify(*checkpoint, where);
      result.checkpoint = *checkpoint;
    } catch (io_error const& cause) {
      result.refused.emplace_back(cause.what());
    }
  }
  return result;
}

/// Removes all but the newest `keep` checkpoints and gives the removed ones. A damaged one does not count:
/// the newest counted one is checked byte for byte, the others by manifest and sizes; while none is whole,
/// nothing is removed.
inline std::vector<committed> prune_commits(std::string const& folder, index_t keep,
                                            site where = site::here()) {
  if (keep < 1) throw config_error("E-io-037", where, "at least one checkpoint must be kept, not ", keep);
  std::vector<committed> removed;
  index_t whole = 0;
  auto const all = commits_in(folder, where);
  for (auto checkpoint = all.rbegin(); checkpoint != all.rend(); ++checkpoint) {
    if (whole < keep) {
      whole += detail::holds(*checkpoint, whole == 0, where) ? 1 : 0;
      continue;
    }
    // Renamed first: half a folder must not look like a checkpoint.
    auto const doomed = folder + "/." + detail::step_name(checkpoint->step) + ".removed";
    remove_all(doomed, where);
    if (::rename(checkpoint->path.c_str(), doomed.c_str()) != 0)
      detail::fail("E-io-007", where, "remove", checkpoint->path, errno);
    remove_all(doomed, where);
    removed.push_back(*checkpoint);
  }
  return removed;
}

/// Undoes what a killed program left half done: removes what it had not committed or was removing, and puts
/// back what it was about to replace. Nobody else may be writing there.
inline void recover_commits(std::string const& folder, site where = site::here()) {
  if (!folder_exists(folder)) return;
  for (auto const& name : names_in(folder, where)) {
    auto const [step, ending] = detail::hidden_step_of(name);
    if (step < 0) continue;
    auto const target = folder + "/" + detail::step_name(step);
    if (ending == "replaced" && !folder_exists(target)) {
      if (::rename((folder + "/" + name).c_str(), target.c_str()) != 0)
        detail::fail("E-io-005", where, "put back", target, errno);
    } else {
      remove_all(folder + "/" + name, where);
    }
  }
}

} // namespace tessera::inline TESSERA_ABI::io

#endif
#endif
