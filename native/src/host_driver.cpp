#include "host_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kvquota {
namespace {

constexpr int32_t kDlCpu = 1;

std::string bytes(size_t size) { return std::to_string(size) + " bytes"; }

std::string range(uintptr_t address, size_t size) {
  return bytes(size) + " at address " + std::to_string(address);
}

// A fresh stretch of addresses with nothing behind them, over whatever is there when `address` is given.
void* reserve(uintptr_t address, size_t size) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (address != 0 ? MAP_FIXED : 0);
  return mmap(reinterpret_cast<void*>(address), size, PROT_NONE, flags, -1, 0);
}

}  // namespace

HostDriver::HostDriver(size_t granularity, std::optional<uint8_t> fill)
    : ForkAware(Order::kDriver), granularity_(granularity), fill_(fill) {
  const auto os_page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (granularity < os_page || (granularity & (granularity - 1)) != 0) {
    throw std::invalid_argument("granularity " + bytes(granularity) + " is not a power of two of at least " +
                                bytes(os_page));
  }
  // Enlisted before it holds anything that a fork could carry off.
  enlist();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    fd_ = memfd_create("kvquota-granules", MFD_CLOEXEC);
    if (fd_ >= 0) return;
  }
  const int error = errno;
  delist();
  throw std::system_error(error, std::generic_category(), "memfd_create for the host driver");
}

HostDriver::~HostDriver() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (fd_ >= 0) {
      for (const auto& [address, size] : reservations_) munmap(reinterpret_cast<void*>(address), size);
      close(fd_);
      fd_ = -1;
    }
  }
  delist();
}

void HostDriver::attach(int record_fd) {
  std::unique_ptr<DeviceRecord> record = DeviceRecord::open(record_fd);
  const std::lock_guard<std::mutex> lock(account_mutex_);
  if (record_ && record_->same_as(*record)) return;
  record->carry_over(taken_);
  record_ = std::move(record);
}

int HostDriver::fileno() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return fd_;
}

DeviceId HostDriver::device() const { return {kDlCpu, 0}; }

MemInfo HostDriver::mem_get_info() {
  const std::lock_guard<std::mutex> lock(account_mutex_);
  check_process(op::kMemGetInfo);
  if (record_) {
    const uint64_t capacity = record_->capacity_bytes();
    return {capacity - std::min(capacity, record_->used_bytes()), capacity};
  }
  struct sysinfo info = {};
  if (sysinfo(&info) != 0) throw errno_error(op::kMemGetInfo, errno, "sysinfo");
  return {info.freeram * info.mem_unit, info.totalram * info.mem_unit};
}

void HostDriver::check_size(const char* operation, size_t size) const {
  if (size == 0 || size % granularity_ != 0) {
    throw errno_error(operation, EINVAL, bytes(size) + " is not a multiple of " + bytes(granularity_));
  }
}

void HostDriver::check_process(const char* operation) const {
  if (fd_ < 0)
    throw errno_error(operation, EBADF, "this driver belongs to the process that this one was forked from");
}

uintptr_t HostDriver::address_reserve(size_t size) {
  check_size(op::kAddressReserve, size);
  const std::lock_guard<std::mutex> lock(mutex_);
  check_process(op::kAddressReserve);
  if (size > SIZE_MAX - granularity_) throw errno_error(op::kAddressReserve, ENOMEM, bytes(size));
  void* start = reserve(0, size + granularity_);
  if (start == MAP_FAILED) throw errno_error(op::kAddressReserve, errno, bytes(size));
  const auto first = reinterpret_cast<uintptr_t>(start);
  const uintptr_t address = (first + granularity_ - 1) & ~(granularity_ - 1);
  if (address > first) munmap(start, address - first);
  munmap(reinterpret_cast<void*>(address + size), first + granularity_ - address);
  madvise(reinterpret_cast<void*>(address), size, MADV_DONTFORK);
  reservations_.emplace(address, size);
  return address;
}

