// The host's driver: granules of one memfd, mapped over PROT_NONE reservations. Real memory, really given
// back, and an unmapped page faults when touched, as on a GPU.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "device_record.h"
#include "driver.h"
#include "fork.h"

namespace kvquota {

class HostDriver final : public Driver, public ForkAware {
 public:
  // `fill`: written over memory when it is mapped.
  HostDriver(size_t granularity, std::optional<uint8_t> fill);
  ~HostDriver() override;

  // Takes memory against this record from here on, what is taken already included. `record_fd` stays the
  // caller's.
  void attach(int record_fd);
  // The memfd behind all granules.
  int fileno() const;

  DeviceId device() const override;
  size_t granularity() const override { return granularity_; }
  MemInfo mem_get_info() override;
  uintptr_t address_reserve(size_t size) override;
  void address_free(uintptr_t address, size_t size) override;
  Handle mem_create(size_t size) override;
  void mem_release(Handle handle) override;
  void mem_map(uintptr_t address, size_t size, Handle handle) override;
  void mem_unmap(uintptr_t address, size_t size) override;
  void mem_set_access(uintptr_t address, size_t size) override;
  // Work on the host is done when the call that submitted it returns: its fences are passed when they are
  // made.
  Event event_record() override { return 0; }
  bool event_query(Event) override { return true; }
  void event_synchronize(Event) override {}
  void event_destroy(Event) override {}

  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

 private:
  struct Memory {
    int64_t offset;
    size_t size;
    unsigned mappings;
    bool released;
  };
  struct Mapping {
    size_t size;
    Handle handle;
  };
  using Mappings = std::map<uintptr_t, Mapping>;

  void check_size(const char* operation, size_t size) const;
  void check_process(const char* operation) const;
  void take(size_t size);
  void give(size_t size);
  void punch(const Memory& memory);
  void write_fill(const Memory& memory) const;
  bool is_reserved(uintptr_t address, size_t size) const;
  void let_go(Handle handle, const Memory& memory);
  // The whole mappings that make up the range; throws when they do not.
  std::pair<Mappings::iterator, Mappings::iterator> whole(const char* operation, uintptr_t address,
                                                          size_t size);

  const size_t granularity_;
  const std::optional<uint8_t> fill_;

  // What was taken and from whom. Apart from the books of addresses, so that mapping never waits for another
  // process.
  mutable std::mutex account_mutex_;
  std::unique_ptr<DeviceRecord> record_;
  uint64_t taken_ = 0;

  mutable std::mutex mutex_;
  int fd_ = -1;
  int64_t end_ = 0;
  Handle next_handle_ = 1;
  std::map<size_t, std::vector<int64_t>> free_offsets_;
  std::unordered_map<Handle, Memory> memory_;
  std::map<uintptr_t, size_t> reservations_;
  Mappings mappings_;
};

}  // namespace kvquota
