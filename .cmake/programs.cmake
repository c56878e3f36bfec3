# What tests, examples and benchmarks share.
set(CMAKE_CXX_EXTENSIONS OFF)
add_library(tessera_strict INTERFACE)
target_compile_options(tessera_strict INTERFACE -Wall -Wextra -Werror)

# Every part that this build has.
add_library(tessera_everything INTERFACE)
target_link_libraries(tessera_everything INTERFACE tessera::tessera ${tessera_wanted})

# Reads the lines `// key: values` (or `// key`) that a source starts with: requires, mpi_ranks, timeout,
# threads, own_main. Sets the variables SOURCE_<key> in the caller, empty where a line is absent.
function(tessera_read_notes source)
  file(STRINGS ${source} lines LIMIT_COUNT 8)
  foreach(key requires mpi_ranks timeout threads own_main)
    set(value "")
    foreach(line IN LISTS lines)
      if(line MATCHES "^// ${key}: *(.*)$")
        string(REGEX REPLACE "[, ]+" ";" value "${CMAKE_MATCH_1}")
      elseif(line STREQUAL "// ${key}")
        set(value ON)
      endif()
    endforeach()
    set(SOURCE_${key} "${value}" PARENT_SCOPE)
  endforeach()
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
