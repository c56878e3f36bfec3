# What tests, examples and benchmarks share.
set(CMAKE_CXX_EXTENSIONS OFF)
add_library(tessera_strict INTERFACE)
# nvcc hands the host compiler its own.
target_compile_options(tessera_strict INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror>
  "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings -Xcompiler=-Wall,-Wextra,-Werror>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # g++ 12 sees these in its own std::string once that is inlined (GCC bugs 105329 and 105651).
  target_compile_options(tessera_strict INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds;-Wno-restrict;-Wno-stringop-overflow>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wno-array-bounds,-Wno-restrict,-Wno-stringop-overflow>)
endif()

# Every part that this build has.
add_library(tessera_everything INTERFACE)
target_link_libraries(tessera_everything INTERFACE tessera::tessera ${tessera_wanted})

# Reads the lines `// key: values` (or `// key`; `#` in scripts) that a source starts with: requires, mpi_ranks, timeout,
# threads, own_main, alone, smoke. Sets the variables SOURCE_<key> in the caller, empty where a line is absent.
function(tessera_read_notes source)
  file(STRINGS ${source} lines LIMIT_COUNT 8)
  foreach(key requires mpi_ranks timeout threads own_main alone smoke)
    set(value "")
    foreach(line IN LISTS lines)
      if(line MATCHES "^(//|#) ${key}: *(.*)$")
        string(REGEX REPLACE "[, ]+" ";" value "${CMAKE_MATCH_2}")
      elseif(line MATCHES "^(//|#) ${key}$")
        set(value ON)
      endif()
    endforeach()
    set(SOURCE_${key} "${value}")
    set(SOURCE_${key} "${value}" PARENT_SCOPE)
  endforeach()

  # A header that exists only under TESSERA_WITH_NAME makes NAME a requirement of who includes it, unless it does
  # so under a condition.
  file(READ ${source} text)
  string(REGEX REPLACE "#if defined\\(TESSERA_WITH_[A-Z0-9]+\\)\n(#include [^\n]*\n)*#endif" "" text "${text}")
  string(REGEX MATCHALL "#include <tessera/[^\n]*" lines "${text}")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^#include <([^>]*)>.*" "${PROJECT_SOURCE_DIR}/include/\\1" header "${line}")
    if(header MATCHES "/comm/(mpi|nccl).hpp$")
      list(APPEND SOURCE_requires ${CMAKE_MATCH_1})
    elseif(EXISTS ${header})
      file(READ ${header} text)
      if(text MATCHES "#define TESSERA_[A-Z0-9_]*_HPP\n(\n|#include [^\n]*\n)*#if (defined[^\n]*)")
        string(REGEX MATCHALL "TESSERA_WITH_[A-Z0-9]+" macros "${CMAKE_MATCH_2}")
        string(REPLACE "TESSERA_WITH_" "" macros "${macros}")
        string(TOLOWER "${macros}" macros)
        list(APPEND SOURCE_requires ${macros})
      endif()
    endif()
  endforeach()
  list(REMOVE_DUPLICATES SOURCE_requires)
  set(SOURCE_requires "${SOURCE_requires}" PARENT_SCOPE)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
endfunction()

# Sets `unmet` to those names of `requires` that this build was configured without.
function(tessera_unmet requires unmet)
  set(list "")
  foreach(name IN LISTS requires)
    if(NOT name IN_LIST tessera_components)
      message(FATAL_ERROR "'// requires: ${name}' in ${source}: known are ${tessera_components}")
    endif()
    string(TOUPPER ${name} upper)
    if(NOT TESSERA_WITH_${upper})
      list(APPEND list ${name})
    endif()
  endforeach()
  set(${unmet} "${list}" PARENT_SCOPE)
endfunction()
