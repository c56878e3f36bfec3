// requires: openmp json xxhash sentencepiece cli11
//
// Writes text with a model that train_gpt has trained:
//
//   state, weights, tokenizer = the newest checkpoint of the run (every byte checked)
//   tokens = tokenizer(prompt)
//   repeat:
//     logits = model(new tokens)      keys and values of earlier tokens are kept: a step costs one token
//     token  = drawn from softmax(logits / temperature), cut to the top k and to probability top p
//     print(tokenizer^-1(token))
//
//   ./generate --run first --prompt "In the beginning" --tokens 300 --temperature 0.8 --top-p 0.95
//
// --device cuda computes on a GPU, in builds with TESSERA_WITH_CUDA; it does not matter where the model was
// trained.
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <tessera/comm/self.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/nn/make_transformer.hpp>
#include <tessera/train/checkpoint.hpp>
#include <tessera/train/command_line.hpp>
#include <tessera/train/generate.hpp>
#include <tessera/train/model_settings.hpp>
#include <tessera/train/text_tokenizer.hpp>
#if defined(TESSERA_WITH_CUDA)
#include <tessera/cuda.cuh>
#endif

using namespace tessera;

namespace {

struct choices {
  std::string run = "run", prompt = "In the beginning", device = "host";
  index_t tokens = 300, seed = 1;
  int threads = 0;
  train::sampling how{.temperature = 0.8, .top_k = 0, .top_p = 0.95};
};

void add_options(CLI::App& app, choices& c) {
  app.add_option("--run", c.run, "Folder of a run, whose newest checkpoint is used, or of one checkpoint.")
      ->capture_default_str();
  app.add_option("--prompt", c.prompt, "What the text begins with.")->capture_default_str();
  app.add_option("--tokens", c.tokens, "How many tokens to write.")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--temperature", c.how.temperature,
                 "Below 1 likely tokens become likelier, above 1 less so; 0: always the most probable one.")
      ->capture_default_str();
  app.add_option("--top-k", c.how.top_k, "Choose among the k most probable tokens. 0: all.")
      ->capture_default_str();
  app.add_option("--top-p", c.how.top_p,
                 "Choose among the fewest tokens that reach this probability. 1: all.")
      ->capture_default_str();
  app.add_option("--seed", c.seed, "Of the choices: the same seed gives the same text.")
      ->capture_default_str();
  app.add_option("--device", c.device, "'host', or 'cuda' for an NVIDIA GPU.")
      ->capture_default_str()
      ->check(CLI::IsMember({"host", "cuda"}));
  app.add_option("--threads", c.threads, "Of the host; 0: all cores.")->capture_default_str();
}

/// Shows the text at once. A full disk ends the program.
void print_text(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw io_error("E-io-004", site::here(), "cannot write the text: ", std::strerror(errno));
}

template <storage_scalar T, exec::space Ex>
void write_text(Ex& ex, choices const& c, std::string const& checkpoint, train::run_state const& state) {
  auto const config = train::model_config(state.chosen, state.vocabulary);
  auto units = nn::make_transformer<Ex, T, float>(config);
  nn::parameter_store<Ex, T, float> store(units, {.gradients = false});
  train::load_weights(ex, checkpoint, store);

  auto const learnt = state.chosen.tokenizer == "sentencepiece";
  train::text_tokenizer const tokenizer(
      state.chosen.tokenizer,
      learnt ? std::string(io::mapped_file(checkpoint + "/tokenizer.model").text()) : "");
  auto const print = [&](std::int32_t token) { print_text(tokenizer.decode(std::span(&token, 1))); };
  auto const prompt = tokenizer.encode(c.prompt);
  for (auto token : prompt) print(token);
  nn::decoder<Ex, T, float> decoder(units, store, config);
  (void)train::generate(ex, decoder, prompt, c.tokens, c.how, philox(static_cast<std::uint64_t>(c.seed)),
                        print);
  print_text("\n");
  for (auto const& note : ex.notes()) std::fprintf(stderr, "%s\n", note.c_str());
}

template <exec::space Ex>
void write_text(Ex& ex, choices const& c) {
  auto const checkpoint = train::readable_checkpoint(c.run);
  comm::self alone;
  auto const state = train::read_state(alone, checkpoint);
  std::fprintf(stderr, "%s: %s, step %lld\n", checkpoint.c_str(), state.chosen.family.c_str(),
               static_cast<long long>(state.step));
  if (state.chosen.storage == "bf16")
    write_text<bf16>(ex, c, checkpoint, state);
  else
    write_text<float>(ex, c, checkpoint, state);
}

void write_text(choices const& c) {
  if (c.device == "host") {
    exec::host ex({.threads = c.threads});
    write_text(ex, c);
  } else {
#if defined(TESSERA_WITH_CUDA)
    exec::cuda ex; // says so if the machine has no GPU
    write_text(ex, c);
#else
    throw config_error("E-train-007", site::here(), "device is ", c.device, ", and this program was built ",
                       "without CUDA; build it with -DTESSERA_WITH_CUDA=ON, which needs nvcc, or choose ",
                       "--device host");
#endif
  }
}

} // namespace

int main(int argc, char** argv) {
  CLI::App app("Writes text with a model that train_gpt has trained.", "generate");
  choices c;
  add_options(app, c);
  CLI11_PARSE(app, argc, argv);
  try {
    write_text(c);
  } catch (std::exception const& fault) {
    std::fprintf(stderr, "generate: %s\n", fault.what());
    return 1;
  }
}
