// What a test may tell and ask the stand-in. Every function takes the driver's mutex.
#include <cstdio>
#include <mutex>

#include "call.h"
#include "context.h"
#include "device.h"
#include "device_memory.h"
#include "entry.h"
#include "events.h"
#include "granules.h"
#include "memory.h"

using fakecuda::Call;
using fakecuda::Devices;

namespace {

uint64_t hogged[fakecuda::kMostDevices];

}  // namespace

struct FakecudaLive {
  uint64_t contexts, streams, events, works, reservations, mappings, handles, bytes;
};

// As if freshly loaded on a machine with such devices: not initialised, nothing alive, nothing counted. No
// call may be under way.
FAKECUDA_API void fakecuda_reset(int devices, uint64_t total_bytes) {
  const std::lock_guard held(Call::mutex());
  fakecuda::Works::clear();
  fakecuda::Contexts::clear();
  fakecuda::Memory::clear();
  Devices::forget();
  Devices::describe(devices, total_bytes);
  Call::entry_points().clear();
  Call::set_initialised(false);
  for (uint64_t& bytes : hogged) bytes = 0;
}

// The nth call from now on, and `times` in all, does nothing but return `code`. False: no such entry point.
FAKECUDA_API bool fakecuda_fail(const char* name, uint64_t nth, uint64_t times, int code) {
  const std::lock_guard held(Call::mutex());
  if (!fakecuda::is_entry_point(name)) return false;
  fakecuda::EntryPoint& entry = Call::entry_points()[name];
  const uint64_t first = entry.calls + nth;
  entry.failures.push_back({first, first + times, CUresult(code)});
  return true;
}

FAKECUDA_API bool fakecuda_price(const char* name, double fixed_us, double granule_us) {
  const std::lock_guard held(Call::mutex());
  if (!fakecuda::is_entry_point(name)) return false;
  fakecuda::EntryPoint& entry = Call::entry_points()[name];
  entry.fixed_us = fixed_us;
  entry.granule_us = granule_us;
  return true;
}

// Calls by the thread of that kernel id, or by all where it is 0.
FAKECUDA_API bool fakecuda_calls(const char* name, int thread, uint64_t* calls) {
  const std::lock_guard held(Call::mutex());
  if (!fakecuda::is_entry_point(name)) return false;
  fakecuda::EntryPoint& entry = Call::entry_points()[name];
  *calls = thread == 0 ? entry.calls : entry.calls_by_thread[thread];
  return true;
}

// Microseconds, by the thread of that kernel id, or by all where it is 0.
FAKECUDA_API double fakecuda_charged(int thread) {
  const std::lock_guard held(Call::mutex());
  double charged = 0;
  for (const auto& [name, entry] : Call::entry_points()) {
    for (const auto& [by, us] : entry.charged_us_by_thread) {
      if (thread == 0 || by == thread) charged += us;
    }
  }
  return charged;
}

FAKECUDA_API int fakecuda_work_begin(CUstream stream, uint64_t address, uint64_t size, uint64_t* id) {
  const std::lock_guard held(Call::mutex());
  return fakecuda::Works::begin(stream, address, size, id);
}

FAKECUDA_API bool fakecuda_work_end(uint64_t id) {
  const std::lock_guard held(Call::mutex());
  return fakecuda::Works::end(id);
}

// Copies the text of trap `index`; false where there are not so many.
FAKECUDA_API bool fakecuda_trap(size_t index, char* text, size_t size) {
  const std::lock_guard held(Call::mutex());
  if (index >= fakecuda::Works::traps().size()) return false;
  std::snprintf(text, size, "%s", fakecuda::Works::traps()[index].c_str());
  return true;
}

FAKECUDA_API void fakecuda_live(FakecudaLive* live) {
  const std::lock_guard held(Call::mutex());
  *live = {uint64_t(fakecuda::Contexts::live()),       uint64_t(fakecuda::Streams::live()),
           uint64_t(fakecuda::Streams::live_events()), uint64_t(fakecuda::Works::live()),
           uint64_t(fakecuda::Memory::reservations()), uint64_t(fakecuda::Memory::mappings()),
           uint64_t(fakecuda::Memory::handles()),      fakecuda::Memory::bytes()};
}

// The rest needs cuInit; false before it, and for a device that is not there.
FAKECUDA_API bool fakecuda_set_total(int device, uint64_t bytes) {
  const std::lock_guard held(Call::mutex());
  if (!Devices::has(device)) return false;
  fakecuda::DeviceMemory::set_total(Devices::physical(device), bytes);
  return true;
}

// This process holds `bytes` of the device beside what it made with cuMemCreate. False: there are not so
// many.
FAKECUDA_API bool fakecuda_hog(int device, uint64_t bytes) {
  const std::lock_guard held(Call::mutex());
  if (!Devices::has(device)) return false;
  uint64_t& now = hogged[device];
  const int index = Devices::physical(device);
  if (bytes > now && !fakecuda::DeviceMemory::take(index, bytes - now)) return false;
  if (bytes < now) fakecuda::DeviceMemory::give(index, now - bytes);
  now = bytes;
  return true;
}

FAKECUDA_API void fakecuda_set_data(bool data) {
  const std::lock_guard held(Call::mutex());
  fakecuda::Granules::set_data(data);
}

// A byte that fills physical memory when it is created, or -1.
FAKECUDA_API void fakecuda_set_fill(int fill) {
  const std::lock_guard held(Call::mutex());
  fakecuda::Granules::set_fill(fill);
}
