/// The host execution space: a number of threads, and whatever handles its operations keep between calls.
///
///     exec::host ex({.threads = 2});
///     ex.parallel_for(rows, 16, [&](index_t begin, index_t end) { ... });   // disjoint ranges, one a thread
#ifndef TESSERA_EXEC_HOST_HPP
#define TESSERA_EXEC_HOST_HPP

#include <exception>
#include <string>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <tessera/core/memory.hpp>
#include <tessera/exec/detail/handles.hpp>
#include <tessera/exec/space.hpp>

namespace tessera::inline TESSERA_ABI::exec {

/// Matrix products by oneDNN. Exists where TESSERA_WITH_ONEDNN is defined.
struct onednn_product {
  static constexpr char const* name = "oneDNN";
};
/// Matrix products by the library's own vectorised loops. Always there.
struct portable_product {
  static constexpr char const* name = "portable";
};

struct host_options {
  /// Threads of each parallel loop; 0 takes all that OpenMP offers (one without OpenMP).
  int threads = 0;
};

/// `Product` is the policy that multiplies matrices; it is part of the type, so that programs built with and
/// without oneDNN share no function. Used by one thread at a time. Not copyable: operations refer to its
/// handles.
template <class Product>
class basic_host {
public:
  using memory = host_memory;
  using backend = host_backend;
  using product = Product;

  /// Throws config_error for a negative thread count, or for several threads in a build without OpenMP.
  explicit basic_host(host_options options = {}, site where = site::here()) : threads_(options.threads) {
#if defined(_OPENMP)
    if (threads_ == 0) threads_ = omp_get_max_threads();
#else
    if (threads_ == 0) threads_ = 1;
    if (threads_ > 1)
      throw config_error("E-exec-001", where, threads_,
                         " threads were asked for and this build has no OpenMP; "
                         "compile with -fopenmp or ask for 1");
#endif
    if (threads_ < 1)
      throw config_error("E-exec-002", where, "the thread count is ", threads_, ", need 1 or more");
  }
  basic_host(basic_host const&) = delete;
  basic_host& operator=(basic_host const&) = delete;

  int threads() const noexcept {
    return threads_;
  }
  /// What computes, in words.
  std::string description() const {
    return tessera::text_of(threads_, threads_ == 1 ? " thread, " : " threads, ", Product::name, " products");
  }

  /// What decides how results are rounded: oneDNN divides sums by its threads, our own loops do not.
  std::string arithmetic() const {
    auto const products = tessera::text_of(Product::name, " products");
    return std::same_as<Product, portable_product> ? products
                                                   : tessera::text_of(products, ", threads ", threads_);
  }

  /// Host operations have finished when they return.
  void synchronize() noexcept {}

  /// Calls `body(begin, end)` on disjoint contiguous ranges that cover [0, count), at most one a thread and
  /// none shorter than `grain` unless it is the only one. The first exception of a body is rethrown here.
  template <std::invocable<index_t, index_t> Body>
  void parallel_for(index_t count, index_t grain, Body&& body) {
    if (count <= 0) return;
    auto const useful = grain > 1 ? count / grain : count;
    auto const workers = useful < threads_ ? (useful < 1 ? index_t{1} : useful) : index_t{threads_};
    if (workers == 1) return static_cast<void>(body(index_t{0}, count));
    std::exception_ptr failure;
#if defined(_OPENMP)
#pragma omp parallel num_threads(narrow <int>(workers))
    {
      auto const team = index_t{omp_get_num_threads()}, self = index_t{omp_get_thread_num()};
      auto const begin = count / team * self + (self < count % team ? self : count % team);
      auto const end = begin + count / team + (self < count % team ? 1 : 0);
      try {
        if (begin < end) body(begin, end);
      } catch (...) {
#pragma omp critical(tessera_parallel_for)
        if (!failure) failure = std::current_exception();
      }
    }
#endif
    if (failure) std::rethrow_exception(failure);
  }

  /// An object of type `Handle` that lives as long as this space, made at the first call: where an operation
  /// keeps engines, compiled kernels and scratch memory between calls. One that takes memory is made from the
  /// account that counts it, one that needs the space from that.
  template <class Handle>
  requires detail::handle_of<Handle, basic_host> Handle& handle() {
    return handles_.template get<Handle>(*this, {&scratch_, memory_kind::other});
  }

  /// Memory that operations keep in handles of this space.
  memory_meter const& scratch() const noexcept {
    return scratch_;
  }

  /// Records a sentence for the program to show once, such as a slower path that the processor forces.
  void note(std::string text) {
    for (auto const& known : notes_)
      if (known == text) return;
    notes_.push_back(static_cast<std::string&&>(text));
  }
  std::vector<std::string> const& notes() const noexcept {
    return notes_;
  }

private:
  int threads_;
  memory_meter scratch_;
  detail::handles handles_;
  std::vector<std::string> notes_;
};

/// The host space of this build. An alias of different types in builds with and without oneDNN: their symbols
/// differ, so they can be linked together.
#if defined(TESSERA_WITH_ONEDNN)
using host = basic_host<onednn_product>;
#else
using host = basic_host<portable_product>;
#endif

} // namespace tessera::inline TESSERA_ABI::exec

#endif
