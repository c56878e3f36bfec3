/// Stands in for doctest where it is not installed, so that tests/device.sh needs nothing but a CUDA toolkit: the
/// macros that this tree's CUDA tests use, with doctest's meaning. Found only where the build did not find doctest.
#ifndef TESSERA_TESTS_WITHOUT_DOCTEST_HPP
#define TESSERA_TESTS_WITHOUT_DOCTEST_HPP

#include <atomic>
#include <cmath>
#include <cstdio>
#include <exception>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace doctest {

struct required_failed : std::exception {};

struct test_case {
  char const* name;
  void (*body)();
};

struct registry {
  std::vector<test_case> cases;
  std::atomic<long> checks{0}, failures{0};
  std::vector<std::string> notes; // CAPTURE and INFO of the running scope
  std::mutex guard;

  // Which leaf of the SUBCASEs runs: the path of decisions, as an odometer.
  std::vector<int> wanted, seen;
  std::size_t depth = 0;
};
inline registry& all() {
  static registry r;
  return r;
}
struct registration {
  registration(char const* name, void (*body)()) { all().cases.push_back({name, body}); }
};

template <class T>
std::string shown(T const& value) {
  if constexpr (requires(std::ostringstream& out) { out << value; }) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else {
    return "?";
  }
}

inline bool report(bool passed, char const* text, char const* file, int line, std::string const& more = {}) {
  auto& r = all();
  ++r.checks;
  if (passed) return true;
  ++r.failures;
  std::lock_guard<std::mutex> const lock(r.guard);
  std::printf("%s:%d: FAILED: %s %s\n", file, line, text, more.c_str());
  for (auto const& note : r.notes) std::printf("    with %s\n", note.c_str());
  std::fflush(stdout);
  return false;
}

struct note_scope {
  explicit note_scope(std::string text) {
    std::lock_guard<std::mutex> const lock(all().guard);
    all().notes.push_back(std::move(text));
  }
  ~note_scope() {
    std::lock_guard<std::mutex> const lock(all().guard);
    if (!all().notes.empty()) all().notes.pop_back();
  }
};

/// Entered once in each run of the test that its turn says.
struct subcase {
  explicit subcase(char const*) {
    auto& r = all();
    if (r.seen.size() <= r.depth) r.seen.push_back(0);
    if (r.wanted.size() <= r.depth) r.wanted.push_back(0);
    entered = r.seen[r.depth]++ == r.wanted[r.depth];
    if (entered) ++r.depth;
  }
  ~subcase() {
    if (entered) --all().depth;
  }
  explicit operator bool() const { return entered; }
  bool entered = false;
};

class Approx {
public:
  explicit Approx(double value) : value_(value) {}
  Approx& epsilon(double relative) {
    epsilon_ = relative;
    return *this;
  }
  friend bool operator==(double left, Approx const& right) {
    return std::fabs(left - right.value_) < right.epsilon_ * (1 + std::fmax(std::fabs(left), std::fabs(right.value_)));
  }
  friend bool operator==(Approx const& left, double right) { return right == left; }
  friend bool operator!=(double left, Approx const& right) { return !(left == right); }

private:
  double value_;
  double epsilon_ = 1.19209290e-05; // 100 units of float, as doctest's
};

/// Runs all cases; the arguments name parts of the names of those to run.
inline int run(int argc, char** argv) {
  auto& r = all();
  int cases = 0, failed = 0;
  for (auto const& t : r.cases) {
    auto chosen = argc < 2;
    for (int i = 1; i < argc; ++i) chosen = chosen || std::string(t.name).find(argv[i]) != std::string::npos;
    if (!chosen) continue;
    ++cases;
    auto const before = r.failures.load();
    r.wanted.clear();
    for (;;) {
      r.seen.clear();
      r.depth = 0;
      try {
        t.body();
      } catch (required_failed const&) {
      } catch (std::exception const& fault) {
        report(false, t.name, "uncaught", 0, fault.what());
      }
      r.notes.clear();
      // The next leaf: the deepest subcase that has a sister left.
      auto level = r.seen.size();
      while (level > 0 && r.wanted[level - 1] + 1 >= r.seen[level - 1]) --level;
      if (level == 0) break;
      r.wanted.resize(level);
      ++r.wanted[level - 1];
    }
    if (r.failures != before) {
      ++failed;
      std::printf("FAILED: %s\n", t.name);
    }
  }
  std::printf("test cases: %d | %d failed; checks: %ld | %ld failed\n", cases, failed, r.checks.load(),
              r.failures.load());
  return failed == 0 && cases > 0 ? 0 : 1;
}

} // namespace doctest

