#include "segment.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <system_error>
#include <type_traits>

namespace kvquota {
namespace {

constexpr uint64_t kDesiredMagic = 0x3144515643564b51;   // "QKVCVQD1"
constexpr uint64_t kObservedMagic = 0x314f515643564b51;  // "QKVCVQO1"
constexpr uint32_t kVersion = 1;
constexpr uint32_t kSize = sizeof(Segment);
constexpr int kTries = 8;
constexpr int kDesiredSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
constexpr int kObservedSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

Segment* map(int fd, int protection) {
  void* address = mmap(nullptr, kSize, protection, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) throw_errno("mmap of a quota segment");
  return static_cast<Segment*>(address);
}

// Makes the memfd with its header; a write() rather than a mapping, since `observed` is never mapped writable
// here.
Memfd create(const char* name, uint64_t magic) {
  const int made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made < 0) throw_errno("memfd_create");
  Memfd fd(made);
  if (ftruncate(fd.get(), kSize) != 0) throw_errno("ftruncate of a quota segment");
  const Segment::Header header = {magic, kVersion, kSize};
  if (pwrite(fd.get(), &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header)) {
    throw_errno("write to a quota segment");
  }
  return fd;
}

void seal(int fd, int seals) {
  if (fcntl(fd, F_ADD_SEALS, seals) != 0) throw_errno("fcntl(F_ADD_SEALS) on a quota segment");
}

// Checks the seals before anything else: without them the size, and so every load, is at the other side's
// mercy.
Mapping open(int fd, const char* name, uint64_t magic, int seals, int protection) {
  const std::string subject =
      std::string("descriptor ") + std::to_string(fd) + " is no " + name + " segment: ";
  const int found = fcntl(fd, F_GET_SEALS);
  if (found < 0)
    throw SegmentError(subject + "it has no seals (" + std::strerror(errno) + "), expected a memfd");
  if ((found & seals) != seals) {
    throw SegmentError(subject + "its seals are " + std::to_string(found) + ", expected " +
                       std::to_string(seals));
  }
  if ((protection & PROT_WRITE) != 0 && (found & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    throw SegmentError(subject + "it is sealed against writing (seals " + std::to_string(found) + ")");
  }
  struct stat status = {};
  if (fstat(fd, &status) != 0) throw_errno("fstat of a quota segment");
  if (status.st_size != kSize) {
    throw SegmentError(subject + "its size is " + std::to_string(status.st_size) + ", expected " +
                       std::to_string(kSize));
  }
  Mapping mapping(map(fd, protection));
  const Segment::Header header = (*mapping).header;
  if (header.magic != magic) {
    throw SegmentError(subject + "its magic is " + std::to_string(header.magic) + ", expected " +
                       std::to_string(magic));
  }
  if (header.version != kVersion || header.size != kSize) {
    throw SegmentError(subject + "its version is " + std::to_string(header.version) +
                       " and its declared size " + std::to_string(header.size) + ", expected " +
                       std::to_string(kVersion) + " and " + std::to_string(kSize) +
                       ": run the same kvquota on both sides");
  }
  return mapping;
}

// The sequence lock needs no fence: each payload word is stored with release after the odd sequence and
// loaded with acquire, so a reader that sees any new word also sees the sequence that announced it.
// (ThreadSanitizer does not know fences, and a plain store costs the same on x86.)
template <typename Write>
void locked(Segment& segment, Write write) {
  const uint64_t odd = segment.sequence.load(std::memory_order_relaxed) | 1;
  segment.sequence.store(odd, std::memory_order_relaxed);
  write(segment.words);
  segment.sequence.store(odd + 1, std::memory_order_release);
}

static_assert(std::is_trivially_copyable_v<Desired> && std::is_trivially_copyable_v<Observed>);

template <typename Payload>
constexpr std::size_t kWords = sizeof(Payload) / sizeof(int64_t);

template <typename Payload>
void store(Segment& segment, const Payload& payload) {
  std::array<int64_t, kWords<Payload>> words;
  std::memcpy(words.data(), &payload, sizeof payload);
  locked(segment, [&](std::atomic<int64_t>* out) {
    for (std::size_t i = 0; i < words.size(); ++i) out[i].store(words[i], std::memory_order_release);
  });
}

// A writer that lost the CPU in a write must get it to end it. All pauses of a read take 0.13 ms, and a timer's
// slack for each.
void pause(int tried) {
  if (tried == 1) {
    sched_yield();
    return;
  }
  const timespec time = {0, 1000L << (tried - 1)};
  nanosleep(&time, nullptr);
}

template <typename Payload>
bool load(const Segment& segment, Payload& payload, uint64_t& seen) {
  std::array<int64_t, kWords<Payload>> words;
  for (int tried = 0; tried < kTries; ++tried) {
    if (tried > 0) pause(tried);
    // `seen` stays at the last sequence tried: where that was torn the segment has moved on, so `changed`
    // stays true.
    seen = segment.sequence.load(std::memory_order_acquire);
    if ((seen & 1) != 0) continue;
    for (std::size_t w = 0; w < words.size(); ++w)
      words[w] = segment.words[w].load(std::memory_order_acquire);
    if (segment.sequence.load(std::memory_order_relaxed) != seen) continue;
    std::memcpy(static_cast<void*>(&payload), words.data(), sizeof payload);
    return true;
  }
  return false;
}

}  // namespace

void Mapping::close() {
  if (segment_ != nullptr) munmap(segment_, kSize);
  segment_ = nullptr;
}

Segment& Mapping::operator*() const {
  if (segment_ == nullptr) throw std::invalid_argument("this quota segment is closed");
  return *segment_;
}

void Memfd::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

int Memfd::get() const {
  if (fd_ < 0) throw std::invalid_argument("this quota segment is closed");
  return fd_;
}

DesiredWriter::DesiredWriter() : fd_(create("kvquota-desired", kDesiredMagic)) {
  mapping_ = Mapping(map(fd_.get(), PROT_READ | PROT_WRITE));
  seal(fd_.get(), kDesiredSeals);
}

void DesiredWriter::write(const Desired& desired) { store(*mapping_, desired); }

void DesiredWriter::close() {
  mapping_.close();
  fd_.close();
}

DesiredReader::DesiredReader(int fd)
    : mapping_(open(fd, "desired", kDesiredMagic, kDesiredSeals, PROT_READ)) {}

std::pair<Desired, bool> DesiredReader::read() {
  const bool fresh = load(*mapping_, snapshot_, seen_);
  return {snapshot_, fresh};
}

ObservedWriter::ObservedWriter(int fd)
    : mapping_(open(fd, "observed", kObservedMagic, kObservedSeals, PROT_READ | PROT_WRITE)) {}

void ObservedWriter::write(const Observed& observed) {
  step_ = std::max(step_, observed.step);
  Observed payload = observed;
  payload.step = step_;
  store(*mapping_, payload);
}

void ObservedWriter::pulse(int64_t pinned, int64_t evictable, int64_t warm, int64_t draining) {
  const std::array<int64_t, 5> values = {++step_, pinned, evictable, warm, draining};
  static_assert(offsetof(Observed, step) == 8 && offsetof(Observed, pinned_pages) == 16 &&
                offsetof(Observed, evictable_pages) == 24 && offsetof(Observed, warm_pages) == 32 &&
                offsetof(Observed, draining_pages) == 40);
  locked(*mapping_, [&](std::atomic<int64_t>* out) {
    for (std::size_t i = 0; i < values.size(); ++i) out[1 + i].store(values[i], std::memory_order_release);
  });
}

ObservedReader::ObservedReader() : fd_(create("kvquota-observed", kObservedMagic)) {
  mapping_ = Mapping(map(fd_.get(), PROT_READ));
  seal(fd_.get(), kObservedSeals);
}

std::pair<Observed, bool> ObservedReader::read() {
  const bool fresh = load(*mapping_, snapshot_, seen_);
  return {snapshot_, fresh};
}

void ObservedReader::close() {
  mapping_.close();
  fd_.close();
}

}  // namespace kvquota
