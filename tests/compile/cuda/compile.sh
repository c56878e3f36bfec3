#!/bin/sh
# Compiles one file for one GPU architecture as far as machine code, and keeps what the tests read: the PTX, what
# ptxas says of each kernel (registers, shared memory, spills), and the files it depends on.
#     compile.sh NVCC SOURCE ARCHITECTURE OUTPUT DEPENDENCIES OPTION...
# OUTPUT is OUTPUT.o (code of the host and the device) or OUTPUT.cubin (the device's alone, sooner); beside it are
# written NAME.ptx and NAME.ptxas.
set -eu
nvcc=$1 source=$2 architecture=$3 output=$4 dependencies=$5
shift 5
stem=${output%.*}
case $output in
  *.cubin) kind=-cubin ;;
  *) kind=-c ;;
esac
rm -rf "$stem.kept"
mkdir "$stem.kept"
"$nvcc" "$kind" "$@" -arch="sm_$architecture" -Xptxas=-v -Werror all-warnings --keep --keep-dir "$stem.kept" \
  -MD -MT "$output" -MF "$dependencies" -o "$output" "$source" >"$stem.ptxas" 2>&1 || {
  cat "$stem.ptxas"
  exit 1
}
mv "$stem.kept"/*.ptx "$stem.ptx"
rm -rf "$stem.kept"
if grep -iE '\bwarning\b' "$stem.ptxas"; then exit 1; fi
