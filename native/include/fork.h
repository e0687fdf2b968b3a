// What must survive a fork() in order: every live ForkAware object is locked before it and unlocked after it,
// and told in the child that it is no longer its own. A forked child must keep no memory of its parent alive.
#pragma once

namespace kvquota {

class ForkAware {
 public:
  // Locks are taken in this order; an object may call into those after it while it holds its own.
  enum class Order { kArena, kDriver, kRecord };

  ForkAware(const ForkAware&) = delete;
  ForkAware& operator=(const ForkAware&) = delete;

  virtual void before_fork() = 0;
  virtual void after_fork_in_parent() = 0;
  // Unlock, close descriptors, and do nothing more: only async-signal-safe calls are allowed here.
  virtual void after_fork_in_child() = 0;

 protected:
  explicit ForkAware(Order order) : order_(order) {}
  virtual ~ForkAware() = default;

  // The object's constructor and destructor call these, so that a fork sees it only while it is whole.
  void enlist();
  void delist();

 private:
  friend struct ForkRegistry;
  const Order order_;
};

}  // namespace kvquota
