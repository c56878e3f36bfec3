#!/usr/bin/env bash
# Sets the machine up, builds and runs every test.
#   ./tests/run.sh                  all parts: release, clang, bare, debug (sanitizers), thread (sanitizer)
#   ./tests/run.sh --quick          the release build's tests only
#   ./tests/run.sh --filter REGEX   only release tests of matching name (such as 'ops[.]' or 'comm.threads')
#   ./tests/run.sh --require=mpi    a test that needs MPI and could not run is a failure, not a skip
# Ends with one line that counts the tests of all parts; exit status 0 if none failed.
set -uo pipefail
cd "$(dirname "$0")/.."

parts=(release clang bare debug thread) filter='' required=()
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) parts=(release) ;;
    --filter) filter=${2:?--filter needs a regular expression}; parts=(release); shift ;;
    --filter=*) filter=${1#*=}; parts=(release) ;;
    --require=*) required+=("$1") ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done

. tests/support/setup.sh
tessera_setup tests

results=build/results
rm -rf "$results"
mkdir -p "$results"
jobs=$(nproc)
started=$SECONDS

# What a part builds and tests. Release builds and runs everything; the others repeat what their compiler or
# sanitizer can judge: each header under clang++ and with everything off, and the rooms whose code handles raw
# memory or threads under the sanitizers.
targets_of() {
  case "$1" in
    release) echo all ;;
    clang) echo compile_link ;;
    bare) echo tests_core tests_exec tests_ops tests_comm compile_link tessera_examples ;;
    debug) echo tests_core tests_layout tests_exec tests_ops tests_comm tests_data tests_io ;;
    thread) echo tests_comm tests_parallel ;;
  esac
}
labels_of() {
  case "$1" in
    release) echo . ;;
    clang) echo '^compile$' ;;
    bare) echo '^(core|exec|ops|comm|compile)$' ;;
    debug) echo '^(core|layout|exec|ops|comm|data|io)$' ;;
    thread) echo '^(comm|parallel)$' ;;
  esac
}

run_part() {
  local part=$1 targets build_status
  echo
  echo "=== $part"
  cmake --preset "$part" >"$results/$part.configure" 2>&1 || {
    cat "$results/$part.configure"
    echo 1 >"$results/$part.build"
    return
  }
  targets=$(targets_of "$part")
  if [ -n "$filter" ]; then
    targets=$(ctest --test-dir "build/$part" -N -R "$filter" |
      sed -n 's/^ *Test *#[0-9]*: \([a-z_0-9]*\)[.]\([a-z_0-9]*\)$/test_\1_\2/p')
    targets=$(ninja -C "build/$part" -t targets all | sed 's/:.*//' | grep -Fx "$targets")
  fi
  # A test that does not compile must not hide the others: build on, and count it as failed.
  # shellcheck disable=SC2086 # one word a target
  [ -z "$targets" ] || ninja -C "build/$part" -j "$jobs" -k 0 $targets >"$results/$part.log" 2>&1
  build_status=$?
  echo "$build_status" >"$results/$part.build"
  [ "$build_status" = 0 ] || grep -A30 '^FAILED:' "$results/$part.log" | head -200
  echo "built after $((SECONDS - started)) s"
  ctest --test-dir "build/$part" -j "$jobs" -L "$(labels_of "$part")" ${filter:+-R "$filter"} \
    --output-on-failure --no-tests=error --output-junit "$PWD/$results/$part.xml"
  echo "$part done after $((SECONDS - started)) s"
}
for part in "${parts[@]}"; do run_part "$part" </dev/null; done

python3 tests/support/summary.py "$results" "${required[@]}" "${parts[@]}"
