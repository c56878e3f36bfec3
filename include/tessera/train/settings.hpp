/// The settings of a training run: one struct, and one table that says what each setting is called, what it
/// means and which values it may take. JSON, the command line, --help, the checks, and what a resumed run may
/// not change are all read from that table, so they cannot disagree.
///
///     train::settings s;
///     train::set(s, "learning_rate", "3e-4");     // by name, as text; unknown names name the nearest
///     train::check(s);                            // throws config_error that says how to fix it
#ifndef TESSERA_TRAIN_SETTINGS_HPP
#define TESSERA_TRAIN_SETTINGS_HPP

#include <charconv>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include <tessera/core/extents.hpp>
#include <tessera/train/detail/nearest.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct settings {
  std::string data;
  std::string tokenizer = "bytes";
  index_t vocabulary = 0;
  double validation_share = 0.05;

  std::string family = "gpt2";
  index_t layers = 4;
  index_t width = 256;
  index_t heads = 4;
  index_t key_value_heads = 0;
  index_t feed_forward = 0;
  index_t sequence_length = 128;
  double dropout = 0;
  double norm_epsilon = 1e-5;
  double rotary_theta = 10000;
  double label_smoothing = 0;
  double z_loss = 0;
  bool tied_head = true;
  std::string storage = "bf16";

  index_t steps = 1000;
  index_t batch = 16;
  index_t micro_batch = 8;
  double learning_rate = 1e-3;
  std::string schedule = "cosine";
  index_t warm_up_steps = 50;
  index_t decay_steps = 0;
  double final_rate_share = 0.1;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double clip = 1;
  index_t seed = 1337;

  std::string device = "host";
  index_t ranks = 1;
  index_t threads = 0;
  std::string layout;
  index_t data_ranks = 0;
  index_t tensor = 1;
  index_t pipeline = 1;
  index_t context = 1;
  index_t zero_stage = 1;
  index_t shard_group = 0;
  bool sequence_parallel = false;
  std::string context_form = "ring";
  std::string context_shards = "zigzag";
  std::string pipeline_schedule = "1f1b";
  index_t chunks = 1;
  std::string recompute = "none";
  bool reproducible = false;
  double bucket_mib = 4;

  std::string run = "run";
  double stall_limit = 600;
  index_t checkpoint_every = 200;
  index_t keep = 3;
  index_t validate_every = 100;
  index_t validation_samples = 64;
  index_t log_every = 1;
  bool measure_peak = true;
  index_t sample_tokens = 200;
  std::string prompt = "In the beginning";

  /// Names of differences that this resumption is meant to have. Never part of a file: it is said once.
  std::vector<std::string> allow_difference;
};

/// What a checkpoint says to another value of a setting.
enum class binding {
  refused, ///< It decides the run's numbers: refused unless it is allowed by name.
  layout,  ///< It may decide their rounding: what is compared is the layout of the ranks, as a whole.
  free     ///< It does not.
};

struct field {
  std::string_view group;
  std::string_view name; ///< The key in JSON; on the command line --with-hyphens.
  std::variant<std::string settings::*, index_t settings::*, double settings::*, bool settings::*> member;
  std::string_view help;
  binding bound = binding::refused;
  double least = 0; ///< For numbers; text has `choices` instead.
  double most = 9e15;
  std::string_view choices{}; ///< "gpt2|llama"; empty: any text.
};

