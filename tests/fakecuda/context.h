// Contexts: the primary one of each device, those made by cuCtxCreate, and each thread's stack of them.
#pragma once

#include <cstdint>
#include <map>

#include "abi.h"

namespace fakecuda {

struct Context {
  CUdevice device;
  bool primary;
  // The error of work that failed: every later use of the context gives it (CUDA Driver API reference,
  // CUDA_ERROR_ILLEGAL_ADDRESS: "this leaves the process in an inconsistent state").
  CUresult error = CUDA_SUCCESS;
};

class Contexts {
 public:
  // The calling thread's context, or why there is none that can be used.
  static CUresult current(CUcontext* handle);
  static Context* find(CUcontext handle);
  static CUresult error(CUcontext handle);
  static int live();
  static void clear();
};

// Handles are numbers that are never used twice, so that a stale one is always known for what it is.
uintptr_t next_handle();

}  // namespace fakecuda
