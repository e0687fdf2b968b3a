#include "cuda_driver.h"

#include <cstdio>
#include <stdexcept>

namespace kvquota {

namespace cuda {
namespace {

template <typename Function>
void find(const std::map<std::string, uintptr_t>& addresses, const char* name, Function*& function) {
  const auto found = addresses.find(name);
  if (found == addresses.end() || found->second == 0) {
    throw std::invalid_argument("functions has no address for " + std::string(name));
  }
  function = reinterpret_cast<Function*>(found->second);
}

}  // namespace

Functions::Functions(const std::map<std::string, uintptr_t>& addresses) {
  find(addresses, "cuGetErrorName", get_error_name);
  find(addresses, "cuDevicePrimaryCtxRelease", primary_ctx_release);
  find(addresses, "cuCtxGetCurrent", ctx_get_current);
  find(addresses, "cuCtxSetCurrent", ctx_set_current);
  find(addresses, "cuMemGetInfo", mem_get_info);
  find(addresses, "cuMemAddressReserve", mem_address_reserve);
  find(addresses, "cuMemAddressFree", mem_address_free);
  find(addresses, "cuMemCreate", mem_create);
  find(addresses, "cuMemRelease", mem_release);
  find(addresses, "cuMemMap", mem_map);
  find(addresses, "cuMemUnmap", mem_unmap);
  find(addresses, "cuMemSetAccess", mem_set_access);
  find(addresses, "cuEventCreate", event_create);
  find(addresses, "cuEventRecord", event_record);
  find(addresses, "cuEventQuery", event_query);
  find(addresses, "cuEventSynchronize", event_synchronize);
  find(addresses, "cuEventDestroy", event_destroy);
}

}  // namespace cuda

namespace {

constexpr int32_t kDlCuda = 2;

std::string bytes(size_t size) { return std::to_string(size) + " bytes"; }

std::string range(uintptr_t address, size_t size) {
  return bytes(size) + " at address " + std::to_string(address);
}

cuda::Event pointer(Driver::Event event) { return reinterpret_cast<cuda::Event>(event); }

}  // namespace

CudaDriver::CudaDriver(const cuda::Functions& functions, cuda::Device device, cuda::Context context,
                       size_t granularity)
    : ForkAware(Order::kDriver),
      cuda_(functions),
      device_(device),
      context_(context),
      granularity_(granularity) {
  if (context == nullptr) throw std::invalid_argument("context is 0, not a primary context");
  if (granularity == 0 || (granularity & (granularity - 1)) != 0) {
    throw std::invalid_argument("granularity " + bytes(granularity) + " is not a power of two");
  }
  enlist();
}

CudaDriver::~CudaDriver() {
  if (!forked_) {
    spare_events_.insert(spare_events_.end(), events_.begin(), events_.end());
    for (const cuda::Event event : spare_events_) {
      end("cuEventDestroy", [&] { return in_context([&] { return cuda_.event_destroy(event); }); });
    }
    end("cuDevicePrimaryCtxRelease", [&] { return cuda_.primary_ctx_release(device_); });
  }
  delist();
}

template <typename Call>
void CudaDriver::end(const char* name, Call call) const {
  cuda::Result result = cuda::kSuccess;
  for (int attempt = 1; attempt <= 3; ++attempt) {
    result = call();
    // At the end of a process everything has gone already.
    if (result == cuda::kSuccess || result == cuda::kDeinitialized) return;
  }
  std::fprintf(stderr, "kvquota: the CUDA driver of device %d could not give everything back: %s: %s (%d)\n",
               device_, name, name_of(result).c_str(), result);
}

template <typename Call>
cuda::Result CudaDriver::in_context(Call call) {
  // What CUDA says itself in a forked child, where it must not be called.
  if (forked_) return cuda::kNotInitialized;
  cuda::Context before = nullptr;
  cuda::Result result = cuda_.ctx_get_current(&before);
  if (result != cuda::kSuccess) return result;
  if (before == context_) return call();
  result = cuda_.ctx_set_current(context_);
  if (result != cuda::kSuccess) return result;
  result = call();
  // A context that ended meanwhile can't come back. Better none at all than ours: what the thread calls next
  // then says so, instead of working on another device.
  if (cuda_.ctx_set_current(before) != cuda::kSuccess) cuda_.ctx_set_current(nullptr);
  return result;
}

template <typename Detail>
void CudaDriver::check(const char* operation, cuda::Result result, Detail detail) const {
  if (result != cuda::kSuccess) throw DriverError(operation, result, name_of(result), detail());
}

std::string CudaDriver::name_of(cuda::Result result) const {
  const char* name = nullptr;
  if (cuda_.get_error_name(result, &name) != cuda::kSuccess || name == nullptr) return "unknown CUDA error";
  return name;
}

DeviceId CudaDriver::device() const { return {kDlCuda, device_}; }

MemInfo CudaDriver::mem_get_info() {
  MemInfo info = {};
  const auto result = in_context([&] { return cuda_.mem_get_info(&info.free, &info.total); });
  check(op::kMemGetInfo, result, [&] { return "device " + std::to_string(device_); });
  return info;
}

uintptr_t CudaDriver::address_reserve(size_t size) {
  cuda::DevicePtr address = 0;
  const auto result =
      in_context([&] { return cuda_.mem_address_reserve(&address, size, granularity_, 0, 0); });
  check(op::kAddressReserve, result, [&] { return bytes(size); });
  return address;
}

void CudaDriver::address_free(uintptr_t address, size_t size) {
  const auto result = in_context([&] { return cuda_.mem_address_free(address, size); });
  check(op::kAddressFree, result, [&] { return range(address, size); });
}

Driver::Handle CudaDriver::mem_create(size_t size) {
  cuda::MemAllocationProp prop = {};
  prop.type = cuda::kMemAllocationPinned;
  prop.location = {cuda::kMemLocationDevice, device_};
  cuda::MemHandle handle = 0;
  const auto result = in_context([&] { return cuda_.mem_create(&handle, size, &prop, 0); });
  check(op::kMemCreate, result, [&] { return bytes(size) + " on device " + std::to_string(device_); });
  return handle;
}

void CudaDriver::mem_release(Handle handle) {
  const auto result = in_context([&] { return cuda_.mem_release(handle); });
  check(op::kMemRelease, result, [&] { return "handle " + std::to_string(handle); });
}

void CudaDriver::mem_map(uintptr_t address, size_t size, Handle handle) {
  const auto result = in_context([&] { return cuda_.mem_map(address, size, 0, handle, 0); });
  check(op::kMemMap, result, [&] { return range(address, size) + ", handle " + std::to_string(handle); });
}

void CudaDriver::mem_unmap(uintptr_t address, size_t size) {
  const auto result = in_context([&] { return cuda_.mem_unmap(address, size); });
  check(op::kMemUnmap, result, [&] { return range(address, size); });
}

void CudaDriver::mem_set_access(uintptr_t address, size_t size) {
  const cuda::MemAccessDesc access = {{cuda::kMemLocationDevice, device_}, cuda::kMemAccessReadWrite};
  const auto result = in_context([&] { return cuda_.mem_set_access(address, size, &access, 1); });
  check(op::kMemSetAccess, result, [&] { return range(address, size); });
}

cuda::Event CudaDriver::spare_event() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_events_.empty()) {
      const cuda::Event event = spare_events_.back();
      spare_events_.pop_back();
      return event;
    }
  }
  // A wait for it sleeps, where it would otherwise keep a core of the engine's busy.
  constexpr unsigned kFlags = cuda::kEventBlockingSync | cuda::kEventDisableTiming;
  cuda::Event event = nullptr;
  const auto result = in_context([&] { return cuda_.event_create(&event, kFlags); });
  check(op::kEventRecord, result, [] { return "creating an event"; });
  return event;
}

