// The devices that the process sees.
#pragma once

#include "abi.h"

namespace fakecuda {

class Devices {
 public:
  // CUDA_ERROR_NO_DEVICE where CUDA_VISIBLE_DEVICES leaves none.
  static CUresult discover();
  static void forget();
  // Back to the devices that the environment describes, or to `devices` of `total_bytes` each.
  static void describe(int devices, uint64_t total_bytes);

  static int count();
  static bool has(CUdevice device) { return device >= 0 && device < count(); }
  // The machine's index of a device that the process sees.
  static int physical(CUdevice device);
};

}  // namespace fakecuda
