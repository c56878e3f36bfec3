#ifndef TESSERA_CORE_VERSION_HPP
#define TESSERA_CORE_VERSION_HPP

/// The version, in one place: major * 10000 + minor * 100 + patch. CMake, the package version file and the
/// changelog test read this line.
#define TESSERA_VERSION 100

#endif