#define TESSERA_TEST_JOIN_(a, b) a##b
#define TESSERA_TEST_JOIN(a, b) TESSERA_TEST_JOIN_(a, b)
#define TESSERA_TEST_NAME(kind) TESSERA_TEST_JOIN(tessera_test_##kind##_, __LINE__)

#define TEST_CASE(name)                                                                                      \
  static void TESSERA_TEST_NAME(case)();                                                                     \
  static doctest::registration const TESSERA_TEST_NAME(registered)(name, &TESSERA_TEST_NAME(case));          \
  static void TESSERA_TEST_NAME(case)()

#define TEST_CASE_TEMPLATE(name, T, ...)                                                                     \
  template <class T>                                                                                         \
  static void TESSERA_TEST_NAME(case)();                                                                     \
  template <class... Ts>                                                                                     \
  struct TESSERA_TEST_NAME(of) {                                                                             \
    TESSERA_TEST_NAME(of)() {                                                                                \
      (doctest::all().cases.push_back({name, &TESSERA_TEST_NAME(case) < Ts >}), ...);                        \
    }                                                                                                        \
  };                                                                                                         \
  static TESSERA_TEST_NAME(of)<__VA_ARGS__> const TESSERA_TEST_NAME(registered);                             \
  template <class T>                                                                                         \
  static void TESSERA_TEST_NAME(case)()

#define SUBCASE(name) if (doctest::subcase const TESSERA_TEST_NAME(subcase){name})

#define CHECK(...) ((void)doctest::report(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__))
#define CHECK_FALSE(...) CHECK(!(__VA_ARGS__))
#define CHECK_MESSAGE(condition, ...)                                                                        \
  ((void)doctest::report(static_cast<bool>(condition), #condition, __FILE__, __LINE__,                       \
                         doctest::shown(__VA_ARGS__)))
#define REQUIRE(...)                                                                                         \
  do {                                                                                                       \
    if (!doctest::report(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__))                  \
      throw doctest::required_failed();                                                                      \
  } while (false)
#define CHECK_NOTHROW(...)                                                                                   \
  do {                                                                                                       \
    try {                                                                                                    \
      (void)(__VA_ARGS__);                                                                                   \
      CHECK(true);                                                                                           \
    } catch (std::exception const& fault) {                                                                  \
      (void)doctest::report(false, #__VA_ARGS__, __FILE__, __LINE__, fault.what());                          \
    }                                                                                                        \
  } while (false)
#define CHECK_THROWS_AS(expression, type)                                                                    \
  do {                                                                                                       \
    bool thrown = false;                                                                                     \
    try {                                                                                                    \
      (void)(expression);                                                                                    \
    } catch (type const&) {                                                                                  \
      thrown = true;                                                                                         \
    } catch (...) {                                                                                          \
    }                                                                                                        \
    (void)doctest::report(thrown, #expression " throws " #type, __FILE__, __LINE__);                         \
  } while (false)
#define CAPTURE(x) doctest::note_scope const TESSERA_TEST_NAME(note)(#x " = " + doctest::shown(x))
#define INFO(...) doctest::note_scope const TESSERA_TEST_NAME(note)(doctest::shown(__VA_ARGS__))
#define MESSAGE(...) ((void)std::printf("%s\n", doctest::shown(__VA_ARGS__).c_str()))

#if defined(DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN)
int main(int argc, char** argv) { return doctest::run(argc, argv); }
#endif

#endif
