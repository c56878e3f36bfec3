#!/usr/bin/env bash
# From a fresh clone to a trained transformer: sets the machine up, builds, and trains five million parameters in
# bf16 on two MPI ranks, two minutes or so on two cores. Started again, it goes on from its latest checkpoint.
#   ./examples/quickstart.sh                          learns the King James text (Debian's package bible-kjv)
#   ./examples/quickstart.sh --data FILE              learns any other text
#   ./examples/quickstart.sh --data FILE --steps 2000 --vocabulary 1000 ...
#                                                     further words go to train_gpt (--help lists them) and
#                                                     override examples/quickstart.json
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

data='' run=runs/quickstart rest=()
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; }
while [ $# -gt 0 ]; do
  case "$1" in
    --data | --run)
      [ $# -ge 2 ] || { echo "$1 needs a path" >&2; exit 2; }
      if [ "$1" = --data ]; then data=$(absolute "$2"); run=runs/quickstart-$(basename "$2"); else own_run=$(absolute "$2"); fi
      shift 2 ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) rest+=("$1"); shift ;;
  esac
done
run=${own_run:-$run}
[ -z "$data" ] || [ -f "$data" ] || { echo "there is no file $data" >&2; exit 1; }

. tests/support/setup.sh
if [ -n "$data" ]; then tessera_setup; else tessera_setup text; fi

echo "== building"
mkdir -p build "$run"
{ cmake --preset release -DTESSERA_BUILD_TESTS=OFF && cmake --build build/release --target example_train_gpt example_generate
} >build/quickstart.log 2>&1 || { tail -40 build/quickstart.log; exit 1; }

if [ -z "$data" ]; then
  data=$run/king_james.txt
  # The program answers a prompt: what it says before the question and its prompts are left out, and each verse
  # becomes one line. It takes its place whole, since another run may have the older one open; what an interrupted
  # start leaves is hidden and removed by the next training.
  partial=$run/.king_james.txt.partial-$$
  echo 'gen1:1-rev22:21' | bible | awk '
    /^bible.*> gen/ { asked = 1; next }
    /^bible/ || !asked { next }
    /^ +[0-9]+ / { if (line != "") print line; line = $0; next }
    /^$/ { if (line != "") print line; line = ""; print; next }
    { line = line == "" ? $0 : line " " $0 }
    END { if (line != "") print line }' | cat -s >"$partial"
  mv "$partial" "$data"
fi

echo "== training on $(basename "$data"), $(wc -c <"$data") bytes, in $run"
mpiexec -n 2 build/release/examples/train_gpt --config examples/quickstart.json --data "$data" --run "$run" "${rest[@]}"

echo
echo "More text:  build/release/examples/generate --run $run --prompt \"And Moses\" --temperature 0.7"
