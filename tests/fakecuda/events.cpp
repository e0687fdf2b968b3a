#include "events.h"

#include <cstdio>
#include <map>
#include <set>

#include "call.h"
#include "context.h"
#include "memory.h"

namespace fakecuda {
namespace {

using WorkIds = std::set<uint64_t>;

struct Stream {
  CUcontext context;
  bool blocking;
  WorkIds submitted;
  // A destroyed stream stays until its work has ended (cuStreamDestroy), which the default stream waits for.
  bool destroyed = false;
};

struct Event {
  CUcontext context;
  WorkIds captured;
};

std::map<uint64_t, Work> works;  // those in flight
uint64_t last_work = 0;
std::map<CUstream, Stream> streams;
std::map<CUcontext, WorkIds> legacy_streams;
std::map<CUevent, Event> events;
std::vector<std::string> trap_texts;

bool passed(const WorkIds& ids) {
  for (uint64_t id : ids) {
    if (works.count(id) != 0) return false;
  }
  return true;
}

void add_in_flight(const WorkIds& from, WorkIds* to) {
  for (uint64_t id : from) {
    if (works.count(id) != 0) to->insert(id);
  }
}

bool is_legacy(CUstream stream) {
  return stream == nullptr || reinterpret_cast<uintptr_t>(stream) == CU_STREAM_LEGACY;
}

Stream* find_stream(CUstream handle) {
  const auto found = streams.find(handle);
  return found == streams.end() || found->second.destroyed ? nullptr : &found->second;
}

void forget_destroyed() {
  for (auto it = streams.begin(); it != streams.end();) {
    it = it->second.destroyed && passed(it->second.submitted) ? streams.erase(it) : std::next(it);
  }
}

// What the stream would wait for now. The legacy stream and the blocking ones of a context wait for each
// other (CUDA Driver API reference, "Stream synchronization behavior").
WorkIds before(CUcontext context, CUstream stream) {
  WorkIds ids;
  if (is_legacy(stream) || streams.at(stream).blocking) add_in_flight(legacy_streams[context], &ids);
  for (const auto& [handle, other] : streams) {
    const bool counts = handle == stream || (is_legacy(stream) && other.blocking);
    if (counts && other.context == context) add_in_flight(other.submitted, &ids);
  }
  return ids;
}

// The context in which a call on a stream works, and whether it can.
CUresult context_of(CUstream stream, CUcontext* context) {
  if (is_legacy(stream)) return Contexts::current(context);
  const Stream* found = find_stream(stream);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *context = found->context;
  return Contexts::error(*context);
}

WorkIds& submitted(CUcontext context, CUstream stream) {
  return is_legacy(stream) ? legacy_streams[context] : streams.at(stream).submitted;
}

}  // namespace

CUresult Works::begin(CUstream stream, uint64_t address, uint64_t size, uint64_t* id) {
  CUcontext context = nullptr;
  const CUresult status = context_of(stream, &context);
  if (status != CUDA_SUCCESS) return status;
  *id = ++last_work;
  works[*id] = {context, stream, address, size};
  submitted(context, stream).insert(*id);
  if (!Memory::accessible(Contexts::find(context)->device, address, size)) {
    trap(address, size, "work on an address without memory or access");
  }
  return CUDA_SUCCESS;
}

bool Works::end(uint64_t id) {
  const bool was_in_flight = works.erase(id) != 0;
  forget_destroyed();
  Call::changed().notify_all();
  return was_in_flight;
}

void Works::trap(uint64_t address, uint64_t size, const char* why) {
  for (const auto& [id, work] : works) {
    if (work.address >= address + size || address >= work.address + work.size) continue;
    char text[200];
    std::snprintf(text, sizeof text, "%s: [%#llx, +%#llx) under work %llu on [%#llx, +%#llx)", why,
                  static_cast<unsigned long long>(address), static_cast<unsigned long long>(size),
                  static_cast<unsigned long long>(id), static_cast<unsigned long long>(work.address),
                  static_cast<unsigned long long>(work.size));
    trap_texts.emplace_back(text);
    Contexts::lose(CUDA_ERROR_ILLEGAL_ADDRESS);
  }
  Call::changed().notify_all();
}

std::vector<std::string>& Works::traps() { return trap_texts; }

int Works::live() { return int(works.size()); }

void Works::clear() {
  works.clear();
  trap_texts.clear();
  Call::changed().notify_all();
}

void Streams::context_destroyed(CUcontext context) {
  for (auto it = events.begin(); it != events.end();) {
    it = it->second.context == context ? events.erase(it) : std::next(it);
  }
  for (auto it = streams.begin(); it != streams.end();) {
    it = it->second.context == context ? streams.erase(it) : std::next(it);
  }
  for (auto it = works.begin(); it != works.end();) {
    it = it->second.context == context ? works.erase(it) : std::next(it);
  }
  legacy_streams.erase(context);
  Call::changed().notify_all();
}

int Streams::live() { return int(streams.size()); }

int Streams::live_events() { return int(events.size()); }

}  // namespace fakecuda

using fakecuda::Call;
using fakecuda::Contexts;
using fakecuda::events;
using fakecuda::streams;

