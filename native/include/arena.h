// The elastic memory of one rank: a reserved range of addresses for all KV tensors, backed page by page.
//
// One worker thread creates credits ahead, unmaps behind fences, and tries again what did not go. What it
// unmaps while credits are to be created becomes those; all other memory goes back to the driver. No lock is
// held during a driver call.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "driver.h"
#include "fork.h"
#include "page_mapper.h"

namespace kvquota {

// A call that failed, and that nothing has made good yet. That of a page stands until the page's memory is
// released; another one until the same call succeeds.
struct Fault {
  // Of a call that was for no page: a credit that could not be created or given back.
  static constexpr int64_t kNoPage = -1;

  uint64_t seq;
  int64_t page;
  std::string operation;
  int code;
  std::string name;
};

// One instant. Counts are pages, cumulative. A credit that is dropped before it was created counts as created
// too, so the credits held are always created - mapped - dropped.
struct ArenaReport {
  uint64_t done = 0;
  uint64_t created = 0;
  uint64_t refused = 0;
  uint64_t dropped = 0;
  uint64_t mapped = 0;
  uint64_t unmapped = 0;
  // Credits given back of which memory could not be released.
  uint64_t quarantined_credits = 0;
  uint64_t held_bytes = 0;
  // Those that stand now: the newest of each page and operation.
  std::vector<Fault> faults;
};

// close() while tensors over the arena live.
class ArenaInUseError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

class Arena final : public ForkAware {
 public:
  Arena(std::shared_ptr<Driver> driver, std::vector<uint64_t> strides, uint64_t pages);
  // Closes. What can't be given back is told on stderr.
  ~Arena() override;

  const PageMapper& layout() const { return mapper_; }

  // Both cumulative: a lower number than before is an old message and changes nothing.
  void ask(uint64_t asked, uint64_t dropped);
  // Maps now, and unmaps behind the work submitted so far. On a DriverError the command counts all the same:
  // its unmaps are on their way, and none of its maps can be used. Those hold their memory until they are
  // unmapped, as any mapped page. On another exception nothing of it was done.
  void apply(uint64_t seq, const std::vector<uint64_t>& maps, const std::vector<uint64_t>& unmaps);
  // Returns what was created so far, once that is `count` or nothing more is to come.
  uint64_t wait_credits(uint64_t count, std::chrono::nanoseconds timeout);
  ArenaReport report();
  // An eventfd, readable since the report changed. Its reader drains it.
  int fileno();
  // Count the tensors over the arena.
  void retain();
  void release() noexcept;
  // Waits for queued unmaps, then gives everything back. Throws the first DriverError after trying all: then
  // another call tries again what is left.
  void close();

  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

 private:
  using Lock = std::unique_lock<std::mutex>;
  enum class State { kMapping, kMapped, kRetiring, kQuarantined };
  using Fence = std::optional<Driver::Event>;
  struct Job {
    uint64_t seq;
    // None where it could not be recorded: one of later will do.
    Fence fence;
    PageSet pages;
  };
  // Leaked in a forked child: the thread is not there, and destroying what it waits on would hang.
  struct Worker {
    std::condition_variable wanted;
    std::condition_variable changed;
    std::thread thread;
  };

  Driver& driver() const { return mapper_.driver(); }
  void check_open() const;
  void check_command(uint64_t seq, const std::vector<uint64_t>& maps,
                     const std::vector<uint64_t>& unmaps) const;
  uint64_t pending() const;
  uint64_t drops_due() const;
  void cancel();
  void ring();
  void add_fault(uint64_t seq, int64_t page, const DriverError& error);
  // All of the page's, or those of one operation.
  void end_faults(int64_t page, const char* operation = nullptr);
  bool has_fault(uint64_t page) const;

  void start_worker();
  void work();
  void drop_one(Lock& lock);
  void create_one(Lock& lock);
  void retry(Lock& lock);
  void try_again_later();
  void keep_leftover(PageMemory memory, const DriverError& error);
  void retire(Lock& lock, uint64_t seq, PageSet& pages, Fence fence);
  void give_back(Lock& lock, uint64_t seq, PageSet& pages);
  bool recycle(uint64_t page, PageMemory& memory);
  void quarantine(uint64_t page, PageMemory memory);
  void pass_fence(Fence& fence);
  void destroy_fence(Driver::Event fence);
  static void forget_released(std::vector<PageMemory>& group);

  std::optional<DriverError> give_all_back();

  PageMapper mapper_;
  mutable std::mutex mutex_;
  std::unique_ptr<Worker> worker_ = std::make_unique<Worker>();
  int event_fd_ = -1;
  bool closing_ = false;
  bool giving_back_ = false;
  bool closed_ = false;
  bool forked_ = false;
  unsigned tensors_ = 0;
  unsigned applying_ = 0;

  // What the leader wants in all, and the books that answer it.
  uint64_t asked_ = 0;
  uint64_t drop_wanted_ = 0;
  ArenaReport books_;
  std::optional<uint64_t> last_seq_;

  // The page's worth that the worker is creating or giving back.
  bool creating_ = false;
  bool dropping_ = false;
  std::vector<PageMemory> credits_;
  // Pages that are not mapped have no entry.
  std::unordered_map<uint64_t, State> states_;
  PageSet mapped_;
  // What did not go, of pages and of credits: only the worker touches it while it runs.
  PageSet quarantined_;
  std::vector<PageMemory> leftovers_;
  int retries_left_ = 0;
  std::chrono::nanoseconds retry_after_{};
  std::chrono::steady_clock::time_point retry_at_;
  std::deque<Job> jobs_;
};

}  // namespace kvquota
