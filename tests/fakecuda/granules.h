// The memory behind the books: one memfd, mapped over PROT_NONE reservations of the host's address space.
#pragma once

#include <cstdint>

namespace fakecuda {

class Granules {
 public:
  static void set_data(bool data);
  static void set_fill(int fill);

  // 0 where no addresses are left.
  static uint64_t reserve(uint64_t size, uint64_t alignment, uint64_t hint);
  static void unreserve(uint64_t address, uint64_t size);
  // An offset that was never handed out: stale contents can't come back.
  static uint64_t allocate(uint64_t size);
  static void free(uint64_t offset, uint64_t size);
  static void show(uint64_t address, uint64_t size, uint64_t offset, int access);
  static void hide(uint64_t address, uint64_t size);
  static void clear();
};

}  // namespace fakecuda
