#include "memory.h"

#include <unistd.h>

#include <map>
#include <vector>

#include "call.h"
#include "device.h"
#include "device_memory.h"
#include "events.h"
#include "granules.h"

namespace fakecuda {
namespace {

struct Physical {
  uint64_t size;
  CUmemAllocationProp properties;
  uint64_t offset;  // in Granules
  int references;   // cuMemCreate's and cuMemRetainAllocationHandle's, less cuMemRelease's
  int mappings;
};

struct Mapping {
  uint64_t size;
  CUmemGenericAllocationHandle handle;
  uint64_t offset;  // in Granules
  int access[kMostDevices];
};

std::map<uint64_t, uint64_t> reserved;  // address to size
std::map<uint64_t, Mapping> page_table;
std::map<CUmemGenericAllocationHandle, Physical> physical;
CUmemGenericAllocationHandle last_handle = 0;

bool whole_granules(uint64_t value) { return value % kGranule == 0; }

void free_if_unused(CUmemGenericAllocationHandle handle) {
  const auto found = physical.find(handle);
  if (found->second.references > 0 || found->second.mappings > 0) return;
  Granules::free(found->second.offset, found->second.size);
  DeviceMemory::give(Devices::physical(found->second.properties.location.id), found->second.size);
  physical.erase(found);
}

bool in_one_reservation(uint64_t address, uint64_t size) {
  auto after = reserved.upper_bound(address);
  if (after == reserved.begin()) return false;
  const auto& [start, length] = *std::prev(after);
  return address - start < length && size <= length - (address - start);
}

bool overlaps_mapping(uint64_t address, uint64_t size) {
  auto next = page_table.lower_bound(address);
  if (next != page_table.end() && next->first < address + size) return true;
  return next != page_table.begin() && std::prev(next)->first + std::prev(next)->second.size > address;
}

// The mapping that holds `address`.
std::map<uint64_t, Mapping>::iterator mapping_at(uint64_t address) {
  auto after = page_table.upper_bound(address);
  if (after == page_table.begin()) return page_table.end();
  auto found = std::prev(after);
  return address - found->first < found->second.size ? found : page_table.end();
}

// The mappings that make up exactly [address, address + size), in order; none where they do not.
std::vector<uint64_t> whole_mappings(uint64_t address, uint64_t size) {
  std::vector<uint64_t> starts;
  uint64_t next = address;
  for (auto it = page_table.find(address);
       it != page_table.end() && it->first == next && next - address < size; ++it) {
    starts.push_back(it->first);
    next += it->second.size;
  }
  return next - address == size ? starts : std::vector<uint64_t>();
}

CUresult check(const CUmemAllocationProp* properties) {
  if (properties == nullptr || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_INVALID_VALUE;
  const int location = properties->location.type;
  if (location <= 0 || location >= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) return CUDA_ERROR_INVALID_VALUE;
  if (location != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (!Devices::has(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  const int exports = properties->requestedHandleTypes;
  if ((exports & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  return properties->win32HandleMetaData == nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The host stands in for every device, so it may do what any of them may.
void show(const std::vector<uint64_t>& starts) {
  for (size_t i = 0; i < starts.size();) {
    const Mapping& first = page_table.at(starts[i]);
    int access = 0;
    for (int device_access : first.access) access |= device_access;
    uint64_t size = 0;
    do {  // neighbours whose memory is one run: one system call
      size += page_table.at(starts[i]).size;
      ++i;
    } while (i < starts.size() && page_table.at(starts[i]).offset == first.offset + size);
    Granules::show(starts[i - 1] + page_table.at(starts[i - 1]).size - size, size, first.offset, access);
  }
}

}  // namespace

bool Memory::accessible(CUdevice device, uint64_t address, uint64_t size) {
  const uint64_t end = address + size;
  if (end < address) return false;
  while (address < end) {
    const auto found = mapping_at(address);
    if (found == page_table.end() || found->second.access[device] != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
      return false;
    address = found->first + found->second.size;
  }
  return true;
}

int Memory::reservations() { return int(reserved.size()); }

int Memory::mappings() { return int(page_table.size()); }

int Memory::handles() { return int(physical.size()); }

uint64_t Memory::bytes() {
  uint64_t bytes = 0;
  for (const auto& [handle, memory] : physical) bytes += memory.size;
  return bytes;
}

void Memory::clear() {
  page_table.clear();
  for (const auto& [address, size] : reserved) Granules::unreserve(address, size);
  reserved.clear();
  physical.clear();
  Granules::clear();
}

}  // namespace fakecuda

using fakecuda::Call;
using fakecuda::Devices;
using fakecuda::Granules;
using fakecuda::kGranule;
using fakecuda::page_table;
using fakecuda::physical;

FAKECUDA_API CUresult cuMemGetAllocationGranularity(size_t* granularity,
                                                    const CUmemAllocationProp* properties, int option) {
  Call call("cuMemGetAllocationGranularity");
  if (call.refused()) return call.status();
  if (granularity == nullptr || option < 0 || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult status = fakecuda::check(properties);
  if (status == CUDA_SUCCESS) *granularity = kGranule;
  return status;
}

FAKECUDA_API CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment,
                                          CUdeviceptr hint, unsigned long long flags) {
  Call call("cuMemAddressReserve", size);
  if (call.refused()) return call.status();
  const auto page = uint64_t(sysconf(_SC_PAGESIZE));
  const bool power_of_two = (alignment & (alignment - 1)) == 0;
  if (address == nullptr || size == 0 || size % page != 0 || hint % page != 0 || !power_of_two ||
      flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const uint64_t found = Granules::reserve(size, alignment, hint);
  if (found == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  fakecuda::reserved[found] = size;
  *address = found;
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  Call call("cuMemAddressFree", size);
  if (call.refused()) return call.status();
  const auto found = fakecuda::reserved.find(address);
  if (found == fakecuda::reserved.end() || found->second != size ||
      fakecuda::overlaps_mapping(address, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  fakecuda::reserved.erase(found);
  Granules::unreserve(address, size);
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                                  const CUmemAllocationProp* properties, unsigned long long flags) {
  Call call("cuMemCreate", size);
  if (call.refused()) return call.status();
  if (handle == nullptr || flags != 0 || size == 0 || !fakecuda::whole_granules(size))
    return CUDA_ERROR_INVALID_VALUE;
  const CUresult status = fakecuda::check(properties);
  if (status != CUDA_SUCCESS) return status;
  if (!fakecuda::DeviceMemory::take(Devices::physical(properties->location.id), size))
    return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = ++fakecuda::last_handle;
  physical[*handle] = {size, *properties, Granules::allocate(size), 1, 0};
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Call call("cuMemRelease");
  if (call.refused()) return call.status();
  const auto found = physical.find(handle);
  if (found == physical.end() || found->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
  --found->second.references;
  fakecuda::free_if_unused(handle);
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                               CUmemGenericAllocationHandle handle, unsigned long long flags) {
  Call call("cuMemMap", size);
  if (call.refused()) return call.status();
  // "offset currently must be zero" (cuMemMap).
  if (size == 0 || offset != 0 || flags != 0 || !fakecuda::whole_granules(address) ||
      !fakecuda::whole_granules(size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto found = physical.find(handle);
  if (found == physical.end() || found->second.references == 0 || size > found->second.size) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!fakecuda::in_one_reservation(address, size) || fakecuda::overlaps_mapping(address, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ++found->second.mappings;
  page_table[address] = {size, handle, found->second.offset, {}};
  return CUDA_SUCCESS;
}

// "The range must be the entire contiguous address range that was mapped to" (cuMemUnmap): one mapping, or
// several that follow each other, each whole, as NVIDIA's sample cuvector unmaps them. A range with a hole is
// refused (seen on the driver: pytorch issue 188008). It does not wait for work in flight: that work meets an
// illegal address, and the error stays (pytorch issue 196258).
FAKECUDA_API CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  Call call("cuMemUnmap", size);
  if (call.refused()) return call.status();
  const std::vector<uint64_t> starts = fakecuda::whole_mappings(address, size);
  if (size == 0 || starts.empty()) return CUDA_ERROR_INVALID_VALUE;
  Granules::hide(address, size);
  for (uint64_t start : starts) {
    const CUmemGenericAllocationHandle handle = page_table.at(start).handle;
    page_table.erase(start);
    --physical.at(handle).mappings;
    fakecuda::free_if_unused(handle);
  }
  fakecuda::Works::trap(address, size, "unmapped");
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* descriptions,
                                     size_t count) {
  Call call("cuMemSetAccess", size);
  if (call.refused()) return call.status();
  if (size == 0 || descriptions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (descriptions[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (!Devices::has(descriptions[i].location.id)) return CUDA_ERROR_INVALID_DEVICE;
    const int flags = descriptions[i].flags;
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  // "The range must be a fully mapped address range containing all allocations" (cuMemSetAccess).
  const std::vector<uint64_t> starts = fakecuda::whole_mappings(address, size);
  if (starts.empty()) return CUDA_ERROR_INVALID_VALUE;
  bool taken_away = false;
  for (uint64_t start : starts) {
    for (size_t i = 0; i < count; ++i) {
      int& access = page_table.at(start).access[descriptions[i].location.id];
      taken_away = taken_away || descriptions[i].flags < access;
      access = descriptions[i].flags;
    }
  }
  fakecuda::show(starts);
  if (taken_away) fakecuda::Works::trap(address, size, "access taken away");
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                                     CUdeviceptr address) {
  Call call("cuMemGetAccess");
  if (call.refused()) return call.status();
  if (flags == nullptr || location == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (!Devices::has(location->id)) return CUDA_ERROR_INVALID_DEVICE;
  const auto found = fakecuda::mapping_at(address);
  if (found == page_table.end()) return CUDA_ERROR_INVALID_VALUE;
  *flags = static_cast<unsigned long long>(found->second.access[location->id]);
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                             CUmemGenericAllocationHandle handle) {
  Call call("cuMemGetAllocationPropertiesFromHandle");
  if (call.refused()) return call.status();
  const auto found = physical.find(handle);
  if (properties == nullptr || found == physical.end() || found->second.references == 0)
    return CUDA_ERROR_INVALID_VALUE;
  *properties = found->second.properties;
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  Call call("cuMemRetainAllocationHandle");
  if (call.refused()) return call.status();
  const auto found = fakecuda::mapping_at(reinterpret_cast<uint64_t>(address));
  if (handle == nullptr || found == page_table.end()) return CUDA_ERROR_INVALID_VALUE;
  ++physical.at(found->second.handle).references;
  *handle = found->second.handle;
  return CUDA_SUCCESS;
}
