#include "context.h"

#include <map>
#include <vector>

#include "call.h"
#include "device.h"
#include "device_memory.h"
#include "events.h"

namespace fakecuda {
namespace {

std::map<CUcontext, Context> contexts;
CUresult process_error = CUDA_SUCCESS;
uintptr_t last_handle = 0x1000;
CUcontext primary_handles[kMostDevices];  // the same through all lives of a primary context, as the driver's
int primary_references[kMostDevices];

// A generation: the stacks of other threads can't be emptied from here.
uint64_t generation = 1;

struct Stack {
  uint64_t generation = 0;
  std::vector<CUcontext> contexts;
};
thread_local Stack thread_stack;

std::vector<CUcontext>& stack() {
  if (thread_stack.generation != generation) thread_stack = {generation, {}};
  return thread_stack.contexts;
}

void destroy(CUcontext handle) {
  Streams::context_destroyed(handle);
  contexts.erase(handle);
}

}  // namespace

uintptr_t next_handle() { return last_handle += 8; }

CUresult Contexts::current(CUcontext* handle) {
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *handle = stack().back();
  return error(*handle);
}

Context* Contexts::find(CUcontext handle) {
  const auto found = contexts.find(handle);
  return found == contexts.end() ? nullptr : &found->second;
}

CUresult Contexts::error(CUcontext handle) {
  return find(handle) == nullptr ? CUDA_ERROR_CONTEXT_IS_DESTROYED : process_error;
}

void Contexts::lose(CUresult error) { process_error = error; }

int Contexts::live() { return int(contexts.size()); }

void Contexts::clear() {
  while (!contexts.empty()) destroy(contexts.begin()->first);
  for (int& references : primary_references) references = 0;
  process_error = CUDA_SUCCESS;
  ++generation;
}

}  // namespace fakecuda

using fakecuda::Call;
using fakecuda::Contexts;
using fakecuda::Devices;

FAKECUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Call call("cuDevicePrimaryCtxRetain");
  if (call.refused()) return call.status();
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Devices::has(device)) return CUDA_ERROR_INVALID_DEVICE;
  CUcontext& handle = fakecuda::primary_handles[device];
  if (handle == nullptr) handle = reinterpret_cast<CUcontext>(fakecuda::next_handle());
  if (fakecuda::primary_references[device]++ == 0) fakecuda::contexts[handle] = {device, true};
  *context = handle;
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  Call call("cuDevicePrimaryCtxRelease");
  if (call.refused()) return call.status();
  if (!Devices::has(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (fakecuda::primary_references[device] == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--fakecuda::primary_references[device] == 0) fakecuda::destroy(fakecuda::primary_handles[device]);
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return cuDevicePrimaryCtxRelease_v2(device);
}

FAKECUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  Call call("cuDevicePrimaryCtxGetState");
  if (call.refused()) return call.status();
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Devices::has(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = fakecuda::primary_references[device] > 0;
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuCtxCreate_v2(CUcontext* context, unsigned, CUdevice device) {
  Call call("cuCtxCreate");
  if (call.refused()) return call.status();
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!Devices::has(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = reinterpret_cast<CUcontext>(fakecuda::next_handle());
  fakecuda::contexts[*context] = {device, false};
  fakecuda::stack().push_back(*context);
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuCtxDestroy_v2(CUcontext context) {
  Call call("cuCtxDestroy");
  if (call.refused()) return call.status();
  const fakecuda::Context* found = Contexts::find(context);
  if (found == nullptr || found->primary) return CUDA_ERROR_INVALID_CONTEXT;
  fakecuda::destroy(context);
  if (!fakecuda::stack().empty() && fakecuda::stack().back() == context) fakecuda::stack().pop_back();
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuCtxGetCurrent(CUcontext* context) {
  Call call("cuCtxGetCurrent");
  if (call.refused()) return call.status();
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = fakecuda::stack().empty() ? nullptr : fakecuda::stack().back();
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuCtxSetCurrent(CUcontext context) {
  Call call("cuCtxSetCurrent");
  if (call.refused()) return call.status();
  std::vector<CUcontext>& stack = fakecuda::stack();
  if (context == nullptr) {
    if (!stack.empty()) stack.pop_back();
    return CUDA_SUCCESS;
  }
  if (Contexts::find(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (stack.empty()) stack.push_back(context);
  stack.back() = context;
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  Call call("cuCtxPushCurrent");
  if (call.refused()) return call.status();
  if (Contexts::find(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  fakecuda::stack().push_back(context);
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  Call call("cuCtxPopCurrent");
  if (call.refused()) return call.status();
  if (fakecuda::stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = fakecuda::stack().back();
  fakecuda::stack().pop_back();
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuCtxGetDevice(CUdevice* device) {
  Call call("cuCtxGetDevice");
  if (call.refused()) return call.status();
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUcontext context = nullptr;
  const CUresult status = Contexts::current(&context);
  if (Contexts::find(context) == nullptr) return status;
  *device = Contexts::find(context)->device;
  return CUDA_SUCCESS;
}
