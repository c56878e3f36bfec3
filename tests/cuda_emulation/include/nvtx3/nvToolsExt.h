// The emulation's stand-in for the profiler's header of this name. Ranges are counted.
#ifndef TESSERA_CUDA_EMULATION_NVTOOLSEXT_H
#define TESSERA_CUDA_EMULATION_NVTOOLSEXT_H

#include <cstdint>

#define NVTX_VERSION 3
#define NVTX_EVENT_ATTRIB_STRUCT_SIZE (static_cast<std::uint16_t>(sizeof(nvtxEventAttributes_t)))

enum nvtxColorType_t { NVTX_COLOR_UNKNOWN = 0, NVTX_COLOR_ARGB = 1 };
enum nvtxMessageType_t { NVTX_MESSAGE_UNKNOWN = 0, NVTX_MESSAGE_TYPE_ASCII = 1 };

struct nvtxEventAttributes_t {
  std::uint16_t version, size;
  std::uint32_t category;
  std::int32_t colorType;
  std::uint32_t color;
  std::int32_t payloadType, reserved0;
  union {
    std::uint64_t ullValue;
    double dValue;
  } payload;
  std::int32_t messageType;
  union {
    char const* ascii;
    wchar_t const* unicode;
  } message;
};

extern "C" {
int nvtxRangePushA(char const* name);
int nvtxRangePushEx(nvtxEventAttributes_t const* attributes);
int nvtxRangePop();
void nvtxMarkA(char const* text);
}

#endif
