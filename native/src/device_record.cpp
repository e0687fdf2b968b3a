#include "device_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace kvquota {
namespace {

constexpr char kMagic[8] = {'k', 'v', 'q', 'd', 'e', 'v', 'i', 'c'};
constexpr uint32_t kVersion = 1;
constexpr size_t kSize = 4096;
// Sums take microseconds: a holder that needs this long is stopped or broken.
constexpr std::chrono::milliseconds kLockTimeout{1000};
constexpr std::chrono::microseconds kLockRetry{50};

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

[[noreturn]] void refuse(const std::string& why) {
  throw std::invalid_argument("the descriptor is no device record: " + why);
}

// The first byte of the file is the lock of the sums, byte slot+1 that of a slot.
int set_lock(int fd, short type, off_t byte) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return fcntl(fd, F_OFD_SETLK, &lock);
}

}  // namespace

struct DeviceRecord::Layout {
  char magic[8];
  uint32_t version;
  uint32_t slots;
  uint64_t capacity;
  uint64_t reserved[5];
  std::atomic<uint64_t> used[kSlots];
};

std::unique_ptr<DeviceRecord> DeviceRecord::create(uint64_t capacity_bytes) {
  static_assert(sizeof(Layout) <= kSize && std::atomic<uint64_t>::is_always_lock_free);
  if (capacity_bytes == 0) throw std::invalid_argument("the capacity of a device must be above 0 bytes");
  const int fd = memfd_create("kvquota-device-record", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create for a device record");
  Layout layout = {};
  std::memcpy(layout.magic, kMagic, sizeof kMagic);
  layout.version = kVersion;
  layout.slots = kSlots;
  layout.capacity = capacity_bytes;
  if (ftruncate(fd, kSize) != 0 ||
      pwrite(fd, &layout, sizeof layout, 0) != static_cast<ssize_t>(sizeof layout) ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    ::close(fd);
    throw std::system_error(error, std::generic_category(), "writing a device record");
  }
  return std::unique_ptr<DeviceRecord>(new DeviceRecord(fd));
}

std::unique_ptr<DeviceRecord> DeviceRecord::open(int fd) {
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) refuse(std::to_string(fd) + ": " + std::strerror(errno));
  return std::unique_ptr<DeviceRecord>(new DeviceRecord(own));
}

DeviceRecord::DeviceRecord(int fd) : ForkAware(Order::kRecord), fd_(fd) {
  // Enlisted before it holds anything that a fork could carry off.
  enlist();
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_layout();
  } catch (...) {
    delist();
    close();
    throw;
  }
}

DeviceRecord::~DeviceRecord() {
  close();
  delist();
}

void DeviceRecord::open_layout() {
  const int seals = fcntl(fd_, F_GET_SEALS);
  struct stat status = {};
  if (seals < 0 || fstat(fd_, &status) != 0) refuse("it is not a memfd");
  if ((seals & F_SEAL_SHRINK) == 0) refuse("it can be truncated (F_SEAL_SHRINK is missing)");
  if (status.st_size != static_cast<off_t>(kSize)) {
    refuse("its size is " + std::to_string(status.st_size) + " bytes, not " + std::to_string(kSize));
  }
  lock_fd_ = ::open(("/proc/self/fd/" + std::to_string(fd_)).c_str(), O_RDWR | O_CLOEXEC);
  if (lock_fd_ < 0) fail("opening a device record by /proc/self/fd");
  void* address = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (address == MAP_FAILED) fail("mapping a device record");
  layout_ = static_cast<Layout*>(address);
  if (madvise(layout_, kSize, MADV_DONTFORK) != 0) fail("MADV_DONTFORK on a device record");
  if (std::memcmp(layout_->magic, kMagic, sizeof kMagic) != 0) refuse("wrong magic");
  if (layout_->version != kVersion || layout_->slots != kSlots) {
    refuse("version " + std::to_string(layout_->version) + ", expected " + std::to_string(kVersion));
  }
}

void DeviceRecord::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (layout_ != nullptr) {
    if (slot_) layout_->used[*slot_].store(0, std::memory_order_release);
    munmap(layout_, kSize);
    layout_ = nullptr;
  }
  close_descriptors();
}

