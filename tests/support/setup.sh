# What ./tests/run.sh, ./bench/run.sh and ./examples/quickstart.sh need on the machine. Sourced, not run:
#     . tests/support/setup.sh
#     tessera_setup [cpp] [python] ...
# Where something is missing, installs it on Debian and Ubuntu if this user may (root, or sudo without a
# password), and otherwise lists what is missing and ends the program.

# Prints each line `package  how to see that it is there` of what is missing.
tessera_missing() {
  need() { eval "$2" >/dev/null 2>&1 || printf '%s\n' "$1"; }
  header() { printf '#include <%s>\n' "$1" | g++ -std=c++20 -E -x c++ - ; }
  need g++ 'g++ --version'
  need cmake 'cmake --version'
  need ninja-build 'ninja --version'
  need python3 'python3 --version'
  need mpich 'mpiexec --version'
  mpi4() { printf '#include <mpi.h>\n#if MPI_VERSION < 4\n#error MPI-4 is needed\n#endif\n' | mpicxx -E -x c++ - ; }
  need libmpich-dev mpi4
  need libdnnl-dev 'header dnnl.hpp'
  need nlohmann-json3-dev 'header nlohmann/json.hpp'
  need libxxhash-dev 'header xxhash.h'
  need libsentencepiece-dev 'header sentencepiece_trainer.h'
  need libcli11-dev 'header CLI/CLI.hpp'
  for part in "$@"; do
    case "$part" in
      tests)
        need make 'make --version'
        need doctest-dev 'header doctest/doctest.h'
        need clang 'clang++ --version'
        need clang-format 'clang-format --version'
        need clang-tidy 'clang-tidy --version'
        need libomp-dev 'printf "#include <omp.h>\n" | clang++ -fopenmp -E -x c++ -'
        need bible-kjv 'command -v bible' ;;
      bench) need libbenchmark-dev 'header benchmark/benchmark.h' ;;
      text) need bible-kjv 'command -v bible' ;;
      *) echo "tessera_setup: no part is named '$part'" >&2; return 2 ;;
    esac
  done
}

tessera_setup() {
  local missing as_root=()
  missing=$(tessera_missing "$@") || exit 2
  [ -n "$missing" ] || return 0
  missing=$(printf '%s' "$missing" | tr '\n' ' ')
  if ! command -v apt-get >/dev/null; then
    echo "Missing, by the names of Debian's packages: $missing" >&2
    echo "Install them with this system's package manager and start again." >&2
    exit 1
  fi
  if [ "$(id -u)" != 0 ]; then
    as_root=(sudo -n)
    if ! sudo -n true 2>/dev/null; then
      echo "Missing packages: $missing" >&2
      echo "Install them, then start again:  sudo apt-get install $missing" >&2
      exit 1
    fi
  fi
  echo "Installing: $missing"
  # shellcheck disable=SC2086 # one word a package
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive sh -ec \
    'apt-get update -qq; apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null' sh $missing || {
      echo "The installation failed; missing: $missing" >&2
      exit 1
    }
  missing=$(tessera_missing "$@" | tr '\n' ' ')
  [ -z "$missing" ] || { echo "Installed, but still not usable: $missing" >&2; exit 1; }
}