Driver::Event CudaDriver::event_record() {
  const cuda::Event event = spare_event();
  const auto result =
      in_context([&] { return cuda_.event_record(event, reinterpret_cast<cuda::Stream>(stream_.load())); });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (result == cuda::kSuccess) {
      events_.insert(event);
    } else {
      spare_events_.push_back(event);
    }
  }
  check(op::kEventRecord, result, [&] { return "stream " + std::to_string(stream_); });
  return reinterpret_cast<Event>(event);
}

bool CudaDriver::event_query(Event event) {
  const auto result = in_context([&] { return cuda_.event_query(pointer(event)); });
  if (result == cuda::kNotReady) return false;
  check(op::kEventQuery, result, [&] { return "event " + std::to_string(event); });
  return true;
}

void CudaDriver::event_synchronize(Event event) {
  const auto result = in_context([&] { return cuda_.event_synchronize(pointer(event)); });
  check(op::kEventSynchronize, result, [&] { return "event " + std::to_string(event); });
}

void CudaDriver::event_destroy(Event event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool ours = events_.erase(pointer(event)) != 0;
  check(op::kEventDestroy, ours ? cuda::kSuccess : cuda::kInvalidHandle,
        [&] { return "event " + std::to_string(event) + " is unknown or destroyed"; });
  spare_events_.push_back(pointer(event));
}

void CudaDriver::before_fork() { mutex_.lock(); }

void CudaDriver::after_fork_in_parent() { mutex_.unlock(); }

void CudaDriver::after_fork_in_child() {
  forked_ = true;
  mutex_.unlock();
}

}  // namespace kvquota
