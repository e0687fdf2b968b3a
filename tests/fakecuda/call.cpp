#include "call.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

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

void spin(double microseconds) {
  if (microseconds <= 0) return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(int64_t(microseconds * 1000));
  while (std::chrono::steady_clock::now() < end) {
  }
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

bool Call::in_forked_child() { return forked; }

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
  spin(entry.fixed_us + entry.granule_us * double(bytes / kGranule));
  status_ = CUDA_SUCCESS;
}

}  // namespace fakecuda
