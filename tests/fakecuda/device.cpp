#include "device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "call.h"
#include "device_memory.h"

namespace fakecuda {
namespace {

// CUDA Driver API reference, CUdevice_attribute, for an A100; those not named are 0.
constexpr int kPciBusId = 33;
constexpr int kLastAttribute = 140;
const std::map<int, int> kAttributes = {
    {1, 1024},  // MAX_THREADS_PER_BLOCK
    {10, 32},   // WARP_SIZE
    {16, 108},  // MULTIPROCESSOR_COUNT
    {41, 1},    // UNIFIED_ADDRESSING
    {75, 8},    // COMPUTE_CAPABILITY_MAJOR
    {102, 1},   // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    {103, 1},   // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    {110, 1},   // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
};

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

int machine_devices() {
  static const int from_environment = int(number("FAKECUDA_DEVICES", 1));
  return from_environment;
}

int devices = machine_devices();
uint64_t total_bytes = number("FAKECUDA_MEMORY", 16ull << 30);
std::vector<int> visible;

CUuuid uuid_of(int index) {
  CUuuid uuid = {{0xfa, 0x4e, 0xc0, 0xd0, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 0}};
  uuid.bytes[3] = static_cast<unsigned char>(0xd0 + index);
  return uuid;
}

std::string uuid_text(int index) {
  const CUuuid uuid = uuid_of(index);
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", uuid.bytes[i]);
    text += (i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(hex);
  }
  return text;
}

// The device that one item of CUDA_VISIBLE_DEVICES names; -1 for none, or for a prefix of several.
int named(const std::string& item) {
  if (item.rfind("GPU-", 0) == 0) {
    int found = -1;
    for (int index = 0; index < devices; ++index) {
      if (uuid_text(index).rfind(item, 0) != 0) continue;
      if (found >= 0) return -1;
      found = index;
    }
    return found;
  }
  char* end = nullptr;
  const long index = std::strtol(item.c_str(), &end, 10);
  return end != item.c_str() && *end == '\0' && index >= 0 && index < devices ? int(index) : -1;
}

}  // namespace

// CUDA C++ Programming Guide, "CUDA Environment Variables": devices are numbered in the order of the list,
// and only those before the first invalid item are visible. (It does not say what a repeated device does:
// here it is an invalid item.)
CUresult Devices::discover() {
  visible.clear();
  const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int index = 0; index < devices; ++index) visible.push_back(index);
  } else {
    std::istringstream items(list);
    std::string item;
    while (std::getline(items, item, ',')) {
      const int index = named(item);
      if (index < 0 || std::find(visible.begin(), visible.end(), index) != visible.end()) break;
      visible.push_back(index);
    }
  }
  if (visible.empty()) return CUDA_ERROR_NO_DEVICE;
  return DeviceMemory::open(total_bytes) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

void Devices::forget() {
  visible.clear();
  DeviceMemory::close();
}

void Devices::describe(int count, uint64_t bytes) {
  devices = std::clamp(count, 0, kMostDevices);
  total_bytes = bytes;
}

int Devices::count() { return int(visible.size()); }

int Devices::physical(CUdevice device) { return visible[size_t(device)]; }

}  // namespace fakecuda

using fakecuda::Call;
using fakecuda::Devices;

FAKECUDA_API CUresult cuInit(unsigned flags) {
  Call call("cuInit", 0, Call::kNothing);
  if (call.refused()) return call.status();
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (Devices::count() > 0) return CUDA_SUCCESS;
  const CUresult status = Devices::discover();
  Call::set_initialised(status == CUDA_SUCCESS);
  return status;
}

FAKECUDA_API CUresult cuDriverGetVersion(int* version) {
  Call call("cuDriverGetVersion", 0, Call::kNothing);
  if (call.refused()) return call.status();
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = 12080;
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  Call call("cuDeviceGet");
  if (call.refused()) return call.status();
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Devices::has(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuDeviceGetCount(int* count) {
  Call call("cuDeviceGetCount");
  if (call.refused()) return call.status();
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = Devices::count();
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  Call call("cuDeviceGetName");
  if (call.refused()) return call.status();
  if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!Devices::has(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, size_t(length), "Stand-in GPU");
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  Call call("cuDeviceGetUuid");
  if (call.refused()) return call.status();
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Devices::has(device)) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = fakecuda::uuid_of(Devices::physical(device));
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

FAKECUDA_API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  Call call("cuDeviceTotalMem");
  if (call.refused()) return call.status();
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Devices::has(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = fakecuda::DeviceMemory::total(Devices::physical(device));
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  Call call("cuDeviceGetAttribute");
  if (call.refused()) return call.status();
  const bool known = attribute > 0 && attribute <= fakecuda::kLastAttribute;
  if (value == nullptr || !known) return CUDA_ERROR_INVALID_VALUE;
  if (!Devices::has(device)) return CUDA_ERROR_INVALID_DEVICE;
  const auto found = fakecuda::kAttributes.find(attribute);
  *value = found != fakecuda::kAttributes.end() ? found->second : 0;
  if (attribute == fakecuda::kPciBusId) *value = 1 + Devices::physical(device);
  return CUDA_SUCCESS;
}
