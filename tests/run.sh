#!/usr/bin/env bash
# Sets the machine up, builds and runs every test.
#   ./tests/run.sh                  all parts: release, clang, bare, debug (sanitizers), thread (sanitizer), and
#                                   cuda where there is nvcc (kernels run under emulation in the release part)
#   ./tests/run.sh --bench          all parts, and each benchmark is built and run for a moment: some minutes more
#   ./tests/run.sh --quick          the release build's tests only
#   ./tests/run.sh --filter REGEX   only release tests of matching name (such as 'ops[.]' or 'comm.threads')
#   ./tests/run.sh --require=mpi    a test that needs MPI and could not run is a failure, not a skip
# Ends with one line that counts the tests of all parts; exit status 0 if none failed.
set -uo pipefail
cd "$(dirname "$0")/.."

parts=(release clang bare debug thread cuda) filter='' required=() bench=''
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) parts=(release) ;;
    --bench) bench=bench ;;
    --filter) filter=${2:?--filter needs a regular expression}; parts=(release); shift ;;
    --filter=*) filter=${1#*=}; parts=(release) ;;
    --require=*) required+=("$1") ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done

. tests/support/setup.sh
tessera_setup tests $bench

results=build/results
rm -rf "$results"
mkdir -p "$results"
jobs=$(nproc)
started=$SECONDS

# The tests that a part builds and runs. Release has them all; the others repeat what their compiler or sanitizer
# can judge in a few minutes: each header under clang++, all of them with every part off, the portable product, and
# the code that handles raw memory, files and threads under the sanitizers.
tests_of() {
  case "$1" in
    release) echo "${filter:-.}" ;;
    clang) echo '^compile[.]' ;;
    bare) echo '^(core|exec)[.]|^compile[.](link|facts)$|^ops[.](matmul|linear|attention)$' ;;
    debug) echo '^(core|layout|exec|ops)[.]|^comm[.](threads|mpi)$|^data[.](token_|sampler)' \
      '|^io[.](atomic_file|mapped_file|safetensors|safetensors_writer|json)$' | tr -d ' ' ;;
    cuda) echo '^compile[.]cuda$|^house[.]cuda_(resources|linkage)$|^consumer[.]cuda$' ;;
    thread) echo '^comm[.]threads$|^parallel[.](data_parallel|invariant)$' ;;
  esac
}

# nvcc as CMake looks for it: $CUDACXX, the search path, the usual place.
find_nvcc() { command -v "${CUDACXX:-nvcc}" || ls /usr/local/cuda/bin/nvcc 2>/dev/null; }

run_part() {
  local part=$1 tests targets build_status room_programs=OFF benchmarks=OFF
  echo
  echo "=== $part"
  if [ "$part" = cuda ]; then
    CUDACXX=$(find_nvcc) || {
      echo 'not run: there is no nvcc on this machine (set CUDACXX to where it is)' | tee "$results/$part.not_run"
      return
    }
    export CUDACXX
  fi
  # A program for a room where most of its tests are wanted, one for each test elsewhere.
  case "$part" in release | debug) [ -n "$filter" ] || room_programs=ON ;; esac
  [ "$part" != release ] || [ -z "$bench" ] || benchmarks=ON
  cmake --preset "$part" -DTESSERA_TESTS_TOGETHER="$room_programs" -DTESSERA_BUILD_BENCH="$benchmarks" \
    >"$results/$part.configure" 2>&1 || {
    cat "$results/$part.configure"
    echo 1 >"$results/$part.build"
    return
  }
  tests=$(tests_of "$part")
  if [ "$tests" = . ]; then
    targets=all
  else
    # The test ROOM.HEADER is the program test_ROOM_HEADER or in test_ROOM, and bench.ROOM_HEADER is
    # bench_ROOM_HEADER; other tests build what they need.
    ctest --test-dir "build/$part" -N -R "$tests" |
      sed -n 's/^ *Test *#[0-9]*: \([a-z_0-9]*\)[.]\([a-z_0-9]*\)$/test_\1_\2\ntest_\1\n\1_\2/p' |
      sort -u >"$results/$part.wanted"
    targets=$(ninja -C "build/$part" -t targets all | sed 's/:.*//' | grep -Fx -f "$results/$part.wanted")
    [ "$part" != bare ] || targets="$targets tessera_examples"
    [ "$part" != cuda ] || targets="$targets cuda_compiled example_train_gpt"
  fi
  # A test that does not compile must not hide the others: build on, and count it as failed.
  # shellcheck disable=SC2086 # one word a target
  [ -z "$targets" ] || ninja -C "build/$part" -j "$jobs" -k 0 $targets >"$results/$part.log" 2>&1
  build_status=$?
  echo "$build_status" >"$results/$part.build"
  [ "$build_status" = 0 ] || grep -A30 '^FAILED:' "$results/$part.log" | head -200
  echo "built after $((SECONDS - started)) s"
  ctest --test-dir "build/$part" -j "$jobs" -R "$tests" \
    --output-on-failure --no-tests=error --output-junit "$PWD/$results/$part.xml"
  echo "$part done after $((SECONDS - started)) s"
}
for part in "${parts[@]}"; do run_part "$part" </dev/null; done

python3 tests/support/summary.py "$results" "${required[@]}" "${parts[@]}"
