/// Checkpoints of a run: every tensor whole and by name, whatever the layout of the ranks that wrote it.
/// A folder `step-00000100/` holds model.safetensors (the weights under their Hugging Face names),
/// optimizer.safetensors (NAME.master, NAME.exp_avg, NAME.exp_avg_sq), state.json, for a learnt tokenizer
/// tokenizer.model, and the manifest that makes it a checkpoint (io/commit.hpp).
///
///     save_checkpoint<bf16>(comm, ex, "run/checkpoints", state, whole, parts, {.keep = 3});
///     auto const latest = latest_checkpoint(comm, "run/checkpoints");        // "" if there is none
///     auto const state = read_state(comm, latest);
///     load_checkpoint<bf16>(comm, ex, latest, whole, parts);
///
/// Called by every rank. Rank 0 writes; what the ranks count of a unit (train/model_parts.hpp) comes to it
/// unit by unit, so that no rank ever holds more than one unit whole. To load is to read: each rank takes the
/// elements that it keeps, so a checkpoint of any layout goes on under any other, and there is nothing to
/// merge or to reshard. Whatever goes wrong on one rank, all of them throw.
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_TRAIN_CHECKPOINT_HPP
#define TESSERA_TRAIN_CHECKPOINT_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <optional>

#include <tessera/exec/copy.hpp>
#include <tessera/io/commit.hpp>
#include <tessera/io/safetensors_writer.hpp>
#include <tessera/ops/reduce.hpp>
#include <tessera/train/detail/collected_unit.hpp>
#include <tessera/train/detail/tensor_sets.hpp>
#include <tessera/train/run_state.hpp>
#include <tessera/train/together.hpp>

namespace tessera::inline TESSERA_ABI::train {

namespace detail {

/// One tensor of a file: an array of a parameter.
struct file_tensor {
  std::string name; ///< Such as "wte.weight.exp_avg".
  std::size_t unit = 0, parameter = 0, array = 0;
};

/// All of them in the order of the file, which is that of their names. `suffixes`: one for each array.
inline std::vector<file_tensor> file_tensors(whole_model const& whole,
                                             std::vector<std::string> const& suffixes) {
  std::vector<file_tensor> tensors;
  for (std::size_t u = 0; u < whole.units.size(); ++u)
    for (std::size_t p = 0; p < whole.units[u].size(); ++p)
      for (std::size_t a = 0; a < suffixes.size(); ++a)
        tensors.push_back({whole.units[u][p].name + suffixes[a], u, p, a});
  std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) { return a.name < b.name; });
  return tensors;
}

inline std::vector<io::tensor_entry> entries_of(whole_model const& whole,
                                                std::vector<file_tensor> const& tensors, io::dtype type) {
  std::vector<io::tensor_entry> entries;
  for (auto const& t : tensors)
    entries.push_back({t.name, type, whole.units[t.unit][t.parameter].whole_shape});
  return entries;
}

inline std::vector<std::string> state_suffixes(whole_model const& whole) {
  std::vector<std::string> suffixes;
  for (auto const& array : whole.arrays) suffixes.push_back("." + array);
  return suffixes;
}

/// What this rank writes of its weights, or of an array of its state.
template <storage_scalar T, memory_space Memory>
memory_span<T const, Memory> counted_weights(unit_part<T, Memory> const& part) {
  if (part.counted.empty()) return {};
  return part_of(memory_span<T const, Memory>(part.weights),
                 {part.counted.begin - part.weights_at.begin, part.counted.end - part.weights_at.begin});
}
template <storage_scalar T, memory_space Memory>
memory_span<float const, Memory> counted_state(unit_part<T, Memory> const& part, std::size_t array) {
  if (part.counted.empty()) return {};
  return part_of(memory_span<float const, Memory>(part.state[array]),
                 {part.counted.begin - part.state_at.begin, part.counted.end - part.state_at.begin});
}

/// Writes one file of the checkpoint, tensor by tensor; `counted(part, array)` is what a rank gives.
template <storage_scalar S, storage_scalar T, comm::communicator Comm, exec::space Ex,
          keeps_parts<T, typename Ex::memory> Parts, class Counted>
void write_file(Comm& comm, Ex& ex, std::optional<io::commit_writer>& commit, std::string const& name,
                whole_model const& whole, std::vector<std::string> const& suffixes, Parts const& parts,
                Counted const& counted, site where) {
  auto const tensors = file_tensors(whole, suffixes);
  std::optional<io::safetensors_writer> file;
  on_root(
      comm,
      [&] {
        file.emplace(commit->path(name), entries_of(whole, tensors, io::dtype_of<S>()),
                     std::map<std::string, std::string>{{"format", "pt"}}, where);
      },
      where);

  // Every rank takes part in every gather, also after rank 0 could not write: nobody may be left waiting.
  collected_unit<Comm, Ex> unit(comm, ex);
  std::vector<std::vector<S>> collected(suffixes.size());
  auto selected = static_cast<std::size_t>(-1);
  std::exception_ptr failure;
  for (auto const& t : tensors) {
    if (t.unit != selected) {
      auto const part = parts(selected = t.unit);
      unit.select(whole.units[t.unit], part);
      for (std::size_t a = 0; a < suffixes.size(); ++a) {
        collected[a].clear(); // one unit at a time
        collected[a] = unit.template collect<S>(counted(part, a), where);
      }
    }
    if (comm.rank() != 0 || failure) continue;
    try {
      auto const values = unit.whole(t.parameter, collected[t.array], where);
      file->write(t.name, std::as_bytes(std::span(values)), where);
    } catch (std::exception const&) {
      failure = std::current_exception();
    }
  }
  on_root(
      comm,
      [&] {
        if (failure) std::rethrow_exception(failure);
        commit->add(name, file->commit(where));
      },
      where);
}

