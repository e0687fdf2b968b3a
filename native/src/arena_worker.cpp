// The arena's own thread: unmaps first, then gives credits back, then creates them, one page at a time.
#include <pthread.h>
#include <signal.h>

#include <utility>

#include "arena.h"

namespace kvquota {

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
    const auto idle = [&] { return closing_ ? applying_ > 0 : !droppable() && pending() == 0; };
    worker_->wanted.wait(lock, [&] { return !jobs_.empty() || !idle(); });
    if (!jobs_.empty()) {
      retire_next(lock);
    } else if (closing_) {
      return;
    } else if (droppable()) {
      drop_one(lock);
    } else {
      create_one(lock);
    }
  }
}

// Unmaps and releases; what is left in the job's pages afterwards is still mapped, or not all released.
std::vector<PageError> Arena::retire(Job& job) {
  if (job.pages.empty()) return {};
  std::vector<PageError> failed;
  try {
    PageMapper::insist([&] { driver().event_synchronize(job.fence); });
    failed = mapper_.unmap(job.pages);
  } catch (const DriverError& error) {
    for (const auto& [page, memory] : job.pages) failed.push_back({page, error.at(page)});
    return failed;
  }
  for (auto page = job.pages.begin(); page != job.pages.end();) {
    if (page->second.is_mapped()) {
      ++page;
      continue;
    }
    try {
      mapper_.release(page->second);
      page = job.pages.erase(page);
    } catch (const DriverError& error) {
      failed.push_back({page->first, error.at(page->first)});
      ++page;
    }
  }
  return failed;
}

void Arena::retire_next(Lock& lock) {
  Job& job = jobs_.front();
  std::vector<uint64_t> pages;
  for (const auto& [page, memory] : job.pages) pages.push_back(page);
  lock.unlock();
  const std::vector<PageError> failed = retire(job);
  std::optional<DriverError> fence_error;
  if (!pages.empty()) {
    try {
      driver().event_destroy(job.fence);
    } catch (const DriverError& error) {
      fence_error = error;
    }
  }
  lock.lock();
  for (const uint64_t page : pages) {
    const auto left = job.pages.find(page);
    if (left != job.pages.end()) {
      quarantine(page, std::move(left->second));
    } else {
      states_.erase(page);
      ++books_.unmapped;
    }
  }
  for (const PageError& error : failed) add_fault(job.seq, static_cast<int64_t>(error.page), error.error);
  if (fence_error) add_fault(job.seq, Fault::kNoPage, *fence_error);
  books_.done = job.seq;
  jobs_.pop_front();
  ring();
}

// After a failed call for a credit: what could not be given back stays accounted.
void Arena::keep_leftover(PageMemory memory, const DriverError& error) {
  add_fault(last_seq_.value_or(0), Fault::kNoPage, error);
  if (!memory.handles.empty()) leftovers_.push_back(std::move(memory));
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
