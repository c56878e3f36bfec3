#include <doctest/doctest.h>

#include <support/thrown.hpp>

#include <tessera/exec/host.hpp>
#include <tessera/train/model_settings.hpp>

using namespace tessera;

TEST_CASE("the model's config is the settings'") {
  train::settings s;
  s.family = "llama";
  s.layers = 3;
  s.heads = 8;
  s.key_value_heads = 2;
  s.width = 64;
  s.tied_head = false;
  auto const c = train::model_config(s, 300);
  CHECK(c.family == nn::transformer_family::llama);
  CHECK(c.vocabulary_size == 300);
  CHECK(c.layers == 3);
  CHECK(c.kv_heads() == 2);
  CHECK_FALSE(c.tied_head);
  CHECK_NOTHROW(c.validate());
}

TEST_CASE("what the settings' check lets through is a config that the model accepts, and a schedule") {
  for (auto const* family : {"gpt2", "llama"})
    for (auto const* form : {"constant", "linear", "cosine", "warm_up_stable_decay"})
      for (index_t steps : {0, 1, 4, 1000}) {
        train::settings s;
        s.data = "x";
        s.family = family;
        s.schedule = form;
        s.steps = steps;
        s.warm_up_steps = steps / 2;
        train::check(s);
        CHECK_NOTHROW(train::model_config(s, 256).validate());
        CHECK_NOTHROW(optim::schedule(train::schedule_options(s)));
      }
}

TEST_CASE("a schedule that decays has its decay within the steps after the warm-up") {
  train::settings s;
  s.schedule = "warm_up_stable_decay";
  s.steps = 100;
  s.warm_up_steps = 95;
  CHECK(train::schedule_options(s).decay == 5);
  s.warm_up_steps = 10;
  CHECK(train::schedule_options(s).decay == 20);
  s.decay_steps = 40;
  CHECK(train::schedule_options(s).decay == 40);
}
