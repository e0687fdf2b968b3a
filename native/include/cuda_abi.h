// The part of CUDA's driver API that CudaDriver calls, declared by hand: building needs no CUDA header and no
// CUDA library. Names and layouts are those of cuda.h, which may not change them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace kvquota::cuda {

using Result = int;
constexpr Result kSuccess = 0;
constexpr Result kNotInitialized = 3;
constexpr Result kDeinitialized = 4;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotReady = 600;

using Device = int;
using DevicePtr = unsigned long long;
using MemHandle = unsigned long long;
using Context = struct ContextOf*;
using Stream = struct StreamOf*;
using Event = struct EventOf*;

constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;

struct MemLocation {
  int type;
  int id;
};
constexpr int kMemLocationDevice = 1;

struct MemAllocationProp {
  int type;
  int requested_handle_types;
  MemLocation location;
  void* win32_metadata;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
constexpr int kMemAllocationPinned = 1;
static_assert(sizeof(MemAllocationProp) == 32);

struct MemAccessDesc {
  MemLocation location;
  int flags;
};
constexpr int kMemAccessReadWrite = 3;
static_assert(sizeof(MemAccessDesc) == 12);

struct Functions {
  // By CUDA's names, without the suffix of a version. Throws std::invalid_argument where one is missing.
  explicit Functions(const std::map<std::string, uintptr_t>& addresses);

  Result (*get_error_name)(Result, const char**);
  Result (*primary_ctx_release)(Device);
  Result (*ctx_get_current)(Context*);
  Result (*ctx_set_current)(Context);
  Result (*mem_get_info)(size_t* free, size_t* total);
  Result (*mem_address_reserve)(DevicePtr*, size_t size, size_t alignment, DevicePtr at,
                                unsigned long long flags);
  Result (*mem_address_free)(DevicePtr, size_t size);
  Result (*mem_create)(MemHandle*, size_t size, const MemAllocationProp*, unsigned long long flags);
  Result (*mem_release)(MemHandle);
  Result (*mem_map)(DevicePtr, size_t size, size_t offset, MemHandle, unsigned long long flags);
  Result (*mem_unmap)(DevicePtr, size_t size);
  Result (*mem_set_access)(DevicePtr, size_t size, const MemAccessDesc*, size_t count);
  Result (*event_create)(Event*, unsigned flags);
  Result (*event_record)(Event, Stream);
  Result (*event_query)(Event);
  Result (*event_synchronize)(Event);
  Result (*event_destroy)(Event);
};

}  // namespace kvquota::cuda
