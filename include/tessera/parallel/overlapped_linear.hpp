/// The products of tensor parallelism, each done in pieces beside the collective that it needs: rows are
/// multiplied as they arrive from the other ranks (sequence parallel input, column-parallel weight), or each
/// piece of a row-parallel product is summed over the ranks while the next is multiplied.
///
///     parallel::gather_linear(ex, comm, hidden, my_rows, weight, bias, {.gathered = rows}, memory);
///     parallel::linear_scatter(ex, comm, my_sums, hidden, weight_2, {}, {}, memory);
///
/// Every rank holds a block of rows (overlap_options::rows; uneven and empty ones are ordinary) and a part of
/// the weight. gather_linear is all_gather and then ops::linear; linear_scatter is ops::linear and then
/// reduce_scatter, bit for bit where a row's product does not depend on how many rows are multiplied at once
/// (the portable product of three or more at once; a library may choose otherwise). The backward of each is a
/// product with the other's collective, overlapped alike; where that is a sum, the gradients of weight and
/// bias are computed while its last piece travels.
///
/// Messages move while a rank multiplies if the communicator does so by itself (NCCL; MPI with a progress
/// thread); otherwise they are pushed along between pieces. Cost for n ranks: gathering, n - 1 messages from
/// each of its block; scattering, `chunks` reduce_scatters. Called by every rank of `comm` with the same
/// options. (The scheme of Wang et al., "Overlap communication with dependent computation via decomposition",
/// 2023.)
#ifndef TESSERA_PARALLEL_OVERLAPPED_LINEAR_HPP
#define TESSERA_PARALLEL_OVERLAPPED_LINEAR_HPP

#include <tessera/ops/linear.hpp>
#include <tessera/parallel/detail/overlap.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// The same on all ranks.
struct overlap_options {
  /// Rows of each rank's block; the blocks follow one another. Empty: even shares, by layout::shard_of.
  std::span<index_t const> rows = {};
  /// Pieces of each rank's block. More of them hide more of the messages; too short ones multiply slowly.
  int chunks = 2;
  /// How linear_scatter and gather_linear_backward add the ranks' summands.
  comm::summation order = comm::summation::rank_order;
};

template <storage_scalar T, memory_space M = host_memory>
struct gather_linear_options {
  ops::linear_options<T, M> linear = {}; ///< Activation, over all rows.
  /// [all rows, k]: receives all ranks' rows, which backward needs. `in` may be its own block of it. Empty:
  /// they are in the arena for as long as the call takes.
  view<T, 2, M> gathered = {};
  overlap_options overlap = {};
};

/// Bytes that gather_linear of `rows` rows of width k takes from its arena if `gathered` is not given.
template <storage_scalar T, memory_space M = host_memory>
index_t gather_linear_scratch_bytes(index_t rows, index_t k, int ranks) {
  return ranks == 1 ? 0 : arena<M>::template bytes_for<T>(rows * k);
}
/// Bytes that linear_scatter to width n takes, and gather_linear_backward where n is the width of `gathered`.
template <storage_scalar T, memory_space M = host_memory>
index_t linear_scatter_scratch_bytes(index_t rows, index_t n, int ranks,
                                     overlap_options const& options = {}) {
  return ranks == 1 ? 0 : detail::scatter_rows_bytes<T, M>({rows, ranks, options.rows}, options.chunks, n);
}
/// Bytes that linear_scatter_backward takes; n is the width of d_out.
template <storage_scalar T, memory_space M = host_memory>
index_t linear_scatter_backward_scratch_bytes(index_t rows, index_t n, int ranks) {
  return gather_linear_scratch_bytes<T, M>(rows, n, ranks);
}

/// Where a communicator's messages stand in the memory that a space works in.
template <class Comm, class Ex>
concept overlaps_with = comm::communicator<Comm> && exec::space<Ex> &&
    std::same_as<typename Comm::bulk_memory, typename Ex::memory>;

/// out[all rows, n] = activation(x weight[n, k]^T + bias[n]), where x are the rows in[my rows, k] of all
/// ranks. `in` is contiguous. Throws size_error (E-parallel-090, E-ops-001 to -003), config_error
/// (E-parallel-091), out_of_memory where the arena is smaller than planned, and what the communicator throws.
template <exec::space Ex, comm::communicator Comm, storage_scalar T>
  requires overlaps_with<Comm, Ex>