void DeviceRecord::close_descriptors() {
  slot_.reset();
  if (lock_fd_ >= 0) ::close(lock_fd_);
  if (fd_ >= 0) ::close(fd_);
  lock_fd_ = fd_ = -1;
}

DeviceRecord::Layout& DeviceRecord::layout() const {
  if (layout_ == nullptr) throw std::invalid_argument("the device record is closed");
  return *layout_;
}

uint64_t DeviceRecord::capacity_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return layout().capacity;
}

uint64_t DeviceRecord::used_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sum(false);
}

int DeviceRecord::fileno() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  layout();
  return fd_;
}

bool DeviceRecord::same_as(const DeviceRecord& other) const {
  struct stat mine = {};
  struct stat theirs = {};
  if (fstat(fileno(), &mine) != 0 || fstat(other.fileno(), &theirs) != 0) fail("fstat of a device record");
  return mine.st_dev == theirs.st_dev && mine.st_ino == theirs.st_ino;
}

bool DeviceRecord::slot_is_live(unsigned slot) const {
  if (slot_ == slot) return true;
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(slot) + 1;
  lock.l_len = 1;
  if (fcntl(lock_fd_, F_OFD_GETLK, &lock) != 0) fail("looking at a lock of a device record");
  return lock.l_type != F_UNLCK;
}

// Saturates: what other processes wrote is not to be trusted.
uint64_t DeviceRecord::sum(bool settle) const {
  Layout& record = layout();
  uint64_t total = 0;
  for (unsigned slot = 0; slot < kSlots; ++slot) {
    const uint64_t used = record.used[slot].load(std::memory_order_acquire);
    if (used == 0) continue;
    if (slot_is_live(slot)) {
      total = used > UINT64_MAX - total ? UINT64_MAX : total + used;
    } else if (settle) {
      record.used[slot].store(0, std::memory_order_release);
    }
  }
  return total;
}

void DeviceRecord::lock_sums() {
  const auto deadline = std::chrono::steady_clock::now() + kLockTimeout;
  while (set_lock(lock_fd_, F_WRLCK, 0) != 0) {
    if (errno != EAGAIN && errno != EACCES && errno != EINTR) fail("locking a device record");
    if (std::chrono::steady_clock::now() >= deadline) {
      errno = ETIMEDOUT;
      fail("another process has held the lock of the device record for 1 s");
    }
    std::this_thread::sleep_for(kLockRetry);
  }
}

void DeviceRecord::unlock_sums() { set_lock(lock_fd_, F_UNLCK, 0); }

void DeviceRecord::claim_slot() {
  for (unsigned slot = 0; slot < kSlots; ++slot) {
    if (set_lock(lock_fd_, F_WRLCK, static_cast<off_t>(slot) + 1) != 0) continue;
    layout().used[slot].store(0, std::memory_order_release);
    slot_ = slot;
    return;
  }
  errno = EUSERS;
  fail("every slot of the device record is taken by a live process");
}

bool DeviceRecord::take_within(uint64_t bytes, uint64_t capacity) {
  lock_sums();
  try {
    if (!slot_) claim_slot();
    const uint64_t used = sum(true);
    const bool fits = used <= capacity && bytes <= capacity - used;
    if (fits) layout().used[*slot_].fetch_add(bytes, std::memory_order_acq_rel);
    unlock_sums();
    return fits;
  } catch (...) {
    unlock_sums();
    throw;
  }
}

bool DeviceRecord::take(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return take_within(bytes, layout().capacity);
}

void DeviceRecord::carry_over(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  layout();
  if (bytes > 0) take_within(bytes, UINT64_MAX);
}

void DeviceRecord::give(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (slot_) layout().used[*slot_].fetch_sub(bytes, std::memory_order_acq_rel);
}

void DeviceRecord::before_fork() { mutex_.lock(); }

void DeviceRecord::after_fork_in_parent() { mutex_.unlock(); }

void DeviceRecord::after_fork_in_child() {
  // The mapping was not inherited. Closing these ends nothing for the parent, whose descriptions live on.
  layout_ = nullptr;
  close_descriptors();
  mutex_.unlock();
}

}  // namespace kvquota
