// The capacity of a host device and what each process takes of it, in a memfd that those processes share.
//
// Each taker owns one slot, and holds a lock on one byte of the file for as long as it lives. The kernel
// drops that lock when it dies, so what a dead process took is settled by whoever looks next: no daemon needs
// to run.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "fork.h"

namespace kvquota {

class DeviceRecord final : public ForkAware {
 public:
  static std::unique_ptr<DeviceRecord> create(uint64_t capacity_bytes);
  // `fd` stays the caller's. Throws std::invalid_argument when it is no device record.
  static std::unique_ptr<DeviceRecord> open(int fd);
  ~DeviceRecord() override;

  uint64_t capacity_bytes() const;
  // What all live processes took.
  uint64_t used_bytes() const;
  // False, and nothing taken, when less than `bytes` is free. Throws std::system_error when the record can't
  // be used.
  bool take(uint64_t bytes);
  // Takes what is in use already, whatever the capacity.
  void carry_over(uint64_t bytes);
  void give(uint64_t bytes);
  // The descriptor to pass to other processes.
  int fileno() const;
  bool same_as(const DeviceRecord& other) const;
  // What this object took counts as free from here on. May be called twice.
  void close();

  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

 private:
  static constexpr unsigned kSlots = 256;
  struct Layout;

  // Takes over `fd`.
  explicit DeviceRecord(int fd);
  void open_layout();
  void close_descriptors();
  Layout& layout() const;
  void lock_sums();
  void unlock_sums();
  void claim_slot();
  bool slot_is_live(unsigned slot) const;
  uint64_t sum(bool settle) const;
  bool take_within(uint64_t bytes, uint64_t capacity);

  mutable std::mutex mutex_;
  int fd_ = -1;
  // A file description of our own: locks belong to it, so they neither pass to whoever gets `fd_`, nor end
  // when another descriptor of the same record is closed in this process.
  int lock_fd_ = -1;
  Layout* layout_ = nullptr;
  std::optional<unsigned> slot_;
};

}  // namespace kvquota
