/// Ranks go on together or fail together. Work that only some ranks do (reading a file, writing a checkpoint)
/// may fail on one of them; the others would then wait for ever in their next collective. Here every rank
/// learns of it, and every rank throws.
///
///     together(comm, [&] { open_my_shard(); });             // any rank may throw
///     on_root(comm, [&] { write_checkpoint(); });           // rank 0 alone works
///     auto text = from_root(comm, [&] { return read_file("config.json"); });
#ifndef TESSERA_TRAIN_TOGETHER_HPP
#define TESSERA_TRAIN_TOGETHER_HPP

#include <concepts>
#include <exception>
#include <string>

#include <tessera/comm/communicator.hpp>

namespace tessera::inline TESSERA_ABI::train {

/// The same text on every rank: the root's.
template <comm::communicator Comm>
std::string shared_text(Comm& comm, std::string text, int root = 0) {
  auto length = static_cast<index_t>(text.size());
  comm.broadcast(std::span(&length, 1), root);
  text.resize(static_cast<std::size_t>(length));
  comm.broadcast(std::as_writable_bytes(std::span(text.data(), text.size())), root);
  return text;
}

/// Every rank calls `work`. If it throws on some ranks, they throw on with their own exception, and the
/// others throw peer_failed (E-train-040) with the message of the lowest of them. Cost: one reduction of one
/// number where nothing fails. An exception that says that the communicator itself is lost is passed on
/// without another word to it.
template <comm::communicator Comm, std::invocable Work>
void together(Comm& comm, Work&& work, site where = site::here()) {
  std::exception_ptr failure;
  std::string message;
  try {
    work();
  } catch (peer_failed const&) {
    throw;
  } catch (collective_mismatch const&) {
    throw;
  } catch (stalled const&) {
    throw;
  } catch (library_error const&) {
    throw;
  } catch (std::exception const& fault) {
    failure = std::current_exception();
    message = fault.what();
  }
  auto const none = comm.size();
  auto const first = comm.all_reduce(failure ? comm.rank() : none, {.operation = comm::reduction::min});
  if (first == none) return;
  message = shared_text(comm, message, first);
  if (failure) std::rethrow_exception(failure);
  throw peer_failed("E-train-040", where, "rank ", first, " failed: ", message);
}

/// Rank 0 calls `work`; if it throws, every rank throws.
template <comm::communicator Comm, std::invocable Work>
void on_root(Comm& comm, Work&& work, site where = site::here()) {
  together(
      comm,
      [&] {
        if (comm.rank() == 0) work();
      },
      where);
}

/// Rank 0 calls `work`, and every rank gets the text that it returns.
template <comm::communicator Comm, std::invocable Work>
std::string from_root(Comm& comm, Work&& work, site where = site::here()) {
  std::string text;
  on_root(
      comm, [&] { text = work(); }, where);
  return shared_text(comm, text);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
