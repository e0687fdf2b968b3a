// How much of each device's memory is taken, by all processes that share one state file.
#pragma once

#include <cstdint>

namespace fakecuda {

constexpr int kMostDevices = 8;

// Call every method with the driver's mutex held. A process holds a lock on its slot of the file, so what a
// dead process took is free again as soon as anyone looks.
class DeviceMemory {
 public:
  // The file is FAKECUDA_STATE's, or private memory where that is not set. A file with a total keeps it.
  // False where the file cannot be used.
  static bool open(uint64_t total_bytes);
  static void close();
  static void leave_after_fork();

  static bool take(int device, uint64_t bytes);
  static void give(int device, uint64_t bytes);
  static uint64_t total(int device);
  static uint64_t used(int device);
  static void set_total(int device, uint64_t bytes);
};

}  // namespace fakecuda