void HostDriver::address_free(uintptr_t address, size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_process(op::kAddressFree);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != size) {
    throw errno_error(op::kAddressFree, EINVAL, range(address, size) + " is no reservation");
  }
  const auto mapping = mappings_.lower_bound(address);
  if (mapping != mappings_.end() && mapping->first < address + size) {
    throw errno_error(op::kAddressFree, EBUSY, range(address, size) + " still has mappings");
  }
  if (munmap(reinterpret_cast<void*>(address), size) != 0) {
    throw errno_error(op::kAddressFree, errno, range(address, size));
  }
  reservations_.erase(found);
}

void HostDriver::take(size_t size) {
  const std::lock_guard<std::mutex> lock(account_mutex_);
  try {
    if (record_ && !record_->take(size)) {
      const uint64_t capacity = record_->capacity_bytes();
      const uint64_t used = record_->used_bytes();
      throw errno_error(op::kMemCreate, ENOMEM,
                        bytes(size) + " do not fit: " + std::to_string(used) + " of the device's " +
                            bytes(capacity) + " are taken");
    }
  } catch (const std::system_error& error) {
    throw errno_error(op::kMemCreate, error.code().value(), error.what());
  }
  taken_ += size;
}

void HostDriver::give(size_t size) {
  const std::lock_guard<std::mutex> lock(account_mutex_);
  if (record_) record_->give(size);
  taken_ -= size;
}

Driver::Handle HostDriver::mem_create(size_t size) {
  check_size(op::kMemCreate, size);
  int64_t offset = 0;
  int fd = -1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_process(op::kMemCreate);
    fd = fd_;
  }
  take(size);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int64_t>& free = free_offsets_[size];
    if (free.empty()) {
      offset = end_;
      end_ += static_cast<int64_t>(size);
    } else {
      offset = free.back();
      free.pop_back();
    }
  }
  int result = 0;
  do {
    result = fallocate(fd, 0, offset, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    const int error = errno;
    punch({offset, size, 0, true});
    throw errno_error(op::kMemCreate, error, "fallocate of " + bytes(size));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const Handle handle = next_handle_++;
  memory_.emplace(handle, Memory{offset, size, 0, false});
  return handle;
}

// Gives the memory of a range of the file back, and makes the range ready to be taken again.
void HostDriver::punch(const Memory& memory) {
  const auto size = static_cast<off_t>(memory.size);
  if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory.offset, size) != 0) {
    throw errno_error(op::kMemRelease, errno, "punching " + bytes(memory.size) + " out of the memfd");
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_offsets_[memory.size].push_back(memory.offset);
  }
  give(memory.size);
}

// Punches released memory that nothing maps any more. When that fails, the handle stays, to be released
// again.
void HostDriver::let_go(Handle handle, const Memory& memory) {
  try {
    punch(memory);
  } catch (const DriverError&) {
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_.at(handle).released = false;
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  memory_.erase(handle);
}

void HostDriver::mem_release(Handle handle) {
  Memory memory = {};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_process(op::kMemRelease);
    const auto found = memory_.find(handle);
    if (found == memory_.end() || found->second.released) {
      throw errno_error(op::kMemRelease, EINVAL,
                        "handle " + std::to_string(handle) + " is unknown or released");
    }
    found->second.released = true;
    if (found->second.mappings > 0) return;
    memory = found->second;
  }
  let_go(handle, memory);
}

