#include "arena.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

namespace kvquota {
namespace {

std::string text(uint64_t number) { return std::to_string(number); }

void check_distinct(std::vector<uint64_t> pages) {
  std::sort(pages.begin(), pages.end());
  const auto twice = std::adjacent_find(pages.begin(), pages.end());
  if (twice != pages.end())
    throw std::invalid_argument("page " + text(*twice) + " is named twice in one command");
}

}  // namespace

Arena::Arena(std::shared_ptr<Driver> driver, std::vector<uint64_t> strides, uint64_t pages)
    : ForkAware(Order::kArena), mapper_(std::move(driver), std::move(strides), pages) {
  enlist();
  try {
    const Lock lock(mutex_);
    event_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd for an arena");
    start_worker();
  } catch (...) {
    delist();
    if (event_fd_ >= 0) ::close(event_fd_);
    mapper_.free_addresses();
    throw;
  }
}

Arena::~Arena() {
  try {
    close();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvquota: an arena could not give everything back: %s\n", error.what());
  }
  if (event_fd_ >= 0) ::close(event_fd_);
  delist();
}

void Arena::check_open() const {
  if (forked_) throw std::invalid_argument("the arena belongs to the process that this one was forked from");
  if (closing_) throw std::invalid_argument("the arena is closed");
}

void Arena::check_command(uint64_t seq, const std::vector<uint64_t>& maps,
                          const std::vector<uint64_t>& unmaps) const {
  if (last_seq_ && seq <= *last_seq_) {
    throw std::invalid_argument("seq " + text(seq) + " after " + text(*last_seq_) + ": a seq only grows");
  }
  check_distinct(maps);
  check_distinct(unmaps);
  for (const uint64_t page : maps) {
    if (page >= mapper_.pages()) {
      throw std::invalid_argument("page " + text(page) + " of an arena of " + text(mapper_.pages()) +
                                  " pages");
    }
    if (states_.count(page) != 0) {
      throw std::invalid_argument("page " + text(page) +
                                  " can't be mapped: it is mapped, or not yet unmapped");
    }
  }
  for (const uint64_t page : unmaps) {
    const auto found = states_.find(page);
    if (found == states_.end() || found->second != State::kMapped) {
      throw std::invalid_argument("page " + text(page) +
                                  " can't be unmapped: it is not mapped, or is unmapped already");
    }
  }
  if (maps.size() > credits_.size()) {
    throw std::invalid_argument("mapping " + text(maps.size()) + " pages takes as many credits, and " +
                                text(credits_.size()) +
                                " are held: ask for them and wait until they are created");
  }
}

uint64_t Arena::pending() const {
  const uint64_t answered = books_.created + books_.refused;
  return asked_ > answered ? asked_ - answered : 0;
}

uint64_t Arena::drops_due() const {
  const uint64_t under_way = books_.dropped + (dropping_ ? 1 : 0);
  return drop_wanted_ > under_way ? drop_wanted_ - under_way : 0;
}

// Drops what is not created yet, then what was refused. What the worker is creating is past that.
void Arena::cancel() {
  const uint64_t wanted = drops_due();
  const uint64_t open = pending() > 0 && creating_ ? pending() - 1 : pending();
  const uint64_t cancelled = std::min(wanted, open);
  // The leader may not have known of a refusal when it dropped.
  const uint64_t unrefused = std::min(wanted - cancelled, books_.refused);
  books_.refused -= unrefused;
  books_.created += cancelled + unrefused;
  books_.dropped += cancelled + unrefused;
  if (cancelled + unrefused > 0) ring();
}

void Arena::ring() {
  const uint64_t one = 1;
  // A full counter is as readable as one that was rung.
  if (write(event_fd_, &one, sizeof one) < 0 && errno != EAGAIN) {
    std::fprintf(stderr, "kvquota: an arena's eventfd was closed by someone else\n");
  }
  worker_->changed.notify_all();
}

void Arena::add_fault(uint64_t seq, int64_t page, const DriverError& error) {
  end_faults(page, error.operation.c_str());
  books_.faults.push_back({seq, page, error.operation, error.code, error.name});
}

void Arena::end_faults(int64_t page, const char* operation) {
  auto& faults = books_.faults;
  faults.erase(std::remove_if(faults.begin(), faults.end(),
                              [&](const Fault& fault) {
                                return fault.page == page &&
                                       (operation == nullptr || fault.operation == operation);
                              }),
               faults.end());
}

bool Arena::has_fault(uint64_t page) const {
  return std::any_of(books_.faults.begin(), books_.faults.end(),
                     [&](const Fault& fault) { return fault.page == static_cast<int64_t>(page); });
}

void Arena::ask(uint64_t asked, uint64_t dropped) {
  const Lock lock(mutex_);
  check_open();
  if (dropped > asked) {
    throw std::invalid_argument("dropped is " + text(dropped) + ", more than the " + text(asked) +
                                " asked for");
  }
  asked_ = std::max(asked_, asked);
  drop_wanted_ = std::max(drop_wanted_, dropped);
  cancel();
  worker_->wanted.notify_one();
}

void Arena::apply(uint64_t seq, const std::vector<uint64_t>& maps, const std::vector<uint64_t>& unmaps) {
  PageSet pages;
  Lock lock(mutex_);
  check_open();
  check_command(seq, maps, unmaps);
  for (const uint64_t page : maps) {
    states_[page] = State::kMapping;
    pages.emplace(page, std::move(credits_.back()));
    credits_.pop_back();
  }
  for (const uint64_t page : unmaps) states_[page] = State::kRetiring;
  ++applying_;
  lock.unlock();

  Job job{seq, {}, {}};
  try {
    if (!unmaps.empty()) PageMapper::insist([&] { job.fence = driver().event_record(); });
  } catch (const DriverError&) {
    // The worker will record one itself, and says so where it can't either.
  }
  std::optional<DriverError> failed;
  std::vector<PageError> stuck;
  try {
    mapper_.map(pages, stuck);
  } catch (const DriverError& error) {
    failed = error;
  }

  lock.lock();
  for (const uint64_t page : maps) states_[page] = State::kMapped;
  mapped_.merge(pages);
  books_.mapped += maps.size();
  for (const uint64_t page : unmaps) job.pages.insert(mapped_.extract(page));
  last_seq_ = seq;
  if (job.pages.empty() && jobs_.empty()) {
    books_.done = seq;
  } else {
    jobs_.push_back(std::move(job));
    worker_->wanted.notify_one();
  }
  if (failed) {
    for (const uint64_t page : maps) add_fault(seq, static_cast<int64_t>(page), *failed);
    for (const PageError& error : stuck) add_fault(seq, static_cast<int64_t>(error.page), error.error);
  }
  --applying_;
  ring();
  if (failed) throw *failed;
}

uint64_t Arena::wait_credits(uint64_t count, std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  check_open();
  worker_->changed.wait_for(lock, timeout,
                            [&] { return closing_ || books_.created >= count || pending() == 0; });
  check_open();
  return books_.created;
}

ArenaReport Arena::report() {
  const Lock lock(mutex_);
  check_open();
  ArenaReport report = books_;
  const uint64_t pages =
      credits_.size() + states_.size() + leftovers_.size() + (creating_ ? 1 : 0) + (dropping_ ? 1 : 0);
  report.held_bytes = pages * mapper_.page_bytes();
  report.quarantined_credits = leftovers_.size();
  return report;
}

int Arena::fileno() {
  const Lock lock(mutex_);
  check_open();
  return event_fd_;
}

void Arena::retain() {
  const Lock lock(mutex_);
  check_open();
  ++tensors_;
}

void Arena::release() noexcept {
  const Lock lock(mutex_);
  --tensors_;
}

void Arena::close() {
  {
    Lock lock(mutex_);
    if (forked_ || giving_back_ || closed_) return;
    if (tensors_ > 0) {
      throw ArenaInUseError(text(tensors_) +
                            " tensors over the arena are alive: let go of them before closing it");
    }
    closing_ = true;
    giving_back_ = true;
    ring();
    worker_->changed.wait(lock, [&] { return applying_ == 0; });
    worker_->wanted.notify_one();
  }
  if (worker_->thread.joinable()) worker_->thread.join();
  const std::optional<DriverError> error = give_all_back();
  const Lock lock(mutex_);
  giving_back_ = false;
  if (error) throw *error;
  closed_ = true;
  ::close(event_fd_);
  event_fd_ = -1;
}

std::optional<DriverError> Arena::give_all_back() {
  std::optional<DriverError> first;
  const auto attempt = [&](auto step) {
    try {
      step();
    } catch (const DriverError& error) {
      if (!first) first = error;
    }
  };
  mapped_.merge(quarantined_);
  if (!mapped_.empty()) {
    Fence fence;
    attempt([&] {
      pass_fence(fence);
      for (const PageError& failed : mapper_.unmap(mapped_)) {
        if (!first) first = failed.error;
      }
      for (auto& [page, memory] : mapped_) {
        if (!memory.is_mapped()) attempt([&, &memory = memory] { mapper_.release(memory); });
      }
    });
    for (auto page = mapped_.begin(); page != mapped_.end();) {
      page = page->second.handles.empty() ? mapped_.erase(page) : std::next(page);
    }
    if (fence) attempt([&] { destroy_fence(*fence); });
  }
  for (auto* group : {&credits_, &leftovers_}) {
    for (PageMemory& memory : *group) {
      attempt([&] { mapper_.release(memory); });
    }
    forget_released(*group);
  }
  if (mapped_.empty()) attempt([&] { mapper_.free_addresses(); });
  return first;
}

void Arena::before_fork() { mutex_.lock(); }

void Arena::after_fork_in_parent() { mutex_.unlock(); }

void Arena::after_fork_in_child() {
  forked_ = true;
  (void)worker_.release();
  if (event_fd_ >= 0) ::close(event_fd_);
  event_fd_ = -1;
  mutex_.unlock();
}

}  // namespace kvquota
