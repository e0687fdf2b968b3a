// The quota segments: what the daemon wants of a leader (`desired`), and what the leader did (`observed`).
//
// Each is a sealed memfd of 4096 bytes holding one record under a sequence lock. Any payload is legal to
// read: the reader of `observed` must not trust a value in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace kvquota {

// A descriptor that is no quota segment.
class SegmentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Bits of `flags`.
constexpr int64_t kHasLimit = 1;  // `limit_bytes` counts
constexpr int64_t kHasCache = 2;  // `cache_bytes` counts (desired)
constexpr int64_t kPreempt = 4;   // running requests may be preempted (desired)

// The payloads are the wire format, word by word: append only, and raise kVersion when a word changes its
// meaning.
struct Desired {
  int64_t flags = 0;
  int64_t revision = 0;
  int64_t limit_bytes = 0;
  int64_t guarantee_bytes = 0;
  int64_t headroom_bytes = 0;
  int64_t cache_bytes = 0;
  int64_t reclaim_sequence = 0;
  int64_t reclaim_bytes = 0;
};

struct Observed {
  int64_t flags = 0;
  int64_t step = 0;
  int64_t pinned_pages = 0;
  int64_t evictable_pages = 0;
  int64_t warm_pages = 0;
  int64_t draining_pages = 0;
  int64_t revision_decided = 0;
  int64_t revision_applied = 0;
  int64_t decided_at_ns = 0;
  int64_t applied_at_ns = 0;
  int64_t status = 0;
  int64_t reason = 0;
  int64_t page_bytes = 0;
  int64_t capacity_pages = 0;
  int64_t floor_pages = 0;
  int64_t target_pages = 0;
  int64_t mapped_pages = 0;
  int64_t retiring_pages = 0;
  int64_t quarantined_pages = 0;
  int64_t credits = 0;
  int64_t limit_bytes = 0;
  int64_t pages_mapped = 0;
  int64_t pages_unmapped = 0;
  int64_t blocks_evicted = 0;
  int64_t passes = 0;
  int64_t refused = 0;
  int64_t blocked_ns = 0;
  int64_t requests_waiting = 0;
  int64_t requests_blocked = 0;
  int64_t ranks = 0;
  int64_t ranks_lost = 0;
};

// A segment as it lies in memory. Words that no payload uses are reserved and zero.
struct Segment {
  struct Header {
    uint64_t magic;
    uint32_t version;
    uint32_t size;
  };
  alignas(64) Header header;
  alignas(64) std::atomic<uint64_t> sequence;
  alignas(64) std::atomic<int64_t> words[496];
};
static_assert(sizeof(Segment) == 4096);
static_assert(sizeof(Desired) <= sizeof(Segment::words) && sizeof(Observed) <= sizeof(Segment::words));
static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(std::atomic<int64_t>) == 8);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "segments are little-endian");

// An owned memory mapping of a segment.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(Segment* segment) : segment_(segment) {}
  Mapping(Mapping&& other) noexcept : segment_(std::exchange(other.segment_, nullptr)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(segment_, other.segment_);
    return *this;
  }
  ~Mapping() { close(); }
  void close();
  // Throws std::invalid_argument once closed.
  Segment& operator*() const;

 private:
  Segment* segment_ = nullptr;
};

// An owned memfd.
class Memfd {
 public:
  explicit Memfd(int fd) : fd_(fd) {}
  Memfd(Memfd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Memfd& operator=(Memfd&&) = delete;
  ~Memfd() { close(); }
  void close();
  // Throws std::invalid_argument once closed.
  int get() const;

 private:
  int fd_;
};

// The daemon's end of `desired`. The one writable mapping there will ever be.
class DesiredWriter {
 public:
  DesiredWriter();
  void write(const Desired& desired);
  int fileno() const { return fd_.get(); }
  void close();

 private:
  Memfd fd_;
  Mapping mapping_;
};

// The leader's end of `desired`.
class DesiredReader {
 public:
  explicit DesiredReader(int fd);
  // Whether the segment moved since the last read. One relaxed load.
  bool changed() const { return (*mapping_).sequence.load(std::memory_order_relaxed) != seen_; }
  // The newest snapshot and true; or the last one and false, when the writer died or lies with the lock held.
  std::pair<Desired, bool> read();
  void close() { mapping_.close(); }

 private:
  Mapping mapping_;
  Desired snapshot_;
  uint64_t seen_ = ~uint64_t{0};
};

// The leader's end of `observed`.
class ObservedWriter {
 public:
  explicit ObservedWriter(int fd);
  // Writes everything, but `step` never goes back behind the steps pulsed so far.
  void write(const Observed& observed);
  // One engine step: counts it and writes the four usage fields, in pages.
  void pulse(int64_t pinned, int64_t evictable, int64_t warm, int64_t draining);
  void close() { mapping_.close(); }

 private:
  Mapping mapping_;
  int64_t step_ = 0;
};

// The daemon's end of `observed`.
class ObservedReader {
 public:
  ObservedReader();
  // As DesiredReader::read.
  std::pair<Observed, bool> read();
  int fileno() const { return fd_.get(); }
  void close();

 private:
  Memfd fd_;
  Mapping mapping_;
  Observed snapshot_;
  uint64_t seen_ = ~uint64_t{0};
};

}  // namespace kvquota
