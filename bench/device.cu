// What the kernels reach on this GPU, as shares of what it can do, measured in the same run: memory-bound
// kernels against a plain copy of device memory, matrix products and attention against the fastest large
// product of cuBLASLt, and the training step of GPT-2 124M as model FLOP utilisation. Needs the CUDA toolkit
// and nothing else.
//
//     device [--quick] [--text FILE]       prints a table, one row a measurement
//
// With a text the quickstart's model is trained on it for 20 steps here and on the host, from the same
// weights and in the same order: the last row is the largest relative difference of their losses, and more
// than 2% is a failure. Shares of the copy bandwidth count the bytes that an operation must move: each
// operand once. Model FLOPs are those of Kaplan et al. (2020): 6 N D for N parameters of matrices and D
// tokens, and attention's 12 L T d a token (half of it causal); no recomputation is counted.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <tessera/cuda.cuh>

#include <tessera/comm/self.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/nn/model.hpp>
#include <tessera/optim/adamw.hpp>
#include <tessera/train/machine.hpp>

namespace {

using namespace tessera;

using space = exec::cuda;
using memory = space::memory;
template <class T, int Rank>
using array = tensor<T, Rank, memory>;

class table {
public:
  table(space& ex, bool quick) : ex_(ex), turns_(quick ? 5 : 15) {
    std::printf("| measured | share | of | time |\n|---|---|---|---|\n");
  }