FAKECUDA_API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  Call call("cuStreamCreate");
  if (call.refused()) return call.status();
  if (stream == nullptr || (flags & ~CU_STREAM_NON_BLOCKING) != 0) return CUDA_ERROR_INVALID_VALUE;
  CUcontext context = nullptr;
  const CUresult status = Contexts::current(&context);
  if (status != CUDA_SUCCESS) return status;
  *stream = reinterpret_cast<CUstream>(fakecuda::next_handle());
  streams[*stream] = {context, flags == 0, {}};
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuStreamDestroy_v2(CUstream stream) {
  Call call("cuStreamDestroy");
  if (call.refused()) return call.status();
  fakecuda::Stream* found = fakecuda::find_stream(stream);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  found->destroyed = true;
  fakecuda::forget_destroyed();
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  Call call("cuStreamGetCtx");
  if (call.refused()) return call.status();
  return context != nullptr ? fakecuda::context_of(stream, context) : CUDA_ERROR_INVALID_VALUE;
}

FAKECUDA_API CUresult cuStreamQuery(CUstream stream) {
  Call call("cuStreamQuery");
  if (call.refused()) return call.status();
  CUcontext context = nullptr;
  const CUresult status = fakecuda::context_of(stream, &context);
  if (status != CUDA_SUCCESS) return status;
  return fakecuda::passed(fakecuda::before(context, stream)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKECUDA_API CUresult cuStreamSynchronize(CUstream stream) {
  Call call("cuStreamSynchronize");
  if (call.refused()) return call.status();
  CUcontext context = nullptr;
  const CUresult status = fakecuda::context_of(stream, &context);
  if (status != CUDA_SUCCESS) return status;
  const auto ids = fakecuda::before(context, stream);
  call.wait([&] { return Contexts::error(context) != CUDA_SUCCESS || fakecuda::passed(ids); });
  return Contexts::error(context);
}

FAKECUDA_API CUresult cuCtxSynchronize() {
  Call call("cuCtxSynchronize");
  if (call.refused()) return call.status();
  CUcontext context = nullptr;
  const CUresult status = Contexts::current(&context);
  if (status != CUDA_SUCCESS) return status;
  fakecuda::WorkIds ids;
  for (const auto& [id, work] : fakecuda::works) {
    if (work.context == context) ids.insert(id);
  }
  call.wait([&] { return Contexts::error(context) != CUDA_SUCCESS || fakecuda::passed(ids); });
  return Contexts::error(context);
}

FAKECUDA_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  Call call("cuStreamWaitEvent");
  if (call.refused()) return call.status();
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  CUcontext context = nullptr;
  const CUresult status = fakecuda::context_of(stream, &context);
  if (status != CUDA_SUCCESS) return status;
  const auto found = events.find(event);
  if (found == events.end()) return CUDA_ERROR_INVALID_HANDLE;
  fakecuda::add_in_flight(found->second.captured, &fakecuda::submitted(context, stream));
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuEventCreate(CUevent* event, unsigned flags) {
  Call call("cuEventCreate");
  if (call.refused()) return call.status();
  const bool untimed = (flags & CU_EVENT_DISABLE_TIMING) != 0;
  if (event == nullptr || (flags & ~CU_EVENT_FLAGS) != 0 ||
      ((flags & CU_EVENT_INTERPROCESS) != 0 && !untimed)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUcontext context = nullptr;
  const CUresult status = Contexts::current(&context);
  if (status != CUDA_SUCCESS) return status;
  *event = reinterpret_cast<CUevent>(fakecuda::next_handle());
  events[*event] = {context, {}};
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuEventRecord(CUevent event, CUstream stream) {
  Call call("cuEventRecord");
  if (call.refused()) return call.status();
  CUcontext context = nullptr;
  const CUresult status = fakecuda::context_of(stream, &context);
  if (status != CUDA_SUCCESS) return status;
  const auto found = events.find(event);
  if (found == events.end() || found->second.context != context) return CUDA_ERROR_INVALID_HANDLE;
  found->second.captured = fakecuda::before(context, stream);
  return CUDA_SUCCESS;
}

FAKECUDA_API CUresult cuEventQuery(CUevent event) {
  Call call("cuEventQuery");
  if (call.refused()) return call.status();
  const auto found = events.find(event);
  if (found == events.end()) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult error = Contexts::error(found->second.context);
  if (error != CUDA_SUCCESS) return error;
  return fakecuda::passed(found->second.captured) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKECUDA_API CUresult cuEventSynchronize(CUevent event) {
  Call call("cuEventSynchronize");
  if (call.refused()) return call.status();
  const auto found = events.find(event);
  if (found == events.end()) return CUDA_ERROR_INVALID_HANDLE;
  const CUcontext context = found->second.context;
  const auto ids = found->second.captured;
  call.wait([&] { return Contexts::error(context) != CUDA_SUCCESS || fakecuda::passed(ids); });
  return Contexts::error(context);
}

FAKECUDA_API CUresult cuEventDestroy_v2(CUevent event) {
  Call call("cuEventDestroy");
  if (call.refused()) return call.status();
  return events.erase(event) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
