// A driver for tests: passes calls on, counts them, and fails those it was told to.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace kvquota {

class FaultDriver final : public Driver {
 public:
  explicit FaultDriver(std::shared_ptr<Driver> inner);

  // Fails `times` calls of `operation`, from the `nth` one after now.
  void fail(const std::string& operation, uint64_t nth, uint64_t times, int code, const std::string& name);
  // Calls so far, failed ones included.
  uint64_t calls(const std::string& operation) const;

  DeviceId device() const override { return inner_->device(); }
  size_t granularity() const override { return inner_->granularity(); }
  MemInfo mem_get_info() override;
  uintptr_t address_reserve(size_t size) override;
  void address_free(uintptr_t address, size_t size) override;
  Handle mem_create(size_t size) override;
  void mem_release(Handle handle) override;
  void mem_map(uintptr_t address, size_t size, Handle handle) override;
  void mem_unmap(uintptr_t address, size_t size) override;
  void mem_set_access(uintptr_t address, size_t size) override;
  Event event_record() override;
  bool event_query(Event event) override;
  void event_synchronize(Event event) override;
  void event_destroy(Event event) override;

 private:
  struct Plan {
    uint64_t first;
    uint64_t last;
    int code;
    std::string name;
  };
  struct Operation {
    uint64_t calls = 0;
    std::vector<Plan> plans;
  };

  // Throws std::invalid_argument when there is no such operation.
  const Operation& find(const std::string& operation) const;
  void count(const char* operation);

  const std::shared_ptr<Driver> inner_;
  mutable std::mutex mutex_;
  std::map<std::string, Operation> operations_;
};

}  // namespace kvquota
