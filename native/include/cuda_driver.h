// The driver table over CUDA's virtual memory: one device, one primary context.
//
// Every call makes the context current on its thread, and leaves the thread as it found it. Nothing here waits
// for the device: fences are events on one stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "cuda_abi.h"
#include "driver.h"
#include "fork.h"

namespace kvquota {

class CudaDriver final : public Driver, public ForkAware {
 public:
  // Takes over one reference to the device's primary context, which `context` is, and drops it at the end.
  CudaDriver(const cuda::Functions& functions, cuda::Device device, cuda::Context context,
             size_t granularity);
  // What can't be given back is told on stderr.
  ~CudaDriver() override;

  // The stream whose work may touch pages. 0 is CUDA's legacy default stream.
  void set_stream(uint64_t stream) { stream_ = stream; }
  uint64_t stream() const { return stream_; }

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
  // Behind the work submitted so far to the stream, by whatever thread.
  Event event_record() override;
  bool event_query(Event event) override;
  void event_synchronize(Event event) override;
  // Keeps the event for the next fence: CUDA's are destroyed with the driver.
  void event_destroy(Event event) override;

  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

 private:
  template <typename Call>
  cuda::Result in_context(Call call);
  // Throws unless `result` is success; `detail` makes the message's end.
  template <typename Detail>
  void check(const char* operation, cuda::Result result, Detail detail) const;
  std::string name_of(cuda::Result result) const;
  cuda::Event spare_event();
  // Calls up to three times.
  template <typename Call>
  void end(const char* name, Call call) const;

  const cuda::Functions cuda_;
  const cuda::Device device_;
  const cuda::Context context_;
  const size_t granularity_;
  std::atomic<uint64_t> stream_{0};
  bool forked_ = false;

  std::mutex mutex_;
  // Those handed out, and those to be handed out again.
  std::unordered_set<cuda::Event> events_;
  std::vector<cuda::Event> spare_events_;
};

}  // namespace kvquota
