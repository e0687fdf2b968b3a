// The native memory without Python, to be run under sanitizers: drivers, arena, tensors, segments.
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "arena.h"
#include "check.h"
#include "dlpack.h"
#include "fault_driver.h"
#include "host_driver.h"
#include "segment.h"

using namespace kvquota;
using namespace std::chrono_literals;

namespace {

constexpr size_t kGranule = 4096;
constexpr auto kTimeout = 60s;

uint64_t taken(const HostDriver& driver) {
  struct stat status = {};
  CHECK(fstat(driver.fileno(), &status) == 0);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

void wait_until(Arena& arena, const std::function<bool(const ArenaReport&)>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kTimeout;
  while (!condition(arena.report())) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::yield();
  }
}

// A host whose fences stay shut until they are opened.
class GateDriver final : public Driver {
 public:
  explicit GateDriver(std::shared_ptr<Driver> inner) : inner_(std::move(inner)) {}
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  DeviceId device() const override { return inner_->device(); }
  size_t granularity() const override { return inner_->granularity(); }
  MemInfo mem_get_info() override { return inner_->mem_get_info(); }
  uintptr_t address_reserve(size_t size) override { return inner_->address_reserve(size); }
  void address_free(uintptr_t address, size_t size) override { inner_->address_free(address, size); }
  Handle mem_create(size_t size) override { return inner_->mem_create(size); }
  void mem_release(Handle handle) override { inner_->mem_release(handle); }
  void mem_map(uintptr_t address, size_t size, Handle handle) override {
    inner_->mem_map(address, size, handle);
  }
  void mem_unmap(uintptr_t address, size_t size) override { inner_->mem_unmap(address, size); }
  void mem_set_access(uintptr_t address, size_t size) override { inner_->mem_set_access(address, size); }
  Event event_record() override {
    ++live_events;
    return 7;
  }
  bool event_query(Event) override { return open_; }
  void event_synchronize(Event event) override {
    CHECK(event == 7);
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [&] { return open_; });
  }
  void event_destroy(Event) override { --live_events; }

  std::atomic<int> live_events{0};

