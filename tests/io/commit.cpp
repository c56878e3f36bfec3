// requires: json xxhash
#include <doctest/doctest.h>

#include <csignal>

#include <sys/mount.h>
#include <sys/wait.h>

#include <tessera/io/commit.hpp>
#include <tessera/io/safetensors_writer.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

/// A checkpoint of two files; `content` goes into its one tensor.
io::committed save(std::string const& folder, index_t step, std::string const& content = "weights!") {
  io::commit_writer writer(folder, step);
  io::safetensors_writer weights(writer.path("model.safetensors"),
                                 {{"w", io::dtype::u8, {static_cast<index_t>(content.size())}}});
  weights.write("w", std::as_bytes(std::span(content.data(), content.size())));
  writer.add("model.safetensors", weights.commit());
  io::write_file(writer.path("state.json"), "{}\n");
  io::write_file(writer.path("empty"), "");
  return writer.commit();
}

std::vector<index_t> steps_in(std::string const& folder) {
  std::vector<index_t> steps;
  for (auto const& found : io::commits_in(folder)) steps.push_back(found.step);
  return steps;
}

void flip_last_bit(std::string const& path) {
  auto bytes = test::contents_of(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  test::put(path, bytes);
}

using steps = std::vector<index_t>;

} // namespace

TEST_CASE("a checkpoint appears under its step with all its files, and verifies") {
  test::temporary_folder const folder;
  auto const saved = save(folder / "run/checkpoints", 100);
  CHECK(saved.path == folder / "run/checkpoints/step-00000100");
  CHECK(io::names_in(folder / "run/checkpoints") == std::vector<std::string>{"step-00000100"});
  CHECK(io::names_in(saved.path) ==
        std::vector<std::string>{"empty", "manifest.json", "model.safetensors", "state.json"});
  io::verify(saved);
  auto const record = io::manifest_of(saved);
  CHECK(record.step == 100);
  REQUIRE(record.files.size() == 3);
  REQUIRE(record.files[1].tensors.size() == 1);
  CHECK(record.files[1].tensors[0].checksum == io::checksum_of("weights!"));
}

TEST_CASE("the same content gives the same bytes in every file") {
  test::temporary_folder const folder;
  auto const first = save(folder / "a", 7), second = save(folder / "b", 7);
  for (auto const& name : io::names_in(first.path))
    CHECK(test::contents_of(first.path + "/" + name) == test::contents_of(second.path + "/" + name));
}

TEST_CASE("checkpoints are listed by their steps; nothing else counts as one") {
  test::temporary_folder const folder;
  CHECK(io::commits_in(folder / "missing").empty());
  for (index_t step : {2, 10, 0, 123456789}) save(folder.path(), step);
  io::make_folders(folder / "step-00000005");  // no manifest
  io::make_folders(folder / "step-5");         // not such a name
  io::make_folders(folder / "step-000000010"); // a step has one name
  io::make_folders(folder / ".step-00000007.pending");
  for (auto const* name : {"step-5", "step-000000010", ".step-00000007.pending"})
    test::put(folder / name + "/manifest.json", "{}");
  test::put(folder / "step-00000009", "a file");
  CHECK(steps_in(folder.path()) == steps{0, 2, 10, 123456789});
  CHECK(io::latest_commit(folder.path()).checkpoint->step == 123456789);
  CHECK(io::latest_commit(folder.path()).refused.empty());
}

TEST_CASE("what is not committed leaves nothing, and does not touch what is there") {
  test::temporary_folder const folder;
  save(folder.path(), 1);
  {
    io::commit_writer writer(folder.path(), 2);
    CHECK(io::folder_exists(io::pending_folder(folder.path(), 2)));
    io::write_file(writer.path("state.json"), "{}");
    auto const moved = std::move(writer);
  }
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
  CHECK(test::error_of<size_error>([&] { io::commit_writer(folder.path(), -1); }).id == "E-io-034");
}

