// The arena's own thread: unmaps first, then gives credits back, then creates them, one page at a time.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "arena.h"

namespace kvquota {
namespace {

// What did not go is tried again after this long, then after twice as long, and so on.
constexpr auto kFirstRetry = std::chrono::milliseconds(100);
constexpr int kRetries = 8;

}  // namespace

void Arena::start_worker() {
  // Signals are for the engine's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    worker_->thread = std::thread([this] { work(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(worker_->thread.native_handle(), "kvquota-arena");
}

void Arena::work() {
  Lock lock(mutex_);
  for (;;) {
    const auto droppable = [&] { return drops_due() > 0 && !credits_.empty(); };
    const auto retry_due = [&] {
      return retries_left_ > 0 && std::chrono::steady_clock::now() >= retry_at_;
    };
    const auto due = [&] {
      if (!jobs_.empty()) return true;
      return closing_ ? applying_ == 0 : droppable() || pending() > 0 || retry_due();
    };
    if (retries_left_ > 0 && !closing_) {
      worker_->wanted.wait_until(lock, retry_at_, due);
    } else {
      worker_->wanted.wait(lock, due);
    }
    if (!jobs_.empty()) {
      const uint64_t seq = jobs_.front().seq;
      retire(lock, seq, jobs_.front().pages, jobs_.front().fence);
      books_.done = seq;
      jobs_.pop_front();
      ring();
    } else if (closing_) {
      if (applying_ == 0) return;
    } else if (retry_due()) {
      retry(lock);
    } else if (droppable()) {
      drop_one(lock);
    } else if (pending() > 0) {
      create_one(lock);
    }
  }
}

void Arena::pass_fence(Fence& fence) {
  // Behind at least the work that was submitted when the command came.
  if (!fence) PageMapper::insist([&] { fence = driver().event_record(); });
  PageMapper::insist([&] { driver().event_synchronize(*fence); });
}

void Arena::destroy_fence(Driver::Event fence) {
  PageMapper::insist([&] { driver().event_destroy(fence); });
}

// Takes the memory of a page that was unmapped for a credit that is to be created. Never that of a page on
// which a call failed: that goes back to the driver.
bool Arena::recycle(uint64_t page, PageMemory& memory) {
  if (pending() == 0 || has_fault(page)) return false;
  credits_.push_back(std::move(memory));
  ++books_.created;
  end_faults(Fault::kNoPage, op::kMemCreate);
  return true;
}

// Behind their fence. Quarantines what does not go.
void Arena::give_back(Lock& lock, uint64_t seq, PageSet& pages) {
  lock.unlock();
  const std::vector<PageError> failed = mapper_.unmap(pages);
  lock.lock();
  for (const PageError& error : failed) add_fault(seq, static_cast<int64_t>(error.page), error.error);
  bool recycled = false;
  for (auto& [page, memory] : pages) {
    bool gone = !memory.is_mapped();
    if (gone && recycle(page, memory)) {
      recycled = true;
    } else if (gone) {
      lock.unlock();
      std::optional<DriverError> error;
      try {
        mapper_.release(memory);
      } catch (const DriverError& caught) {
        error = caught;
      }
      lock.lock();
      if (error) add_fault(seq, static_cast<int64_t>(page), *error);
      gone = !error;
    }
    if (gone) {
      states_.erase(page);
      end_faults(static_cast<int64_t>(page));
      ++books_.unmapped;
    } else {
      quarantine(page, std::move(memory));
    }
  }
  if (recycled) ring();
}

void Arena::quarantine(uint64_t page, PageMemory memory) {
  states_[page] = State::kQuarantined;
  quarantined_.emplace(page, std::move(memory));
  try_again_later();
}

void Arena::retire(Lock& lock, uint64_t seq, PageSet& pages, Fence fence) {
  if (pages.empty()) return;
  lock.unlock();
  std::optional<DriverError> not_passed;
  try {
    pass_fence(fence);
  } catch (const DriverError& error) {
    not_passed = error;
  }
  lock.lock();
  while (!pages.empty()) {
    PageSet group;
    while (!pages.empty() && group.size() < mapper_.pages_at_once()) {
      group.insert(pages.extract(pages.begin()));
    }
    if (!not_passed) {
      give_back(lock, seq, group);
      continue;
    }
    for (auto& [page, memory] : group) {
      add_fault(seq, static_cast<int64_t>(page), not_passed->at(page));
      quarantine(page, std::move(memory));
    }
  }
  if (!fence) return;
  lock.unlock();
  std::optional<DriverError> not_destroyed;
  try {
    destroy_fence(*fence);
  } catch (const DriverError& error) {
    not_destroyed = error;
  }
  lock.lock();
  if (not_destroyed) {
    add_fault(seq, Fault::kNoPage, *not_destroyed);
  } else {
    end_faults(Fault::kNoPage, op::kEventDestroy);
  }
}

void Arena::try_again_later() {
  retries_left_ = kRetries;
  retry_after_ = kFirstRetry;
  retry_at_ = std::chrono::steady_clock::now() + retry_after_;
}

void Arena::retry(Lock& lock) {
  const int left = retries_left_ - 1;
  const auto after = 2 * retry_after_;
  PageSet pages = std::move(quarantined_);
  quarantined_.clear();
  retire(lock, last_seq_.value_or(0), pages, {});
  lock.unlock();
  std::optional<DriverError> failed;
  for (PageMemory& memory : leftovers_) {
    try {
      mapper_.release(memory);
    } catch (const DriverError& error) {
      failed = error;
    }
  }
  lock.lock();
  forget_released(leftovers_);
  if (failed) {
    add_fault(last_seq_.value_or(0), Fault::kNoPage, *failed);
  } else {
    end_faults(Fault::kNoPage, op::kMemRelease);
  }
  const bool over = quarantined_.empty() && leftovers_.empty();
  retries_left_ = over ? 0 : left;
  retry_after_ = after;
  retry_at_ = std::chrono::steady_clock::now() + after;
  ring();
}

void Arena::forget_released(std::vector<PageMemory>& group) {
  group.erase(std::remove_if(group.begin(), group.end(),
                             [](const PageMemory& memory) { return memory.handles.empty(); }),
              group.end());
}

// After a failed call for a credit: what could not be given back stays accounted.
void Arena::keep_leftover(PageMemory memory, const DriverError& error) {
  add_fault(last_seq_.value_or(0), Fault::kNoPage, error);
  leftovers_.push_back(std::move(memory));
  try_again_later();
}

void Arena::drop_one(Lock& lock) {
  PageMemory memory = std::move(credits_.back());
  credits_.pop_back();
  dropping_ = true;
  lock.unlock();
  std::optional<DriverError> failed;
  try {
    mapper_.release(memory);
  } catch (const DriverError& error) {
    failed = error;
  }
  lock.lock();
  dropping_ = false;
  ++books_.dropped;
  if (failed) keep_leftover(std::move(memory), *failed);
  ring();
}

void Arena::create_one(Lock& lock) {
  creating_ = true;
  lock.unlock();
  PageMemory memory;
  std::optional<DriverError> failed;
  std::optional<DriverError> not_released;
  try {
    mapper_.create(memory);
  } catch (const DriverError& error) {
    failed = error;
    try {
      mapper_.release(memory);
    } catch (const DriverError& second) {
      not_released = second;
    }
  }
  lock.lock();
  creating_ = false;
  if (!failed) {
    credits_.push_back(std::move(memory));
    ++books_.created;
    end_faults(Fault::kNoPage, op::kMemCreate);
  } else {
    // Nothing is tried again before the leader asks again.
    books_.refused += pending();
    cancel();
    if (!failed->out_of_memory()) add_fault(last_seq_.value_or(0), Fault::kNoPage, *failed);
    if (not_released) keep_leftover(std::move(memory), *not_released);
  }
  ring();
}

}  // namespace kvquota
