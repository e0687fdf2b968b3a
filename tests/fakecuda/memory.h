// Virtual memory: reservations, physical memory, and the page table between them. It belongs to the process
// and not to a context (CUDA Driver API reference, cuCtxDestroy: what cuMemCreate made is "not associated
// with any CUDA context"); which device may use an address is a matter of its access rights.
#pragma once

#include <cstdint>

#include "abi.h"

namespace fakecuda {

class Memory {
 public:
  // Whether the device may read and write all of [address, address + size).
  static bool accessible(CUdevice device, uint64_t address, uint64_t size);

  static int reservations();
  static int mappings();
  static int handles();
  static uint64_t bytes();
  static void clear();
};

}  // namespace fakecuda
