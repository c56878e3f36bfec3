/// Attention and its gradients by the definition, in double: what the tests of the host's and of CUDA's
/// compare with.
#ifndef TESSERA_TESTS_OPS_ATTENTION_REFERENCE_HPP
#define TESSERA_TESTS_OPS_ATTENTION_REFERENCE_HPP

#include <cmath>
#include <vector>

#include <tessera/core/extents.hpp>

namespace attention_reference {

using tessera::index_t;

struct sizes {
  index_t batch, queries, keys, heads, key_heads, width;
};

/// With whole rows of scores.
struct exact {
  std::vector<double> out, log_sum_exp, dq, dk, dv;

  exact(sizes s, std::vector<double> const& q, std::vector<double> const& k, std::vector<double> const& v,
        std::vector<double> const& d_out, double scale, bool causal, index_t first_query)
      : out(q.size()), log_sum_exp(static_cast<std::size_t>(s.batch * s.heads * s.queries)), dq(q.size()),
        dk(k.size()), dv(k.size()) {
    auto const query = [s](index_t b, index_t t, index_t h, index_t d) {
      return static_cast<std::size_t>(((b * s.queries + t) * s.heads + h) * s.width + d);
    };
    auto const key = [s](index_t b, index_t t, index_t h, index_t d) {
      return static_cast<std::size_t>(
          ((b * s.keys + t) * s.key_heads + h / (s.heads / s.key_heads)) * s.width + d);
    };
    for (index_t b = 0; b < s.batch; ++b)
      for (index_t h = 0; h < s.heads; ++h)
        for (index_t t = 0; t < s.queries; ++t) {
          auto const seen = causal ? std::min(s.keys, first_query + t + 1) : s.keys;
          std::vector<double> p(static_cast<std::size_t>(seen)), dp(p.size());
          double total = 0, weighted = 0;
          for (index_t j = 0; j < seen; ++j) {
            auto& score = p[static_cast<std::size_t>(j)];
            for (index_t d = 0; d < s.width; ++d) score += scale * q[query(b, t, h, d)] * k[key(b, j, h, d)];
            total += std::exp(score);
          }
          log_sum_exp[static_cast<std::size_t>((b * s.heads + h) * s.queries + t)] = std::log(total);
          for (index_t j = 0; j < seen; ++j) {
            auto const i = static_cast<std::size_t>(j);
            p[i] = std::exp(p[i]) / total;
            for (index_t d = 0; d < s.width; ++d) {
              out[query(b, t, h, d)] += p[i] * v[key(b, j, h, d)];
              dv[key(b, j, h, d)] += p[i] * d_out[query(b, t, h, d)];
              dp[i] += d_out[query(b, t, h, d)] * v[key(b, j, h, d)];
            }
            weighted += p[i] * dp[i];
          }
          for (index_t j = 0; j < seen; ++j) {
            auto const i = static_cast<std::size_t>(j);
            auto const ds = scale * p[i] * (dp[i] - weighted);
            for (index_t d = 0; d < s.width; ++d) {
              dq[query(b, t, h, d)] += ds * k[key(b, j, h, d)];
              dk[key(b, j, h, d)] += ds * q[query(b, t, h, d)];
            }
          }
        }
  }
};

} // namespace attention_reference

#endif
