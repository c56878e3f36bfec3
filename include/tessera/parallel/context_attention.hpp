/// Attention over a sequence that is spread over ranks, in either form: keys and values round a ring
/// (parallel/ring_attention.hpp), or heads against sequence (parallel/sequence_exchange.hpp). What one rank
/// gets over the whole sequence, each rank gets for the positions that it holds.
///
///     parallel::context_options const options{.sequence_length = 8192};
///     auto const form = parallel::context_form::ring;
///     parallel::context_attention(ex, comm, form, out, log_sum_exp, q, k, v, options, memory);
///     parallel::context_attention_backward(ex, comm, form, dq, dk, dv, d_out, q, k, v, out, log_sum_exp,
///                                          options, memory);
///
/// Which form? The exchange sends less (1/n of all heads' q, k, v and out to each other rank), but nothing
/// hides it, and n must divide the heads. The ring sends whole blocks of keys and values n - 1 times, behind
/// the arithmetic, and takes any number of ranks. docs/context_parallel.md has the bytes.
#ifndef TESSERA_PARALLEL_CONTEXT_ATTENTION_HPP
#define TESSERA_PARALLEL_CONTEXT_ATTENTION_HPP

#include <tessera/parallel/ring_attention.hpp>
#include <tessera/parallel/sequence_exchange.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// Bytes that a forward takes from its arena on any rank: an upper bound, the same on all of them. One rank
/// alone takes nothing.
template <storage_scalar T>
constexpr index_t context_attention_scratch_bytes(context_form form, context_sizes const& sizes,
                                                  layout::sequence_shards const& shards) {
  return form == context_form::ring ? ring_attention_scratch_bytes<T>(sizes, shards)
                                    : exchange_attention_scratch_bytes<T>(sizes, shards);
}
template <storage_scalar T>
constexpr index_t context_attention_backward_scratch_bytes(context_form form, context_sizes const& sizes,
                                                           layout::sequence_shards const& shards) {
  return form == context_form::ring ? ring_attention_backward_scratch_bytes<T>(sizes, shards)
                                    : exchange_attention_backward_scratch_bytes<T>(sizes, shards);
}

/// out[B, t, H, D] and log_sum_exp[B, H, t] for the t positions that this rank holds,
/// options.shards(comm.size()).positions(comm.rank()), from its q[B, t, H, D], k and v[B, t, K, D]. Views may
/// be strided (slices of one packed tensor) with a last stride of 1; log_sum_exp is contiguous. Called by
/// every rank of `comm`; what it takes from `memory` it gives back.
template <exec::space Ex, comm::communicator Comm, storage_scalar T>
void context_attention(Ex& ex, Comm& comm, context_form form, view<T, 4, typename Ex::memory> out,
                       view<float, 3, typename Ex::memory> log_sum_exp, input<T, 4, typename Ex::memory> q,
                       input<T, 4, typename Ex::memory> k, input<T, 4, typename Ex::memory> v,
                       context_options const& options, arena<typename Ex::memory>& memory,
                       site where = site::here()) {
  if (form == context_form::ring)
    ring_attention(ex, comm, out, log_sum_exp, q, k, v, options, memory, where);
  else
    exchange_attention(ex, comm, out, log_sum_exp, q, k, v, options, memory, where);
}

/// The gradients dq[B, t, H, D], dk and dv[B, t, K, D] of `context_attention`, overwritten, given
/// d_out[B, t, H, D] and what the forward read and wrote, with the same form and options.
template <exec::space Ex, comm::communicator Comm, storage_scalar T>
void context_attention_backward(Ex& ex, Comm& comm, context_form form, view<T, 4, typename Ex::memory> dq,
                                view<T, 4, typename Ex::memory> dk, view<T, 4, typename Ex::memory> dv,
                                input<T, 4, typename Ex::memory> d_out, input<T, 4, typename Ex::memory> q,
                                input<T, 4, typename Ex::memory> k, input<T, 4, typename Ex::memory> v,
                                input<T, 4, typename Ex::memory> out,
                                input<float, 3, typename Ex::memory> log_sum_exp,
                                context_options const& options, arena<typename Ex::memory>& memory,
                                site where = site::here()) {
  if (form == context_form::ring)
    ring_attention_backward(ex, comm, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, options, memory, where);
  else
    exchange_attention_backward(ex, comm, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, options, memory,
                                where);
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
