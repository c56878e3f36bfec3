/// Checkpoints of a run: every tensor whole and by name, whatever the layout of the ranks that wrote it.
/// A folder `step-00000100/` holds model.safetensors (the weights under their Hugging Face names),
/// optimizer.safetensors (NAME.master, NAME.exp_avg, NAME.exp_avg_sq), state.json, for a learnt tokenizer
/// tokenizer.model, and the manifest that makes it a checkpoint (io/commit.hpp).
///
///     save_checkpoint(comm, "run/checkpoints", state, model.store(), replicas, {.keep = 3});
///     auto const latest = latest_checkpoint(comm, "run/checkpoints");        // "" if there is none
///     auto const state = read_state(comm, latest);
///     load_checkpoint(comm, ex, latest, model.store(), replicas);
///
/// Called by every rank. Rank 0 writes; the optimizer's shards come to it unit by unit, so that no rank ever
/// holds the whole state. Whatever goes wrong on one rank, all of them throw.
/// Exists under TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_TRAIN_CHECKPOINT_HPP
#define TESSERA_TRAIN_CHECKPOINT_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <optional>

#include <tessera/exec/copy.hpp>
#include <tessera/io/commit.hpp>
#include <tessera/io/safetensors_writer.hpp>
#include <tessera/ops/reduce.hpp>
#include <tessera/parallel/data_parallel.hpp>
#include <tessera/train/detail/tensor_sets.hpp>
#include <tessera/train/run_state.hpp>
#include <tessera/train/together.hpp>

namespace tessera::inline TESSERA_ABI::train {

namespace detail {

template <storage_scalar T, exec::space Ex, storage_scalar G>
std::vector<io::tensor_entry> weight_entries(nn::parameter_store<Ex, T, G> const& store) {
  std::vector<io::tensor_entry> entries;
  store.for_each([&](layout::parameter const& p, layout::range) {
    entries.push_back({p.name, io::dtype_of<T>(), p.shape});
  });
  return entries;
}

/// One array of one parameter in the optimizer's file.
struct state_tensor {
  std::string name; ///< Such as "wte.weight.exp_avg".
  std::size_t unit = 0;
  layout::parameter const* whole = nullptr;
  std::size_t array = 0; ///< Number among the optimizer's arrays.
};

/// All of them in the order of the file, which is that of their names.
template <exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
std::vector<state_tensor> state_tensors(nn::parameter_store<Ex, T, G> const& store, Replicas& replicas) {
  std::vector<state_tensor> tensors;
  for (std::size_t u = 0; u < store.units(); ++u) {
    auto const arrays = replicas.optimizer(u).state();
    for (auto const& p : store.parameters(u))
      for (std::size_t a = 0; a < arrays.size(); ++a)
        tensors.push_back({tessera::text_of(p.name, ".", arrays[a].name), u, &p, a});
  }
  std::sort(tensors.begin(), tensors.end(), [](auto const& a, auto const& b) { return a.name < b.name; });
  return tensors;
}

inline std::vector<io::tensor_entry> entries_of(std::vector<state_tensor> const& tensors) {
  std::vector<io::tensor_entry> entries;
  for (auto const& t : tensors) entries.push_back({t.name, io::dtype::f32, t.whole->shape});
  return entries;
}

/// The elements of a span, for the host to read.
template <exec::space Ex, span_in<typename Ex::memory> Span>
std::vector<typename Span::value_type> on_host(Ex& ex, Span values, site where) {
  std::vector<typename Span::value_type> copied(values.size());
  copy(ex, std::span(copied), values, where);
  return copied;
}

template <class Span>
Span part_of(Span all, layout::range part) {
  return all.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
}

/// Brings one unit's state from the ranks that keep it to rank 0. Called by every rank.
template <comm::communicator Comm, exec::space Ex, class Replicas>
class unit_gatherer {
public:
  unit_gatherer(Comm& comm, Ex& ex, Replicas& replicas) : comm_(comm), ex_(ex), replicas_(replicas) {}

  /// Array `a` of unit `u`, whole; on rank 0 alone.
  std::span<float const> whole(std::size_t u, index_t block_size, std::size_t a) {
    if (u != unit_) gather(u, block_size);
    return gathered_.empty() ? std::span<float const>{} : std::span<float const>(gathered_[a]);
  }

private:
  void gather(std::size_t u, index_t block_size) {
    unit_ = u;
    gathered_.clear();
    layout::ownership const who{comm_.rank(), comm_.size()};
    std::vector<index_t> counts;
    for (int r = 0; r < who.ranks; ++r) counts.push_back(who.of(block_size, r).size());
    using memory = typename Ex::memory;
    auto const is_root = comm_.rank() == 0;
    for (auto const& array : replicas_.optimizer(u).state()) {
      if (replicas_.options().zero == 0) {
        if (is_root) gathered_.push_back(on_host(ex_, array.values, site::here()));
        continue;
      }
      tensor<float, 1, memory> all({is_root ? block_size : 0});
      comm_.gather_v(all.span(), memory_span<float const, memory>(array.values), counts, 0);
      if (is_root) gathered_.push_back(on_host(ex_, all.span(), site::here()));
    }
  }

