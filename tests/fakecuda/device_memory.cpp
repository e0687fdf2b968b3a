#include "device_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace fakecuda {
namespace {

constexpr int kSlots = 64;
constexpr off_t kWholeFile = 0;  // the byte that is locked while the numbers change; slot s has byte 1 + s

struct Shared {
  uint64_t ready;
  uint64_t total[kMostDevices];
  uint64_t used[kSlots][kMostDevices];
};

int file = -1;
Shared* shared = nullptr;
int own_slot = -1;

bool lock(int command, off_t byte, short type) {
  struct flock range = {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  return fcntl(file, command, &range) == 0;
}

// Locks of the open file description, not of the process: they end with its last descriptor, and a thread's
// close of another descriptor of the same file does not drop them.
struct Locked {
  Locked() { lock(F_OFD_SETLKW, kWholeFile, F_WRLCK); }
  ~Locked() { lock(F_OFD_SETLKW, kWholeFile, F_UNLCK); }
};

bool held_by_another(int slot) {
  struct flock range = {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = 1 + slot;
  range.l_len = 1;
  return fcntl(file, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

uint64_t sum(int device) {
  uint64_t bytes = 0;
  for (int slot = 0; slot < kSlots; ++slot) {
    uint64_t& used = shared->used[slot][device];
    if (used != 0 && slot != own_slot && !held_by_another(slot)) used = 0;
    bytes += used;
  }
  return bytes;
}

bool choose_slot() {
  for (int slot = 0; slot < kSlots; ++slot) {
    if (!lock(F_OFD_SETLK, 1 + slot, F_WRLCK)) continue;
    own_slot = slot;
    for (uint64_t& used : shared->used[slot]) used = 0;
    return true;
  }
  return false;
}

}  // namespace

bool DeviceMemory::open(uint64_t total_bytes) {
  const char* path = std::getenv("FAKECUDA_STATE");
  file = path != nullptr ? ::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)
                         : memfd_create("fakecuda-state", MFD_CLOEXEC);
  if (file < 0) return false;
  Locked locked;
  if (ftruncate(file, sizeof(Shared)) != 0) return false;
  // Mapped through a description of its own: a mapping keeps its description, and with it the locks, alive in
  // a forked child.
  const int other = ::open(("/proc/self/fd/" + std::to_string(file)).c_str(), O_RDWR | O_CLOEXEC);
  if (other < 0) return false;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, other, 0);
  ::close(other);
  if (memory == MAP_FAILED) return false;
  shared = static_cast<Shared*>(memory);
  if (shared->ready == 0) {
    for (uint64_t& total : shared->total) total = total_bytes;
    shared->ready = 1;
  }
  return choose_slot();
}

void DeviceMemory::close() {
  if (shared != nullptr) munmap(shared, sizeof(Shared));
  if (file >= 0) ::close(file);
  shared = nullptr;
  file = own_slot = -1;
}

void DeviceMemory::leave_after_fork() {
  if (file >= 0) ::close(file);
  file = -1;
}

bool DeviceMemory::take(int device, uint64_t bytes) {
  Locked locked;
  const uint64_t taken = sum(device);
  if (taken > shared->total[device] || bytes > shared->total[device] - taken) return false;
  shared->used[own_slot][device] += bytes;
  return true;
}

void DeviceMemory::give(int device, uint64_t bytes) {
  Locked locked;
  shared->used[own_slot][device] -= bytes;
}

uint64_t DeviceMemory::total(int device) { return shared->total[device]; }

uint64_t DeviceMemory::used(int device) {
  Locked locked;
  return sum(device);
}

void DeviceMemory::set_total(int device, uint64_t bytes) {
  Locked locked;
  shared->total[device] = bytes;
}

}  // namespace fakecuda
