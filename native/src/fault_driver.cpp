#include "fault_driver.h"

#include <stdexcept>
#include <utility>

namespace kvquota {

FaultDriver::FaultDriver(std::shared_ptr<Driver> inner) : inner_(std::move(inner)) {
  for (const char* operation :
       {op::kMemGetInfo, op::kAddressReserve, op::kAddressFree, op::kMemCreate, op::kMemRelease, op::kMemMap,
        op::kMemUnmap, op::kMemSetAccess, op::kEventRecord, op::kEventQuery, op::kEventSynchronize,
        op::kEventDestroy}) {
    operations_.emplace(operation, Operation{});
  }
}

const FaultDriver::Operation& FaultDriver::find(const std::string& operation) const {
  const auto found = operations_.find(operation);
  if (found == operations_.end()) {
    std::string names;
    for (const auto& [name, unused] : operations_) names += (names.empty() ? "" : ", ") + name;
    throw std::invalid_argument("operation '" + operation + "' is none of " + names);
  }
  return found->second;
}

void FaultDriver::fail(const std::string& operation, uint64_t nth, uint64_t times, int code,
                       const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t calls = find(operation).calls;
  if (nth == 0 || times == 0) throw std::invalid_argument("nth and times count from 1");
  operations_.at(operation).plans.push_back({calls + nth, calls + nth + times - 1, code, name});
}

uint64_t FaultDriver::calls(const std::string& operation) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return find(operation).calls;
}

void FaultDriver::count(const char* operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation& found = operations_.at(operation);
  ++found.calls;
  for (const Plan& plan : found.plans) {
    if (plan.first <= found.calls && found.calls <= plan.last) {
      throw DriverError(operation, plan.code, plan.name, "injected at call " + std::to_string(found.calls));
    }
  }
}

MemInfo FaultDriver::mem_get_info() {
  count(op::kMemGetInfo);
  return inner_->mem_get_info();
}

uintptr_t FaultDriver::address_reserve(size_t size) {
  count(op::kAddressReserve);
  return inner_->address_reserve(size);
}

void FaultDriver::address_free(uintptr_t address, size_t size) {
  count(op::kAddressFree);
  inner_->address_free(address, size);
}

Driver::Handle FaultDriver::mem_create(size_t size) {
  count(op::kMemCreate);
  return inner_->mem_create(size);
}

void FaultDriver::mem_release(Handle handle) {
  count(op::kMemRelease);
  inner_->mem_release(handle);
}

void FaultDriver::mem_map(uintptr_t address, size_t size, Handle handle) {
  count(op::kMemMap);
  inner_->mem_map(address, size, handle);
}

void FaultDriver::mem_unmap(uintptr_t address, size_t size) {
  count(op::kMemUnmap);
  inner_->mem_unmap(address, size);
}

void FaultDriver::mem_set_access(uintptr_t address, size_t size) {
  count(op::kMemSetAccess);
  inner_->mem_set_access(address, size);
}

Driver::Event FaultDriver::event_record() {
  count(op::kEventRecord);
  return inner_->event_record();
}

bool FaultDriver::event_query(Event event) {
  count(op::kEventQuery);
  return inner_->event_query(event);
}

void FaultDriver::event_synchronize(Event event) {
  count(op::kEventSynchronize);
  inner_->event_synchronize(event);
}

void FaultDriver::event_destroy(Event event) {
  count(op::kEventDestroy);
  inner_->event_destroy(event);
}

}  // namespace kvquota