inline constexpr field fields[] = {
    {"Data", "data", &settings::data,
     "Text to learn from: any file of UTF-8 text, or (with tokenizer 'tokens') a token file in llm.c's .bin "
     "layout. A resumed run recognises it by its content, not by its path.",
     binding::free},
    {"Data", "tokenizer", &settings::tokenizer,
     "How text becomes numbers: 'bytes' takes each byte as a token; 'sentencepiece' learns pieces of words "
     "from the text; 'tokens' means that the data is a token file already.",
     binding::refused, 0, 0, "bytes|sentencepiece|tokens"},
    {"Data", "vocabulary", &settings::vocabulary,
     "Number of different tokens. 0 chooses: 256 for bytes, 2048 for sentencepiece.", binding::refused, 0,
     1 << 24},
    {"Data", "validation_share", &settings::validation_share,
     "Share of the tokens, at the end of the text, that is kept for validation and never trained on.",
     binding::refused, 1e-6, 0.5},

    {"Model", "family", &settings::family,
     "'gpt2': learned positions, layer norm, GELU; 'llama': rotary positions, RMS norm, SwiGLU.",
     binding::refused, 0, 0, "gpt2|llama"},
    {"Model", "layers", &settings::layers, "Number of transformer blocks.", binding::refused, 1, 10000},
    {"Model", "width", &settings::width, "Hidden size: numbers that describe one token between blocks.",
     binding::refused, 1, 1 << 20},
    {"Model", "heads", &settings::heads, "Attention heads; the width must be a multiple of it.",
     binding::refused, 1, 1 << 20},
    {"Model", "key_value_heads", &settings::key_value_heads,
     "Heads of keys and values, each shared by heads / key_value_heads query heads (llama). 0: as many as "
     "heads.",
     binding::refused, 0, 1 << 20},
    {"Model", "feed_forward", &settings::feed_forward,
     "Inner width of the feed-forward layers. 0: 4 times the width (gpt2), 8/3 of it (llama).",
     binding::refused, 0, 1 << 24},
    {"Model", "sequence_length", &settings::sequence_length, "Tokens that the model sees at once.",
     binding::refused, 1, 1 << 24},
    {"Model", "dropout", &settings::dropout, "Probability that an activation is dropped in training.",
     binding::refused, 0, 0.999},
    {"Model", "norm_epsilon", &settings::norm_epsilon, "Added to the variance that norms divide by.",
     binding::refused, 1e-12, 0.1},
    {"Model", "rotary_theta", &settings::rotary_theta, "Base of the rotary positions' wavelengths (llama).",
     binding::refused, 1.001, 1e12},
    {"Model", "label_smoothing", &settings::label_smoothing,
     "Share of the training target that is spread over all tokens. Validation never has it.",
     binding::refused, 0, 0.999},
    {"Model", "z_loss", &settings::z_loss,
     "Weight of the squared log of the softmax's normaliser in the training loss; keeps logits small.",
     binding::refused, 0, 100},
    {"Model", "tied_head", &settings::tied_head,
     "true: the output layer uses the token embedding's matrix; false: it has its own."},
    {"Model", "storage", &settings::storage,
     "What weights and activations are stored in; sums are always made in fp32, like the residual stream "
     "that goes through all layers. bf16 keeps fp32 master weights in the optimizer.",
     binding::refused, 0, 0, "fp32|bf16"},

    {"Training", "steps", &settings::steps, "Optimizer steps of the whole run.", binding::refused, 0, 1e12},
    {"Training", "batch", &settings::batch,
     "Sequences of one step, over all ranks. The result does not depend on how ranks share them, to "
     "rounding.",
     binding::refused, 1, 1 << 30},
    {"Training", "micro_batch", &settings::micro_batch,
     "Sequences that one rank works on at once; lower it to save memory. Gradients add up over "
     "micro-batches.",
     binding::layout, 1, 1 << 30},
    {"Training", "learning_rate", &settings::learning_rate, "The largest learning rate of the schedule."},
    {"Training", "schedule", &settings::schedule,
     "The learning rate after warm-up: 'constant', 'linear' or 'cosine' down to the final share at the last "
     "step, or 'warm_up_stable_decay': stable, then down over the last decay_steps.",
     binding::refused, 0, 0, "constant|linear|cosine|warm_up_stable_decay"},
    {"Training", "warm_up_steps", &settings::warm_up_steps,
     "Steps over which the learning rate rises to the largest.", binding::refused, 0, 1e12},
    {"Training", "decay_steps", &settings::decay_steps,
     "Length of the decay of 'warm_up_stable_decay'. 0: a fifth of the steps.", binding::refused, 0, 1e12},
    {"Training", "final_rate_share", &settings::final_rate_share,
     "Share of the largest rate that a falling schedule ends at.", binding::refused, 0, 1},
    {"Training", "weight_decay", &settings::weight_decay,
     "Decoupled decay of matrices and embeddings; norms and biases are not decayed."},
    {"Training", "beta1", &settings::beta1, "AdamW: decay of the first moment, the gradient's mean.",
     binding::refused, 0, 0.999999},
    {"Training", "beta2", &settings::beta2, "AdamW: decay of the second moment, the gradient's square.",
     binding::refused, 0, 0.9999999},
    {"Training", "epsilon", &settings::epsilon, "AdamW: added to the root of the square.", binding::refused,
     1e-30, 1},
    {"Training", "clip", &settings::clip,
     "Gradients with a larger global norm are scaled down to it. 0: never."},
    {"Training", "seed", &settings::seed, "Of the weights, the order of the data and the dropout."},

    {"Layout", "device", &settings::device,
     "Where a rank computes: 'host' is the processor; 'cuda' is an NVIDIA GPU for each rank, in programs "
     "built with TESSERA_WITH_CUDA and TESSERA_WITH_NCCL.",
     binding::refused, 0, 0, "host|cuda"},
    {"Layout", "ranks", &settings::ranks,
     "Ranks as threads of one process. Under mpiexec the ranks are its processes, and this stays 1.",
     binding::free, 1, 4096},
    {"Layout", "threads", &settings::threads,
     "Threads of each rank on the host. 0: the cores that it may use, divided among the ranks that may.",
     binding::free, 0, 4096},
    {"Layout", "layout", &settings::layout,
     "How the run lies over the ranks, in one line such as 'data 2 x tensor 2 x pipeline 2, zero 3, 1f1b': "
     "instead of the settings from here to reproducible, which say the same one by one.",
     binding::layout},
    {"Layout", "data_ranks", &settings::data_ranks,
     "Ranks that take different samples. 0: as many as tensor, pipeline and context leave.", binding::layout,
     0, 4096},
    {"Layout", "tensor", &settings::tensor, "Ranks that share each matrix; heads must be a multiple of it.",
     binding::layout, 1, 4096},
    {"Layout", "pipeline", &settings::pipeline, "Ranks that share the layers, one stretch of them each.",
     binding::layout, 1, 4096},
    {"Layout", "context", &settings::context, "Ranks that share each sequence.", binding::layout, 1, 4096},
    {"Layout", "zero_stage", &settings::zero_stage,
     "What ranks with different samples share (ZeRO): 0 nothing, 1 the optimizer's state, 2 gradients too, "
     "3 weights too.",
     binding::layout, 0, 3},
    {"Layout", "shard_group", &settings::shard_group,
     "Share among this many neighbouring ranks, and replicate that over the others. 0: among all.",
     binding::layout, 0, 4096},
    {"Layout", "sequence_parallel", &settings::sequence_parallel,
     "Tensor ranks share the rows between matrices too: less memory for the same messages.", binding::layout},
    {"Layout", "context_form", &settings::context_form,
     "Attention over a shared sequence: 'ring' passes keys and values round, 'exchange' heads against "
     "sequence.",
     binding::layout, 0, 0, "ring|exchange"},
    {"Layout", "context_shards", &settings::context_shards,
     "Which part of a sequence a rank has: 'zigzag' balances the work, 'contiguous' is one stretch.",
     binding::layout, 0, 0, "zigzag|contiguous"},
    {"Layout", "pipeline_schedule", &settings::pipeline_schedule,
     "Order of forwards and backwards on the pipeline's ranks. All give the same bits.", binding::free, 0, 0,
     "1f1b|gpipe|interleaved|zero_bubble"},
    {"Layout", "chunks", &settings::chunks,
     "Stretches of layers on each pipeline rank, with the interleaved schedule.", binding::free, 1, 4096},
    {"Layout", "recompute", &settings::recompute,
     "What backward computes again to save memory: nothing, attention, or all of a block.", binding::free, 0,
     0, "none|attention|unit"},
    {"Layout", "reproducible", &settings::reproducible,
     "The same bits on any number of data and pipeline ranks, for more memory and time.", binding::layout},
    {"Layout", "bucket_mib", &settings::bucket_mib,
     "With zero_stage 0 gradients are reduced in pieces of about this many MiB while backward runs; the "
     "other stages reduce unit by unit.",
     binding::free, 0.001, 65536},

    {"Run", "run", &settings::run,
     "Folder of the run: checkpoints, metrics.csv, loss.svg, summary.json. If it holds a checkpoint, the run "
     "goes on from the latest.",
     binding::free},
    {"Run", "stall_limit", &settings::stall_limit,
     "Seconds that a rank waits for others before it names them and the run ends; more than rank 0 needs to "
     "turn text into tokens or to write a checkpoint. 0: for ever.",
     binding::free, 0, 1e9},
    {"Run", "checkpoint_every", &settings::checkpoint_every,
     "Steps between checkpoints; the last step always makes one. 0: only the last.", binding::free, 0, 1e12},
    {"Run", "keep", &settings::keep, "Checkpoints to keep; older ones are deleted.", binding::free, 1, 1e6},
    {"Run", "validate_every", &settings::validate_every,
     "Steps between validations; there is always one at the end. 0: only then.", binding::free, 0, 1e12},
    {"Run", "validation_samples", &settings::validation_samples,
     "Sequences of a validation while training; the one at the end takes all. 0: all, always.", binding::free,
     0, 1e12},
    {"Run", "log_every", &settings::log_every, "Steps between lines of the log (not on a terminal).",
     binding::free, 1, 1e12},
    {"Run", "measure_peak", &settings::measure_peak,
     "Measure at the start how fast large matrix products are, to show what share of it training reaches.",
     binding::free},
    {"Run", "sample_tokens", &settings::sample_tokens, "Tokens of text to write at the end. 0: none.",
     binding::free, 0, 1e9},
    {"Run", "prompt", &settings::prompt, "What that text begins with.", binding::free},
};

