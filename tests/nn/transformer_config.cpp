#include <doctest/doctest.h>

#include <functional>
#include <string>

#include <tessera/nn/transformer_config.hpp>

using namespace tessera;
using nn::transformer_config;

TEST_CASE("the presets are valid") {
  nn::gpt2_124m().validate();
  nn::tiny_gpt2().validate();
  nn::tiny_llama().validate();
}

TEST_CASE("sizes left at zero take the family's habit") {
  auto const gpt2 = nn::gpt2_124m();
  CHECK(gpt2.inner_width() == 3072);
  CHECK(gpt2.kv_heads() == 12);
  CHECK(gpt2.head_width() == 64);
  CHECK(
      transformer_config{.family = nn::transformer_family::llama, .width = 4096, .heads = 32}.inner_width() ==
      10944); // ceil(8/3 4096) = 10923, rounded up to a multiple of 32
  CHECK(transformer_config{.family = nn::transformer_family::llama, .width = 96, .heads = 4}.inner_width() ==
        256);
}

TEST_CASE("an impossible config is refused with the field, its value and the remedy") {
  struct misuse {
    std::function<void(transformer_config&)> spoil;
    std::string id, says;
  };
  auto const nan = std::numeric_limits<float>::quiet_NaN();
  for (auto const& [spoil, id, says] : {
           misuse{[](auto& c) { c.vocabulary_size = 0; }, "E-nn-001", "vocabulary_size is 0, set it to 1"},
           misuse{[](auto& c) { c.layers = -1; }, "E-nn-001", "layers is -1"},
           misuse{[](auto& c) { c.width = index_t{1} << 60; }, "E-nn-001", "or less"},
           misuse{[](auto& c) { c.heads = 0; }, "E-nn-001", "heads is 0"},
           misuse{[](auto& c) { c.key_value_heads = -2; }, "E-nn-001", "key_value_heads (0 counts as heads)"},
           misuse{[](auto& c) { c.feed_forward = -5; }, "E-nn-001", "feed_forward"},
           misuse{[](auto& c) { c.sequence_length = 0; }, "E-nn-001", "sequence_length is 0"},
           misuse{[](auto& c) { c.vocabulary_size = index_t{1} << 31; }, "E-nn-002", "at most 2147483647"},
           misuse{[](auto& c) { c.width = 66; }, "E-nn-003", "64 or 68 would be"},
           misuse{[](auto& c) { c.key_value_heads = 3; }, "E-nn-004", "choose a divisor of heads"},
           misuse{[](auto& c) { c.family = nn::transformer_family::gpt2; }, "E-nn-005",
                  "set it to 0, or family"},
           misuse{[](auto& c) { c.width = 60; }, "E-nn-006", "a head is 15 wide"},
           misuse{[](auto& c) { c.dropout = 1; }, "E-nn-007",
                  "dropout is 1, set it to 0 or more and below 1"},
           misuse{[=](auto& c) { c.dropout = nan; }, "E-nn-007", "dropout is nan"},
           misuse{[](auto& c) { c.label_smoothing = -0.5f; }, "E-nn-007", "label_smoothing is -0.5"},
           misuse{[](auto& c) { c.norm_epsilon = 0; }, "E-nn-008", "such as 1e-5"},
           misuse{[](auto& c) { c.rotary_theta = 0; }, "E-nn-008", "such as 10000"},
           misuse{[](auto& c) { c.initial_deviation = -1; }, "E-nn-008", "such as 0.02"},
           misuse{[=](auto& c) { c.z_loss = nan; }, "E-nn-008", "such as 1e-4"},
       }) {
    auto config = nn::tiny_llama();
    spoil(config);
    try {
      config.validate();
      FAIL("accepted: " << says);
    } catch (config_error const& e) {
      CHECK(e.id() == id);
      INFO(e.what());
      CHECK(std::string(e.what()).find(says) != std::string::npos);
      CHECK(std::string(e.what()).find("transformer_config.cpp:") != std::string::npos);
    }
  }
}
