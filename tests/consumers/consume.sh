#!/bin/sh
# Builds and runs one consumer as somebody else's project would.
#   consume.sh NAME SOURCE_DIR BUILD_DIR WORK_DIR CXX
set -eu
name=$1 source=$2 build=$3 work=$4 CXX=$5
export CXX
here=$source/tests/consumers
rm -rf "$work"
mkdir -p "$work"

configure() { # folder options...
  folder=$1
  shift
  cmake -G Ninja -S "$here/$folder" -B "$work/build" -DCMAKE_CXX_COMPILER="$CXX" "$@"
  cmake --build "$work/build"
  "$work/build/consumer"
}
install() { cmake --install "$build" --prefix "$work/prefix" >/dev/null; }

case "$name" in
  find_package) install; configure find_package -DCMAKE_PREFIX_PATH="$work/prefix" ;;
  find_package_components)
    install
    # The package does not need the source: it may lie anywhere.
    mv "$work/prefix" "$work/moved"
    configure find_package -DCMAKE_PREFIX_PATH="$work/moved" "-DCOMPONENTS=json;xxhash;openmp;onednn;mpi" ;;
  cuda)
    install
    configure cuda -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_CUDA_ARCHITECTURES=90
    grep -q sm_90 "$work/build/build.ninja" ;;
  absent_component) install; configure absent_component -DCMAKE_PREFIX_PATH="$work/prefix" ;;
  add_subdirectory | fetch_content) configure "$name" -DTESSERA="$source" ;;
  missing_dependency)
    # A part that is asked for and not there stops the configuration and names Debian's package.
    if cmake -G Ninja -S "$source" -B "$work/build" -DTESSERA_WITH_XXHASH=ON \
      -Dtessera_xxhash_library=tessera_xxhash_library-NOTFOUND -DCMAKE_FIND_ROOT_PATH=/nowhere \
      -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY >"$work/log" 2>&1; then
      echo "configured without the library"
      exit 1
    fi
    grep -q libxxhash-dev "$work/log" || { cat "$work/log"; exit 1; } ;;
  plain_configure)
    # Nothing is asked for: a compiler is all that it takes.
    cmake -G Ninja -S "$source" -B "$work/build" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    if grep -qE 'MPI|dnnl|OpenMP|missing' "$work/log"; then cat "$work/log"; exit 1; fi ;;
  makefile) make -C "$here/makefile" TESSERA="$source/include" OUT="$work" && "$work/consumer" ;;
  single_header) make -C "$here/single_header" TESSERA="$source/single_include" OUT="$work" && "$work/consumer" ;;
  *) echo "no consumer is named $name"; exit 2 ;;
esac