/// The table's row of that name, or config_error that names the nearest.
inline field const& field_of(std::string_view name, site where = site::here()) {
  std::vector<std::string_view> names;
  for (auto const& f : fields) {
    if (f.name == name) return f;
    names.push_back(f.name);
  }
  throw config_error("E-train-001", where, "there is no setting '", name, "'; did you mean '",
                     detail::nearest(name, names), "'?");
}

/// A setting's value as text that `set` reads back to the same value.
inline std::string value_text(settings const& s, field const& f) {
  return std::visit(
      [&](auto member) -> std::string {
        using value_type = std::remove_cvref_t<decltype(s.*member)>;
        if constexpr (std::same_as<value_type, std::string>)
          return s.*member;
        else if constexpr (std::same_as<value_type, bool>)
          return s.*member ? "true" : "false";
        else {
          char digits[40];
          auto const end = std::to_chars(digits, digits + sizeof digits, s.*member).ptr;
          return {digits, end};
        }
      },
      f.member);
}

/// Throws config_error unless the value is one that the table allows.
inline void check(settings const& s, field const& f, site where = site::here()) {
  std::visit(
      [&](auto member) {
        auto const& value = s.*member;
        if constexpr (std::same_as<decltype(value), std::string const&>) {
          if (f.choices.empty()) return;
          auto const choices = '|' + std::string(f.choices) + '|';
          if (value.find('|') != std::string::npos || choices.find('|' + value + '|') == std::string::npos)
            throw config_error("E-train-002", where, f.name, " is '", value, "'; it must be one of ",
                               f.choices);
        } else if constexpr (!std::same_as<decltype(value), bool const&>) {
          auto const number = static_cast<double>(value);
          if (!(number >= f.least && number <= f.most)) // also refuses NaN
            throw config_error("E-train-003", where, f.name, " is ", value_text(s, f), "; it must lie in [",
                               f.least, ", ", f.most, "]");
        }
      },
      f.member);
}

