// CudaDriver and an arena over it, on the stand-in, without Python: to be run under sanitizers.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "arena.h"
#include "check.h"
#include "cuda_driver.h"

using namespace kvquota;
using namespace std::chrono_literals;

// The stand-in, which is compiled in: see tests/fakecuda.
struct FakecudaLive {
  uint64_t contexts, streams, events, works, reservations, mappings, handles, bytes;
};
extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(cuda::Context*, int);
int cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);
bool fakecuda_fail(const char*, uint64_t nth, uint64_t times, int code);
void fakecuda_live(FakecudaLive*);
void fakecuda_set_data(bool);
}

namespace {

constexpr size_t kGranule = 2 << 20;
constexpr auto kTimeout = 60s;
constexpr uint64_t kPages = 64;

FakecudaLive live() {
  FakecudaLive found = {};
  fakecuda_live(&found);
  return found;
}

std::shared_ptr<CudaDriver> open_driver() {
  std::map<std::string, uintptr_t> addresses;
  for (const char* name :
       {"cuGetErrorName", "cuDevicePrimaryCtxRelease", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemGetInfo",
        "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap",
        "cuMemSetAccess", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize",
        "cuEventDestroy"}) {
    void* function = nullptr;
    CHECK(cuGetProcAddress_v2(name, &function, 12000, 0, nullptr) == 0);
    addresses[name] = reinterpret_cast<uintptr_t>(function);
  }
  cuda::Context context = nullptr;
  CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0);
  return std::make_shared<CudaDriver>(cuda::Functions(addresses), 0, context, kGranule);
}

void wait_until(Arena& arena, const std::function<bool(const ArenaReport&)>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kTimeout;
  while (!condition(arena.report())) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::yield();
  }
}

// Pages come and go, calls fail, and other threads use the driver meanwhile.
void books_are_exact_whatever_fails(unsigned seed) {
  std::mt19937 random(seed);
  const auto driver = open_driver();
  auto arena = std::make_unique<Arena>(driver, std::vector<uint64_t>{kGranule, 2 * kGranule}, kPages);
  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over) {
      try {
        const Driver::Event event = driver->event_record();
        driver->event_query(event);
        driver->event_destroy(event);
        CHECK(driver->mem_get_info().free <= driver->mem_get_info().total);
      } catch (const DriverError&) {
        // What was to fail elsewhere failed here.
      }
    }
  });
  const char* names[] = {"cuMemCreate",    "cuMemRelease",  "cuMemMap",        "cuMemUnmap",
                         "cuMemSetAccess", "cuEventRecord", "cuCtxSetCurrent", "cuEventSynchronize"};
  enum State { kOut, kIn, kLeaving };
  std::vector<State> states(kPages, kOut);
  uint64_t seq = 0;
  for (int turn = 0; turn < 200; ++turn) {
    if (random() % 4 == 0) CHECK(fakecuda_fail(names[random() % 8], 1 + random() % 4, 1 + random() % 4, 999));
    const ArenaReport before = arena->report();
    const uint64_t asked = before.created + before.refused + random() % 4;
    arena->ask(asked, before.dropped);
    wait_until(*arena, [&](const ArenaReport& report) { return report.created + report.refused == asked; });
    const ArenaReport now = arena->report();
    uint64_t held = now.created - now.mapped - now.dropped;
    std::vector<uint64_t> maps;
    std::vector<uint64_t> unmaps;
    for (uint64_t page = 0; page < kPages; ++page) {
      if (states[page] == kOut && held > 0 && random() % 8 == 0) {
        maps.push_back(page);
        states[page] = kIn;
        --held;
      } else if (states[page] == kIn && random() % 4 == 0) {
        unmaps.push_back(page);
        states[page] = kLeaving;
      }
    }
    try {
      arena->apply(++seq, maps, unmaps);
    } catch (const DriverError& error) {
      CHECK(error.name == "CUDA_ERROR_UNKNOWN");
    }
    // What is unmapped meanwhile may become these.
    const uint64_t more = asked + random() % 4;
    arena->ask(more, before.dropped);
    wait_until(*arena, [&](const ArenaReport& report) { return report.done == seq; });
    std::vector<bool> faulted(kPages, false);
    for (const Fault& fault : arena->report().faults) {
      if (fault.page >= 0) faulted[static_cast<size_t>(fault.page)] = true;
    }
    for (uint64_t page = 0; page < kPages; ++page) {
      if (states[page] == kLeaving && !faulted[page]) states[page] = kOut;
    }
    wait_until(*arena, [&](const ArenaReport& report) { return report.created + report.refused == more; });
    // What is quarantined may go at any time, but then there is a fault.
    if (arena->report().faults.empty()) CHECK(arena->report().held_bytes == live().bytes);
  }
  over = true;
  other.join();
  for (int attempt = 1;; ++attempt) {
    try {
      arena->close();
      break;
    } catch (const DriverError&) {
      CHECK(attempt < 20);
    }
  }
  const FakecudaLive left = live();
  CHECK(left.handles == 0 && left.mappings == 0 && left.reservations == 0 && left.bytes == 0);
}

}  // namespace

int main() {
  fakecuda_set_data(false);
  for (unsigned seed = 1; seed <= 3; ++seed) books_are_exact_whatever_fails(seed);
  const FakecudaLive left = live();
  CHECK(left.contexts == 0 && left.events == 0);
  std::puts("passed");
}