/// Reads the elements `at` of a block, each from where it stands in its whole tensor.
template <storage_scalar S, exec::space Ex>
void read_block(Ex& ex, io::safetensors_file const& file, std::string const& suffix,
                layout::parameter_map const& map, layout::range at, memory_span<S, typename Ex::memory> out,
                site where) {
  for (auto const& p : map) {
    auto const wanted = layout::intersection(p.where(), at);
    if (wanted.empty()) continue;
    std::vector<S> values(static_cast<std::size_t>(wanted.size()));
    for (auto const& s : layout::segments_of(map, wanted))
      file.read_part(
          p.name + suffix, s.first_element,
          part_of(std::span(values), {s.in_block.begin - wanted.begin, s.in_block.end - wanted.begin}),
          where);
    copy(ex, part_of(out, {wanted.begin - at.begin, wanted.end - at.begin}), std::span<S const>(values),
         where);
  }
}

} // namespace detail

struct save_options {
  index_t keep = 3;              ///< Older checkpoints are deleted once this one is complete.
  std::string tokenizer_model{}; ///< Of a learnt tokenizer; rank 0's counts.
};

/// Writes the checkpoint of `state.step` and returns its folder. Throws io_error on all ranks if the disk is
/// full or the like, numeric_error if a weight is not finite: what stood there before is kept.
template <storage_scalar T, comm::communicator Comm, exec::space Ex,
          keeps_parts<T, typename Ex::memory> Parts>
std::string save_checkpoint(Comm& comm, Ex& ex, std::string const& folder, run_state const& state,
                            whole_model const& whole, Parts const& parts, save_options const& options = {},
                            site where = site::here()) {
  using memory = typename Ex::memory;
  using part_type = unit_part<T, memory>;
  std::optional<io::commit_writer> commit;
  together(
      comm,
      [&] {
        for (std::size_t u = 0; u < whole.units.size(); ++u) {
          auto const part = parts(u);
          auto const mine = detail::counted_weights(part);
          if (!ops::all_finite(ex,
                               view<T const, 1, memory>(mine.data(), {static_cast<index_t>(mine.size())})))
            throw numeric_error("E-train-061", where, "a weight is not finite after step ", state.step,
                                "; no checkpoint is made of it");
        }
        if (comm.rank() == 0) commit.emplace(folder, state.step, where);
      },
      where);
  detail::write_file<T, T>(
      comm, ex, commit, "model.safetensors", whole, {""}, parts,
      [](part_type const& part, std::size_t) { return detail::counted_weights(part); }, where);
  detail::write_file<float, T>(
      comm, ex, commit, "optimizer.safetensors", whole, detail::state_suffixes(whole), parts,
      [](part_type const& part, std::size_t array) { return detail::counted_state(part, array); }, where);
  return from_root(
      comm,
      [&] {
        if (!options.tokenizer_model.empty())
          io::write_file(commit->path("tokenizer.model"), options.tokenizer_model, where);
        io::write_json(commit->path("state.json"), json_of(state), where);
        auto const path = commit->commit(where).path;
        io::prune_commits(folder, options.keep, where);
        return path;
      },
      where);
}

/// The same of a model that is replicated on all ranks of `comm` (parallel/data_parallel.hpp).
template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
std::string save_checkpoint(Comm& comm, Ex& ex, std::string const& folder, run_state const& state,
                            nn::parameter_store<Ex, T, G>& store, Replicas& replicas,
                            save_options const& options = {}, site where = site::here()) {
  return save_checkpoint<T>(comm, ex, folder, state, whole_model_of(store, replicas),
                            replicated_parts(comm, store, replicas), options, where);
}

/// The folder of the newest checkpoint, every byte of it checked; empty if there is none. What a killed run
/// left half done is cleared away. Throws io_error on all ranks if the newest is cut or altered: going on
/// from an older one is for a person to decide.
template <comm::communicator Comm>
std::string latest_checkpoint(Comm& comm, std::string const& folder, site where = site::here()) {
  return from_root(
      comm,
      [&]() -> std::string {
        io::recover_commits(folder, where);
        auto const found = io::latest_commit(folder, where);
        if (!found.refused.empty())
          throw io_error(
              "E-train-062", where, "the newest checkpoint cannot be used: ", found.refused.front(),
              found.checkpoint
                  ? "\nto go on from " + found.checkpoint->path + " instead, remove the newer folder"
                  : std::string("\nthere is no other; to begin again, choose another folder (--run)"));
        return found.checkpoint ? found.checkpoint->path : std::string{};
      },
      where);
}