  Comm& comm_;
  Ex& ex_;
  Replicas& replicas_;
  std::size_t unit_ = static_cast<std::size_t>(-1);
  std::vector<std::vector<float>> gathered_;
};

template <exec::space Ex, storage_scalar T, storage_scalar G>
void write_weights(io::commit_writer& commit, Ex& ex, nn::parameter_store<Ex, T, G> const& store,
                   site where) {
  std::map<std::string, layout::range> places;
  store.for_each([&](layout::parameter const& p, layout::range r) { places[p.name] = r; });
  io::safetensors_writer file(commit.path("model.safetensors"), weight_entries<T>(store), {{"format", "pt"}},
                              where);
  auto const order = file.entries();
  for (auto const& entry : order) {
    auto const values = on_host(ex, part_of(store.weights(), places.at(entry.name)), where);
    file.write(entry.name, std::as_bytes(std::span(values)), where);
  }
  commit.add("model.safetensors", file.commit(where));
}

} // namespace detail

struct save_options {
  index_t keep = 3;              ///< Older checkpoints are deleted once this one is complete.
  std::string tokenizer_model{}; ///< Of a learnt tokenizer; rank 0's counts.
};

/// Writes the checkpoint of `state.step` and returns its folder. Throws io_error on all ranks if the disk is
/// full or the like, numeric_error if a weight is not finite: what stood there before is kept.
template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
std::string save_checkpoint(Comm& comm, Ex& ex, std::string const& folder, run_state const& state,
                            nn::parameter_store<Ex, T, G> const& store, Replicas& replicas,
                            save_options const& options = {}, site where = site::here()) {
  std::optional<io::commit_writer> commit;
  std::optional<io::safetensors_writer> file;
  auto const tensors = detail::state_tensors(store, replicas);
  on_root(
      comm,
      [&] {
        if (!ops::all_finite(ex,
                             view<T const, 1, typename Ex::memory>(store.weights().data(), {store.size()})))
          throw numeric_error("E-train-061", where, "a weight is not finite after step ", state.step,
                              "; no checkpoint is made of it");
        commit.emplace(folder, state.step, where);
        detail::write_weights(*commit, ex, store, where);
        file.emplace(commit->path("optimizer.safetensors"), detail::entries_of(tensors),
                     std::map<std::string, std::string>{{"format", "pt"}}, where);
      },
      where);

  // Every rank takes part in every gather, also after rank 0 could not write: nobody may be left waiting.
  detail::unit_gatherer<Comm, Ex, Replicas> gatherer(comm, ex, replicas);
  std::exception_ptr failure;
  for (auto const& t : tensors) {
    auto const whole = gatherer.whole(t.unit, store.unit_range(t.unit).size(), t.array);
    if (comm.rank() != 0 || failure) continue;
    try {
      file->write(t.name,
                  std::as_bytes(whole.subspan(static_cast<std::size_t>(t.whole->offset),
                                              static_cast<std::size_t>(t.whole->size))),
                  where);
    } catch (error const&) {
      failure = std::current_exception();
    }
  }

  std::string path;
  on_root(
      comm,
      [&] {
        if (failure) std::rethrow_exception(failure);
        commit->add("optimizer.safetensors", file->commit(where));
        if (!options.tokenizer_model.empty())
          io::write_file(commit->path("tokenizer.model"), options.tokenizer_model, where);
        io::write_json(commit->path("state.json"), json_of(state), where);
        path = commit->commit(where).path;
        io::prune_commits(folder, options.keep, where);
      },
      where);
  return shared_text(comm, path);
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

/// The state of a checkpoint. Throws io_error on all ranks if there is none.
template <comm::communicator Comm>
run_state read_state(Comm& comm, std::string const& checkpoint, site where = site::here()) {
  run_state state;
  auto const path = checkpoint + "/state.json";
  together(
      comm, [&] { state = run_state_of(io::read_json(path, where), path, where); }, where);
  return state;
}

/// Reads the weights of a model, all ranks of them all. Throws io_error that lists the missing, unexpected
/// and misshapen tensors as exact sets.
template <exec::space Ex, storage_scalar T, storage_scalar G>
void load_weights(Ex& ex, std::string const& checkpoint, nn::parameter_store<Ex, T, G>& store,
                  site where = site::here()) {
  io::safetensors_file const file(checkpoint + "/model.safetensors", where);
  detail::require_equal_sets(detail::compare_tensors(detail::weight_entries<T>(store), file.entries()),
                             file.path(), where);
  store.for_each([&](layout::parameter const& p, layout::range r) {
    std::vector<T> values(static_cast<std::size_t>(p.size));
    file.read(p.name, std::span(values), where);
    copy(ex, detail::part_of(store.weights(), r), std::span<T const>(values), where);
  });
}

/// Reads weights and optimizer state into whatever layout the ranks have now: each takes the part it keeps.
/// After it the run goes on with the same bits.
template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
void load_checkpoint(Comm& comm, Ex& ex, std::string const& checkpoint, nn::parameter_store<Ex, T, G>& store,
                     Replicas& replicas, site where = site::here()) {
  together(
      comm,
      [&] {
        load_weights(ex, checkpoint, store, where);
        replicas.start_from_weights(ex);
        io::safetensors_file const file(checkpoint + "/optimizer.safetensors", where);
        auto const tensors = detail::state_tensors(store, replicas);
        detail::require_equal_sets(detail::compare_tensors(detail::entries_of(tensors), file.entries()),
                                   file.path(), where);
        for (auto const& t : tensors) {
          auto const kept = replicas.owned(t.unit);
          auto const shared = layout::intersection(t.whole->where(), kept);
          if (shared.empty()) continue;
          std::vector<float> values(static_cast<std::size_t>(shared.size()));
          file.read_part(t.name, shared.begin - t.whole->offset, std::span(values), where);
          copy(ex,
               detail::part_of(replicas.optimizer(t.unit).state()[t.array].values,
                               {shared.begin - kept.begin, shared.end - kept.begin}),
               std::span<float const>(values), where);
        }
      },
      where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
