// One driver call: counted, refused where a test said so, charged its price, and alone (the driver's work
// is nearly serial in a real process too).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "abi.h"

namespace fakecuda {

constexpr uint64_t kGranule = 2 << 20;

struct Failure {
  uint64_t first;  // the call that fails first, counted from the entry point's first call
  uint64_t end;
  CUresult code;
};

struct EntryPoint {
  uint64_t calls = 0;
  std::map<pid_t, uint64_t> calls_by_thread;
  std::map<pid_t, double> charged_us_by_thread;
  double fixed_us = 0;
  double granule_us = 0;
  std::vector<Failure> failures;
};

class Call {
 public:
  enum Needs { kNothing, kInitialised };

  // `bytes`: what the call covers, for its price.
  explicit Call(const char* name, uint64_t bytes = 0, Needs needs = kInitialised);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  CUresult status() const { return status_; }
  bool refused() const { return status_ != CUDA_SUCCESS; }

  // Wait, with the driver free for others, until `done`.
  template <typename Done>
  void wait(Done done) {
    changed().wait(lock_, done);
  }

  static std::condition_variable& changed();
  static std::mutex& mutex();
  static std::map<std::string, EntryPoint>& entry_points();
  static void set_initialised(bool initialised);

 private:
  using Clock = std::chrono::steady_clock;

  std::unique_lock<std::mutex> lock_;
  std::optional<Clock::time_point> end_;
  CUresult status_;
};

}  // namespace fakecuda