/// The folder of the newest whole checkpoint below `run`, or `run` itself where that is one: for programs
/// that only read, also while the run goes on. Called by one process. Throws io_error if there is none.
inline std::string readable_checkpoint(std::string const& run, site where = site::here()) {
  if (io::file_exists(run + "/manifest.json")) {
    io::check_files(io::read_manifest(run + "/manifest.json", where), run, where);
    return run;
  }
  auto const found = io::latest_commit(run + "/checkpoints", where);
  std::string refused;
  for (auto const& why : found.refused) refused += "\n  " + why;
  if (!found.checkpoint)
    throw io_error("E-train-063", where, run, " holds no checkpoint that can be read", refused);
  return found.checkpoint->path;
}

/// A model knows the tokens of the tokenizer that it was trained with. Throws config_error where a checkpoint
/// holds another learnt tokenizer than `model`: another text teaches other pieces, and no allowed difference
/// makes them the same.
inline void require_tokenizer(std::string const& checkpoint, std::string_view model,
                              site where = site::here()) {
  auto const path = checkpoint + "/tokenizer.model";
  auto const kept = io::file_exists(path);
  if (kept ? io::mapped_file(path, where).text() != model : !model.empty())
    throw config_error("E-train-065", where, "the run's tokenizer is not ", path,
                       ", whose tokens the weights know; turn the new text into tokens with that one and use "
                       "tokenizer 'tokens', or begin another run (--run)");
}

/// The state of a checkpoint. Throws io_error on all ranks if there is none.
template <comm::communicator Comm>
run_state read_state(Comm& comm, std::string const& checkpoint, site where = site::here()) {
  run_state state;
  auto const path = checkpoint + "/state.json";
  together(
      comm, [&] { state = run_state_of(io::read_json(path, where), path, where); }, where);
  return state;
}

/// Reads the weights of a model that is whole on this rank. Throws io_error that lists the missing,
/// unexpected and misshapen tensors as exact sets.
template <exec::space Ex, storage_scalar T, storage_scalar G>
void load_weights(Ex& ex, std::string const& checkpoint, nn::parameter_store<Ex, T, G>& store,
                  site where = site::here()) {
  auto const whole = whole_model_of(store);
  io::safetensors_file const file(checkpoint + "/model.safetensors", where);
  auto const wanted = detail::entries_of(whole, detail::file_tensors(whole, {""}), io::dtype_of<T>());
  detail::require_equal_sets(detail::compare_tensors(wanted, file.entries()), file.path(), where);
  for (std::size_t u = 0; u < store.units(); ++u)
    detail::read_block<T>(ex, file, "", store.parameters(u), {0, store.unit_range(u).size()},
                          store.weights(u), where);
}

/// Reads weights and optimizer state into whatever layout the ranks have now: each rank reads the elements
/// that it keeps, out of the whole tensors. Under the layout that wrote them, the run goes on with the same
/// bits. Throws as `load_weights`, on all ranks.
template <storage_scalar T, comm::communicator Comm, exec::space Ex,
          keeps_parts<T, typename Ex::memory> Parts>
void load_checkpoint(Comm& comm, Ex& ex, std::string const& checkpoint, whole_model const& whole,
                     Parts const& parts, site where = site::here()) {
  auto const open = [&](char const* name, std::vector<std::string> const& suffixes, io::dtype type) {
    io::safetensors_file file(checkpoint + name, where);
    auto const wanted = detail::entries_of(whole, detail::file_tensors(whole, suffixes), type);
    detail::require_equal_sets(detail::compare_tensors(wanted, file.entries()), file.path(), where);
    return file;
  };
  together(
      comm,
      [&] {
        auto const suffixes = detail::state_suffixes(whole);
        auto const weights = open("/model.safetensors", {""}, io::dtype_of<T>());
        auto const states = open("/optimizer.safetensors", suffixes, io::dtype::f32);
        for (std::size_t u = 0; u < whole.units.size(); ++u) {
          auto const part = parts(u);
          if (part.map == nullptr) continue;
          detail::read_block<T>(ex, weights, "", *part.map, part.weights_at, part.weights, where);
          for (std::size_t a = 0; a < suffixes.size(); ++a)
            detail::read_block<float>(ex, states, suffixes[a], *part.map, part.state_at, part.state[a],
                                      where);
        }
      },
      where);
}

/// The same of a model that is replicated on all ranks of `comm`.
template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
void load_checkpoint(Comm& comm, Ex& ex, std::string const& checkpoint, nn::parameter_store<Ex, T, G>& store,
                     Replicas& replicas, site where = site::here()) {
  load_checkpoint<T>(comm, ex, checkpoint, whole_model_of(store, replicas),
                     replicated_parts(comm, store, replicas), where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