  /// Median device time of one call, in seconds. The first calls prepare what is kept.
  template <class F>
  double seconds_of(F&& f) {
    f();
    f();
    exec::event start(ex_, {.timed = true}), end(ex_, {.timed = true});
    std::vector<double> times;
    for (int turn = 0; turn < turns_; ++turn) {
      constexpr int calls = 5;
      start.record(ex_);
      for (int i = 0; i < calls; ++i) f();
      end.record(ex_);
      end.wait();
      times.push_back(end.milliseconds_since(start) / 1e3 / calls);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  void row(std::string const& name, double share, char const* limit, double seconds) {
    std::printf("| %s | %.3f | %s | %.3f ms |\n", name.c_str(), share, limit, 1e3 * seconds);
    std::fflush(stdout);
  }

  /// `bytes` that must move, as a share of the copy bandwidth.
  template <class F>
  void memory_bound(std::string const& name, double bytes, F&& f) {
    auto const seconds = seconds_of(f);
    row(name, bytes / seconds / bandwidth, "copy bandwidth", seconds);
  }
  template <class F>
  void arithmetic_bound(std::string const& name, double operations, F&& f) {
    auto const seconds = seconds_of(f);
    row(name, operations / seconds / peak, "cuBLASLt's peak", seconds);
  }

  double bandwidth = 1; ///< Bytes read and written a second.
  double peak = 1;      ///< Operations a second.

private:
  space& ex_;
  int turns_;
};

template <class T, int Rank>
void randomise(space& ex, array<T, Rank>& x, float deviation, std::uint64_t stream) {
  ops::random_normal(ex, x.view().template reshape<1>({x.size()}),
                     {.deviation = deviation, .seed = 1, .stream = stream});
}

template <class T>
void memory_bound_rows(space& ex, table& rows, index_t tokens, index_t width) {
  auto const type = std::string(scalar_name<T>());
  auto const named = [&](char const* name) { return name + (" " + type); };
  auto const n = tokens * width;
  auto const bytes = static_cast<double>(n) * sizeof(T);
  array<T, 2> a({tokens, width}), b({tokens, width}), c({tokens, width}), twice({tokens, 2 * width});
  array<T, 1> gain({width}), bias({width});
  array<float, 1> mean({tokens}), deviation({tokens}), d_gain({width}), d_bias({width});
  array<float, 1> wide({n});
  for (auto* x : {&a, &b, &twice}) randomise(ex, *x, 1, 1);
  ops::fill(ex, gain.view(), 1.0f);
  auto const flat = [&](array<T, 2>& x) { return x.view().template reshape<1>({x.size()}); };
  view<T const, 2, memory> const x = a.view(), y = b.view(), gates = twice.view();

  rows.memory_bound(named("add"), 3 * bytes, [&] { ops::add(ex, flat(c), flat(a), flat(b)); });
  rows.memory_bound(named("scale"), 2 * bytes, [&] { ops::scale(ex, flat(c), flat(a), 0.5f); });
  rows.memory_bound(named("cast to fp32 from"), bytes + 4.0 * static_cast<double>(n),
                    [&] { ops::cast(ex, wide.view(), flat(a)); });
  rows.memory_bound(named("sum_of_squares"), bytes, [&] { (void)ops::sum_of_squares(ex, flat(a)); });
  rows.memory_bound(named("gelu"), 2 * bytes, [&] { ops::gelu(ex, flat(c), flat(a)); });
  rows.memory_bound(named("gelu_backward"), 3 * bytes,
                    [&] { ops::gelu_backward(ex, flat(c), flat(a), flat(b)); });
  rows.memory_bound(named("swiglu"), 3 * bytes, [&] { ops::swiglu(ex, c.view(), gates); });
  rows.memory_bound(named("swiglu_backward"), 5 * bytes,
                    [&] { ops::swiglu_backward(ex, twice.view(), x, gates); });
  rows.memory_bound(named("dropout"), 2 * bytes,
                    [&] { ops::dropout(ex, c.view(), x, {.probability = 0.1f, .seed = 1}); });
  rows.memory_bound(named("layer_norm"), 2 * bytes, [&] {
    ops::layer_norm(ex, c.view(), mean.view(), deviation.view(), x, gain.view(), bias.view());
  });
  rows.memory_bound(named("residual_layer_norm"), 4 * bytes, [&] {
    ops::residual_layer_norm(ex, c.view(), b.view(), mean.view(), deviation.view(), x, y, gain.view(),
                             bias.view());
  });
  rows.memory_bound(named("layer_norm_backward"), 3 * bytes, [&] {
    ops::layer_norm_backward(ex, c.view(), d_gain.view(), d_bias.view(), y, x, mean.view(), deviation.view(),
                             gain.view());
  });
  rows.memory_bound(named("rms_norm"), 2 * bytes,
                    [&] { ops::rms_norm(ex, c.view(), deviation.view(), x, gain.view()); });
  rows.memory_bound(named("rms_norm_backward"), 3 * bytes, [&] {
    ops::rms_norm_backward(ex, c.view(), d_gain.view(), y, x, deviation.view(), gain.view());
  });
}

template <class T>
void classifier_rows(space& ex, table& rows) {
  constexpr index_t tokens = 4096, classes = 50257;
  array<T, 2> logits({tokens, classes});
  array<float, 1> losses({tokens});
  array<std::int32_t, 1> targets({tokens});
  array<double, 1> totals({2});
  randomise(ex, logits, 1, 2);
  rows.memory_bound("cross_entropy with gradient, 50257 classes, " + std::string(scalar_name<T>()),
                    2.0 * sizeof(T) * tokens * classes, [&] {
                      ops::cross_entropy(ex, logits.view(), losses.view(), targets.view(),
                                         {.write_gradient = true, .totals = totals.view()});
                    });
}

template <class T>
void adamw_row(space& ex, table& rows, index_t n) {
  array<T, 1> weights({n});
  array<float, 1> gradients({n});
  optim::adamw<space, T> optimizer(ex, n, {}, {{0, n}});
  optimizer.start_from(ex, memory_span<T const, memory>(weights.span()));
  index_t step = 0;
  rows.memory_bound("AdamW " + std::string(scalar_name<T>()),
                    static_cast<double>(n) * (std::same_as<T, float> ? 28 : 30), [&] {
                      optimizer.step(ex, weights.span(), memory_span<float const, memory>(gradients.span()),
                                     {.step = ++step, .learning_rate = 1e-4});
                    });
}

template <class T>
void attention_rows(space& ex, table& rows, index_t width, index_t heads, index_t key_heads) {
  constexpr index_t batch = 4, length = 4096;
  array<T, 4> q({batch, length, heads, width}), out(q.extents()), dq(q.extents()), d_out(q.extents());
  array<T, 4> k({batch, length, key_heads, width}), v(k.extents()), dk(k.extents()), dv(k.extents());
  array<float, 3> log_sum_exp({batch, heads, length});
  for (auto* x : {&q, &k, &v, &d_out}) randomise(ex, *x, 1, 3);
  auto const operations = 2.0 * static_cast<double>(batch * heads * length * length * width); // causal
  auto const name = " " + std::string(scalar_name<T>()) + ", 4 x 4096 tokens, " + std::to_string(heads) +
                    "/" + std::to_string(key_heads) + " heads of " + std::to_string(width);
  rows.arithmetic_bound("attention" + name, operations, [&] {
    ops::attention(ex, out.view(), log_sum_exp.view(), q.view(), k.view(), v.view());
  });
  rows.arithmetic_bound("attention_backward" + name, 2.5 * operations, [&] {
    ops::attention_backward(ex, dq.view(), dk.view(), dv.view(), d_out.view(), q.view(), k.view(), v.view(),
                            out.view(), log_sum_exp.view());
  });
}

/// The layers' products, with what is fused into them.
template <class T>
void linear_rows(space& ex, table& rows) {
  constexpr index_t tokens = 16384, k = 768, n = 3072;
  array<T, 2> in({tokens, k}), weight({n, k}), out({tokens, n}), pre({tokens, n}), d_in({tokens, k});
  array<T, 1> bias({n});
  array<float, 2> d_weight({n, k});
  array<float, 1> d_bias({n});
  randomise(ex, in, 1, 4);
  randomise(ex, weight, 0.02f, 5);
  auto const operations = 2.0 * tokens * k * n;
  auto const type = std::string(scalar_name<T>());
  rows.arithmetic_bound("linear, bias and GELU fused, 16384 x 768 -> 3072, " + type, operations, [&] {
    ops::linear(ex, out.view(), in.view(), weight.view(), bias.view(),
                {.activation = ops::activation::gelu_tanh, .pre_activation = pre.view()});
  });
  rows.arithmetic_bound("linear_backward of it, " + type, 2 * operations, [&] {
    ops::linear_backward(
        ex, ops::linear_gradients<T, float, memory>{d_in.view(), d_weight.view(), d_bias.view()}, out.view(),
        in.view(), weight.view(), {.activation = ops::activation::gelu_tanh, .pre_activation = pre.view()});
  });
}

template <class T>
void gpt2_row(space& ex, table& rows, index_t batch, index_t length) {
  auto const config = nn::gpt2_124m();
  nn::model<space, T, float> model(config, {batch, length});
  auto& store = model.store();
  nn::initialise(ex, store, 1);
  optim::adamw<space, T> optimizer(ex, store.size(), {}, {{0, store.size()}});
  optimizer.start_from(ex, memory_span<T const, memory>(store.weights()));
  exec::staged<std::int32_t, 2, space> tokens(ex, {batch, length}), targets(ex, {batch, length});
  philox const random(7);
  for (auto* side : {&tokens, &targets}) {
    auto host = side->host();
    for (index_t i = 0; i < host.size(); ++i)
      host.data()[i] = narrow<std::int32_t>(random.bits(static_cast<std::uint64_t>(i)) % 50257);
  }
  auto const in = tokens.upload(ex), out = targets.upload(ex);
  index_t step = 0;
  auto const seconds = rows.seconds_of([&] {
    auto const loss = model.forward_backward(ex, in, out, {.step = static_cast<std::uint64_t>(step)});
    optimizer.step(ex, store.weights(), memory_span<float const, memory>(store.gradients()),
                   {.step = ++step, .learning_rate = 1e-4, .gradient_scale = 1.0 / loss.count});
  });
  auto const matrices = static_cast<double>(config.layers * 12 * config.width * config.width +
                                            config.vocabulary_size * config.width);
  auto const per_token =
      6 * matrices + 6.0 * static_cast<double>(config.layers * length * config.width); // attention, causal
  auto const count = static_cast<double>(batch * length);
  rows.row("GPT-2 124M step, " + std::string(scalar_name<T>()) + ", " + std::to_string(batch) + " x " +
               std::to_string(length) + " tokens",
           per_token * count / seconds / rows.peak, "cuBLASLt's peak (model FLOP utilisation)", seconds);
}

/// The first losses of the quickstart's model over the bytes of a text, on one space.
template <exec::space Ex>
std::vector<double> first_losses(Ex& ex, std::string const& text, int steps) {
  constexpr index_t batch = 4, length = 128;
  nn::transformer_config const config{.family = nn::transformer_family::llama,
                                      .vocabulary_size = 256,
                                      .sequence_length = length,
                                      .width = 256,
                                      .layers = 5,
                                      .heads = 4};
  nn::model<Ex, bf16, float> model(config, {batch, length});
  auto& store = model.store();
  // From the host's numbers: a device's may differ in the last place.
  exec::host on_host;
  nn::model<exec::host, bf16, float> start(config, {1, 1});
  nn::initialise(on_host, start.store(), 1);
  exec::copy(ex, store.weights(), std::span<bf16 const>(start.store().weights()));
  optim::adamw<Ex, bf16> optimizer(ex, store.size(), {}, {{0, store.size()}});
  using weights_span = memory_span<bf16 const, typename Ex::memory>;
  using gradients_span = memory_span<float const, typename Ex::memory>;
  optimizer.start_from(ex, weights_span(store.weights()));
  exec::staged<std::int32_t, 2, Ex> tokens(ex, {batch, length}), targets(ex, {batch, length});
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    auto in = tokens.host(), out = targets.host();
    for (index_t i = 0; i < batch * length; ++i) {
      auto const at = static_cast<std::size_t>(step * batch * length + i) % (text.size() - 1);
      in.data()[i] = static_cast<unsigned char>(text[at]);
      out.data()[i] = static_cast<unsigned char>(text[at + 1]);
    }
    auto const loss = model.forward_backward(ex, tokens.upload(ex), targets.upload(ex), {});
    optimizer.step(ex, store.weights(), gradients_span(store.gradients()),
                   {.step = step + 1, .learning_rate = 0.002, .gradient_scale = 1.0 / loss.count});
    losses.push_back(loss.sum / loss.count);
  }
  return losses;
}

/// Whether they agree to what bf16 leaves of them.
bool losses_row(space& ex, std::string const& file) {
  std::string text;
  if (auto* in = std::fopen(file.c_str(), "rb")) {
    char part[4096];
    for (std::size_t n; (n = std::fread(part, 1, sizeof part, in)) > 0;) text.append(part, n);
    std::fclose(in);
  }
  if (text.size() < 2) throw io_error("E-bench-001", site::here(), file, " cannot be read, or is empty");
  constexpr int steps = 20;
  exec::host host;
  auto const here = first_losses(ex, text, steps), there = first_losses(host, text, steps);
  auto worst = 0.0;
  for (std::size_t i = 0; i < here.size(); ++i)
    worst = (std::max)(worst, std::abs(here[i] - there[i]) / there[i]);
  std::printf(
      "| first %d losses of the quickstart's model, %.3f to %.3f | %.1e | largest relative difference "
      "from the host | |\n",
      steps, here.front(), here.back(), worst);
  return worst < 0.02;
}

int measure(bool quick, std::string const& text) {
  space ex;
  table rows(ex, quick);
  {
    constexpr index_t bytes = index_t{1} << 30;
    array<std::byte, 1> from({bytes}), to({bytes});
    auto const seconds = rows.seconds_of(
        [&] { exec::copy(ex, to.span(), memory_span<std::byte const, memory>(from.span())); });
    rows.bandwidth = 2.0 * static_cast<double>(bytes) / seconds;
    std::printf("| copy of device memory: %.0f GB/s read and written | 1 | itself | %.3f ms |\n",
                rows.bandwidth / 1e9, 1e3 * seconds);
  }
  rows.peak = train::detail::product_rate<bf16>(ex, train::peak_options{});
  std::printf("| product in bf16: %.0f TFLOP/s | 1 | itself | |\n", rows.peak / 1e12);

  auto const tokens = index_t{quick ? 8192 : 32768};
  memory_bound_rows<bf16>(ex, rows, tokens, 4096);
  memory_bound_rows<float>(ex, rows, tokens, 4096);
  classifier_rows<bf16>(ex, rows);
  classifier_rows<float>(ex, rows);
  adamw_row<bf16>(ex, rows, index_t{1} << 27);
  adamw_row<float>(ex, rows, index_t{1} << 27);
  linear_rows<bf16>(ex, rows);
  attention_rows<bf16>(ex, rows, 64, 16, 16);
  attention_rows<bf16>(ex, rows, 128, 16, 16);
  attention_rows<bf16>(ex, rows, 128, 16, 4);
  attention_rows<fp16>(ex, rows, 96, 16, 16);
  gpt2_row<bf16>(ex, rows, quick ? 8 : 32, 1024);
  return text.empty() || losses_row(ex, text) ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  bool quick = false;
  std::string text;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (std::strcmp(argv[i], "--text") == 0 && i + 1 < argc) {
      text = argv[++i];
    } else {
      std::fprintf(stderr, "usage: device [--quick] [--text FILE]\n");
      return 2;
    }
  }
  try {
    return measure(quick, text);
  } catch (std::exception const& fault) {
    std::fprintf(stderr, "device: %s\n", fault.what());
    return 1;
  }
}
