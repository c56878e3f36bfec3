/// Ranks on MPI: an MPI_Comm that the host application has, or a program of our own.
///
///     comm::mpi ranks(my_comm);                       // borrowed: duplicated, never touched otherwise
///     ranks.all_reduce(std::span(values), {.order = comm::summation::native});
///
///     int main(int argc, char** argv) {               // prints and aborts all ranks if one throws
///       return comm::run_mpi(argc, argv, [](comm::mpi& world) { train(world); });
///     }
///
/// With `mpi_options{.device_buffers = true}` messages may also be device_spans: the library, which must be
/// CUDA-aware, moves them itself. Only its own calls go there (no fixed order of sums, no reductions of
/// 16-bit types, no start_X at the checked level: the host would have to touch the data), and the caller sees
/// to it that the compute stream has finished writing (`ex.synchronize()`) before it calls.
///
/// Cost: one MPI call each, except reductions in a fixed order (two or three; one up to 2 KiB) and
/// communicators that are checked (one more) or have a stall limit (non-blocking calls and polling). Counts
/// are 64-bit (MPI-4).
#ifndef TESSERA_COMM_MPI_HPP
#define TESSERA_COMM_MPI_HPP

#include <cstdio>
#include <ctime>

#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h> // MPIX_Query_cuda_support, which MPICH has in mpi.h
#endif

#include <tessera/comm/detail/interface.hpp>

static_assert(MPI_VERSION >= 4, "tessera/comm/mpi.hpp needs MPI-4 (64-bit counts), such as MPICH 4.0");

namespace tessera::inline TESSERA_ABI::comm {

/// MPI's thread levels. Tessera makes all MPI calls of a rank from one thread, but runs others beside it.
enum class mpi_threads : int {
  single = MPI_THREAD_SINGLE,
  funneled = MPI_THREAD_FUNNELED,
  serialized = MPI_THREAD_SERIALIZED,
  multiple = MPI_THREAD_MULTIPLE
};
constexpr char const* name_of(mpi_threads level) noexcept {
  return level == mpi_threads::single       ? "MPI_THREAD_SINGLE"
         : level == mpi_threads::funneled   ? "MPI_THREAD_FUNNELED"
         : level == mpi_threads::serialized ? "MPI_THREAD_SERIALIZED"
                                            : "MPI_THREAD_MULTIPLE";
}

struct mpi_options {
  bool checked = false;   // see communicator_options
  double stall_limit = 0; // see communicator_options
  /// What MPI must have been initialised with. `single` is enough where the process has one thread only.
  mpi_threads level = mpi_threads::funneled;
  /// Take messages in device memory. Needs an MPI that says it is CUDA-aware.
  bool device_buffers = false;
};

} // namespace tessera::inline TESSERA_ABI::comm

#include <tessera/comm/detail/mpi_transport.hpp>

namespace tessera::inline TESSERA_ABI::comm {

/// A communicator over the ranks of an MPI_Comm. Move-only.
class mpi : public detail::interface<mpi, detail::engine<detail::mpi_transport>> {
  using base = detail::interface<mpi, detail::engine<detail::mpi_transport>>;
  using engine = detail::engine<detail::mpi_transport>;

public:
  /// Collective over `borrowed`, of which it makes two duplicates: the caller's messages, error handler and
  /// attributes stay its own. To be destroyed before MPI_Finalize. Throws config_error if the ranks'
  /// `checked` or `stall_limit` differ (on all of them), and before it calls MPI (on this rank alone) if MPI
  /// is not running, was initialised below `options.level`, or is not CUDA-aware where `device_buffers` are
  /// wanted.
  explicit mpi(MPI_Comm borrowed, mpi_options options = {}, site where = site::here())
      : base(make(borrowed, options, where)) {}

private:
  friend base;
  explicit mpi(engine* owned) noexcept : base(owned) {}

  static engine* make(MPI_Comm borrowed, mpi_options options, site where) {
    check_threads(options.level, where);
    if (options.device_buffers) check_cuda_aware(where);
    MPI_Comm copy = MPI_COMM_NULL;
    detail::check_mpi(MPI_Comm_dup(borrowed, &copy), "Comm_dup", where);
    communicator_options const common{options.checked, options.stall_limit};
    detail::mpi_transport transport(copy, common, options.device_buffers, where);
    transport.agree_on(common, where);
    return new engine(static_cast<detail::mpi_transport&&>(transport), common, 1);
  }

