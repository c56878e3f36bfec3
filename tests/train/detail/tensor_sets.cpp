#include <doctest/doctest.h>

#include <support/thrown.hpp>

#include <tessera/train/detail/tensor_sets.hpp>

using namespace tessera;
namespace sets_of = train::detail;
using io::dtype;

TEST_CASE("equal sets are accepted in any order") {
  std::vector<io::tensor_entry> const a{{"x", dtype::f32, {2, 3}}, {"y", dtype::bf16, {}}};
  std::vector<io::tensor_entry> const b{{"y", dtype::bf16, {}}, {"x", dtype::f32, {2, 3}}};
  CHECK(sets_of::compare_tensors(a, b).equal());
  CHECK(sets_of::compare_tensors({}, {}).equal());
}

TEST_CASE("missing, unexpected and misshapen tensors are exact sets, all in one message") {
  std::vector<io::tensor_entry> const wanted{{"only here", dtype::f32, {1}},
                                             {"both", dtype::f32, {4}},
                                             {"shape", dtype::f32, {2, 3}},
                                             {"type", dtype::f32, {2}}};
  std::vector<io::tensor_entry> const held{{"both", dtype::f32, {4}},
                                           {"shape", dtype::f32, {3, 2}},
                                           {"type", dtype::bf16, {2}},
                                           {"only there", dtype::f32, {0}}};
  auto const sets = sets_of::compare_tensors(wanted, held);
  CHECK(sets.missing == std::vector<std::string>{"only here"});
  CHECK(sets.unexpected == std::vector<std::string>{"only there"});
  REQUIRE(sets.misshapen.size() == 2);
  CHECK(sets.misshapen[0] == "shape (F32 [3, 2] in the file, F32 [2, 3] in the model)");
  CHECK(sets.misshapen[1] == "type (BF16 [2] in the file, F32 [2] in the model)");
  auto const caught = test::error_of<io_error>(
      [&] { sets_of::require_equal_sets(sets, "run/model.safetensors", site::here()); });
  CHECK(caught.id == "E-train-060");
  for (auto const* part : {"run/model.safetensors", "missing (1):\n    only here",
                           "unexpected (1):\n    only there", "of another shape or type (2):"})
    CHECK(caught.says(part));
}
