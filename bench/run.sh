#!/usr/bin/env bash
# Builds the benchmarks, runs them and writes report.json, report.md and report.svg. Programs that run on
# ranks are started several times, since two processes of one program differ by more than the turns of one:
# where memory and code come to lie is drawn anew each time.
#   ./bench/run.sh [--quick] [--filter REGEX] --out DIR
set -euo pipefail
cd "$(dirname "$0")/.."
usage() { echo "usage: ./bench/run.sh [--quick] [--filter REGEX] --out DIR" >&2; exit 2; }

out= filter=. quick=
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=1 ;;
    --filter) [ $# -ge 2 ] || usage; filter=$2; shift ;;
    --out) [ $# -ge 2 ] || usage; out=$2; shift ;;
    *) usage ;;
  esac
  shift
done
[ -n "$out" ] || usage

. tests/support/setup.sh
tessera_setup bench
cmake --preset release -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_EXAMPLES=OFF -DTESSERA_BUILD_BENCH=ON >/dev/null
cmake --build build/release --target tessera_bench

mkdir -p "$out/raw"
rm -f "$out"/raw/*.json
seconds=0.5 starts=5; [ -z "$quick" ] || seconds=0.1 starts=1
matched=0
for program in build/release/bench/bench_*; do
  [ -x "$program" ] && [ ! -d "$program" ] || continue
  name=$(basename "$program")
  launch=() threads=$(nproc) ranks=1 times=1
  case "$name" in
    bench_comm_mpi) ranks="2 4" ;;
    bench_parallel_distributed_model | bench_parallel_overlapped_linear | bench_parallel_ring_attention | bench_partition_redistribute) ranks=2 ;;
  esac
  for n in $ranks; do
    if [ "$ranks" != 1 ]; then
      launch=(mpiexec -n "$n") threads=1 times=$starts
      [ "$n" -gt "$(nproc)" ] || launch+=(-bind-to core) # a rank that moves to another core measures the move
    fi
    echo "== $name${launch:+ on $n ranks}"
    for start in $(seq "$times"); do
      raw="$out/raw/$name-$n.$start.json"
      OMP_NUM_THREADS=$threads "${launch[@]}" "$program" --benchmark_filter="$filter" \
        --benchmark_min_time="$(awk "BEGIN { print $seconds / $times }")" \
        --benchmark_out="$raw" --benchmark_out_format=json || {
          echo "bench/run.sh: $name failed" >&2; exit 1; }
      if ! grep -q '"run_name"' "$raw" 2>/dev/null; then rm -f "$raw"; break; fi
      matched=1
    done
  done
done
[ "$matched" = 1 ] || { echo "bench/run.sh: no benchmark's name matches '$filter'" >&2; exit 1; }

build/release/bench/report "$out"
echo
cat "$out/report.md"
