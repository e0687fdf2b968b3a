#include "call.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "device_memory.h"

namespace fakecuda {
namespace {

std::atomic<bool> forked{false};
bool initialised = false;

// The driver does not survive a fork (CUDA C++ Programming Guide, "Initialization"): in the child every call
// says that it is not initialised, cuInit too.
void after_fork_in_child() {
  forked = true;
  DeviceMemory::leave_after_fork();
}

[[gnu::constructor]] void watch_forks() { pthread_atfork(nullptr, nullptr, after_fork_in_child); }

pid_t thread_id() {
  thread_local const pid_t id = pid_t(syscall(SYS_gettid));
  return id;
}

}  // namespace

// These are never destroyed: other threads may call while the process ends.
std::condition_variable& Call::changed() {
  static auto* changed = new std::condition_variable;
  return *changed;
}

std::mutex& Call::mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::map<std::string, EntryPoint>& Call::entry_points() {
  static auto* entry_points = new std::map<std::string, EntryPoint>;
  return *entry_points;
}

void Call::set_initialised(bool value) { initialised = value; }

Call::Call(const char* name, uint64_t bytes, Needs needs) : status_(CUDA_ERROR_NOT_INITIALIZED) {
  if (forked) return;
  lock_ = std::unique_lock(mutex());
  EntryPoint& entry = entry_points()[name];
  const uint64_t number = ++entry.calls;
  ++entry.calls_by_thread[thread_id()];
  if (needs == kInitialised && !initialised) return;
  for (const Failure& failure : entry.failures) {
    if (number >= failure.first && number < failure.end) {
      status_ = failure.code;
      return;
    }
  }
  const double price_us = entry.fixed_us + entry.granule_us * double(bytes / kGranule);
  entry.charged_us_by_thread[thread_id()] += price_us;
  if (price_us > 0) end_ = Clock::now() + std::chrono::nanoseconds(int64_t(price_us * 1000));
  status_ = CUDA_SUCCESS;
}

// What the stand-in itself needed is part of the price.
Call::~Call() {
  while (end_ && Clock::now() < *end_) {
  }
}

}  // namespace fakecuda