 private:
  const std::shared_ptr<Driver> inner_;
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

void pages_stay_mapped_behind_their_fence() {
  auto host = std::make_shared<HostDriver>(kGranule, 0xff);
  auto gate = std::make_shared<GateDriver>(host);
  Arena arena(gate, {kGranule, 2 * kGranule}, 8);
  arena.ask(3, 0);
  CHECK(arena.wait_credits(3, kTimeout) == 3);
  arena.apply(1, {0, 1, 2}, {});
  arena.apply(2, {}, {1});
  arena.apply(3, {}, {0, 2});
  // Credits wait behind the unmaps: memory that is to go, goes first.
  arena.ask(4, 0);
  auto* first = reinterpret_cast<char*>(arena.layout().base());
  std::memset(first, 1, 3 * kGranule);
  CHECK(arena.report().done == 1 && arena.report().unmapped == 0 && taken(*host) == 9 * kGranule);
  // close() waits for what is queued.
  std::thread opener([&] { gate->open(); });
  arena.close();
  opener.join();
  CHECK(taken(*host) == 0 && gate->live_events == 0);
}

// Two of three pages that are unmapped while two credits are pending become those.
void what_retires_becomes_what_is_pending() {
  auto host = std::make_shared<HostDriver>(kGranule, 0xff);
  auto gate = std::make_shared<GateDriver>(host);
  auto counting = std::make_shared<FaultDriver>(gate);
  Arena arena(counting, {kGranule, 2 * kGranule}, 8);
  arena.ask(3, 0);
  CHECK(arena.wait_credits(3, kTimeout) == 3);
  arena.apply(1, {0, 1, 2}, {});
  arena.apply(2, {}, {0, 1, 2});
  arena.ask(6, 1);
  gate->open();
  wait_until(arena, [](const ArenaReport& report) { return report.done == 2; });
  ArenaReport report = arena.report();
  CHECK(report.created == 6 && report.dropped == 1 && report.unmapped == 3);
  CHECK(counting->calls(op::kMemCreate) == 6 && counting->calls(op::kMemRelease) == 2);
  CHECK(report.held_bytes == 6 * kGranule && taken(*host) == 6 * kGranule);
  arena.apply(3, {4, 5}, {});
  std::memset(reinterpret_cast<char*>(arena.layout().base()) + 4 * kGranule, 1, 2 * kGranule);
  // With nothing pending it goes back to the driver, and so does what is dropped.
  arena.apply(4, {}, {4, 5});
  wait_until(arena, [](const ArenaReport& now) { return now.done == 4; });
  CHECK(arena.report().held_bytes == 0 && taken(*host) == 0);
}

void a_credit_from_a_page_ends_the_fault_of_one_that_was_not_created() {
  auto host = std::make_shared<HostDriver>(kGranule, 0xff);
  auto gate = std::make_shared<GateDriver>(host);
  auto faulty = std::make_shared<FaultDriver>(gate);
  Arena arena(faulty, {kGranule, 2 * kGranule}, 8);
  arena.ask(1, 0);
  CHECK(arena.wait_credits(1, kTimeout) == 1);
  arena.apply(1, {0}, {});
  faulty->fail(op::kMemCreate, 1, 3, 5, "EIO");
  arena.ask(2, 0);
  wait_until(arena, [](const ArenaReport& report) { return report.refused == 1; });
  CHECK(arena.report().faults.size() == 1);
  const uint64_t before = faulty->calls(op::kMemCreate);
  arena.apply(2, {}, {0});
  arena.ask(3, 0);
  gate->open();
  wait_until(arena, [](const ArenaReport& report) { return report.done == 2; });
  CHECK(arena.report().created == 2 && faulty->calls(op::kMemCreate) == before);
  CHECK(arena.report().faults.empty());
}

void memory_of_a_page_that_failed_goes_back() {
  auto host = std::make_shared<HostDriver>(kGranule, 0xff);
  auto gate = std::make_shared<GateDriver>(host);
  auto faulty = std::make_shared<FaultDriver>(gate);
  Arena arena(faulty, {kGranule, 2 * kGranule}, 8);
  arena.ask(1, 0);
  CHECK(arena.wait_credits(1, kTimeout) == 1);
  faulty->fail(op::kMemMap, 2, 3, 5, "EIO");
  bool failed = false;
  try {
    arena.apply(1, {0}, {});
  } catch (const DriverError&) {
    failed = true;
  }
  arena.apply(2, {}, {0});
  arena.ask(2, 0);
  gate->open();
  wait_until(arena, [](const ArenaReport& report) { return report.done == 2 && report.created == 2; });
  CHECK(failed && arena.report().unmapped == 1 && arena.report().faults.empty());
  CHECK(faulty->calls(op::kMemCreate) == 4 && faulty->calls(op::kMemRelease) == 2);
}

// Returns how often `operation` was called when nothing was to fail, which is nth 0.
uint64_t recycle_while_a_call_fails(const char* operation, uint64_t nth, uint64_t times) {
  auto host = std::make_shared<HostDriver>(kGranule, 0xff);
  auto gate = std::make_shared<GateDriver>(host);
  auto faulty = std::make_shared<FaultDriver>(gate);
  Arena arena(faulty, {kGranule, 2 * kGranule}, 8);
  arena.ask(3, 0);
  CHECK(arena.wait_credits(3, kTimeout) == 3);
  arena.apply(1, {0, 1, 3}, {});
  const uint64_t before = faulty->calls(operation);
  if (nth > 0) faulty->fail(operation, nth, times, 5, "EIO");
  arena.apply(2, {}, {0, 1, 3});
  arena.ask(5, 0);
  gate->open();
  wait_until(arena, [](const ArenaReport& report) {
    return report.done == 2 && report.created + report.refused == 5;
  });
  const ArenaReport report = arena.report();
  const uint64_t page_bytes = 3 * kGranule;
  CHECK(report.held_bytes == (report.created - report.unmapped + report.quarantined_credits) * page_bytes);
  CHECK(taken(*host) <= report.held_bytes && (!report.faults.empty() || taken(*host) == report.held_bytes));
  // What did not go is nobody's credit: its addresses are whole, or its memory is with no other page.
  std::vector<uint64_t> maps;
  for (uint64_t page = 4; page < 4 + report.created - report.mapped; ++page) maps.push_back(page);
  try {
    arena.apply(3, maps, {});
    CHECK(arena.report().mapped == 3 + maps.size());
  } catch (const DriverError& error) {
    CHECK(error.name == "EIO");
  }
  for (int attempt = 1;; ++attempt) {
    try {
      arena.close();
      break;
    } catch (const DriverError&) {
      CHECK(attempt < 4);
    }
  }
  // An event that can't be destroyed is lost, and told.
  CHECK(taken(*host) == 0 && (gate->live_events == 0 || std::string(operation) == op::kEventDestroy));
  CHECK(faulty->calls(operation) - before >= nth);
  return faulty->calls(operation) - before;
}

void recycling_is_exact_whatever_fails_wherever() {
  for (const char* operation : {op::kMemCreate, op::kMemRelease, op::kMemMap, op::kMemUnmap, op::kMemSetAccess,
                                op::kEventRecord, op::kEventSynchronize, op::kEventDestroy}) {
    const uint64_t calls = recycle_while_a_call_fails(operation, 0, 0);
    for (uint64_t nth = 1; nth <= calls; ++nth) {
      for (const uint64_t times : {1, 3, 6}) recycle_while_a_call_fails(operation, nth, times);
    }
  }
}

// Random commands, some of which fail: the books must agree with the memory that is really taken.
void books_are_exact_whatever_fails(unsigned seed) {
  std::mt19937 random(seed);
  auto host = std::make_shared<HostDriver>(kGranule, 0xff);
  const auto record = DeviceRecord::create(64 * 3 * kGranule);
  host->attach(record->fileno());
  auto faulty = std::make_shared<FaultDriver>(host);
  Arena arena(faulty, {kGranule, 2 * kGranule}, 96);
  const char* operations[] = {op::kMemCreate,    op::kMemRelease,  op::kMemMap,          op::kMemUnmap,
                              op::kMemSetAccess, op::kEventRecord, op::kEventSynchronize};
  enum State { kOut, kIn, kLeaving };
  std::vector<State> states(96, kOut);
  uint64_t asked = 0;
  uint64_t dropped = 0;
  uint64_t seq = 0;
  unsigned failed = 0;
  for (int turn = 0; turn < 400; ++turn) {
    if (random() % 8 == 0)
      faulty->fail(operations[random() % 7], 1 + random() % 4, 1 + random() % 4, 5, "EIO");
    asked += random() % 6;
    arena.wait_credits(asked, kTimeout);
    const ArenaReport before = arena.report();
    uint64_t held = before.created - before.mapped - before.dropped;
    std::vector<uint64_t> maps;
    std::vector<uint64_t> unmaps;
    for (uint64_t page = 0; page < states.size(); ++page) {
      if (states[page] == kOut && held > 0 && random() % 8 == 0) {
        maps.push_back(page);
        --held;
      } else if (states[page] == kIn && random() % 6 == 0) {
        unmaps.push_back(page);
      }
    }
    try {
      arena.apply(++seq, maps, unmaps);
    } catch (const DriverError&) {
      ++failed;
    }
    // What is unmapped meanwhile may become these.
    arena.ask(asked += random() % 4, dropped);
    for (const uint64_t page : maps) states[page] = kIn;
    for (const uint64_t page : unmaps) states[page] = kLeaving;
    wait_until(arena, [&](const ArenaReport& report) { return report.done == seq; });
    // What has left, and has no fault, is gone; what has one may go later.
    std::set<int64_t> faulted;
    for (const Fault& fault : arena.report().faults) faulted.insert(fault.page);
    for (uint64_t page = 0; page < states.size(); ++page) {
      if (states[page] == kLeaving && faulted.count(static_cast<int64_t>(page)) == 0) states[page] = kOut;
    }
    if (held > 0 && random() % 3 == 0) dropped += random() % (held + 1);
    arena.ask(asked, dropped);
    wait_until(arena, [&](const ArenaReport& report) {
      return report.dropped == dropped && report.created + report.refused == asked;
    });
    CHECK(arena.report().held_bytes >= taken(*host));
    // What did not go may go at any time.
    wait_until(arena, [&](const ArenaReport&) { return record->used_bytes() == taken(*host); });
  }
  CHECK(arena.report().mapped > 0 && arena.report().unmapped > 0 && failed > 0);
  try {
    arena.close();
  } catch (const DriverError&) {
    // A fault was left over for it.
    return;
  }
  CHECK(taken(*host) == 0 && record->used_bytes() == 0);
}

void any_thread_may_ask_and_look() {
  auto host = std::make_shared<HostDriver>(kGranule, std::nullopt);
  auto arena = std::make_shared<Arena>(host, std::vector<uint64_t>{kGranule, kGranule}, 64);
  std::atomic<bool> over{false};
  std::thread looker([&] {
    while (!over) {
      const ArenaReport report = arena->report();
      CHECK(report.created >= report.mapped + report.dropped && report.held_bytes <= 64 * 2 * kGranule);
      arena->wait_credits(report.created + 1, 1ms);
    }
  });
  std::thread viewer([&] {
    while (!over) {
      DLManagedTensor* tensor = make_tensor(arena, 0, {2, 3}, {0, 8, 1}, std::nullopt);
      CHECK(tensor->dl_tensor.shape[1] == 3 && tensor->dl_tensor.strides[0] == 3);
      tensor->deleter(tensor);
    }
  });
  for (uint64_t turn = 1; turn <= 200; ++turn) {
    // Four credits: two to map, two to drop.
    arena->ask(4 * turn, 2 * (turn - 1));
    CHECK(arena->wait_credits(4 * turn, kTimeout) == 4 * turn);
    const uint64_t page = 2 * (turn % 8);
    arena->apply(2 * turn - 1, {page, page + 1}, {});
    std::memset(reinterpret_cast<void*>(arena->layout().base() + page * kGranule), 1, 2 * kGranule);
    arena->ask(4 * turn, 2 * turn);
    arena->apply(2 * turn, {}, {page, page + 1});
    wait_until(*arena, [&](const ArenaReport& report) { return report.done == 2 * turn; });
  }
  over = true;
  looker.join();
  viewer.join();
}

void snapshots_are_of_one_instant() {
  DesiredWriter writer;
  DesiredReader reader(writer.fileno());
  ObservedReader observer;
  ObservedWriter leader(observer.fileno());
  std::thread writing([&] {
    for (int64_t value = 1; value <= 20000; ++value) {
      Desired desired;
      desired.revision = desired.limit_bytes = desired.guarantee_bytes = value;
      writer.write(desired);
      leader.pulse(value, value, value, value);
    }
  });
  int64_t newest = 0;
  while (newest < 20000) {
    const auto [desired, whole] = reader.read();
    CHECK(desired.revision == desired.limit_bytes && desired.revision == desired.guarantee_bytes);
    CHECK(desired.revision >= newest);
    newest = desired.revision;
    const auto [observed, complete] = observer.read();
    CHECK(observed.pinned_pages == observed.warm_pages && observed.pinned_pages == observed.step);
  }
  writing.join();
}

void a_tensor_outlives_its_arena() {
  auto host = std::make_shared<HostDriver>(kGranule, 0xff);
  auto arena = std::make_shared<Arena>(host, std::vector<uint64_t>{kGranule}, 4);
  arena->ask(1, 0);
  CHECK(arena->wait_credits(1, kTimeout) == 1);
  arena->apply(1, {0}, {});
  DLManagedTensor* tensor = make_tensor(arena, 0, {kGranule}, {1, 8, 1}, std::nullopt);
  arena.reset();
  CHECK(static_cast<uint8_t*>(tensor->dl_tensor.data)[kGranule - 1] == 0xff);
  std::thread([&] { tensor->deleter(tensor); }).join();
  CHECK(taken(*host) == 0);
}

}  // namespace

int main() {
  pages_stay_mapped_behind_their_fence();
  what_retires_becomes_what_is_pending();
  a_credit_from_a_page_ends_the_fault_of_one_that_was_not_created();
  memory_of_a_page_that_failed_goes_back();
  recycling_is_exact_whatever_fails_wherever();
  for (unsigned seed = 1; seed <= 3; ++seed) books_are_exact_whatever_fails(seed);
  any_thread_may_ask_and_look();
  snapshots_are_of_one_instant();
  a_tensor_outlives_its_arena();
  std::puts("passed");
}
