// Streams, events, and the work that a test says is in flight.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"

namespace fakecuda {

// A test's stand-in for a kernel: from `begin` to `end` it may touch its range at any time. One that waits
// behind another in its stream is held to the same, the strictest reading of what the engine may rely on.
struct Work {
  CUcontext context;
  CUstream stream;
  uint64_t address;
  uint64_t size;
};

class Works {
 public:
  static CUresult begin(CUstream stream, uint64_t address, uint64_t size, uint64_t* id);
  static bool end(uint64_t id);
  // Every work that touches [address, address + size) has faulted: recorded, and the process's contexts are
  // lost.
  static void trap(uint64_t address, uint64_t size, const char* why);
  static std::vector<std::string>& traps();
  static int live();
  static void clear();
};

class Streams {
 public:
  static void context_destroyed(CUcontext context);
  static int live();
  static int live_events();
};

}  // namespace fakecuda