void gather_linear(Ex& ex, Comm& comm, view<T, 2, typename Ex::memory> out,
                   input<T, 2, typename Ex::memory> in, input<T, 2, typename Ex::memory> weight,
                   input<T, 1, typename Ex::memory> bias,
                   gather_linear_options<T, typename Ex::memory> options, arena<typename Ex::memory>& memory,
                   site where = site::here()) {
  using M = typename Ex::memory;
  constexpr auto name = "gather_linear";
  detail::row_blocks const blocks{out.extent(0), comm.size(), options.overlap.rows};
  blocks.require(name, comm.rank(), in.extent(0), options.overlap.chunks, where);
  ops::require_contiguous(name, "in", in, where);
  arena_scope const scope(memory);
  auto all = options.gathered;
  if (all.data() != nullptr) {
    ops::require_extents(name, "gathered", all, {out.extent(0), in.extent(1)}, where);
    ops::require_contiguous(name, "gathered", all, where);
  } else if (comm.size() > 1) {
    all = memory.template take<T, 2>({out.extent(0), in.extent(1)}, where);
  }
  auto const multiply = [&](view<T const, 2, M> x, index_t begin, index_t end) {
    auto part = options.linear;
    if (part.pre_activation.data() != nullptr) part.pre_activation = part.pre_activation.slice(0, begin, end);
    ops::linear(ex, out.slice(0, begin, end), x.slice(0, begin, end), weight, bias, part, where);
  };
  if (all.data() == nullptr) return multiply(in, 0, out.extent(0));
  detail::gather_rows(
      ex, comm, all, in, blocks, options.overlap.chunks,
      [&](index_t begin, index_t end) { multiply(all, begin, end); }, where);
}

/// out[my rows, n] = this rank's block of the sum over ranks of in[all rows, k] weight[n, k]^T + bias[n],
/// each rank with a k and a weight of its own. `out` is contiguous. A bias is for one rank to give, as a part
/// of its summand; the others leave it out. Throws as gather_linear does.
template <exec::space Ex, comm::communicator Comm, storage_scalar T>
  requires overlaps_with<Comm, Ex>
void linear_scatter(Ex& ex, Comm& comm, view<T, 2, typename Ex::memory> out,
                    input<T, 2, typename Ex::memory> in, input<T, 2, typename Ex::memory> weight,
                    input<T, 1, typename Ex::memory> bias, overlap_options const& options,
                    arena<typename Ex::memory>& memory, site where = site::here()) {
  using M = typename Ex::memory;
  constexpr auto name = "linear_scatter";
  detail::row_blocks const blocks{in.extent(0), comm.size(), options.rows};
  blocks.require(name, comm.rank(), out.extent(0), options.chunks, where);
  ops::require_contiguous(name, "out", out, where);
  if (comm.size() == 1) return ops::linear(ex, out, in, weight, bias, {}, where);
  detail::scatter_rows(
      ex, comm, out, blocks, options.chunks, options.order, memory,
      [&](view<T, 2, M> part, index_t begin, index_t end) {
        ops::linear(ex, part, in.slice(0, begin, end), weight, bias, {}, where);
      },
      [] {}, where);
}

/// The gradients of gather_linear, given d_out[all rows, n] and `gathered`: those of `in` are summed over the
/// ranks and stand in this rank's block, gradients.input[my rows, k]; those of weight and bias are this
/// rank's own. With an activation `scratch` is required. Throws as gather_linear does; config_error
/// (E-parallel-091) also for accumulate_input and input_activation, which a sum over ranks does not have.
template <exec::space Ex, comm::communicator Comm, storage_scalar T, storage_scalar G>
  requires overlaps_with<Comm, Ex>
