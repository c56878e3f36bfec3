#include <doctest/doctest.h>

#include <support/temporary_folder.hpp>
#include <support/thrown.hpp>

#include <tessera/data/token_file.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/train/sample_rows.hpp>

using namespace tessera;

TEST_CASE("a row holds the positions of its sample that the rank has, and their targets") {
  test::temporary_folder folder;
  std::vector<std::int32_t> text(41);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<std::int32_t>(i * 7 % 50);
  data::token_writer writer(folder / "tokens.bin", data::token_width::two);
  writer.append(text);
  writer.commit();
  data::token_file const file(folder / "tokens.bin");
  data::token_dataset const set(file.tokens(), {.sequence_length = 10, .vocabulary_size = 50});

  exec::host ex({.threads = 1});
  ops::token_positions const places[] = {{}, {.first = 2, .split = 3, .second = 7}, {.first = 9}};
  index_t const counts[] = {10, 6, 0};
  for (std::size_t n = 0; n < 3; ++n) {
    CAPTURE(n);
    train::sample_rows<exec::host> rows(ex, 2, 10, places[n], counts[n]);
    rows.fill(set, 0, 3);
    rows.fill(set, 1, 1);
    rows.upload(ex);
    auto const tokens = rows.tokens({0, 2}), targets = rows.targets({1, 2});
    CHECK(tokens.extents() == tessera::extents<2>{2, counts[n]});
    for (index_t t = 0; t < counts[n]; ++t) {
      auto const at = static_cast<std::size_t>(places[n](t));
      CHECK(tokens(0, t) == text[30 + at]);
      CHECK(tokens(1, t) == text[10 + at]);
      CHECK(targets(0, t) == text[11 + at]);
    }
    CHECK(test::error_of<size_error>([&] { rows.fill(set, 0, 4); }).id == "E-data-010");
  }
}
