#include "granules.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "abi.h"
#include "call.h"

namespace fakecuda {
namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

bool with_data = true;
int fill_byte = -1;
int file = -1;
uint64_t end_of_file = 0;

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// The driver would have succeeded, so there is no error to return that would be true: the process ends.
// ENOMEM is most likely vm.max_map_count, which a test with many scattered granules avoids by keeping no
// data.
void must(bool done, const char* what) {
  if (done) return;
  std::perror(what);
  std::abort();
}

}  // namespace

void Granules::set_data(bool data) { with_data = data; }

void Granules::set_fill(int fill) { fill_byte = fill; }

uint64_t Granules::reserve(uint64_t size, uint64_t alignment, uint64_t hint) {
  alignment = std::max(alignment, kGranule);
  if (size > UINT64_MAX - alignment) return 0;
  void* found = mmap(pointer(hint), size + alignment, PROT_NONE, kReserved, -1, 0);
  if (found == MAP_FAILED) return 0;
  const auto start = reinterpret_cast<uint64_t>(found);
  const uint64_t address = (start + alignment - 1) / alignment * alignment;
  if (address > start) munmap(found, address - start);
  if (start + alignment > address) munmap(pointer(address + size), start + alignment - address);
  return address;
}

void Granules::unreserve(uint64_t address, uint64_t size) {
  must(munmap(pointer(address), size) == 0, "munmap");
}

uint64_t Granules::allocate(uint64_t size) {
  const uint64_t offset = end_of_file;
  end_of_file += size;
  if (!with_data) return offset;
  if (file < 0) must((file = memfd_create("fakecuda", MFD_CLOEXEC)) >= 0, "memfd_create");
  must(ftruncate(file, off_t(end_of_file)) == 0, "ftruncate");
  if (fill_byte >= 0) {
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, off_t(offset));
    must(memory != MAP_FAILED, "mmap");
    std::memset(memory, fill_byte, size);
    munmap(memory, size);
  }
  return offset;
}

void Granules::free(uint64_t offset, uint64_t size) {
  if (!with_data || file < 0) return;
  must(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(size)) == 0,
       "fallocate");
}

void Granules::show(uint64_t address, uint64_t size, uint64_t offset, int access) {
  if (!with_data) return;
  const int protection = access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                         : access == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                      : PROT_NONE;
  void* shown = mmap(pointer(address), size, protection, MAP_SHARED | MAP_FIXED, file, off_t(offset));
  must(shown != MAP_FAILED, "mmap");
}

void Granules::hide(uint64_t address, uint64_t size) {
  if (!with_data) return;
  must(mmap(pointer(address), size, PROT_NONE, kReserved | MAP_FIXED, -1, 0) != MAP_FAILED, "mmap");
}

void Granules::clear() {
  if (file >= 0) ::close(file);
  file = -1;
  end_of_file = 0;
  with_data = true;
  fill_byte = -1;
}

}  // namespace fakecuda