void HostDriver::write_fill(const Memory& memory) const {
  const std::vector<uint8_t> pattern(std::min<size_t>(memory.size, 1 << 20), *fill_);
  for (size_t done = 0; done < memory.size;) {
    const size_t count = std::min(pattern.size(), memory.size - done);
    const ssize_t written = pwrite(fd_, pattern.data(), count, memory.offset + static_cast<off_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw errno_error(op::kMemMap, errno, "filling " + bytes(memory.size));
    done += static_cast<size_t>(written);
  }
}

bool HostDriver::is_reserved(uintptr_t address, size_t size) const {
  auto reservation = reservations_.upper_bound(address);
  if (reservation == reservations_.begin()) return false;
  --reservation;
  const size_t offset = address - reservation->first;
  return offset < reservation->second && size <= reservation->second - offset;
}

void HostDriver::mem_map(uintptr_t address, size_t size, Handle handle) {
  check_size(op::kMemMap, size);
  // Held over the system calls: a fork in between would leave the child a mapping of this memory.
  const std::lock_guard<std::mutex> lock(mutex_);
  check_process(op::kMemMap);
  const auto found = memory_.find(handle);
  if (found == memory_.end() || found->second.released) {
    throw errno_error(op::kMemMap, EINVAL, "handle " + std::to_string(handle) + " is unknown or released");
  }
  Memory& memory = found->second;
  if (size != memory.size || address % granularity_ != 0) {
    throw errno_error(op::kMemMap, EINVAL, range(address, size) + " for a handle of " + bytes(memory.size));
  }
  if (!is_reserved(address, size)) {
    throw errno_error(op::kMemMap, EINVAL, range(address, size) + " is outside every reservation");
  }
  const auto next = mappings_.lower_bound(address);
  if ((next != mappings_.end() && next->first < address + size) ||
      (next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.size > address)) {
    throw errno_error(op::kMemMap, EEXIST, range(address, size) + " is mapped already");
  }
  if (fill_) write_fill(memory);
  void* where = reinterpret_cast<void*>(address);
  if (mmap(where, size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd_, memory.offset) == MAP_FAILED) {
    throw errno_error(op::kMemMap, errno, range(address, size));
  }
  if (madvise(where, size, MADV_DONTFORK) != 0) {
    const int error = errno;
    reserve(address, size);
    throw errno_error(op::kMemMap, error, "MADV_DONTFORK on " + range(address, size));
  }
  ++memory.mappings;
  mappings_.emplace(address, Mapping{size, handle});
}

std::pair<HostDriver::Mappings::iterator, HostDriver::Mappings::iterator> HostDriver::whole(
    const char* operation, uintptr_t address, size_t size) {
  const auto first = mappings_.find(address);
  auto last = first;
  uintptr_t reached = address;
  while (last != mappings_.end() && last->first == reached && reached < address + size) {
    reached += last->second.size;
    ++last;
  }
  if (size == 0 || reached != address + size) {
    throw errno_error(operation, EINVAL, range(address, size) + " does not consist of whole mappings");
  }
  return {first, last};
}

void HostDriver::mem_unmap(uintptr_t address, size_t size) {
  std::vector<std::pair<Handle, Memory>> idle;
  {
    // Held while the addresses change hands, so that nothing maps over them meanwhile.
    const std::lock_guard<std::mutex> lock(mutex_);
    check_process(op::kMemUnmap);
    const auto [first, last] = whole(op::kMemUnmap, address, size);
    if (reserve(address, size) == MAP_FAILED) throw errno_error(op::kMemUnmap, errno, range(address, size));
    madvise(reinterpret_cast<void*>(address), size, MADV_DONTFORK);
    for (auto mapping = first; mapping != last; ++mapping) {
      Memory& memory = memory_.at(mapping->second.handle);
      if (--memory.mappings == 0 && memory.released) idle.emplace_back(mapping->second.handle, memory);
    }
    mappings_.erase(first, last);
  }
  for (const auto& [handle, memory] : idle) let_go(handle, memory);
}

void HostDriver::mem_set_access(uintptr_t address, size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_process(op::kMemSetAccess);
  whole(op::kMemSetAccess, address, size);
  if (mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE) != 0) {
    throw errno_error(op::kMemSetAccess, errno, range(address, size));
  }
}

void HostDriver::before_fork() {
  account_mutex_.lock();
  mutex_.lock();
}

void HostDriver::after_fork_in_parent() {
  mutex_.unlock();
  account_mutex_.unlock();
}

void HostDriver::after_fork_in_child() {
  close(fd_);
  fd_ = -1;
  mutex_.unlock();
  account_mutex_.unlock();
}

}  // namespace kvquota
