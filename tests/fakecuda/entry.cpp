// Error names, and the way to every entry point by its name.
#include "entry.h"

#include <dlfcn.h>

#include <cstring>

#include "call.h"

namespace fakecuda {
namespace {

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

const ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(CUresult code) {
  for (const ErrorText& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

// The version in which each came, from cudaTypedefs.h (PFN_NAME_vVERSION), the newest that the stand-in has.
const EntryName kNames[] = {
    {"cuInit", "cuInit", 2000},
    {"cuDriverGetVersion", "cuDriverGetVersion", 2020},
    {"cuGetErrorName", "cuGetErrorName", 6000},
    {"cuGetErrorString", "cuGetErrorString", 6000},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
    {"cuGetProcAddress", "cuGetProcAddress", 11030},
    {"cuDeviceGet", "cuDeviceGet", 2000},
    {"cuDeviceGetCount", "cuDeviceGetCount", 2000},
    {"cuDeviceGetName", "cuDeviceGetName", 2000},
    {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040},
    {"cuDeviceGetUuid", "cuDeviceGetUuid", 9020},
    {"cuDeviceGetAttribute", "cuDeviceGetAttribute", 2000},
    {"cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020},
    {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease", 7000},
    {"cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxGetState", 7000},
    {"cuCtxCreate", "cuCtxCreate_v2", 3020},
    {"cuCtxDestroy", "cuCtxDestroy_v2", 4000},
    {"cuCtxGetCurrent", "cuCtxGetCurrent", 4000},
    {"cuCtxSetCurrent", "cuCtxSetCurrent", 4000},
    {"cuCtxPushCurrent", "cuCtxPushCurrent_v2", 4000},
    {"cuCtxPopCurrent", "cuCtxPopCurrent_v2", 4000},
    {"cuCtxGetDevice", "cuCtxGetDevice", 2000},
    {"cuCtxSynchronize", "cuCtxSynchronize", 2000},
    {"cuMemGetInfo", "cuMemGetInfo_v2", 3020},
    {"cuMemGetAllocationGranularity", "cuMemGetAllocationGranularity", 10020},
    {"cuMemAddressReserve", "cuMemAddressReserve", 10020},
    {"cuMemAddressFree", "cuMemAddressFree", 10020},
    {"cuMemCreate", "cuMemCreate", 10020},
    {"cuMemRelease", "cuMemRelease", 10020},
    {"cuMemMap", "cuMemMap", 10020},
    {"cuMemUnmap", "cuMemUnmap", 10020},
    {"cuMemSetAccess", "cuMemSetAccess", 10020},
    {"cuMemGetAccess", "cuMemGetAccess", 10020},
    {"cuMemGetAllocationPropertiesFromHandle", "cuMemGetAllocationPropertiesFromHandle", 10020},
    {"cuMemRetainAllocationHandle", "cuMemRetainAllocationHandle", 11000},
    {"cuMemcpyHtoD", "cuMemcpyHtoD_v2", 3020},
    {"cuMemcpyDtoH", "cuMemcpyDtoH_v2", 3020},
    {"cuMemsetD8", "cuMemsetD8_v2", 3020},
    {"cuStreamCreate", "cuStreamCreate", 2000},
    {"cuStreamDestroy", "cuStreamDestroy_v2", 4000},
    {"cuStreamGetCtx", "cuStreamGetCtx", 9020},
    {"cuStreamQuery", "cuStreamQuery", 2000},
    {"cuStreamSynchronize", "cuStreamSynchronize", 2000},
    {"cuStreamWaitEvent", "cuStreamWaitEvent", 3020},
    {"cuEventCreate", "cuEventCreate", 2000},
    {"cuEventRecord", "cuEventRecord", 2000},
    {"cuEventQuery", "cuEventQuery", 2000},
    {"cuEventSynchronize", "cuEventSynchronize", 2000},
    {"cuEventDestroy", "cuEventDestroy_v2", 4000},
};

// The stand-in's own symbol, also where another library of the process has one of that name.
void* own_symbol(const char* name) {
  static void* self = [] {
    Dl_info info;
    return dladdr(reinterpret_cast<void*>(&find_error), &info) != 0
               ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)
               : nullptr;
  }();
  return dlsym(self, name);
}

enum Found { kSuccess = 0, kSymbolNotFound = 1, kVersionNotSufficient = 2 };

}  // namespace

bool is_entry_point(const char* name) {
  for (const EntryName& entry : kNames) {
    if (std::strcmp(entry.name, name) == 0) return true;
  }
  return false;
}

}  // namespace fakecuda

// These need no cuInit: they ask nothing of a device.
FAKECUDA_API CUresult cuGetErrorName(CUresult error, const char** name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const fakecuda::ErrorText* found = fakecuda::find_error(error);
  *name = found != nullptr ? found->name : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKECUDA_API CUresult cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const fakecuda::ErrorText* found = fakecuda::find_error(error);
  *text = found != nullptr ? found->text : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKECUDA_API CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                                          int* found) {
  fakecuda::Call call("cuGetProcAddress", 0, fakecuda::Call::kNothing);
  if (call.refused()) return call.status();
  if (name == nullptr || function == nullptr || flags > 2 || version > 12080) return CUDA_ERROR_INVALID_VALUE;
  int result = fakecuda::kSymbolNotFound;
  *function = nullptr;
  for (const fakecuda::EntryName& entry : fakecuda::kNames) {
    if (std::strcmp(entry.name, name) != 0) continue;
    result = version >= entry.version ? fakecuda::kSuccess : fakecuda::kVersionNotSufficient;
    if (result == fakecuda::kSuccess) {
      *function = fakecuda::own_symbol(entry.symbol);
      break;
    }
  }
  if (found != nullptr) *found = result;
  // From 12.0 on a name that is not there is told by `found` alone.
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  int found = 0;
  const CUresult status = cuGetProcAddress_v2(name, function, version, flags, &found);
  // The first version returned CUDA_ERROR_NOT_FOUND for an unknown name (CUDA Driver API reference, 11.3).
  return status == CUDA_SUCCESS && found != fakecuda::kSuccess ? CUDA_ERROR_NOT_FOUND : status;
}
