// Contexts: the primary one of each device, those made by cuCtxCreate, and each thread's stack of them.
#pragma once

#include <cstdint>

#include "abi.h"

namespace fakecuda {

struct Context {
  CUdevice device;
  bool primary;
};

class Contexts {
 public:
  // The calling thread's context, or why there is none that can be used.
  static CUresult current(CUcontext* handle);
  static Context* find(CUcontext handle);
  static CUresult error(CUcontext handle);
  // Work failed: every later use of any context gives `error`, until the process ends (CUDA Driver API
  // reference, CUDA_ERROR_ILLEGAL_ADDRESS). Virtual memory, which needs no context, can still be given back.
  static void lose(CUresult error);
  static int live();
  static void clear();
};

// Handles are numbers that are never used twice, so that a stale one is always known for what it is.
uintptr_t next_handle();

}  // namespace fakecuda