  static void check_cuda_aware(site where) {
#if defined(MPICH) || defined(MPIX_CUDA_AWARE_SUPPORT)
    if (MPIX_Query_cuda_support() == 0)
      throw config_error("E-comm-036", where,
                         "this MPI says that it is not CUDA-aware (MPIX_Query_cuda_support): it cannot take "
                         "device_buffers; use comm::nccl, or an MPI built with CUDA");
#else
    throw config_error("E-comm-036", where,
                       "this MPI cannot say whether it is CUDA-aware (it has no MPIX_Query_cuda_support), so "
                       "device_buffers are not given to it; use comm::nccl, or an MPI built with CUDA");
#endif
  }
  static void check_threads(mpi_threads level, site where) {
    int running = 0, ended = 0, given = 0, main = 1;
    detail::check_mpi(MPI_Initialized(&running), "Initialized", where);
    detail::check_mpi(MPI_Finalized(&ended), "Finalized", where);
    if (running == 0 || ended != 0)
      throw config_error("E-comm-032", where,
                         running == 0 ? "MPI is not initialised; call MPI_Init_thread or use comm::run_mpi"
                                      : "MPI has been finalised");
    detail::check_mpi(MPI_Query_thread(&given), "Query_thread", where);
    if (given < static_cast<int>(level))
      throw config_error("E-comm-033", where, "MPI was initialised with ",
                         name_of(static_cast<mpi_threads>(given)), ", need ", name_of(level),
                         ": call MPI_Init_thread with that level, or, if this process has one thread only, "
                         "pass mpi_options{.level = mpi_threads::single}");
    detail::check_mpi(MPI_Is_thread_main(&main), "Is_thread_main", where);
    if (given <= MPI_THREAD_FUNNELED && main == 0)
      throw config_error("E-comm-034", where, "with ", name_of(static_cast<mpi_threads>(given)),
                         " only the thread that initialised MPI may communicate");
  }
};

static_assert(communicator<mpi>);

/// Initialises MPI, and finalises it at the end of its scope. Throws config_error if MPI is running already
/// (wrap its communicator instead) or cannot give `level`.
class mpi_environment {
public:
  mpi_environment(int& argc, char**& argv, mpi_threads level = mpi_threads::funneled,
                  site where = site::here()) {
    int running = 0, given = 0;
    detail::check_mpi(MPI_Initialized(&running), "Initialized", where);
    if (running != 0)
      throw config_error("E-comm-035", where,
                         "MPI is initialised already: wrap its communicator with comm::mpi instead");
    detail::check_mpi(MPI_Init_thread(&argc, &argv, static_cast<int>(level), &given), "Init_thread", where);
    if (given < static_cast<int>(level)) {
      (void)MPI_Finalize(); // the error below matters more
      throw config_error("E-comm-033", where, "this MPI gives ", name_of(static_cast<mpi_threads>(given)),
                         ", need ", name_of(level));
    }
  }
  mpi_environment(mpi_environment const&) = delete;
  mpi_environment& operator=(mpi_environment const&) = delete;
  /// Does not finalise while an exception unwinds: MPI would wait for ranks that may wait for this one.
  ~mpi_environment() {
    if (std::uncaught_exceptions() == 0) (void)MPI_Finalize();
  }
};

/// Prints what went wrong, on which rank, and ends all ranks of the program.
[[noreturn]] inline void abort_mpi(char const* what) noexcept {
  int rank = -1;
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::fflush(stdout);
  std::fprintf(stderr, "rank %d: %s\n", rank, what);
  std::fflush(stderr);
  // mpiexec forwards what a process printed while that process lives: without a pause the message may be
  // lost.
  timespec const pause{0, 200'000'000};
  (void)::nanosleep(&pause, nullptr);
  (void)MPI_Abort(MPI_COMM_WORLD, 1);
  std::terminate();
}

/// The main function of an MPI program: initialises MPI, calls body(world), finalises. An exception on any
/// rank is printed and ends all ranks, so that none waits for ever. Returns what body returns, or 0; 1 if MPI
/// did not start.
template <std::invocable<mpi&> F>
int run_mpi(int& argc, char**& argv, F&& body, mpi_options options = {}, site where = site::here()) {
  try {
    mpi_environment environment(argc, argv, options.level, where);
    try {
      mpi world(MPI_COMM_WORLD, options, where);
      if constexpr (std::is_convertible_v<std::invoke_result_t<F&, mpi&>, int>) {
        return body(world);
      } else {
        body(world);
        return 0;
      }
    } catch (std::exception const& e) {
      abort_mpi(e.what());
    } catch (...) {
      abort_mpi("an exception that is not a std::exception");
    }
  } catch (std::exception const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

} // namespace tessera::inline TESSERA_ABI::comm

#endif