void gather_linear_backward(Ex& ex, Comm& comm, ops::linear_gradients<T, G, typename Ex::memory> gradients,
                            input<T, 2, typename Ex::memory> d_out, input<T, 2, typename Ex::memory> gathered,
                            input<T, 2, typename Ex::memory> weight,
                            ops::linear_backward_options<T, typename Ex::memory> options,
                            overlap_options const& overlap, arena<typename Ex::memory>& memory,
                            site where = site::here()) {
  using M = typename Ex::memory;
  constexpr auto name = "gather_linear_backward";
  detail::row_blocks const blocks{d_out.extent(0), comm.size(), overlap.rows};
  blocks.require(name, comm.rank(), gradients.input.extent(0), overlap.chunks, where);
  ops::require_contiguous(name, "the gradient of in", gradients.input, where);
  if (options.accumulate_input || options.input_activation != ops::activation::none)
    throw config_error("E-parallel-091", where, name,
                       ": the gradient of `in` is a sum over ranks; it cannot "
                       "be added to (accumulate_input) nor multiplied by a slope (input_activation)");
  bool const activated = options.activation != ops::activation::none;
  if (activated) ops::require_rows(name, "scratch", options.scratch, d_out.extents(), where);
  auto const of_parameters = [&] {
    ops::linear_backward(ex, ops::linear_gradients<T, G, M>{{}, gradients.weight, gradients.bias}, d_out,
                         gathered, weight, options, where);
  };
  if (activated) { // leaves the gradient before the activation in scratch
    of_parameters();
    d_out = options.scratch;
  }
  auto const multiply = [&](view<T, 2, M> part, index_t begin, index_t end) {
    ops::linear_backward(ex, ops::linear_gradients<T, G, M>{part, {}, {}}, d_out.slice(0, begin, end),
                         gathered.slice(0, begin, end), weight, {}, where);
  };
  auto const in_the_shade = [&] {
    if (!activated) of_parameters();
  };
  if (comm.size() > 1)
    return detail::scatter_rows(ex, comm, gradients.input, blocks, overlap.chunks, overlap.order, memory,
                                multiply, in_the_shade, where);
  multiply(gradients.input, 0, d_out.extent(0));
  in_the_shade();
}

/// The gradients of linear_scatter, given d_out[my rows, n] (contiguous): gradients.input[all rows, k] and
/// those of weight and bias, all this rank's own. Give a bias gradient where a bias was given. Throws as
/// gather_linear does; config_error (E-parallel-091) for an activation, which a summand does not have.
template <exec::space Ex, comm::communicator Comm, storage_scalar T, storage_scalar G>
  requires overlaps_with<Comm, Ex>
void linear_scatter_backward(Ex& ex, Comm& comm, ops::linear_gradients<T, G, typename Ex::memory> gradients,
                             input<T, 2, typename Ex::memory> d_out, input<T, 2, typename Ex::memory> in,
                             input<T, 2, typename Ex::memory> weight,
                             ops::linear_backward_options<T, typename Ex::memory> options,
                             overlap_options const& overlap, arena<typename Ex::memory>& memory,
                             site where = site::here()) {
  using M = typename Ex::memory;
  constexpr auto name = "linear_scatter_backward";
  auto const rows = in.extent(0);
  detail::row_blocks const blocks{rows, comm.size(), overlap.rows};
  blocks.require(name, comm.rank(), d_out.extent(0), overlap.chunks, where);
  ops::require_contiguous(name, "d_out", d_out, where);
  if (options.activation != ops::activation::none)
    throw config_error("E-parallel-091", where, name,
                       ": what a rank adds to a sum over ranks has no activation of its own");
  auto const of_input = [&](view<T const, 2, M> d, index_t begin, index_t end) {
    if (gradients.input.data() == nullptr) return;
    auto part = options;
    if (part.input_activation != ops::activation::none)
      part.input_pre_activation = part.input_pre_activation.slice(0, begin, end);
    ops::linear_backward(ex, ops::linear_gradients<T, G, M>{gradients.input.slice(0, begin, end), {}, {}},
                         d.slice(0, begin, end), in.slice(0, begin, end), weight, part, where);
  };
  auto const of_parameters = [&](view<T const, 2, M> d) {
    ops::linear_backward(ex, ops::linear_gradients<T, G, M>{{}, gradients.weight, gradients.bias}, d, in,
                         weight, {.accumulate = options.accumulate}, where);
  };
  if (comm.size() == 1) {
    of_input(d_out, 0, rows);
    return of_parameters(d_out);
  }
  arena_scope const scope(memory);
  auto const all = memory.template take<T, 2>({rows, d_out.extent(1)}, where);
  detail::gather_rows(
      ex, comm, all, d_out, blocks, overlap.chunks,
      [&](index_t begin, index_t end) { of_input(all, begin, end); }, where);
  of_parameters(all);
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
