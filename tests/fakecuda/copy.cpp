// Copies and memory information: what a context does with the memory that its device may use.
#include <cstring>

#include "call.h"
#include "context.h"
#include "device.h"
#include "device_memory.h"
#include "memory.h"

namespace {

using fakecuda::Call;
using fakecuda::Contexts;

// The current context may be used, and its device may use the range.
CUresult check(CUdeviceptr address, size_t size) {
  CUcontext context = nullptr;
  const CUresult status = Contexts::current(&context);
  if (status != CUDA_SUCCESS) return status;
  return fakecuda::Memory::accessible(Contexts::find(context)->device, address, size)
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

FAKECUDA_API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  Call call("cuMemGetInfo");
  if (call.refused()) return call.status();
  if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUcontext context = nullptr;
  const CUresult status = Contexts::current(&context);
  if (status != CUDA_SUCCESS) return status;
  const int device = fakecuda::Devices::physical(Contexts::find(context)->device);
  const uint64_t used = fakecuda::DeviceMemory::used(device);
  *total = fakecuda::DeviceMemory::total(device);
  *free = *total > used ? *total - used : 0;
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
  Call call("cuMemcpyHtoD", size);
  if (call.refused()) return call.status();
  const CUresult status = check(to, size);
  if (status == CUDA_SUCCESS) std::memcpy(reinterpret_cast<void*>(to), from, size);
  return status;
}

FAKECUDA_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
  Call call("cuMemcpyDtoH", size);
  if (call.refused()) return call.status();
  const CUresult status = check(from, size);
  if (status == CUDA_SUCCESS) std::memcpy(to, reinterpret_cast<void*>(from), size);
  return status;
}

FAKECUDA_API CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t size) {
  Call call("cuMemsetD8", size);
  if (call.refused()) return call.status();
  const CUresult status = check(address, size);
  if (status == CUDA_SUCCESS) std::memset(reinterpret_cast<void*>(address), value, size);
  return status;
}
