// The driver table: the few entry points of a device's virtual-memory interface that the arena stands on.
//
// Sizes are bytes and multiples of the granularity. Every call may throw DriverError and nothing else, and
// may be made from any thread. No call needs the Python interpreter's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace kvquota {

// The names of the table's entry points, as errors and FaultDriver spell them.
namespace op {
constexpr const char* kMemGetInfo = "mem_get_info";
constexpr const char* kAddressReserve = "address_reserve";
constexpr const char* kAddressFree = "address_free";
constexpr const char* kMemCreate = "mem_create";
constexpr const char* kMemRelease = "mem_release";
constexpr const char* kMemMap = "mem_map";
constexpr const char* kMemUnmap = "mem_unmap";
constexpr const char* kMemSetAccess = "mem_set_access";
constexpr const char* kEventRecord = "event_record";
constexpr const char* kEventQuery = "event_query";
constexpr const char* kEventSynchronize = "event_synchronize";
constexpr const char* kEventDestroy = "event_destroy";
}  // namespace op

class DriverError : public std::runtime_error {
 public:
  // `code` and `name` are the driver's own (errno's on the host); `detail` says what was asked for, or why
  // not.
  DriverError(std::string operation, int code, std::string name, std::string detail);

  // The same error, told about `page`.
  DriverError at(uint64_t page) const;

  bool out_of_memory() const { return out_of_memory_; }

  std::string operation;
  int code;
  std::string name;
  std::string detail;
  std::optional<uint64_t> page;

 private:
  DriverError(const DriverError& error, uint64_t page);

  bool out_of_memory_;
};

// A DriverError of the host: `code` is an errno.
DriverError errno_error(const char* operation, int code, std::string detail);

struct MemInfo {
  size_t free;
  size_t total;
};

// Where tensors over this memory live, in DLPack's numbers.
struct DeviceId {
  int32_t type;
  int32_t index;
};

class Driver {
 public:
  using Handle = uint64_t;
  using Event = uint64_t;

  virtual ~Driver() = default;

  virtual DeviceId device() const = 0;
  virtual size_t granularity() const = 0;
  virtual MemInfo mem_get_info() = 0;
  // Addresses with nothing behind them, aligned to the granularity.
  virtual uintptr_t address_reserve(size_t size) = 0;
  virtual void address_free(uintptr_t address, size_t size) = 0;
  // Takes physical memory: the only call that may run out of it.
  virtual Handle mem_create(size_t size) = 0;
  // The memory goes back once nothing maps it.
  virtual void mem_release(Handle handle) = 0;
  // Maps all of `handle`; not accessible before mem_set_access.
  virtual void mem_map(uintptr_t address, size_t size, Handle handle) = 0;
  // The range must consist of whole mappings.
  virtual void mem_unmap(uintptr_t address, size_t size) = 0;
  virtual void mem_set_access(uintptr_t address, size_t size) = 0;
  // A fence behind the work that the calling thread submitted so far.
  virtual Event event_record() = 0;
  virtual bool event_query(Event event) = 0;
  virtual void event_synchronize(Event event) = 0;
  virtual void event_destroy(Event event) = 0;
};

}  // namespace kvquota