TEST_CASE("a checkpoint replaces one of the same step") {
  test::temporary_folder const folder;
  save(folder.path(), 1, "old bytes");
  auto const saved = save(folder.path(), 1, "new");
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
  io::verify(saved);
  CHECK(io::manifest_of(saved).files[1].tensors[0].bytes == 3);
}

TEST_CASE("files that are not finished, folders and foreign tensors cannot be committed") {
  test::temporary_folder const folder;
  auto const error_with = [&](auto prepare) {
    return test::error_of<config_error>([&] {
             io::commit_writer writer(folder.path(), 1);
             io::write_file(writer.path("state.json"), "{}");
             prepare(writer);
           })
        .id;
  };
  CHECK(error_with([](auto& writer) {
          io::atomic_file unfinished(writer.path("model"));
          writer.commit();
        }) == "E-io-035");
  CHECK(error_with([](auto& writer) {
          io::make_folders(writer.path("inner"));
          writer.commit();
        }) == "E-io-035");
  CHECK(error_with([](auto& writer) {
          io::write_file(writer.path("manifest.json"), "{}");
          writer.commit();
        }) == "E-io-035");
  CHECK(error_with([](auto& writer) {
          writer.add("missing", {});
          writer.commit();
        }) == "E-io-036");
  CHECK(test::error_of<size_error>([&] {
          io::commit_writer writer(folder.path(), 1);
          io::write_file(writer.path("state.json"), "{}");
          writer.add("state.json", {{"t", 1, 2, 0}});
          writer.commit();
        }).id == "E-io-038");
  CHECK(io::names_in(folder.path()).empty());
}

TEST_CASE("the latest checkpoint is the newest that is whole; why newer ones are refused is told") {
  test::temporary_folder const folder;
  CHECK_FALSE(io::latest_commit(folder.path()).checkpoint.has_value());
  for (index_t step : {1, 2, 3}) save(folder.path(), step);
  flip_last_bit(folder / "step-00000003/model.safetensors");
  test::put(folder / "step-00000002/state.json", "{");
  auto latest = io::latest_commit(folder.path());
  REQUIRE(latest.checkpoint.has_value());
  CHECK(latest.checkpoint->step == 1);
  REQUIRE(latest.refused.size() == 2);
  CHECK(latest.refused[0].find("step-00000003/model.safetensors was altered") != std::string::npos);
  CHECK(latest.refused[0].find("tensor w") != std::string::npos);
  CHECK(latest.refused[1].find("step-00000002/state.json has 1 bytes") != std::string::npos);
  flip_last_bit(folder / "step-00000001/manifest.json");
  latest = io::latest_commit(folder.path());
  CHECK_FALSE(latest.checkpoint.has_value());
  CHECK(latest.refused.size() == 3);
  io::remove_all(folder / "step-00000003/manifest.json");
  latest = io::latest_commit(folder.path());
  REQUIRE(latest.refused.size() == 3);
  CHECK(latest.refused[0].find("step-00000003/manifest.json") != std::string::npos);
}

TEST_CASE("any altered byte of any file of a checkpoint is found, and the file is named") {
  test::temporary_folder const folder;
  auto const saved = save(folder.path(), 1);
  for (auto const& name : io::names_in(saved.path)) {
    auto const path = saved.path + "/" + name;
    auto const bytes = test::contents_of(path);
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      auto altered = bytes;
      altered[at] = static_cast<char>(altered[at] ^ 4);
      test::put(path, altered);
      CAPTURE(at);
      REQUIRE(test::error_of<io_error>([&] { io::verify(saved); }).says(name));
    }
    test::put(path, bytes);
  }
  io::verify(saved);
  std::filesystem::rename(saved.path, folder / "step-00000002");
  CHECK(test::error_of<io_error>([&] {
          io::verify({2, folder / "step-00000002"});
        }).says("manifest of step 1"));
}