/// Sets one setting from text. Throws config_error for an unknown name and for a value it cannot take.
inline void set(settings& s, std::string_view name, std::string_view text, site where = site::here()) {
  auto const& f = field_of(name, where);
  auto const refuse = [&](char const* kind) {
    throw config_error("E-train-004", where, name, " is '", text, "'; it must be ", kind);
  };
  std::visit(
      [&](auto member) {
        auto& value = s.*member;
        if constexpr (std::same_as<decltype(value), std::string&>)
          value = text;
        else if constexpr (std::same_as<decltype(value), bool&>) {
          if (text != "true" && text != "false") refuse("true or false");
          value = text == "true";
        } else {
          auto parsed = value;
          auto const [end, fault] = std::from_chars(text.data(), text.data() + text.size(), parsed);
          if (fault != std::errc{} || end != text.data() + text.size())
            refuse(std::same_as<decltype(value), double&> ? "a number" : "a whole number");
          value = parsed;
        }
      },
      f.member);
  check(s, f, where);
}

/// Checks every setting by itself, and those that must fit each other. Throws config_error that says which
/// settings do not fit and how to fix it.
inline void check(settings const& s, site where = site::here()) {
  for (auto const& f : fields) check(s, f, where);
  auto const multiple_above = [](index_t value, index_t of) { return (value + of - 1) / of * of; };
  auto const llama = s.family == "llama";
  auto const refuse = [&](bool given_in_vain, std::string_view name, char const* why) {
    if (given_in_vain)
      throw config_error("E-train-007", where, name, " is ", value_text(s, field_of(name)), ", ", why);
  };
  if (s.data.empty())
    throw config_error("E-train-005", where, "no data was given: set data to a text file (--data FILE)");
  if (s.run.empty())
    throw config_error("E-train-005", where, "no folder was given for the run: set run (--run FOLDER)");
  if (s.width % s.heads != 0)
    throw config_error("E-train-006", where, "width ", s.width, " is not a multiple of heads ", s.heads,
                       "; set width to ", multiple_above(s.width, s.heads), " or change heads");
  if (llama && s.width / s.heads % 2 != 0)
    throw config_error("E-train-006", where, "rotary positions turn pairs, and a head has ",
                       s.width / s.heads, " elements; set width to ", multiple_above(s.width, 2 * s.heads));
  if (s.key_value_heads != 0 && s.heads % s.key_value_heads != 0)
    throw config_error("E-train-006", where, "heads ", s.heads, " is not a multiple of key_value_heads ",
                       s.key_value_heads, "; set key_value_heads to a divisor of it");
  refuse(s.key_value_heads != 0 && !llama, "key_value_heads",
         "which only family llama has; set it to 0 or choose llama");
  refuse(s.rotary_theta != settings{}.rotary_theta && !llama, "rotary_theta",
         "which only family llama has; leave it out or choose llama");
  refuse(s.final_rate_share != settings{}.final_rate_share && s.schedule == "constant", "final_rate_share",
         "and schedule constant has no end; leave it out or choose another schedule");
  refuse(s.decay_steps != 0 && s.schedule != "warm_up_stable_decay", "decay_steps",
         "which only schedule warm_up_stable_decay has");
  refuse(s.vocabulary != 0 && s.vocabulary != 256 && s.tokenizer == "bytes", "vocabulary",
         "and bytes have 256; leave it at 0 or choose tokenizer sentencepiece");
  refuse(s.threads != 0 && s.device != "host", "threads",
         "and only device host computes in them; leave it at 0 or choose device host");
  if (s.tokenizer == "tokens" && s.vocabulary == 0)
    throw config_error("E-train-007", where,
                       "a token file does not say how many tokens there are; set vocabulary");
  if (s.warm_up_steps > s.steps)
    throw config_error("E-train-008", where, "warm_up_steps ", s.warm_up_steps, " is more than steps ",
                       s.steps, "; the learning rate would never reach its height");
  if (s.warm_up_steps + s.decay_steps > s.steps)
    throw config_error("E-train-008", where, "warm_up_steps ", s.warm_up_steps, " and decay_steps ",
                       s.decay_steps, " are more than steps ", s.steps);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
