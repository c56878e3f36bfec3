#!/usr/bin/env bash
# On a machine with a CUDA GPU: builds for that GPU alone, runs every CUDA test on it (some once more under
# compute-sanitizer), measures the kernels against what the GPU can do, trains the quickstart's model for 20 steps beside
# the host, and ends with one table. Needs the CUDA toolkit, CMake and a C++20 compiler, and no network.
#   ./tests/device.sh [--out DIR] [--quick]
# Exit status 0 if all tests passed; 1 if some failed, or if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

out=build/device_report quick=()
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=${2:?--out needs a folder}; shift ;;
    --quick) quick=(--quick) ;;
    *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
build=build/device
mkdir -p "$out" "$build"
started=$SECONDS
stop() { echo "device.sh: $*" >&2; exit 1; }

# What there is.
CUDACXX=$(command -v "${CUDACXX:-nvcc}" || ls /usr/local/cuda/bin/nvcc 2>/dev/null) ||
  stop "there is no nvcc on this machine: install the CUDA toolkit, or set CUDACXX to where it is"
export CUDACXX
command -v nvidia-smi >/dev/null || stop "there is no NVIDIA driver on this machine (no nvidia-smi)"
gpu=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>/dev/null | head -1)
[ -n "$gpu" ] || stop "nvidia-smi names no GPU"
architecture=$(echo "$gpu" | cut -d, -f2 | tr -d ' .')
[ "$architecture" -ge 80 ] || stop "the GPU is $gpu; the kernels need compute capability 8.0 or newer"
has() { printf '#include <%s>\n' "$1" | "${CXX:-c++}" -std=c++20 -E -x c++ - >/dev/null 2>&1; }
options=() missing=()
want() { # NAME HEADER
  if has "$2"; then options+=("-DTESSERA_WITH_$1=ON"); else missing+=("$2"); options+=("-DTESSERA_WITH_$1=OFF"); fi
}
want JSON nlohmann/json.hpp
want XXHASH xxhash.h
if [ -e "$(dirname "$CUDACXX")/../include/nccl.h" ] || has nccl.h; then
  options+=(-DTESSERA_WITH_NCCL=ON)
else
  missing+=(nccl.h) options+=(-DTESSERA_WITH_NCCL=OFF)
fi
printf 'int main() {}\n' | "${CXX:-c++}" -fopenmp -x c++ - -o "$build/openmp" 2>/dev/null &&
  options+=(-DTESSERA_WITH_OPENMP=ON)
generator=(); command -v ninja >/dev/null && generator=(-G Ninja)

echo "GPU: $gpu; $("$CUDACXX" --version | sed -n 's/.*release \([^,]*\),.*/CUDA \1/p'); $(nproc) cores"
[ ${#missing[@]} = 0 ] || echo "Not on this machine, and tests that need them are left out: ${missing[*]}"

cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DTESSERA_WITH_CUDA=ON \
  -DCMAKE_CUDA_ARCHITECTURES="$architecture" -DTESSERA_BUILD_TESTS=ON -DTESSERA_TEST_ON_DEVICE=ON \
  -DTESSERA_TEST_EMULATED_CUDA=OFF "${options[@]}" >"$out/configure.log" 2>&1 ||
  { cat "$out/configure.log"; stop "the build could not be configured"; }
# A test that does not compile must not hide the others.
cmake --build "$build" --target device_programs --parallel "$(nproc)" -- -k $([ ${#generator[@]} = 0 ] || echo 0) \
  >"$out/build.log" 2>&1
built=$?
[ $built = 0 ] || grep -iE -A8 'error|FAILED' "$out/build.log" | head -150
echo "built after $((SECONDS - started)) s"

# One at a time: they share the GPU.
ctest --test-dir "$build" -L '^device$' --output-on-failure --no-tests=error --timeout 120 2>&1 | tee "$out/tests.log" |
  grep -vE '^ *Start '
passed=$(grep -cE 'Test +#[0-9]+:.* Passed' "$out/tests.log")
failed=$(grep -cE 'Test +#[0-9]+:.*(\*\*\*|Not Run|Failed)' "$out/tests.log")
echo "tested after $((SECONDS - started)) s"

# Memory, initialisation and races, on tests that hold most kinds of kernel.
sanitizer=$(command -v compute-sanitizer || ls "$(dirname "$CUDACXX")/compute-sanitizer" 2>/dev/null)
sanitized='not run: there is no compute-sanitizer'
if [ -n "$sanitizer" ]; then
  sanitized=clean
  for tool in memcheck racecheck initcheck; do
    for program in ops_cuda_layer_norm ops_cuda_attention optim_cuda_flat_update; do
      test=$build/tests/device/device_$program
      [ -x "$test" ] || { sanitized="$sanitized; no $program"; continue; }
      timeout 40 "$sanitizer" --tool "$tool" --error-exitcode 9 "$test" >"$out/$tool-$program.log" 2>&1
      case $? in
        0) ;;
        124) sanitized="$sanitized; $tool of $program was cut off after 40 s" ;;
        *) sanitized="$sanitized; $tool of $program FAILED"; failed=$((failed + 1))
           tail -40 "$out/$tool-$program.log" ;;
      esac
    done
  done
fi
echo "sanitized after $((SECONDS - started)) s"

measured=0
"$build/bench/device" "${quick[@]}" --text README.md >"$out/measured.md" 2>"$out/measured.log" || measured=1
[ $measured = 0 ] || cat "$out/measured.log"

{
  echo
  echo "| $gpu | |"
  echo "|---|---|"
  echo "| programs that compile | $([ $built = 0 ] && echo all || echo 'NOT ALL') |"
  echo "| tests on the device | $passed passed, $failed failed |"
  echo "| left out, not on this machine | ${missing[*]:-nothing} |"
  echo "| compute-sanitizer | $sanitized |"
  echo "| measurements | $([ $measured = 0 ] && echo done || echo FAILED) |"
  echo "| seconds | $((SECONDS - started)) |"
  echo
  cat "$out/measured.md"
} | tee "$out/report.md"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ] && [ $built = 0 ] && [ $measured = 0 ]