TEST_CASE("pruning keeps the newest") {
  test::temporary_folder const folder;
  for (index_t step : {1, 2, 3, 4}) save(folder.path(), step);
  CHECK(io::prune_commits(folder.path(), 4).empty());
  auto const removed = io::prune_commits(folder.path(), 2);
  CHECK(steps_in(folder.path()) == steps{3, 4});
  REQUIRE(removed.size() == 2);
  CHECK(removed[0].step == 2);
  CHECK(io::names_in(folder.path()).size() == 2);
  CHECK(test::error_of<config_error>([&] { io::prune_commits(folder.path(), 0); }).id == "E-io-037");
  CHECK(io::prune_commits(folder / "missing", 1).empty());
}

TEST_CASE("pruning never removes the last checkpoint that is whole") {
  test::temporary_folder const folder;
  for (index_t step : {1, 2, 3, 4}) save(folder.path(), step);
  flip_last_bit(folder / "step-00000004/model.safetensors");
  io::remove_all(folder / "step-00000003/state.json");
  io::prune_commits(folder.path(), 1);
  CHECK(steps_in(folder.path()) == steps{2, 3, 4});
  flip_last_bit(folder / "step-00000002/model.safetensors");
  CHECK(io::prune_commits(folder.path(), 1).empty());
  CHECK(steps_in(folder.path()) == steps{2, 3, 4});
}

TEST_CASE("what a killed program left is cleaned up, and what it was replacing is put back") {
  test::temporary_folder const folder;
  io::recover_commits(folder / "missing");
  for (index_t step : {1, 2, 3}) save(folder.path(), step);
  io::make_folders(folder / ".step-00000004.pending");
  test::put(folder / ".step-00000004.pending/model.safetensors", "half");
  std::filesystem::rename(folder / "step-00000001", folder / ".step-00000001.removed");
  std::filesystem::rename(folder / "step-00000003", folder / ".step-00000003.replaced");
  io::make_folders(folder / ".step-00000002.replaced"); // its successor is in place
  io::make_folders(folder / ".other");
  io::recover_commits(folder.path());
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{".other", "step-00000002", "step-00000003"});
  io::verify(io::commits_in(folder.path())[1]);
}

TEST_CASE("a program that is killed while it saves loses at most the checkpoint it was saving") {
  test::temporary_folder const folder;
  auto const expected = save(folder / "undisturbed", 1, std::string(50'000, 'w'));
  for (int attempt = 0; attempt < 12; ++attempt) {
    auto const child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      io::recover_commits(folder / "run");
      for (index_t step = 1;; ++step) {
        save(folder / "run", 1 + step % 5, std::string(50'000, 'w'));
        io::prune_commits(folder / "run", 2);
      }
    }
    while (io::commits_in(folder / "run").empty()) ::usleep(500);
    ::usleep(static_cast<useconds_t>(1000 + 1700 * attempt));
    ::kill(child, SIGKILL);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    io::recover_commits(folder / "run");
    auto const latest = io::latest_commit(folder / "run");
    REQUIRE(latest.checkpoint.has_value());
    REQUIRE(latest.refused.empty());
    REQUIRE(test::contents_of(latest.checkpoint->path + "/model.safetensors") ==
            test::contents_of(expected.path + "/model.safetensors"));
  }
}

TEST_CASE("a disk that fills up while a checkpoint is written loses none that was there") {
  test::temporary_folder const folder;
  io::make_folders(folder / "disk");
  if (::mount("none", (folder / "disk").c_str(), "tmpfs", 0, "size=256k") != 0) {
    MESSAGE("not run: no right to mount a small disk");
    return;
  }
  save(folder / "disk/run", 1, std::string(100'000, 'a'));
  auto const error =
      test::error_of<io_error>([&] { save(folder / "disk/run", 2, std::string(200'000, 'b')); });
  auto const names = io::names_in(folder / "disk/run");
  auto const latest = io::latest_commit(folder / "disk/run");
  ::umount((folder / "disk").c_str());
  CHECK(error.id == "E-io-004");
  CHECK(error.says("step-00000002"));
  CHECK(error.says("No space left on device"));
  CHECK(names == std::vector<std::string>{"step-00000001"});
  REQUIRE(latest.checkpoint.has_value());
  CHECK(latest.checkpoint->step == 1);
}
